"""Echo, contest and nearest training points against closed forms, and their invariances."""

import math

import pytest
import torch
from torch import nn

import fmwc
from fmwc.checks import Nearest, RowEcho, check, run_checks
from fmwc.checks.evidence import renoised, residuals
from fmwc.flow import Channel, FlatTorus, Space, euclidean
from fmwc.sampling import SamplingConfig
from fmwc.state import select


class Gaussians(nn.Module):
    """The exact velocity of a flow to N(mean of the class, σ²); counts its evaluations."""

    def __init__(self, means: torch.Tensor, sigma: float = 0.1) -> None:
        super().__init__()
        self.means, self.sigma = means, sigma
        self.evaluated = 0

    def forward(self, x, t, y):
        self.evaluated += len(x)
        t = t[:, None]
        mean, var = self.means[y], t**2 * self.sigma**2 + (1 - t) ** 2
        # E[x1 − x0 | x_t] of jointly Gaussian x1, x0.
        return mean + (t * self.sigma**2 - (1 - t)) / var * (x - t * mean)


MEANS = torch.tensor([[2.0, 0.0], [-2.0, 0.0], [0.0, 2.0], [0.0, -2.0]])


def exact(x0, x1, t, mean, sigma=0.1):
    """Return (v − u)² per number in closed form."""
    x_t = t * x1 + (1 - t) * x0
    v = mean + (t * sigma**2 - (1 - t)) / (t**2 * sigma**2 + (1 - t) ** 2) * (x_t - t * mean)
    return (v - (x1 - x0)).square().mean(1)


def test_residuals_match_the_closed_form_of_a_gaussian_flow():
    g = torch.Generator().manual_seed(0)
    x0, x1 = (torch.randn(64, 2, generator=g) for _ in range(2))
    y, t = torch.arange(64) % 4, torch.rand(64, generator=g) * 0.9
    found = residuals(Gaussians(MEANS), euclidean((2,)), x0, x1, t, {"y": y})
    assert found.shape == (1, 64)
    torch.testing.assert_close(found[0], exact(x0, x1, t[:, None], MEANS[y]), rtol=1e-4, atol=1e-5)


def test_expected_residual_is_the_posterior_variance():
    """For x1 ~ the data, E‖v − u‖² per number is the variance of x1 − x0 given x_t: σ² / (t²σ² + (1 − t)²)."""
    g = torch.Generator().manual_seed(1)
    count, sigma, t = 40_000, 0.5, 0.6
    x1 = MEANS[0] + sigma * torch.randn(count, 2, generator=g)
    net, y = Gaussians(MEANS, sigma), torch.zeros(count, dtype=torch.long)
    x0 = torch.randn(count, 2, generator=g)
    r = residuals(net, euclidean((2,)), x0, x1, torch.full((count,), t), {"y": y})[0].mean()
    expected = sigma**2 / (t**2 * sigma**2 + (1 - t) ** 2)
    assert abs(float(r) - expected) < 0.02 * expected


def test_contest_names_the_class_of_a_sample():
    y = torch.arange(200) % 4
    x = MEANS[y] + 0.1 * torch.randn(200, 2, generator=torch.Generator().manual_seed(2))
    right = check(Gaussians(MEANS), x, {"y": y}, evaluations=16)
    assert right.evidence == "contest"
    assert bool((right.score < 0).all())
    assert bool((right.margin > 0).all())
    wrong = check(Gaussians(MEANS), x, {"y": (y + 1) % 4}, evaluations=16, conventions=False)
    assert bool((wrong.score > 0).all())
    assert torch.equal(wrong.rival, y)


def test_contest_detects_a_flow_that_mislabels_one_class():
    """The network draws class 1 if class 0 is requested; the flow of class 1 explains those samples better."""
    swapped = Gaussians(MEANS)
    y = torch.arange(400) % 4
    drawn = fmwc.sample(
        Gaussians(MEANS[[1, 1, 2, 3]]), 400, cond={"y": y}, confidence=None, steps=20, config=SamplingConfig(space=(2,))
    ).x
    assert float((drawn[y == 0] - MEANS[1]).norm(dim=1).mean()) < 0.5
    found = check(swapped, drawn, {"y": y}, evaluations=16, conventions=False)
    assert bool((found.score[y == 0] > 0).all())
    assert bool((found.rival[y == 0] == 1).all())
    assert bool((found.score[y == 2] < 0).all())


@pytest.mark.parametrize("evaluations", [4, 7, 10, 16, 40])
def test_evaluations_are_counted_and_within_the_budget(evaluations):
    y = torch.arange(24) % 4
    for classes in (4, 2):
        net = Gaussians(MEANS)
        found = check(net, MEANS[y % classes], {"y": y % classes}, evaluations=evaluations, conventions=False)
        assert net.evaluated == 24 * found.evaluations <= 24 * evaluations
    net = Gaussians(MEANS)
    found = check(net, MEANS[y], {"y": y}, evaluations=evaluations, evidence="echo", conventions=False)
    assert net.evaluated == 24 * found.evaluations <= 24 * evaluations


