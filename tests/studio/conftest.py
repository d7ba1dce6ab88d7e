"""One studio for many tests."""

import pytest

from tests.studio.shared import serving


@pytest.fixture(scope="session")
def studio(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("studio") / "studio") as client:
        yield client
