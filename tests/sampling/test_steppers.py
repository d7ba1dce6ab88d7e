"""Every stepper: its order of convergence, its evaluations, and its steps against a reference."""

import math

import pytest
import torch

from fmwc.flow import Channel, FlatTorus, Space
from fmwc.sampling import STEPPERS, Grid, SamplingConfig, sample
from tests.reference import integrate

TORUS = Space({"x": Channel((2,), FlatTorus(), "uniform")})


class Logistic:
    """dx/dt = x (1 − x), with x(1) = x0 e / (1 − x0 + x0 e)."""

    def velocity(self, x, t):
        return x * (1 - x)

    def exact(self, x0):
        return x0 * math.e / (1 - x0 + x0 * math.e)


class Decay:
    """dx/dt = −2 t x, with x(1) = x0 e⁻¹."""

    def velocity(self, x, t):
        return -2 * t[:, None] * x

    def exact(self, x0):
        return x0 * math.exp(-1)


PROBLEMS = {"decay": Decay(), "logistic": Logistic()}


def x0():
    return torch.tensor([[0.9, 0.1], [0.3, 2.0]], dtype=torch.float64)


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("name", STEPPERS)
def test_order_of_convergence(name, problem):
    problem = PROBLEMS[problem]
    exact = problem.exact(x0())
    sizes = [16, 32, 64, 128]
    errors = [
        (sample(problem.velocity, x0=x0(), steps=n, confidence=None, config=SamplingConfig(stepper=name)).x - exact)
        .norm()
        .item()
        for n in sizes
    ]
    x, y = torch.log(torch.tensor(sizes).double()), torch.log(torch.tensor(errors))
    slope = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
    assert -slope.item() == pytest.approx(STEPPERS[name].order, abs=0.15)


@pytest.mark.parametrize("name", STEPPERS)
def test_steps_by_hand(name):
    times = [0.0, 0.1, 0.45, 0.5, 1.0]
    found = sample(
        Decay().velocity, x0=x0(), confidence=None, config=SamplingConfig(controller=Grid(times), stepper=name)
    ).x
    torch.testing.assert_close(found, integrate(lambda x, t: -2 * t * x, x0(), times, name))


@pytest.mark.parametrize("name", STEPPERS)
def test_a_constant_velocity_on_the_torus(name):
    start = torch.tensor([[0.9, 0.2]], dtype=torch.float64)
    speed = torch.tensor([[0.75, -1.5]], dtype=torch.float64)
    found = sample(
        lambda x, t: speed, x0=start, steps=7, confidence=None, config=SamplingConfig(stepper=name, space=TORUS)
    ).x
    torch.testing.assert_close(found, torch.remainder(start + speed, 1.0))
