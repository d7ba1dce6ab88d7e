"""Networks that predict data or noise, take times as a column, or are guided, against closed forms."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

import fmwc
from fmwc.adapters import SCHEDULES, Guided, predicting
from fmwc.estimators import Linearised, MonteCarlo, Tangent
from fmwc.flow import flow_matching_loss, path_of, path_sample
from fmwc.noise import Pass
from fmwc.randomness import as_randomness
from fmwc.sampling import SamplingConfig

WIDE = 2.0  # data are N(1, WIDE²)


class Optimal(nn.Module):
    """E[x1 | x] or E[x0 | x] of x = α x1 + σ x0 for Gaussian data, at the time of the network."""

    def __init__(self, what, schedule, own=lambda t: t):
        super().__init__()
        self.what, self.schedule, self.own = what, schedule, own
        self.layer = nn.Linear(1, 1)

    def forward(self, x, t):
        a, s = (scale.reshape(-1, 1) for scale in self.schedule(self.own(t)))
        gain = (x - a) / (a**2 * WIDE**2 + s**2)
        return 1 + a * WIDE**2 * gain if self.what == "data" else s * gain


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("what", ["data", "noise"])
def test_samples_have_the_moments_of_the_data(what, schedule):
    net = predicting(
        Optimal(what, SCHEDULES[schedule], own=lambda s: 1 - s[:, 0] / 1000),
        what,
        schedule,
        backwards=True,
        scale=1000.0,
        column=True,
    )
    run = fmwc.sample(net, 4000, steps=100, confidence=None, config=SamplingConfig(space=1))
    assert float(run.x.mean()) == pytest.approx(1, abs=0.15)
    assert float(run.x.std()) == pytest.approx(WIDE, rel=0.06)


def test_path_matches_the_schedule_and_has_finite_ends():
    net = predicting(Optimal("noise", SCHEDULES["cosine"]), "noise", "cosine")
    x0, x1, t = torch.randn(5, 1), torch.randn(5, 1), torch.linspace(0.1, 0.9, 5)
    x_t, u_t = net.path(x0, x1, t)
    angle = (math.pi / 2 * t)[:, None]
    torch.testing.assert_close(x_t, torch.sin(angle) * x1 + torch.cos(angle) * x0)
    torch.testing.assert_close(u_t, math.pi / 2 * (torch.cos(angle) * x1 - torch.sin(angle) * x0))
    assert path_of(fmwc.attach(net), None) == net.path
    for end in (0.0, 1.0):
        assert net(x0, torch.full((5,), end)).isfinite().all()
        assert net.path(x0, x1, torch.full((5,), end))[1].isfinite().all()


def test_loss_is_minimal_on_the_networks_path():
    """On the path of the schedule, the optimal velocity has the smallest loss."""
    data = 1 + WIDE * torch.randn(20_000, 1, generator=torch.Generator().manual_seed(0))
    net = predicting(Optimal("data", SCHEDULES["cosine"]), "data", "cosine")
    best = flow_matching_loss(net, 1, data, seed=1)
    t, x_t, u_t = path_sample(1, data, as_randomness(1, torch.device("cpu")), net)
    for wrong in (lambda v: 1.2 * v, lambda v: 0.8 * v, lambda v: v + 0.2, torch.zeros_like):
        assert (wrong(net(x_t, t)) - u_t).square().mean() > best


# ---- guidance ----------------------------------------------------------------------------------------------------

W = 2.5


class Classes(nn.Module):
    """An MLP with a class; tokens if `x` has them."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 6)
        self.first, self.middle, self.last = nn.Linear(3, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x, t, y):
        shape = (len(x), *[1] * (x.ndim - 2), 1)
        h = torch.cat([x, t.view(shape).expand(*x.shape[:-1], 1)], -1)
        h = torch.tanh(self.first(h) + self.embed(y).view(len(x), *[1] * (x.ndim - 2), -1))
        return self.last(torch.tanh(self.middle(h)))


class Pictures(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 5)
        self.a, self.b = nn.Conv2d(1, 5, 3, padding=1), nn.Conv2d(5, 1, 3, padding=1)

    def forward(self, x, t, y):
        return self.b(torch.tanh(self.a(x) + self.embed(y)[..., None, None]))


class Ragged(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 6)
        self.a, self.b = nn.Linear(2, 6), nn.Linear(6, 2)

    def _flat(self, n):
        return torch.arange(len(n)).repeat_interleave(n), torch.cat([torch.arange(int(k)) for k in n])

    def rows(self, x, t, y, n):
        return {"*": torch.cat([self._flat(n)[0], torch.full((3,), len(n))])}

    def forward(self, x, t, y, n):
        sample, place = self._flat(n)
        h = self.a(torch.cat([x[sample, place], torch.ones(3, 2)]))
        h = self.b(torch.tanh(h + torch.cat([self.embed(y)[sample], torch.ones(3, 6)])))[: len(sample)]
        return torch.zeros_like(x).index_put((sample, place), h)


CASES = {
    "points": (Classes, (2,)),
    "pictures": (Pictures, (1, 4, 4)),
    "ragged": (Ragged, (3, 2)),
}


