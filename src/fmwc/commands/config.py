"""How a run is made, in the words of the command: kept with the samples, so that one can go on from them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from fmwc.errors import UsageError, pick
from fmwc.estimators import ESTIMATORS, as_estimator
from fmwc.field import Field
from fmwc.identity import digest_tensors, plain
from fmwc.readers import array, boolean, check, number, record, text, whole
from fmwc.sampling import (
    STEPPERS,
    AsReference,
    Controller,
    Damped,
    Ema,
    Extrapolated,
    Grid,
    Profile,
    SamplingConfig,
    Trajectory,
    Uniform,
    read_with,
)
from fmwc.sampling.controllers import FEW, numbers
from fmwc.uses.guidance import Guidance

__all__ = ["CONTROLLERS", "RunRecord", "window_of"]

GUIDE_PROBES = 4  # of a step's steering, where a state is more than a few numbers


# ---- controllers -------------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """A controller by name.

    Attributes:
        make: Gives it, for so many steps, and from a pilot's profile.
        piloted: Whether it needs that profile.
        reads: Whether it reads the variance at every step.
        steers: Whether it changes the velocity, so that the times alone do not say which way a sample went.
    """

    make: Callable[[int, Any], Controller]
    piloted: bool = False
    reads: bool = False
    steers: bool = False


CONTROLLERS: dict[str, Kind] = {
    "uniform": Kind(lambda steps, _: Uniform(steps)),
    "ema": Kind(lambda steps, _: Ema(steps), reads=True),
    "damped": Kind(lambda steps, _: Damped(steps), reads=True, steers=True),
    "grid": Kind(lambda steps, profile: Grid(profile.grid(steps)), piloted=True),
    "planned": Kind(lambda steps, profile: profile.plan(steps), piloted=True, reads=True, steers=True),
    "extrapolated": Kind(lambda steps, _: Extrapolated(Uniform(steps)), steers=True),
}


_MADE = record(
    {},
    {
        "checkpoint": text(),
        "stepper": text(100),
        "propagation": text(100),
        "controller": text(100),
        "guide": number(0),
        "window": array(number(0, 1), 2, 2, rising=True),
        "by": text(100),
        "few": boolean,
        "identity": text(64, "([0-9a-f]{64})?"),
        "steps": whole(),
        "read_at": lambda value, where: (array(number(0, 1)) if isinstance(value, list) else whole())(value, where),
        "label": whole(),
        "transport": boolean,
        "pilot": whole(-(1 << 63)),
        "selected": text(1000),
        "checked": text(1000),
    },
    more=True,
)


# ---- the way -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunRecord:
    """Creates a way to make samples.

    Arguments:
        checkpoint: A shipped name or a folder.
        stepper: Of the integrator.
        propagation: The estimator of the variance, by name; `none` reads none. Empty: none is read, because the
            checkpoint's score takes none.
        controller: What picks the times, by name.
        guide: How strongly the velocity is steered away from doubt.
        window: When it is.
        by: The verb that made the samples; after others than `sample` their noise does not lead to them.
        few: Whether the variance was read at few times, which tell the checkpoint's score and no other.
        identity: The checkpoint's content hash.
        steps: Steps of the integrator.
        read_at: The variance was read at every k-th step, or at these times.
        label: The class that was asked for; `None` is every class in turn.
        transport: Whether variance was transported.
        pilot: The seed of the pilot run that chose times or steps, if there was one.
        selected: How samples were selected after they were drawn; empty if all were kept.
        checked: The check that was asked for in place of the checkpoint's own, with its evaluations, or `none`.
    """

    checkpoint: str
    stepper: str = "euler"
    propagation: str = "linearised"
    controller: str = "uniform"
    guide: float = 0.0
    window: tuple[float, float] = (0.0, 1.0)
    by: str = "sample"
    few: bool = False
    identity: str = ""
    steps: int = 0
    read_at: int | tuple[float, ...] = 0
    label: int | None = None
    transport: bool = False
    pilot: int | None = None
    selected: str = ""
    checked: str = ""

    def __post_init__(self) -> None:
        pick(STEPPERS, self.stepper, "stepper")
        if self.propagation not in ("", "none"):
            pick(ESTIMATORS, self.propagation, "propagation")
        pick(CONTROLLERS, self.controller, "controller")
        if not 0 <= self.guide < math.inf:
            raise UsageError(f"--guide is a finite strength, at least 0: it steers away from doubt; got {self.guide}")

    @classmethod
    def read(cls, made: dict[str, Any], checkpoint: str = "") -> RunRecord:
        """From a run's record; a newer one may hold more."""
        found = check(made, _MADE, "how these samples were made")
        known = {field.name for field in fields(cls)}
        found = {name: value for name, value in found.items() if name in known and value is not None}
        found |= {name: tuple(value) for name, value in found.items() if isinstance(value, list)}
        return cls(**{"checkpoint": "", **found, **({"checkpoint": checkpoint} if checkpoint else {})})

    def record(self) -> dict[str, Any]:
        """For :attr:`fmwc.Trajectory.made`; a folder by its full path, because samples are used from elsewhere too."""
        folder = Path(self.checkpoint)
        return {
            **self._fields(),
            "checkpoint": str(folder.resolve()) if (folder / "recipe.json").is_file() else self.checkpoint,
        }

    def _fields(self) -> dict[str, Any]:
        """The fields by name; one that came later only where it was used, so that older runs and promises hold."""
        return {n: v for n, v in asdict(self).items() if n != "checked" or v}

    def population(self, run: Trajectory, score: str | None = None) -> dict[str, Any]:
        """What a guarantee is bound to: everything that the distribution of samples and of their scores depends on.

        Samples that do not say which weights drew them are a population of their own: these very samples.

        Arguments:
            run: The samples.
            score: The name of the score they are kept by; the run's own, standardised as it is, if not given.
        """
        standard = run.standard if score is None else None
        scored = {
            "score": score or run.default_score,
            "standard": digest_tensors({"c": standard.centre, "s": standard.spread}, standard.cond)
            if standard
            else None,
        }
        if not self.identity:
            return {"samples": digest_tensors(run.tensors()), **scored}
        apart = (
            "checkpoint",
            "few",
            "identity",
        )  # a path; what `read_at` says; and what stands here under another name
        return plain(
            {"checkpoint": self.identity, **{n: v for n, v in self._fields().items() if n not in apart}, **scored}
        )

    @property
    def kind(self) -> Kind:
        return CONTROLLERS[self.controller]

    def check(self, every: int, transport: bool, adaptive: bool = False) -> None:
        """Raises where a controller or guidance goes ill with the rest of what is asked for."""
        if adaptive and (every or self.controller != "uniform" or self.propagation == "none"):
            raise UsageError(
                "--adaptive picks the steps to read the variance at, of equal ones; leave out --every, --controller "
                "and --propagation none"
            )
        words = f"--controller {self.controller}"
        if self.kind.reads and self.propagation == "none":
            raise UsageError(f"{words} goes by the variance; leave out --propagation none")
        if self.kind.reads and every > 1:
            raise UsageError(f"{words} reads the variance at every step; leave out --every")
        if self.kind.steers and STEPPERS[self.stepper].evaluations > 1:
            raise UsageError(f"{words} changes the velocity between euler steps; leave out --stepper {self.stepper}")
        if self.kind.steers and transport:
            raise UsageError(f"{words} changes the velocity, along which nothing is transported; leave out --transport")
        if self.guide and transport:
            raise UsageError("--guide changes the velocity, along which nothing is transported; leave out --transport")

    def suits(self, field: Field, steps: int, estimator: Any) -> bool:
        """Whether this is the way that a checkpoint's few readings were chosen for."""
        schedule = field.schedule
        if (
            schedule is None
            or schedule.reference is None
            or self.controller != "uniform"
            or self.guide
            or estimator is None
        ):
            return False
        made = read_with(estimator, steps, self.stepper, schedule)
        return schedule.reference.read_with is not None and not schedule.reference.read_with.differs(made)

    def confidence(self, own: Any) -> Any:
        """The estimator, as `sample` takes it. By its name alone, linearised is read as the setting's own choice."""
        known = {"": AsReference(), "none": None, "linearised": own}
        return known[self.propagation] if self.propagation in known else as_estimator(self.propagation)

    def decoder(self, field: Field) -> str | Guidance:
        if not self.guide:
            return "map"
        exact = field.space is not None and numbers(field.space) <= FEW
        return Guidance(self.guide, *self.window, probes=None if exact else GUIDE_PROBES)

    def sampling(self, field: Field, profile: Profile | None = None) -> SamplingConfig:
        """Return the configuration for :func:`fmwc.sample`, which takes the number of equal steps itself."""
        controller = None if self.controller == "uniform" else self.kind.make(self.steps, profile)
        return SamplingConfig(stepper=self.stepper, decoder=self.decoder(field), controller=controller)

    def again(self, field: Field, own: Any) -> dict[str, Any]:
        """What it takes to integrate samples of this way again; their times come with them."""
        if self.by != "sample":
            raise UsageError(
                f"these samples come from fmwc {self.by}, and cannot be made again from their noise; take the samples "
                "it was given"
            )
        if self.kind.steers:
            raise UsageError(
                f"--controller {self.controller} changed the velocity of these samples, so their way cannot be made "
                "again; draw them with another controller"
            )
        decoder = self.decoder(field)
        if isinstance(decoder, Guidance) and decoder.probes is not None:
            raise UsageError(
                "these samples were guided by random probes, so their way cannot be made again; draw them without "
                "--guide"
            )
        confidence = self.confidence(own) if self.propagation else own
        return {"confidence": confidence, "config": SamplingConfig(stepper=self.stepper, decoder=decoder)}


def window_of(text: str) -> tuple[float, float]:
    """Two times, as in 0.5-0.9.

    >>> window_of("0.5-0.9")
    (0.5, 0.9)
    """
    try:
        early, late = (float(part) for part in text.split("-"))
    except ValueError as error:
        raise UsageError(f"--guide-window is two times, as in 0.5-0.9; got '{text}'") from error
    if not 0 <= early < late <= 1:
        raise UsageError(f"--guide-window lies within [0, 1] and rises; got '{text}'")
    return early, late
