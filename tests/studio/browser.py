"""A real browser for tests: found on this machine, never downloaded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["AXE", "BROWSERS", "FLAGS", "find_browser", "launched", "missing", "watched"]

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
# Root needs --no-sandbox; the others keep the browser from calling home, and from drawing the page itself with an
# emulated GPU, which is slow. WebGL (crystals) is emulated.
FLAGS = [
    *("--no-sandbox", "--no-first-run", "--disable-quic", "--disable-sync", "--disable-component-update"),
    *("--disable-background-networking", "--disable-gpu", "--enable-unsafe-swiftshader"),
]
AXE = Path(__file__).parent / "vendor" / "axe.min.js"


def find_browser() -> str | None:
    """Return the path of a Chromium, which FMWC_CHROMIUM may name."""
    return os.environ.get("FMWC_CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)


def missing() -> str:
    """Return why there is no browser; empty if there is one."""
    try:
        import playwright  # noqa: F401
    except ImportError:
        return "playwright is not installed; run pip install playwright (it needs no browser of its own)"
    if find_browser() is None:
        names = ", ".join(BROWSERS)
        return f"no Chromium was found ({names}); apt-get install chromium, or set FMWC_CHROMIUM to its path"
    return ""


@contextmanager
def launched() -> Iterator[Any]:
    """Start the browser without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=find_browser(), args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def watched(browser: Any, host: str, **options: Any) -> Iterator[Any]:
    """Open a page; at the end, fail if it asked another machine for anything, or if its console shows an error."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, "accept_downloads": True, **options})
    context.set_default_timeout(60_000)
    problems: list[str] = []

    def request(sent: Any) -> None:
        if not sent.url.startswith((f"http://{host}/", "data:", "blob:", "file:")):
            problems.append(f"request to {sent.url}")

    def console(message: Any) -> None:
        if message.type == "error" and message.text not in page.expected:
            problems.append(f"console: {message.text}")

    page = context.new_page()
    page.expected = set()
    context.on("request", request)
    page.on("console", console)
    page.on("pageerror", lambda error: problems.append(f"error: {error}"))
    try:
        yield page
        assert not problems, problems
    finally:
        context.close()
