"""Fitting by a recipe: the same five methods in every setting, into a folder that an interrupted run resumes in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fmwc.baselines import Dropout, HeteroscedasticHead, nll
from fmwc.checkpoint import identity, load, save
from fmwc.eightbit import round_weights
from fmwc.errors import CheckpointError, StoppedError, UsageError
from fmwc.field import Field, Reference
from fmwc.files import claimed, write_text
from fmwc.flow import Space, elbo, flow_matching
from fmwc.identity import digest_tensors
from fmwc.randomness import Stream, derive
from fmwc.recipes.recipe import Clock, data_of, provenance, runtime
from fmwc.training import Plan, fit_noise, train

__all__ = [
    "ENDED",
    "LATER",
    "Recipe",
    "finish",
    "fit",
    "fit_dropout",
    "fit_head",
    "fit_joint",
    "fit_network",
    "fit_retrofit",
    "fit_variance",
    "identity_of",
    "take_flow",
]

# A path, how a training is cut into pieces, and what makes the same weights (to rounding), only faster.
NEVER = ("data", "save_every", "minutes", "enough", "compiled", "noise_compiled")
ENDED = ".ended"  # beside a resume point: the clock ended this stage, with enough steps
INSTANT = 1e-9  # minutes
# What the weights of a network do not depend on: it is chosen after training.
LATER = ("steps", "anneal", "references")

Progress = Callable[[str, int, int, float], None]  # (stage, steps done, steps in all, loss)


class Recipe(Protocol):
    """What fitting asks of a recipe. Its fields are literals, each with its reason."""

    @property
    def name(self) -> str: ...
    @property
    def method(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def noise_steps(self) -> int: ...
    @property
    def noise_lr(self) -> float: ...

    def space(self) -> Space:
        """Where samples live."""

    def rows(self) -> tuple[Tensor, dict[str, Any]]:
        """The training data, and what goes with each sample."""

    def network(self, heads: int = 1) -> nn.Module:
        """A fresh network; its first weights depend on the seed only. `heads` multiplies what it gives out."""

    def attach(self, network: nn.Module) -> Field:
        """The network with its noise."""

    def reference(self, field: Field) -> tuple[Reference, dict[str, float]]:
        """Scores of reference samples, and how good those samples are."""


def _report(progress: Progress | None, stage: str, total: int) -> Callable[[int, float], None] | None:
    return None if progress is None else lambda done, loss: progress(stage, done, total, loss)


def _train(
    recipe: Recipe, module: nn.Module, loss: Callable[..., Tensor], stage: str, progress: Any, resume: Path | None
) -> int:
    """Trains by the recipe's plan; returns how many steps were taken, which a clock may make fewer than planned."""
    data, cond = recipe.rows()
    show = _report(progress, stage, recipe.plan.iterations)
    about = identity_of(recipe, "", LATER) if resume else None  # the data is in the identity already
    ended = resume.with_suffix(ENDED) if resume else None  # whether a clock has ended this stage already
    plan = replace(recipe.plan, minutes=INSTANT) if ended and ended.exists() else recipe.plan
    history = train(module, loss, data, plan, cond=cond, resume=resume, identity=about, progress=show)
    done = history[-1][0]
    if done < getattr(recipe, "enough", 1.0) * plan.iterations:
        raise StoppedError(f"the {stage} was stopped at step {done:,} of {plan.iterations:,}; run again to resume it")
    if ended and done < plan.iterations:
        write_text(ended, f"{done}\n")
    _settle(recipe, module)
    return done


def _settle(recipe: Recipe, module: nn.Module) -> None:
    """Where weights are shipped in eight bits, everything after training is done with what they can hold."""
    if getattr(recipe, "eightbit", False):
        round_weights(module)


def fit_network(
    recipe: Recipe, network: nn.Module, progress: Progress | None = None, resume: Path | None = None
) -> int:
    """Trains a plain flow."""
    space = recipe.space()

    def loss(x1: Tensor, randomness: Stream, beta: Tensor, **cond: Any) -> Tensor:
        return flow_matching(network, space, x1, seed=randomness, **cond)

    return _train(recipe, network, loss, "flow", progress, resume)


def fit_dropout(recipe: Recipe, dropout: Dropout, progress: Progress | None = None, resume: Path | None = None) -> int:
    """Trains a flow with dropout on."""
    space = recipe.space()

    def loss(x1: Tensor, randomness: Stream, beta: Tensor, **cond: Any) -> Tensor:
        def dropped(x: Tensor, t: Tensor, **cond: Any) -> Tensor:
            return dropout.draw(x, t, seed=randomness, **cond)

        return flow_matching(dropped, space, x1, seed=randomness, **cond)

    return _train(recipe, dropout, loss, "dropout", progress, resume)


