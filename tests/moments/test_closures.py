"""Closures against polynomials, closed forms, and integrals."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from fmwc.moments import CLOSURES, GaussHermite, Taylor
from tests.reference import integral

MEAN = torch.tensor([-1.3, 0.0, 0.4, 2.0], dtype=torch.float64)
VAR = torch.tensor([0.5, 1.0, 0.09, 0.3], dtype=torch.float64)


def raw_moment(mean: float, var: float, power: int) -> float:
    """E[z^n] for z ~ N(μ, σ²), by the recursion E[z^n] = μ E[z^(n−1)] + (n−1) σ² E[z^(n−2)]."""
    before, now = 0.0, 1.0
    for n in range(1, power + 1):
        before, now = now, mean * now + (n - 1) * var * before
    return now


def polynomial_moments(coefficients: list[float], mean: float, var: float) -> tuple[float, float]:
    first = sum(c * raw_moment(mean, var, n) for n, c in enumerate(coefficients))
    second = sum(
        a * b * raw_moment(mean, var, i + j) for i, a in enumerate(coefficients) for j, b in enumerate(coefficients)
    )
    return first, second - first**2


def polynomial(coefficients: list[float]):
    return lambda z: sum(c * z**n for n, c in enumerate(coefficients))


small = st.floats(-2, 2)


@given(st.integers(1, 12), st.data())
def test_gauss_hermite_is_exact_up_to_its_degree(nodes, data):
    degree = nodes - 1  # 2·deg ≤ 2n − 1
    coefficients = data.draw(st.lists(small, min_size=degree + 1, max_size=degree + 1))
    mean, var = data.draw(st.floats(-1.5, 1.5)), data.draw(st.floats(0.01, 1))
    found = GaussHermite(nodes)(
        polynomial(coefficients) if degree else lambda z: z * 0 + coefficients[0],
        torch.tensor([mean], dtype=torch.float64),
        torch.tensor([var], dtype=torch.float64),
    )
    expected = polynomial_moments(coefficients, mean, var)
    size = sum(abs(c) * raw_moment(abs(mean), var, n) for n, c in enumerate(coefficients))
    assert found.mean.item() == pytest.approx(expected[0], rel=1e-9, abs=1e-9 * (1 + size))
    assert found.var.item() == pytest.approx(expected[1], rel=1e-8, abs=1e-9 * (1 + size**2))


@pytest.mark.parametrize("f", [F.silu, torch.tanh, torch.sin, torch.exp, F.softplus], ids=lambda f: f.__name__)
def test_gauss_hermite_converges_to_the_integral(f):
    mean, var = integral(f, MEAN, VAR)
    found = GaussHermite(40)(f, MEAN, VAR)
    torch.testing.assert_close(found.mean, mean, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found.var, var, rtol=1e-5, atol=1e-7)


DERIVATIVES = {  # φ, φ′, φ″
    "sin": (torch.sin, torch.cos, lambda z: -torch.sin(z)),
    "exp": (torch.exp, torch.exp, torch.exp),
    "tanh": (torch.tanh, lambda z: 1 - z.tanh() ** 2, lambda z: -2 * z.tanh() * (1 - z.tanh() ** 2)),
    "cube": (lambda z: z**3, lambda z: 3 * z**2, lambda z: 6 * z),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_taylor_first_order(name):
    f, slope, _ = DERIVATIVES[name]
    found = Taylor(1)(f, MEAN, VAR)
    torch.testing.assert_close(found.mean, f(MEAN))
    torch.testing.assert_close(found.var, slope(MEAN) ** 2 * VAR)


@pytest.mark.parametrize("name", DERIVATIVES)
def test_taylor_second_order(name):
    f, slope, curve = DERIVATIVES[name]
    found = Taylor(2)(f, MEAN, VAR)
    torch.testing.assert_close(found.mean, f(MEAN) + curve(MEAN) * VAR / 2)
    torch.testing.assert_close(found.var, slope(MEAN) ** 2 * VAR + curve(MEAN) ** 2 * VAR**2 / 2)


@pytest.mark.parametrize("name", CLOSURES)
@given(st.floats(-5, 5), st.floats(-3, 3), st.floats(0, 4))
def test_every_closure_is_exact_for_a_line(name, slope, mean, var):
    z = torch.tensor([mean], dtype=torch.float64)
    found = CLOSURES[name](lambda z: slope * z + 1, z, torch.tensor([var], dtype=torch.float64))
    assert found.mean.item() == pytest.approx(slope * mean + 1, abs=1e-9)
    assert found.var.item() == pytest.approx(slope**2 * var, rel=1e-6, abs=1e-9)


def test_small_variance_on_a_large_value_keeps_its_digits():
    """In float32, E[φ²] − E[φ]² would lose σ² = 10⁻⁸ next to 10⁴."""
    found = GaussHermite()(lambda z: z + 1e2, torch.tensor([0.5]), torch.tensor([1e-4]))
    assert found.var.item() == pytest.approx(1e-4, rel=1e-2)
    assert math.isfinite(found.mean.item())
