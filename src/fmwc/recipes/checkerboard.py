"""The Checkerboard recipe: the paper's first setting (tab:network-hyperparams, tab:training-hyperparams)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from fmwc.baselines import Dropout, HeteroscedasticHead, nll
from fmwc.checkpoint import save
from fmwc.data import checkerboard, fingerprint
from fmwc.errors import OutputError, UsageError, pick
from fmwc.field import Field, Reference, attach
from fmwc.flow import elbo, euclidean, flow_matching
from fmwc.metrics.points import misplacement
from fmwc.nets import MLP
from fmwc.randomness import Stream, derive
from fmwc.recipes.recipe import Clock, provenance
from fmwc.sampling import sample, setting
from fmwc.training import Plan, fit_noise, train

__all__ = ["PRESETS", "SPACE", "Checkerboard", "finish", "fit", "fit_dropout", "fit_head", "fit_network"]

SPACE = euclidean((2,))
Progress = Callable[[str, int, int, float], None]  # (stage, steps done, steps in all, loss)


@dataclass(frozen=True)
class Checkerboard:
    """One training run. Numbers are the paper's unless a reason stands beside them."""

    method: str = "retrofit"  # retrofit: train the flow, then fit the noise to it; joint: both at once, as the paper
    seed: int = 0
    points: int = 500_000  # training samples
    hidden: int = 512
    depth: int = 3
    time_features: int = 256  # not in the paper; 64, 128, 256 misplaced 4.1, 3.5, 3.1 % on validation seed 100
    iterations: int = 20_000
    batch: int = 4096
    lr: float = 1e-3
    decay: str = "cosine"  # the paper decays nothing here; decay is better for every method (results/checkerboard)
    beta: float = 1e-3
    prior_rate: float = 0.3
    cycles: int = 4
    warmup: float = 0.1
    layers: str = "*"  # a glob over layer names: "out" is the paper's output-only variant
    width: int = 64  # of the inference networks
    noise_steps: int = 2_000  # of the retrofit; 500 did as well on validation seed 100, 2,000 costs seconds
    save_every: int = 1_000

    def __post_init__(self) -> None:
        pick({"retrofit": 0, "joint": 0}, self.method, "method")
        for name in ("points", "hidden", "depth", "time_features", "width", "noise_steps"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is at least 1, got {getattr(self, name)}")
        if self.time_features % 2:
            raise UsageError(f"time_features is even (sines and cosines), got {self.time_features}")
        if not 0 < self.prior_rate < 1:
            raise UsageError(f"prior_rate lies strictly between 0 and 1, got {self.prior_rate}")

    @property
    def plan(self) -> Plan:
        return Plan(
            self.iterations,
            self.batch,
            self.lr,
            self.decay,
            self.beta,
            self.cycles,
            self.warmup,
            derive(self.seed, "train"),
            self.save_every,
        )

    def data(self) -> Tensor:
        """Points of a fixed seed of their own: every run learns from the same data."""
        return _data(self.points)

    def network(self, outputs: int | None = None) -> MLP:
        """A fresh network; its first weights depend on the seed only."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(self.seed, "network"))
            return MLP(2, self.hidden, self.depth, self.time_features, outputs)

    def attach(self, network: nn.Module) -> Field:
        return attach(
            network,
            include=[self.layers],
            space=SPACE,
            prior_rate=self.prior_rate,
            width=self.width,
            seed=derive(self.seed, "noise"),
        )


PRESETS: dict[str, Checkerboard] = {
    # Train the flow as usual, then fit the noise: the better samples, and the samples of the plain flow.
    "recommended": Checkerboard(),
    # As printed: joint training at a constant rate.
    "paper": Checkerboard(method="joint", decay="constant"),
    # Small enough for a demonstration on two cores.
    "quick": Checkerboard(
        points=100_000, hidden=256, time_features=128, iterations=10_000, batch=1024, lr=2e-3, noise_steps=500
    ),
}


@lru_cache(maxsize=2)
def _data(points: int) -> Tensor:
    return checkerboard.sample(points, seed=derive("checkerboard", "training data"))


def _report(progress: Progress | None, stage: str, total: int) -> Callable[[int, float], None] | None:
    return None if progress is None else lambda done, loss: progress(stage, done, total, loss)


def fit_network(
    recipe: Checkerboard, network: nn.Module, progress: Progress | None = None, resume: Path | None = None
) -> None:
    """Trains a plain flow."""

    def loss(x1: Tensor, randomness: Stream, beta: Tensor) -> Tensor:
        return flow_matching(network, SPACE, x1, seed=randomness)

    train(
        network, loss, recipe.data(), recipe.plan, resume=resume, progress=_report(progress, "flow", recipe.iterations)
    )


def fit_dropout(recipe: Checkerboard, dropout: Dropout, progress: Progress | None = None) -> None:
    """Trains a flow with dropout on."""

    def loss(x1: Tensor, randomness: Stream, beta: Tensor) -> Tensor:
        return flow_matching(lambda x, t: dropout.draw(x, t, seed=randomness), SPACE, x1, seed=randomness)

    train(dropout, loss, recipe.data(), recipe.plan, progress=_report(progress, "dropout", recipe.iterations))


def fit_head(recipe: Checkerboard, head: HeteroscedasticHead, progress: Progress | None = None) -> None:
    """Trains UA-Flow's two heads."""

    def loss(x1: Tensor, randomness: Stream, beta: Tensor) -> Tensor:
        return nll(head, SPACE, x1, randomness)

    train(head, loss, recipe.data(), recipe.plan, progress=_report(progress, "head", recipe.iterations))


def fit_joint(recipe: Checkerboard, field: Field, progress: Progress | None = None, resume: Path | None = None) -> None:
    """Trains flow and noise together (eq:elbo-param)."""

    def loss(x1: Tensor, randomness: Stream, beta: Tensor) -> Tensor:
        return elbo(field, x1, beta, seed=randomness)

    train(
        field, loss, recipe.data(), recipe.plan, resume=resume, progress=_report(progress, "joint", recipe.iterations)
    )


def fit_retrofit(
    recipe: Checkerboard, field: Field, progress: Progress | None = None, resume: Path | None = None
) -> None:
    """Fits the noise to a flow that is trained already."""
    fit_noise(
        field,
        recipe.data(),
        recipe.noise_steps,
        beta=recipe.beta,
        batch=recipe.batch,
        lr=recipe.lr,
        seed=derive(recipe.seed, "retrofit"),
        resume=resume,
        progress=_report(progress, "noise", recipe.noise_steps),
    )


def fit(recipe: Checkerboard, out: Path, device: torch.device, progress: Progress | None = None) -> Field:
    """Trains a field by the recipe into a folder. A run that was killed goes on where it was."""
    if out.exists() and not out.is_dir():
        raise OutputError(f"{out} is a file; give --out a folder")
    if (out / "recipe.json").exists():
        raise OutputError(f"{out} already holds a checkpoint and was not touched; choose another --out")
    strange = [p.name for p in out.glob("*") if not p.name.endswith(".resume")] if out.is_dir() else []
    if strange:
        raise OutputError(f"{out} is not empty ({strange[0]}) and nothing in it was touched; choose another --out")
    clock = Clock(device)
    field = recipe.attach(recipe.network()).to(device)
    if recipe.method == "joint":
        fit_joint(recipe, field, progress, out / "joint.resume")
    else:
        fit_network(recipe, field.network, progress, out / "flow.resume")
        fit_retrofit(recipe, field, progress, out / "noise.resume")
    finish(recipe, field, out, clock)
    for point in out.glob("*.resume"):
        point.unlink()
    return field


def finish(recipe: Checkerboard, field: Field, out: Path, clock: Clock) -> None:
    """Reads the reference scores, and writes the checkpoint with how it was made."""
    # A seed of its own: the samples that are reported on are ranked among others, not among themselves.
    reference = sample(field, 10_000, steps=50, seed=derive(recipe.seed, "reference"))
    levels = torch.linspace(0, 1, 1001, device=field.device)
    field.reference = Reference(
        "temporal_ratio", setting("linearised", 50, "euler", 1), reference.score("temporal_ratio").quantile(levels)
    )
    save(
        field,
        out,
        recipe={"name": "checkerboard", **asdict(recipe)},
        data={"name": "checkerboard", "fingerprint": fingerprint(recipe.data())},
        metrics={"misplacement": misplacement(reference.x)},
        provenance=provenance(field.device, clock.seconds, seeds=[recipe.seed]),
    )
