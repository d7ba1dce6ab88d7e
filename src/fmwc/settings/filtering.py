"""Keeping the samples that are worth it: what `fmwc filter` does."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fmwc.confidence.filtering import choose, ranks
from fmwc.confidence.trust import FEWEST, Promise, lower, needed, promise, upper
from fmwc.errors import DataError, UsageError
from fmwc.files import claimed, write_bytes, write_json, write_text
from fmwc.identity import SEAL, require_same, seal, sealed
from fmwc.metrics.crystals.extras import need
from fmwc.readers import (
    MEBIBYTE,
    anything,
    check,
    mapping,
    parse_json,
    read_bytes,
    read_text,
    record,
    shown,
    text,
    whole,
)
from fmwc.sampling import Trajectory
from fmwc.settings.labels import NAME, Labels, Table, read_labels, read_table
from fmwc.settings.samples import find_samples
from fmwc.settings.setting import Rows
from fmwc.settings.way import Way

__all__ = ["Filtered", "filter_samples"]

PROMISE = "promise.json"
SHARE = 0.9  # the interval of an observed rate
PLACE = "place"  # the column of a sample's place among all


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
        unscored: Samples whose score is not finite, which are never kept.
        note: What a user should know about the labels.
    """

    kept: int
    total: int
    score: str
    threshold: float
    failed: tuple[int, int] | None
    failed_all: tuple[int, int] | None
    promise: Promise | None
    written: list[Path]
    unscored: int = 0
    note: str = ""

    def rows(self) -> Rows:
        """In words."""
        found = {
            "kept": f"{self.kept} of {self.total} ({self.kept / self.total:.1%})",
            f"highest {self.score} kept": f"{self.threshold:.6g}",
        }
        if self.unscored:
            found["without a score"] = f"{self.unscored}, whose score is not finite; none of them is kept"
        for words, counts in (("failed, all labelled", self.failed_all), ("failed, labelled and kept", self.failed)):
            if counts is not None:
                found[words] = _rate(*counts)
        if self.note:
            found["labels"] = self.note
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
    good: str = "",
    bad: str = "",
    probability: float = 0.9,
    score: str = "",
    force: bool = False,
) -> Filtered:
    """Keep the surest of the samples in a folder, and write them, their rows and their files to another.

    Arguments:
        samples: What `fmwc sample` wrote: the folder, or the file.
        out: A folder to write to.
        keep: The share to keep; or
        budget: how many to keep; or
        max_risk: the failure rate that is not to be exceeded among the kept, which takes labels; or
        promised: a promise that was made for samples drawn and scored in the same way.
        labels, good, bad: Which samples failed, or not, as :func:`read_labels` takes it. Some may have no label.
        probability: How sure the risk is to be.
        score: Keep by this score; the run's own if not given.
        force: Write into a folder that is not empty.
    """
    ways = {"--keep": keep, "--budget": budget, "--max-risk": max_risk, "--promise": promised}
    given = [name for name, value in ways.items() if value is not None]
    if len(given) != 1:
        raise UsageError(f"say in one way what to keep, by {' or '.join(ways)}; got {' and '.join(given) or 'none'}")
    labelled = bool(labels or good or bad)
    if max_risk is not None:
        needed(max_risk, probability)
        if not labelled:
            raise UsageError("--max-risk is promised by labelled samples: add --labels FILE (or a column of the table)")
    file = find_samples(samples, out)
    with claimed(out, "filter", force=force) as folder:
        run = Trajectory.load(file)
        path = _own(file.with_suffix(".csv"), file.parent)
        table = read_table(path, run.names, numbered=run.index is not None) if path.is_file() else None
        names = table.column(NAME) if table is not None and NAME in table.head else run.names
        found = read_labels(labels, names, table, good=good, bad=bad) if labelled else None
        if score and score != run.default_score and run.made.get("few"):
            raise UsageError(
                f"the variance of these samples was read at {len(run.times)} times, chosen for {run.default_score}; "
                f"draw them with --every 1 to keep by {score}"
            )
        values = run.score(score or None).cpu()
        name = score or run.default_score
        if not score and run.standard is not None:  # another number than the score of that name
            name = f"{name} within {run.standard.cond}"
        scored = values.isfinite().nonzero()[:, 0]
        if not len(scored):
            raise UsageError(f"no sample has a finite score {name}; keep by another --score")
        made = None
        if max_risk is not None or promised is not None:
            _require_own_score(run, score)
            way = Way.read(run.made)
            _require_drawn(way)
            population = way.population(run, score or None)
            if promised is not None:
                made = _read_promise(promised, population)
            else:
                assert found is not None
                assert max_risk is not None
                made = _promise(run, values[scored], found.bad[scored.numpy()], max_risk, probability)
        index = scored[choose(values[scored], keep, budget, None if made is None else made.threshold)]
        if made is not None and not len(index):
            raise UsageError(f"no sample has a score {name} of at most {made.threshold:.6g}, so there is none to keep")
        kept = replace(run.take(index), made={**run.made, "selected": f"filter {len(index)} of {len(run)}"})
        written = [kept.save(out / "samples.safetensors")]
        if table is not None:
            rank = values.new_zeros(len(values), dtype=torch.long)
            rank[scored] = ranks(values[scored])
            written += _write_rows(file, out, table, index, rank)
        if made is not None:
            content = {"format": 2, **made.as_dict(), "for": population}
            written.append(write_json(out / PROMISE, seal(content)))
        folder.finish()
    return Filtered(
        kept=len(index),
        total=len(run),
        score=name,
        threshold=float(values[index].max()),
        failed=None if found is None else _counts(found.bad[index.numpy()]),
        failed_all=None if found is None else _counts(found.bad),
        promise=made,
        written=written,
        unscored=len(run) - len(scored),
        note="" if found is None else _note(found, made),
    )


