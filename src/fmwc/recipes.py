"""Training recipes: a dataclass of options, and training by it into a folder, in which an interrupted run resumes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from fmwc.checkpoint import identity, load, save
from fmwc.data.arrays import fingerprint
from fmwc.errors import CheckpointError, StoppedError, UnknownNameError, UsageError, nearest
from fmwc.field import Field, attach
from fmwc.files import write_text
from fmwc.flow import Space, elbo_loss, flow_matching_loss
from fmwc.processes import Processes, resumed_by_first
from fmwc.provenance import Clock, provenance, runtime
from fmwc.quantise import round_weights
from fmwc.randomness import Stream, derive
from fmwc.readers import shown
from fmwc.sampling import Reference
from fmwc.training import Loss, TrainingConfig, fit_noise, train

__all__ = [
    "ENDED",
    "LATER",
    "Progress",
    "Recipe",
    "data_of",
    "finish",
    "fit",
    "fit_joint",
    "fit_network",
    "fit_retrofit",
    "identity_of",
    "override",
    "stage_progress",
    "take_flow",
    "train_stage",
]

R = TypeVar("R")


@dataclass(frozen=True)
class Recipe(ABC):
    """Options of a training run. Values are the paper's unless a comment gives a reason.

    Fields with the names of :class:`fmwc.training.TrainingConfig` configure the training of the flow.
    """

    name: ClassVar[str]
    counts: ClassVar[tuple[str, ...]] = ("width", "noise_steps")  # fields that must be at least 1

    method: str = "retrofit"  # retrofit: train the flow, then fit the noise; joint: both at once, as in the paper
    seed: int = 0
    beta: float = 1e-3
    prior_rate: float = 0.3
    cycles: int = 4
    warmup: float = 0.1
    width: int = 64  # of the inference networks
    noise_steps: int = 2_000  # of the retrofit

    # Defaults of fields that only some recipes have.
    include = "*"  # glob pattern of layers with noise
    exclude = ""  # glob pattern of layers without noise
    noise_lr = 1e-3
    noise_compiled = False
    enough = 1.0  # share of the steps that is sufficient if the time limit stops training
    eightbit = False  # round weights to 8-bit integers, as shipped, before the reference is fitted
    flow = ""  # a checkpoint whose flow is used instead of training one

    def __post_init__(self) -> None:
        if self.method not in ("retrofit", "joint"):
            raise UnknownNameError(nearest(self.method, ("retrofit", "joint"), "method"))
        if not 0 < self.prior_rate < 1:
            raise UsageError(f"prior_rate must lie strictly between 0 and 1, got {self.prior_rate}")
        for name in (*Recipe.counts, *self.counts):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def noise_batch(self) -> int:
        return self.plan.batch

    @property
    def plan(self) -> TrainingConfig:
        """The configuration of the flow's training."""
        known = {f.name for f in fields(TrainingConfig)}
        literals = {name: value for name, value in vars(self).items() if name in known}
        return TrainingConfig(**{**literals, "seed": derive(self.seed, "train")})

    @abstractmethod
    def space(self) -> Space:
        """Return the space of the samples."""

    @abstractmethod
    def rows(self) -> tuple[Any, dict[str, Any]]:
        """Return the training data and its conditions."""

    @abstractmethod
    def build(self, heads: int) -> Any:
        """Return a new network with `heads` times as many outputs."""

    @abstractmethod
    def reference(self, field: Field) -> tuple[Reference, dict[str, float]]:
        """Fit the reference of the confidence; return it and metrics of samples."""

    def source(self) -> tuple[Tensor, ...]:
        """Return the data from which `rows` is computed."""
        data, cond = self.rows()
        return data, *cond.values()

    def network(self, heads: int = 1) -> Any:
        """Return a new network. Its initial weights depend only on the seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(self.seed, "network"))
            return self.build(heads)

    def attach(self, network: nn.Module) -> Field:
        """Attach noise to a network."""
        return attach(
            network,
            include=[self.include],
            exclude=[self.exclude] if self.exclude else [],
            space=self.space(),
            prior_rate=self.prior_rate,
            width=self.width,
            seed=derive(self.seed, "noise"),
        )


def data_of(recipe: Recipe) -> str:
    """Return the fingerprint of a recipe's training data."""
    return fingerprint(*recipe.source())


# ---- overrides ---------------------------------------------------------------------------------------------------

