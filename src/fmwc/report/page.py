"""One self-contained HTML page: styles, figures, data and script inside it, and nothing fetched from anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from urllib.parse import quote

from matplotlib.figure import Figure

from fmwc.files import write_text
from fmwc.report.look import svg

__all__ = ["Section", "facts", "picture", "tiles", "write_page"]

HERE = Path(__file__).parent
WIDE = 640  # pixels: a wider figure scrolls on a phone, a narrower one shrinks
# The browser itself is told to refuse every request, so that the page cannot phone home even by mistake.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


@dataclass(frozen=True)
class Section:
    """Creates a section of the page.

    Arguments:
        title: Its heading, plain text.
        body: HTML.
        caption: What to see in it, plain text, set above the body.
    """

    title: str
    body: str
    caption: str = ""


def picture(figure: Figure, alt: str) -> str:
    """A figure as an image inside the page, on a white card so that it is legible in the dark scheme too.

    An image rather than inline SVG: the ids of two inline figures would clash.
    """
    source = quote(
        svg(figure).replace("\n", " "), safe=" /=;,+()'!*"
    )  # shorter than base64: pixels inside are base64 already
    width, height = (round(96 * inches) for inches in figure.get_size_inches())
    image = f'<img src="data:image/svg+xml,{source}" width="{width}" height="{height}" alt="{escape(alt)}">'
    kind = 'class="card scroll wide" tabindex="0"' if width > WIDE else 'class="card"'
    return f"<figure {kind}>{image}</figure>"


def tiles(numbers: Sequence[tuple[str, str, str]]) -> str:
    """The main numbers in a row: `(kind, value, name)` each, the kind `sure`, `doubtful` or empty."""
    cells = "".join(
        f'<div><dt>{escape(name)}</dt><dd class="{kind}">{escape(value)}</dd></div>' for kind, value, name in numbers
    )
    return f'<dl class="tiles">{cells}</dl>'


def facts(values: Mapping[str, str]) -> str:
    """A list of names and values."""
    rows = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in values.items())
    return f'<dl class="facts">{rows}</dl>'


def write_page(path: Path, title: str, lead: str, sections: Sequence[Section]) -> Path:
    """Writes the page: a title, a lead (HTML) and the sections, each with its anchor."""
    style = (HERE / "page.css").read_text(encoding="utf-8")
    body = "\n".join(_section(i, section) for i, section in enumerate(sections, 1))
    text = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<main>
<header>
<h1>{escape(title)}</h1>
{lead}
</header>
{body}
</main>
</body>
</html>
"""
    return write_text(path, text)


def _section(number: int, section: Section) -> str:
    caption = f"<p>{escape(section.caption)}</p>\n" if section.caption else ""
    heading = f'<h2 id="heading-{number}">{escape(section.title)}</h2>'
    return f'<section aria-labelledby="heading-{number}">\n{heading}\n{caption}{section.body}\n</section>'
