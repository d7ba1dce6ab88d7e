"""Manifolds: exp and log are inverse, and paths on the torus are shortest."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fmwc.flow import Euclidean, FlatTorus

MANIFOLDS = {"Euclidean": Euclidean(), "FlatTorus": FlatTorus()}
inside = st.floats(0, 1, exclude_max=True, width=32)


def point(*values):
    return torch.tensor([values], dtype=torch.float64)


def distance(manifold, x, y):
    return (manifold.logmap(x, y)).abs().max().item()


@pytest.mark.parametrize("name", MANIFOLDS)
@given(inside, inside, inside, inside)
def test_exp_undoes_log(name, a, b, c, d):
    manifold, x, y = MANIFOLDS[name], point(a, b), point(c, d)
    assert distance(manifold, manifold.expmap(x, manifold.logmap(x, y)), y) < 1e-9


@pytest.mark.parametrize("name", MANIFOLDS)
@given(inside, st.floats(-0.499, 0.499))
def test_log_undoes_exp_within_half_a_turn(name, a, u):
    manifold, x = MANIFOLDS[name], point(a)
    assert manifold.logmap(x, manifold.expmap(x, point(u))).item() == pytest.approx(u, abs=1e-9)


@given(inside, inside)
def test_torus_paths_are_shortest(a, b):
    found = FlatTorus().logmap(point(a), point(b)).item()
    assert abs(found) <= 0.5 + 1e-9
    assert abs(found) == pytest.approx(min(abs(b - a + k) for k in (-1, 0, 1)), abs=1e-9)


def test_the_torus_by_hand():
    torus = FlatTorus()
    assert torus.logmap(point(0.9), point(0.1)).item() == pytest.approx(0.2)
    assert torus.logmap(point(0.1), point(0.9)).item() == pytest.approx(-0.2)
    assert torus.expmap(point(0.9), point(0.2)).item() == pytest.approx(0.1)
    assert torus.expmap(point(0.1), point(-0.2)).item() == pytest.approx(0.9)


@given(st.floats(-(2**20), 2**20, width=32) | st.floats(-(2**-20), 2**-20, width=32))
def test_the_torus_projects_into_its_cell(value):
    """float32 rounds a tiny negative number, modulo 1, up to 1, which is outside the cell."""
    for found in (FlatTorus().projx(torch.tensor([value])), FlatTorus().expmap(torch.zeros(1), torch.tensor([value]))):
        assert 0 <= found.item() < 1


def test_expmap_has_slope_one_across_the_period():
    x = torch.tensor([0.9], requires_grad=True)
    FlatTorus().expmap(x, torch.tensor([0.3])).backward()
    assert x.grad.item() == 1