MOST = 1 << 30
LONGEST = 4096  # maximum characters of a string
LIMITS: dict[str, tuple[float, float]] = {  # range of a field; other integers must fit into 64 bits
    **dict.fromkeys(("points", "iterations", "noise_steps", "save_every", "samples", "swept", "guided"), (1, MOST)),
    **dict.fromkeys(("edited", "references", "steps", "batch", "noise_batch"), (1, 10_000_000)),
    **dict.fromkeys(("hidden", "time_features", "frequencies", "width", "cond", "base"), (1, 16_384)),
    **dict.fromkeys(("depth", "layers", "blocks"), (1, 1_000)),
    **dict.fromkeys(("cycles", "classes", "replicates"), (1, 100_000)),
    **dict.fromkeys(("lr", "noise_lr", "last_lr", "weight_decay"), (0.0, 1e3)),
    **dict.fromkeys(("beta", "clip", "type_weight", "coord_weight", "minutes"), (0.0, 1e9)),
    **dict.fromkeys(("prior_rate", "warmup", "average", "enough"), (0.0, 1.0)),
    **dict.fromkeys(("anneal", "type_anneal"), (0.0, 1e3)),
}
_READ: dict[str, tuple[str, Callable[[str], Any], Callable[[Any], bool]]] = {  # field type: name, parser, check
    "int": ("a whole number of at most 64 bits", int, lambda value: -(1 << 63) <= value < 1 << 63),
    "float": ("a finite number", float, math.isfinite),
    "str": ("printable text", str, lambda value: len(value) <= LONGEST and value.isprintable()),
    "bool": ("true or false", lambda text: {"true": True, "false": False}.get(text.lower()), lambda v: v is not None),
}


