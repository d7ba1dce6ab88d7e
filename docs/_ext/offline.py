"""After the build, check that the site needs no network and that its links lead somewhere."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from sphinx.application import Sphinx
from sphinx.util import logging

LOADED = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "link": "href",
}


class Page(HTMLParser):
    """The anchors of a page, its links, and the files that it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, given: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in given}
        self.anchors.update(values[name] for name in ("id", "name") if values.get(name))
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag in LOADED and values.get(LOADED[tag]):
            self.loaded.append(values[LOADED[tag]])


def problems(folder: Path) -> Iterator[str]:
    """Yield one line for each external file, missing file and missing anchor of a built site."""
    pages = {path: Page(path.read_text()) for path in sorted(folder.rglob("*.html")) if "_downloads" not in path.parts}
    for path, page in pages.items():
        name = path.relative_to(folder)
        for url in page.loaded:
            if urlsplit(url).netloc:
                yield f"{name} loads {url} from the network"
        for url in (*page.links, *page.loaded):
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                yield f"{name} links to {url}, which does not exist"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{name} links to {url}, which has no such anchor"
    for path in sorted(folder.rglob("*.css")):
        text = path.read_text()
        if "url(http" in text or "url(//" in text or "@import" in text:
            yield f"{path.relative_to(folder)} loads a file from the network"


def check(app: Sphinx, error: Exception | None) -> None:
    """Warn of each problem of a finished build."""
    if error is None and app.builder.name == "html":
        for problem in problems(Path(app.outdir).resolve()):
            logging.getLogger(__name__).warning(problem)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("build-finished", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
