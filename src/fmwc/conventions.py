"""Conventions of a network: what it predicts, how it is called, and whether that agrees with its training.

The right velocity has the least flow-matching loss of all functions of (x_t, t). If the network has clearly less loss
under another convention on the same path, it was trained with that convention, and the error names the adapter.
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

from fmwc.errors import UsageError
from fmwc.flow import Euclidean, Pairs, Space, couple, path_of
from fmwc.modes import evaluating
from fmwc.randomness import Stream, derive
from fmwc.state import (
    State,
    as_conditions,
    batch_size,
    channels,
    has_rows,
    precision_of,
    require_state,
    select_conditions,
    tree_map,
    unsqueeze_like,
)

__all__ = ["PREDICTIONS", "SCHEDULES", "Conventions", "PathSchedule", "check_conventions", "examine_conventions"]

PathSchedule = Callable[[Tensor], tuple[Tensor, Tensor]]  # t -> scales α of data and σ of noise, x_t = α x1 + σ x0


def _vp(t: Tensor, low: float = 0.1, high: float = 20.0) -> tuple[Tensor, Tensor]:
    s = 1 - t
    alpha = torch.exp(-0.25 * s.square() * (high - low) - 0.5 * s * low)
    return alpha, (1 - alpha.square()).clamp_min(0).sqrt()


SCHEDULES: dict[str, PathSchedule] = {
    "linear": lambda t: (t, 1 - t),
    "cosine": lambda t: (torch.sin(math.pi / 2 * t), torch.cos(math.pi / 2 * t)),
    "vp": _vp,  # β from 0.1 to 20, as in DDPM and score-based models
}
# The velocity for a state x and a prediction, with scales α, σ and their slopes. The prediction occurs once, so that
# diagonal propagation counts its variance once.
PREDICTIONS: dict[str, Callable[..., Tensor]] = {
    "data": lambda x, found, a, s, da, ds: (da - ds * a / s) * found + ds / s * x,
    "noise": lambda x, found, a, s, da, ds: (ds - da * s / a) * found + da / a * x,
}
TIMES: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda t: t,
    "backwards=True": lambda t: 1 - t,
    "scale=1000.0": lambda t: 1000 * t,
    "scale=1000.0, backwards=True": lambda t: 1000 * (1 - t),
}
# The times at which a prediction is compared as a velocity, away from divisions by a scale near zero.
COMPARED: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda t: t > -1,
    "data": lambda t: t < 0.5,
    "noise": lambda t: t > 0.5,
}

# Sizes, which are smaller for large samples
MOST = 256  # examined samples
TIMES_EACH = 4  # times per sample
NUMBERS = 1 << 15
# Thresholds of losses relative to the loss of our convention
CLEAR = 0.95  # largest loss of a better convention
RESCALED = 0.6  # largest loss on rescaled data
SURE = 4.0  # standard errors between two losses
# Thresholds of losses relative to that of a zero velocity
GOOD = 0.5  # below it, the network is called correctly
USELESS = 0.9  # above it, the network has not learned the velocity (a linear network has 0.79)
# Thresholds of losses relative to that of the best linear guess
LINEAR = 1.25  # largest loss of another convention (0.9 for samples)
WORSE = 2.0  # above it, the network may need rescaled data
LEARNED = 1.1  # largest loss on rescaled data (an untrained network has at least 1.2 on data of any scale)
EXPLAINED = 0.75  # largest unexplained share of the variance, for a network that predicts data or noise
# Others
RATIOS = 2.0  # logarithms of the ratio of data to noise at which paths are compared, from −2 to 2
FACTORS = (1 / 100, 1 / 10, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 3 / 2, 2, 3, 4, 10, 100)  # of the data
FAR = 4.0  # implausible standard deviation of the data, or its inverse
ENDS = 0.15  # excluded at both ends of time if the network defines a path, which may divide by a scale near zero


class Alternative(NamedTuple):
    """Alternative convention or scale of the data.

    Attributes:
        fix: The adapter or the change of the data, as code.
        question: The question to the user in the message.
        loss: The network's loss relative to that of a zero velocity.
        share: The network's loss relative to that of the best linear guess; alternatives are compared by it.
    """

    fix: str
    question: str
    loss: float = math.nan
    share: float = math.inf


@dataclass(frozen=True)
class Conventions:
    """Result of :func:`examine_conventions`.

    Attributes:
        loss: The network's flow-matching loss relative to that of a zero velocity; below 1 if the network is trained.
        better: An alternative with clearly less loss, if there is one.
    """

    loss: float
    better: Alternative | None = None

    @property
    def useless(self) -> bool:
        """Whether the network is not clearly better than a zero velocity."""
        return not self.loss < USELESS

    @property
    def withheld(self) -> str:
        """Why there is no confidence: samples of a network that is clearly worse than a zero velocity mean nothing."""
        if not self.loss > 1 / USELESS:
            return ""
        return (
            f"the network's loss is {self.loss:.3g} times that of a zero velocity, as if it was trained from another "
            "source than the noise of the space, or on other data"
        )

    @property
    def message(self) -> str:
        """One line that describes the problem and the fix; empty if there is no problem."""
        worse = "worse than predicting nothing" if self.loss > 1 else "that of another convention"
        times = f"{self.loss:.3g} times the loss of a zero velocity"
        if self.better is not None:
            return (
                f"the network's loss is {worse} ({times}, {self.better.loss:.3g} otherwise): {self.better.question} "
                f"use {self.better.fix}; conventions=False skips this check"
            )
        if self.useless:
            return (
                f"the network's loss is {times}: is it untrained, or trained with other pairs (pairs='ot'), another "
                "source or path, or different data (for example in scale)? conventions=False skips this check"
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
    """Raise if a network fits another convention clearly better; warn if the network is not trained.

    Arguments:
        network: A network or a field, called as `network(x, t, **cond)`.
        space: The space of the states.
        x1: Data, or samples of the network.
        cond: The conditions of `x1`, with one row per sample.
        seed: The seed of the choice of samples and of their noise.
        pairs: The coupling of noise and data (:func:`fmwc.flow.couple`).
        refuse: Whether to raise. If false, `x1` may be samples of any quality: losses are medians over samples, and a
            better convention is only a warning.
    """
    result = examine_conventions(network, space, x1, cond, seed=seed, pairs=pairs, robust=not refuse)
    if refuse and result.better is not None:
        raise UsageError(result.message)
    if result.message:
        warnings.warn(result.message, stacklevel=3)
    return result


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
    """Compare a network's loss with those of other conventions, as :func:`check_conventions`, without raising."""
    network = getattr(network, "network", network) if hasattr(network, "noise") else network
    # A guided velocity is not that of a path, but the velocity of its network is.
    called = getattr(network, "conditional", network)
    modes = evaluating(network) if isinstance(network, nn.Module) else nullcontext()
    with modes, torch.inference_mode(False), torch.no_grad():
        return _Examination(network, called, space, x1, as_conditions(cond), seed, pairs, robust).result()


