"""Domains: what the commands know about each kind of sample (points, digits, crystals, data of your own)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure

from fmwc.entry import try_once
from fmwc.errors import UsageError, pick
from fmwc.field import Field
from fmwc.files import write_bytes, write_text, written
from fmwc.metrics.ranking import INTERVALS, ranking_text, rate, rate_kept
from fmwc.randomness import derive
from fmwc.recipes import Progress, fit, override
from fmwc.report.reports import samples_page
from fmwc.report.run import note_of
from fmwc.report.table import Table
from fmwc.sampling import (
    AsReference,
    Grid,
    SamplingConfig,
    Schedule,
    Trajectory,
    default_estimator,
    fit_grid,
    growing,
    needs_variance,
    noise,
    sample,
    stream,
)
from fmwc.state import channels

__all__ = [
    "Domain",
    "EditDefault",
    "OwnDomain",
    "Rows",
    "ShippedDomain",
    "Show",
    "shares",
    "write_run",
]

WIDE = 32  # tables list coordinates only if a sample has at most this many

Rows = list[dict[str, str]]
Show = Callable[[int], None] | None  # called with the number of samples finished since the last call


def shares(table: Mapping[str, Sequence[Any]], columns: Mapping[str, str]) -> Rows:
    """Return the share of true values of each Boolean column; unknown values (`None`) are ignored.

    >>> shares({"turned": [True, False, None, False]}, {"in another square": "turned"})
    [{'': 'in another square', 'value': '33.3% (1 of 3)'}]
    """
    rows = []
    for words, name in columns.items():
        known = [value for value in table[name] if value is not None]
        value = f"{np.mean(known):.1%} ({sum(known)} of {len(known)})" if known else "not known"
        rows.append({"": words, "value": value})
    return rows


def _csv(columns: Mapping[str, Sequence[Any]]) -> str:
    """Format a table as CSV with six significant digits; true and false become 1 and 0."""
    text = {name: [v if isinstance(v, str) else f"{v:.6g}" for v in values] for name, values in columns.items()}
    return Table.from_columns(text).csv()


class Domain(ABC):
    """A kind of sample: how it is drawn by default, and how it is described in tables, files and pages.

    Attributes:
        name: The name in messages and on the command line.
        counts: Default number of samples of a report, on a GPU and on a CPU.
        pilots: Number of samples of a pilot run, on a GPU and on a CPU.
        transported: The score that ranks runs with transported variance; empty for the field's own score.
        one_thread: Whether to sample on one CPU thread, because the network is too small to gain from a second one.
        judges: Whether writing samples requires a judge.
        every: The default number of steps between two readings of the variance.
        reading: The default estimator; `True` for the library's default.
        large: The largest run that is held in memory. Larger ones are written batch by batch, with scores only.
        compact: Whether files hold one variance per sample and channel instead of one per coordinate.
        formats: The file formats that samples can be written in, if there is a choice; the first is the default.
        page_needs_field: Whether figures of the page are computed with the field.
    """

    name: str
    counts: tuple[int, int] = (1_000, 100)
    pilots: tuple[int, int] = (1_000, 100)
    transported: str = ""
    one_thread: bool = False
    judges: bool = False
    every: int = 1
    reading: Any = True
    large: int | None = 50_000
    compact: bool = False
    formats: tuple[str, ...] = ()
    page_needs_field: bool = True

    def count(self, device: torch.device) -> int:
        """Return the default number of samples of a report."""
        return self.counts[device.type != "cuda"]

    def pilot(self, device: torch.device) -> int:
        """Return the number of samples of a pilot run."""
        return self.pilots[device.type != "cuda"]

    def batch(self, device: torch.device) -> int:
        """Return the batch size of sampling."""
        return 256

    def with_controls(self, controls: Mapping[str, str]) -> Domain:
        """Return this domain with restrictions of the samples, by name of the option."""
        raise UsageError(f"{self.name} has no chemistry; leave out --{next(iter(controls))}")

    def effect_of_controls(self, field: Field) -> list[str]:
        """Return remarks on how the restrictions take effect and what they cost."""
        return []

    def conditions(
        self, field: Field, count: int, label: int | None = None, seed: int = 0, first: int = 0
    ) -> dict[str, torch.Tensor]:
        """Return the conditions of `count` samples.

        Arguments:
            field: The field that draws them.
            count: The number of samples.
            label: The class of all samples; by default, all classes in turn.
            seed: The seed of random conditions.
            first: The index of the first sample, if a run is drawn in parts.
        """
        if label is not None:
            raise UsageError(f"{self.name} has no classes; leave out --label")
        return {}

    # ---- sampling ----------------------------------------------------------------------------------------------------

    def estimator(self, field: Field) -> Any:
        """Return the default estimator of the variance."""
        return default_estimator(field.space) if self.reading is True else self.reading  # type: ignore[arg-type]

    def draw(
        self, field: Field, count: int, seed: int, progress: Show, label: int | None = None, **options: Any
    ) -> Trajectory:
        """Draw samples with this domain's defaults for the options of :func:`fmwc.sample`."""
        return sample(field, count, seed=seed, progress=progress, **self._options(field, count, seed, label, options))

    def stream(
        self, field: Field, count: int, seed: int, progress: Show, label: int | None = None, **options: Any
    ) -> Iterator[Trajectory]:
        """Draw samples batch by batch, keeping only their scores."""
        return stream(field, count, seed=seed, progress=progress, **self._options(field, count, seed, label, options))

    def streams(self, field: Field, count: int, label: int | None = None, **options: Any) -> bool:
        """Return whether samples are written batch by batch. Small runs and runs ranked as a whole are not."""
        if self.large is None or count <= self.large:
            return False
        if options.get("confidence", self) is None:
            return True
        return not self.draw(field, 1, 0, None, label, **options).withheld

    def _options(
        self, field: Field, count: int, seed: int, label: int | None, options: dict[str, Any]
    ) -> dict[str, Any]:
        cond = {k: v.to(field.device) for k, v in self.conditions(field, count, label, seed).items()}
        config: SamplingConfig = options.get("config", SamplingConfig())
        if config.controller is None and options.get("steps") is None:
            options = {**options, "steps": 50}
        as_reference = self.reads_as_reference(field, options)
        if isinstance(options.get("confidence", AsReference()), AsReference) and not as_reference:
            options["confidence"] = self.estimator(field)
        return {
            "schedule": None if as_reference else Schedule.every(self.every),
            "cond": cond,
            **{name: value for name, value in options.items() if name != "schedule" or value is not None},
            "config": config.with_defaults(batch=self.batch(field.device)),
        }

    def reads_as_reference(self, field: Field, options: Mapping[str, Any]) -> bool:
        """Return whether :func:`fmwc.sample` with these options computes the variance as for the field's reference.

        Always true if the score of the reference does not use the variance.
        """
        reference, confidence = field.reference, options.get("confidence", AsReference())
        if reference is None or options.get("schedule") is not None or not isinstance(confidence, AsReference):
            return False
        if not needs_variance(reference.score):
            return True
        made, config = reference.read_with, options.get("config") or SamplingConfig()
        return made is not None and config.controller is None and (options.get("steps") or 50) == made.steps

    def fit_grid(self, field: Field, steps: int, seed: int, progress: Show, label: int | None = None) -> Grid:
        """Fit the times of steps to the variance of a pilot run."""
        count = self.pilot(field.device)
        run = self.draw(field, count, derive(seed, "pilot"), progress, label, schedule=Schedule.every(1), check=False)
        return fit_grid(field, steps, pilot=run)

    # ---- reports -----------------------------------------------------------------------------------------------------

    def report_run(self, field: Field, count: int, seed: int, progress: Show) -> Trajectory:
        """Draw the samples of a report page."""
        return self.draw(field, count, seed, progress)

    def demo_run(self, field: Field, count: int, seed: int, progress: Show) -> Trajectory:
        """Draw the samples of a demo, which may take less time than :meth:`report_run`."""
        return self.report_run(field, count, seed, progress)

    def with_files(self, run: Trajectory, table: Mapping[str, Sequence[str]], folder: Path, page: Path) -> Domain:
        """Return this domain with what the folder of a run holds: results of the judge, and files of single samples.

        Arguments:
            run: The run.
            table: The columns of its table as text; empty without a table.
            folder: The folder.
            page: The folder of the page, which links to the files.
        """
        return self

    @abstractmethod
    def numbers(self, run: Trajectory) -> Rows:
        """Return the short table of a run."""

    @abstractmethod
    def page(self, field: Field, run: Trajectory, out: Path, numbers: Rows, about: dict[str, str]) -> Path:
        """Write report.html."""

    def notes(self, run: Trajectory) -> Rows:
        """Return a row with the reason if a run has no confidence."""
        return [{"": "ordered by", "value": note}] if (note := note_of(run)) else []

    # ---- files -------------------------------------------------------------------------------------------------------

    def check_format(self, format: str, symmetrise: float = 0.0, atom_doubt: bool = False) -> None:
        """Raise if samples cannot be written in these formats.

        Arguments:
            format: A comma-separated list of formats; empty for the default.
            symmetrise: For crystals, the tolerance in Å of files with symmetry; 0 for none.
            atom_doubt: For crystals, whether the doubt of each atom is computed.
        """
        given = {"--format": format, "--symmetrise": symmetrise, "--atom-doubt": atom_doubt}
        for option in [name for name, value in given.items() if value and not self.formats]:
            raise UsageError(f"samples of {self.name} have only one format; leave out {option}")
        for name in filter(None, format.split(",")):
            pick(dict.fromkeys(self.formats), name.strip(), "format")
        if not 0 <= symmetrise <= 1:
            raise UsageError(f"--symmetrise must be a tolerance of 0 to 1 Å, such as 0.1; got {symmetrise:g}")

    def table(self, run: Trajectory) -> dict[str, list[Any]]:
        """Return one row per sample: name, coordinates if there are few, conditions, and confidence."""
        flat = {name: value for name, value in channels(run.x).items() if value.ndim == 2 and value.shape[1] <= WIDE}
        columns: dict[str, list[Any]] = {"name": run.names}
        columns |= {f"{name}_{i}": column.tolist() for name, value in flat.items() for i, column in enumerate(value.T)}
        columns |= {name: value.tolist() for name, value in run.cond.items() if value.ndim == 1}
        columns |= {name: run.evidence[name].tolist() for name in ("rival", "margin") if name in run.evidence}
        return columns | self.confidence_columns(run)

    def confidence_columns(self, run: Trajectory) -> dict[str, list[Any]]:
        """Return score, rank and confidence, if the run has them."""
        columns: dict[str, list[Any]] = {}
        with suppress(UsageError):  # a run without a score is written without these columns
            columns["score"] = run.score().tolist()
            columns["rank"] = run.rank.tolist()
        if (confidence := run.confidence) is not None:
            columns["confidence"] = confidence.tolist()
        return columns

    def with_doubt(self, field: Field, run: Trajectory, progress: Show) -> Trajectory:
        """Return the run with the doubt of each atom, for crystals."""
        raise UsageError(f"samples of {self.name} have no atoms; leave out --atom-doubt")

    def write_samples(self, run: Trajectory, out: Path, format: str = "", symmetrise: float = 0.0) -> list[Path]:
        """Write samples.safetensors and samples.csv; crystals also in the formats of :meth:`check_format`."""
        return write_run(run, self.table(run), out)

    def pictures(self, run: Trajectory, table: Mapping[str, Sequence[Any]], out: Path) -> list[Path]:
        """Write the pictures of samples, whose :meth:`table` is known. By default, there are none."""
        return []

    def write_stream(self, parts: Iterable[Trajectory], count: int, out: Path) -> list[Path]:
        """Write the same files from batches of samples. The files appear when all `count` samples are complete."""
        samples, table = out / "samples.safetensors", out / "samples.csv"
        with written(table) as file, growing(samples, count) as add:  # `growing` fails first if samples are missing
            for part in parts:
                add(part)
                columns = self.table(part)
                columns.pop("rank", None)  # known only at the end
                text = _csv(columns)
                file.write((text.partition("\n")[2] if file.tell() else text).encode())
        return [samples, table]


