"""Train a recipe into a folder. Interrupted runs resume."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
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
from fmwc.recipes.recipe import Recipe, data_of, literals_of
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

# Fields that affect the weights only by rounding: the data path, time limits and speed.
NEVER = ("data", "save_every", "minutes", "enough", "compiled", "noise_compiled")
LATER = ("steps", "anneal", "references")  # fields that apply after training
ENDED = ".ended"  # suffix of a file next to a resume point: the time limit ended this stage after enough steps
INSTANT = 1e-9  # minutes

Progress = Callable[[str, int, int, float], None]  # (stage, steps done, total steps, loss)


def fit(
    recipe: Recipe, out: Path, device: torch.device, progress: Progress | None = None, *, force: bool = False
) -> Field:
    """Train a field by a recipe and write its checkpoint to a folder. Resumes if interrupted.

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


def finish(recipe: Recipe, field: Field, out: Path, clock: Clock, trained: dict[str, int] | None = None) -> None:
    """Fit the reference and write the checkpoint with its training record.

    Arguments:
        trained: The number of steps taken, which a time limit may have reduced, and of planned steps.
    """
    field.reference, metrics = recipe.reference(field)
    literals = {k: v for k, v in literals_of(recipe).items() if k != "data"}  # a path on this machine
    save(
        field,
        out,
        quantise=recipe.quantised,
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
    fields = {k: v for k, v in literals_of(recipe).items() if k not in (*NEVER, *aside)}
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
    if recipe.quantised:
        round_weights(module)
