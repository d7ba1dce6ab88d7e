r"""How well a flow's own velocity explains a finished sample: *echo* and *contest*.

A finished sample x₁ is mixed with fresh noise x₀ on the path that the network was trained on, and the velocity of the
network is compared with that of the path:

.. math:: r(x_1, c; t) = \| v(x_t, t, c) - u_t \|^2, \quad (x_t, u_t) = \mathrm{path}(x_0, x_1, t)

per channel, as a mean over its numbers. The **echo** is r under the sample's own condition, as a geometric mean over
channels, times and draws. The **contest** is r under the condition that was asked for, minus the smallest r under its
rivals, with the same noise for all of them. Neither needs a noise model, or the trajectory of the sample.

The contest is the idea of diffusion classifiers (Li et al., "Your Diffusion Model is Secretly a Zero-Shot Classifier",
ICCV 2023; Clark and Jaini, "Text-to-Image Diffusion Models are Zero-Shot Classifiers", NeurIPS 2023), applied to the
model's own samples. The echo is a re-noising loss, as used to detect out-of-distribution images with diffusion models
(Graham et al., "Denoising diffusion models for out-of-distribution detection", 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fmwc.errors import UsageError
from fmwc.flow import Space, path_of
from fmwc.randomness import Blocks, derive
from fmwc.state import as_whole, batch_size, channels, each, require_state

__all__ = [
    "CONTEST_TIMES",
    "ECHO_TIMES",
    "Contest",
    "Described",
    "Echo",
    "Found",
    "as_values",
    "asked_for",
    "discrete",
    "is_text",
    "residuals",
    "same",
    "taken",
]

ECHO_TIMES = (0.7, 0.8, 0.6, 0.9)  # in the order in which a growing budget takes them
CONTEST_TIMES = (0.5, 0.4, 0.3, 0.6, 0.45, 0.35, 0.55, 0.25, 0.65, 0.2)
FINALISTS = 2  # rivals that are compared at every time; all of them only at the first
TINY = 1e-30


def _at(value: Any, rows: Any) -> Any:
    return each(lambda c: c[rows], value)


def residuals(
    network: Callable[..., Any], space: Space, x0: Any, x1: Any, t: Tensor, cond: Mapping[str, Any]
) -> Tensor:  # -> (C, B)
    """Return r for each channel and sample: the mean of (v − u)² over the numbers that the channel has.

    Arguments:
        network: Called as `network(x, t, **cond)`.
        space: The space of the samples, given their conditions.
        x0: Noise, one state per sample.
        x1: The finished samples.
        t: One time per sample.
        cond: The conditions of each sample.
    """
    x_t, u = path_of(network, space)(x0, x1, t)
    v = network(x_t, t, **cond)
    require_state(v, "the network's velocity")
    space.check(v, "the network's velocity is of another shape: ")
    v = space.tangent(x_t, v)
    found = []
    for name, channel in space.channels.items():
        square = (channels(v)[name] - channels(u)[name]).square().flatten(1)
        present = space.present.get(name)
        count: Any = square.shape[1]
        if present is not None:
            rows = present.flatten(1).sum(1).to(square.dtype) - int(channel.centred)
            count = rows.clamp_min(1) * (square.shape[1] / channel.shape[0])
        found.append(square.sum(1) / count)
    return torch.stack(found)


def same(values: Tensor, rivals: Tensor) -> Tensor:  # (B, *), (K, *) -> (B, K)
    """Return which rival is each sample's own condition."""
    alike = values[:, None] == rivals[None].to(values)
    return alike.reshape(*alike.shape[:2], -1).all(2)


@dataclass(frozen=True)
class Found:
    """What a check found.

    Attributes:
        score: One number per sample, high = doubtful, `(B,)`.
        rival: The number of the rival that came nearest to the condition asked for, `(B,)`; for a contest only.
        margin: How much better the condition asked for explains the sample than that rival, per number of the state;
            negative where the flow itself prefers the rival.
    """

    score: Tensor
    rival: Tensor | None = None
    margin: Tensor | None = None


