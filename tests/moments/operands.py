"""Operands and arguments of pointwise operations for the tests of rules."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor as T

from fmwc.moments import GaussHermite, Gaussian, moments_of


def gaussian(*shape: int, seed: int = 0, low: float = -2.0, high: float = 2.0, closure: Any = None) -> Gaussian:
    generator = torch.Generator().manual_seed(seed)
    mean = low + (high - low) * torch.rand(shape, dtype=torch.float64, generator=generator)
    var = 0.02 + 0.2 * torch.rand(shape, dtype=torch.float64, generator=generator)
    return Gaussian(mean, var, closure or GaussHermite())


@lru_cache  # drawn before vmap, which forbids it
def plain(*shape: int, seed: int = 7) -> T:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def name_of(key: Callable[..., Any]) -> str:
    return torch.overrides.resolve_name(key) or str(key)


def assert_same(found: Any, mean: Any, var: Any) -> None:
    if isinstance(mean, T):
        assert isinstance(found, Gaussian)
        assert torch.equal(moments_of(found).mean, mean)
        assert torch.equal(moments_of(found).var, var)
        assert found.shape == mean.shape
        assert found.dtype == mean.dtype
        return
    assert len(found) == len(mean)
    for parts in zip(found, mean, var, strict=True):
        assert_same(*parts)


SMOOTH, KINKED, JUMP = 2e-4, 3e-2, 0.3  # accuracy of 60 Gauss–Hermite nodes: a smooth function, a kink, a jump
SLOPE = torch.tensor([0.2], dtype=torch.float64)
POINTWISE: dict[Callable[..., Any], tuple[float, tuple[Any, ...]]] = {
    F.silu: (SMOOTH, ()), F.relu: (KINKED, ()), torch.relu: (KINKED, ()), T.relu: (KINKED, ()), F.gelu: (SMOOTH, ()),
    F.elu: (KINKED, (0.7,)), F.selu: (KINKED, ()), F.celu: (KINKED, (0.7,)), F.mish: (SMOOTH, ()),
    F.leaky_relu: (KINKED, (0.2,)), F.hardswish: (KINKED, ()), F.hardtanh: (KINKED, (-1.5, 1.0)), F.relu6: (KINKED, ()),
    F.softplus: (SMOOTH, (2.0,)), F.softsign: (KINKED, ()), F.logsigmoid: (SMOOTH, ()), F.sigmoid: (SMOOTH, ()),
    torch.sigmoid: (SMOOTH, ()), T.sigmoid: (SMOOTH, ()), F.tanh: (SMOOTH, ()), torch.tanh: (SMOOTH, ()),
    T.tanh: (SMOOTH, ()), torch.sin: (SMOOTH, ()), T.sin: (SMOOTH, ()), torch.cos: (SMOOTH, ()), T.cos: (SMOOTH, ()),
    torch.exp: (SMOOTH, ()), T.exp: (SMOOTH, ()), torch.square: (SMOOTH, ()), T.square: (SMOOTH, ()),
    torch.abs: (KINKED, ()),
    T.abs: (KINKED, ()), torch.atan: (SMOOTH, ()), T.atan: (SMOOTH, ()), torch.erf: (SMOOTH, ()), T.erf: (SMOOTH, ()),
    torch.clamp: (KINKED, (-1.0, 1.5)), T.clamp: (KINKED, (-1.0, 1.5)), torch.clip: (KINKED, (-1.0, 1.5)),
    T.clip: (KINKED, (-1.0, 1.5)), torch.clamp_min: (KINKED, (-1.0,)), T.clamp_min: (KINKED, (-1.0,)),
    torch.clamp_max: (KINKED, (1.5,)), T.clamp_max: (KINKED, (1.5,)), torch.selu: (KINKED, ()),
    torch.celu: (KINKED, (0.7,)), F.prelu: (KINKED, (SLOPE,)), torch.prelu: (KINKED, (SLOPE,)),
    T.prelu: (KINKED, (SLOPE,)),
    F.hardsigmoid: (KINKED, ()), F.threshold: (JUMP, (0.5, 0.2)), torch.threshold: (JUMP, (0.5, 0.2)),
    F.softshrink: (KINKED, (0.4,)), F.hardshrink: (JUMP, (0.2,)), F.tanhshrink: (SMOOTH, ()),
    torch.special.expit: (SMOOTH, ()), torch.sinc: (SMOOTH, ()), T.sinc: (SMOOTH, ()), torch.sinh: (SMOOTH, ()),
    T.sinh: (SMOOTH, ()), torch.cosh: (SMOOTH, ()), T.cosh: (SMOOTH, ()), torch.exp2: (SMOOTH, ()),
    T.exp2: (SMOOTH, ()),
    torch.expm1: (SMOOTH, ()), T.expm1: (SMOOTH, ()), T.__abs__: (KINKED, ()), torch.absolute: (KINKED, ()),
    T.absolute: (KINKED, ()), torch.asinh: (SMOOTH, ()), T.asinh: (SMOOTH, ()), torch.erfc: (SMOOTH, ()),
    T.erfc: (SMOOTH, ()), torch.nan_to_num: (SMOOTH, ()), T.nan_to_num: (SMOOTH, ()),
}  # fmt: skip
POWERS = (torch.pow, T.pow, T.__pow__)
