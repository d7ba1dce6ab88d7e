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

from fmwc.domains import Show
from fmwc.errors import UsageError
from fmwc.field import Field
from fmwc.recipes import override
from fmwc.sampling import SCORES, SamplingConfig, Schedule, Trajectory, sample
from fmwc.uses.guidance import Guidance

OWN = " (own)"  # suffix of the name of the field's default score

Outcome = Mapping[str, np.ndarray]  # arrays with one entry per sample, including `bad`


@dataclass(frozen=True)
class Metric:
    """A metric of a set of samples.

    Arguments:
        read: Computes the metric from the outcome of the samples.
        words: The name of the metric in tables.
        each: Whether the metric is a mean over samples, so that it has a bootstrap interval.
        higher: Whether higher is better.
        digits: The number of decimals in tables.
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
        channel: The channel to add noise to; `None` for all channels.
        scale: The standard deviation of the noise.
        words: The definition of success.
        other: Whether the condition also changes (another class).
        before: How long before the critical time the noise is added.
        peak: The kind of critical time.
    """

    channel: str | None
    scale: float
    words: str
    other: bool = False
    before: float = 0.2
    peak: str = "transported"


@dataclass(frozen=True)
class Sizes:
    """The number of samples per seed in each part of a study."""

    samples: int
    edited: int
    replicates: int
    swept: int
    guided: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise UsageError(f"study sizes must be at least 1, got {name}={value}")


class Experiment(ABC):
    """One of the paper's experiments.

    A study draws and judges samples in separate tasks, which may run on different machines: `keep` returns the data
    that the judge needs for each sample, and `judge` computes outcomes from it.

    Arguments:
        domain: The installed domain that draws and judges samples.
        field: The field to study.
        sizes: The number of samples in each part of a study.

    Attributes:
        draws: Stochastic trajectories per sample, as the reference of the transported dispersion.
        seeds: The reported seeds.
        reproduced: Samples per evaluation.
        bad, good: Words for samples to discard and to keep.
        finds: The positive class of AUPRC, `bad` or `good`.
        metrics: The metrics of a study; options are chosen by the first metric.
        intents: Kinds of edits.
        usual: The variance is computed at every `usual`-th step of a study.
        every: Like `usual`, for edits, where the variance is most of the cost.
        dispersion: Whether the transported dispersion is one of the scores.
        guides: Guidance settings by name.
        risks: Failure rates to guarantee.
        power, weight: The exponent of the fitted grid, and the weight of extrapolation.
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
    guides: Mapping[str, Guidance] = {}
    risks: tuple[float, ...]
    power: float = 2.0
    weight: float = 0.5

    def __init__(self, domain: Any, field: Field | None = None, sizes: Sizes | None = None) -> None:
        self.domain: Any = domain
        self.field: Any = field
        if field is not None:
            self.sizes = sizes or self.sizes_for(field.device.type)

    @property
    def name(self) -> str:
        """The name of the experiment on the command line."""
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
        """Write tables of the paper's numbers and ours from a results folder."""

    # ---- a study of the uses of confidence ---------------------------------------------------------------------------

    def with_field(self, field: Field, data: str = "", changes: Sequence[str] = ()) -> Experiment:
        """Return the experiment for a study of a field.

        Arguments:
            data: Folder of the data to compare samples with, if the experiment uses data.
            changes: Changes of the sizes, as `key=value`.
        """
        return type(self)(self.domain, field, override(self.sizes_for(field.device.type), changes, "size"))

    @staticmethod
    @abstractmethod
    def sizes_for(device: str) -> Sizes:
        """Return default sizes for a device."""

    @abstractmethod
    def keep(self, x: Any, cond: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the data that the judge needs for each sample."""

    @abstractmethod
    def judge(self, kept: Mapping[str, Tensor]) -> Outcome:
        """Return `bad` per sample, and other data needed by metrics and edits."""

    @abstractmethod
    def succeeded(self, intent: str, before: Outcome, after: Outcome) -> np.ndarray:
        """Return whether each edit succeeded."""

    def useful(self, before: Outcome, after: Outcome) -> np.ndarray | None:
        """Return whether each edit is useful, if this differs from the paper's success."""
        return None

    def judged_by(self) -> dict[str, str]:
        """Return the names or fingerprints of everything that determines outcomes, apart from the samples."""
        return {}

    def shown(self, run: Trajectory, every: int = 1) -> dict[str, Tensor]:
        """Return additional data for figures, for a few samples or, for edits, for every `every`-th one."""
        return {}

    def edited_conditions(self, run: Trajectory, intent: Intent, seed: int) -> dict[str, Any]:
        """Return the conditions that an edit changes."""
        return {}

    def options(self) -> dict[str, Any]:
        """Return the options of :func:`fmwc.sample` for this field."""
        return {"confidence": self.domain.estimator(self.field)}

    def draw(self, count: int, seed: int, **options: Any) -> Trajectory:
        """Draw samples, by default with the variance at every step."""
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
        """Return label-free scores (high = doubtful), with the default score of the field first."""
        others = [name for name in SCORES if name != run.default_score or run.standard is not None]
        return {f"{run.default_score}{OWN}": run.score(), **{name: run.score(name) for name in others}}
