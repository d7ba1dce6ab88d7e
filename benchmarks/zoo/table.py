"""Write the table of the zoo: how well every score finds the failed samples of every flow.

python -m benchmarks.zoo.table runs/zoo --out results/zoo
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import rankdata

from benchmarks.zoo.flows import FLOWS, HALVES
from fmwc.files import write_json, write_text
from fmwc.metrics.ranking import ranking

METRICS = ("auroc", "auprc", "lift")
DIGITS = {"auroc": 2, "auprc": 2, "lift": 1}


def auroc(score: np.ndarray, failed: np.ndarray) -> float:
    """Return the probability that a failed sample has a higher score than another; equal scores count half.

    >>> auroc(np.array([1.0, 2.0, 2.0, 3.0]), np.array([False, False, True, True]))
    0.875
    """
    positives = int(failed.sum())
    others = len(failed) - positives
    if not positives or not others:
        return math.nan
    return float((rankdata(score)[failed].sum() - positives * (positives + 1) / 2) / (positives * others))


def read(path: Path) -> dict[str, Any]:
    """Read one flow and seed: the share of failures, and for every score AUROC, AUPRC, lift and cost."""
    with np.load(path, allow_pickle=False) as file:
        failed = file["failed"].astype(bool)
        scores: dict[str, dict[str, float]] = {}
        for key in file.files:
            if not key.startswith("score."):
                continue
            name, values = key.removeprefix("score."), file[key].astype(float)
            if not failed.any() or not np.isfinite(values).all():
                continue  # the table shows a gap
            found = ranking(values, failed)
            cost = float(file[f"cost.{name}"]) if f"cost.{name}" in file.files else math.nan
            scores[name] = {
                "auroc": auroc(values, failed),
                "auprc": found.auprc,
                "lift": found.lift,
                "cost": cost,
            }
        notes = {key.removeprefix("note."): float(file[key]) for key in file.files if key.startswith("note.")}
    return {"failed": float(failed.mean()), "samples": len(failed), "scores": scores, "notes": notes}


def _spread(values: list[float]) -> dict[str, float | None]:
    known = [v for v in values if math.isfinite(v)]
    if not known:
        return {"mean": None, "std": None}
    return {"mean": float(np.mean(known)), "std": float(np.std(known, ddof=1)) if len(known) > 1 else None}


def collect(folder: Path) -> dict[str, Any]:
    """Return means and standard deviations over seeds by flow and score, from the files `FLOW-SEED.npz` of a folder."""
    runs: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for path in sorted(folder.glob("*.npz")):
        name, _, seed = path.stem.rpartition("-")
        if name in FLOWS:
            runs[name][int(seed)] = read(path)
    found: dict[str, Any] = {}
    for name, flow in FLOWS.items():
        if name not in runs:
            continue
        seeds = runs[name]
        names = list(dict.fromkeys(score for run in seeds.values() for score in run["scores"]))
        found[name] = {
            "half": flow.half,
            "about": flow.about,
            "rule": flow.rule,
            "seeds": sorted(seeds),
            "failed": _spread([run["failed"] for run in seeds.values()]),
            "notes": {
                note: _spread([run["notes"][note] for run in seeds.values()])
                for note in next(iter(seeds.values()))["notes"]
            },
            "scores": {
                score: {
                    metric: _spread([run["scores"][score][metric] for run in seeds.values() if score in run["scores"]])
                    for metric in (*METRICS, "cost")
                }
                for score in names
            },
        }
    return found


def summary(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return for each half and score the median AUROC over flows, the worst with its flow, and the number of flows."""
    halves: dict[str, Any] = {}
    for half in HALVES:
        by_score: dict[str, dict[str, float]] = defaultdict(dict)
        for name, flow in found.items():
            for score, numbers in flow["scores"].items():
                if flow["half"] == half and numbers["auroc"]["mean"] is not None:
                    by_score[score][name] = numbers["auroc"]["mean"]
        halves[half] = {
            score: {
                "median": float(np.median([*values.values()])),
                "worst": min(values.values()),
                "worst_flow": min(values, key=lambda name: values[name]),
                "flows": len(values),
                "median_lift": float(np.median([found[name]["scores"][score]["lift"]["mean"] for name in values])),
            }
            for score, values in by_score.items()
        }
    return halves


