"""What a setting gives to the command: recipes, samples, a judgement of them, files and pages."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from fmwc.errors import UsageError
from fmwc.field import Field
from fmwc.files import write_text, written
from fmwc.metrics.headline import INTERVALS, ranking_text, rate, rate_kept, too_few, wilson
from fmwc.randomness import derive
from fmwc.readers import shown
from fmwc.recipes.fitting import Progress, fit
from fmwc.recipes.recipe import override
from fmwc.recipes.uses.subject import Subject
from fmwc.report.run import note_of
from fmwc.sampling import (
    Compiled,
    Profile,
    Schedule,
    Trajectory,
    default_estimator,
    fit_schedule,
    growing,
    needs_variance,
    sample,
    stream,
    survey,
)
from fmwc.state import channels

__all__ = ["Rows", "Setting", "Show", "say_on_stderr", "shares", "told", "write_run"]

RANKINGS = ("auprc", "heads", "own", "linearised", "thresholds", "baselines", "beyond")  # numbers of an order
WIDE = 32  # numbers of a sample, at most, that its table holds

Rows = list[dict[str, str]]
Show = Callable[[int], None] | None  # told how many samples were done since the last call


def say_on_stderr(text: str) -> None:
    print(shown(text), file=sys.stderr, flush=True)


def told(found: dict[str, Any], positive: np.ndarray, what: str, score: Any) -> dict[str, Any]:
    """Headline numbers with how many samples they rest on, and intervals; without rankings where those are too few.

    Arguments:
        found: The numbers by name.
        positive: The samples that a ranking is to find.
        what: The word for those.
        score: What samples are ranked by, high where a sample is thought positive.
    """
    count = int(positive.sum())
    rests = {f"{what}_samples": count, f"{what}_share_90%_interval": [*wilson(count, len(positive))]}
    if said := too_few(positive, what):
        return {**rests, **{k: said if k.startswith(RANKINGS) else v for k, v in found.items()}}
    return {**rests, "auprc_with_90%_interval": ranking_text(score, positive, what), **found}


def shares(table: Mapping[str, Sequence[Any]], columns: Mapping[str, str]) -> Rows:
    """For each of a table's columns of true and false, in its words, how often it is true; not known is not counted.

    >>> shares({"turned": [True, False, None, False]}, {"in another square": "turned"})
    [{'': 'in another square', 'value': '33.3% (1 of 3)'}]
    """
    rows = []
    for words, name in columns.items():
        known = [value for value in table[name] if value is not None]
        value = f"{np.mean(known):.1%} ({sum(known)} of {len(known)})" if known else "not known"
        rows.append({"": words, "value": value})
    return rows


def _csv(columns: Mapping[str, Sequence[Any]], header: bool = True) -> str:
    """Numbers to six digits; names as they are."""
    rows = [
        ",".join(v if isinstance(v, str) else f"{v:.6g}" for v in row) for row in zip(*columns.values(), strict=True)
    ]
    return "\n".join([*[",".join(columns)] * header, *rows]) + "\n"


class Setting(ABC):
    """Creates a setting.

    Attributes:
        name: Its name on the command line, and of its shipped weights.
        presets: Recipes by name.
        bad: The word for samples to discard.
        kept: The share kept in its short table.
        transported: The score a run with transported variance is ranked by; empty for the field's own.
        variance: The score of the variance that samples are edited and rewound by, where the field's own is another.
        others: Scores its short table reads beside a run's own.
        draws: Stochastic trajectories its dispersion is held against.
        seeds: The seeds its results are made with.
        one_thread: Whether the command samples on one CPU thread: for products so small that a second one gains little,
            and beside other work only waits.
        reproduced: Samples a reading of its results.
        judges: Whether samples are judged as they are written.
        has_judge: Whether there is a judge to ask at all.
        every: The variance is read at every k-th step, if nothing is said, and
        reading: by this estimator; `True` is the library's own choice.
        large: Of more samples than this, each is written as it comes, with its score alone; `None` is never.
        compact: Whether files of samples hold one variance per sample and channel in place of one per coordinate.
    """

    reproduced: int = 10_000
    judges: bool = False
    has_judge: bool = True
    every: int = 1
    reading: Any = True
    large: int | None = 50_000
    compact: bool = False
    name: str
    presets: dict[str, Any]
    bad: str
    kept: float
    transported: str = ""
    variance: str = "temporal_ratio"
    others: tuple[str, ...] = ()
    draws: int
    seeds: str
    one_thread: bool = False

    def recipe(self, preset: str, changes: Sequence[str], data: str = "", own: bool = False) -> Any:
        """A preset with `key=value` changes, and data of the user's own where the setting takes any."""
        chosen = self.presets[preset]
        if own and not hasattr(chosen, "own"):
            raise UsageError(f"{self.name} reads data of your own as it is; leave out --own")
        extra = [f"data={data}"] * bool(data) + ["own=true"] * own
        if extra and not hasattr(chosen, "data"):
            raise UsageError(f"{self.name} makes its own data; leave out --data and --own")
        return override(chosen, [*extra, *changes])

    def fit(
        self, recipe: Any, out: Path, device: torch.device, progress: Progress | None = None, *, force: bool = False
    ) -> None:
        fit(recipe, out, device, progress, force=force)

    def judged_by(self, judge: str) -> Setting:
        """The same setting with a judge of the user's own."""
        raise UsageError(f"{self.name} needs no judge; leave out --judge")

    def unjudged(self) -> Setting:
        """The same setting for samples that its own judge has no say on."""
        return self

    def require_judge(self, field: Field) -> None:
        """Raises where the field's samples could not be judged: asked before anything is written."""
        return  # most settings have their truth in the data

    def demo_recipe(self, changes: Sequence[str]) -> Any:
        """The recipe that fmwc demo --train trains; raises where that takes too long for a demonstration."""
        raise UsageError(f"fmwc demo {self.name} shows shipped weights; train your own with fmwc train {self.name}")

    def conditions(self, field: Field, count: int, label: int | None = None, seed: int = 0) -> dict[str, torch.Tensor]:
        """What the field's network takes beside x and t, for so many samples."""
        if label is not None:
            raise UsageError(f"{self.name} has no classes; leave out --label")
        return {}

    @abstractmethod
    def count(self, device: torch.device) -> int:
        """How many samples a demonstration and an evaluation take, if nothing is said."""

    @abstractmethod
    def batch(self, device: torch.device) -> int:
        """Samples integrated together."""

    @abstractmethod
    def pilot(self, device: torch.device) -> int:
        """Samples of a run that says where on the way the variance is."""

    @abstractmethod
    def judge(self, trajectory: Trajectory) -> np.ndarray:
        """Which samples are to be discarded; confidence never sees it."""

    @abstractmethod
    def changes(self, before: Trajectory, after: Trajectory, channel: str | None) -> dict[str, list[Any]]:
        """What edits did, in columns with a row each: `before` holds for every edit the sample it is of.

        Arguments:
            channel: The channel that got the noise; `None` for all of them.
        """

    @abstractmethod
    def changed(self, table: dict[str, list[Any]]) -> Rows:
        """The same in a few words."""

    @abstractmethod
    def draw_edits(self, before: Trajectory, after: Trajectory, table: dict[str, list[Any]]) -> Figure:
        """A picture of samples before and after; of many, of some."""

    @abstractmethod
    def shown(self, field: Field, count: int, seed: int, progress: Show) -> Trajectory:
        """The run that a page is made of."""

    def glance(self, field: Field, count: int, seed: int, progress: Show) -> Trajectory:
        """The run that the page of a demonstration is made of, where that can be quicker."""
        return self.shown(field, count, seed, progress)

    @abstractmethod
    def page(self, field: Field, run: Trajectory, out: Path, numbers: Rows, about: dict[str, str]) -> Path:
        """Writes report.html."""

    @abstractmethod
    def evaluate(self, field: Field, count: int, seed: int, data: str, progress: Show) -> dict[str, Any]:
        """The headline numbers, from weights."""

    @abstractmethod
    def reproduce(
        self, recipe: Any, out: Path, device: torch.device, seeds: Sequence[int], *, count: int, draws: int, only: str
    ) -> None:
        """Trains every method, reads every number, and draws the figures; says so as it goes."""

    @abstractmethod
    def subject(self, field: Field, data: str, sizes: Sequence[str]) -> Subject:
        """What a study of the uses of confidence is about.

        Arguments:
            data: Where the data is that samples are held against, where there is any.
            sizes: `key=value` changes of how many samples each experiment takes.
        """

    @abstractmethod
    def tables(self, out: Path) -> list[Path]:
        """Writes the paper's tables beside ours, from the cells of a results folder."""

    def estimator(self, field: Field | Compiled) -> Any:
        """What reads the variance of the field's samples, if nothing is said."""
        return default_estimator(field.space) if self.reading is True else self.reading  # type: ignore[arg-type]

    def draw(
        self, field: Field, count: int, seed: int, progress: Show, label: int | None = None, **options: Any
    ) -> Trajectory:
        """Samples of this setting."""
        return sample(field, count, seed=seed, progress=progress, **self._options(field, count, seed, label, options))

    def stream(
        self, field: Field, count: int, seed: int, progress: Show, label: int | None = None, **options: Any
    ) -> Iterator[Trajectory]:
        """The same, a batch at a time, with their scores alone."""
        return stream(field, count, seed=seed, progress=progress, **self._options(field, count, seed, label, options))

    def streams(self, field: Field, count: int, label: int | None = None, **options: Any) -> bool:
        """Whether so many samples are written as they come: not where their confidence is made from all of them."""
        if self.large is None or count <= self.large:
            return False
        one = {**options, "parts": None}
        return options["confidence"] is False or not self.draw(field, 1, 0, None, label, **one).withheld

    def _options(
        self, field: Field, count: int, seed: int, label: int | None, options: dict[str, Any]
    ) -> dict[str, Any]:
        cond = {k: v.to(field.device) for k, v in self.conditions(field, count, label, seed).items()}
        if "controller" not in options:  # which knows its steps
            options = {"steps": 50, **options}
        own = self.reads_as_reference(field, options)
        if options.get("confidence", True) is True and not own:
            options["confidence"] = self.estimator(field)
        return {
            "schedule": None if own else self.every,
            "batch": self.batch(field.device),
            **cond,
            **{name: value for name, value in options.items() if name != "schedule" or value is not None},
        }

    def reads_as_reference(self, field: Field, options: Mapping[str, Any]) -> bool:
        """Whether a run with these options of `sample` reads what the field's reference is made from.

        A reference that is read from the variance says when it was read, in so many steps; others read none.
        """
        reference = field.reference
        asked = options.get("schedule") is not None or options.get("confidence", True) is not True
        if reference is None or asked:
            return False
        if not needs_variance(reference.score):
            return True
        made = reference.read_with
        return made is not None and "controller" not in options and options.get("steps", 50) == made.steps

    def survey(self, field: Field, seed: int, progress: Show, label: int | None = None) -> Profile:
        """Where on the way the variance is, from a pilot run with samples of its own."""
        run = self.draw(
            field, self.pilot(field.device), derive(seed, "pilot"), progress, label, schedule=1, check=False
        )
        return survey(field, pilot=run)

    def fit_schedule(
        self, field: Field, seed: int, progress: Show, label: int | None = None, **options: Any
    ) -> Schedule:
        """Few times that tell most of the score, from a pilot run.

        Arguments:
            options: `steps`, `stepper` and `confidence`, as the run will have them.
        """
        how: dict[str, Any] = {"schedule": 1, "record": "total", **options}
        run = self.draw(field, self.pilot(field.device), derive(seed, "pilot"), progress, label, **how)
        return fit_schedule(field, pilot=run, **options)

    def numbers(self, run: Trajectory, bad: np.ndarray) -> Rows:
        """The short table: what confidence does for this run, by its own score and by others."""
        rows = [{"": f"{self.bad}, all samples", "value": rate(bad)}]
        for name in (None, *(set(self.others) - {run.default_score})) if bad.any() else []:
            try:
                score, label = run.score(name).cpu(), name or run.default_score
            except UsageError:  # this run did not read it
                continue
            rows += [
                {"": f"{self.bad}, surest {self.kept:.0%} by {label}", "value": rate_kept(score, bad, self.kept)},
                {"": f"AUPRC of {label} (floor {bad.mean():.2f})", "value": ranking_text(score, bad, self.bad)},
            ]
        return [*rows, *self.noted(run), {"": "in brackets", "value": INTERVALS}]

    def noted(self, run: Trajectory) -> Rows:
        """Why a run has no confidence, where it has none."""
        return [{"": "ordered by", "value": note}] if (note := note_of(run)) else []

    def check_format(self, format: str) -> None:
        """Raises where samples are not written in this format; empty is the setting's own."""
        if format:
            raise UsageError(f"samples of {self.name} have one format; leave out --format")

    def table(self, run: Trajectory) -> dict[str, list[Any]]:
        """One row per sample: its name, its numbers where they are few, what was asked for, and how sure it is."""
        flat = {name: value for name, value in channels(run.x).items() if value.ndim == 2 and value.shape[1] <= WIDE}
        columns: dict[str, list[Any]] = {"name": run.names}
        columns |= {f"{name}_{i}": column.tolist() for name, value in flat.items() for i, column in enumerate(value.T)}
        columns |= {name: value.tolist() for name, value in run.cond.items() if value.ndim == 1}
        columns |= {name: run.evidence[name].tolist() for name in ("rival", "margin") if name in run.evidence}
        return columns | self.sureness(run)

    def sureness(self, run: Trajectory) -> dict[str, list[Any]]:
        """The columns of how sure a run is of its samples: score, rank, confidence, as far as it has them."""
        columns: dict[str, list[Any]] = {}
        with suppress(UsageError):  # a run without a score is still worth having
            columns["score"] = run.score().tolist()
            columns["rank"] = run.rank.tolist()
            columns["confidence"] = run.confidence.tolist()
        return columns

    def write_samples(self, run: Trajectory, out: Path, format: str = "") -> list[Path]:
        """Writes samples.safetensors and samples.csv."""
        return write_run(run, self.table(run), out)

    def write_stream(self, parts: Iterable[Trajectory], count: int, out: Path) -> list[Path]:
        """The same from samples that come a batch at a time; the files appear when all `count` are there."""
        samples, table = out / "samples.safetensors", out / "samples.csv"
        with written(table) as file, growing(samples, count) as add:  # which fails first where some are missing
            for part in parts:
                add(part)
                columns = self.table(part)
                columns.pop("rank", None)  # which is among all samples, not among those of a part
                file.write(_csv(columns, header=not file.tell()).encode())
        return [samples, table]


def write_run(run: Trajectory, table: Mapping[str, Sequence[float]], out: Path) -> list[Path]:
    """Writes samples.safetensors, and their table as samples.csv, true and false as 1 and 0."""
    return [run.save(out / "samples.safetensors"), write_text(out / "samples.csv", _csv(table))]
