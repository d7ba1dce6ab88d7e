"""Keep the most confident samples of a folder (`fmwc filter`)."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fmwc.cli.edit import find_samples
from fmwc.cli.labels import NAME, Labels, Table, labels_given, read_labels, read_table
from fmwc.cli.sample import RunRecord
from fmwc.cli.verbs import Filter
from fmwc.crystals.files import FORMATS, SYMMETRISED, copy_database
from fmwc.crystals.structures import need
from fmwc.domains import Rows
from fmwc.errors import DataError, UsageError
from fmwc.files import fresh, moved, write_bytes, write_json, write_text
from fmwc.identity import SEAL, digest_tensors, plain, require_same, seal, sealed
from fmwc.readers import (
    MEBIBYTE,
    anything,
    check,
    mapping,
    parse_json,
    read_bytes,
    read_parquet,
    read_text,
    record,
    shown,
    text,
    whole,
)
from fmwc.report.table import Table as Results
from fmwc.sampling import Trajectory
from fmwc.uses.filter import choose, ranks
from fmwc.uses.risk import RiskCertificate, lower_bound, required_labels, risk_control, upper_bound

__all__ = ["filter_samples", "guarantee", "population_of", "read_certificate", "read_run"]

CERTIFICATE = "promise.json"  # its name since the first version
SHARE = 0.9  # coverage of the interval of an observed rate
PLACES = {**{one.place: one.suffix for one in FORMATS.values()}, SYMMETRISED: ".cif"}  # of structures
PLACE = "place"  # column with the position of a sample in the ranking of all samples


class Scored(NamedTuple):
    """Samples with the score that they are ranked by.

    Attributes:
        run: The samples.
        table: Their table, if the folder has one.
        name: The name of the score.
        values: The score of each sample, `(B,)`.
        finite: The indices of the samples whose score is finite; others are never kept.
    """

    run: Trajectory
    table: Table | None
    name: str
    values: Tensor
    finite: Tensor


def filter_samples(options: Filter) -> tuple[Rows, list[Path]]:
    """Write the most confident samples, their table and their structures; return a summary and the files."""
    choices = {
        "--keep": options.keep,
        "--budget": options.budget,
        "--max-risk": options.max_risk,
        "--certificate": options.certificate,
    }
    given = [name for name, value in choices.items() if value is not None]
    if len(given) != 1:
        raise UsageError(f"give exactly one of {', '.join(choices)}; got {' and '.join(given) or 'none'}")
    labelled = labels_given(options)
    if options.max_risk is not None:
        required_labels(options.max_risk, options.probability)  # raises if one of the two is out of range
        if not labelled:
            raise UsageError("--max-risk needs labelled samples; add --labels FILE (or a column of the table)")
    file = find_samples(options.samples, options.out)
    with fresh(options.out, force=options.force) as folder:
        scored = _scored(file, options)
        run, table, values, finite = scored.run, scored.table, scored.values, scored.finite
        names = table[NAME] if table is not None and NAME in table else run.names
        labels = read_labels(options, names, table) if labelled else None
        certificate, population = None, None
        if options.max_risk is not None or options.certificate is not None:
            population = population_of(run, options.score)
            certificate = _certificate(options, population, values[finite], labels, finite)
        threshold = None if certificate is None else certificate.threshold
        index = finite[choose(values[finite], options.keep, options.budget, threshold)]
        if not len(index):
            raise UsageError(f"no sample has {scored.name} ≤ {threshold:.6g}, so none can be kept")
        kept = replace(run.take(index), made={**run.made, "selected": f"filter {len(index)} of {len(run)}"})
        written = [kept.save(folder / "samples.safetensors")]
        if table is not None:
            rank = values.new_zeros(len(values), dtype=torch.long)
            rank[finite] = ranks(values[finite])
            written += _write_rows(file, folder, table, index, rank)
        if certificate is not None:
            content = {"format": 2, **certificate.as_dict(), "for": population}
            written.append(write_json(folder / CERTIFICATE, seal(content)))
    return _summary(scored, index, labels, certificate), moved(written, folder, options.out)


def read_run(file: Path) -> tuple[Trajectory, Table | None]:
    """Read samples and the table beside them, if there is one."""
    run = Trajectory.load(file)
    path = _inside(file.with_suffix(".csv"), file.parent)
    numbered = run.index is not None and len({*run.names}) == len(run)  # edits of one sample share its number
    return run, read_table(path, run.names, numbered=numbered) if path.is_file() else None


def _scored(file: Path, options: Filter) -> Scored:
    """Read samples with their table and score."""
    (run, table), score = read_run(file), options.score
    if score and score != run.default_score and run.made.get("few"):
        raise UsageError(
            f"the variance of these samples was computed at {len(run.times)} times, chosen for {run.default_score}; "
            f"draw them with --every 1 to rank by {score}"
        )
    name, values = score or run.default_score, run.score(score or None).cpu()
    if not score and run.standard is not None:  # not the plain score of that name
        name = f"{name} within {run.standard.cond}"
    finite = values.isfinite().nonzero()[:, 0]
    if not len(finite):
        raise UsageError(f"no sample has a finite {name}; use another --score")
    return Scored(run, table, name, values, finite)


# ---- certificates ----------------------------------------------------------------------------------------------------

_CERTIFICATE = record({"format": whole(2, 2), "for": mapping(anything, 100), SEAL: text(64)}, more=True)


def population_of(run: Trajectory, score: str) -> dict[str, Any]:
    """Return the population that a certificate is for: all that determines the distribution of the scores.

    If the run does not record its checkpoint, the population is the run itself. Raise if certificates do not apply to
    these samples.

    Arguments:
        run: The samples.
        score: The name of the score; if empty, the run's own score, standardised as it is.
    """
    if not score and run.standard is not None and run.standard.source == "run":
        raise UsageError(
            f"these scores are standardised within {run.standard.cond} over this run, so no failure rate can be "
            f"guaranteed for them; use --score {run.default_score}, or draw samples as the checkpoint's reference was "
            "drawn"
        )
    made = RunRecord.read(run.made)
    if made.selected:
        raise UsageError(
            f"these samples were selected ({made.selected}), so their failure rate is not that of the checkpoint; make "
            "and use certificates on all samples of a run"
        )
    if made.by != "sample":
        raise UsageError(
            f"these samples come from fmwc {made.by}, but certificates apply only to samples as a checkpoint draws "
            "them; make and use them on samples of fmwc sample"
        )
    standard, digest = None if score else run.standard, None
    if standard is not None:
        digest = digest_tensors({"c": standard.centre, "s": standard.spread}, standard.cond)
    scored = {"score": score or run.default_score, "standard": digest}
    if not made.identity:
        return {"samples": digest_tensors(run.tensors()), **scored}
    redundant = ("checkpoint", "few", "identity")  # a path, implied by `read_at`, and stored as "checkpoint" below
    drawn = {name: value for name, value in made.as_dict().items() if name not in redundant}
    return plain({"checkpoint": made.identity, **drawn, **scored})


def _certificate(
    options: Filter, population: dict[str, Any], score: Tensor, labels: Labels | None, finite: Tensor
) -> RiskCertificate:
    """Read the given certificate, or create one from labels."""
    if options.certificate is not None:
        return read_certificate(options.certificate, population)
    assert labels is not None
    assert options.max_risk is not None
    doubt, bad = score.double().numpy(), labels.bad[finite.numpy()]
    return risk_control(doubt, bad, options.max_risk, options.probability, at_random=options.at_random)


def read_certificate(path: Path, population: dict[str, Any]) -> RiskCertificate:
    """Read a certificate; raise unless it was made for samples drawn and scored in the same way."""
    path = path / CERTIFICATE if path.is_dir() else path
    content = parse_json(read_text(path, MEBIBYTE), str(path))
    content = check(content, _CERTIFICATE, f"{path} is not a certificate that fmwc filter wrote")
    if not sealed(content):
        raise DataError(f"{path} was changed after it was written; make it again")
    certificate = RiskCertificate.from_dict(content)
    require_same(content["for"], population, f"{path} was made for other samples")
    return certificate


# ---- summary ---------------------------------------------------------------------------------------------------------


def _summary(scored: Scored, index: Tensor, labels: Labels | None, certificate: RiskCertificate | None) -> Rows:
    """Return printed rows about the kept samples; observed rates have an interval."""
    total, name = len(scored.run), scored.name
    rows = {
        "kept": f"{len(index)} of {total} ({len(index) / total:.1%})",
        f"highest {name} kept": f"{scored.values[index].max():.6g}",
    }
    if unscored := total - len(scored.finite):
        rows["without a score"] = f"{unscored} (score not finite; not kept)"
    if labels is not None:
        rows["failed, all labelled"] = _rate(labels.bad)
        rows["failed, labelled and kept"] = _rate(labels.bad[index.numpy()])
        notes, missing = [labels.note], int(np.isnan(labels.bad).sum())
        if missing and certificate is not None:
            notes.append(f"{missing} of {total} samples have no label")
            if not np.nansum(labels.bad):
                notes.append("no labelled sample failed; the guarantee holds only if failures were labelled as well")
        if note := "; ".join(filter(None, notes)):
            rows["labels"] = note
    if certificate is not None:
        rows["guarantee"] = guarantee(certificate, name)
    return [{"": name, "value": value} for name, value in rows.items()]


def guarantee(certificate: RiskCertificate, name: str) -> str:
    """Return what a certificate guarantees for a score of this name."""
    return (
        f"at most {certificate.max_risk:.4g} of samples with {name} ≤ {certificate.threshold:.6g} fail, with "
        f"probability {certificate.probability:.4g}, based on {certificate.labelled} labels (bound "
        f"{certificate.bound:.4f})"
    )


def _rate(bad: np.ndarray) -> str:
    known = bad[~np.isnan(bad)]
    if not len(known):
        return "no labels"
    failed, count = int(known.sum()), len(known)
    low, high = (float(end(failed, count, (1 - SHARE) / 2)) for end in (lower_bound, upper_bound))
    return f"{failed} of {count} ({failed / count:.1%}; {SHARE:.0%} interval {low:.1%} to {high:.1%})"


# ---- files -----------------------------------------------------------------------------------------------------------


def _write_rows(file: Path, out: Path, table: Table, index: Tensor, rank: Tensor) -> list[Path]:
    """Write the kept rows with their position, and the structures if each row is one."""
    kept, places = index.tolist(), rank[index].tolist()
    columns = [name for name in table if name != PLACE]  # a column of an earlier filter
    chosen = {name: [table[name][i] for i in kept] for name in columns}
    written = [write_text(out / "samples.csv", Results.from_columns({**chosen, PLACE: places}).csv())]
    if (path := _inside(file.with_suffix(".parquet"), file.parent)).is_file():
        written.append(write_bytes(out / "samples.parquet", _parquet(path, columns, kept, places)))
    names = chosen.get(NAME)
    if names is None:
        return written
    copies = (_copied(file, out, place, suffix, names) for place, suffix in PLACES.items())
    return written + [copy for copy in copies if copy is not None]


def _copied(file: Path, out: Path, place: str, suffix: str, names: list[str]) -> Path | None:
    """Copy the structures of these names beside the samples, if there are any in this format; return the copy."""
    source = _inside(file.parent / place if suffix else file.with_suffix(Path(place).suffix), file.parent)
    if suffix and source.is_dir():
        for path in (_inside(source / f"{name}{suffix}", source) for name in names):
            if path.is_file():  # structures that cannot be written have no file
                write_bytes(out / place / path.name, read_bytes(path, MEBIBYTE))
    elif suffix or not source.is_file():
        return None
    elif source.suffix == ".db":
        return copy_database(source, out / place, names)
    else:
        wanted = set(names)
        frames = [frame for name, frame in _frames(read_text(source), source) if name in wanted]
        write_text(out / place, "".join(frames))
    return out / place


def _inside(path: Path, folder: Path) -> Path:
    """Return the path; raise if it is a link that leads out of the folder, to files that must not be copied."""
    if path.resolve().parent != folder.resolve():
        raise DataError(f"{shown(path)} leads out of the samples' folder; files outside it are not copied")
    return path


def _parquet(path: Path, columns: list[str], kept: list[int], places: list[int]) -> bytes:
    arrow, parquet = need("pyarrow"), need("pyarrow.parquet")
    try:
        table = read_parquet(path).select(columns).take(kept).append_column(PLACE, arrow.array(places))
    except (arrow.ArrowException, KeyError, IndexError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise DataError(f"{path} is not the table of the samples beside it ({reason[:100]})") from error
    content = io.BytesIO()
    parquet.write_table(table, content)
    return content.getvalue()


def _frames(content: str, path: Path) -> Iterator[tuple[str, str]]:
    """Yield each frame of an extended XYZ file with the name in its comment line."""
    lines, start = content.splitlines(keepends=True), 0
    while start < len(lines):
        try:
            size = int(lines[start]) + 2
            frame = lines[start : start + size]
            match = re.search(r'(?<!\S)name=("(?:[^"\\]|\\.)*"|\S+)', frame[1])
            name = match[1] if match else ""
            name = json.loads(name) if name.startswith('"') else name
        except (ValueError, IndexError) as error:
            raise DataError(f"{path} is not an extended XYZ file: no frame starts at line {start + 1}") from error
        if size < 3 or len(frame) < size:
            raise DataError(f"{path} is truncated: line {start + 1} declares {size - 2} atoms")
        start += size
        yield name, "".join(frame)
