"""What the experiments ask of a setting: samples, what to keep of them, and how to judge what was kept.

Drawing and judging are apart, because they may need different machines: what is kept of a sample is small, and all that
its judge needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from fmwc.confidence.guidance import Guidance
from fmwc.errors import UsageError
from fmwc.field import Field
from fmwc.sampling import SCORES, Trajectory, default_estimator, sample

__all__ = ["OWN", "Intent", "Metric", "Outcome", "Sizes", "Subject"]

OWN = " (own)"  # what the name of the field's own score ends with

Outcome = Mapping[str, np.ndarray]  # one entry a sample in each; `bad` is always there


@dataclass(frozen=True)
class Metric:
    """A number of a set of samples.

    Arguments:
        read: From their outcome.
        words: What it is called in a table.
        each: Whether it is a mean over samples, so that a bootstrap of them gives its interval.
        higher: Whether more of it is better.
        digits: After the point, in a table.
    """

    read: Callable[[Outcome], float]
    words: str
    each: bool = True
    higher: bool = False
    digits: int = 2


@dataclass(frozen=True)
class Intent:
    """A kind of edit.

    Arguments:
        channel: What gets the noise; `None` is all of it.
        scale: The noise's standard deviation, chosen on the validation seed, as is
        before: how long before a critical time: an edit acts on a decision only while it is still to be made;
        peak: and of which of the two critical times.
        words: What counts as a success.
        other: Whether the rest of the way is followed under another condition (another class).
        scales: What it was chosen from.
    """

    channel: str | None
    scale: float
    words: str
    other: bool = False
    scales: tuple[float, ...] = (0.1, 0.2, 0.4)
    before: float = 0.2
    peak: str = "transported"


@dataclass(frozen=True)
class Sizes:
    """How many samples each experiment takes, a seed."""

    samples: int
    edited: int
    replicates: int
    swept: int
    rewound: int
    guided: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise UsageError(f"a study takes at least one sample of each kind, got {name}={value}")


class Subject(ABC):
    """Creates a subject.

    Arguments:
        field: The field whose samples are filtered, edited and steered; its flow is plain FM's.

    Attributes:
        name: The setting's.
        bad, good: Words for samples to discard, and for the others.
        finds: Which of them a score is asked to find: the positive class of its AUPRC.
        metrics: What is reported of a set of samples; the first is the one that things are chosen by.
        intents: Kinds of edits.
        usual: The variance is read at every k-th step by the checkpoint's reference, and
        every: by edits and rewinding, where reading is most of the cost.
        dispersion: Whether the transported dispersion is among the scores.
        before, scale: Of rewinding: how long before the critical time, and how much noise.
        guides: Ways to steer, by what they are called.
        risks: Failure rates that a promise is asked for.
        power, weight: Of the fitted grid, and of extrapolation.
    """

    name: str
    bad: str
    good: str
    finds: str = "bad"
    metrics: dict[str, Metric]
    intents: dict[str, Intent]
    usual: int = 1
    every: int = 5
    dispersion: bool = True
    before: float = 0.2
    scale: float = 0.2
    guides: Mapping[str, Guidance] = {}
    risks: tuple[float, ...]
    power: float = 2.0
    weight: float = 0.5
    # What the validation seed was asked.
    scales: tuple[float, ...] = (0.1, 0.2, 0.4)
    befores: tuple[float, ...] = (0.1, 0.2, 0.4)
    strengths: Mapping[str, Guidance] = {}

    def __init__(self, field: Field, sizes: Sizes | None = None) -> None:
        self.field = field
        self.sizes = sizes or self.sizes_for(field.device.type)

    @staticmethod
    @abstractmethod
    def sizes_for(device: str) -> Sizes:
        """How many samples suit a device."""

    @abstractmethod
    def draw(self, count: int, seed: int, **options: Any) -> Trajectory:
        """Samples of the setting; 50 Euler steps if nothing is said."""

    @abstractmethod
    def kept(self, x: Any, cond: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What its judge needs of each sample."""

    @abstractmethod
    def read(self, kept: Mapping[str, Tensor]) -> Outcome:
        """What became of each sample: `bad`, and whatever the metrics and edits look at."""

    @abstractmethod
    def succeeded(self, intent: str, before: Outcome, after: Outcome) -> np.ndarray:
        """Which edits did what they were meant to; row by row."""

    def shown(self, run: Trajectory, every: int = 1) -> dict[str, Tensor]:
        """What a picture needs of a few samples beside what is kept; of edits, of every k-th: one of each sample."""
        return {}

    def conditions(self, run: Trajectory, intent: Intent, seed: int) -> dict[str, Any]:
        """What the network is given after an edit, where that is not what it was given before."""
        return {}

    def options(self) -> dict[str, Any]:
        """How samples are integrated, and by what the variance is read."""
        return {"confidence": default_estimator(self.field.space)}  # type: ignore[arg-type]

    def drawn(self, count: int, seed: int, **options: Any) -> Trajectory:
        """Samples with these options in place of the usual ones; the variance is read at every step."""
        usual = {"schedule": 1, **self.options()}
        if options.get("confidence") is True:
            options["confidence"] = usual["confidence"]
        return sample(self.field, count, seed=seed, **{**usual, **options})

    def scores(self, run: Trajectory) -> dict[str, Tensor]:
        """Label-free scores, high = doubtful; the field's own first, and not again under its name alone."""
        others = [name for name in SCORES if name != run.default_score or run.standard is not None]
        return {f"{run.default_score}{OWN}": run.score(), **{name: run.score(name) for name in others}}