def write_run(run: Trajectory, table: Mapping[str, Sequence[Any]], out: Path) -> list[Path]:
    """Write samples.safetensors and their table, samples.csv."""
    return [run.save(out / "samples.safetensors"), write_text(out / "samples.csv", _csv(table))]


class OwnDomain(Domain):
    """Samples of your own network. They can be drawn, checked and ranked, but not judged or edited."""

    name, page_needs_field = "this network", False

    def conditions(
        self, field: Field, count: int, label: int | None = None, seed: int = 0, first: int = 0
    ) -> dict[str, torch.Tensor]:
        """Return the classes of the reference in turn; raise if the network needs other conditions."""
        if field.space is None:
            raise UsageError("the shape of a sample is not known; return (network, space) from the function")
        cond = self._classes(field, count, label, first)
        one = {name: value[:1].to(field.device) for name, value in cond.items()}
        try:
            try_once(field, noise(field.space, 1, 0, field.device, cond=one), one)
        except UsageError as error:
            raise UsageError(
                f"{error} (to pass conditions other than classes, use Python: fmwc.sample(field, n, cond=…))"
            ) from error
        return cond

    def _classes(self, field: Field, count: int, label: int | None, first: int) -> dict[str, torch.Tensor]:
        standard, classes = (getattr(field.reference, name, None) for name in ("standard", "classes"))
        if standard is not None:
            classes = {standard.cond: (~standard.spread.isnan()).nonzero()[:, 0].tolist()}
        if not classes:
            return super().conditions(field, count, label)
        ((name, values),) = classes.items()
        if label is not None and label not in values:
            raise UsageError(f"--label must be one of the classes {', '.join(map(str, values))}; got {label}")
        known, turn = torch.tensor(values), torch.arange(first, first + count) % len(values)
        return {name: known[turn] if label is None else torch.full((count,), label)}

    def numbers(self, run: Trajectory) -> Rows:
        low, middle, high = np.quantile(run.score().cpu().numpy(), [0.1, 0.5, 0.9])
        within = f" within {run.standard.cond}" if run.standard is not None else ""
        compared = "one another" if run.withheld else "the checkpoint's reference"
        return [
            {"": "samples", "value": f"{len(run):,}"},
            {"": "ranked by", "value": f"{run.default_score}{within}, compared with {compared}"},
            {"": "score, median (80 % of samples)", "value": f"{middle:.4g} ({low:.4g} to {high:.4g})"},
            *self.notes(run),
        ]

    def page(self, field: Field, run: Trajectory, out: Path, numbers: Rows, about: dict[str, str]) -> Path:
        return samples_page(out, run, numbers=numbers, provenance=about)

    def write_samples(self, run: Trajectory, out: Path, format: str = "", symmetrise: float = 0.0) -> list[Path]:
        """Also write the table as Parquet if pyarrow is installed."""
        paths = super().write_samples(run, out)
        with suppress(ImportError):
            paths.append(write_bytes(out / "samples.parquet", Table.from_columns(self.table(run)).parquet()))
        return paths