def fit_head(
    recipe: Recipe, head: HeteroscedasticHead, progress: Progress | None = None, resume: Path | None = None
) -> int:
    """Trains UA-Flow's two heads."""
    space = recipe.space()

    def loss(x1: Tensor, randomness: Stream, beta: Tensor, **cond: Any) -> Tensor:
        return nll(head, space, x1, randomness, **cond)

    return _train(recipe, head, loss, "head", progress, resume)


def fit_variance(
    recipe: Recipe, head: HeteroscedasticHead, progress: Progress | None = None, resume: Path | None = None
) -> None:
    """Trains the variance alone of two heads grafted on a flow; as long as a retrofit."""
    space = recipe.space()
    data, cond = recipe.rows()

    def loss(x1: Tensor, randomness: Stream, beta: Tensor, **cond: Any) -> Tensor:
        return nll(head, space, x1, randomness, velocity=False, **cond)

    plan = replace(recipe.plan, iterations=recipe.noise_steps, lr=recipe.noise_lr, decay="cosine", compiled=False)
    show = _report(progress, "variance", plan.iterations)
    about = {**identity_of(recipe, "", LATER), "network": digest_tensors(head.state_dict())} if resume else None
    train(head, loss, data, plan, cond=cond, resume=resume, identity=about, progress=show)


def fit_joint(recipe: Recipe, field: Field, progress: Progress | None = None, resume: Path | None = None) -> int:
    """Trains flow and noise together (eq:elbo-param)."""

    def loss(x1: Tensor, randomness: Stream, beta: Tensor, **cond: Any) -> Tensor:
        return elbo(field, x1, beta, seed=randomness, **cond)

    with field.noise.hooked():  # one graph, where the loss is compiled
        return _train(recipe, field, loss, "joint", progress, resume)


def fit_retrofit(recipe: Recipe, field: Field, progress: Progress | None = None, resume: Path | None = None) -> None:
    """Fits the noise to a flow that is trained already."""
    data, cond = recipe.rows()
    fit_noise(
        field,
        data,
        recipe.noise_steps,
        beta=recipe.plan.beta,
        batch=getattr(recipe, "noise_batch", recipe.plan.batch),
        lr=recipe.noise_lr,
        seed=derive(recipe.seed, "retrofit"),
        confidence=False,  # by the recipe, on samples of its own seed
        precision=recipe.plan.precision,
        stratified=recipe.plan.stratified,
        compiled=getattr(recipe, "noise_compiled", False),
        resume=resume,
        identity=identity_of(recipe, "", LATER) if resume else None,
        progress=_report(progress, "noise", recipe.noise_steps),
        **cond,
    )
    _settle(recipe, field)


def take_flow(recipe: Recipe, network: nn.Module) -> bool:
    """Fills a network with the flow of the checkpoint that the recipe names, if it names one."""
    given: str = getattr(recipe, "flow", "")
    if given:
        try:
            network.load_state_dict(load(given).network.state_dict())
        except RuntimeError as error:
            reason = str(error).splitlines()[1].strip()
            raise CheckpointError(f"the flow of {given} is of another architecture: {reason}") from error
    return bool(given)


def identity_of(recipe: Any, data: str, aside: Sequence[str] = ()) -> dict[str, Any]:
    """Everything that changes what a recipe makes: its fields, the data and the flow it starts from by their content.

    Arguments:
        data: The fingerprint of the data; empty where that is known otherwise.
        aside: Fields that do not count beside those that never do.
    """
    fields = {k: v for k, v in asdict(recipe).items() if k not in (*NEVER, *aside)}
    if fields.get("flow"):
        fields["flow"] = identity(fields["flow"])
    return {"name": getattr(recipe, "name", ""), **fields, **({"data": data} if data else {})}


def fit(
    recipe: Any, out: Path, device: torch.device, progress: Progress | None = None, *, force: bool = False
) -> Field:
    """Train a field by the recipe into a folder. Resumes if interrupted.

    Arguments:
        recipe: What to train, and how.
        out: The folder.
        device: Where to train.
        progress: Told of the steps as they are taken.
        force: Write into a folder that is not empty.
    """
    clock = Clock(device)
    if recipe.method == "joint" and getattr(recipe, "flow", ""):
        raise UsageError("joint training starts from nothing; leave out flow, or say method=retrofit")
    about = {**identity_of(recipe, data_of(recipe)), **runtime(device)}  # data that cannot be read is refused here
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
    """Reads the reference scores, and writes the checkpoint with how it was made.

    Arguments:
        trained: The steps that were taken, and of how many; a clock may have stopped them.
    """
    field.reference, metrics = recipe.reference(field)
    save(
        field,
        out,
        eightbit=getattr(recipe, "eightbit", False),
        recipe={
            "name": recipe.name,
            **{k: v for k, v in asdict(recipe).items() if k != "data"},
        },  # a path of this machine
        data={"name": recipe.name, "fingerprint": data_of(recipe)},
        metrics=metrics,
        **({"trained": trained} if trained else {}),
        provenance=provenance(field.device, clock.seconds, seeds=[recipe.seed]),
    )