def made(case, log_alpha=-6.0):
    kind, shape = CASES[case]
    torch.manual_seed(0)
    space = fmwc.flow.Space({"x": fmwc.flow.Channel(shape, rows="n")}) if case == "ragged" else shape
    field = fmwc.attach(Guided(kind(), W, y=3), space=space, initial_log_alpha=log_alpha)
    for noisy in field.noise.layers:
        nn.init.normal_(noisy.inference.out.weight, std=0.3)
    x, cond = torch.randn(4, *shape), {"y": torch.tensor([0, 1, 2, 0])}
    if case == "ragged":
        cond["n"] = torch.tensor([3, 1, 2, 2])
        x = x * (torch.arange(3) < cond["n"][:, None])[..., None]
    return field, x, cond


class Both(Pass):
    """Draw whole weights for each position of a sample; both evaluations of the sample share them.

    Rows are positions of evaluations in turn. Each position of a sample has separate weights, as in training.
    """

    def __init__(self, generator):
        self.generator = generator

    def after(self, noisy, layer, h, y):
        scaled = noisy.log_alpha(h).exp().sqrt() * h
        if noisy.kind.spatial:  # a convolution is a product with the patch around each position
            patches = torch.nn.functional.unfold(scaled, 3, padding=1).mT.flatten(0, 1)
            weight = layer.weight.flatten(1)
        else:
            patches, weight = scaled.flatten(0, -2), layer.weight
        noise = torch.randn(len(patches), *weight.shape, generator=self.generator)
        partner, second = self.places(noisy, h, len(patches))
        noise = torch.where(second[:, None, None], noise[partner], noise)
        drawn = torch.einsum("rc,roc,oc->ro", patches, noise, weight)
        if noisy.kind.spatial:
            return y + drawn.view(len(h), -1, drawn.shape[-1]).mT.reshape(y.shape)
        return y + drawn.view(y.shape)

    def places(self, noisy, h, rows):
        partner, second = noisy.partners(h)
        if noisy.name.endswith(("a", "first")):  # this layer does not see the condition, so both evaluations are equal
            assert torch.equal(h[partner], h)
            assert torch.equal(~second, second[partner]) or len(h) == 19  # three rows belong to no sample
        each = torch.arange(rows // len(h))
        return (partner[:, None] * len(each) + each).flatten(), second.repeat_interleave(len(each))


@pytest.mark.parametrize("case", CASES)
def test_guided_velocity_takes_one_call(case):
    field, x, cond = made(case)
    net, t = field.network.network, torch.rand(4)
    calls = []
    net.register_forward_hook(lambda *args: calls.append(1))
    v = field(x, t, **cond)
    assert len(calls) == 1
    with_, without = (net(x, t, **{**cond, "y": y}) for y in (cond["y"], torch.full((4,), 3)))
    torch.testing.assert_close(v, without + W * (with_ - without))
    torch.testing.assert_close(field.network.conditional(x, t, **cond), with_)


@pytest.mark.parametrize("case", CASES)
def test_both_evaluations_share_one_draw_of_the_weights(case):
    """Compare linearised and our draws with explicit draws of the weights. Independent noise gives another variance."""
    field, x, cond = made(case)
    exact = field.moments(x, 0.3, Linearised(), cond=cond).var
    where = exact > 0
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        by_hand = torch.stack([field.run(Both(generator), x, 0.3, cond=cond) for _ in range(1500)]).var(0)
    drawn = field.moments(x, 0.3, MonteCarlo(4000, 100), seed=0, cond=cond).var
    pushed = field.moments(x, 0.3, Tangent(1500), seed=0, cond=cond).var
    for var, draws in ((by_hand, 1500), (drawn, 4000), (pushed, 1500)):
        error = ((var / exact)[where] - 1).abs()
        assert error.max() < 5.5 * (2 / draws) ** 0.5
        assert error.median() < 0.1

    # Two calls, each with independent noise.
    alone = fmwc.attach(field.network.network, space=field.space)
    alone.noise.load_state_dict(field.noise.state_dict())
    with_, without = (
        alone.moments(x, 0.3, Linearised(), cond={**cond, "y": y}).var for y in (cond["y"], torch.full((4,), 3))
    )
    ratio = (W**2 * with_ + (W - 1) ** 2 * without)[where] / exact[where]
    assert ratio.log().abs().median() > math.log(1.2)


def test_weights_one_and_zero_give_the_plain_network():
    """Weight 1 gives velocity and variance of the conditional network, weight 0 those of the unconditional one."""
    field, x, cond = made("points")
    alone = fmwc.attach(field.network.network, space=2)
    alone.noise.load_state_dict(field.noise.state_dict())
    for weight, y in ((1.0, cond["y"]), (0.0, torch.full((4,), 3))):
        field.network.weight = weight
        a, b = field.moments(x, 0.3, cond=cond), alone.moments(x, 0.3, cond={"y": y})
        torch.testing.assert_close(a.mean, b.mean)
        torch.testing.assert_close(a.var, b.var)


def test_guided_fields_sample_fit_copy_and_pickle(tmp_path):
    field, x, cond = made("points")
    run = fmwc.sample(field, 8, steps=4, cond={"y": torch.arange(8) % 3})
    assert run.score("integrated").std() > 0
    fmwc.fit_noise(field, torch.randn(32, 2), 3, batch=16, cond={"y": torch.arange(32) % 3})
    for again in (copy.deepcopy(field), pickle.loads(pickle.dumps(field))):  # trusted bytes
        assert torch.equal(again.moments(x, 0.4, cond=cond).var, field.moments(x, 0.4, cond=cond).var)
    fmwc.save(field, tmp_path / "field")
    loaded = fmwc.load(tmp_path / "field", network=Guided(Classes(), W, y=3))
    assert torch.equal(loaded.moments(x, 0.4, cond=cond).var, field.moments(x, 0.4, cond=cond).var)
