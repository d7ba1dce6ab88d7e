"""Keeping the samples that are worth it: what `fmwc filter` does."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from fmwc.confidence.filtering import choose, ranks
from fmwc.confidence.trust import FEWEST, Promise, lower, promise, upper
from fmwc.errors import DataError, UsageError
from fmwc.files import new_folder, write_bytes, write_json, write_text
from fmwc.metrics.crystals.extras import need
from fmwc.sampling import Trajectory
from fmwc.settings.labels import Table, read_labels, read_table, read_text
from fmwc.settings.samples import find_samples
from fmwc.settings.setting import Rows

__all__ = ["Filtered", "filter_samples"]

PROMISE = "promise.json"
SHARE = 0.9  # the interval of an observed rate
NAME, RANK = "name", "rank"  # columns of a table: of a structure's file, and of its place among all


# ---- what is kept ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Filtered:
    """What was kept, and what is known of it.

    Attributes:
        kept, total: How many samples, of how many.
        score: The score they were kept by, and
        threshold: the highest among the kept.
        failed: Failures and labels among the kept, and
        failed_all: among all samples; None without labels.
        promise: What is promised of samples kept by this threshold.
        written: Files and folders.
    """

    kept: int
    total: int
    score: str
    threshold: float
    failed: tuple[int, int] | None
    failed_all: tuple[int, int] | None
    promise: Promise | None
    written: list[Path]

    def rows(self) -> Rows:
        """In words."""
        found = {
            "kept": f"{self.kept} of {self.total} ({self.kept / self.total:.1%})",
            f"highest {self.score} kept": f"{self.threshold:.6g}",
        }
        for words, counts in (("failed, all labelled", self.failed_all), ("failed, labelled and kept", self.failed)):
            if counts is not None:
                found[words] = _rate(*counts)
        if self.promise is not None:
            p = self.promise
            found["promise"] = (
                f"at most {p.max_risk:.4g} of samples with {self.score} ≤ {p.threshold:.6g} fail, "
                f"with probability {p.probability:.4g}, by {p.labelled} labels (bound {p.bound:.4f})"
            )
        return [{"": name, "value": value} for name, value in found.items()]


def _rate(failed: int, count: int) -> str:
    if not count:
        return "none is labelled"
    low, high = (float(end(failed, count, (1 - SHARE) / 2)) for end in (lower, upper))
    return f"{failed} of {count} ({failed / count:.1%}; {SHARE:.0%} interval {low:.1%} to {high:.1%})"


def filter_samples(
    samples: Path,
    out: Path,
    *,
    keep: float | None = None,
    budget: int | None = None,
    max_risk: float | None = None,
    promised: Path | None = None,
    labels: str = "",
    probability: float = 0.9,
    score: str = "",
    force: bool = False,
) -> Filtered:
    """Keeps the surest of the samples in a folder, and writes them, and their rows and files, to another.

    Arguments:
        samples: What `fmwc sample` wrote: the folder, or the file.
        out: A folder to write to.
        keep: The share to keep; or
        budget: how many to keep; or
        max_risk: the failure rate that is not to be exceeded among the kept, which takes labels; or
        promised: a promise that was made for samples of the same kind.
        labels: Which samples failed, or not; a file, or a column of the samples' table. Some may have none.
        probability: How sure the risk is to be.
        score: Keep by this score; the run's own if not given.
        force: Write into a folder that is not empty.
    """
    ways = {"--keep": keep, "--budget": budget, "--max-risk": max_risk, "--promise": promised}
    given = [name for name, value in ways.items() if value is not None]
    if len(given) != 1:
        raise UsageError(f"say in one way what to keep, by {' or '.join(ways)}; got {' and '.join(given) or 'none'}")
    if max_risk is not None and not labels:
        raise UsageError("--max-risk is promised by labelled samples: add --labels FILE (or a column of the table)")
    file = find_samples(samples, out)
    run = Trajectory.load(file)
    path = file.with_suffix(".csv")
    table = read_table(path, len(run)) if path.is_file() else None
    bad = read_labels(labels, len(run), table) if labels else None
    if score and score != run.default_score and run.made.get("few"):
        raise UsageError(
            f"the variance of these samples was read at {len(run.times)} times, chosen for {run.default_score}; draw "
            f"them with --every 1 to keep by {score}"
        )
    values = run.score(score or None).cpu()
    made, name = None, score or run.default_score
    if not score and run.standard is not None:  # another number than the score of that name
        name = f"{name} within {run.standard.cond}"
    if max_risk is not None and bad is not None:
        made = _promise(values, bad, max_risk, probability)
    elif promised is not None:
        made = _read_promise(promised, name)
    index = choose(values, keep, budget, None if made is None else made.threshold)
    if made is not None and not len(index):
        raise UsageError(f"no sample has a score {name} of at most {made.threshold:.6g}, so there is none to keep")
    new_folder(out, force=force)
    written = [run.take(index).save(out / "samples.safetensors")]
    if table is not None:
        written += _write_rows(file, out, table, index, ranks(values))
    if made is not None:
        written.append(write_json(out / PROMISE, {"score": name, **made.as_dict()}))
    return Filtered(
        kept=len(index),
        total=len(run),
        score=name,
        threshold=float(values[index].max()),
        failed=None if bad is None else _counts(bad[index.numpy()]),
        failed_all=None if bad is None else _counts(bad),
        promise=made,
        written=written,
    )


def _counts(bad: np.ndarray) -> tuple[int, int]:
    known = bad[~np.isnan(bad)]
    return int(known.sum()), len(known)


def _promise(score: Tensor, bad: np.ndarray, max_risk: float, probability: float) -> Promise:
    """Thresholds come from samples without a label, where there are enough of them."""
    known = ~np.isnan(bad)
    doubt = score.double().numpy()
    others = doubt[~known] if (~known).sum() >= FEWEST else None
    return promise(doubt[known], bad[known] == 1, max_risk, probability, others=others)


def _read_promise(path: Path, score: str) -> Promise:
    try:
        found = json.loads(read_text(path / PROMISE if path.is_dir() else path))
    except json.JSONDecodeError as error:
        raise DataError(f"{path} is not a promise that fmwc filter wrote ({error})") from error
    made = Promise.from_dict(found if isinstance(found, dict) else {})
    if found.get("score") != score:
        raise UsageError(f"the promise is about the score {found.get('score')}, and samples are kept by {score}")
    return made


# ---- files -------------------------------------------------------------------------------------------------------


def _write_rows(file: Path, out: Path, table: Table, index: Tensor, rank: Tensor) -> list[Path]:
    """The kept rows with their rank, and the kept structures where each row is one."""
    kept, places = index.tolist(), rank[index].tolist()
    columns = [name for name in table.head if name != RANK]  # of samples that were filtered before
    rows = list(zip(*(table.column(name) for name in columns), strict=True))
    chosen = [rows[i] for i in kept]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([[*columns, RANK], *([*row, place] for row, place in zip(chosen, places, strict=True))])
    written = [write_text(out / "samples.csv", text.getvalue())]
    if (path := file.with_suffix(".parquet")).is_file():
        written.append(write_bytes(out / "samples.parquet", _parquet(path, columns, kept, places)))
    if NAME not in columns:
        return written
    names = [row[columns.index(NAME)] for row in chosen]
    if (file.parent / "cif").is_dir():
        for path in (file.parent / "cif" / f"{name}.cif" for name in names):
            if path.is_file():  # a structure that cannot be written has none
                write_bytes(out / "cif" / path.name, path.read_bytes())
        written.append(out / "cif")
    if (path := file.with_suffix(".xyz")).is_file():
        wanted = set(names)
        frames = (frame for name, frame in _frames(read_text(path)) if name in wanted)
        written.append(write_text(out / "samples.xyz", "".join(frames)))
    return written


def _parquet(path: Path, columns: list[str], kept: list[int], places: list[int]) -> bytes:
    arrow, parquet = need("pyarrow"), need("pyarrow.parquet")
    found = parquet.read_table(path).select(columns).take(kept).append_column(RANK, arrow.array(places))
    content = io.BytesIO()
    parquet.write_table(found, content)
    return content.getvalue()


def _frames(text: str) -> Iterator[tuple[str, str]]:
    """Each frame of an extended XYZ file, by the name in its comment line."""
    lines = text.splitlines(keepends=True)
    while lines:
        size = int(lines[0]) + 2
        frame, lines = lines[:size], lines[size:]
        named = re.search(r'(?<!\S)name=("(?:[^"\\]|\\.)*"|\S+)', frame[1])
        name = named[1] if named else ""
        yield (json.loads(name) if name.startswith('"') else name), "".join(frame)
