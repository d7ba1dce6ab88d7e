"""The sampler: results do not depend on batches or devices, and confidence does not change a sample."""

import importlib
from dataclasses import replace

import pytest
import torch
from torch import nn

from fmwc.errors import NotFiniteError, ShapeError, UnknownNameError, UsageError
from fmwc.estimators import ESTIMATORS, Diagonal, Linearised, MonteCarlo
from fmwc.field import attach
from fmwc.networks import MLP
from fmwc.randomness import BLOCK
from fmwc.sampling import (
    DECODERS,
    STEPPERS,
    SamplingConfig,
    default_estimator,
    noise,
    sample,
)
from fmwc.sampling.confidence import PROBES
from fmwc.sampling.config import SMALL
from fmwc.sampling.sampler import PROJECTIONS
from fmwc.state import channels
from tests.conftest import conv_field, dict_field, mlp_field
from tests.options import arguments, reader
from tests.reference import integrate

READINGS = [True, *(n for n in ESTIMATORS if n != "monte_carlo"), MonteCarlo(3), Linearised(2)]
FIELDS = {"mlp": mlp_field, "conv": conv_field, "product": dict_field}


def equal(a, b):
    return all(torch.equal(channels(a)[k], channels(b)[k]) for k in channels(a) | channels(b))


def close(a, b):
    for k in channels(a) | channels(b):
        torch.testing.assert_close(channels(a)[k], channels(b)[k], rtol=1e-4, atol=1e-5)


# ---- confidence does not change a sample ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stepper", "confidence"), [*(("euler", c) for c in READINGS), *((s, True) for s in STEPPERS if s != "euler")]
)
@pytest.mark.parametrize("name", FIELDS)
def test_with_and_without_confidence_bit_for_bit(name, stepper, confidence):
    field = FIELDS[name]()
    plain = sample(field, 5, steps=6, confidence=None, config=SamplingConfig(stepper=stepper))
    sure = sample(field, 5, steps=6, confidence=reader(confidence), config=SamplingConfig(stepper=stepper))
    assert equal(sure.x, plain.x)
    assert sure.evaluations == plain.evaluations
    assert all(v.shape[:2] == (6, 5) for v in channels(sure.var).values())
    assert len(plain.times) == 0


@pytest.mark.parametrize("name", FIELDS)
def test_a_plain_network_gives_the_same_samples(name):
    field = FIELDS[name]()
    expected = sample(field, 5, steps=6)
    network, space = field.detach(), field.space
    assert equal(sample(network, 5, steps=6, confidence=None, config=SamplingConfig(space=space)).x, expected.x)


def test_readings_are_the_velocity_and_its_variance_at_each_state(mlp):
    run = sample(mlp, 4, steps=5, config=SamplingConfig(keep_states=True))
    for n in range(5):
        found = mlp.moments(run.states[n], run.grid[n])
        torch.testing.assert_close(run.mean[n], found.mean)
        torch.testing.assert_close(run.var[n], found.var)
        torch.testing.assert_close(run.states[n + 1], run.states[n] + run.mean[n] / 5)
    assert torch.equal(run.states[0], run.x0)
    assert torch.equal(run.states[-1], run.x)
    assert sample(mlp, 4, steps=5).states is None


# ---- what is read unless told ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [1, SMALL, SMALL + 1, 3 * SMALL])
def test_small_states_are_read_exactly_and_large_ones_with_probes(dim):
    field = mlp_field(dim=dim)
    run = sample(field, 3, steps=2, transport=True)
    few = dim <= SMALL
    assert default_estimator(field.space) == (Linearised() if few else Linearised(PROBES))
    assert run.var.shape == (2, 3, dim if few else 1)
    assert run.transported.var.shape == (3, dim if few else PROJECTIONS)
    expected = sample(field, 3, steps=2, confidence=Linearised(None if few else PROBES))
    assert torch.equal(run.var, expected.var)
    assert sample(field, 3, steps=2, transport=True, config=SamplingConfig(projections=5)).transported.var.shape == (
        3,
        5,
    )
    assert sample(field, 3, steps=2).transported is None