class _Candidate(NamedTuple):
    """Alternative on the same path, with the squared error of its velocity per sample."""

    alternative: Alternative
    predicts: str  # empty for a velocity
    options: str  # options of the adapter
    errors: Tensor


class _Examination:
    """Examination of a network on one batch of points on paths from noise to data."""

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
        self.network, self.called, self.robust = network, called, robust
        self.largest = USELESS if robust else LINEAR
        total, size = batch_size(x1), sum(c[0].numel() for c in channels(x1).values())
        count = max(min(total, MOST, NUMBERS // size), min(total, 16))
        count *= max(1, min(MOST * TIMES_EACH, NUMBERS // size) // count)
        order = torch.randperm(total, generator=torch.Generator().manual_seed(derive(seed, "rows")))
        rows = order[torch.arange(count) % min(total, count, MOST)]
        weights = network.parameters() if isinstance(network, nn.Module) else ()
        device = next((p.device for p in weights), next(iter(channels(x1).values())).device)

        def on_device(value: Any) -> Any:
            return value.to(device) if has_rows(value, count) else value

        def chosen(state: Any) -> Any:
            return tree_map(lambda c: on_device(c[rows.to(c.device)]) if has_rows(c, total) else c, state)

        dtype = precision_of(network)
        self.x1 = tree_map(lambda c: c.to(dtype), chosen(x1))
        self.cond = {name: on_device(value) for name, value in select_conditions(cond, rows, total).items()}
        self.space = space.given(self.cond)
        given = pairs if pairs is None or isinstance(pairs, str) or callable(pairs) else chosen(pairs)
        randomness = Stream(torch.Generator(device).manual_seed(derive(seed, "noise")))
        self.x0 = tree_map(lambda c: c.to(dtype), couple(given, self.space, self.x1, randomness))
        # Evenly spaced times, in random order.
        order = torch.randperm(count, generator=torch.Generator().manual_seed(derive(seed, "times")))
        self.t = ((order.to(device, dtype) + 0.5) / count).to(dtype)
        self.path = path_of(network, self.space)
        ours = getattr(self.path, "__self__", None) is self.space
        self.straight = ours and all(isinstance(c.manifold, Euclidean) for c in space.channels.values())
        self.t = self.t if ours else ENDS + (1 - 2 * ENDS) * self.t
        self.x_t, self.u = self.path(self.x0, self.x1, self.t)

    def result(self) -> Conventions:
        first = self._output(self.x_t, self.t)
        assert first is not None
        require_state(first, "the network's velocity")
        self.space.check(first, "the network's velocity has the wrong shape: ")
        errors, zero = self._errors(first, self.u), self._errors(tree_map(torch.zeros_like, self.u), self.u)
        loss = self._ratio(errors, zero)
        better = self._better_convention(first, errors, zero, loss)
        rescaled, least = self._better_scale(loss)
        spread = float(sum(c.std() for c in channels(self.x1).values()) / len(channels(self.x1)))
        unusual = not 1 / FAR < spread < FAR
        if better is not None and (least < better.share or (unusual and rescaled is not None)):
            better = None
        return Conventions(loss, better or rescaled)

    # ---- other conventions ----

    def _better_convention(self, first: Any, errors: Tensor, zero: Tensor, loss: float) -> Alternative | None:
        """Return the best convention with clearly less loss on the same path; `None` if there is none."""
        velocities, predictions = self._candidates(first, errors, zero, loss)
        best = min(velocities, key=lambda one: one.alternative.loss, default=None)
        for one in sorted(predictions, key=lambda one: one.alternative.loss):
            where = COMPARED[one.predicts](self.t)
            if best is None or self._clearly_less(one.errors[where], best.errors[where]):
                return self._prediction(one.predicts, one.options)[1] or one.alternative
        if best is None:
            return None if loss < USELESS else self._prediction()[1]
        if best.alternative.loss < GOOD:
            return best.alternative
        share, predicted = self._prediction()
        useful = best.alternative.loss < USELESS and not share < USELESS  # otherwise no better than a linear guess
        return best.alternative if useful else predicted

    def _candidates(
        self, first: Any, errors: Tensor, zero: Tensor, loss: float
    ) -> tuple[list[_Candidate], list[_Candidate]]:
        """Return the velocities and the predictions with clearly less loss than our convention and than constants."""
        found: tuple[list[_Candidate], list[_Candidate]] = [], []
        # An untrained network can be near the best constant by chance.
        constant = self._errors(tree_map(lambda c: c.mean(0, keepdim=True).expand_as(c), self.u), self.u)
        linear = self._errors(self._linear(self.x_t, self.x1), self.u) if self.straight else None
        for alternative, predicts, options, v, of_nothing in self._conventions(first, every=not loss < GOOD):
            where, theirs = COMPARED[predicts](self.t), self._errors(v, self.u)
            # A prediction of zero also gives a velocity: x / t for wide data.
            bounds = [errors, constant, *([] if of_nothing is None else [self._errors(of_nothing, self.u)])]
            if not all(self._clearly_less(theirs[where], bound[where]) for bound in bounds):
                continue
            share = 1.0 if linear is None else self._ratio(theirs[where], linear[where])
            if predicts or share < self.largest:
                ratio = self._ratio(theirs[where], zero[where])
                one = _Candidate(alternative._replace(loss=ratio, share=share), predicts, options, theirs)
                found[bool(predicts)].append(one)
        return found

    def _conventions(self, first: Any, every: bool) -> Iterator[tuple[Alternative, str, str, Any, Any]]:
        """Yield every other convention on the same path.

        Each item is an alternative without losses, the kind of prediction, the options of the adapter, the velocity,
        and for a prediction the velocity of a network that predicts zero. Without `every`, only conventions with the
        same call are tried.
        """
        for options, time in TIMES.items() if every else [("", TIMES[""])]:
            output = first if not options else self._output(self.x_t, time(self.t))
            if output is None:
                continue
            back = "backwards" in options
            question = "noise at t = 1?" if back else "a turned velocity?"
            question = "a time up to 1000?" if "scale" in options else question
            for sign in (1, -1) if options else (-1,):
                turned = "output=lambda v: -v" if back != (sign == -1) else ""
                fix = f"adapt({', '.join(filter(None, ['net', options, turned]))})"
                yield Alternative(fix, question), "", options, tree_map(lambda c: sign * c, output), None  # noqa: B023
            for what in PREDICTIONS if self.straight else ():
                of_nothing = self._as_velocity(what, tree_map(torch.zeros_like, output))
                yield _predicting(what, "linear", options), what, options, self._as_velocity(what, output), of_nothing

    def _as_velocity(self, what: str, output: Any) -> Any:
        """Return the velocity of a prediction on the straight path."""
        one = torch.ones_like(self.t)

        def convert(x: Tensor, found: Tensor) -> Tensor:
            return PREDICTIONS[what](x, found, *(unsqueeze_like(s, x) for s in (self.t, 1 - self.t, one, -one)))

        return tree_map(convert, self.x_t, output)

    def _prediction(self, known: str = "", called: str | None = None) -> tuple[float, Alternative | None]:
        """Return the relative loss of the best prediction of data or noise on any path, and the prediction.

        Losses are relative to that of a linear guess. Paths are compared at the same ratios of data to noise, at which
        the least error is the same on all paths. A prediction must explain some of the variance.

        Arguments:
            known: What the network predicts (`data` or `noise`), if known.
            called: The options of the call, if known.
        """
        best: tuple[float, Alternative | None] = math.inf, None
        if not self.straight:
            return best
        signal = (RATIOS * (2 * self.t - 1)).exp()
        for schedule, scales in SCHEDULES.items():
            t = _time_of(scales, signal)
            alpha, sigma = scales(t)
            x_t = tree_map(lambda a, b: unsqueeze_like(alpha, a) * a + unsqueeze_like(sigma, b) * b, self.x1, self.x0)  # noqa: B023
            for options in TIMES if called is None else (called,):
                if (output := self._output(x_t, TIMES[options](t))) is None:
                    continue
                for what, target in (("data", self.x1), ("noise", self.x0)):
                    centre = tree_map(lambda c: c.mean(0, keepdim=True).expand_as(c), target)
                    guess = _linear_guess(what, x_t, self.x0, self.x1, alpha, sigma)
                    theirs = self._errors(output, target)
                    left = self._ratio(theirs, self._errors(centre, target))
                    share = self._ratio(theirs, self._errors(guess, target))
                    if what == (known or what) and left < EXPLAINED and share < min(best[0], self.largest):
                        best = share, _predicting(what, schedule, options)._replace(loss=left, share=share)
        return best

    # ---- other scales of the data ----

    def _better_scale(self, loss: float) -> tuple[Alternative | None, float]:
        """Return a scale of the data with clearly less loss, and the least loss; for flat spaces with one channel.

        The least loss over all scales is relative to that of a linear guess.
        """
        if loss < GOOD or not self.straight or not isinstance(self.x1, Tensor):
            return None, math.inf
        x1, found, least = self.x1, [], math.inf
        zero, linear = self._errors(torch.zeros_like(self.u), self.u), self._linear(self.x_t, x1)
        ours = loss * self._ratio(zero, self._errors(linear, self.u))
        for words, rescaled, enough in self._rescaled(x1, loss):
            x_t, u = self.path(self.x0, rescaled, self.t)
            if (output := self._output(x_t, self.t.clone())) is not None:
                theirs = self._errors(output, u)
                ratio = self._ratio(theirs, self._errors(torch.zeros_like(u), u))
                share = self._ratio(theirs, self._errors(self._linear(x_t, rescaled), u))
                least = min(least, share)
                if (ratio < enough and share < LINEAR) or (ours > WORSE and share < LEARNED):
                    question = "data of another scale? or another source than the noise of the space?"
                    found.append(Alternative(words, question, ratio, share))
        return min(found, key=lambda one: one.share, default=None), least

    def _rescaled(self, x1: Tensor, loss: float) -> Iterator[tuple[str, Tensor, float]]:
        """Yield rescalings that suit the range of the data: code, rescaled data, and largest loss to accept."""
        low, high, spread = float(x1.min()), float(x1.max()), float(x1.std().clamp_min(1e-12))
        less, usual = RESCALED * loss, RESCALED * loss if loss < USELESS else USELESS
        bytes_, raw = low > -25 and 200 < high < 280, not 1 / 1.5 < spread < 1.5
        for words, rescaled, suits, enough in (
            ("2 * x - 1", 2 * x1 - 1, low > -0.1 and 0.8 < high < 1.2, less),
            ("(x + 1) / 2", (x1 + 1) / 2, -1.2 < low < -0.8 and 0.8 < high < 1.2, less),
            ("x / 255", x1 / 255, bytes_, usual),
            ("x / 127.5 - 1", x1 / 127.5 - 1, bytes_, usual),
            ("(x - x.mean()) / x.std()", (x1 - x1.mean()) / spread, raw, usual),
            ("x / x.std()", x1 / spread, raw, usual),
            ("(x - x.mean(0)) / x.std(0)", (x1 - x1.mean(0)) / x1.std(0).clamp_min(1e-6 * spread), x1.ndim == 2, usual),
            *((f"{factor:.3g} * x", factor * x1, True, less) for factor in FACTORS),
        ):
            if suits:
                yield words, rescaled, enough

    # ---- errors ----

    def _output(self, x: Any, t: Tensor) -> Any | None:
        """Return the output of the network, or `None` if the call fails."""
        try:
            return self.called(x, t, **self.cond)
        except (IndexError, RuntimeError, ValueError):
            if t is self.t:
                raise
            return None

    def _linear(self, x_t: Any, x1: Any) -> Any:
        """Return the best velocity that is linear in each coordinate of the state."""
        data, noise = (_linear_guess(what, x_t, self.x0, x1, self.t, 1 - self.t) for what in ("data", "noise"))
        return tree_map(torch.sub, data, noise)

    def _errors(self, v: Any, u: Any) -> Tensor:  # -> (B,)
        """Return the squared error per sample, with the weights of the channels in the training loss."""
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

    def _clearly_less(self, theirs: Tensor, ours: Tensor) -> bool:
        """Return whether errors of the same samples are significantly and relevantly smaller on average."""
        gain = ours - theirs
        gain = gain.sign() if self.robust else gain
        return bool(gain.mean() > SURE * gain.std() / len(gain) ** 0.5) and self._ratio(theirs, ours) < CLEAR

    def _ratio(self, a: Tensor, b: Tensor) -> float:
        """Return the ratio of two means or medians; infinity if it is not finite."""
        above, below = (one.median() if self.robust else one.mean() for one in (a, b))
        ratio = float(above / below.clamp_min(torch.finfo(b.dtype).tiny))
        return ratio if math.isfinite(ratio) else math.inf


def _time_of(schedule: PathSchedule, ratio: Tensor) -> Tensor:
    """Return the time at which a schedule has a ratio α/σ of data to noise, which rises with time."""
    grid = torch.linspace(0, 1, 10_001, dtype=ratio.dtype, device=ratio.device)[1:-1]
    alpha, sigma = schedule(grid)
    return grid[torch.searchsorted(alpha / sigma.clamp_min(1e-12), ratio).clamp_max(len(grid) - 1)]


def _linear_guess(what: str, x_t: Any, x0: Any, x1: Any, alpha: Tensor, sigma: Tensor) -> Any:
    """Return the best guess of data or noise that is linear in each coordinate of the state x_t = αx₁ + σx₀."""

    def guess(x: Tensor, noise: Tensor, data: Tensor) -> Tensor:
        (m0, v0), (m1, v1) = ((c.mean(0), c.var(0)) for c in (noise, data))
        a, s = unsqueeze_like(alpha, x), unsqueeze_like(sigma, x)
        away = (x - a * m1 - s * m0) / (a.square() * v1 + s.square() * v0)
        return m1 + a * v1 * away if what == "data" else m0 + s * v0 * away

    return tree_map(guess, x_t, x0, x1)


def _predicting(what: str, schedule: str, options: str) -> Alternative:
    rest = ", ".join(filter(None, [f'"{what}"', f'"{schedule}"' if schedule != "linear" else "", options]))
    return Alternative(f"predicting(net, {rest})", f"does it predict the {what}?")
