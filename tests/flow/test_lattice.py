"""The space of unit cells: flat, with positive lengths and its own noise distribution."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fmwc.flow import Channel, Lattice, Manifold, Space
from fmwc.randomness import Stream

MEAN, STD = (1.5754, 1.7017, 1.9782), (0.2444, 0.2653, 0.3536)


def cells(count=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = 1 + 9 * torch.rand(count, 3, generator=generator, dtype=torch.float64)
    return torch.cat([lengths, torch.randn(count, 3, generator=generator, dtype=torch.float64)], 1)


def stream(seed=0):
    return Stream(torch.Generator().manual_seed(seed))


@given(st.integers(0, 99))
def test_exp_and_log_are_inverse(seed):
    x, y, lattice = cells(seed=seed), cells(seed=seed + 100), Lattice()
    torch.testing.assert_close(lattice.expmap(x, lattice.logmap(x, y)), y)
    u = y - x
    torch.testing.assert_close(lattice.logmap(x, lattice.expmap(x, u)), u)
    assert torch.equal(lattice.proju(x, u), u)
    assert torch.equal(lattice.projx(x), x)
    assert isinstance(lattice, Manifold)


def test_velocity_is_the_derivative_of_the_path():
    space = Space({"x": Channel((6,), Lattice(), "own")})
    x0, x1 = cells(seed=1), cells(seed=2)
    t = torch.linspace(0.1, 0.9, 5, dtype=torch.float64)
    x_t, u = space.path(x0, x1, t)
    torch.testing.assert_close(x_t, x0 + t[:, None] * (x1 - x0))
    ahead, behind = space.path(x0, x1, t + 1e-5)[0], space.path(x0, x1, t - 1e-5)[0]
    torch.testing.assert_close((ahead - behind) / 2e-5, u)
    torch.testing.assert_close(space.path(x0, x1, torch.ones(5, dtype=torch.float64))[0], x1)


@pytest.mark.parametrize("options", [{}, {"mean": (0.5, 1.0, 1.5), "std": [0.1, 0.2, 0.3]}], ids=["own", "given"])
def test_noise_has_its_moments(options):
    """Lengths are log-normal with the given mean and deviation; angles are uniform in their range."""
    count = 40_000
    space = Space({"x": Channel((6,), Lattice(**options), "own")})
    drawn = space.noise(count, stream())
    assert drawn.shape == (count, 6)
    logarithm, place = drawn[:, :3].double().log(), drawn[:, 3:].double().sigmoid()
    mean, std = (torch.tensor(options.get(k, v), dtype=torch.float64) for k, v in (("mean", MEAN), ("std", STD)))
    assert bool(((logarithm.mean(0) - mean).abs() < 6 * std / count**0.5).all())
    assert bool(((logarithm.std(0) / std - 1).abs() < 6 / (2 * count) ** 0.5).all())
    z = (logarithm - mean) / std
    assert bool((z.pow(3).mean(0).abs() < 6 * (15 / count) ** 0.5).all())  # not skewed, like a normal distribution
    assert bool(((z.pow(4).mean(0) - 3).abs() < 6 * (96 / count) ** 0.5).all())
    # Kolmogorov's distance to the uniform: above 1.95/√n once in a thousand, above 3/√n once in 3·10⁷
    level = torch.arange(1, count + 1, dtype=torch.float64) / count
    assert float((place.sort(0).values - level[:, None]).abs().max()) < 3 / count**0.5
    both = torch.cat([z, (place - 0.5) * 12**0.5], 1)
    assert float((both.T @ both / count - torch.eye(6)).abs().max()) < 0.05  # all are independent


def test_noise_excludes_the_ends_of_the_range():
    class Ends(Stream):
        def uniform(self, like):
            value = torch.zeros_like(like)
            value[::2] = 1.0
            return value

    drawn = Lattice().noise(Ends(), torch.empty(4, 6))
    assert torch.isfinite(drawn).all()
    assert float(drawn[:, 3:].abs().max()) < 10
