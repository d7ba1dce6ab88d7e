"""Scores of other papers against closed forms: linear fields, Gaussian data, and a known variance."""

import pytest
import torch
from torch import nn

from experiments.common.comparisons import (
    HeteroscedasticHead,
    HeteroscedasticVariance,
    PosteriorTrace,
    StateSensitivity,
    nll,
)
from fmwc.errors import UsageError
from fmwc.flow import euclidean, path_sample
from fmwc.networks import MLP, UNet
from fmwc.randomness import Blocks, Stream
from fmwc.sampling import SamplingConfig, sample
from fmwc.training import TrainingConfig, train
from tests.conftest import conv_field, mlp_field
from tests.options import arguments, reader
from tests.reference import assert_within, statistics

A = torch.tensor([[0.3, -1.1], [0.7, 0.4]], dtype=torch.float64)


class Labelled(nn.Module):
    """A velocity network for 1×8×8 images of three classes, or with two outputs one for two heads."""

    def __init__(self, outputs=1):
        super().__init__()
        self.first, self.act, self.out = nn.Conv2d(1, 4, 3, padding=1), nn.SiLU(), nn.Conv2d(4, outputs, 3, padding=1)
        self.label = nn.Embedding(3, 4)

    def forward(self, x, t, y):
        return self.out(self.act(self.first(x) + self.label(y)[:, :, None, None] + t[:, None, None, None]))


def read(estimator, field, x, t, randomness=None, **cond):
    return estimator(field, x, t, cond, randomness)


# ---- state sensitivity ----------------------------------------------------------------------------------------------


def test_state_sensitivity_of_a_linear_field_is_its_frobenius_norm():
    x, t = torch.randn(3, 2, dtype=torch.float64), torch.rand(3, dtype=torch.float64)
    mean, var = read(StateSensitivity(), lambda x, t: x @ A.T, x, t)
    torch.testing.assert_close(mean, x @ A.T)
    # scaled as a mean over two coordinates, so that the norm of the deviation is ‖A‖_F
    torch.testing.assert_close(var * 2, A.square().sum().expand(3, 1))


def test_state_sensitivity_of_an_image_network_is_that_of_its_jacobian():
    field = conv_field().double()
    x, t = torch.randn(2, 1, 4, 4, dtype=torch.float64), torch.rand(2, dtype=torch.float64)
    _, var = read(StateSensitivity(), field, x, t)
    assert var.shape == (2, 1, 1, 1)
    for i in range(2):
        jacobian = torch.func.jacrev(lambda z, i=i: field.network(z[None], t[i : i + 1])[0])(x[i])
        torch.testing.assert_close(var[i].sum() * 16, jacobian.square().sum().detach())


# ---- random probes --------------------------------------------------------------------------------------------------

SCORES = (StateSensitivity, PosteriorTrace)


@pytest.mark.parametrize("score", SCORES)
def test_random_probes_converge_to_the_exact_reading_of_an_image(score):
    net = Labelled().double()
    x, t = torch.randn(3, 1, 8, 8, dtype=torch.float64), torch.tensor([0.3, 0.5, 0.8], dtype=torch.float64)
    y = torch.tensor([0, 2, 1])
    exact = read(score(), net, x, t, y=y)
    many = 500
    repeated = [v.repeat(many, *[1] * (v.ndim - 1)) for v in (x, t)]
    single = read(score(probes=1), net, *repeated, Stream(torch.Generator().manual_seed(0)), y=y.repeat(many))
    assert single.var.shape == (3 * many, 1, 1, 1)
    mean, _, error, _ = statistics(single.var.reshape(many, 3))
    assert_within(mean, exact.var.flatten(), error)
    assert float((error / mean).max()) < 0.05
    together = read(score(probes=many), net, x, t, Stream(torch.Generator().manual_seed(1)), y=y)
    assert_within(together.var.flatten(), exact.var.flatten(), error)
    torch.testing.assert_close(together.mean, exact.mean)
    other = read(score(), net, x, t, y=y.flip(0))
    assert not torch.allclose(other.var, exact.var)


