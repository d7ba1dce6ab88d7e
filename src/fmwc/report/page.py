"""Self-contained HTML pages: styles, figures, data and scripts are embedded in the file."""

from __future__ import annotations

import hashlib
import io
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import matplotlib
import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.colors import ListedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from fmwc.files import write_bytes, write_text
from fmwc.report.table import Table

__all__ = [
    "CONFIDENCE",
    "DASHED",
    "DOTTED",
    "DOUBTFUL",
    "FAINT",
    "INK",
    "LAYERS",
    "LEGEND_ABOVE",
    "LINES",
    "ONE",
    "PERCENT",
    "STYLE",
    "SURE",
    "TIME",
    "TWO",
    "Picture",
    "Script",
    "Section",
    "Tile",
    "png",
    "render",
    "styled",
    "svg",
    "write_page",
    "write_pictures",
]


# ---- style -----------------------------------------------------------------------------------------------------------

INK = "#23262d"
FAINT = "#8a8f99"

# Plasma is perceptually uniform and colour-blind safe. Its yellow end is omitted, because it is invisible on white.
CONFIDENCE = ListedColormap(matplotlib.colormaps["plasma"](np.linspace(0.80, 0.03, 256)), name="confidence")
SURE, DOUBTFUL = to_hex(CONFIDENCE(1.0)), to_hex(CONFIDENCE(0.0))
LINES = (SURE, "#d1495b", "#00798c", "#edae49", "#66717e", "#7a9e3f", "#b07aa1")
LAYERS = matplotlib.colormaps["viridis"]  # an ordered colour map, because layers are ordered

DASHED, DOTTED = (0, (4, 3)), (0, (1, 2))
LEGEND_ABOVE: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "borderaxespad": 0.2}

ONE, TWO = (5.8, 4.0), (9.2, 4.3)  # figure sizes in inches, for one and two panels
TIME = "time t   (0: noise, 1: sample)"
PERCENT = FuncFormatter(lambda value, _: f"{100 * value:.3g}%")

STYLE: dict[str, Any] = {
    "axes.edgecolor": FAINT,
    "axes.grid": False,
    "axes.labelcolor": INK,
    "axes.labelsize": 10.5,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "figure.constrained_layout.use": True,
    "figure.titlesize": 12,
    "font.family": "DejaVu Sans",  # ships with matplotlib, so figures are the same on every machine
    "font.size": 10,
    "legend.fontsize": 9.5,
    "legend.frameon": False,
    "lines.linewidth": 2.0,
    "svg.fonttype": "path",  # pages need no fonts
    "svg.hashsalt": "fmwc",  # reproducible files
    "text.color": INK,
    "xtick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.color": FAINT,
    "ytick.labelcolor": INK,
}

# A decorator for whole functions, because matplotlib reads its settings when an artist is created.
styled = matplotlib.rc_context(STYLE)


@styled
def png(figure: Figure, dpi: int = 160) -> bytes:
    """Return the figure as a PNG file."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=dpi, facecolor="white", metadata={"Software": None})
    return file.getvalue()


@styled
def svg(figure: Figure, dpi: int = 160) -> str:
    """Return the figure as an `<svg>` element with text as paths; `dpi` applies to rasterised parts."""
    file = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(file, format="svg", dpi=dpi, facecolor="white", metadata=nothing)
    text = file.getvalue()
    return text[text.index("<svg") :]


# ---- page ------------------------------------------------------------------------------------------------------------

WIDE = 640  # pixels; on a phone, wider figures scroll and narrower ones shrink
_TEMPLATES = Environment(
    loader=PackageLoader("fmwc.report"),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)


class Picture(NamedTuple):
    """A figure on a page.

    Attributes:
        name: Name of its PNG file, without the suffix.
        alt: Alternative text.
        figure: The figure.
    """

    name: str
    alt: str
    figure: Figure

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        width, height = (round(96 * inches) for inches in self.figure.get_size_inches())
        return width, height

    @property
    def wide(self) -> bool:
        return self.size[0] > WIDE

    @property
    def source(self) -> Markup:
        """The figure as a data URI, because the ids of several inline SVG elements would clash."""
        # Percent-encoding is shorter than base64, because embedded pixels are already base64.
        return Markup("data:image/svg+xml,") + Markup(quote(svg(self.figure).replace("\n", " "), safe=" /=;,+()'!*"))


class Script(NamedTuple):
    """A script of a page. Browsers run it only if it has the hash that the head of the page states."""

    text: str

    @property
    def hash(self) -> str:
        """Its hash in the form of a Content-Security-Policy."""
        return f"'sha256-{b64encode(hashlib.sha256(self.text.encode()).digest()).decode()}'"


class Tile(NamedTuple):
    """A headline number of a page, with its name and its colour (`sure`, `doubtful` or `""`)."""

    value: str
    name: str
    kind: str = ""


@dataclass(frozen=True)
class Section:
    """A section of a page. All text is escaped, except `html`.

    Arguments:
        title: Heading.
        caption: Text below the heading.
        pictures: Figures.
        tables: Tables.
        html: Markup below the caption.
        items: Items of a list.
        facts: Names and values, shown as a list of definitions.
        summary: If given, tables and facts are collapsed under this line.
        scripts: Scripts that the markup needs; a page contains each of them once.
    """

    title: str
    caption: str = ""
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    html: Markup = Markup()
    items: Sequence[str] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    summary: str = ""
    scripts: Sequence[Script] = ()


def render(template: str, **values: Any) -> Markup:
    """Render a template of `fmwc/report/templates`; values are escaped."""
    return Markup(_TEMPLATES.get_template(template).render(**values))


def write_page(
    path: Path, title: str, sections: Sequence[Section], *, lead: Sequence[str] = (), tiles: Sequence[Tile] = ()
) -> Path:
    """Write a page.

    Arguments:
        path: The file.
        title: Title and first heading.
        sections: The sections.
        lead: Paragraphs below the title; the first is larger.
        tiles: Headline numbers below the paragraphs.
    """
    scripts = list(dict.fromkeys(script for section in sections for script in section.scripts))
    shared = Markup((files("fmwc") / "web" / "components.css").read_text(encoding="utf-8"))
    values = {"title": title, "sections": sections, "lead": lead, "tiles": tiles, "scripts": scripts, "shared": shared}
    return write_text(path, render("page.html", **values))


def write_pictures(folder: Path, sections: Sequence[Section]) -> list[Path]:
    """Write the pictures of all sections to a folder as PNG files."""
    return [
        write_bytes(folder / f"{picture.name}.png", png(picture.figure))
        for section in sections
        for picture in section.pictures
    ]
