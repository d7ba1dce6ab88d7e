"""Whether a network is called as it was trained: its loss beside that of a zero velocity and of other conventions.

The right velocity has the least flow-matching loss of all functions of (x_t, t). So where the same network, read by
another convention on the same path, has clearly less, it was trained by that convention; the message names the adapter.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fmwc.adapters import PREDICTIONS, SCHEDULES
from fmwc.errors import UsageError
from fmwc.flow import Euclidean, Pairs, Space, couple, path_of
from fmwc.modes import evaluating
from fmwc.randomness import Stream, derive
from fmwc.state import State, as_conditions, batch_size, channels, precision_of, require_state, tree_map

__all__ = ["Conventions", "check_conventions", "examine_conventions"]

MOST = 256  # samples looked at
TIMES_EACH = 4  # at so many times each; less of both where samples are large
NUMBERS = 1 << 15
CLEAR = 0.95  # of the loss of our convention: what a better one has at most
SURE = 4.0  # standard errors between two losses
GOOD = 0.5  # of a zero velocity's loss: a network that has less is not asked further questions
USELESS = 0.9  # of a zero velocity's loss: a network that has more has not learned the velocity (a linear one has 0.79)
EXPLAINED = 0.75  # of the variance of data or noise: what a prediction of them leaves at most
LINEAR = 1.25  # of the loss of a linear guess: what another reading of the network has at most (0.9 for samples)
RESCALED = 0.6  # of the loss on the data as they are: what those on rescaled data have at most
WORSE = 2.0  # of the loss of a linear guess: a network that has more wants rescaled data, if it has
LEARNED = 1.1  # at most of it there (an untrained network has 1.2 and more on data of any scale)
RATIOS = 2.0  # of data to noise, as logarithms: paths are compared from −2 to 2
FACTORS = (1 / 100, 1 / 10, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 3 / 2, 2, 3, 4, 10, 100)  # of the data
FAR = 4.0  # a standard deviation of data that is not one's own choice
ENDS = 0.15  # of time: left out at both ends where a path of the network's own divides by a scale that ends at zero

TIMES: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda t: t,
    "backwards=True": lambda t: 1 - t,
    "scale=1000.0": lambda t: 1000 * t,
    "scale=1000.0, backwards=True": lambda t: 1000 * (1 - t),
}
# Where a prediction is turned into a velocity: not where it is divided by a scale near zero.
TURNED: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda t: t > -1,
    "data": lambda t: t < 0.5,
    "noise": lambda t: t > 0.5,
}


class Reading(NamedTuple):
    """One way to read a network.

    Attributes:
        fix: The adapter, or the change of the data, that makes it so.
        asks: What is asked of the user, in words.
        loss: Its loss, as a multiple of a zero velocity's.
        share: Its loss, as a multiple of that of the best linear guess, by which readings are compared.
    """

    fix: str
    asks: str
    loss: float
    share: float = math.inf


@dataclass(frozen=True)
class Conventions:
    """What was found.

    Attributes:
        loss: The network's flow-matching loss, as a multiple of a zero velocity's: less than 1 for a trained network.
        better: A reading that explains the network clearly better than ours, if there is one.
    """

    loss: float
    better: Reading | None = None

    @property
    def useless(self) -> bool:
        """Whether the network is about as good as a zero velocity, or worse."""
        return not self.loss < USELESS

    @property
    def message(self) -> str:
        """One line on what is wrong and what to do; empty if nothing is."""
        worse = "worse than predicting nothing" if self.loss > 1 else "that of another convention"
        times = f"{self.loss:.3g} times the loss of a zero velocity"
        if self.better is not None:
            return (
                f"the network's loss is {worse} ({times}, {self.better.loss:.3g} otherwise): {self.better.asks} use "
                f"{self.better.fix}; conventions=False skips this check"
            )
        if self.useless:
            return (
                f"the network's loss is {times}: is it untrained, or trained with other pairs (pairs='ot'), another "
                "path, or data unlike these (in scale, say)? conventions=False skips this check"
            )
        return ""


def check_conventions(
    network: Any,
    space: Space,
    x1: State,
    cond: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    pairs: Pairs = None,
    refuse: bool = True,
) -> Conventions:
    """Raise where another convention explains a network clearly better than ours; warn where it has learned nothing.

    Arguments:
        network: A network or a field, called as `network(x, t, **cond)`.
        space: Where states live.
        x1: Data, or samples of the network's own.
        cond: Its conditions, a row per sample.
        seed: Seeds the choice of samples, and their noise.
        pairs: Which noise goes with which data (:func:`fmwc.flow.couple`).
        refuse: Whether to raise. If not, `x1` are samples of any quality: losses are medians over samples, and a
            better convention is a warning.
    """
    found = examine_conventions(network, space, x1, cond, seed=seed, pairs=pairs, robust=not refuse)
    if refuse and found.better is not None:
        raise UsageError(found.message)
    if found.message:
        warnings.warn(found.message, stacklevel=3)
    return found


def examine_conventions(
    network: Any,
    space: Space,
    x1: State,
    cond: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    pairs: Pairs = None,
    robust: bool = False,
) -> Conventions:
    """Compare a network's loss with those of other conventions, without raising; see :func:`check_conventions`."""
    network = getattr(network, "network", network) if hasattr(network, "noise") else network
    # Guidance is no velocity of a path; what is guided is.
    called = getattr(network, "conditional", network)
    modes = evaluating(network) if isinstance(network, nn.Module) else nullcontext()
    with modes, torch.inference_mode(False), torch.no_grad():
        return _Look(network, called, space, x1, as_conditions(cond), seed, pairs, robust).found()