def override(recipe: R, changes: Sequence[str], what: str = "recipe field") -> R:
    """Return a recipe with `key=value` changes, each parsed as the type of its field.

    Arguments:
        recipe: A dataclass of numbers, strings and Booleans.
        changes: The changes.
        what: The word for a field in error messages.
    """
    known = {f.name: str(f.type) for f in fields(recipe)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for change in changes:
        key, sign, value = change.partition("=")
        if not sign:
            raise UsageError(f"--set takes key=value, got '{shown(change)[:100]}'")
        if key not in known:
            raise UnknownNameError(nearest(shown(key)[:100], known, what))
        kind, parse, good = _READ[known[key]]
        try:
            values[key] = parse(value)
            if not good(values[key]):
                raise ValueError(value)
        except ValueError as error:
            raise UsageError(f"{what} '{key}' must be {kind}, got '{shown(value)[:100]}'") from error
        low, high = LIMITS.get(key, (-math.inf, math.inf))
        if known[key] in ("int", "float") and not low <= values[key] <= high:
            raise UsageError(f"{what} '{key}' must lie between {low:g} and {high:g}, got {value[:100]}")
    return replace(recipe, **values)  # type: ignore[type-var]


# ---- training ------------------------------------------------------------------------------------------------------

# Fields that affect the weights only by rounding: the data path, time limits and speed.
NEVER = ("data", "save_every", "minutes", "enough", "compiled", "noise_compiled")
LATER = ("steps", "anneal", "type_anneal", "references")  # fields that apply after training
ENDED = ".ended"  # suffix of a file next to a resume point: the time limit ended this stage after enough steps
INSTANT = 1e-9  # minutes

Progress = Callable[[str, int, int, float], None]  # (stage, steps done, total steps, loss)


def fit(
    recipe: Recipe, out: Path, device: torch.device, progress: Progress | None = None, *, force: bool = False
) -> Field:
    """Train a field by a recipe and write its checkpoint to a folder. Resumes if interrupted.

    Of several processes (:mod:`fmwc.processes`), the first writes, and the others return what it has written.

    Arguments:
        recipe: The recipe.
        out: The folder.
        device: The device to train on.
        progress: Called with the stage, the steps done, the total and the loss.
        force: Write into a folder that is not empty.
    """
    clock = Clock(device)
    if recipe.method == "joint" and recipe.flow:
        raise UsageError("joint training starts from new weights; leave out flow, or use method=retrofit")
    about = {**identity_of(recipe, data_of(recipe)), **runtime(device)}  # raises here if the data cannot be read
    first = Processes().first
    with resumed_by_first(out, {"command": "train", **about}, force=force) as folder:
        if folder.finished:
            return load(out, device=device)
        field = recipe.attach(recipe.network()).to(device)
        if recipe.method == "joint":
            steps = fit_joint(recipe, field, progress, folder.work / "joint.resume")
        else:
            given = take_flow(recipe, field.network)
            steps = 0 if given else fit_network(recipe, field.network, progress, folder.work / "flow.resume")
            fit_retrofit(recipe, field, progress, folder.work / "noise.resume")
        if first:
            finish(recipe, field, out, clock, {"steps": steps, "of": recipe.plan.iterations})
    return field if first else load(out, device=device)


def finish(recipe: Recipe, field: Field, out: Path, clock: Clock, trained: dict[str, int] | None = None) -> None:
    """Fit the reference and write the checkpoint with its training record.

    Arguments:
        trained: The number of steps taken, which a time limit may have reduced, and of planned steps.
    """
    field.reference, metrics = recipe.reference(field)
    literals = {k: v for k, v in asdict(recipe).items() if k != "data"}  # a path on this machine
    save(
        field,
        out,
        quantise=recipe.eightbit,
        recipe={"name": recipe.name, **literals},
        data={"name": recipe.name, "fingerprint": data_of(recipe)},
        metrics=metrics,
        **({"trained": trained} if trained else {}),
        provenance=provenance(field.device, clock.seconds, seeds=[recipe.seed]),
    )


def identity_of(recipe: Any, data: str, aside: Sequence[str] = ()) -> dict[str, Any]:
    """Return all that the result of a recipe depends on: its fields, and hashes of the data and of a given flow.

    Arguments:
        recipe: The recipe, or another dataclass of literals.
        data: The fingerprint of the data; empty to leave it out.
        aside: Additional fields to leave out.
    """
    fields = {k: v for k, v in asdict(recipe).items() if k not in (*NEVER, *aside)}
    if fields.get("flow"):
        fields["flow"] = identity(fields["flow"])
    return {"name": getattr(recipe, "name", ""), **fields, **({"data": data} if data else {})}


# ---- stages ------------------------------------------------------------------------------------------------------


def train_stage(
    recipe: Recipe, module: nn.Module, loss: Loss, stage: str, progress: Progress | None, resume: Path | None
) -> int:
    """Train a module by the recipe's plan; return the number of steps, which a time limit may reduce."""
    data, cond = recipe.rows()
    about = identity_of(recipe, "", LATER) if resume else None  # `train` adds the data
    ended = resume.with_suffix(ENDED) if resume else None
    plan = replace(recipe.plan, minutes=INSTANT) if ended and ended.exists() else recipe.plan
    show = stage_progress(progress, stage, plan.iterations)
    done = train(module, loss, data, plan, cond=cond, resume=resume, identity=about, progress=show)[-1][0]
    if done < recipe.enough * plan.iterations:
        raise StoppedError(
            f"training ({stage}) stopped at step {done:,} of {plan.iterations:,}; run the same command again to resume"
        )
    if ended and done < plan.iterations and Processes().first:
        write_text(ended, f"{done}\n")
    _round(recipe, module)
    return done


def fit_network(
    recipe: Recipe, network: nn.Module, progress: Progress | None = None, resume: Path | None = None
) -> int:
    """Train a plain flow."""
    space = recipe.space()

    def loss(x1: Tensor, randomness: Stream, beta: Tensor, cond: dict[str, Tensor]) -> Tensor:
        return flow_matching_loss(network, space, x1, seed=randomness, cond=cond)

    return train_stage(recipe, network, loss, "flow", progress, resume)


def fit_joint(recipe: Recipe, field: Field, progress: Progress | None = None, resume: Path | None = None) -> int:
    """Train flow and noise together (eq:elbo-param)."""

    def loss(x1: Tensor, randomness: Stream, beta: Tensor, cond: dict[str, Tensor]) -> Tensor:
        return elbo_loss(field, x1, beta, seed=randomness, cond=cond)

    with field.noise.keep_hooks():  # a single graph if the loss is compiled
        return train_stage(recipe, field, loss, "joint", progress, resume)


def fit_retrofit(recipe: Recipe, field: Field, progress: Progress | None = None, resume: Path | None = None) -> None:
    """Fit the noise to a trained flow."""
    data, cond = recipe.rows()
    fit_noise(
        field,
        data,
        recipe.noise_steps,
        beta=recipe.plan.beta,
        batch=recipe.noise_batch,
        lr=recipe.noise_lr,
        seed=derive(recipe.seed, "retrofit"),
        confidence=False,  # `finish` fits it
        precision=recipe.plan.precision,
        stratified=recipe.plan.stratified,
        compiled=recipe.noise_compiled,
        captured=True,  # networks of this package
        resume=resume,
        identity=identity_of(recipe, "", LATER) if resume else None,
        progress=stage_progress(progress, "noise", recipe.noise_steps),
        cond=cond,
    )
    _round(recipe, field)


def take_flow(recipe: Recipe, network: nn.Module) -> bool:
    """Load the flow of the checkpoint named by the recipe into a network; return whether it names one."""
    if recipe.flow:
        try:
            network.load_state_dict(load(recipe.flow).network.state_dict())
        except RuntimeError as error:
            reason = str(error).splitlines()[1].strip()
            raise CheckpointError(f"the flow of {recipe.flow} is of another architecture: {reason}") from error
    return bool(recipe.flow)


def stage_progress(progress: Progress | None, stage: str, total: int) -> Callable[[int, float], None] | None:
    return None if progress is None else lambda done, loss: progress(stage, done, total, loss)


def _round(recipe: Recipe, module: nn.Module) -> None:
    """Round weights if they are shipped quantised, so that everything after training uses the shipped values."""
    if recipe.eightbit:
        round_weights(module)
