"""Keeping the most confident samples: what `fmwc filter` does."""

from __future__ import annotations

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

from fmwc.commands.config import RunRecord
from fmwc.commands.inputs import find_samples
from fmwc.commands.labels import NAME, Labels, Table, read_labels, read_table
from fmwc.crystals.structures import need
from fmwc.domains.domain import Rows
from fmwc.errors import DataError, UsageError
from fmwc.files import claimed, write_bytes, write_json, write_text
from fmwc.identity import SEAL, require_same, seal, sealed
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
from fmwc.report.table import Table as Results
from fmwc.sampling import Trajectory
from fmwc.uses.filter import choose, ranks
from fmwc.uses.risk import FEWEST, RiskCertificate, lower_bound, required_labels, risk_control, upper_bound

__all__ = ["Filtered", "filter_samples"]

CERTIFICATE = "promise.json"  # its name since the first version
SHARE = 0.9  # of the interval of an observed rate
PLACE = "place"  # the column of a sample's position among all


# ---- what is kept ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Filtered:
    """The result of a filter.

    Attributes:
        kept, total: The number of samples kept, and of all samples.
        score: The score they were ranked by.
        threshold: The highest score among the kept samples.
        failed, failed_all: Failures and labels among the kept samples and among all samples; `None` without labels.
        certificate: What is guaranteed for samples below this threshold.
        written: Files and folders.
        unscored: The number of samples whose score is not finite; they are never kept.
        note: Remarks on the labels.
    """

    kept: int
    total: int
    score: str
    threshold: float
    failed: tuple[int, int] | None
    failed_all: tuple[int, int] | None
    certificate: RiskCertificate | None
    written: list[Path]
    unscored: int = 0
    note: str = ""

    def rows(self) -> Rows:
        """Return the result in words."""
        found = {
            "kept": f"{self.kept} of {self.total} ({self.kept / self.total:.1%})",
            f"highest {self.score} kept": f"{self.threshold:.6g}",
        }
        if self.unscored:
            found["without a score"] = f"{self.unscored} (score not finite; not kept)"
        for words, counts in (("failed, all labelled", self.failed_all), ("failed, labelled and kept", self.failed)):
            if counts is not None:
                found[words] = _rate(*counts)
        if self.note:
            found["labels"] = self.note
        if (made := self.certificate) is not None:
            found["guarantee"] = (
                f"at most {made.max_risk:.4g} of samples with {self.score} ≤ {made.threshold:.6g} fail, with "
                f"probability {made.probability:.4g}, based on {made.labelled} labels (bound {made.bound:.4f})"
            )
        return [{"": name, "value": value} for name, value in found.items()]


def _rate(failed: int, count: int) -> str:
    if not count:
        return "no labels"
    low, high = (float(end(failed, count, (1 - SHARE) / 2)) for end in (lower_bound, upper_bound))
    return f"{failed} of {count} ({failed / count:.1%}; {SHARE:.0%} interval {low:.1%} to {high:.1%})"