class EditDefault(NamedTuple):
    """Default of an edit.

    Attributes:
        at: The time, or the name of a time: `critical` is the paper's t*.
        scale: The standard deviation of the noise.
    """

    at: str | float = "critical"
    scale: float = 0.2


class ShippedDomain(Domain):
    """A domain with shipped weights, training recipes, and a judge of its samples.

    Attributes:
        presets: Recipes by name.
        demo_preset: The recipe of fmwc demo --train; empty if training takes too long for a demo.
        bad: The word for samples that fail.
        kept: The share of most confident samples in the short table.
        others: Scores that the short table lists in addition to the run's score.
        variance: The variance score for edits, if the field's score does not use the variance.
        has_judge: Whether there is a judge for the samples.
        edits: The defaults of edits by channel, where they are not the paper's.
    """

    presets: dict[str, Any]
    demo_preset: str = ""
    bad: str
    kept: float
    others: tuple[str, ...] = ()
    variance: str = "temporal_ratio"
    has_judge: bool = True
    edits: Mapping[str | None, EditDefault] = {}

    # ---- training ----------------------------------------------------------------------------------------------------

    def recipe(self, preset: str, changes: Sequence[str], data: str = "", own: bool = False) -> Any:
        """Return a preset with `key=value` changes, and with your own data if the recipe reads data."""
        chosen = self.presets[preset]
        if own and not hasattr(chosen, "own"):
            raise UsageError(f"{self.name} does not need --own to read your own data; leave it out")
        extra = [f"data={data}"] * bool(data) + ["own=true"] * own
        if extra and not hasattr(chosen, "data"):
            raise UsageError(f"{self.name} generates its own data; leave out --data and --own")
        return override(chosen, [*extra, *changes])

    def demo_recipe(self, changes: Sequence[str]) -> Any:
        """Return the recipe of fmwc demo --train."""
        if not self.demo_preset:
            raise UsageError(f"fmwc demo {self.name} shows shipped weights; train your own with fmwc train {self.name}")
        return self.recipe(self.demo_preset, changes)

    def fit(
        self, recipe: Any, out: Path, device: torch.device, progress: Progress | None = None, *, force: bool = False
    ) -> None:
        """Train a recipe into a folder."""
        fit(recipe, out, device, progress, force=force)

    # ---- judging -----------------------------------------------------------------------------------------------------

    def with_judge(self, judge: str) -> ShippedDomain:
        """Return this domain with your own judge, or without a judge if `judge` is empty."""
        if judge:
            raise UsageError(f"{self.name} needs no judge; leave out --judge")
        return self

    def require_judge(self, field: Field) -> None:
        """Raise if the field's samples cannot be judged; called before anything is written."""
        return

    @abstractmethod
    def judge(self, trajectory: Trajectory) -> np.ndarray:
        """Return which samples fail. Confidence never uses this."""

    def numbers(self, run: Trajectory, bad: np.ndarray | None = None) -> Rows:
        """Return the short table: how well the run's score and other scores find failed samples.

        Arguments:
            run: The samples.
            bad: Which of them fail; judged if not given.
        """
        bad = self.judge(run) if bad is None else bad
        rows = [{"": f"{self.bad}, all samples", "value": rate(bad)}]
        for name in (None, *(set(self.others) - {run.default_score})) if bad.any() else []:
            try:
                score, label = run.score(name).cpu(), name or run.default_score
            except UsageError:  # the run lacks the data for this score
                continue
            rows += [
                {"": f"{self.bad}, surest {self.kept:.0%} by {label}", "value": rate_kept(score, bad, self.kept)},
                {"": f"AUPRC of {label} (floor {bad.mean():.2f})", "value": ranking_text(score, bad, self.bad)},
            ]
        return [*rows, *self.notes(run), {"": "in brackets", "value": INTERVALS}]

    # ---- edits -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def compare_edits(self, before: Trajectory, after: Trajectory, channel: str | None) -> dict[str, list[Any]]:
        """Return a table of what edits changed, one row per edit.

        Arguments:
            before: The edited sample of each row.
            after: The result of each edit.
            channel: The channel that was perturbed; `None` for all channels.
        """

    @abstractmethod
    def summarise_edits(self, table: dict[str, list[Any]]) -> Rows:
        """Summarise the table of :meth:`compare_edits` in a few rows."""

    @abstractmethod
    def draw_edits(self, before: Trajectory, after: Trajectory, table: dict[str, list[Any]]) -> Figure:
        """Draw samples before and after their edits."""