def against_best(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return for each flow the AUROC of the default, or None if it is withheld, and the best score given the labels."""
    rows = []
    for name, flow in found.items():
        mean = {score: numbers["auroc"]["mean"] for score, numbers in flow["scores"].items()}
        known = {score: value for score, value in mean.items() if value is not None and not score.startswith("default")}
        if known:
            best = max(known, key=lambda score: known[score])
            rows.append({"flow": name, "default": mean.get("default"), "best": best, "auroc": known[best]})
    return rows


def _cell(value: Mapping[str, float | None] | None, digits: int) -> str:
    if value is None or value["mean"] is None:
        return "–"
    std = "" if value["std"] is None else f" ± {value['std']:.{digits}f}"
    return f"{value['mean']:.{digits}f}{std}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _halves(found: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for half, by_score in summary(found).items():
        if not by_score:
            continue
        lines += ["", f"## Half `{half}`", "", _row("score", "flows", "median AUROC", "worst AUROC", "median lift")]
        lines.append("|---|---:|---:|---|---:|")
        for score, numbers in sorted(by_score.items(), key=lambda item: -item[1]["median"]):
            worst = f"{numbers['worst']:.2f} ({numbers['worst_flow']})"
            lines.append(
                _row(score, str(numbers["flows"]), f"{numbers['median']:.2f}", worst, f"{numbers['median_lift']:.1f}")
            )
    return lines


def tables(found: Mapping[str, Any]) -> str:
    """Return the tables as Markdown: summaries, then one table for each metric with a row for each flow."""
    scores = list(dict.fromkeys(score for flow in found.values() for score in flow["scores"]))
    lines = [
        "# The zoo",
        "",
        "Small flows; mean ± standard deviation over seeds. NOTES.md explains what was tuned on which half.",
        "",
    ]
    lines += ["## The default, and the best score of each flow (picked with the labels), AUROC", ""]
    lines += [_row("flow", "half", "default", "best", "difference"), "|---|---|---:|---|---:|"]
    for row in against_best(found):
        flow, withheld = found[row["flow"]], row["default"] is None
        default = "withheld" if withheld else _cell(flow["scores"]["default"]["auroc"], 2)
        behind = "" if withheld else f"{row['default'] - row['auroc']:+.2f}"
        lines.append(_row(row["flow"], flow["half"], default, f"{row['best']} {row['auroc']:.2f}", behind))
    lines += _halves(found)
    lines += ["", "## The flows", ""]
    lines += [_row("flow", "half", "about", "fails if", "failed, %"), "|---|---|---|---|---:|"]
    for name, flow in found.items():
        share = {key: None if v is None else 100 * v for key, v in flow["failed"].items()}
        lines.append(_row(name, flow["half"], flow["about"], flow["rule"], _cell(share, 1)))
    titles = {"auroc": "AUROC", "auprc": "AUPRC", "lift": "Lift (AUPRC ÷ share that failed)", "cost": "Cost"}
    for metric in METRICS:
        lines += ["", f"## {titles[metric]}", "", _row("flow", "half", *scores), f"|---|---|{'---:|' * len(scores)}"]
        for name, flow in found.items():
            cells = (_cell(flow["scores"].get(score, {}).get(metric), DIGITS[metric]) for score in scores)
            lines.append(_row(name, flow["half"], *cells))
    lines += ["", "## Cost beyond plain sampling, in evaluations per sample", "", _row("flow", *scores)]
    lines.append(f"|---|{'---:|' * len(scores)}")
    for name, flow in found.items():
        costs = ({**flow["scores"].get(score, {}).get("cost", {"mean": None}), "std": None} for score in scores)
        lines.append(_row(name, *(_cell(cost, 0) for cost in costs)))
    return "\n".join(lines) + "\n"


def write(folder: Path, out: Path, about: Mapping[str, Any] | None = None) -> None:
    """Write `table.md` and `table.json` from the files of a folder."""
    found = collect(folder)
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "table.md", tables(found))
    write_json(out / "table.json", {"provenance": dict(about or {}), "flows": found, "halves": summary(found)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder of the runner's .npz files")
    parser.add_argument("--out", type=Path, help="the folder of table.md and table.json; default: the same folder")
    arguments = parser.parse_args()
    write(arguments.folder, arguments.out or arguments.folder)


if __name__ == "__main__":
    main()
