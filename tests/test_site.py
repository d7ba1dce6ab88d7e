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


def test_faults_of_a_site_are_found(tmp_path):
    import offline

    (tmp_path / "a.html").write_text(
        '<h1 id="top"></h1><a href="b.html#end"></a><a href="b.html"></a><a href="#top"></a><a href="https://x.org"></a>'
    )
    (tmp_path / "b.html").write_text('<p id="end"></p><img src="p.png"><script src="s.js?v=1"></script>')
    (tmp_path / "p.png").touch()
    (tmp_path / "s.js").touch()
    (tmp_path / "s.css").write_text("p { background: url(p.png) }")
    assert list(offline.problems(tmp_path)) == []
    (tmp_path / "c.html").write_text(
        '<a href="d.html"></a><a href="a.html#nowhere"></a><img src="q.png">'
        '<script src="https://cdn.org/s.js"></script><link href="//fonts.org/f.css">'
    )
    (tmp_path / "s.css").write_text("@font-face { src: url(https://fonts.org/f.woff) }")
    assert list(offline.problems(tmp_path)) == [
        "c.html loads https://cdn.org/s.js from the network",
        "c.html loads //fonts.org/f.css from the network",
        "c.html links to d.html, which does not exist",
        "c.html links to a.html#nowhere, which has no such anchor",
        "c.html links to q.png, which does not exist",
        "s.css loads a file from the network",
    ]


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


def seen(page: Path) -> list[str]:
    """Return the words that a reader sees: text and tables, without code blocks, pictures and the targets of links."""
    text = page.read_text()
    for hidden in (r"^<!--.*?-->$", r"^```.*?^```$", r"!\[[^\]]*\]\([^)]*\)", r"(?<=\])\([^)]*\)", r"^\|[-:| ]+\|$"):
        text = re.sub(hidden, "", text, flags=re.M | re.S)
    return [word for word in text.split() if re.search(r"\w", word)]


def test_the_readme_is_short():
    assert 300 < len(seen(DOCS.parent / "README.md")) <= 800


def test_pages_are_short():
    long = ("results.md", "method.md")
    pages = [p for p in DOCS.rglob("*.md") if not {"_build", "_results"} & set(p.parts) and p.name not in long]
    assert {page.name: len(seen(page)) for page in pages if len(seen(page)) > 1500} == {}
