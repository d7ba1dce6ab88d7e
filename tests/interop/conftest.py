"""Networks of other libraries, run by `make test-interop`; their own warnings are ignored."""

import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        if "interop" in item.path.parts:
            item.add_marker(pytest.mark.filterwarnings("ignore"))
