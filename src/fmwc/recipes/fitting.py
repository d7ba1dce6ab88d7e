"""Training a field by a recipe, into a folder in which an interrupted run resumes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fmwc.checkpoint import identity, load, save
from fmwc.errors import CheckpointError, StoppedError, UsageError
from fmwc.field import Field
from fmwc.files import claimed, write_text
from fmwc.flow import elbo_loss, flow_matching_loss
from fmwc.provenance import Clock, provenance, runtime
from fmwc.quantise import round_weights
from fmwc.randomness import Stream, derive
from fmwc.recipes.recipe import Recipe, data_of
from fmwc.training import Loss, fit_noise, train

__all__ = [
    "ENDED",
    "LATER",
    "Progress",
    "finish",
    "fit",
    "fit_joint",
    "fit_network",
    "fit_retrofit",
    "identity_of",
    "stage_progress",
    "take_flow",
    "train_stage",
]

# Fields that never change the weights (but for rounding): a path, how training is cut into pieces, and speed.
NEVER = ("data", "save_every", "minutes", "enough", "compiled", "noise_compiled")
LATER = ("steps", "anneal", "references")  # fields that apply after training: the weights do not depend on them
ENDED = ".ended"  # suffix of a file beside a resume point: the time limit ended this stage, with enough steps
INSTANT = 1e-9  # minutes

Progress = Callable[[str, int, int, float], None]  # (stage, steps done, steps in all, loss)


def fit(
    recipe: Any, out: Path, device: torch.device, progress: Progress | None = None, *, force: bool = False
) -> Field:
    """Train a field by a recipe and write its checkpoint to a folder. Resumes if interrupted.

    Arguments:
        recipe: What to train, and how.
        out: The folder.
        device: Where to train.
        progress: Called with each stage's steps and loss.
        force: Write into a folder that is not empty.
    """
    clock = Clock(device)
    if recipe.method == "joint" and getattr(recipe, "flow", ""):
        raise UsageError("joint training starts from new weights; leave out flow, or use method=retrofit")
    about = {**identity_of(recipe, data_of(recipe)), **runtime(device)}  # raises here if the data cannot be read
    with claimed(out, "train", about, force=force, resumes=True) as folder:
        if folder.finished:
            return load(out, device=device)
        field = recipe.attach(recipe.network()).to(device)
        if recipe.method == "joint":
            steps = fit_joint(recipe, field, progress, folder.work / "joint.resume")
        else:
            given = take_flow(recipe, field.network)
            steps = 0 if given else fit_network(recipe, field.network, progress, folder.work / "flow.resume")
            fit_retrofit(recipe, field, progress, folder.work / "noise.resume")
        finish(recipe, field, out, clock, {"steps": steps, "of": recipe.plan.iterations})
        return field


def finish(recipe: Any, field: Field, out: Path, clock: Clock, trained: dict[str, int] | None = None) -> None:
    """Fit the reference, and write the checkpoint with the record of how it was made.

    Arguments:
        trained: Steps taken, and planned; a time limit may have stopped them.
    """
    field.reference, metrics = recipe.reference(field)
    literals = {k: v for k, v in asdict(recipe).items() if k != "data"}  # a path of this machine
    save(
        field,
        out,
        quantise=getattr(recipe, "eightbit", False),
        recipe={"name": recipe.name, **literals},
        data={"name": recipe.name, "fingerprint": data_of(recipe)},
        metrics=metrics,
        **({"trained": trained} if trained else {}),
        provenance=provenance(field.device, clock.seconds, seeds=[recipe.seed]),
    )


def identity_of(recipe: Any, data: str, aside: Sequence[str] = ()) -> dict[str, Any]:
    """Return everything that changes what a recipe makes: its fields, and data and given flow by their content.

    Arguments:
        data: The fingerprint of the data; empty if it is known otherwise.
        aside: Fields to leave out beside those that never count.
    """
    fields = {k: v for k, v in asdict(recipe).items() if k not in (*NEVER, *aside)}
    if fields.get("flow"):
        fields["flow"] = identity(fields["flow"])
    return {"name": getattr(recipe, "name", ""), **fields, **({"data": data} if data else {})}


# ---- stages ------------------------------------------------------------------------------------------------------


def train_stage(
    recipe: Recipe, module: nn.Module, loss: Loss, stage: str, progress: Progress | None, resume: Path | None
) -> int:
    """Train a module by the recipe's plan; return the steps taken, which a time limit may make fewer than planned."""
    data, cond = recipe.rows()
    about = identity_of(recipe, "", LATER) if resume else None  # `train` adds the data
    ended = resume.with_suffix(ENDED) if resume else None
    plan = replace(recipe.plan, minutes=INSTANT) if ended and ended.exists() else recipe.plan
    show = stage_progress(progress, stage, plan.iterations)
    done = train(module, loss, data, plan, cond=cond, resume=resume, identity=about, progress=show)[-1][0]
    if done < getattr(recipe, "enough", 1.0) * plan.iterations:
        raise StoppedError(f"the {stage} was stopped at step {done:,} of {plan.iterations:,}; run again to resume it")
    if ended and done < plan.iterations:
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

    with field.noise.keep_hooks():  # one graph, if the loss is compiled
        return train_stage(recipe, field, loss, "joint", progress, resume)


def fit_retrofit(recipe: Recipe, field: Field, progress: Progress | None = None, resume: Path | None = None) -> None:
    """Fit the noise to a trained flow."""
    data, cond = recipe.rows()
    fit_noise(
        field,
        data,
        recipe.noise_steps,
        beta=recipe.plan.beta,
        batch=getattr(recipe, "noise_batch", recipe.plan.batch),
        lr=recipe.noise_lr,
        seed=derive(recipe.seed, "retrofit"),
        confidence=False,  # `finish` fits it, on samples of the recipe's own seed
        precision=recipe.plan.precision,
        stratified=recipe.plan.stratified,
        compiled=getattr(recipe, "noise_compiled", False),
        resume=resume,
        identity=identity_of(recipe, "", LATER) if resume else None,
        progress=stage_progress(progress, "noise", recipe.noise_steps),
        cond=cond,
    )
    _round(recipe, field)


def take_flow(recipe: Recipe, network: nn.Module) -> bool:
    """Copy the flow of the checkpoint that the recipe names into a network; return whether it names one."""
    given: str = getattr(recipe, "flow", "")
    if given:
        try:
            network.load_state_dict(load(given).network.state_dict())
        except RuntimeError as error:
            reason = str(error).splitlines()[1].strip()
            raise CheckpointError(f"the flow of {given} is of another architecture: {reason}") from error
    return bool(given)


def stage_progress(progress: Progress | None, stage: str, total: int) -> Callable[[int, float], None] | None:
    return None if progress is None else lambda done, loss: progress(stage, done, total, loss)


def _round(recipe: Recipe, module: nn.Module) -> None:
    """Round weights that are shipped in eight bits, so that everything after training uses the shipped values."""
    if getattr(recipe, "eightbit", False):
        round_weights(module)
