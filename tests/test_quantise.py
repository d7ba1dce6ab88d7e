"""Quantised weights: rounding twice is rounding once, and the error is at most half a level."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fmwc.quantise import LEVELS, decode, encode, round_weights
from tests.cells import small
from tests.conftest import TinyConv

SHAPES = [(7, 5), (1, 1), (3, 4, 3, 3), (16, 300), (4, 2, 6)]


def weight(shape, seed=0, size=1.0):
    return size * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_quantising_twice_is_quantising_once_for_any_largest_entry():
    """127 · (m / 127) may round to another number than m, but the scale must survive. Every 64th of a binade."""
    largest = torch.arange(2**23, 2**24, 64, dtype=torch.float64).float()[:, None] * 2.0**-25
    once = decode(*encode(largest))
    assert torch.equal(decode(*encode(once)), once)
    near = torch.arange(2**23, 2**23 + 2**16, dtype=torch.float64).float()[:, None] * 2.0**-25
    once = decode(*encode(near))
    assert torch.equal(decode(*encode(once)), once)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@given(st.integers(0, 200), st.floats(-20, 20))
def test_the_error_is_at_most_half_a_level(shape, seed, exponent):
    before = weight(shape, seed, 2.0**exponent)
    levels, scale = encode(before)
    assert levels.dtype == torch.int8
    assert levels.shape == before.shape
    assert scale.shape == shape[:1]
    assert int(levels.abs().max()) == LEVELS == 127  # -128 is not used
    assert bool((levels.flatten(1).abs().amax(1) == 127).all())  # every row has a separate scale
    torch.testing.assert_close(scale, before.flatten(1).abs().amax(1) / 127)
    off = (decode(levels, scale) - before).flatten(1).abs()
    assert bool((off <= scale[:, None] * (0.5 + 1e-4)).all())
    assert torch.equal(decode(levels, scale) < 0, levels < 0)


@pytest.mark.parametrize(
    "build", [lambda: nn.Linear(6, 4), TinyConv, lambda: nn.LayerNorm(5), lambda: small(dtype=torch.float32)]
)
def test_matrices_of_a_module_are_rounded_and_vectors_are_not(build):
    module = build()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter))
    before = {k: v.clone() for k, v in module.state_dict().items()}
    round_weights(module)
    names = dict(module.named_parameters())
    for name, value in module.state_dict().items():
        if name in names and value.ndim > 1:
            assert torch.equal(value, decode(*encode(before[name])))
            assert value.numel() < 2 or value.shape[1:].numel() == 1 or not torch.equal(value, before[name])
        else:
            assert torch.equal(value, before[name])
    once = {k: v.clone() for k, v in module.state_dict().items()}
    round_weights(module)
    assert all(torch.equal(v, once[k]) for k, v in module.state_dict().items())
    assert all(p.requires_grad and p.grad_fn is None for p in module.parameters())
