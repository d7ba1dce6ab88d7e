"""Whose rows a layer sees: what a network declares, or else a proof.

A layer sees a matrix with one row per sample, token, atom or edge, and its noise belongs to the samples of its rows. A
network declares them with a method `rows(x, t, **cond)`, which returns, by pattern of layer names, the sample of each
row, or the number of rows per sample. Without the method, rows must be in the order of the samples, equally many for
each, and this is proven (:func:`check_rows`). It is never concluded from a number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmwc.errors import UsageError
from fmwc.noise.model import NoiseModel, NoisyLayer, Pass
from fmwc.state import batch_size, channels, unsqueeze_like

SHARE = 1e-2  # largest change of a sample by rows of others, relative to the changes of their own samples


class Proof(NamedTuple):
    """Result of :func:`check_rows` for inputs of some shapes.

    Attributes:
        rows: The numbers of rows that each layer received.
        values: The conditions on which an undeclared order may depend (sizes of samples); empty if every layer has one
            row per sample.
    """

    rows: Mapping[str, frozenset[int]]
    values: Mapping[str, Any]


def check_rows(
    noise: NoiseModel,
    run: Callable[[Pass], Any],
    x: Any,
    cond: Mapping[str, Any],
    is_declared: bool = False,
    doubled: bool = False,
) -> Mapping[str, frozenset[int]]:
    """Return the numbers of rows that each layer may receive; raise if a row belongs to another sample.

    The proof takes three evaluations, and one more each time that the number of samples doubles, once for all inputs of
    the same shapes. If a layer has several rows per sample and the network does not declare them, their order may
    depend on conditions such as sizes or masks, and is proven for each with three evaluations.

    Arguments:
        noise: The noise model.
        run: Evaluates the network under a pass.
        x, cond: The state and the conditions.
        is_declared: Whether the network declares its rows.
        doubled: Whether the network evaluates each sample twice.
    """
    given = {name: value for name, value in cond.items() if isinstance(value, Tensor)}
    key = doubled, *((name, value.shape) for group in (channels(x), given) for name, value in group.items())
    proof = noise.proofs.get(key)
    if proof is None or not all(_equal(value, cond.get(name)) for name, value in proof.values.items()):
        rows, evaluations = _prove(run, batch_size(x), noise.names, proof is None), batch_size(x) * (1 + doubled)
        single = is_declared or all(numbers == {evaluations} for numbers in rows.values())
        values = {} if single else {name: _copy(value) for name, value in cond.items() if _may_be_sizes(value)}
        proof = noise.proofs[key] = Proof(rows, values)
    return proof.rows


def _may_be_sizes(value: Any) -> bool:
    """Return whether a condition may say how many rows a sample has: anything but numbers that are no mask."""
    is_number = isinstance(value, Tensor) and value.is_floating_point()
    return not is_number or bool(((value == 0) | (value == 1)).all())


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else deepcopy(value)


def _equal(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return torch.equal(value, other)
    return type(value) is type(other) and bool(value == other)


def _prove(run: Callable[[Pass], Any], count: int, names: Sequence[str], is_first: bool) -> dict[str, frozenset[int]]:
    """Raise if a layer's row belongs to another sample; return the numbers of rows that each layer received.

    Noise in the rows of some samples must not change the velocity of the others: of every second sample, and the first
    time also of those whose number has a certain binary digit, so that every two samples are told apart.
    """
    base, number = Disturbance(), torch.arange(count)
    still, odd = run(base), number % 2 == 1
    digits = range(1, (count - 1).bit_length()) if is_first else ()
    for chosen in (odd, ~odd, *((number >> digit) % 2 == 1 for digit in digits)):
        if not _reaches_others(still, run(Disturbance(chosen)), chosen):
            continue
        wrong = (name for name in names if _reaches_others(still, run(Disturbance(chosen, name)), chosen))
        raise UsageError(
            f"the rows of layer '{next(wrong, '?')}' are not in the order of the samples, or not as the network's "
            "method rows declares, so its noise would be assigned to the wrong samples: put samples first "
            "(batch_first=True), declare the rows with a method rows, or exclude the layer; samples that interact (a "
            "batch norm without running statistics) are not supported"
        )
    return {name: frozenset(rows) for name, rows in base.rows.items()}


def _reaches_others(before: Any, after: Any, chosen: Tensor) -> bool:
    """Return whether samples changed that were not chosen."""
    for name, value in channels(before).items():
        other = channels(after)[name]
        if not value.numel():
            continue
        same = (value == other) | (value.isnan() & other.isnan())
        change = torch.where(same, 0, (value - other).abs().float()).nan_to_num(torch.inf, torch.inf)
        change = change.flatten(1).amax(1).cpu()
        finite = change[chosen].nan_to_num(posinf=0.0).max()
        if change[~chosen].max() > max(SHARE, 4 * torch.finfo(value.dtype).eps) * finite:
            return True
    return False


class Disturbance(Pass):
    """Pass that adds noise to the rows of some samples.

    The mean of each row's input is added to its output, so that disturbances pass layers whose weights are zero, which
    may be trained later.

    Arguments:
        chosen: Whether each sample is disturbed; `None` for none.
        only: The layer to disturb; all by default.
    """

    def __init__(self, chosen: Tensor | None = None, only: str = "") -> None:
        self.chosen, self.only = chosen, only
        self.rows: dict[str, set[int]] = {}
        self.generator: torch.Generator | None = None

    def after(self, noisy: NoisyLayer, layer: Any, h: Tensor, y: Tensor) -> Tensor:
        owner, number = noisy.owner(h), h.shape[0]
        self.rows.setdefault(noisy.name, set()).add(number)
        y = y + unsqueeze_like(h.flatten(1).mean(1), y)
        if self.chosen is None or self.only not in ("", noisy.name):
            return y
        if self.generator is None:
            self.generator = torch.Generator(y.device).manual_seed(0)
        if owner is None:
            chosen = self.chosen.repeat_interleave(number // noisy.samples)
        else:
            chosen = torch.cat([self.chosen, self.chosen.new_zeros(1)]).to(owner.device)[owner]
        scale = y.float().square().mean().sqrt()
        scale = torch.where(scale > 0, scale, 1).to(y.dtype)
        noise = torch.randn(y.shape, generator=self.generator, device=y.device, dtype=y.dtype)
        return y + scale * noise * unsqueeze_like(chosen.to(y), y)
