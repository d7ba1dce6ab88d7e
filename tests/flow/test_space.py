"""Spaces: paths, steps, products, noise, and errors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fmwc.errors import ShapeError
from fmwc.flow import Channel, FlatTorus, Space, euclidean
from fmwc.randomness import Stream
from fmwc.sampling import SamplingConfig, sample
from tests.conftest import PRODUCT


@given(st.floats(0, 1), st.integers(0, 99))
def test_euclidean_path_is_a_line(t, seed):
    generator = torch.Generator().manual_seed(seed)
    x0, x1 = torch.randn(2, 4, 3, generator=generator, dtype=torch.float64)
    x_t, u = euclidean((3,)).path(x0, x1, torch.full((4,), t, dtype=torch.float64))
    torch.testing.assert_close(x_t, (1 - t) * x0 + t * x1)
    torch.testing.assert_close(u, x1 - x0)


@given(st.integers(0, 99))
def test_the_torus_path_is_the_shorter_geodesic(seed):
    generator = torch.Generator().manual_seed(seed)
    space = Space({"x": Channel((2,), FlatTorus(), "uniform")})
    x0, x1 = torch.rand(2, 5, 2, generator=generator, dtype=torch.float64)
    zero, half, one = (torch.full((5,), t, dtype=torch.float64) for t in (0.0, 0.5, 1.0))
    start, u = space.path(x0, x1, zero)
    end, _ = space.path(x0, x1, one)
    middle, _ = space.path(x0, x1, half)
    torus = FlatTorus()
    torch.testing.assert_close(torus.logmap(start, x0), torch.zeros_like(x0), atol=1e-9, rtol=0)
    torch.testing.assert_close(torus.logmap(end, x1), torch.zeros_like(x0), atol=1e-9, rtol=0)
    assert u.abs().max() <= 0.5 + 1e-9
    torch.testing.assert_close(torus.logmap(x0, middle), u / 2)  # half of the way at half of the time
    # the velocity is the derivative of the path
    h = 1e-5
    ahead, behind = space.path(x0, x1, half + h)[0], space.path(x0, x1, half - h)[0]
    torch.testing.assert_close(torus.logmap(behind, ahead) / (2 * h), u, rtol=1e-6, atol=1e-6)
    assert bool(((middle >= 0) & (middle < 1)).all())


def test_product_equals_separate_channels():
    x0 = PRODUCT.noise(4, Stream(torch.Generator().manual_seed(0)))
    x1 = PRODUCT.noise(4, Stream(torch.Generator().manual_seed(1)))
    t = torch.rand(4)
    x_t, u = PRODUCT.path(x0, x1, t)
    for name, channel in PRODUCT.channels.items():
        alone = Space({"x": channel}).path(x0[name], x1[name], t)
        assert torch.equal(x_t[name], alone[0])
        assert torch.equal(u[name], alone[1])
    moved = PRODUCT.advance(x0, u, t)
    assert torch.equal(moved["shape"], x_t["shape"])


@pytest.mark.parametrize("name", ["normal", "uniform"])
def test_noise_has_the_moments_of_its_distribution(name):
    space = Space({"x": Channel((3,), noise=name)})
    drawn = space.noise(20_000, Stream(torch.Generator().manual_seed(0)))
    mean, var = {"normal": (0, 1), "uniform": (0.5, 1 / 12)}[name]
    error = (var / 20_000) ** 0.5
    assert float((drawn.mean(0) - mean).abs().max()) < 6 * error
    assert float((drawn.var(0) / var - 1).abs().max()) < 6 * (2 / 20_000) ** 0.5
    if name == "uniform":
        assert drawn.min() >= 0
        assert drawn.max() < 1


class Sphere:
    """A custom manifold, the unit circle: four methods, no base class."""

    def expmap(self, x, u):
        norm = u.norm(dim=-1, keepdim=True).clamp_min(1e-12)
        return x * norm.cos() + u / norm * norm.sin()

    def logmap(self, x, y):
        u = self.proju(x, y)
        angle = torch.acos((x * y).sum(-1, keepdim=True).clamp(-1, 1))
        return angle * u / u.norm(dim=-1, keepdim=True).clamp_min(1e-12)

    def projx(self, x):
        return x / x.norm(dim=-1, keepdim=True)

    def proju(self, x, u):
        return u - (x * u).sum(-1, keepdim=True) * x


def test_custom_manifolds_need_four_methods():
    space = Space({"x": Channel((2,), Sphere())})
    x0 = Sphere().projx(torch.randn(5, 2, dtype=torch.float64))
    x1 = Sphere().projx(torch.randn(5, 2, dtype=torch.float64))
    end, _ = space.path(x0, x1, torch.ones(5, dtype=torch.float64))
    torch.testing.assert_close(end, x1)
    # rotation at unit speed for unit time is one radian from any start, and stays on the circle
    turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    # (the component of the velocity off the circle, here 3x, is ignored)
    run = sample(lambda x, t: x @ turn.T + 3 * x, x0=x0, steps=200, confidence=None, config=SamplingConfig(space=space))
    torch.testing.assert_close(run.x.norm(dim=1), torch.ones(5, dtype=torch.float64))
    expected = x0 * torch.cos(torch.tensor(1.0)) + (x0 @ turn.T) * torch.sin(torch.tensor(1.0))
    torch.testing.assert_close(run.x, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("time", [0.0, 0.2, 0.5, 0.8, 1.0])
def test_velocity_follows_the_path_on_a_curved_manifold(time):
    space, sphere, generator = Space({"x": Channel((3,), Sphere())}), Sphere(), torch.Generator().manual_seed(0)
    x0, x1 = (sphere.projx(torch.randn(6, 3, dtype=torch.float64, generator=generator)) for _ in range(2))
    t = torch.full((6,), time, dtype=torch.float64)
    x_t, u = space.path(x0, x1, t)
    torch.testing.assert_close((x_t * u).sum(1), torch.zeros(6, dtype=torch.float64), atol=1e-9, rtol=0)
    h = 1e-6  # the derivative of the path, one-sided at its ends
    later, before = (space.path(x0, x1, (t + d).clamp(0, 1)) for d in (h, -h))
    width = ((t + h).clamp(0, 1) - (t - h).clamp(0, 1))[:, None]
    torch.testing.assert_close(u, (later[0] - before[0]) / width, rtol=1e-4, atol=1e-4)
    noise = space.noise(7, Stream(generator))
    torch.testing.assert_close(noise.norm(dim=1), torch.ones(7))


REFUSED = {
    "a dict for a lone channel": (euclidean((2,)), {"x": torch.zeros(1, 2)}, "got a dict"),
    "a tensor for a product": (PRODUCT, torch.zeros(1, 2), "got a tensor"),
    "an unknown channel": (
        PRODUCT,
        {"place": torch.zeros(1, 2), "shape": torch.zeros(1, 3), "shpe": torch.zeros(1, 3)},
        "did you mean 'shape'",
    ),
    "a missing channel": (PRODUCT, {"place": torch.zeros(1, 2)}, "lacks shape"),
    "a wrong shape": (euclidean((2,)), torch.zeros(5, 3), r"\(B, 2\), got \(5, 3\)"),
    "a wrong shape in a channel": (
        PRODUCT,
        {"place": torch.zeros(1, 3), "shape": torch.zeros(1, 3)},
        r"channel 'place'.*got \(1, 3\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_states_of_another_kind_are_refused(name):
    space, state, message = REFUSED[name]
    with pytest.raises(ShapeError, match=message) as raised:
        space.check(state)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("space", [euclidean((1, 4, 4)), PRODUCT], ids=["euclidean", "product"])
def test_descriptions_rebuild_the_space(space):
    again = Space.from_description(space.describe())
    assert again.describe() == space.describe()
    assert again.single == space.single