def _counts(bad: np.ndarray) -> tuple[int, int]:
    known = bad[~np.isnan(bad)]
    return int(known.sum()), len(known)


def _note(found: Labels, made: Promise | None) -> str:
    missing = int(np.isnan(found.bad).sum())
    partial = (
        f"{missing} of {len(found.bad)} samples have no label: the promise holds if those with one are a random choice"
    )
    return "; ".join(filter(None, [found.note, partial if missing and made is not None else ""]))


def _require_own_score(run: Trajectory, score: str) -> None:
    """Raise where a score depends on the other samples of its run, so that no promise can rest on it."""
    if not score and run.standard is not None and run.standard.source == "run":
        raise UsageError(
            f"these scores are standardised within {run.standard.cond} among the samples of their own run, so nothing "
            f"can be promised by them; keep by --score {run.default_score}, or draw samples as the checkpoint's "
            "reference was drawn"
        )


def _require_drawn(way: Way) -> None:
    """Raise where samples are not a random choice of what a checkpoint draws, so that no promise can be about them."""
    if way.selected:
        raise UsageError(
            f"these samples were selected ({way.selected}), so their failures are not those of what the checkpoint "
            "draws; make and use promises on all samples of a run"
        )
    if way.by != "sample":
        raise UsageError(
            f"these samples come from fmwc {way.by}, and a promise is about samples as a checkpoint draws them; make "
            "and use it on samples of fmwc sample"
        )


def _promise(run: Trajectory, score: Tensor, bad: np.ndarray, max_risk: float, probability: float) -> Promise:
    """Make a promise. Thresholds come from samples without a label, where there are enough of them."""
    known = ~np.isnan(bad)
    if known.any() and not known.all() and (bad[known] == 1).all():
        raise UsageError(
            "every known label says failed and the others are empty: such labels are one-sided (sun and msun are known "
            "of failures only, unless novelty was judged: fmwc judge --data), so nothing can be promised by them"
        )
    doubt = score.double().numpy()
    others = doubt[~known] if (~known).sum() >= FEWEST else None
    return promise(doubt[known], bad[known] == 1, max_risk, probability, others=others)


_PROMISE = record({"format": whole(2, 2), "for": mapping(anything, 100), SEAL: text(64)}, more=True)


