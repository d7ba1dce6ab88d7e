"""What rules share: means and variances of an operation's operands, and results put together again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fmwc.moments.closures import Closure
from fmwc.moments.gaussian import Gaussian, gaussians, moments_of, walk

__all__ = ["closure_of", "getter", "on", "paired", "variance_at", "write"]


def closure_of(args: Any, kwargs: Any) -> Closure:
    return gaussians([*args, *kwargs.values()])[0]._closure


def on(f: Callable[[Tensor], Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments with `f` done to every tensor."""
    return [walk(a, f) for a in args], {k: walk(v, f) for k, v in kwargs.items()}


def paired(mean: Any, var: Any, closure: Closure) -> Any:
    """Joins what an operation returned for the means with what it returned for the variances."""
    if isinstance(mean, Tensor):
        return Gaussian(mean, var, closure)
    if not isinstance(mean, (list, tuple)):  # x.type() asks, and gets a word
        return mean
    return type(mean)(paired(m, v, closure) for m, v in zip(mean, var, strict=True))


def variance_at(value: Tensor) -> Tensor:
    """The variance of a value; an integer or a mask says where and not how much, and stays what it is."""
    return moments_of(value).var if value.is_floating_point() or value.is_complex() else value


def getter(name: str) -> Any:
    """The function torch dispatches on when a property is read."""
    return getattr(torch.Tensor, name).__get__


def write(target: Gaussian, value: Gaussian) -> Gaussian:
    """Writes a value into a Gaussian where its mean and variance lie, so that its views see it."""
    target._mean.copy_(value._mean)
    target._var.copy_(value._var)
    return target