def filter_samples(
    samples: Path,
    out: Path,
    *,
    keep: float | None = None,
    budget: int | None = None,
    max_risk: float | None = None,
    certificate: Path | None = None,
    labels: str = "",
    good: str = "",
    bad: str = "",
    probability: float = 0.9,
    score: str = "",
    force: bool = False,
) -> Filtered:
    """Keep the most confident samples of a folder; write them, their table and their structure files to another.

    Exactly one of `keep`, `budget`, `max_risk` and `certificate` is given.

    Arguments:
        samples: A folder that `fmwc sample` wrote, or its samples.safetensors.
        out: The folder to write to.
        keep: The share to keep.
        budget: The number to keep.
        max_risk: The highest failure rate among the kept samples; this requires labels.
        certificate: A certificate that was made for samples drawn and scored in the same way.
        labels, good, bad: Which samples failed, as for :func:`read_labels`; samples may lack a label.
        probability: The probability with which `max_risk` holds.
        score: The score to rank by; by default, the run's own.
        force: Write into a folder that is not empty.
    """
    options = {"--keep": keep, "--budget": budget, "--max-risk": max_risk, "--certificate": certificate}
    given = [name for name, value in options.items() if value is not None]
    if len(given) != 1:
        raise UsageError(f"give exactly one of {', '.join(options)}; got {' and '.join(given) or 'none'}")
    labelled = bool(labels or good or bad)
    if max_risk is not None:
        required_labels(max_risk, probability)
        if not labelled:
            raise UsageError("--max-risk needs labelled samples; add --labels FILE (or a column of the table)")
    file = find_samples(samples, out)
    with claimed(out, "filter", force=force) as folder:
        run = Trajectory.load(file)
        path = _own(file.with_suffix(".csv"), file.parent)
        table = read_table(path, run.names, numbered=run.index is not None) if path.is_file() else None
        names = table.column(NAME) if table is not None and NAME in table.head else run.names
        found = read_labels(labels, names, table, good=good, bad=bad) if labelled else None
        if score and score != run.default_score and run.made.get("few"):
            raise UsageError(
                f"the variance of these samples was computed at {len(run.times)} times, chosen for "
                f"{run.default_score}; draw them with --every 1 to rank by {score}"
            )
        values = run.score(score or None).cpu()
        name = score or run.default_score
        if not score and run.standard is not None:  # not the plain score of that name
            name = f"{name} within {run.standard.cond}"
        scored = values.isfinite().nonzero()[:, 0]
        if not len(scored):
            raise UsageError(f"no sample has a finite {name}; use another --score")
        made = None
        if max_risk is not None or certificate is not None:
            _require_own_score(run, score)
            way = RunRecord.read(run.made)
            _require_drawn(way)
            population = way.population(run, score or None)
            if certificate is not None:
                made = _read_certificate(certificate, population)
            else:
                assert found is not None
                assert max_risk is not None
                made = _certify(values[scored], found.bad[scored.numpy()], max_risk, probability)
        index = scored[choose(values[scored], keep, budget, None if made is None else made.threshold)]
        if made is not None and not len(index):
            raise UsageError(f"no sample has {name} ≤ {made.threshold:.6g}, so there is none to keep")
        kept = replace(run.take(index), made={**run.made, "selected": f"filter {len(index)} of {len(run)}"})
        written = [kept.save(out / "samples.safetensors")]
        if table is not None:
            rank = values.new_zeros(len(values), dtype=torch.long)
            rank[scored] = ranks(values[scored])
            written += _write_rows(file, out, table, index, rank)
        if made is not None:
            content = {"format": 2, **made.as_dict(), "for": population}
            written.append(write_json(out / CERTIFICATE, seal(content)))
        folder.finish()
    return Filtered(
        kept=len(index),
        total=len(run),
        score=name,
        threshold=float(values[index].max()),
        failed=None if found is None else _counts(found.bad[index.numpy()]),
        failed_all=None if found is None else _counts(found.bad),
        certificate=made,
        written=written,
        unscored=len(run) - len(scored),
        note="" if found is None else _note(found, made),
    )


def _counts(bad: np.ndarray) -> tuple[int, int]:
    known = bad[~np.isnan(bad)]
    return int(known.sum()), len(known)


def _note(found: Labels, made: RiskCertificate | None) -> str:
    missing = int(np.isnan(found.bad).sum())
    partial = f"{missing} of {len(found.bad)} samples have no label; the guarantee needs labels of a random choice"
    return "; ".join(filter(None, [found.note, partial if missing and made is not None else ""]))


def _require_own_score(run: Trajectory, score: str) -> None:
    """Raise if the score depends on the other samples of the run, so that nothing can be guaranteed by it."""
    if not score and run.standard is not None and run.standard.source == "run":
        raise UsageError(
            f"these scores are standardised within {run.standard.cond} over this run, so no failure rate can be "
            f"guaranteed by them; use --score {run.default_score}, or draw samples as the checkpoint's reference was "
            "drawn"
        )


def _require_drawn(way: RunRecord) -> None:
    """Raise if the samples are not a random choice of what a checkpoint draws; guarantees are about those."""
    if way.selected:
        raise UsageError(
            f"these samples were selected ({way.selected}), so their failure rate is not that of the checkpoint; make "
            "and use certificates on all samples of a run"
        )
    if way.by != "sample":
        raise UsageError(
            f"these samples come from fmwc {way.by}, but a certificate is about samples as a checkpoint draws them; "
            "make and use it on samples of fmwc sample"
        )


