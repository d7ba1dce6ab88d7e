"""The Gaussian tensor: errors, and properties of all operations."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from fmwc.errors import NoRuleError
from fmwc.moments import CLOSURES, EXACT, RULES, Gaussian, moments_of, register


def gaussian(*shape: int, seed: int = 0, closure: str = "gauss_hermite") -> Gaussian:
    generator = torch.Generator().manual_seed(seed)
    return Gaussian(torch.randn(shape, generator=generator), torch.rand(shape, generator=generator), CLOSURES[closure])


# ---- refusals -------------------------------------------------------------------------------------------------------

NO_RULE = {
    "sort": lambda x: torch.sort(x),
    "with itself": lambda x: torch.einsum("ij,ij->i", x, x),
    "a matrix by itself": lambda x: x[:, :2] @ (y := x[:, 1:]) + torch.mm(y, y),
    "max": lambda x: x.max(),
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.sum()),
    "compare": lambda x: x > 0,
    "numpy": lambda x: x.numpy(),
    "divide, rounded": lambda x: torch.div(x, 2.0, rounding_mode="floor"),
    "power of it by it": lambda x: x**x,
    "clamp by it": lambda x: torch.clamp(x, min=x),
    "bias": lambda x: F.linear(torch.ones(1, 3), torch.ones(3, 3), x.sum(0)),
    "mixed by it": lambda x: torch.lerp(torch.ones(3), torch.zeros(3), x),
    "the largest by an index": lambda x: torch.zeros_like(x).scatter_reduce(0, torch.zeros(2, 3).long(), x, "amax"),
    "softmax of a guessed dimension": lambda x: F.softmax(x),
    "which is largest": lambda x: F.max_pool1d(x, 2, return_indices=True),
    "spread, unbiased or not": lambda x: torch.var(x, False),
    "resized against aliases": lambda x: F.interpolate(x[None, None], (1, 2), mode="bilinear", antialias=True),
    "aten": lambda x: torch.ops.aten.relu(x),
}


@pytest.mark.parametrize("name", NO_RULE)
def test_operations_without_a_rule_are_refused(name):
    with pytest.raises(NoRuleError, match="linearised") as raised:
        NO_RULE[name](gaussian(2, 3))
    assert "\n" not in str(raised.value)


def assign_into(x):
    plain = torch.zeros(2, 3)
    plain[0] = x[0]


def add_into(x):
    plain = torch.zeros(2, 3)
    plain += x


IN_PLACE = {
    "y[0] = x": assign_into,
    "y += x": add_into,
    "y.copy_(x)": lambda x: torch.zeros(2, 3).copy_(x),
    "y.index_add_": lambda x: torch.zeros(2, 3).index_add_(0, torch.tensor([0, 1]), x),
    "another shape": lambda x: x.unsqueeze_(0),
    "no rule": lambda x: x.bernoulli_(),
    "out=": lambda x: torch.add(x, 1, out=torch.zeros(2, 3)),
    "exp(out=)": lambda x: torch.exp(x, out=torch.zeros(2, 3)),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_writes_into_plain_tensors_are_refused(name):
    x = gaussian(2, 3)
    before = x._mean.clone(), x._var.clone()
    with pytest.raises(NoRuleError, match="linearised") as raised:
        IN_PLACE[name](x)
    assert "\n" not in str(raised.value)
    assert torch.equal(x._mean, before[0])
    assert torch.equal(x._var, before[1])


def test_users_can_register_rules():
    assert torch.cummax not in RULES
    try:

        @register(torch.cummax, exactness=EXACT, family="own")
        def sure(func, args, kwargs):
            x, *rest = args
            return Gaussian(func(x._mean, *rest, **kwargs)[0], torch.zeros_like(x._var), x._closure)

        assert RULES[torch.cummax].family == "own"
        assert not moments_of(torch.cummax(gaussian(2, 3), -1)).var.any()
    finally:
        del RULES[torch.cummax]


# ---- laws -----------------------------------------------------------------------------------------------------------

STEPS = {
    "silu": F.silu,
    "relu": torch.relu,
    "square": lambda x: (x / 3).square(),
    "shift": lambda x: 1 - x,
    "twice": lambda x: x + x,
    "gate": lambda x: torch.sigmoid(x) * torch.tanh(x),
    "mix": lambda x: F.linear(x, torch.linspace(-1, 1, x.shape[-1] ** 2).reshape(x.shape[-1], -1)),
    "norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "centre": lambda x: x - x.mean(-1, keepdim=True),
    "turn": lambda x: torch.cat([x[..., 1:], x[..., :1]], -1),
}
chains = st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=6)
closures = st.sampled_from(sorted(CLOSURES))


def run(chain, x):
    for name in chain:
        x = STEPS[name](x)
    return x


@given(chains, closures, st.integers(0, 99))
def test_variance_is_never_negative(chain, closure, seed):
    mean, var = moments_of(run(chain, gaussian(3, 4, seed=seed, closure=closure)))
    assert bool((var >= 0).all())
    assert bool(torch.isfinite(mean).all())
    assert mean.shape == var.shape


@given(chains, closures, st.integers(0, 99))
def test_zero_variance_gives_the_plain_result(chain, closure, seed):
    mean = gaussian(3, 4, seed=seed)._mean
    found = moments_of(run(chain, Gaussian(mean, torch.zeros_like(mean), CLOSURES[closure])))
    torch.testing.assert_close(found.mean, run(chain, mean))
    assert not found.var.any()


@given(chains, closures, st.floats(-3, 3), st.integers(0, 99))
def test_scaling_the_result_scales_its_variance_by_the_square(chain, closure, c, seed):
    plain = moments_of(run(chain, gaussian(3, 4, seed=seed, closure=closure)))
    scaled = moments_of(run(chain, gaussian(3, 4, seed=seed, closure=closure)) * c)
    torch.testing.assert_close(scaled.mean, plain.mean * c)
    torch.testing.assert_close(scaled.var, plain.var * c**2)


@given(chains, closures, st.permutations(range(5)), st.integers(0, 99))
def test_the_order_of_the_batch_does_not_matter(chain, closure, order, seed):
    x = gaussian(5, 4, seed=seed, closure=closure)
    found, moved = moments_of(run(chain, x)), moments_of(run(chain, x[order]))
    torch.testing.assert_close(moved.mean, found.mean[order])
    torch.testing.assert_close(moved.var, found.var[order])
