"""Compare noise per position with noise shared over positions, by the scores of the same shipped digits.

    python -m benchmarks.shared_noise --count 1000 --device cuda --out runs/shared_noise

Writes scores.npz: for each sample its label, every score by both estimators, the sample (`x`), and, with `--judge`,
whether the shipped classifier disagrees with the label. Prints rank correlations, and the average precision of each
score for the disagreement.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fmwc
from fmwc.estimators import Linearised
from fmwc.registry import domain_named
from fmwc.sampling import SamplingConfig

SCORES = ("integrated", "endpoint", "peak", "temporal_ratio", "integrated@0.6-0.9")


def read(field: Any, count: int, steps: int, seed: int, shared: bool, batch: int, probes: int) -> tuple[Any, float]:
    """Sample, reading the variance at every step, and return the run with its seconds."""
    y = (torch.arange(count) % 10).to(field.device)
    begin = time.perf_counter()
    estimator = Linearised(probes, shared=shared)
    run = fmwc.sample(
        field, count, steps=steps, seed=seed, confidence=estimator, cond={"y": y}, config=SamplingConfig(batch=batch)
    )
    return run, time.perf_counter() - begin


def compare(
    field: Any, count: int, steps: int = 50, seed: int = 0, batch: int = 100, probes: int = 2
) -> tuple[Any, dict[str, np.ndarray], dict[str, float]]:
    """Return scores of the same samples by both estimators (`apart/…`, `shared/…`), and the seconds of each."""
    found: dict[str, np.ndarray] = {}
    seconds: dict[str, float] = {}
    for name, shared in (("apart", False), ("shared", True)):
        run, seconds[name] = read(field, count, steps, seed, shared, batch, probes)
        found |= {f"{name}/{score}": run.score(score).cpu().numpy() for score in SCORES}
    return run, found, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--probes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--judge", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path, default=Path("runs/shared_noise"))
    args = parser.parse_args()
    field = fmwc.load("mnist", device=args.device)
    run, scores, seconds = compare(field, args.count, args.steps, args.seed, args.batch, args.probes)
    args.out.mkdir(parents=True, exist_ok=True)
    label = (torch.arange(args.count) % 10).numpy()
    bad = domain_named("mnist").judge(run) if args.judge else None
    judged = {} if bad is None else {"bad": bad}
    np.savez(args.out / "scores.npz", label=label, x=run.x.cpu().numpy(), **judged, **scores)
    print("seconds", {name: round(taken, 1) for name, taken in seconds.items()})
    from scipy.stats import spearmanr
    from sklearn.metrics import average_precision_score

    for score in SCORES:
        pair = [scores[f"{name}/{score}"] for name in ("apart", "shared")]
        line = f"{score}: rank correlation {spearmanr(*pair).statistic:.3f}, ratio {np.median(pair[1] / pair[0]):.3f}"
        if bad is not None and 0 < bad.sum() < len(bad):
            precision = [average_precision_score(bad, values) for values in pair]
            line += f", AUPRC {precision[0]:.3f} apart, {precision[1]:.3f} shared ({100 * bad.mean():.1f} % bad)"
        print(line)


if __name__ == "__main__":
    main()
