"""Compute small numbers of results/mnist/NOTES.md: noise of probes, sign of the divergence, spread of small runs.

python -m benchmarks.digit_checks [--run runs/mnist]   # samples of python -m experiments reproduce mnist
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor

import fmwc
from experiments.common.evaluation import along
from fmwc.checkpoint import load_network
from fmwc.estimators import Record, contributions
from fmwc.metrics.ranking import ranking
from fmwc.mnist.classifier import failed
from fmwc.mnist.recipe import JUDGE, SCORE, WITHIN, labels
from fmwc.randomness import Stream, signs
from fmwc.sampling import SamplingConfig, Trajectory

FIELDS = ("mnist", "mnist-joint")


def probe_noise(name: str, images: int = 48) -> None:
    """Print the relative noise of K probes of all pixels, and of K probes of every K-th pixel each."""
    field, y, randomness = fmwc.load(name), labels(images), Stream(torch.Generator().manual_seed(0))
    run = fmwc.sample(
        field, images, steps=50, seed=5, confidence=None, cond={"y": y}, config=SamplingConfig(keep_states=True)
    )
    assert run.states is not None
    for time in (0.0, 0.2, 0.8):
        record = Record()
        with torch.enable_grad():
            v = field.run(record, run.states[round(50 * time)], torch.full((images,), time), cond={"y": y})
        place = torch.arange(v[0].numel()).view_as(v[0])

        def pull(probe: Tensor, v: Tensor = v, record: Record = record) -> Tensor:
            gradients = torch.autograd.grad(v, record.outputs, probe, retain_graph=True)
            return contributions(list(gradients), record, images).sum(0)

        def whole(k: int, v: Tensor = v) -> Tensor:
            return torch.stack([pull(signs(randomness, v.detach())) for _ in range(k)]).mean(0)

        def diluted(k: int, v: Tensor = v, place: Tensor = place) -> Tensor:
            sign = signs(randomness, v.detach())
            return torch.stack([pull(sign * (place % k == i)) for i in range(k)]).sum(0)

        truth = (diluted(64) + diluted(64)) / 2
        noise = [float((probed(16) / truth).std()) for probed in (whole, diluted)]
        spread = float(truth.log().std())
        print(f"{name}, t = {time}: images differ by {spread:.3f}; 16 probes {noise[0]:.3f}, diluted {noise[1]:.3f}")


def divergence_sign(name: str, images: int = 60) -> None:
    field, y = fmwc.load(name), labels(images)
    run = fmwc.sample(
        field, images, steps=50, seed=11, confidence=None, cond={"y": y}, config=SamplingConfig(keep_states=True)
    )
    assert run.states is not None
    steps = [*range(0, 50, 10), 50]
    found = along(field, [run.states[i] for i in steps], run.grid[steps], 16, seed=1, cond={"y": y})
    print(f"{name}: ∇·v is negative in {(found < 0).sum()} of {found.numel()} states")


def small_runs(folder: Path, halves: int = 300, again: int = 60) -> None:
    """Print how a lift varies between halves of a run, and whether this machine repeats its readings."""
    run = Trajectory.load(folder / "samples.safetensors")
    bad = failed(load_network(JUDGE), run.x, run.cond["y"])
    score, random = run.score(SCORE, within=WITHIN).numpy(), np.random.default_rng(0)
    picks = [random.choice(len(bad), len(bad) // 2, replace=False) for _ in range(halves)]
    low, high = np.quantile([ranking(score[i], bad[i]).lift for i in picks], [0.05, 0.95])
    print(f"{len(bad)} digits, {bad.sum()} failed: lift {ranking(score, bad).lift:.1f}, halves {low:.1f} to {high:.1f}")
    repeated = fmwc.sample(
        fmwc.load("mnist"),
        x0=run.x0[:again],
        steps=50,
        seed=9,
        cond={"y": run.cond["y"][:again]},
        config=SamplingConfig(batch=30),
    )
    score, saved = repeated.score(SCORE), run.score(SCORE)[:again]
    rank = spearmanr(score, saved)[0]
    pixels = float((repeated.x - run.x[:again]).abs().max())
    print(f"repeated: pixels differ by {pixels:.3f}, Spearman {rank:.2f}, ratio {(score / saved).median():.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path)
    folder = parser.parse_args().run
    for name in FIELDS:
        probe_noise(name)
        divergence_sign(name)
    if folder:
        small_runs(folder)


if __name__ == "__main__":
    main()
