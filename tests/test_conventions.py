"""Networks called with another convention than in training are found by their loss; correct ones never are."""

import math

import pytest
import torch
from torch import nn

import fmwc
from fmwc import checkerboard
from fmwc.adapters import SCHEDULES, adapt, predicting
from fmwc.conventions import check_conventions, examine_conventions
from fmwc.data import arrays
from fmwc.errors import UsageError
from fmwc.flow import as_space
from fmwc.retrofit import Retrofit, retrofit

SPREAD = 0.3
CENTRES = 2.0 * torch.tensor([[math.cos(a), math.sin(a)] for a in torch.arange(3) * 2 * math.pi / 3])


def points(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    which = torch.randint(3, (count,), generator=generator)
    return CENTRES[which] + SPREAD * torch.randn(count, 2, generator=generator)


class Exact(nn.Module):
    """E[x1 | x], E[x0 | x] or the velocity of a schedule for three clusters, in closed form, with its own time."""

    def __init__(self, predicts, schedule="linear", backwards=False, scale=1.0, shift=0.0, stretch=1.0):
        super().__init__()
        self.predicts, self.schedule = predicts, SCHEDULES[schedule]
        self.backwards, self.scale = backwards, scale
        self.shift, self.stretch = shift, stretch
        self.layer = nn.Linear(2, 2, bias=False)  # a layer for the noise
        with torch.no_grad():
            self.layer.weight.copy_(torch.eye(2))

    def forward(self, x, t):
        t = (t / self.scale).clamp(1e-3, 1 - 1e-3)
        t = 1 - t if self.backwards else t
        x = self.layer(x)
        a, s = (scale[:, None] for scale in self.schedule(t))
        centres, spread = self.stretch * CENTRES + self.shift, self.stretch * SPREAD
        var = (a * spread) ** 2 + s**2
        away = x[:, None] - a[..., None] * centres
        share = torch.softmax(-away.square().sum(2) / (2 * var), 1)
        gain = (share[..., None] * away).sum(1) / var
        data = (share[..., None] * centres).sum(1) + a * spread**2 * gain
        if self.predicts == "data":
            return data
        noise = s * gain
        return noise if self.predicts == "noise" else (data - noise) * (-1 if self.backwards else 1)


CALLS = {
    "": {},
    "backwards=True": {"backwards": True},
    "scale=1000.0": {"scale": 1000.0},
    "scale=1000.0, backwards=True": {"scale": 1000.0, "backwards": True},
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("seed", range(2))
def test_wrong_conventions_are_named(call, seed):
    net, data = Exact("velocity", **CALLS[call]), points(2000)
    found = examine_conventions(net, as_space(2), data, seed=seed)
    if not call:
        assert found.better is None
        assert found.message == ""
        return
    assert found.better.fix == f"adapt(net, {call})"
    fixed = examine_conventions(adapt(net, **CALLS[call]), as_space(2), data, seed=seed)
    assert fixed.better is None
    assert fixed.loss == pytest.approx(found.better.loss, rel=1e-3)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("what", ["noise", "data"])
def test_predictions_of_data_or_noise_are_named_with_their_schedule(what, schedule, call):
    net, data = Exact(what, schedule, **CALLS[call]), points(2000)
    found = examine_conventions(net, as_space(2), data)
    named = ", ".join(filter(None, ["net", f'"{what}"', '"cosine"' if schedule == "cosine" else "", call]))
    assert found.better.fix == f"predicting({named})"
    fixed = examine_conventions(predicting(net, what, schedule, **CALLS[call]), as_space(2), data)
    assert fixed.better is None
    assert not fixed.useless


@pytest.mark.parametrize(
    ("net", "data", "fix"),
    [
        (Exact("velocity"), 20 * points(2000) + 5, "x.mean"),
        (Exact("velocity", stretch=20.0, shift=5.0), points(2000), None),
    ],
    ids=["raw data", "raw training"],
)
def test_data_of_another_scale_are_named(net, data, fix):
    found = examine_conventions(net, as_space(2), data)
    assert found.loss > 1
    assert (fix is None and found.message) or fix in found.better.fix


class Transport(nn.Module):
    """The optimal-transport flow to N(0, 3²)."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2, bias=False)
        with torch.no_grad():
            self.layer.weight.copy_(2 * torch.eye(2))

    def forward(self, x, t):
        return self.layer(x) / (1 + 2 * t)[:, None]


@pytest.mark.parametrize("pairs", ["ot", "function", "tensors"])
def test_an_optimal_transport_flow_is_good_on_its_pairs(pairs):
    data = 3 * torch.randn(1000, 2, generator=torch.Generator().manual_seed(0))
    given = {"ot": "ot", "function": lambda x1, r: x1 / 3, "tensors": data / 3}[pairs]
    found = check_conventions(Transport(), as_space(2), data, pairs=given)
    assert found.loss < 0.1
    assert examine_conventions(Transport(), as_space(2), data).better is None  # and without it there is no error
    reversed_ = adapt(Transport(), backwards=True)
    assert examine_conventions(reversed_, as_space(2), data, pairs=given).better.fix == "adapt(net, backwards=True)"


@pytest.mark.parametrize("name", ["checkerboard", "checkerboard-joint"])
def test_the_shipped_checkerboards_are_good(name):
    field = fmwc.load(name)
    for seed in range(2):
        assert not check_conventions(field, field.space, checkerboard.sample(1000, seed), seed=seed).message
    turned = adapt(field.network, backwards=True)
    with pytest.raises(UsageError, match="backwards"):
        check_conventions(turned, field.space, checkerboard.sample(1000, 0))


def test_fitting_and_retrofitting_refuse_unless_conventions_is_false(tmp_path):
    net, data = Exact("velocity", backwards=True), points(400)
    words = "backwards"
    with pytest.raises(UsageError, match=words):
        fmwc.fit_noise(fmwc.attach(net, space=2), data, 2)
    fmwc.fit_noise(fmwc.attach(net, space=2), data, 2, conventions=False)
    fmwc.fit_noise(fmwc.attach(adapt(net, backwards=True), space=2), data, 2)
    how, samples = Retrofit(steps=8, batch=32, sampling_steps=4), arrays.Samples(data, {})
    with pytest.raises(UsageError, match=words):
        retrofit(net, tmp_path / "field", samples, how)
    retrofit(net, tmp_path / "told", samples, Retrofit(steps=8, batch=32, sampling_steps=4, conventions=False))


def test_a_network_that_takes_the_time_first_is_refused_by_its_signature():
    class TimeFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, t, x):
            return self.layer(x) * t[:, None]

    with pytest.raises(UsageError, match="time_first"):
        fmwc.attach(TimeFirst())
    fmwc.attach(adapt(TimeFirst(), time_first=True))
