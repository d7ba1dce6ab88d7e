"""`Experiment`, the base class of the paper's experiments: evaluate, reproduce, and study the uses of confidence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fmwc.domains.domain import Show
from fmwc.errors import UsageError
from fmwc.field import Field
from fmwc.recipes.recipe import override
from fmwc.sampling import SCORES, SamplingConfig, Schedule, Trajectory, sample
from fmwc.uses.guidance import Guidance

OWN = " (own)"  # the suffix of the name of the field's own score

Outcome = Mapping[str, np.ndarray]  # arrays with one entry per sample; `bad` is always among them


@dataclass(frozen=True)
class Metric:
    """A number that describes a set of samples.

    Arguments:
        read: Computes it from the outcome of the samples.
        words: Its name in a table.
        each: Whether it is a mean over samples, so that a bootstrap gives its interval.
        higher: Whether higher is better.
        digits: Digits after the point in a table.
    """

    read: Callable[[Outcome], float]
    words: str
    each: bool = True
    higher: bool = False
    digits: int = 2


@dataclass(frozen=True)
class Intent:
    """A kind of edit. Scale, `before` and `peak` were chosen on the validation seed.

    Arguments:
        channel: The channel that gets the noise; `None` means all channels.
        scale: The standard deviation of the noise.
        words: What counts as a success.
        other: Whether the condition changes too (another class).
        scales: The scales that were compared.
        before: How long before the critical time the noise is added. Later, the decision has been made.
        peak: Which of the two critical times.
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
    """The number of samples per seed in each part of a study."""

    samples: int
    edited: int
    replicates: int
    swept: int
    rewound: int
    guided: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise UsageError(f"a study needs at least one sample of each kind, got {name}={value}")


class Experiment(ABC):
    """One of the paper's experiments.

    A study draws and judges separately, because the two may need different machines: `keep` returns what the judge
    needs of each sample, and `judge` judges it.

    Arguments:
        domain: The installed domain that draws and judges samples.
        field: The field that a study filters, edits and steers.
        sizes: The number of samples in each part of a study.

    Attributes:
        draws: Stochastic trajectories per sample that the transported dispersion is compared with.
        seeds: The reported seeds.
        reproduced: Samples per evaluation.
        bad, good: Words for samples to discard and to keep.
        finds: Which of them are the positive class of a score's AUPRC.
        metrics: What a study reports of a set of samples; options are chosen by the first.
        intents: Kinds of edits.
        usual: A study computes the variance at every k-th step,
        every: and for edits and rewinding, where it is most of the cost, at every k-th step of these.
        dispersion: Whether the transported dispersion is among the scores.
        before, scale: Rewinding: how long before the critical time, and the noise's standard deviation.
        guides: Guidance settings by name.
        risks: Failure rates to guarantee.
        power, weight: The exponent of the fitted grid, and the weight of extrapolation.
        scales, befores, strengths: The options that were compared on the validation seed.
    """

    draws: int
    seeds: str
    reproduced: int = 10_000

    bad: str
    good: str
    finds: str = "bad"
    metrics: Mapping[str, Metric]
    intents: Mapping[str, Intent]
    usual: int = 1
    every: int = 5
    dispersion: bool = True
    before: float = 0.2
    scale: float = 0.2
    guides: Mapping[str, Guidance] = {}
    risks: tuple[float, ...]
    power: float = 2.0
    weight: float = 0.5
    scales: tuple[float, ...] = (0.1, 0.2, 0.4)
    befores: tuple[float, ...] = (0.1, 0.2, 0.4)
    strengths: Mapping[str, Guidance] = {}

    def __init__(self, domain: Any, field: Field | None = None, sizes: Sizes | None = None) -> None:
        self.domain: Any = domain
        self.field: Any = field
        if field is not None:
            self.sizes = sizes or self.sizes_for(field.device.type)

    @property
    def name(self) -> str:
        """The name on the command line."""
        return str(self.domain.name)

    # ---- the paper's tables ------------------------------------------------------------------------------------------

    @abstractmethod
    def evaluate(self, field: Field, count: int, seed: int, data: str, progress: Show) -> dict[str, Any]:
        """Compute the main numbers of a checkpoint."""

    @abstractmethod
    def reproduce(
        self, recipe: Any, out: Path, device: torch.device, seeds: Sequence[int], *, count: int, draws: int, only: str
    ) -> None:
        """Train every method, compute every number and draw the figures."""

    @abstractmethod
    def tables(self, out: Path) -> list[Path]:
        """Write the paper's tables beside ours, from the results in a folder."""

    # ---- a study of the uses of confidence ---------------------------------------------------------------------------

    def with_field(self, field: Field, data: str = "", changes: Sequence[str] = ()) -> Experiment:
        """Return the experiment for a study of a field.

        Arguments:
            data: Folder of the data that samples are compared with, if the experiment has any.
            changes: `key=value` changes of the sizes.
        """
        return type(self)(self.domain, field, override(self.sizes_for(field.device.type), changes, "size"))

    @staticmethod
    @abstractmethod
    def sizes_for(device: str) -> Sizes:
        """Return sizes that suit a device."""

    @abstractmethod
    def keep(self, x: Any, cond: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what the judge needs of each sample."""

    @abstractmethod
    def judge(self, kept: Mapping[str, Tensor]) -> Outcome:
        """Return `bad` per sample, and whatever metrics and edits need."""

    @abstractmethod
    def succeeded(self, intent: str, before: Outcome, after: Outcome) -> np.ndarray:
        """Return which edits succeeded, row by row."""

    def judged_by(self) -> dict[str, str]:
        """Return the names or fingerprints of what the outcomes depend on besides the samples."""
        return {}

    def shown(self, run: Trajectory, every: int = 1) -> dict[str, Tensor]:
        """Return what a picture needs of a few samples besides what the judge needs; of edits, of every k-th."""
        return {}

    def edited_conditions(self, run: Trajectory, intent: Intent, seed: int) -> dict[str, Any]:
        """Return the conditions after an edit that differ from those before."""
        return {}

    def options(self) -> dict[str, Any]:
        """Return the options of :func:`fmwc.sample` for this field."""
        return {"confidence": self.domain.estimator(self.field)}

    def draw(self, count: int, seed: int, **options: Any) -> Trajectory:
        """Draw samples; by default with the variance at every step."""
        cond = self.domain.conditions(self.field, count, seed=seed)
        usual = {
            "schedule": Schedule.every(1),
            **self.options(),
            "cond": {k: v.to(self.field.device) for k, v in cond.items()},
        }
        config = options.pop("config", SamplingConfig())
        config = config.with_defaults(batch=usual.get("config", config).batch)
        return sample(self.field, count, seed=seed, **{**usual, **options, "config": config})

    def scores(self, run: Trajectory) -> dict[str, Tensor]:
        """Return label-free scores, high = doubtful, the default score of the field first."""
        others = [name for name in SCORES if name != run.default_score or run.standard is not None]
        return {f"{run.default_score}{OWN}": run.score(), **{name: run.score(name) for name in others}}