@pytest.mark.parametrize("score", SCORES)
def test_one_probe_is_enough_for_a_diagonal_jacobian(score):
    x, t = torch.randn(3, 1, 8, 8), torch.rand(3)
    scale = torch.linspace(-1, 1, 64).reshape(1, 8, 8)
    found = read(score(probes=1), lambda x, t: x * scale, x, t, Stream(torch.Generator().manual_seed(0)))
    torch.testing.assert_close(found.var, read(score(), lambda x, t: x * scale, x, t).var)


@pytest.mark.parametrize("score", SCORES)
def test_probes_do_not_depend_on_the_batch(score):
    net, y = Labelled(), torch.arange(7) % 3
    options = {"steps": 3, "space": (1, 8, 8), "cond": {"y": y}, "confidence": score(probes=2)}
    whole, split = (sample(net, 7, **arguments(batch=b, **options)) for b in (64, 3))
    assert whole.var.shape == (3, 7, 1, 1, 1)
    torch.testing.assert_close(whole.var, split.var)
    assert not torch.equal(whole.var, sample(net, 7, **arguments(seed=1, **options)).var)
    at = read(score(probes=2), net, torch.zeros(7, 1, 8, 8), torch.full((7,), 0.5), Blocks(0, 0, 7), y=y)
    assert torch.isfinite(at.var).all()


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("probes", [0, -3])
def test_probes_are_none_or_at_least_one(score, probes):
    with pytest.raises(UsageError, match=f"at least 1, got {probes}"):
        score(probes=probes)


# ---- posterior trace ------------------------------------------------------------------------------------------------


def optimal(s):
    """For x1 ~ N(0, s²) the optimal velocity is linear: E[x1 | x_t] = t s² x / (t² s² + (1 − t)²)."""

    def velocity(x, t):
        t = t[:, None]
        return (t * s**2 / (t**2 * s**2 + (1 - t) ** 2) * x - x) / (1 - t)

    return velocity


