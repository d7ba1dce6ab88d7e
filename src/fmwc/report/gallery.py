"""Interactive galleries on report pages: the data of a run, and the scripts of `fmwc/web` that the studio also uses."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from math import ceil
from typing import Any

import numpy as np
from safetensors.numpy import save

from fmwc.report.curves import on_common_times
from fmwc.report.page import Script, Section, render

__all__ = ["KINDS", "UNKNOWN", "gallery", "packed", "packed_curves", "plain_column", "scripts"]

KINDS = ("points", "images", "crystals", "vectors")
UNKNOWN = 255  # in `failed`: the sample was not judged
CURVE_BYTES = 1_000_000  # maximum size of the curves of a page; beyond it, only every k-th sample has one
FLOOR = 1e-12  # minimum standard deviation before taking the logarithm
_WEB = files("fmwc") / "web"
_SMALL = {"f": np.float32, "i": np.int32, "b": np.uint8, "u": np.uint8}


def gallery(
    title: str,
    caption: str,
    kind: str,
    samples: Mapping[str, np.ndarray],
    *,
    score: np.ndarray,
    level: np.ndarray,
    label: str,
    failed: np.ndarray | None = None,
    word: str = "failed",
    columns: Mapping[str, Sequence[Any] | np.ndarray] | None = None,
    titles: Mapping[str, str] | None = None,
    links: Sequence[str] = (),
    support: Sequence[Sequence[float]] = (),
    curves: Mapping[str, Any] | None = None,
    share: float = 1.0,
) -> Section:
    """Return an interactive gallery: samples, a slider that discards doubtful ones, and the selected sample.

    Arguments:
        title, caption: Heading and text of the section.
        kind: One of :data:`KINDS`.
        samples: Arrays by name. Points and vectors: `x`, `(B, D)`. Images: `x`, `(B, H, W)` or `(B, H, W, 3)` bytes.
            Crystals: the arrays of :func:`fmwc.crystals.structures.arrays_of`.
        score: High = doubtful, `(B,)`.
        level: Confidence or rank in [0, 1], `(B,)`.
        label: `confidence` or `rank`, shown to the reader.
        failed: 1 for failed samples, 0 for others, :data:`UNKNOWN` for those that were not judged; `None` if none was.
        word: The word for failed samples.
        columns: Table of the samples.
        titles: Readable names of its columns.
        links: Address of each sample's file, relative to the page; empty if it has none.
        support: Rectangles of the plane that hold the data: left, bottom, right and top.
        curves: The result of :func:`packed_curves`.
        share: The share that the slider keeps at first.
    """
    tensors = dict(samples) | {"level": level, "score": score, "order": np.argsort(score, kind="stable")}
    if failed is not None:
        tensors["failed"] = np.asarray(failed, dtype=np.uint8)
    about: dict[str, Any] = {
        "kind": kind,
        "label": label,
        "word": word,
        "support": [list(map(float, cell)) for cell in support],
    }
    if curves is not None:
        tensors |= {f"curve.{name}": codes for name, codes in curves["codes"].items()}
        about["curves"] = {name: curves[name] for name in ("times", "stride", "range")}
    data = {
        "about": {**about, "share": share, "links": list(links)},
        "table": {"columns": {n: plain_column(v) for n, v in (columns or {}).items()}, "titles": dict(titles or {})},
        "tensors": b64encode(packed(tensors)).decode(),
    }
    return Section(title, caption, html=render("gallery.html", data=data), scripts=scripts(kind == "crystals"))


def packed(tensors: Mapping[str, np.ndarray], about: Mapping[str, str] | None = None) -> bytes:
    """Return arrays as a safetensors file in types that scripts can read: float32, int32 or bytes."""
    ready = {name: np.ascontiguousarray(value, dtype=_SMALL[value.dtype.kind]) for name, value in tensors.items()}
    return save(ready, dict(about) if about else None)


def packed_curves(
    times: np.ndarray, std: Mapping[str, np.ndarray], score: np.ndarray, stride: int = 1
) -> dict[str, Any] | None:
    """Return variance curves in 8 bits on a logarithmic scale, which is finer than screen resolution.

    Arguments:
        times: Times of the readings, `(R, B)`.
        std: ‖σ_t‖ at these times by channel, `(R, B)` each.
        score: Score of all samples, by which the curves are sorted.
        stride: If larger than 1, the curves are those of every `stride`-th sample in order of score; otherwise those of
            all samples, thinned out if they are too many.

    Returns:
        `None` if there are no readings.
    """
    if not len(times):
        return None
    shared = {name: on_common_times(times, value) for name, value in std.items()}
    grid = next(iter(shared.values()))[0]
    values = {name: value for name, (_, value) in shared.items()}
    if stride == 1:
        order = np.argsort(score, kind="stable")
        stride = ceil(sum(value.size for value in values.values()) / CURVE_BYTES)
        values = {name: value[:, order[::stride]] for name, value in values.items()}
    logs = {name: np.log(np.maximum(value.T, FLOOR)) for name, value in values.items()}
    low, high = min(v.min() for v in logs.values()), max(v.max() for v in logs.values())
    codes = {n: (255 * (v - low) / max(high - low, 1e-30)).round().astype(np.uint8) for n, v in logs.items()}
    about = {"times": [round(float(t), 4) for t in grid], "stride": stride, "range": [float(low), float(high)]}
    return {**about, "codes": codes}


def plain_column(column: Sequence[Any] | np.ndarray) -> list[Any]:
    """Return a column as JSON values; NaN becomes `None`."""
    values = (value.item() if isinstance(value, np.generic) else value for value in column)
    rounded = (float(f"{value:.6g}") if isinstance(value, float) else value for value in values)
    return [None if value != value else value for value in rounded]


# ---- scripts ---------------------------------------------------------------------------------------------------------


@cache
def scripts(crystals: bool = False) -> tuple[Script, ...]:
    """Return the scripts of a page with galleries: 3Dmol.js if it shows crystals, and the modules as one script."""
    cell = (Script(_read("vendor/3Dmol-min.js")),) if crystals else ()
    return (*cell, Script(bundle("report.js")))


def _read(name: str) -> str:
    return (_WEB / name).read_text(encoding="utf-8")


_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([\w/]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?function|class|const) (\w+)", re.MULTILINE)


def bundle(entry: str) -> str:
    """Return a module of `fmwc/web` and all modules it imports as one script.

    Browsers load no modules from `file://`, so a page that opens without a server cannot import them. Each module
    becomes a function that returns its exports. Modules use named imports and exports only.
    """
    modules = [f"const {_name(name)} = (() => {{\n{_module(name)}\n}})();" for name in _sorted(entry)]
    return '"use strict";\n(() => {\n' + "\n".join(modules) + "\n})();"


def _sorted(entry: str) -> Iterator[str]:
    """Yield a module after all those it imports."""
    done: set[str] = set()

    def visit(name: str) -> Iterator[str]:
        if name not in done:
            done.add(name)
            for _, source in _IMPORT.findall(_read(name)):
                yield from visit(source)
            yield name

    return visit(entry)


def _name(module: str) -> str:
    return f"module_{module.removesuffix('.js')}"


def _module(name: str) -> str:
    source = _read(name)
    exported = [found for _, found in _EXPORT.findall(source)]
    body = _IMPORT.sub(lambda match: f"const {{{match[1].replace(' as ', ': ')}}} = {_name(match[2])};\n", source)
    body = _EXPORT.sub(r"\1 \2", body)
    return f"{body}\nreturn {{ {', '.join(exported)} }};"
