"""The Gaussian tensor: what it refuses, and the laws that hold whatever is done with it."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fmwc.errors import NoRuleError, ShapeError
from fmwc.moments import CLOSURES, EXACT, RULES, Gaussian, moments_of, register


def gaussian(*shape: int, seed: int = 0, closure: str = "gauss_hermite") -> Gaussian:
    generator = torch.Generator().manual_seed(seed)
    return Gaussian(torch.randn(shape, generator=generator), torch.rand(shape, generator=generator), CLOSURES[closure])


def test_mean_and_variance_have_one_shape():
    with pytest.raises(ShapeError, match=r"one shape, got \(2,\) and \(3,\)"):
        Gaussian(torch.zeros(2), torch.zeros(3))


def test_a_plain_tensor_is_known_exactly():
    mean, var = moments_of(torch.ones(2))
    assert torch.equal(mean, torch.ones(2))
    assert not var.any()


def test_it_prints():
    assert "mean=" in repr(gaussian(2))
    assert "var=" in repr(gaussian(2))


# ---- refusals -------------------------------------------------------------------------------------------------------

NO_RULE = {
    "sort": lambda x: torch.sort(x),
    "softmax": lambda x: torch.softmax(x, -1),
    "batch_norm": lambda x: F.batch_norm(x, torch.zeros(3), torch.ones(3)),
    "matmul": lambda x: x @ torch.ones(3, 3),
    "einsum": lambda x: torch.einsum("ij,ij->i", x, x),
    "where": lambda x: torch.where(torch.ones(2, 3) > 0, x, x),
    "max": lambda x: x.max(),
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.sum()),
    "compare": lambda x: x > 0,
    "numpy": lambda x: x.numpy(),
    "divide by": lambda x: 1 / x,
    "divide by it": lambda x: torch.ones(3) / x,
    "divide, rounded": lambda x: torch.div(x, 2.0, rounding_mode="floor"),
    "power of it": lambda x: 2.0**x,
    "power by it": lambda x: torch.pow(torch.ones(3), x),
    "clamp by it": lambda x: torch.clamp(x, min=x),
    "weight": lambda x: F.linear(torch.ones(1, 3), x),
    "bias": lambda x: F.linear(torch.ones(1, 3), torch.ones(3, 3), x.sum(0)),
    "aten": lambda x: torch.ops.aten.relu(x),
}


@pytest.mark.parametrize("name", NO_RULE)
def test_no_rule_no_guess(name):
    with pytest.raises(NoRuleError, match=r"no rule carries a variance through .*linearised") as raised:
        NO_RULE[name](gaussian(2, 3))
    assert "\n" not in str(raised.value)


def test_the_refusal_names_the_operation_and_its_arguments():
    with pytest.raises(NoRuleError) as raised:
        torch.softmax(gaussian(2, 3), -1)
    message = str(raised.value)
    for part in ("softmax", "Gaussian[2, 3]", "int", "fmwc.moments.register", "propagation='linearised'"):
        assert part in message


def augment(x):
    x += 1


def assign(x):
    x[0] = 1.0


def assign_into(x):
    plain = torch.zeros(2, 3)
    plain[0] = x[0]


def add_into(x):
    plain = torch.zeros(2, 3)
    plain += x


IN_PLACE = {
    "x += 1": augment,
    "x.add_(1)": lambda x: x.add_(1),
    "x.mul_(2)": lambda x: x.mul_(2),
    "x.copy_(y)": lambda x: x.copy_(torch.ones(2, 3)),
    "x.zero_()": lambda x: x.zero_(),
    "x.clamp_(0)": lambda x: x.clamp_(0),
    "x[0] = 1": assign,
    "y[0] = x": assign_into,
    "y += x": add_into,
    "nn.ReLU(inplace=True)": nn.ReLU(inplace=True),
    "nn.SiLU(inplace=True)": nn.SiLU(inplace=True),
    "F.elu(inplace=True)": lambda x: F.elu(x, inplace=True),
    "torch.relu_": torch.relu_,
    "out=": lambda x: torch.add(x, 1, out=torch.zeros(2, 3)),
    "exp(out=)": lambda x: torch.exp(x, out=torch.zeros(2, 3)),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_every_in_place_form_is_refused(name):
    x = gaussian(2, 3)
    before = x._mean.clone(), x._var.clone()
    with pytest.raises(NoRuleError, match=r"(in place|inplace).*linearised") as raised:
        IN_PLACE[name](x)
    assert "\n" not in str(raised.value)
    assert torch.equal(x._mean, before[0])
    assert torch.equal(x._var, before[1])


def test_a_rule_of_ones_own():
    assert torch.softmax not in RULES
    try:

        @register(torch.softmax, exactness=EXACT, family="own")
        def sure(func, args, kwargs):
            x, *rest = args
            return Gaussian(func(x._mean, *rest, **kwargs), torch.zeros_like(x._var), x._closure)

        assert RULES[torch.softmax].family == "own"
        assert not moments_of(torch.softmax(gaussian(2, 3), -1)).var.any()
    finally:
        del RULES[torch.softmax]


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
def test_no_variance_gives_the_plain_result(chain, closure, seed):
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
