"""Train the baselines from a recipe, as :mod:`fmwc.recipes` trains flows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from experiments.common.comparisons import HeteroscedasticHead, nll
from fmwc.baselines import Dropout
from fmwc.flow import flow_matching_loss
from fmwc.identity import digest_tensors
from fmwc.randomness import Stream
from fmwc.recipes import LATER, Progress, Recipe, identity_of, stage_progress, train_stage
from fmwc.training import train


def fit_dropout(recipe: Recipe, dropout: Dropout, progress: Progress | None = None, resume: Path | None = None) -> int:
    """Train a flow with dropout."""
    space = recipe.space()

    def loss(x1: Tensor, randomness: Stream, beta: Tensor, cond: dict[str, Tensor]) -> Tensor:
        def dropped(x: Tensor, t: Tensor, **cond: Any) -> Tensor:
            return dropout.draw(x, t, seed=randomness, cond=cond)

        return flow_matching_loss(dropped, space, x1, seed=randomness, cond=cond)

    return train_stage(recipe, dropout, loss, "dropout", progress, resume)


def fit_heads(
    recipe: Recipe, head: HeteroscedasticHead, progress: Progress | None = None, resume: Path | None = None
) -> int:
    """Train both heads of UA-Flow together."""
    space = recipe.space()

    def loss(x1: Tensor, randomness: Stream, beta: Tensor, cond: dict[str, Tensor]) -> Tensor:
        return nll(head, space, x1, randomness, cond=cond)

    return train_stage(recipe, head, loss, "head", progress, resume)


def fit_variance(
    recipe: Recipe, head: HeteroscedasticHead, progress: Progress | None = None, resume: Path | None = None
) -> None:
    """Train only the variance head on a frozen flow, for as many steps as a retrofit."""
    space = recipe.space()
    data, cond = recipe.rows()

    def loss(x1: Tensor, randomness: Stream, beta: Tensor, cond: dict[str, Tensor]) -> Tensor:
        return nll(head, space, x1, randomness, velocity=False, cond=cond)

    plan = replace(recipe.plan, iterations=recipe.noise_steps, lr=recipe.noise_lr, decay="cosine", compiled=False)
    about = {**identity_of(recipe, "", LATER), "network": digest_tensors(head.state_dict())} if resume else None
    show = stage_progress(progress, "variance", plan.iterations)
    train(head, loss, data, plan, cond=cond, resume=resume, identity=about, progress=show)
