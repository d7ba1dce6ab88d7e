"""Networks of other libraries; `make test-interop` has them. Their warnings are not ours to heed."""

import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        if "interop" in item.path.parts:
            item.add_marker(pytest.mark.filterwarnings("ignore"))
