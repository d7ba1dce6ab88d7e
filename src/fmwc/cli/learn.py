"""Fit a head to labelled samples and compare it with other rankings (`fmwc learn`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fmwc.cli.edit import find_samples
from fmwc.cli.filter import read_run
from fmwc.cli.labels import NAME, labels_given, read_labels
from fmwc.cli.sample import RunRecord, write_rows
from fmwc.cli.verbs import Learn
from fmwc.domains import Rows
from fmwc.errors import UsageError
from fmwc.files import claimed
from fmwc.metrics.ranking import compare
from fmwc.sampling import Trajectory
from fmwc.uses.heads import checked_labels, cross_validated, fit_evidence_head

__all__ = ["Learned", "learn"]

KEPT = (0.1, 0.2, 0.5)  # shares of the samples with the best rank
MAIN = 0.2  # the share for which rankings are compared
SHOWN = 5  # columns with the largest weights


@dataclass(frozen=True)
class Learned:
    """The result of `fmwc learn`.

    Attributes:
        comparison: One row per ranking, with its failure rates.
        summary: What the head was fitted to, and whether it ranks better than the others.
        written: The files.
    """

    comparison: Rows
    summary: Rows
    written: list[Path]


def learn(options: Learn) -> Learned:
    """Fit a head to labelled samples, and write it with its cross-validated scores."""
    if not labels_given(options):
        raise UsageError("learning needs labelled samples; add --labels FILE (or a column of the samples' table)")
    file = find_samples(options.samples, options.out)
    run, table = read_run(file)
    record = RunRecord.read(run.made)
    if not record.identity:
        raise UsageError(f"{file} does not record which checkpoint drew its samples; draw them with fmwc sample")
    names = table[NAME] if table is not None and NAME in table else run.names
    labels = read_labels(options, names, table)
    index = np.flatnonzero(~np.isnan(labels.bad) & run.score().isfinite().cpu().numpy())
    failed = checked_labels(labels.bad[index] == 1, len(index))
    labelled = run.take(torch.from_numpy(index))
    with claimed(options.out, "learn", force=options.force):
        head = fit_evidence_head(labelled, failed, record.evidence_settings())
        scores = {"the head": cross_validated(labelled, failed), **_others(labelled)}
        written = [head.save(options.out)]
        columns = {NAME: [names[i] for i in index], "failed": failed.tolist(), "score": scores["the head"].tolist()}
        written.append(write_rows(options.out / "learn.csv", columns))
    compared = compare(scores, failed, top=(), kept=KEPT)
    used = [
        name for name in sorted(head.columns, key=lambda name: -abs(head.columns[name][2])) if head.columns[name][2]
    ]
    summary = {
        "labels": f"{len(index)} of {len(run)} samples; {failed.sum()} failed ({failed.mean():.1%})",
        "evidence": f"{len(used)} of {len(head.columns)} columns used; {', '.join(used[:SHOWN]) or 'none'}",
        **{f"against {name}": _verdict(compared[name]) for name in compared if name != "the head"},
        **({"note": labels.note} if labels.note else {}),
    }
    return Learned(_comparison(compared), [{"": name, "value": value} for name, value in summary.items()], written)


def _others(run: Trajectory) -> dict[str, np.ndarray]:
    """Return the rankings that a head must beat: the default score, and the number of rows (atoms) if it differs."""
    sizes = {f"fewest {cond} first": run.cond[cond].double().numpy() for cond, _ in run.rows.values()}
    return {f"the default score, {run.default_score}": run.score().double().numpy(), **sizes}


def _comparison(compared: dict[str, dict[str, dict[str, Any]]]) -> Rows:
    rows = []
    for name, numbers in compared.items():
        row = {"ranking": name}
        for share in KEPT:
            row[f"failed, surest {share:.0%}"] = _interval(numbers[f"retention_{share:.0%}"], "{:.1%}")
        rows.append({**row, "AUPRC": _interval(numbers["auprc"], "{:.2f}")})
    return rows


def _interval(entry: dict[str, Any], form: str) -> str:
    low, high = entry["interval"]
    return f"{form.format(entry['value'])} [{form.format(low)}, {form.format(high)}]"


def _verdict(other: dict[str, dict[str, Any]]) -> str:
    """Describe how the failure rate of another ranking differs from that of the head."""
    entry = other[f"retention_{MAIN:.0%}"]
    low, high = entry["difference_interval"]
    verdict = "the head is better" if low > 0 else "the head is worse" if high < 0 else "no clear difference"
    more = f"{100 * entry['difference']:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}]"
    return f"{verdict}: {more} failures among the surest {MAIN:.0%}, in brackets a 90 % interval"