def test_probes_of_images_estimate_the_exact_score(conv):
    exact = sample(conv, 6, steps=8)
    rough = sample(conv, x0=exact.x0, steps=8, confidence=Linearised(200))
    torch.testing.assert_close(rough.score("integrated"), exact.score("integrated"), rtol=0.1, atol=0)


class Still(nn.Module):
    def forward(self, x, t):
        return torch.zeros_like(x)


def still(weights_on=None, says=None):
    net = Still()
    if weights_on:
        net.weight = nn.Parameter(torch.empty(1, device=weights_on))
    if says:
        net.device = says
    return net


LIVES = {
    "a network": (lambda: still("meta"), "meta"),
    "a network without weights": (still, "cpu"),
}


@pytest.mark.parametrize("name", LIVES)
def test_noise_is_drawn_on_the_device_of_the_network(name, monkeypatch):
    build, device = LIVES[name]
    asked = []

    def made(space, count, seed, device="cpu", **_):
        asked.append(torch.device(device))
        return noise(space, count, seed)

    monkeypatch.setattr(importlib.import_module("fmwc.sampling.sampler"), "noise", made)
    sample(build(), 3, steps=2, confidence=None, config=SamplingConfig(space=(2,)))
    assert asked == [torch.device(device)]


def test_plain_networks_have_no_confidence():
    for options in ({}, {"confidence": Diagonal()}, {"confidence": None, "transport": True}):
        with pytest.raises(UsageError, match="confidence"):
            sample(MLP(2, 8, 1, 4), 3, **arguments(steps=2, space=(2,), **options))


