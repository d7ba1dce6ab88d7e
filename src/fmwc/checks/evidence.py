r"""Evidence from finished samples: *echo*, *contest* and *nearest*, and the loop that runs them on batches.

Echo and contest measure how well a flow's velocity explains a finished sample x₁. The sample is mixed with fresh noise
x₀ along the path that the network was trained on, and the network's velocity is compared with that of the path:

.. math:: r(x_1, c; t) = \| v(x_t, t, c) - u_t \|^2, \quad (x_t, u_t) = \mathrm{path}(x_0, x_1, t)

per channel, averaged over its coordinates. The **echo** is r under the sample's condition, as a geometric mean over
channels, times and draws. The **contest** is r under that condition, minus the smallest r under a rival condition, with
the same noise for all conditions. Neither needs a noise model or the trajectory of the sample.

The contest is the idea of diffusion classifiers (Li et al., "Your Diffusion Model is Secretly a Zero-Shot Classifier",
ICCV 2023; Clark and Jaini, "Text-to-Image Diffusion Models are Zero-Shot Classifiers", NeurIPS 2023), applied to the
model's own samples. The echo is a re-noising loss, as used to detect out-of-distribution images with diffusion models
(Graham et al., "Denoising diffusion models for out-of-distribution detection", 2023).

**Nearest** is the distance to the nearest training points, if training data are available. It is hard to beat for
states with few coordinates. It does not use the flow, and it rewards copies of the training data: a good sample that
differs from them counts as doubtful.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmwc.errors import UsageError, require_finite
from fmwc.flow import FlatTorus, Space, path_of
from fmwc.modes import evaluating
from fmwc.randomness import Blocks, Same, derive
from fmwc.state import (
    as_whole,
    batch_size,
    channels,
    has_rows,
    require_state,
    select,
    select_conditions,
    tree_map,
    unsqueeze_like,
)

# Times, in the order in which they are added as the budget grows.
ECHO_TIMES = (0.7, 0.8, 0.6, 0.9)
CONTEST_TIMES = (0.5, 0.4, 0.3, 0.6, 0.45, 0.35, 0.55, 0.25, 0.65, 0.2)
TINY = 1e-30
ROUNDING = 1e-10  # squared relative error of a velocity; single precision has 1e-14, networks have more than 1e-4


class Evidence(NamedTuple):
    """The result of a check.

    Attributes:
        score: One number per sample, high = doubtful, `(B,)`.
        rival: For a contest, the index of the rival that explains the sample best, `(B,)`.
        margin: For a contest, how much better the sample's condition explains it than that rival, per coordinate of the
            state; negative if the flow prefers the rival.
    """

    score: Tensor
    rival: Tensor | None = None
    margin: Tensor | None = None


def residuals(
    network: Callable[..., Any], space: Space, x0: Any, x1: Any, t: Tensor, cond: Mapping[str, Any]
) -> Tensor:  # -> (C, B)
    """Return r per channel and sample: the mean of (v − u)² over the coordinates of the channel.

    Arguments:
        network: Called as `network(x, t, **cond)`.
        space: The space of the samples, given their conditions.
        x0: Noise, one state per sample.
        x1: The finished samples.
        t: One time per sample.
        cond: The conditions of the samples.
    """
    found = []
    for name, square in squares(network, space, x0, x1, t, cond).items():
        channel, square = space.channels[name], square.flatten(1)
        present = space.present.get(name)
        count: Any = square.shape[1]
        if present is not None:
            rows = present.flatten(1).sum(1).to(square.dtype) - int(channel.centred)
            count = rows.clamp_min(1) * (square.shape[1] / channel.shape[0])
        found.append(square.sum(1) / count)
    return torch.stack(found)


def squares(
    network: Callable[..., Any], space: Space, x0: Any, x1: Any, t: Tensor, cond: Mapping[str, Any]
) -> dict[str, Tensor]:  # (B, *) each
    """Return (v − u)² of every coordinate by channel.

    It is exactly 0 in a channel whose error is only rounding: the condition determines the channel (given types).
    """
    x_t, u = path_of(network, space)(x0, x1, t)
    v = network(x_t, t, **cond)
    require_state(v, "the network's velocity")
    space.check(v, "the network's velocity has the wrong shape: ")
    v, found = space.tangent(x_t, v), {}
    for name in space.channels:
        square, scale = (channels(v)[name] - channels(u)[name]).square(), channels(u)[name].square()
        exact = square.flatten(1).sum(1) <= ROUNDING * scale.flatten(1).sum(1)
        found[name] = square.masked_fill(unsqueeze_like(exact, square), 0.0)
    return found


def renoised(
    space: Space, x1: Any, t: float, seed: int, first: int | None = 0, draw: int = 0
) -> tuple[Any, Any, Tensor]:  # -> x0, x1, t
    """Return noise x0, the samples x1 and their times t, the arguments of :func:`residuals`.

    The noise of a sample depends only on the seed, the sample's index, the time and the draw. If `first` is `None`, it
    does not depend on the index, so that equal samples have equal scores.
    """
    count, like = batch_size(x1), next(iter(channels(x1).values()))
    seed = derive(seed, "check", f"{t:.6g}", draw)
    randomness = Same(seed, count) if first is None else Blocks(seed, first, count)
    x0 = tree_map(lambda c: c.to(like.dtype), space.noise(count, randomness, like.device))
    return x0, x1, like.new_full((count,), t)


@dataclass(frozen=True)
class Echo:
    """Check of samples under their own condition: the mean logarithm of r over channels, times and draws.

    Arguments:
        times: The times t. Each needs one evaluation of the network per draw.
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
        """Return an echo with at most this many evaluations per sample."""
        if evaluations < 1:
            raise UsageError(f"an echo needs at least 1 evaluation per sample, got {evaluations}")
        times = ECHO_TIMES[: min(evaluations, len(ECHO_TIMES))]
        return cls(tuple(sorted(times)), evaluations // len(times))

    def describe(self) -> dict[str, Any]:
        """Return the options as a checkpoint records them."""
        return dict(vars(self))

    @property
    def evaluations(self) -> int:
        """Evaluations of the network per sample."""
        return len(self.times) * self.draws

    def __call__(
        self, network: Any, space: Space, x1: Any, cond: Mapping[str, Any], seed: int, first: int | None
    ) -> Evidence:
        space, logs = space.given(cond), []
        for draw in range(self.draws):
            for t in self.times:
                found = residuals(network, space, *renoised(space, x1, t, seed, first, draw), cond)
                logs.append(_log_mean(found, space))
        return Evidence(torch.stack(logs).mean(0))


@dataclass(frozen=True)
class RowEcho(Echo):
    """Echo of each row of a sample, such as each atom of a crystal.

    The score, `(B, rows)`, is the geometric mean, over the channels with rows, times and draws, of the root mean square
    error of the row's coordinates; 0 for absent rows. A channel that the condition determines is left out. With the
    same seed, the noise is that of the :class:`Echo`.
    """

    name = "row echo"

    def __call__(
        self, network: Any, space: Space, x1: Any, cond: Mapping[str, Any], seed: int, first: int | None
    ) -> Evidence:
        space = space.given(cond)
        names = [name for name in space.channels if name in space.present]
        if len({space.channels[name].shape[0] for name in names}) != 1:
            raise UsageError("an echo per row needs channels with the same rows, such as the atoms of a crystal")
        present = space.present[names[0]].flatten(1)
        total = weight = torch.zeros(present.shape, device=present.device)
        for draw in range(self.draws):
            for t in self.times:
                found = squares(network, space, *renoised(space, x1, t, seed, first, draw), cond)
                unknown = {name: found[name].flatten(1).any(1, keepdim=True) for name in names}
                exact = ~torch.stack([*unknown.values()]).any(0)
                for name in names:
                    free = present.sum(1, keepdim=True) > int(space.channels[name].centred)
                    free = free & (unknown[name] | exact)
                    total = total + found[name].flatten(2).mean(2).clamp_min(TINY).log() * free
                    weight = weight + free
        return Evidence((total / weight.clamp_min(1) / 2).exp() * present)


@dataclass(frozen=True, eq=False)
class Contest:
    """Check of samples under their own condition against rival conditions.

    The first `rounds` times are evaluated under every rival. At the other times the sample's condition is compared
    with the `finalists` rivals that explain the sample best so far. The score is the weighted sum over all times of r
    under the sample's condition, minus the smallest such sum among the finalists.

    Arguments:
        cond: The name of the condition.
        rivals: The values of the condition, `(K, *)`, or a list of texts.
        times: The times t in order of use. A repeated time uses a new noise draw.
        rounds: The number of times that are evaluated under every rival.
        finalists: The number of rivals that are compared at the other times.
        listed: Whether the samples' values are among the rivals. If not, each round takes one more evaluation.

    Each time has the weight t / (1 − t). For the path x_t = t x₁ + (1 − t) x₀, the sum then estimates a difference of
    log-likelihoods as an integral over log signal-to-noise ratios (the continuous-time evidence lower bound of Kingma
    et al., "Variational Diffusion Models", NeurIPS 2021).
    """

    cond: str
    rivals: Any
    times: tuple[float, ...] = (0.5, 0.3, 0.4, 0.2)
    rounds: int = 1
    finalists: int = 2
    listed: bool = True
    name = "contest"

    def __post_init__(self) -> None:
        _require_times(self.times)
        as_whole(self.rounds, "rounds", 1, len(self.times))
        as_whole(self.finalists, "finalists", 1)
        if len(self.rivals) < 1 + self.listed:
            raise UsageError(
                f"a contest of '{self.cond}' needs at least {1 + self.listed} values, got {len(self.rivals)}; add "
                "rivals, or use the echo"
            )

    def describe(self) -> dict[str, Any]:
        """Return the options as a checkpoint records them."""
        options = {k: v for k, v in vars(self).items() if k != "listed"}
        return {**options, "rivals": self.rivals.tolist() if isinstance(self.rivals, Tensor) else self.rivals}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Contest) and self.describe() == other.describe()

    @classmethod
    def planned(cls, cond: str, rivals: Any, evaluations: int, listed: bool = True) -> Contest:
        """Return a contest with at most this many evaluations per sample.

        Up to half of them are used for rounds of all rivals, the rest for the best two.
        """
        per_round, per_final = cls(cond, rivals, CONTEST_TIMES[:1], listed=listed)._costs
        if evaluations < per_round:
            raise UsageError(
                f"a contest between {per_round} values of '{cond}' needs at least {per_round} evaluations per sample, "
                f"got {evaluations}; give fewer rivals, or use the echo"
            )
        rounds = max(1, evaluations // (2 * per_round))
        number = rounds + (evaluations - rounds * per_round) // per_final
        times = tuple(CONTEST_TIMES[i % len(CONTEST_TIMES)] for i in range(number))
        return cls(cond, rivals, times, rounds, listed=listed)

    @property
    def _costs(self) -> tuple[int, int]:
        """Return the evaluations per sample of a round of all rivals, and of a time with finalists only."""
        count = len(self.rivals)
        return count + (not self.listed), 1 + min(self.finalists, count - self.listed)

    @property
    def evaluations(self) -> int:
        """Evaluations of the network per sample."""
        per_round, per_final = self._costs
        return self.rounds * per_round + (len(self.times) - self.rounds) * per_final

    def given(self, cond: Mapping[str, Any]) -> Contest:
        """Return this contest with `listed` set for samples with these conditions."""
        return replace(
            self, listed=among_rivals(self.cond, required_condition(cond, self.cond, self.name), self.rivals)
        )

    def __call__(
        self, network: Any, space: Space, x1: Any, cond: Mapping[str, Any], seed: int, first: int | None
    ) -> Evidence:
        count, space = batch_size(x1), space.given(cond)
        like = next(iter(channels(x1).values()))
        given = required_condition(cond, self.cond, self.name)
        listed = among_rivals(self.cond, given, self.rivals)
        value, rivals, texts = as_values(given, self.rivals, like.device)
        is_own = same(value, rivals)  # (B, K); rivals that are the sample's own condition cannot win
        weights = [t / (1 - t) for t in self.times]
        entered = torch.arange(len(rivals), device=value.device).expand(count, -1)  # the rivals at this time, (B, M)
        sums = value.new_zeros((count, len(rivals)), dtype=like.dtype)
        own_sum = sums.new_zeros(count)
        seen: Counter[float] = Counter()
        for number, (t, weight) in enumerate(zip(self.times, weights, strict=True)):
            noisy = renoised(space, x1, t, seed, first, draw=seen[t])
            seen[t] += 1
            if number == self.rounds:
                finalists = min(self.finalists, len(rivals) - listed)  # with two listed classes there is one rival
                entered = sums.masked_fill(is_own, torch.inf).topk(finalists, 1, largest=False)[1]
            joint = number < self.rounds and listed  # the sample's condition is among the entered rivals
            values = rivals[entered] if joint else torch.cat([value[:, None], rivals[entered]], 1)
            r = self._residual(network, space, noisy, values, cond, texts) * weight
            own_sum = own_sum + ((r * is_own).sum(1) if joint else r[:, 0])
            sums = sums.scatter_add(1, entered, r if joint else r[:, 1:])
        final = torch.full_like(sums, torch.inf).scatter(1, entered, sums.gather(1, entered))
        best, rival = final.masked_fill(is_own, torch.inf).min(1)
        total = sum(weights)
        return Evidence((own_sum - best) / total, rival, (best - own_sum) / total)

    def _residual(
        self,
        network: Any,
        space: Space,
        noisy: tuple[Any, Any, Tensor],
        values: Tensor,  # (B, M, *)
        cond: Mapping[str, Any],
        texts: Sequence[str],
    ) -> Tensor:  # -> (B, M)
        """Return r of each sample under each of its M conditions, as a weighted mean over channels."""
        count, several = values.shape[:2]
        rows = torch.arange(count, device=values.device).repeat_interleave(several)
        cond = select_conditions(cond, rows, count)
        cond[self.cond] = [texts[i] for i in values.flatten().tolist()] if texts else values.flatten(0, 1)
        x0, x1, t = (select(part, rows) for part in noisy)
        found = residuals(network, space.given(cond), x0, x1, t, cond)
        weights = found.new_tensor([c.weight for c in space.channels.values()])[:, None]
        return ((found * weights).sum(0) / weights.sum()).view(count, several)


# ---- nearest training points -----------------------------------------------------------------------------------------

NEIGHBOURS = 10  # the distance to a single point is too noisy
DISTANCES = 1 << 24  # distances computed at once
MISSING = (
    "the reference compares features of samples, but a checkpoint cannot store the function that computes them; call "
    "fmwc.fit_confidence(field, data, features=...) again"
)


def embedded(space: Space, x: Any) -> Tensor:  # -> (B, D)
    """Return states as vectors whose distances are those of the space: an angle becomes a point on a circle."""
    parts = []
    for name, channel in space.channels.items():
        if channel.rows:
            raise UsageError(
                f"samples have different numbers of rows in '{name}', so distances between them are not defined; give "
                "features=, a function of states"
            )
        flat = channels(x)[name].flatten(1)
        if isinstance(channel.manifold, FlatTorus):
            angle = 2 * math.pi * flat
            flat = torch.cat([angle.sin(), angle.cos()], 1) / (2 * math.pi)
        parts.append(flat * math.sqrt(channel.weight))
    return torch.cat(parts, 1)


def vectors(space: Space, x: Any, features: Callable[[Any], Tensor] | None = None) -> Tensor:  # -> (B, D)
    """Return one vector per sample: its features, or the embedded state if `features` is `None`."""
    if features is None:
        return embedded(space, x)
    found, count = features(x), batch_size(x)
    if not isinstance(found, Tensor) or found.ndim < 2 or len(found) != count or not found.is_floating_point():
        came = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise UsageError(
            f"features must return a tensor of real numbers with one row per sample ({count}, D), got {came}"
        )
    require_finite(found, "features of samples")
    return found.detach().flatten(1)


def missing_features(x: Any) -> Tensor:
    """Raise an error; placeholder for the features of a reference that was loaded from a checkpoint."""
    raise UsageError(MISSING)


@dataclass(frozen=True, eq=False)
class Nearest:
    """Check by the log mean distance to the ten nearest training points, within the same class if points have labels.

    With labels, this logarithm counts twice, and that of the nearest points of other classes is subtracted.

    Arguments:
        points: Training points, `(N, D)`, as `features` returns them.
        labels: The classes of the points, `(N,)`, if they have any.
        cond: The name of the condition that holds the class.
        features: A function of states that returns one vector per sample, in which similar samples are near one
            another. `None` uses the coordinates of the state.
    """

    points: Tensor
    labels: Tensor | None = None
    cond: str = ""
    features: Callable[[Any], Tensor] | None = None
    name = "nearest"
    evaluations = 0

    def describe(self) -> dict[str, Any]:
        """Return the options as a checkpoint records them, without the points (stored as tensors) and the features."""
        return {"points": len(self.points), "cond": self.cond, **({} if self.features is None else {"features": True})}

    @property
    def missing(self) -> str:
        """Why samples cannot be compared, if the features are missing after loading; else empty."""
        return MISSING if self.features is missing_features else ""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Nearest) or (self.cond, self.features) != (other.cond, other.features):
            return False
        pairs = ((self.points, other.points), (self.labels, other.labels))
        return all(a is b or (a is not None and b is not None and torch.equal(a.cpu(), b.cpu())) for a, b in pairs)

    def __call__(
        self, network: Any, space: Space, x1: Any, cond: Mapping[str, Any], seed: int, first: int | None
    ) -> Evidence:
        states = vectors(space, x1, self.features)
        points = self.points.to(states)
        if states.shape[1] != points.shape[1]:
            raise UsageError(
                f"samples have {states.shape[1]} coordinates, but the training points have {points.shape[1]}"
            )
        labels = None if self.labels is None else self.labels.to(states.device)
        logs = []
        for rows in torch.arange(len(states), device=states.device).split(max(1, DISTANCES // len(points))):
            distance = torch.cdist(states[rows], points)
            if labels is None:
                logs.append(_log_nearest(distance))
                continue
            alike = required_condition(cond, self.cond, self.name)[rows][:, None] == labels[None]
            mine, others = (_log_nearest(distance.masked_fill(mask, torch.inf)) for mask in (~alike, alike))
            logs.append(2 * mine - others)
        score = torch.cat(logs)
        if not bool(score.isfinite().all()):
            raise UsageError(
                f"the training points include fewer than {NEIGHBOURS} of some '{self.cond}', or of all other values"
            )
        return Evidence(score)


def _log_nearest(distance: Tensor) -> Tensor:  # (B, N) -> (B,)
    """Return the logarithm of the mean distance to the nearest neighbours."""
    few = distance.topk(min(NEIGHBOURS, distance.shape[1]), 1, largest=False).values
    return few.mean(1).clamp_min(torch.finfo(distance.dtype).tiny).log()


# ---- conditions --------------------------------------------------------------------------------------------------


def required_condition(cond: Mapping[str, Any], name: str, check: str) -> Any:
    """Return the condition by which a check compares samples; raise if it is missing."""
    if cond.get(name) is None:
        raise UsageError(
            f"the check '{check}' compares samples by '{name}', which is not among their conditions; give "
            f"cond={{'{name}': ...}}"
        )
    return cond[name]


def is_text(value: Any) -> bool:
    """Return whether a condition is a list of texts."""
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(one, str) for one in value)


def as_values(values: Any, rivals: Any, device: Any = None) -> tuple[Tensor, Tensor, list[str]]:
    """Return the samples' values and the rivals as tensors. Texts become indices into the returned list."""
    if not is_text(rivals):
        value, known = torch.as_tensor(values), torch.as_tensor(rivals)
        if not value.ndim or (value.dtype == torch.bool) != (known.dtype == torch.bool):
            kind = str(known.dtype).removeprefix("torch.")
            raise UsageError(
                f"a contest needs one value per sample, of the type {kind} of its rivals; got {values!r:.60}"
            )
        return value, known.to(value.device, value.dtype), []
    texts = list(dict.fromkeys([*rivals, *values]))
    value, others = (torch.tensor([texts.index(one) for one in several], device=device) for several in (values, rivals))
    return value, others, texts


def same(values: Tensor, rivals: Tensor) -> Tensor:  # (B, *), (K, *) -> (B, K)
    """Return which rivals equal each sample's value."""
    alike = values[:, None] == rivals[None].to(values)
    return alike.reshape(*alike.shape[:2], -1).all(2)


def among_rivals(name: str, values: Any, rivals: Any) -> bool:
    """Return whether the samples' values are among the rivals; raise if this holds for only some samples."""
    listed = same(*as_values(values, rivals)[:2]).any(1)
    if bool(listed.any()) and not bool(listed.all()):
        raise UsageError(
            f"'{name}' is among the rivals for some samples but not others; list all values of the samples as rivals"
        )
    return bool(listed.all())


def discrete_conditions(cond: Mapping[str, Any], space: Space, count: int) -> list[str]:
    """Return the names of the conditions that are classes: integers, one per sample, that do not count rows."""
    counted = {c.rows for c in space.channels.values()}
    return [
        name
        for name, value in cond.items()
        if name not in counted
        and has_rows(value, count)
        and value.ndim == 1
        and not value.is_floating_point()
        and not value.is_complex()
    ]


def _log_mean(found: Tensor, space: Space) -> Tensor:  # (C, B) -> (B,)
    """Return the mean of log r over the channels that can vary.

    The position of a single atom cannot vary, nor can a channel that the condition determines.
    """
    logs, free = found.clamp_min(TINY).log(), torch.ones_like(found)
    for row, (name, channel) in enumerate(space.channels.items()):
        present = space.present.get(name)
        if present is not None and channel.centred:
            free[row] = (present.flatten(1).sum(1) > 1).to(found.dtype)
    unknown = free * (found > 0)
    free = torch.where(unknown.any(0), unknown, free)
    return (logs * free).sum(0) / free.sum(0).clamp_min(1)


def _require_times(times: Sequence[float]) -> None:
    if not times or not all(0 < t < 1 for t in times):
        raise UsageError(f"the times of a check must lie strictly between 0 and 1, got {times}")


# ---- batches ---------------------------------------------------------------------------------------------------------

CHUNK = 3  # a contest evaluates at most this many rows per sample at once


def run_checks(
    checks: Mapping[str, Any],
    network: Any,
    space: Space,
    x: Any,
    cond: Mapping[str, Any],
    seed: int,
    first: int | None,
    *,
    batch: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Tensor]:
    """Return the evidence of checks by name, one row per sample. The arguments are those of :func:`check`."""
    total = batch_size(x)
    parts: dict[str, list[Tensor]] = {}
    with evaluating(network), torch.no_grad():
        for start in range(0, total, batch or total):
            count = min(batch or total, total - start)
            for name, check in checks.items():
                contest = isinstance(check, Contest)
                size = -(-CHUNK * count // len(check.rivals)) if contest else count
                for a in range(start, start + count, size):
                    rows = slice(a, min(a + size, start + count))
                    given = select_conditions(cond, rows, total)
                    at = None if first is None else first + a
                    found = check(network, space, select(x, rows), given, seed, at)
                    require_finite(found.score, f"the {name}")
                    parts.setdefault(name, []).append(found.score)
                    if contest:
                        parts.setdefault("rival", []).append(_value_of(check.rivals, found.rival))
                        parts.setdefault("margin", []).append(found.margin)
            if progress:
                progress(count)
    return {name: torch.cat(values) for name, values in parts.items()}


def _value_of(rivals: Any, index: Tensor) -> Tensor:
    """Return the values of rivals that are numbers, and the indices of rivals that are vectors or texts."""
    return rivals.to(index.device)[index] if isinstance(rivals, Tensor) and rivals.ndim == 1 else index