class _Look:
    """One batch of data on paths from noise, and the network's outputs there."""

    def __init__(
        self,
        network: Any,
        called: Any,
        space: Space,
        x1: State,
        cond: dict[str, Any],
        seed: int,
        pairs: Pairs,
        robust: bool,
    ) -> None:
        self.robust, self.most = robust, USELESS if robust else LINEAR
        total, size = batch_size(x1), sum(c[0].numel() for c in channels(x1).values())
        count = max(min(total, MOST, NUMBERS // size), min(total, 16))
        count *= max(1, min(MOST * TIMES_EACH, NUMBERS // size) // count)
        order = torch.randperm(total, generator=torch.Generator().manual_seed(derive(seed, "rows")))
        rows = order[torch.arange(count) % min(total, count, MOST)]
        weights = network.parameters() if isinstance(network, nn.Module) else ()
        device = next((p.device for p in weights), next(iter(channels(x1).values())).device)

        def taken(value: Any) -> Any:
            if isinstance(value, (list, tuple)) and len(value) == total:  # texts
                return [value[row] for row in rows.tolist()]
            several = isinstance(value, Tensor) and value.ndim > 0 and len(value) == total
            return value[rows.to(value.device)].to(device) if several else value

        dtype = precision_of(network)
        self.x1 = tree_map(lambda c: taken(c).to(dtype), x1)
        self.cond = {name: taken(value) for name, value in cond.items()}
        self.network, self.called, self.space = network, called, space.given(self.cond)
        given = pairs if pairs is None or isinstance(pairs, str) or callable(pairs) else tree_map(taken, pairs)
        randomness = Stream(torch.Generator(device).manual_seed(derive(seed, "noise")))
        self.x0 = tree_map(lambda c: c.to(dtype), couple(given, self.space, self.x1, randomness))
        # Evenly spaced times, in an order of their own.
        order = torch.randperm(count, generator=torch.Generator().manual_seed(derive(seed, "times")))
        self.t = ((order.to(device, dtype) + 0.5) / count).to(dtype)
        self.path = path_of(network, self.space)
        flat = all(isinstance(c.manifold, Euclidean) for c in space.channels.values())
        ours = getattr(self.path, "__self__", None) is self.space
        self.straight = flat and ours
        self.t = self.t if ours else ENDS + (1 - 2 * ENDS) * self.t

    def found(self) -> Conventions:
        x_t, u_t = self.path(self.x0, self.x1, self.t)
        first = self._output(x_t, self.t)
        assert first is not None
        require_state(first, "the network's velocity")
        self.space.check(first, "the network's velocity is of another shape: ")
        ours, nothing = self._errors(first, u_t), self._errors(tree_map(torch.zeros_like, u_t), u_t)
        loss = self._ratio(ours, nothing)
        called = self._called_otherwise(x_t, u_t, first, ours, nothing, loss)
        rescaled, least = self._rescaled(loss)
        spread = float(sum(c.std() for c in channels(self.x1).values()) / len(channels(self.x1)))
        far = not 1 / FAR < spread < FAR
        if called is not None and (least < called.share or (far and rescaled is not None)):
            called = None
        return Conventions(loss, called or rescaled)

    def _called_otherwise(
        self, x_t: Any, u_t: Any, first: Any, ours: Tensor, nothing: Tensor, loss: float
    ) -> Reading | None:
        """The best of the conventions that have clearly less loss on the same path."""
        found: list[tuple[Reading, str, str, Tensor]] = []
        # The best constant: what an untrained network can come near to by chance.
        constant = self._errors(tree_map(lambda c: c.mean(0, keepdim=True).expand_as(c), u_t), u_t)
        linear = self._errors(self._linear(x_t, self.x1), u_t) if self.straight else None
        for reading, what, options, v, least in self._readings(x_t, first, asked=not loss < GOOD):
            where, theirs = TURNED[what](self.t), self._errors(v, u_t)
            # A prediction of nothing is a velocity, too: x / t, where data are wide.
            bars = [ours, constant, *([] if least is None else [self._errors(least, u_t)])]
            if not all(self._clearly(theirs[where], bar[where]) for bar in bars):
                continue
            share = 1.0 if linear is None else self._ratio(theirs[where], linear[where])
            if what or share < self.most:
                reading = reading._replace(loss=self._ratio(theirs[where], nothing[where]), share=share)
                found.append((reading, what, options, theirs))
        velocities = [one for one in found if not one[1]]
        best = min(velocities, key=lambda one: one[0].loss, default=None)
        for other in sorted((one for one in found if one[1]), key=lambda one: one[0].loss):
            where = TURNED[other[1]](self.t)  # compared where a prediction can be
            if best is None or self._clearly(other[3][where], best[3][where]):
                return self._predictions(other[1], other[2])[1] or other[0]
        if best is None and loss < USELESS:
            return None
        if best is not None and best[0].loss < GOOD:
            return best[0]
        share, predicted = self._predictions()
        if best is not None and best[0].loss < USELESS and not share < USELESS:  # no better than a linear guess
            return best[0]
        return predicted

    def _output(self, x: Any, t: Tensor) -> Any | None:
        """What the network gives; `None` where it cannot be called so."""
        try:
            return self.called(x, t, **self.cond)
        except (IndexError, RuntimeError, ValueError):
            if t is self.t:
                raise
            return None

    def _readings(self, x_t: Any, first: Any, asked: bool) -> Iterator[tuple[Reading, str, str, Any, Any]]:
        """Every other convention on the same path: what it predicts, how it is called, its velocity, and that of a
        network which predicts nothing."""
        for options, time in TIMES.items():
            if options and not asked:
                return
            output = first if not options else self._output(x_t, time(self.t))
            if output is None:
                continue
            back = "backwards" in options
            asks = "a time up to 1000?" if "scale" in options else "noise at t = 1?" if back else "a turned velocity?"
            for sign in (1, -1):
                if options or sign == -1:
                    turned = "output=lambda v: -v" if back != (sign == -1) else ""
                    fix = f"adapt({', '.join(filter(None, ['net', options, turned]))})"
                    yield Reading(fix, asks, math.nan), "", options, tree_map(lambda c: sign * c, output), None  # noqa: B023
            for what in PREDICTIONS if self.straight else ():
                reading = Reading(_predicting(what, "linear", options), f"does it predict the {what}?", math.nan)
                least = self._as_velocity(what, x_t, tree_map(torch.zeros_like, output))
                yield reading, what, options, self._as_velocity(what, x_t, output), least

    def _as_velocity(self, what: str, x_t: Any, output: Any) -> Any:
        ones = torch.ones_like(self.t)

        def one(x: Tensor, found: Tensor) -> Tensor:
            scales = (scale[(..., *[None] * (x.ndim - 1))] for scale in (self.t, 1 - self.t, ones, -ones))
            return PREDICTIONS[what](x, found, *scales)

        return tree_map(one, x_t, output)

    def _predictions(self, known: str = "", called: str | None = None) -> tuple[float, Reading | None]:
        """The best prediction of data or noise on any path, if one leaves little of their variance unexplained.

        Paths are compared at the same ratios of data to noise, where the least error is the same on all of them. Also
        returns what is left, divided by what a linear guess leaves.

        Arguments:
            known: What it predicts, if that is known,
            called: and how it is called.
        """
        best: tuple[float, Reading | None] = math.inf, None
        if not self.straight:
            return best
        signal = (RATIOS * (2 * self.t - 1)).exp()
        for schedule, scales in SCHEDULES.items():
            t = _time_of(scales, signal)
            alpha, sigma = scales(t)
            x_t = tree_map(lambda a, b: _by(alpha, a) * a + _by(sigma, b) * b, self.x1, self.x0)  # noqa: B023
            for options in TIMES if called is None else (called,):
                if (output := self._output(x_t, TIMES[options](t))) is None:
                    continue
                for what, target in (("data", self.x1), ("noise", self.x0)):
                    centre = tree_map(lambda c: c.mean(0, keepdim=True).expand_as(c), target)
                    theirs, guess = self._errors(output, target), _guess(what, x_t, self.x1, alpha, sigma)
                    left = self._ratio(theirs, self._errors(centre, target))
                    share = self._ratio(theirs, self._errors(guess, target))
                    if what == (known or what) and left < EXPLAINED and share < min(best[0], self.most):
                        asks = f"does it predict the {what}?"
                        best = share, Reading(_predicting(what, schedule, options), asks, left, share)
        return best

    def _linear(self, x_t: Any, x1: Any) -> Any:
        """The best velocity that is linear in each number of the state."""
        data, noise = (_guess(what, x_t, x1, self.t, 1 - self.t) for what in ("data", "noise"))
        return tree_map(torch.sub, data, noise)

    def _rescaled(self, loss: float) -> tuple[Reading | None, float]:
        """A scale of the data at which the network has clearly less loss, in a flat space of one channel.

        Also returns the least loss at any scale, as a multiple of a linear guess's.
        """
        if loss < GOOD or not self.straight or not isinstance(self.x1, Tensor):
            return None, math.inf
        x1, found, least = self.x1, [], math.inf
        low, high, spread = float(x1.min()), float(x1.max()), float(x1.std().clamp_min(1e-12))
        most = RESCALED * loss if loss < USELESS else USELESS
        candidates = [
            ("2 * x - 1", 2 * x1 - 1, low > -0.1 and 0.8 < high < 1.2, RESCALED * loss),
            ("(x + 1) / 2", (x1 + 1) / 2, -1.2 < low < -0.8 and 0.8 < high < 1.2, RESCALED * loss),
            ("x / 255", x1 / 255, low > -25 and 200 < high < 280, most),
            ("x / 127.5 - 1", x1 / 127.5 - 1, low > -25 and 200 < high < 280, most),
            ("(x - x.mean()) / x.std()", (x1 - x1.mean()) / spread, not 1 / 1.5 < spread < 1.5, most),
            ("x / x.std()", x1 / spread, not 1 / 1.5 < spread < 1.5, most),
            ("(x - x.mean(0)) / x.std(0)", (x1 - x1.mean(0)) / x1.std(0).clamp_min(1e-6 * spread), x1.ndim == 2, most),
            *((f"{factor:.3g} * x", factor * x1, True, RESCALED * loss) for factor in FACTORS),
        ]
        ours = self._share(loss)
        for words, rescaled, fits, enough in candidates:
            x_t, u_t = self.path(self.x0, rescaled, self.t)
            if fits and (output := self._output(x_t, self.t.clone())) is not None:
                theirs = self._errors(output, u_t)
                other = self._ratio(theirs, self._errors(torch.zeros_like(u_t), u_t))
                share = self._ratio(theirs, self._errors(self._linear(x_t, rescaled), u_t))
                least = min(least, share)
                if (other < enough and share < LINEAR) or (ours > WORSE and share < LEARNED):
                    found.append(Reading(words, "data of another scale?", other, share))
        return min(found, key=lambda reading: reading.share, default=None), least

    def _share(self, loss: float) -> float:
        """The network's loss as a multiple of that of the best linear guess, on the data as they are."""
        x_t, u_t = self.path(self.x0, self.x1, self.t)
        nothing, linear = (self._errors(v, u_t) for v in (tree_map(torch.zeros_like, u_t), self._linear(x_t, self.x1)))
        return loss * self._ratio(nothing, linear)

    def _errors(self, v: Any, u: Any) -> Tensor:  # -> (B,)
        """The squared error of each sample, channels weighted as in the training loss."""
        total, weights = torch.zeros_like(self.t), 0.0
        for name, wanted in channels(u).items():
            channel, present = self.space.channels[name], self.space.present.get(name)
            square = (channels(v)[name] - wanted).square()
            if present is None:
                error = square.flatten(1).mean(1)
            else:
                numbers = present.flatten(1).sum(1) * (square[0].numel() // present[0].numel())
                error = (square * present).flatten(1).sum(1) / numbers.clamp_min(1)
            total, weights = total + channel.weight * error, weights + channel.weight
        return (total / weights).nan_to_num(math.inf)

    def _clearly(self, theirs: Tensor, ours: Tensor) -> bool:
        """Whether errors of the same samples are less on average, beyond chance and by a share that matters."""
        gain = ours - theirs
        gain = gain.sign() if self.robust else gain
        return bool(gain.mean() > SURE * gain.std() / len(gain) ** 0.5) and self._ratio(theirs, ours) < CLEAR

    def _ratio(self, a: Tensor, b: Tensor) -> float:
        """The ratio of two means, or medians; infinite where it is not a number."""
        above, below = (one.median() if self.robust else one.mean() for one in (a, b))
        ratio = float(above / below.clamp_min(torch.finfo(b.dtype).tiny))
        return ratio if math.isfinite(ratio) else math.inf


def _time_of(schedule: Callable[[Tensor], tuple[Tensor, Tensor]], ratio: Tensor) -> Tensor:
    """When a schedule has a ratio α/σ of data to noise, which rises with time."""
    grid = torch.linspace(0, 1, 10_001, dtype=ratio.dtype, device=ratio.device)[1:-1]
    alpha, sigma = schedule(grid)
    return grid[torch.searchsorted(alpha / sigma.clamp_min(1e-12), ratio).clamp_max(len(grid) - 1)]


def _guess(what: str, x_t: Any, x1: Any, alpha: Tensor, sigma: Tensor) -> Any:
    """The best guess of data or noise that is linear in each number of the state x_t = αx₁ + σx₀."""

    def one(x: Tensor, data: Tensor) -> Tensor:
        mean, var, a, s = data.mean(0), data.var(0), _by(alpha, x), _by(sigma, x)
        away = (x - a * mean) / (a.square() * var + s.square())
        return mean + a * var * away if what == "data" else s * away

    return tree_map(one, x_t, x1)


def _by(scale: Tensor, x: Tensor) -> Tensor:  # (B,) -> (B, 1, …)
    return scale[(..., *[None] * (x.ndim - 1))]


def _predicting(what: str, schedule: str, options: str) -> str:
    rest = ", ".join(filter(None, [f'"{what}"', f'"{schedule}"' if schedule != "linear" else "", options]))
    return f"predicting(net, {rest})"