@pytest.mark.parametrize("s", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("dim", [1, 3])
def test_posterior_trace_of_gaussian_data(s, dim):
    t = torch.tensor([0.05, 0.3, 0.5, 0.9, 0.99], dtype=torch.float64)
    x = torch.randn(5, dim, dtype=torch.float64)
    _, var = read(PosteriorTrace(), optimal(s), x, t)
    expected = s**2 * (1 - t) ** 2 / (t**2 * s**2 + (1 - t) ** 2)  # Cov[x1 | x_t], per coordinate
    torch.testing.assert_close(var[:, 0], expected)


def test_posterior_trace_at_the_ends_and_where_it_would_be_negative():
    x = torch.randn(3, 2)
    _, at_zero = read(PosteriorTrace(), optimal(2.0), x, torch.zeros(3))
    assert torch.isfinite(at_zero).all()
    assert at_zero.unique().numel() == 1
    _, negative = read(PosteriorTrace(), lambda x, t: -100 * x, x, torch.full((3,), 0.5))
    assert not negative.any()


@pytest.mark.parametrize("score", [StateSensitivity(), PosteriorTrace()], ids=lambda r: type(r).__name__)
def test_sampler_reads_other_scores(score):
    field = mlp_field()
    plain = sample(field, 4, steps=10, confidence=None)
    run = sample(field, 4, steps=10, confidence=reader(score))
    assert torch.equal(run.x, plain.x)
    assert run.var.shape == (10, 4, 1)
    assert run.score("integrated").shape == (4,)
    bare = sample(field.detach(), 4, steps=10, confidence=reader(score), config=SamplingConfig(space=(2,)))
    assert torch.equal(bare.var, run.var)
    torch.testing.assert_close(run.std[3].square(), 2 * read(score, field, *states(field, 3))[1][:, 0])


def states(field, step):
    run = sample(field.network, 4, steps=10, confidence=None, config=SamplingConfig(keep_states=True, space=(2,)))
    return run.states[step], run.grid[step]


# ---- two heads ------------------------------------------------------------------------------------------------------


class Fixed(nn.Module):
    """Return the optimal velocity for standard normal data, and a constant log variance."""

    def __init__(self, log_var):
        super().__init__()
        self.log_var = nn.Parameter(torch.tensor(log_var))

    def forward(self, x, t):
        return torch.cat([optimal(1.0)(x, t), self.log_var.expand_as(x)], -1)


def test_likelihood_is_best_at_the_true_variance():
    """For a fixed velocity, ½[e²/σ² + log σ²] is minimal at σ² = E[e²]."""
    space, x1 = euclidean((2,)), torch.randn(4000, 2)
    t, x_t, u_t = path_sample(space, x1, Stream(torch.Generator().manual_seed(0)))
    error = (optimal(1.0)(x_t, t) - u_t).square().mean()

    def loss(log_var):
        return nll(HeteroscedasticHead(Fixed(log_var)), space, x1, Stream(torch.Generator().manual_seed(0)))

    best = loss(error.log().item())
    assert best.item() == pytest.approx((1 + error.log().item()) / 2, rel=1e-5)
    for shift in (-0.2, -0.01, 0.01, 0.2):
        assert loss(error.log().item() + shift) > best
    head = HeteroscedasticHead(Fixed(error.log().item()))
    nll(head, space, x1, Stream(torch.Generator().manual_seed(0))).backward()
    assert abs(head.network.log_var.grad.item()) < 1e-4


def test_heteroscedastic_head_is_read_and_learns():
    head = HeteroscedasticHead(MLP(2, 16, 2, 8, outputs=4))
    x, t = torch.randn(3, 2), torch.rand(3)
    v, log_var = head.both(x, t)
    assert torch.equal(head(x, t), v)
    assert torch.equal(torch.cat([v, log_var], -1), head.network(x, t))
    found = read(HeteroscedasticVariance(), head, x, t)
    torch.testing.assert_close(found.var, log_var.exp())
    run = sample(head, 4, steps=5, confidence=HeteroscedasticVariance(), config=SamplingConfig(space=(2,)))
    assert run.var.shape == (5, 4, 2)
    assert torch.equal(run.x, sample(head, 4, steps=5, confidence=None, config=SamplingConfig(space=(2,))).x)

    space, data = euclidean((2,)), torch.randn(200, 2)
    before = nll(head, space, data, Stream(torch.Generator().manual_seed(1))).item()
    train(
        head,
        lambda x1, randomness, beta, cond: nll(head, space, x1, randomness),
        data,
        TrainingConfig(100, batch=64, lr=1e-2),
    )
    assert nll(head, space, data, Stream(torch.Generator().manual_seed(1))).item() < before
    assert head.device == torch.device("cpu")


def test_heads_of_an_image_are_its_channels():
    head = HeteroscedasticHead(Labelled(outputs=2))
    x, t, y = torch.randn(3, 1, 8, 8), torch.rand(3), torch.tensor([0, 2, 1])
    both = head.network(x, t, y=y)
    v, log_var = head.both(x, t, y=y)
    assert torch.equal(v, both[:, :1])
    assert torch.equal(log_var, both[:, 1:])
    run = sample(
        head, 3, steps=2, confidence=HeteroscedasticVariance(), cond={"y": y}, config=SamplingConfig(space=(1, 8, 8))
    )
    assert run.var.shape == (2, 3, 1, 8, 8)


def test_likelihood_passes_conditions_to_the_network():
    head, space, x1 = HeteroscedasticHead(Labelled(outputs=2)), euclidean((1, 8, 8)), torch.randn(3, 1, 8, 8)

    def loss(y):
        return nll(head, space, x1, Stream(torch.Generator().manual_seed(0)), cond={"y": y})

    y = torch.tensor([0, 2, 1])
    t, x_t, u_t = path_sample(space, x1, Stream(torch.Generator().manual_seed(0)))
    v, log_var = head.network(x_t, t, y).chunk(2, 1)
    torch.testing.assert_close(loss(y), (((v - u_t) / (log_var / 2).exp()).square() + log_var).mean() / 2)
    assert loss(y) != loss(y.flip(0))


def test_log_variance_is_clamped():
    head = HeteroscedasticHead(Fixed(50.0))
    assert head.both(torch.zeros(1, 2), torch.zeros(1))[1].max() == 12
    assert all(r.plain_mean for r in (StateSensitivity(), PosteriorTrace(), HeteroscedasticVariance()))


# ---- a variance on a flow that is trained already -------------------------------------------------------------------


def points(heads=1):
    return MLP(2, 16, 2, 8, outputs=2 * heads), (2,), {}


def images(heads=1):
    net = UNet(base=8, stages=(1, 2), cond=8, classes=3, outputs=heads)
    return net, (1, 4, 4), {"y": torch.arange(12) % 3}


KINDS = {"points": points, "images": images}


def grafted(kind):
    torch.manual_seed(0)
    flow, shape, cond = KINDS[kind]()
    torch.manual_seed(1)
    head = HeteroscedasticHead(KINDS[kind](2)[0])
    head.graft(flow)
    return flow, head, shape, cond


@pytest.mark.parametrize("kind", KINDS)
def test_grafted_head_has_the_velocity_of_the_flow_and_variance_one(kind):
    flow, head, shape, cond = grafted(kind)
    before = {k: v.clone() for k, v in flow.state_dict().items()}
    x, t = torch.randn(12, *shape), torch.rand(12)
    v, log_var = head.both(x, t, **cond)
    torch.testing.assert_close(v, flow(x, t, **cond))
    assert not log_var.any()
    assert all(torch.equal(v, before[k]) for k, v in flow.state_dict().items())
    assert [n for n, p in head.named_parameters() if p.requires_grad] == ["network.out.weight", "network.out.bias"]
    half = len(flow.out.weight)
    assert torch.equal(head.network.out.weight[:half], flow.out.weight)
    assert torch.equal(head.network.out.bias[:half], flow.out.bias)


@pytest.mark.parametrize("kind", KINDS)
def test_training_the_variance_alone_does_not_change_the_velocity(kind):
    flow, head, shape, cond = grafted(kind)
    data, space = torch.randn(12, *shape) * 0.1, euclidean(shape)
    x, t = torch.randn(12, *shape), torch.rand(12)
    velocity, before = head(x, t, **cond), {k: v.clone() for k, v in head.state_dict().items()}

    def loss(x1, randomness, beta, cond):
        return nll(head, space, x1, randomness, velocity=False, cond=cond)

    def likelihood():
        return loss(data, Stream(torch.Generator().manual_seed(5)), None, cond).item()

    start = likelihood()
    train(head, loss, data, TrainingConfig(60, batch=8, lr=2e-2), cond=cond)
    assert torch.equal(head(x, t, **cond), velocity)
    assert likelihood() < start
    changed = {k for k, v in head.state_dict().items() if not torch.equal(v, before[k])}
    assert changed == {"network.out.weight", "network.out.bias"}
    half = len(flow.out.weight)
    assert torch.equal(head.network.out.weight[:half], flow.out.weight)
    assert torch.equal(head.network.out.bias[:half], flow.out.bias)
    assert head.both(x, t, **cond)[1].abs().min() > 0


@pytest.mark.parametrize("velocity", [True, False])
def test_velocity_has_no_gradient_if_only_the_variance_learns(velocity):
    head, space = HeteroscedasticHead(MLP(2, 16, 2, 8, outputs=4)), euclidean((2,))
    nll(head, space, torch.randn(8, 2), Stream(torch.Generator().manual_seed(0)), velocity=velocity).backward()
    gradient = head.network.out.weight.grad
    assert bool(gradient[:2].any()) == velocity
    assert gradient[2:].any()


def test_likelihood_has_the_same_value_if_only_the_variance_learns():
    head, space, x1 = HeteroscedasticHead(MLP(2, 16, 2, 8, outputs=4)), euclidean((2,)), torch.randn(8, 2)
    values = [nll(head, space, x1, Stream(torch.Generator().manual_seed(0)), velocity=v) for v in (True, False)]
    assert torch.equal(*values)