def _read_promise(path: Path, population: dict[str, Any]) -> Promise:
    """A promise from its file, if it was made for samples drawn and scored as these are."""
    path = path / PROMISE if path.is_dir() else path
    content = parse_json(read_text(path, MEBIBYTE), str(path))
    if isinstance(content, dict) and "format" not in content and "threshold" in content:
        raise UsageError(f"{path} does not say what it was made for (an older fmwc wrote it); make it again")
    found = check(content, _PROMISE, f"{path} is not a promise that fmwc filter wrote")
    if not sealed(found):
        raise DataError(f"{path} was changed after it was written; make it again")
    made = Promise.from_dict(found)
    require_same(found["for"], population, f"{path} was made for other samples")
    return made


# ---- files -------------------------------------------------------------------------------------------------------


def _write_rows(file: Path, out: Path, table: Table, index: Tensor, rank: Tensor) -> list[Path]:
    """The kept rows with their rank, and the kept structures where each row is one."""
    kept, places = index.tolist(), rank[index].tolist()
    columns = [name for name in table.head if name != PLACE]  # of samples that were filtered before
    rows = list(zip(*(table.column(name) for name in columns), strict=True))
    chosen = [rows[i] for i in kept]
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerows([[*columns, PLACE], *([*row, place] for row, place in zip(chosen, places, strict=True))])
    written = [write_text(out / "samples.csv", lines.getvalue())]
    if (path := _own(file.with_suffix(".parquet"), file.parent)).is_file():
        written.append(write_bytes(out / "samples.parquet", _parquet(path, columns, kept, places)))
    if NAME not in columns:
        return written
    names = [row[columns.index(NAME)] for row in chosen]
    if (folder := _own(file.parent / "cif", file.parent)).is_dir():
        for path in (_own(folder / f"{name}.cif", folder) for name in names):
            if path.is_file():  # a structure that cannot be written has none
                write_bytes(out / "cif" / path.name, read_bytes(path, MEBIBYTE))
        written.append(out / "cif")
    if (path := _own(file.with_suffix(".xyz"), file.parent)).is_file():
        wanted = set(names)
        frames = [frame for name, frame in _frames(read_text(path), path) if name in wanted]
        written.append(write_text(out / "samples.xyz", "".join(frames)))
    return written


def _own(path: Path, folder: Path) -> Path:
    """The path, if it lies in the folder: a link may lead to any file of the user's, which would be copied."""
    if path.resolve().parent != folder.resolve():
        raise DataError(f"{shown(path)} leads out of the samples' folder; nothing outside it is copied")
    return path


def _parquet(path: Path, columns: list[str], kept: list[int], places: list[int]) -> bytes:
    arrow, parquet = need("pyarrow"), need("pyarrow.parquet")
    try:
        table = parquet.read_table(io.BytesIO(read_bytes(path)))
        found = table.select(columns).take(kept).append_column(PLACE, arrow.array(places))
    except (arrow.ArrowException, KeyError, IndexError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise DataError(f"{path} is not the table of the samples beside it ({reason[:100]})") from error
    content = io.BytesIO()
    parquet.write_table(found, content)
    return content.getvalue()


def _frames(content: str, path: Path) -> Iterator[tuple[str, str]]:
    """Each frame of an extended XYZ file, by the name in its comment line."""
    lines, at = content.splitlines(keepends=True), 0
    while at < len(lines):
        try:
            size = int(lines[at]) + 2
            frame = lines[at : at + size]
            named = re.search(r'(?<!\S)name=("(?:[^"\\]|\\.)*"|\S+)', frame[1])
            name = named[1] if named else ""
            name = json.loads(name) if name.startswith('"') else name
        except (ValueError, IndexError) as error:
            raise DataError(f"{path} is not an extended XYZ file: line {at + 1} begins no frame") from error
        if size < 3 or len(frame) < size:
            raise DataError(f"{path} is cut off: line {at + 1} announces {size - 2} atoms")
        at += size
        yield name, "".join(frame)