# ---- batches and seeds ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"decoder": "stochastic"}, {"confidence": Linearised(2)}, {"transport": 2}],
    ids=str,
)
@pytest.mark.parametrize("name", FIELDS)
def test_results_do_not_depend_on_batches(name, options):
    field, count = FIELDS[name](), 20
    whole = sample(field, count, **arguments(steps=4, batch=64, **options))
    split = sample(field, count, **arguments(steps=4, batch=7, **options))
    assert equal(whole.x0, split.x0)
    close(whole.x, split.x)
    close(whole.var, split.var)
    close(whole.mean, split.mean)
    assert torch.equal(whole.times, split.times)
    assert whole.evaluations == split.evaluations
    if whole.transported is not None:
        torch.testing.assert_close(whole.transported.var, split.transported.var, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(whole.transported.profile, split.transported.profile, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("name", FIELDS)
def test_a_longer_run_starts_with_the_same_samples(name, decoder):
    field = FIELDS[name]()
    short, long = (sample(field, n, steps=3, confidence=None, config=SamplingConfig(decoder=decoder)) for n in (6, 15))
    head = long.take(torch.arange(6))
    assert equal(short.x0, head.x0)
    close(short.x, head.x)


def test_a_longer_run_starts_with_the_same_samples_across_blocks(mlp):
    short, long = noise(mlp.space, BLOCK + 3, seed=2), noise(mlp.space, 2 * BLOCK + 9, seed=2)
    assert torch.equal(short, long[: BLOCK + 3])
    assert not torch.equal(short[:3], short[BLOCK : BLOCK + 3])
    whole = sample(mlp, BLOCK + 6, steps=1, confidence=None, config=SamplingConfig(decoder="stochastic"))
    split = sample(mlp, BLOCK + 6, steps=1, confidence=None, config=SamplingConfig(decoder="stochastic", batch=700))
    close(whole.x, split.x)


def test_results_depend_on_the_seed(mlp):
    first = sample(mlp, 5, steps=3, seed=1, config=SamplingConfig(decoder="stochastic"))
    assert torch.equal(first.x, sample(mlp, 5, steps=3, seed=1, config=SamplingConfig(decoder="stochastic")).x)
    other = sample(mlp, 5, steps=3, seed=2, config=SamplingConfig(decoder="stochastic"))
    assert not torch.equal(first.x0, other.x0)
    assert (first.seed, other.seed) == (1, 2)
    again = sample(mlp, x0=first.x0, steps=3, seed=2, config=SamplingConfig(decoder="stochastic"))
    assert not torch.equal(again.x, first.x)
    state = torch.get_rng_state()
    sample(mlp, 5, steps=3)
    assert torch.equal(torch.get_rng_state(), state)


def test_progress_and_conditions_follow_the_batches():
    class Conditional(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.goal = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x, t, goal, scale, name):
            assert name == "anything"
            assert len(goal) == len(x)
            return (self.goal(goal) - self.layer(x)) * scale

    field = attach(Conditional(), space=(2,))
    goal, done = torch.randn(10, 2), []
    cond = {"goal": goal, "scale": torch.tensor(0.5), "name": "anything"}
    split = sample(field, 10, steps=3, progress=done.append, transport=True, cond=cond, config=SamplingConfig(batch=4))
    assert done == [4, 4, 2]
    close(split.x, sample(field, 10, steps=3, cond=cond).x)
    with torch.inference_mode():  # a condition created in inference mode has no derivatives
        inside = sample(field, 10, steps=3, transport=True, cond={**cond, "goal": goal + 0})
    torch.testing.assert_close(inside.transported.var, split.transported.var, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("rows", [9, 11])
def test_conditions_of_another_length_are_refused(rows):
    config = SamplingConfig(space=(2,))
    with pytest.raises(ShapeError, match="goal"):
        sample(lambda x, t, goal: goal - x, 10, confidence=None, cond={"goal": torch.zeros(rows, 2)}, config=config)


# ---- where it starts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stepper", STEPPERS)
def test_samples_may_start_at_different_times(mlp, stepper):
    x0, starts = torch.randn(4, 2), torch.tensor([0.0, 0.3, 0.55, 0.9])
    options = {"steps": 5, "stepper": stepper, "transport": True}
    together = sample(mlp, **arguments(x0=x0, start=starts, **options))
    for i in range(4):
        alone = sample(mlp, **arguments(x0=x0[i : i + 1], start=float(starts[i]), **options))
        close(together.x[i : i + 1], alone.x)
        close(together.var[:, i : i + 1], alone.var)
        torch.testing.assert_close(together.grid[:, i], alone.grid[:, 0])
        torch.testing.assert_close(together.transported.var[i], alone.transported.var[0], rtol=1e-4, atol=1e-7)
    assert together.grid.shape == (6, 4)
    assert bool((together.grid[-1] == 1).all())
    split = sample(mlp, **arguments(x0=x0, start=starts, batch=3, **options))
    close(split.x, together.x)


def test_x0_is_the_start(mlp):
    x0 = torch.randn(4, 2)
    run = sample(mlp, x0=x0, steps=3)
    assert torch.equal(run.x0, x0)
    assert len(run) == 4
    expected = integrate(lambda x, t: mlp(x, torch.full((4,), t)), x0, [0, 1 / 3, 2 / 3, 1], "euler")
    torch.testing.assert_close(run.x, expected.detach())


# ---- what it costs --------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.calls = MLP(2, 8, 1, 4), 0

    def forward(self, x, t):
        self.calls += 1
        return self.inner(x, t)


@pytest.mark.parametrize("confidence", [False, True])
@pytest.mark.parametrize("budget", [1, 3, 8])
@pytest.mark.parametrize("stepper", STEPPERS)
def test_budget_is_spent_exactly(stepper, budget, confidence):
    field = attach(Counting(), space=(2,), width=4)
    sample(field, 3, steps=1)  # the first reading of a batch of this size also proves whose rows layers see
    field.network.calls = 0
    run = sample(field, 3, confidence=reader(confidence), config=SamplingConfig(evaluations=budget, stepper=stepper))
    assert run.evaluations == budget
    assert field.network.calls == budget  # reading the linearised variance takes no additional evaluation
    assert bool((run.grid[-1] == 1).all())
    each = STEPPERS[stepper].evaluations
    assert len(run.grid) - 1 == budget // each + budget % each


def test_odd_budget_ends_with_an_euler_step(mlp):
    x0 = torch.randn(3, 2)
    found = sample(mlp, x0=x0, config=SamplingConfig(evaluations=3, stepper="heun")).x
    half = integrate(lambda x, t: mlp(x, torch.full((3,), t)), x0, [0, 0.5], "heun")
    expected = integrate(lambda x, t: mlp(x, torch.full((3,), t)), half, [0.5, 1], "euler")
    torch.testing.assert_close(found, expected.detach())


# ---- decoders -------------------------------------------------------------------------------------------------------


class Constant(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        self.layer.weight.data.fill_(1.0)

    def forward(self, x, t):
        return self.layer(torch.ones_like(x))


DECODED = {"map": 0, "stochastic": 1, "mean5": 1 / 5}  # the remaining share of the variance of the noise


@pytest.mark.parametrize("decoder", DECODED)
def test_decoders_average_the_noise(decoder):
    """One step of a unit velocity with α = e⁻²: the end is x0 + 1 with variance α, α/5, or none."""
    field, count = attach(Constant(), space=(1,), initial_log_alpha=-2.0), 8000
    x = sample(field, x0=torch.zeros(count, 1), steps=1, confidence=None, config=SamplingConfig(decoder=decoder)).x
    var = DECODED[decoder] * torch.tensor(-2.0).exp().item()
    assert x.mean().item() == pytest.approx(1, abs=6 * (var / count) ** 0.5 + 1e-6)
    assert x.var().item() == pytest.approx(var, rel=6 * (2 / count) ** 0.5, abs=1e-9)


# ---- products -------------------------------------------------------------------------------------------------------


def test_a_product_is_sampled_channel_by_channel(product):
    run = sample(product, 8, steps=6, config=SamplingConfig(keep_states=True))
    assert set(run.x) == {"place", "shape"}
    assert bool(((run.x["place"] >= 0) & (run.x["place"] < 1)).all())
    for n in range(6):
        moments = product.moments(run.states[n], run.grid[n])
        for name in run.x:
            torch.testing.assert_close(run.var[name][n], moments.var[name])
        here, after = run.states[n], run.states[n + 1]
        torch.testing.assert_close(after["shape"], here["shape"] + moments.mean["shape"] / 6)
        torch.testing.assert_close(after["place"], torch.remainder(here["place"] + moments.mean["place"] / 6, 1))
    torch.testing.assert_close(run.std, (run.var["place"].sum(2) + run.var["shape"].sum(2)).sqrt())
    assert run.score("peak", channel="place").shape == (8,)


# ---- refusals -------------------------------------------------------------------------------------------------------

X0 = torch.zeros(4, 2)
REFUSED = {
    "no count": ({}, UsageError, "number"),
    "two counts": ({"count": 3, "x0": X0}, UsageError, "count"),
    "a wrong shape": ({"x0": torch.zeros(4, 3)}, ShapeError, "shape"),
    "NaN in x0": ({"x0": torch.full((4, 2), float("nan"))}, NotFiniteError, "NaN"),
    "two budgets": ({"x0": X0, "steps": 3, "evaluations": 3}, UsageError, "one of"),
    "no steps": ({"x0": X0, "steps": 0}, UsageError, "step"),
    "a late start": ({"x0": X0, "start": 1.0}, UsageError, "start"),
    "stepper": ({"x0": X0, "stepper": "heunn"}, UnknownNameError, "heun"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name, mlp):
    options, error, message = REFUSED[name]
    with pytest.raises(error, match=message) as raised:
        sample(mlp, **arguments(**options))
    assert "\n" not in str(raised.value)


def test_a_broken_weight_is_named(mlp):
    with torch.no_grad():
        mlp.network.layers[1].weight[0, 0] = float("nan")
    with pytest.raises(NotFiniteError, match="weight"):
        sample(mlp, 3, steps=2)


def test_a_diverging_flow_is_an_error():
    with pytest.raises(NotFiniteError, match="sampled"):
        sample(lambda x, t: x.exp().exp() * 1e30, x0=torch.ones(2, 2) * 3, confidence=None)


def test_on_step_sees_every_state_and_changes_nothing(mlp):
    seen = {}
    how = {"steps": 5, "seed": 3}
    config = SamplingConfig(
        batch=4, keep_states=True, on_step=lambda first, *now: seen.setdefault(first, []).append(now)
    )
    run, plain = sample(mlp, 6, **how, config=config), sample(mlp, 6, **how, config=replace(config, on_step=None))
    assert torch.equal(run.x, plain.x)
    assert torch.equal(run.var, plain.var)
    assert seen.keys() == {0, 4}
    for step in range(5):
        times, states = (torch.cat(parts) for parts in zip(seen[0][step], seen[4][step], strict=True))
        assert torch.equal(times, run.grid[step + 1])
        assert torch.equal(states, run.states[step + 1])
