"""Leads: scores that were tried and are not part of the library. `benchmarks/zoo` and `benchmarks/lifts.py` use them.

Every function returns scores by name, high = doubtful, with their cost in evaluations per sample beyond plain sampling.
Networks are compared either on states of the trajectory ("path") or on finished samples mixed with fresh noise
("echo").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fmwc.checks.evidence import renoised, residuals
from fmwc.flow import Space, path_of
from fmwc.randomness import derive
from fmwc.sampling import SamplingConfig, sample
from fmwc.state import batch_size, channels, tree_map

__all__ = ["cells", "read"]

TIMES = (0.5, 0.6, 0.7, 0.8)  # times at which finished samples are mixed with noise
EVERY = 5  # steps between the states of a trajectory that are compared
DRAWS = 2  # draws of the weights at each time
TINY = 1e-30

Velocity = Callable[..., Any]
Found = dict[str, tuple[Tensor, float]]  # score and cost


def disagreement(velocities: Sequence[Any], space: Space) -> Tensor:  # -> (B,)
    """Return the logarithm of the variance between velocities per coordinate, as a mean over channels."""
    logs = []
    for name in space.channels:
        values = torch.stack([channels(v)[name] for v in velocities]).flatten(2)
        present = space.present.get(name)
        count: Any = values.shape[2]
        if present is not None:
            count = present.flatten(1).sum(1) * (values.shape[2] / space.channels[name].shape[0])
        logs.append((values.var(0).sum(1) / count).clamp_min(TINY).log())
    return torch.stack(logs).mean(0)


def _on_path(networks: Sequence[Velocity], space: Space, states: Sequence[tuple[Any, Tensor]], cond: Any) -> Tensor:
    """Return the mean over states of the standard deviation between networks."""
    stds = [(disagreement([network(x, t, **cond) for network in networks], space) / 2).exp() for x, t in states]
    return torch.stack(stds).mean(0)


def read(
    field: Any,
    space: Space,
    x0: Any,
    cond: Mapping[str, Any],
    *,
    seed: int,
    first: int = 0,
    steps: int = 50,
    early: Velocity | None = None,
    members: Sequence[Velocity] = (),
    null: Velocity | None = None,
    classes: Tensor | None = None,
) -> Found:
    """Read all leads of a batch of samples.

    Arguments:
        field: The flow, with its noise if it has any.
        space: The space of the states.
        x0, cond: The noise and the conditions of the samples.
        seed, first: Seed the fresh noise; the number of the first sample.
        steps: The steps of the trajectory.
        early: The same network after a fifth of its training.
        members: Networks that were trained alike from other initial weights.
        null: The unconditional velocity, called without a condition `y`; the mean over classes if not given.
        classes: The values of the condition `y`.
    """
    run = sample(
        field,
        x0=x0,
        steps=steps,
        confidence=None,
        check=False,
        cond=cond,
        config=SamplingConfig(keep_states=True, batch=batch_size(x0)),
    )
    own, x1, states = space.given(cond), run.x, []
    assert run.states is not None
    for step in range(0, steps, EVERY):
        states.append(
            (run.states[step], run.grid[step] if run.grid[step].ndim else run.grid[step].expand(batch_size(x0)))
        )
    noisy = []
    for t in TIMES:
        mixed = renoised(own, x1, t, seed, first)
        noisy.append((mixed, path_of(field, own)(*mixed)[0], mixed[2]))
    found: Found = {}
    with torch.no_grad():
        echo = torch.stack([_log(residuals(field, own, *mixed, cond)) for mixed, _, _ in noisy]).mean(0)
        if early is not None:
            found["early, path"] = _on_path([field, early], own, states, cond), len(states)
            gaps = [disagreement([f(x, t, **cond) for f in (field, early)], own) for _, x, t in noisy]
            found["early, echo"] = torch.stack(gaps).mean(0), 2 * len(TIMES)
            with_early = torch.stack([_log(residuals(early, own, *mixed, cond)) for mixed, _, _ in noisy]).mean(0)
            found["early, ratio"] = echo - with_early, 2 * len(TIMES)
        if members:
            found["ensemble, path"] = _on_path([field, *members], own, states, cond), len(members) * len(states)
        if getattr(field, "noise", None) is not None:
            found |= _drawn(field, own, noisy, cond, derive(seed, "draws", first))
        if classes is not None:
            found |= _unconditional(field, own, noisy, states, cond, null, classes)
    return found


def _log(found: Tensor) -> Tensor:  # (C, B) -> (B,)
    return found.clamp_min(TINY).log().mean(0)


def _drawn(field: Any, space: Space, noisy: Sequence[Any], cond: Mapping[str, Any], seed: int) -> Found:
    """Return the echo under draws of the weights, and how much the velocity differs between them."""
    generator = torch.Generator(field.device).manual_seed(seed)
    echoes, gaps = [], []
    for mixed, x, t in noisy:
        velocities = [field.draw(x, t, seed=generator, cond=cond) for _ in range(DRAWS)]
        for v in velocities:
            echoes.append(_log(residuals(Fixed(field, v), space, *mixed, cond)))
        gaps.append(disagreement([field(x, t, **cond), *velocities], space))
    cost = float(DRAWS * len(noisy))
    return {
        "draws, echo": (torch.stack(echoes).mean(0), cost),
        "draws, gap": (torch.stack(gaps).mean(0), cost + len(noisy)),
    }


class Fixed:
    """A network that returns a known velocity, on the path of another network."""

    def __init__(self, network: Any, velocity: Any) -> None:
        self.velocity = velocity
        for whose in (network, getattr(network, "network", None)):
            if hasattr(whose, "path"):
                self.path = whose.path

    def __call__(self, x: Any, t: Tensor, **cond: Any) -> Any:
        return self.velocity


def _unconditional(
    field: Any,
    space: Space,
    noisy: Sequence[Any],
    states: Sequence[Any],
    cond: Mapping[str, Any],
    null: Velocity | None,
    classes: Tensor,
) -> Found:
    """Return the difference between the velocities with and without the class, and how much better the class fits."""

    def without(x: Any, t: Tensor, **_: Any) -> Any:
        if null is not None:
            return null(x, t)
        rest = {k: v for k, v in cond.items() if k != "y"}
        every = [field(x, t, y=value.expand(batch_size(x)).to(cond["y"]), **rest) for value in classes]
        return tree_map(lambda *v: torch.stack(v).mean(0), *every)

    each_one = 1 if null is not None else len(classes)
    gaps = [disagreement([field(x, t, **cond), without(x, t)], space) for _, x, t in noisy]
    own = torch.stack([_log(residuals(field, space, *mixed, cond)) for mixed, _, _ in noisy])
    free = torch.stack([_log(residuals(Fixed(field, without(x, t)), space, *mixed, cond)) for mixed, x, t in noisy])
    return {
        "unconditional, path": (_on_path([field, without], space, states, cond), float(each_one * len(states))),
        "unconditional, echo": (torch.stack(gaps).mean(0), float((1 + each_one) * len(noisy))),
        "unconditional, ratio": ((own - free).mean(0), float((1 + each_one) * len(noisy))),
    }


def cells(field: Any, space: Space, x1: Any, cond: Mapping[str, Any], *, seed: int, first: int = 0) -> Found:
    """Return how much the velocities of a crystal differ when the axes of its cell are permuted."""
    own, gaps, echoes = space.given(cond), [], []
    with torch.no_grad():
        for t in TIMES[2:]:
            mixed = renoised(own, x1, t, seed, first)
            x, _ = path_of(field, own)(*mixed)
            velocities = [_turned(field(_turned(x, turn), mixed[2], **cond), -turn) for turn in range(3)]
            gaps.append(disagreement(velocities, own))
            for v in velocities:
                echoes.append(_log(residuals(Fixed(field, v), own, *mixed, cond)))
    cost = 3.0 * len(gaps)
    return {"cells, gap": (torch.stack(gaps).mean(0), cost), "cells, echo": (torch.stack(echoes).mean(0), cost)}


def _turned(state: Mapping[str, Tensor], turn: int) -> dict[str, Tensor]:
    """Permute the three axes of a crystal or its velocity cyclically: lengths, angles and coordinates."""
    lattice = torch.cat([part.roll(turn, -1) for part in state["lattice"].split(3, -1)], -1)
    return {**state, "coord": state["coord"].roll(turn, -1), "lattice": lattice}
