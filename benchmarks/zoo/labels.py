"""Measure what labels add to the choice of a score, by their number, from the files of the zoo's runs.

python -m benchmarks.zoo.labels runs/zoo --out results/zoo

In each run, n random samples are labelled. Another score than the default is chosen if its AUROC on them is larger
by more than its standard error, as in `fmwc.fit_confidence`. The choice is evaluated on the other samples.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from benchmarks.zoo.flows import FLOWS, HALVES
from benchmarks.zoo.table import auroc
from fmwc.calibration import SURE
from fmwc.files import write_text

NUMBERS = (0, 30, 100, 300)
REPEATS = 50


def chosen(scores: dict[str, np.ndarray], failed: np.ndarray, rows: np.ndarray) -> str:
    """Return the score that these labels choose."""
    bad = int(failed[rows].sum())
    if not 0 < bad < len(rows):
        return "default"
    values = {name: auroc(score[rows], failed[rows]) for name, score in scores.items()}
    best = max(values, key=lambda name: values[name])
    error = (values[best] * (1 - values[best]) / min(bad, len(rows) - bad)) ** 0.5
    return best if values[best] - SURE * max(error, 1e-3) > values["default"] else "default"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    lines = ["# What labels add", "", __doc__.split("\n\n")[2].replace("\n", " ").strip(), ""]
    lines += ["| half | " + " | ".join(f"{n} labels" for n in NUMBERS) + " |", "|---" + "|---:" * len(NUMBERS) + "|"]
    for half in HALVES:
        found: dict[int, list[float]] = {n: [] for n in NUMBERS}
        for path in sorted(args.folder.glob("*.npz")):
            if FLOWS[path.stem.rpartition("-")[0]].half != half:
                continue
            data = np.load(path)
            failed = data["failed"].astype(bool)
            names = [n for n in data.files if n.startswith("score.") and "no data" not in n]
            scores = {n.removeprefix("score."): data[n] for n in names}
            for n in NUMBERS:
                values = []
                for repeat in range(REPEATS if n else 1):
                    order = np.random.default_rng(repeat).permutation(len(failed))
                    rest = order[n:]
                    values.append(auroc(scores[chosen(scores, failed, order[:n])][rest], failed[rest]))
                found[n].append(float(np.mean(values)))
        if found[0]:
            cells = [f"{np.median(found[n]):.3f} ({min(found[n]):.2f})" for n in NUMBERS]
            lines.append(f"| {half}, {len(found[0])} runs | " + " | ".join(cells) + " |")
    lines += ["", f"AUROC: median over runs (smallest), each the mean of {REPEATS} draws of labels.", ""]
    args.out.mkdir(parents=True, exist_ok=True)
    write_text(args.out / "labels.md", "\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
