"""The explorer: every sample on a canvas, a slider that gives up the doubtful ones, and each sample's own curve.

Samples are sent surest first, so that "keep the surest n" is a prefix and the misplaced among them a running sum.
Positions are 16-bit, curves 8-bit on a logarithmic scale: finer than a screen shows.
"""

from __future__ import annotations

import json
from base64 import b64encode
from math import ceil

import numpy as np
from numpy.typing import ArrayLike

from fmwc.report.curves import on_common_times
from fmwc.report.look import palette
from fmwc.report.page import HERE, Section

__all__ = ["explorer"]

CURVE_BYTES = 1_000_000  # beyond this only every k-th sample brings its curve: the page stays below 3 MB
FLOOR = 1e-12  # a std of zero has no logarithm

_MARKUP = """<div class="card explorer">
<div class="controls">
<label for="explorer-keep">Keep the surest <output class="share">90</output>%</label>
<label class="hide"><input type="checkbox" class="hide-discarded"> hide the discarded</label>
<input id="explorer-keep" class="keep" type="range" min="1" max="100" step="1" value="90">
<p class="outcome" aria-live="polite"></p>
</div>
<canvas class="board" tabindex="0" role="img" aria-label="Samples on the checkerboard, coloured by confidence.
 Arrow keys walk through the kept samples from the most doubtful to the surest."></canvas>
<div class="side">
<p class="detail" aria-live="polite"></p>
<canvas class="curve" role="img" aria-label="Uncertainty of the velocity over time for the chosen sample"></canvas>
<div class="scale"><span>doubtful</span><i></i><span>sure</span></div>
<p class="hint">Point at a sample, or focus the board and use the arrow keys. A dark ring marks a misplaced sample.</p>
</div>
<noscript><p>The explorer needs JavaScript; the figures below do not.</p></noscript>
<script type="application/json" class="data">{data}</script>
</div>
<script>
{script}</script>"""


def explorer(
    x: ArrayLike,
    score: ArrayLike,
    confidence: ArrayLike,
    bad: ArrayLike,
    times: ArrayLike,
    std: ArrayLike,
    stride: int = 1,
    called: str = "confidence",
    beside: ArrayLike | None = None,
) -> Section:
    """The interactive section.

    Arguments:
        x: Samples, `(B, 2)`.
        score: What they are ranked by, high = doubtful, `(B,)`.
        confidence: In [0, 1], `(B,)`.
        bad: The misplaced ones, `(B,)`.
        times: When the variance was read, `(R,)` or `(R, B)`.
        std: ‖σ_t‖ there, `(R, B)`.
        stride: If above 1, `times` and `std` are of every `stride`-th sample in the order of the score, in that order.
        called: What `confidence` is called: `rank` where confidence is withheld.
        beside: The rank by the variance, shown beside it, in [0, 1], `(B,)`.
    """
    order = np.argsort(np.asarray(score), kind="stable")
    points, level, wrong = (np.asarray(a)[order] for a in (x, confidence, bad))
    t, curves = on_common_times(np.asarray(times), np.asarray(std))
    if stride == 1:
        stride = ceil(curves.size / CURVE_BYTES)
        curves = curves[:, order[::stride]]
    logs = np.log(np.maximum(curves, FLOOR))
    extent = max(2.5, float(np.abs(points).max()))
    data = {
        "count": len(points),
        "extent": extent,
        "points": _pack(points / extent, -1.0, 1.0, np.uint16),
        "called": called.capitalize(),
        "confidence": _pack(level, 0.0, 1.0, np.uint16),
        "beside": None if beside is None else _pack(np.asarray(beside)[order], 0.0, 1.0, np.uint16),
        "bad": _pack(wrong, 0, 255, np.uint8),
        "times": [round(float(v), 4) for v in t],
        "stride": stride,
        "curves": _pack(logs.T, logs.min(), logs.max(), np.uint8),
        "logRange": [float(logs.min()), float(logs.max())],
        "colours": palette(64),
    }
    script = (HERE / "explorer.js").read_text(encoding="utf-8")
    return Section(
        "Give up the doubtful ones",
        _MARKUP.format(data=json.dumps(data, separators=(",", ":")), script=script),
        "Each point is one generated sample; a perfect model would fill the grey cells and nothing else. "
        f"Drag the slider to discard the samples with the lowest {called}, "
        "and watch how many of the mistakes go with them.",
    )


def _pack(values: np.ndarray, low: float, high: float, kind: type[np.unsignedinteger]) -> str:
    """Base64 of little-endian unsigned integers, `low` to `high` spread over their whole range."""
    top = np.iinfo(kind).max
    span = max(float(high) - float(low), 1e-30)
    scaled = np.clip((np.asarray(values, dtype=float) - low) / span, 0, 1) * top
    return b64encode(scaled.round().astype(np.dtype(kind).newbyteorder("<")).tobytes()).decode()
