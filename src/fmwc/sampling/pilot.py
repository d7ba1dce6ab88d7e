"""Pilot runs, which place steps by the variance."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from fmwc.errors import UsageError
from fmwc.sampling.confidence import choose_estimator
from fmwc.sampling.config import AS_REFERENCE, Grid
from fmwc.sampling.sampler import sample
from fmwc.sampling.trajectory import Trajectory
from fmwc.state import as_whole

PILOT = 1000  # samples
POWER = 2.0  # a larger one misses the outer cells of the Checkerboard


def fit_grid(field: Any, steps: int, *, pilot: int | Trajectory = PILOT, power: float = POWER, **options: Any) -> Grid:
    r"""Return a controller whose steps each take an equal share of ∫ E[σ^p] dt, measured by a pilot run.

    Steps with equal shares spend the network's evaluations where the variance is large. With p > 1, the few doubtful
    samples dominate the mean; the other samples are accurate on any grid. Fit the grid once and use it for all runs.

    >>> sample(field, 1000, config=SamplingConfig(controller=fit_grid(field, 10)))  # doctest: +SKIP

    Arguments:
        field: A field.
        steps: The number of steps of the grid.
        pilot: The number of samples to draw, or an existing run with the same times for all samples. Each reading
            holds until the next one, and the last until t = 1.
        power: The exponent p.
        options: Options of :func:`fmwc.sample` for the pilot, such as `seed` and `cond`.
    """
    steps = as_whole(steps, "steps", 1, 10**6, "step")
    if not 0 <= power < math.inf:
        raise UsageError(f"power must be at least 0, got {power}")
    if isinstance(pilot, Trajectory):
        run = pilot
    else:
        options = {"check": False, **options}
        if field.space is not None:  # read the variance even if the field's score does not need it
            confidence = options.get("confidence", AS_REFERENCE)
            options["confidence"] = choose_estimator(field.space, field.reference, confidence, always=True)
        run = sample(field, pilot, **options)
    _require_shared_times(run)
    edges = torch.cat([run.times[:, 0].double().cpu(), torch.ones(1, dtype=torch.float64)])
    std = run.std.double().cpu()
    # Divide by the largest, so that no power overflows; keep positive, so that shares rise.
    density = (std / std.amax().clamp_min(torch.finfo(std.dtype).tiny)).pow(power).mean(1)
    density = torch.where(density.amax() > 0, density, 1.0).clamp_min(1e-9 * density.amax())
    shares = torch.cat([edges.new_zeros(1), (density * edges.diff()).cumsum(0)])
    inner = np.interp(np.arange(1, steps) / steps, shares / shares[-1], edges)
    return Grid((float(edges[0]), *inner.tolist(), 1.0))


def _require_shared_times(run: Trajectory) -> None:
    if not len(run.times) or not bool((run.times == run.times[:, :1]).all()):
        raise UsageError("the pilot must read the variance, at the same times for every sample")