class Described:
    """A check that equals another if their descriptions do."""

    def describe(self) -> dict[str, Any]:
        """Return the options as a checkpoint records them."""
        return {k: v.tolist() if isinstance(v, Tensor) else v for k, v in vars(self).items()}

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.describe() == other.describe()

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, eq=False)
class Echo(Described):
    """A check of samples under their own condition: the mean logarithm of r over channels, times and draws.

    Arguments:
        times: The times t, each of them one evaluation of the network per draw.
        draws: The number of noise draws per time.
    """

    times: tuple[float, ...] = (0.7, 0.8)
    draws: int = 1
    name = "echo"

    def __post_init__(self) -> None:
        _require_times(self.times)
        as_whole(self.draws, "draws", 1)

    @classmethod
    def planned(cls, evaluations: int) -> Echo:
        """Return an echo that spends at most this many evaluations per sample."""
        if evaluations < 1:
            raise UsageError(f"an echo takes at least 1 evaluation per sample, got {evaluations}")
        times = ECHO_TIMES[: min(evaluations, len(ECHO_TIMES))]
        return cls(tuple(sorted(times)), evaluations // len(times))

    @property
    def evaluations(self) -> int:
        """Evaluations of the network per sample."""
        return len(self.times) * self.draws

    def __call__(self, network: Any, space: Space, x1: Any, cond: Mapping[str, Any], seed: int, first: int) -> Found:
        own, logs = space.given(cond), []
        for draw, t in ((d, t) for d in range(self.draws) for t in self.times):
            found = residuals(network, own, *_noisy(own, x1, t, seed, first, draw, t), cond)
            logs.append(_log_mean(found, own, x1))
        return Found(torch.stack(logs).mean(0))


@dataclass(frozen=True, eq=False)
class Contest(Described):
    """A check of samples under the condition that was asked for, against its rivals.

    The first `rounds` times are evaluated under every rival. At the others the condition asked for is compared with the
    `finalists` rivals that explain the sample best so far. The score is the weighted sum over all times of r under the
    condition asked for, minus the smallest such sum among the finalists.

    Arguments:
        cond: The name of the condition.
        rivals: Its values, `(K, *)`, or a list of texts. A sample's own value may be among them or not.
        times: The times t in their order. A time that occurs again has a noise draw of its own.
        rounds: The number of times that are evaluated under every rival.
        finalists: The number of rivals that are compared at the other times.
        listed: Whether the samples' own values are among the rivals; if not, a round takes one more evaluation.

    A time has the weight t / (1 − t), with which the sum estimates a difference of log likelihoods: that of an integral
    over log signal-to-noise ratios, for the path x_t = t x₁ + (1 − t) x₀ (the continuous-time evidence lower bound of
    Kingma et al., "Variational Diffusion Models", NeurIPS 2021).
    """

    cond: str
    rivals: Any
    times: tuple[float, ...] = (0.5, 0.3, 0.4, 0.2)
    rounds: int = 1
    finalists: int = FINALISTS
    listed: bool = True
    name = "contest"

    def __post_init__(self) -> None:
        _require_times(self.times)
        as_whole(self.rounds, "rounds", 1, len(self.times))
        as_whole(self.finalists, "finalists", 1)
        if len(self.rivals) < 1 + self.listed:
            raise UsageError(
                f"a contest of '{self.cond}' takes at least {1 + self.listed} values, got {len(self.rivals)}; the echo "
                "needs none"
            )

    def describe(self) -> dict[str, Any]:
        """Return the options as a checkpoint records them, where the samples' own values are always listed."""
        return {k: v for k, v in super().describe().items() if k != "listed"}

    @classmethod
    def planned(cls, cond: str, rivals: Any, evaluations: int, listed: bool = True) -> Contest:
        """Return a contest that spends at most this many evaluations per sample.

        Up to half of them go to rounds of all rivals, and the rest to the best two.
        """
        one = cls(cond, rivals, CONTEST_TIMES[:1], listed=listed)
        several, few = one._costs
        if evaluations < several:
            raise UsageError(
                f"a contest between {several} values of '{cond}' takes at least {several} evaluations per sample, got "
                f"{evaluations}; give fewer rivals, or take the echo"
            )
        rounds = max(1, evaluations // (2 * several))
        number = rounds + (evaluations - rounds * several) // few
        times = tuple(CONTEST_TIMES[i % len(CONTEST_TIMES)] for i in range(number))
        return cls(cond, rivals, times, rounds, listed=listed)

    @property
    def _costs(self) -> tuple[int, int]:
        """Evaluations of a round of all rivals, and of a time of the best few."""
        count = len(self.rivals)
        return count + (not self.listed), 1 + min(self.finalists, count - self.listed)

    @property
    def evaluations(self) -> int:
        """Evaluations of the network per sample."""
        several, few = self._costs
        return self.rounds * several + (len(self.times) - self.rounds) * few

    def given(self, cond: Mapping[str, Any], device: Any = None) -> Contest:
        """Return the same contest for samples with these conditions: it knows whether their values are listed."""
        own = same(*as_values(asked_for(cond, self.cond, self.name), self.rivals, device)[:2]).any(1)
        listed = bool(own.all())
        if not listed and bool(own.any()):
            raise UsageError(
                f"some samples have a '{self.cond}' that is one of the rivals and others do not; give rivals for all"
            )
        return replace(self, listed=listed)

    def __call__(self, network: Any, space: Space, x1: Any, cond: Mapping[str, Any], seed: int, first: int) -> Found:
        count, given = batch_size(x1), space.given(cond)
        device = next(iter(channels(x1).values())).device
        listed = self.given(cond, device).listed
        value, rivals, texts = as_values(asked_for(cond, self.cond, self.name), self.rivals, device)
        own = same(value, rivals)  # (B, K)
        # Candidate 0 is the condition asked for; rivals that are the same condition count as infinitely bad.
        scale = [t / (1 - t) for t in self.times]
        everyone = torch.arange(len(rivals), device=value.device).expand(count, -1)
        sums = value.new_zeros((count, len(rivals)), dtype=_real(x1))
        asked = sums.new_zeros(count)
        entered = everyone
        seen: dict[float, int] = {}
        for number, t in enumerate(self.times):
            draw = seen[t] = seen.get(t, -1) + 1
            noisy = _noisy(given, x1, t, seed, first, draw, t)
            if number == self.rounds:
                best_few = min(self.finalists, len(rivals) - int(listed))  # of two listed classes one is the rival
                entered = sums.masked_fill(own, torch.inf).topk(best_few, 1, largest=False)[1]
            together = number < self.rounds and listed
            values = rivals[entered] if together else torch.cat([value[:, None], rivals[entered]], 1)
            r = self._tried(network, space, noisy, values, cond, texts) * scale[number]  # (B, M)
            mine = (r * own).sum(1) if together else r[:, 0]
            asked = asked + mine
            sums = sums.scatter_add(1, entered, r if together else r[:, 1:])
        left = torch.full_like(sums, torch.inf).scatter(1, entered, sums.gather(1, entered)).masked_fill(own, torch.inf)
        best, rival = left.min(1)
        total = sum(scale)
        return Found((asked - best) / total, rival, (best - asked) / total)

    def _tried(
        self,
        network: Any,
        space: Space,
        noisy: tuple[Any, Any, Tensor],
        values: Tensor,
        cond: Mapping[str, Any],
        texts: Sequence[str],
    ) -> Tensor:  # -> (B, M)
        """r of each sample under each of its M conditions, in one call of the network."""
        count, several = values.shape[:2]
        rows = torch.arange(count, device=values.device).repeat_interleave(several)
        tried = taken(cond, rows, count)
        tried[self.cond] = [texts[i] for i in values.flatten().tolist()] if texts else values.flatten(0, 1)
        x0, x1, t = (_at(part, rows) for part in noisy)
        found = residuals(network, space.given(tried), x0, x1, t, tried)
        weights = found.new_tensor([c.weight for c in space.channels.values()])[:, None]
        return ((found * weights).sum(0) / weights.sum()).view(count, several)


def asked_for(cond: Mapping[str, Any], name: str, check: str) -> Any:
    """Return the condition that a check compares samples by, or raise where they have none of that name."""
    if cond.get(name) is None:
        raise UsageError(f"the check '{check}' compares samples by '{name}', which is not among their conditions")
    return cond[name]


def is_text(value: Any) -> bool:
    """Return whether a condition is a list of texts."""
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(one, str) for one in value)


def as_values(own: Any, rivals: Any, device: Any = None) -> tuple[Tensor, Tensor, list[str]]:
    """Return the samples' own values and their rivals as tensors; texts are numbers in a list, which is the third."""
    if not is_text(rivals):
        value = torch.as_tensor(own)
        return value, torch.as_tensor(rivals).to(value.device, value.dtype), []
    texts = list(dict.fromkeys([*rivals, *own]))
    value, others = (torch.tensor([texts.index(one) for one in several], device=device) for several in (own, rivals))
    return value, others, texts


def taken(cond: Mapping[str, Any], rows: Any, count: int) -> dict[str, Any]:
    """Return the conditions of some of the samples: rows of a tensor, or of a list of texts, with a row per sample."""

    def one(value: Any) -> Any:
        if isinstance(value, (list, tuple)) and len(value) == count:
            return value[rows] if isinstance(rows, slice) else [value[row] for row in rows.tolist()]
        return value[rows] if _per_sample(value, count) else value

    return {name: one(value) for name, value in cond.items()}


def _per_sample(value: Any, count: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) == count


def _real(x: Any) -> torch.dtype:
    return next(iter(channels(x).values())).dtype


def _noisy(space: Space, x1: Any, t: float, seed: int, first: int, draw: int, label: float) -> tuple[Any, Any, Tensor]:
    """Fresh noise for each sample, that depends on the seed, its number, the time and the draw alone."""
    count, like = batch_size(x1), next(iter(channels(x1).values()))
    randomness = Blocks(derive(seed, "check", f"{label:.6g}", draw), first, count)
    x0 = each(lambda c: c.to(like.dtype), space.noise(count, randomness, like.device))
    return x0, x1, like.new_full((count,), t)


def _log_mean(found: Tensor, space: Space, x1: Any) -> Tensor:  # (C, B) -> (B,)
    """The mean over channels of log r; a channel that cannot vary (the place of the only atom) has no say."""
    logs, free = found.clamp_min(TINY).log(), torch.ones_like(found)
    for row, (name, channel) in enumerate(space.channels.items()):
        present = space.present.get(name)
        if present is not None and channel.centred:
            free[row] = (present.flatten(1).sum(1) > 1).to(found.dtype)
    return (logs * free).sum(0) / free.sum(0).clamp_min(1)


def _require_times(times: Sequence[float]) -> None:
    if not times or not all(0 < t < 1 for t in times):
        raise UsageError(f"a check takes times strictly between 0 and 1, got {times}")


def discrete(cond: Mapping[str, Any], space: Space, count: int) -> list[str]:
    """The names of the conditions that are classes: whole numbers, one per sample, that count no rows."""
    counted = {c.rows for c in space.channels.values()}
    return [
        name
        for name, value in cond.items()
        if name not in counted
        and _per_sample(value, count)
        and value.ndim == 1
        and not value.is_floating_point()
        and not value.is_complex()
    ]
