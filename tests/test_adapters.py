"""Adapters: another signature for the same network."""

import math
import pickle

import pytest
import torch
from torch import nn

import fmwc
from fmwc.adapters import Denoised, adapt, timestepped
from fmwc.networks import MLP
from fmwc.sampling import SamplingConfig


class Told(nn.Module):
    """A network that records its arguments; its first output is a linear layer of the state."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.seen = None

    def forward(self, *args, **kwargs):
        self.seen = (args, kwargs)
        return (self.layer(kwargs.get("x", args[0] if args[0].ndim == 2 else args[1])), "more")


FIRST = {"output": lambda found: found[0]}


@pytest.mark.parametrize(
    ("options", "args", "kwargs"),
    [
        ({}, ["x", "t"], {}),
        ({"time_first": True}, ["t", "x"], {}),
        ({"time": "when"}, ["x"], {"when": "t"}),
        ({"scale": 1000.0}, ["x", "1000t"], {}),
        ({"backwards": True}, ["x", "1-t"], {}),
        ({"backwards": True, "scale": 10.0, "time_first": True}, ["10(1-t)", "x"], {}),
        ({"flag": True}, ["x", "t"], {"flag": True}),
    ],
    ids=str,
)
def test_adapter_passes_the_expected_arguments(options, args, kwargs):
    net = Told()
    x, t = torch.randn(3, 2), torch.rand(3)
    names = {"x": x, "t": t, "1000t": 1000 * t, "1-t": 1 - t, "10(1-t)": (1 - t) * 10}
    v = adapt(net, **FIRST, **options)(x, t)
    sign = -1 if options.get("backwards") else 1
    assert torch.equal(v, sign * net.layer(x))
    assert [torch.equal(a, names[b]) for a, b in zip(net.seen[0], args, strict=True)] == [True] * len(args)
    assert net.seen[1].keys() == kwargs.keys()
    for name, value in kwargs.items():
        assert net.seen[1][name] is value or torch.equal(net.seen[1][name], names[value])


def test_shared_tensors_move_with_the_network_and_are_no_weights():
    net = Told()
    wrapped = adapt(net, **FIRST, places=torch.zeros(4))
    assert list(wrapped.state_dict()) == ["network.layer.weight", "network.layer.bias"]
    wrapped.double()(torch.randn(3, 2).double(), torch.rand(3).double())
    assert net.seen[1]["places"].dtype == torch.float64


class Output(dict):
    """A network with the interface of diffusers: returns a dict, or a tuple if `return_dict=False`."""


class Diffuser(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = MLP(2, 8, 1, 4)

    def forward(self, sample, timestep, label=None, return_dict=True):
        assert timestep.min() >= 0
        v = self.net(sample, timestep / 1000)
        return Output(sample=v) if return_dict else (v,)


def test_timestepped_matches_the_call_of_diffusers():
    net = Diffuser()
    x, t = torch.randn(3, 2), torch.rand(3)
    assert torch.equal(timestepped(net)(x, t, label=1), net(x, 1000 * t)["sample"])
    assert torch.equal(timestepped(net, backwards=True)(x, t), -net(x, 1000 * (1 - t))["sample"])
    field = fmwc.attach(timestepped(net), space=(2,))
    assert bool((field.moments(x, t).var > 0).all())
    assert field.noise.names[0] == "network.net.layers.0"
    again = pickle.loads(pickle.dumps(field))  # trusted bytes, as the workers of a DataLoader receive them
    assert torch.equal(again.moments(x, t).var, field.moments(x, t).var)


# ---- denoisers -------------------------------------------------------------------------------------------------------


class Expected:
    def __init__(self, mean):
        self.mean = mean


class Denoiser(nn.Module):
    """E[x₁ | x] for data N(0, scale²), exactly: with x = αx₁ + σx₀ it is α·scale²/(α²·scale² + σ²) · x."""

    def __init__(self, schedule, scale=2.0):
        super().__init__()
        self.schedule, self.scale = schedule, scale
        self.layer = nn.Linear(2, 2)

    def forward(self, x, s):
        alpha, sigma = (v[:, None] for v in self.schedule(s))
        return Expected(alpha * self.scale**2 / (alpha**2 * self.scale**2 + sigma**2) * x)


SCHEDULES = {
    "rectified": lambda s: (1 - s, 1e-3 + (1 - 1e-3) * s),
    "cosine": lambda s: (torch.cos(math.pi / 2 * s), torch.sin(math.pi / 2 * s) + 1e-3),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_denoiser_flows_from_noise_to_its_data(name):
    velocity = Denoised(Denoiser(SCHEDULES[name]))
    x0 = torch.randn(64, 2)
    run = fmwc.sample(velocity, x0=x0, steps=400, confidence=None, config=SamplingConfig(stepper="heun", space=(2,)))
    torch.testing.assert_close(run.x, 2 * x0, rtol=0.02, atol=0.01)  # the flow between Gaussians is a scaling


def test_denoiser_velocity_is_differentiable():
    velocity = Denoised(Denoiser(SCHEDULES["cosine"]))
    x, t = torch.randn(3, 2), torch.tensor([0.0, 0.5, 1.0])
    plain = velocity(x, t)
    assert bool(torch.isfinite(plain).all())
    with torch.inference_mode():
        assert torch.equal(velocity(x.clone(), t.clone()), plain)
    _, slope = torch.func.jvp(lambda x: velocity(x, t), (x,), (x,))
    torch.testing.assert_close(slope, plain)  # it is linear in x
