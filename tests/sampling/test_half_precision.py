"""Half precision for variances: they change little; means and samples do not change."""

import pytest
import torch
from scipy.stats import spearmanr
from torch import nn

import fmwc
from fmwc import compiled as compiling
from fmwc.compiled import Compiled
from fmwc.estimators import Diagonal, Linearised, MonteCarlo
from fmwc.field import Field
from fmwc.registry import domain_named
from fmwc.sampling import Schedule
from fmwc.state import channels
from tests.conftest import conv_field, dict_field, mlp_field
from tests.options import arguments
from tests.sampling.test_compiled import ESTIMATORS

ROUNDED = {name: estimator for name, estimator in ESTIMATORS.items() if name != "draws"}
HALF = torch.bfloat16


def drawn(field, estimator, half, backend="eager", **options):
    fast = Compiled(field, backend, say=lambda text: None, half=half)
    return fmwc.sample(fast, 20, **arguments(confidence=estimator, **{"steps": 3, **options}))


def terms_of_products(monkeypatch):
    """Return lists that record the inner sizes of matrix products, in half precision and in full precision."""
    seen, rewrite = {True: [], False: []}, compiling.halve_variances

    def rewritten(graph, means):
        rewrite(graph, means)
        for node in graph.nodes:
            if product := compiling.Product.of(node):
                seen[product.args[1].kwargs.get("dtype") == HALF].append(product.terms)

    monkeypatch.setattr(compiling, "halve_variances", rewritten)
    return seen


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("build", [mlp_field, conv_field, dict_field])
def test_the_variance_is_close_and_the_sample_the_same(build, name, monkeypatch):
    monkeypatch.setattr(compiling, "THIN", 1)
    field, estimator = build(), ROUNDED[name]
    whole, half = (drawn(field, estimator, half) for half in (False, True))
    for channel, var in channels(half.var).items():
        assert var.dtype == torch.float32
        assert torch.equal(channels(half.x)[channel], channels(whole.x)[channel])
        assert torch.equal(channels(half.mean)[channel], channels(whole.mean)[channel])
        off = (var / channels(whole.var)[channel] - 1).abs()
        assert 0 < float(off.median()) < 0.01  # computed differently, with the same probes


class Writing(nn.Module):
    """A network that writes what it computes into a table."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x, t):
        table = x.new_zeros(x.shape)
        table[:, :16] = self.first(x)[:, :16]
        table[:, 16:] = self.second(x)[:, 16:]
        return table


def test_tensors_written_in_place_belong_to_the_mean():
    field = fmwc.attach(Writing(), space=(32,))
    whole, half = (drawn(field, Linearised(2), half) for half in (False, True))
    assert torch.equal(whole.x, half.x)


class Twice(nn.Module):
    """A network whose backward pass is a product of a product."""

    def __init__(self):
        super().__init__()
        self.layer, self.near = nn.Linear(2, 16), nn.Parameter(torch.randn(20, 20) / 20)
        self.out = nn.Linear(16, 2)

    def forward(self, x, t):
        near = self.near[: len(x), : len(x)]
        return self.out(near @ (near @ self.layer(x)))


def test_a_product_may_be_a_factor_of_the_next():
    field = fmwc.attach(Twice(), space=(2,))
    field.row_order_checked = True  # samples interact, which does not matter here
    whole, half = (drawn(field, Linearised(1), half) for half in (False, True))
    torch.testing.assert_close(half.var, whole.var, rtol=0.05, atol=0)
    assert not torch.equal(half.var, whole.var)


def test_draws_are_not_rounded():
    """Rounding would change the differences between draws as much as their size."""
    field = mlp_field()
    whole, half = (drawn(field, MonteCarlo(4), half) for half in (False, True))
    assert torch.equal(whole.var, half.var)


def test_the_velocity_is_not_rounded(monkeypatch):
    seen = terms_of_products(monkeypatch)
    drawn(mlp_field(), False, True)
    assert seen == {True: [], False: []}


def test_products_of_few_terms_stay_in_single_precision(monkeypatch):
    seen = terms_of_products(monkeypatch)
    drawn(fmwc.attach(nn_of(32), space=(2,), exclude=["0"]), Linearised(1), True)
    # Half precision: θ²(αh²) and the two products of the inference network, for both noisy layers. Full precision: the
    # products with two terms (the velocity's first layer, and its backward pass), and two products of the mean.
    assert sorted(seen[True]) == [32, 32, 48, 48, 64, 64]
    assert sorted(seen[False]) == [2, 2, 32, 32]


def nn_of(width):
    net = nn.Sequential(nn.Linear(2, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2))
    net.forward = lambda x, t: nn.Sequential.forward(net, x)
    return net


@pytest.mark.parametrize("estimator", [Linearised(1), Diagonal(), Diagonal("taylor1")], ids=str)
@pytest.mark.parametrize("name", ["mnist", "crystals"])
def test_readings_of_shipped_weights_hardly_change(name, estimator):
    field, shipped = fmwc.load(name), domain_named(name)
    options = {"steps": 10, "schedule": Schedule.at([0.6]), "cond": shipped.conditions(field, 20)}
    whole, half = (drawn(field, estimator, half, **options) for half in (False, True))
    for channel, var in channels(whole.var).items():
        one, other = (v.flatten(2).sum(2).flatten() for v in (var, channels(half.var)[channel]))
        assert 0 < (other / one - 1).abs().median() < 0.01
        assert spearmanr(one, other).statistic > 0.99


@pytest.mark.parametrize(
    ("device", "able", "said", "expected"),
    [
        ("cpu", False, None, False),
        ("cpu", True, None, True),
        ("cpu", False, True, True),
        ("cuda", False, None, True),
        ("cuda", True, False, False),
        ("mps", True, None, False),
    ],
)
def test_half_precision_is_the_default_where_it_is_fast(device, able, said, expected, monkeypatch):
    monkeypatch.setattr(Field, "device", torch.device(device))
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: able, raising=False)
    assert Compiled(mlp_field(), half=said).halves == expected


class Normed(nn.Module):
    """A network in which the backward pass goes through a group norm and then through linear layers."""

    def __init__(self):
        super().__init__()
        self.first, self.out = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 1, 3, padding=1)
        self.time, self.norm = nn.Sequential(nn.Linear(1, 4), nn.SiLU(), nn.Linear(4, 4)), nn.GroupNorm(2, 4)

    def forward(self, x, t):
        return self.out(self.norm(self.first(x) + self.time(t[:, None])[:, :, None, None]))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_compiler_takes_both_precisions_through_group_norms():
    field = fmwc.attach(Normed(), space=(1, 4, 4))
    whole, half = (drawn(field, Linearised(2), half, "inductor") for half in (False, True))
    torch.testing.assert_close(half.var, whole.var, rtol=0.02, atol=0)
    torch.testing.assert_close(half.x, whole.x, rtol=1e-4, atol=1e-6)