@pytest.mark.parametrize("evidence", ["echo", "contest"])
def test_scores_do_not_depend_on_batch_or_order(evidence):
    y = torch.arange(50) % 4
    x = MEANS[y] + 0.3 * torch.randn(50, 2, generator=torch.Generator().manual_seed(3))
    options = {"evidence": evidence, "evaluations": 16, "conventions": False, "rivals": {"y": 4}}
    options = {k: v for k, v in options.items() if evidence == "contest" or k != "rivals"}
    whole = check(Gaussians(MEANS), x, {"y": y}, **options)
    small = check(Gaussians(MEANS), x, {"y": y}, batch=7, **options)
    torch.testing.assert_close(whole.score, small.score)
    later = check(Gaussians(MEANS), x[20:], {"y": y[20:]}, first=20, **options)
    torch.testing.assert_close(later.score, whole.score[20:])


def test_absent_rows_do_not_count():
    class Still(nn.Module):
        def forward(self, x, t, atoms):
            return torch.zeros_like(x)

    def score(rows):
        space = Space({"x": Channel((rows, 3), rows="atoms")})
        x = torch.zeros(5, rows, 3)
        x[:, :2] = torch.arange(30.0).reshape(5, 2, 3) / 30
        own = space.given({"atoms": torch.full((5,), 2)})
        x0 = torch.zeros(5, rows, 3)
        return residuals(Still(), own, x0, x, torch.full((5,), 0.5), {"atoms": torch.full((5,), 2)})

    torch.testing.assert_close(score(4), score(9))


class Halfway(nn.Module):
    """A network whose velocity in channel `x` is zero, and in channel `y` that of the path to 0."""

    def forward(self, x, t, atoms):
        return {"x": torch.zeros_like(x["x"]), "y": -x["y"] / (1 - t[:, None, None])}


def test_the_echo_of_each_row_matches_its_closed_form():
    space = Space({"x": Channel((4, 3), rows="atoms"), "y": Channel((4, 2), rows="atoms")})
    x1, cond = {"x": torch.randn(6, 4, 3), "y": torch.randn(6, 4, 2)}, {"atoms": torch.tensor([2, 3, 4, 1, 4, 2])}
    own = space.given(cond)
    x1 = {name: value * own.present[name] for name, value in x1.items()}
    t = 0.75
    found = RowEcho((t,))(Halfway(), space, x1, cond, seed=5, first=0).score
    x0, _, _ = renoised(own, x1, t, 5)
    x = (x1["x"] - x0["x"]).square().mean(2).sqrt()  # v − u = −(x1 − x0)
    y = (x1["y"] / (1 - t)).square().mean(2).sqrt()  # v − u = −x_t / (1 − t) − (x1 − x0) = −x1 / (1 − t)
    present = torch.arange(4) < cond["atoms"][:, None]
    torch.testing.assert_close(found[present], (x * y).sqrt()[present])
    assert bool((found[~present] == 0).all())
    later, atoms = select(x1, slice(3, 6)), {"atoms": cond["atoms"][3:]}
    half = run_checks({"row echo": RowEcho((t,))}, Halfway(), space, later, atoms, 5, 3)
    torch.testing.assert_close(half["row echo"], found[3:])


def test_distance_on_a_torus_is_periodic():
    space = Space({"x": Channel((1,), FlatTorus(), "uniform")})
    near = Nearest(torch.tensor([[math.sin(0.0), math.cos(0.0)]]) / (2 * math.pi))
    found = near(None, space, torch.tensor([[0.02], [0.98], [0.5]]), {}, 0, 0).score
    assert float(found[0]) == pytest.approx(float(found[1]), abs=1e-4)
    assert float(found[2]) > float(found[0])


def test_nearest_points_of_the_own_class_lower_the_score():
    points = torch.cat([MEANS[0] + 0.01 * torch.randn(20, 2), MEANS[1] + 0.01 * torch.randn(20, 2)])
    labels = torch.cat([torch.zeros(20), torch.ones(20)]).long()
    near = Nearest(points, labels, "y")
    own = near(None, euclidean((2,)), MEANS[:1], {"y": torch.tensor([0])}, 0, 0).score
    other = near(None, euclidean((2,)), MEANS[:1], {"y": torch.tensor([1])}, 0, 0).score
    assert float(other) > float(own)


def test_sample_runs_the_same_check():
    y = torch.arange(40) % 4
    net = Gaussians(MEANS)
    run = fmwc.sample(net, 40, cond={"y": y}, confidence=None, check=16, steps=10, config=SamplingConfig(space=(2,)))
    alone = check(net, run.x, {"y": y}, evaluations=16, conventions=False)
    torch.testing.assert_close(run.evidence["contest"], alone.score)
    assert torch.equal(run.evidence["rival"], alone.rival)
    split = fmwc.sample(
        net, 40, cond={"y": y}, confidence=None, check=16, steps=10, config=SamplingConfig(space=(2,), batch=9)
    )
    torch.testing.assert_close(split.evidence["contest"], run.evidence["contest"])
