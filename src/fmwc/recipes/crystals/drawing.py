"""What is drawn from a field of crystals, on whatever device, to be judged afterwards: runs and divergences as files.

Drawing takes a GPU, and judging takes pymatgen and an energy model, which need not be on the same machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fmwc.baselines import dispersion, stochastic_ends
from fmwc.diagnostics.divergence import divergence, estimates
from fmwc.field import Field
from fmwc.propagate import Estimator, Linearised
from fmwc.recipes.crystals.recipe import EVERY, Mp20, batch_for
from fmwc.sampling import Trajectory
from fmwc.state import channels

__all__ = ["KS", "TRAJECTORIES", "draw_diagonal", "draw_dispersion", "draw_linearised", "flops", "run_batch", "sweep"]

KS = (1, 5, 10, 25, 50, 100, 250, 500)  # Hutchinson probes (tab:hutchinson-full)
TRAJECTORIES = 5


def run_batch(device: torch.device) -> int:
    """Crystals integrated together where a reading holds every activation."""
    return min(1_250, batch_for(device))


def draw_linearised(recipe: Mp20, field: Field, count: int, seed: int, **options: Any) -> Trajectory:
    """The run most numbers are read from: variance at every step."""
    options = {"confidence": Linearised(2), "schedule": 1, "batch": run_batch(field.device), **options}
    return recipe.draw(field, count, seed, **options).compact()


def draw_diagonal(recipe: Mp20, field: Field, count: int, seed: int) -> Trajectory:
    """The paper's estimator, at every fifth step."""
    options = {"confidence": "diagonal", "schedule": EVERY, "record": "total"}
    return recipe.draw(field, count, seed, batch=min(625, batch_for(field.device)), **options).compact()


def draw_dispersion(recipe: Mp20, field: Field, run: Trajectory, k: int = TRAJECTORIES) -> Tensor:  # -> (B,)
    """How far k stochastic trajectories from the same start end from one another."""
    ends = stochastic_ends(
        field,
        run.x0,
        k,
        steps=recipe.steps,
        seed=run.seed % 2**20,
        space=recipe.space(),
        batch=batch_for(field.device),
        **run.cond,
    )
    return dispersion(ends, recipe.space())


def sweep(
    recipe: Mp20,
    field: Field,
    count: int,
    seed: int,
    estimators: dict[str, Estimator],
    ks: Sequence[int] = KS,
    every: int = EVERY,
) -> dict[str, Tensor]:
    """Hutchinson's divergence with K probes, an independent reference with the most, and variances, at the same states.

    Gives `(R, B)` each: `k1` … `k500`, `reference`, and for every estimator and channel `name.channel`.
    """
    run = recipe.draw(field, count, seed, confidence=False, keep_states=True)
    assert run.states is not None
    steps = range((recipe.steps - 1) % every, recipe.steps, every)
    found: dict[str, list[Tensor]] = {}
    for step in steps:
        x, t = run.states[step], run.grid[step]
        single = estimates(field, x, t, 2 * max(ks), seed=seed, **run.cond)
        for k in ks:
            found.setdefault(f"k{k}", []).append(single[:k].mean(0))
        found.setdefault("reference", []).append(single[max(ks) :].mean(0))
        for name, estimator in estimators.items():
            moments = field.moments(x, t, estimator, seed=seed, **run.cond)
            means = channels(moments.mean)
            for channel, var in channels(moments.var).items():
                total = var.expand_as(means[channel]).flatten(1).sum(1)
                found.setdefault(f"{name}.{channel}", []).append(total)
    return {name: torch.stack(values).cpu() for name, values in found.items()}


class _Counter(TorchDispatchMode):
    """Counts the arithmetic of products, forward and backward, as torch's own counter does, which cannot see through
    a gradient asked for by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (count := flop_registry.get(func._overloadpacket)) is not None:
            self.total += count(*args, **(kwargs or {}), out_val=out)
        return out


def flops(recipe: Mp20, field: Field, estimators: dict[str, Estimator], count: int = 32) -> dict[str, float]:
    """Arithmetic of one reading of a crystal, counted by torch: of the plain network, of a probe, of each estimator."""
    run = recipe.draw(field, count, 0, confidence=False, keep_states=True)
    assert run.states is not None
    x, t = run.states[recipe.steps // 2], run.grid[recipe.steps // 2]

    def counted(f: Any) -> float:
        with _Counter() as counter:
            f()
        return counter.total / count

    with torch.no_grad():
        found = {"plain": counted(lambda: field(x, t, **run.cond))}
    found["hutchinson_1"] = counted(lambda: divergence(field, x, t, 1, seed=0, **run.cond))
    found["hutchinson_2"] = counted(lambda: divergence(field, x, t, 2, seed=0, **run.cond))
    for name, estimator in estimators.items():
        found[name] = counted(lambda e=estimator: field.moments(x, t, e, seed=0, **run.cond))
    return found
