"""The documentation's own extensions: every public name has a place, and faults of a built site are found."""

import re
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.studio.browser import launched, missing, watched

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(autouse=True)
def extensions(monkeypatch):
    pytest.importorskip("sphinx")
    monkeypatch.syspath_prepend(str(DOCS / "_ext"))
    yield
    for name in ("reference", "offline", "mathml", "measurements"):
        sys.modules.pop(name, None)


@pytest.mark.filterwarnings("ignore")  # warnings of the packages that the modules import
def test_every_public_name_is_in_the_api_reference():
    import reference

    text = "\n".join(reference.pages().values())
    documented = set(re.findall(r"^\.\. auto\w+:: (\S+)$", text, re.M))
    linked = dict(re.findall(r"``(\S+)`` \(:py:obj:`(\S+)`\)", text))
    names = {f"{name}.{word}" for name, module in reference.modules().items() for word in reference.names_of(module)}
    assert len(names) > 500
    assert names <= documented | linked.keys()
    assert set(linked.values()) <= documented
    assert {"fmwc.sample", "fmwc.uses.risk.risk_control", "fmwc.estimators.Linearised"} <= documented


def test_every_command_and_option_is_in_the_command_reference():
    import typer

    import reference
    from fmwc.cli.verbs import app

    sections = dict(re.findall(r"^## fmwc (\S+)\n(.*?)(?=^## |\Z)", reference.commands(), re.M | re.S))
    group = typer.main.get_command(app)
    commands = {"COMMAND": group, **group.commands}
    assert sections.keys() == commands.keys()
    for name, command in commands.items():
        for parameter in command.params:
            for option in parameter.opts:
                shown = option if option.startswith("-") else option.upper()
                assert re.search(rf"`{shown}[ `]", sections[name]), f"fmwc {name} {option}"


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.skipif(not (DOCS / "_build/html/index.html").is_file(), reason="run make docs first, as make test does")
def test_the_site_works_in_a_browser_without_a_network():
    handler = partial(SimpleHTTPRequestHandler, directory=str(DOCS / "_build/html"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, launched() as browser:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        site = f"127.0.0.1:{server.server_port}"
        with watched(browser, site) as page:
            visit(page, f"http://{site}")
        server.shutdown()


def visit(page, site):
    for name in ("index", "how-to/filter", "reference/modules/fmwc.estimators", "notebooks/1-points"):
        page.goto(f"{site}/{name}.html")
        assert page.locator("h1").first.is_visible()
        page.set_viewport_size({"width": 390, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.goto(f"{site}/search.html?q=certificate")
    page.locator("#search-results li a").first.wait_for()
    page.wait_for_load_state("networkidle")