def _certify(score: Tensor, bad: np.ndarray, max_risk: float, probability: float) -> RiskCertificate:
    """Make a certificate. Thresholds come from samples without a label if there are enough of them."""
    known = ~np.isnan(bad)
    if known.any() and not known.all() and (bad[known] == 1).all():
        raise UsageError(
            "every label says failed and the others are empty: such one-sided labels guarantee nothing (without "
            "novelty, sun and msun are known for failures only; judge it with fmwc judge --data)"
        )
    doubt = score.double().numpy()
    others = doubt[~known] if (~known).sum() >= FEWEST else None
    return risk_control(doubt[known], bad[known] == 1, max_risk, probability, others=others)


_CERTIFICATE = record({"format": whole(2, 2), "for": mapping(anything, 100), SEAL: text(64)}, more=True)


def _read_certificate(path: Path, population: dict[str, Any]) -> RiskCertificate:
    """Read a certificate; raise unless it was made for samples drawn and scored as these are."""
    path = path / CERTIFICATE if path.is_dir() else path
    content = parse_json(read_text(path, MEBIBYTE), str(path))
    if isinstance(content, dict) and "format" not in content and "threshold" in content:
        raise UsageError(f"{path} was written by an older fmwc and does not say which samples it is for; make it again")
    found = check(content, _CERTIFICATE, f"{path} is not a certificate that fmwc filter wrote")
    if not sealed(found):
        raise DataError(f"{path} was changed after it was written; make it again")
    made = RiskCertificate.from_dict(found)
    require_same(found["for"], population, f"{path} was made for other samples")
    return made


# ---- files -------------------------------------------------------------------------------------------------------


def _write_rows(file: Path, out: Path, table: Table, index: Tensor, rank: Tensor) -> list[Path]:
    """Write the kept rows with their position, and the structures if each row is one."""
    kept, places = index.tolist(), rank[index].tolist()
    columns = [name for name in table.head if name != PLACE]  # a column of an earlier filter
    chosen = {name: [table.column(name)[i] for i in kept] for name in columns}
    written = [write_text(out / "samples.csv", Results.from_columns({**chosen, PLACE: places}).csv())]
    if (path := _own(file.with_suffix(".parquet"), file.parent)).is_file():
        written.append(write_bytes(out / "samples.parquet", _parquet(path, columns, kept, places)))
    if NAME not in columns:
        return written
    names = chosen[NAME]
    if (folder := _own(file.parent / "cif", file.parent)).is_dir():
        for path in (_own(folder / f"{name}.cif", folder) for name in names):
            if path.is_file():  # structures that cannot be written have no file
                write_bytes(out / "cif" / path.name, read_bytes(path, MEBIBYTE))
        written.append(out / "cif")
    if (path := _own(file.with_suffix(".xyz"), file.parent)).is_file():
        wanted = set(names)
        frames = [frame for name, frame in _frames(read_text(path), path) if name in wanted]
        written.append(write_text(out / "samples.xyz", "".join(frames)))
    return written


def _own(path: Path, folder: Path) -> Path:
    """Return the path; raise if it is a link that leads out of the folder, to files that must not be copied."""
    if path.resolve().parent != folder.resolve():
        raise DataError(f"{shown(path)} leads out of the samples' folder; files outside it are not copied")
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
    """Yield each frame of an extended XYZ file with the name in its comment line."""
    lines, at = content.splitlines(keepends=True), 0
    while at < len(lines):
        try:
            size = int(lines[at]) + 2
            frame = lines[at : at + size]
            named = re.search(r'(?<!\S)name=("(?:[^"\\]|\\.)*"|\S+)', frame[1])
            name = named[1] if named else ""
            name = json.loads(name) if name.startswith('"') else name
        except (ValueError, IndexError) as error:
            raise DataError(f"{path} is not an extended XYZ file: no frame starts at line {at + 1}") from error
        if size < 3 or len(frame) < size:
            raise DataError(f"{path} is cut off: line {at + 1} declares {size - 2} atoms")
        at += size
        yield name, "".join(frame)
