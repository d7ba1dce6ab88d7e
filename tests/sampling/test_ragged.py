"""Sampling of crystals: anti-annealing, the number of atoms as a condition, and batches that do not matter."""

import json

import pytest
import torch

from fmwc.errors import ShapeError, UsageError
from fmwc.estimators import Linearised
from fmwc.flow import Channel, FlatTorus, Space
from fmwc.sampling import STEPPERS, Sampler, SamplingConfig, Uniform, sample
from tests.cells import field, present, small, space
from tests.conftest import mlp_field
from tests.options import arguments, reader
from tests.reference import integrate

PRODUCT = Space({"place": Channel((2,), FlatTorus(), "uniform"), "shape": Channel((3,)), "size": Channel((2, 2))})
ATOMS = torch.tensor([3, 1, 5, 2, 4, 1, 2, 2])
CHANNELS = ("type", "coord", "lattice")


def constant(x, t):
    """A constant velocity."""
    return {
        "place": torch.tensor([0.1, -0.2], dtype=x["place"].dtype).expand_as(x["place"]),
        "shape": torch.tensor([1.0, 2.0, -3.0], dtype=x["shape"].dtype).expand_as(x["shape"]),
        "size": torch.ones_like(x["size"]),
    }


def start(count=4):
    generator = torch.Generator().manual_seed(0)
    return {
        "place": torch.rand(count, 2, generator=generator, dtype=torch.float64),
        "shape": torch.randn(count, 3, generator=generator, dtype=torch.float64),
        "size": torch.randn(count, 2, 2, generator=generator, dtype=torch.float64),
    }


# ---- anti-annealing -------------------------------------------------------------------------------------------------


def pace(t, dt, slope):
    """Return 1 + s t, limited to (1 − t)/dt, but not below 1."""
    return min(1 + slope * t, max(1.0, (1 - t) / dt))


@pytest.mark.parametrize("slope", [1.0, 5.0, 100.0])
@pytest.mark.parametrize("steps", [1, 2, 7, 50])
def test_annealed_steps_do_not_overshoot(steps, slope):
    """For any slope, the distance to a known end decreases at every step and is zero at t = 1."""
    x0, end = torch.zeros(1, 2, dtype=torch.float64), torch.tensor([[1.0, -2.0]], dtype=torch.float64)

    def towards(x, t):
        return (end - x) / (1 - t)[:, None]

    run = sample(
        towards, x0=x0, steps=steps, confidence=None, config=SamplingConfig(anneal={"x": slope}, keep_states=True)
    )
    left = torch.stack([(end - x).norm() for x in run.states])
    assert bool((left.diff() <= 1e-12).all())
    torch.testing.assert_close(run.x, end)


@pytest.mark.parametrize("slope", [5.0, -0.5, 0.0])
@pytest.mark.parametrize("steps", [1, 4, 10])
def test_annealing_speeds_up_with_time(steps, slope):
    """On Euler's grid the end is x0 + v Σ pace(t_n) dt."""
    x0 = start()
    options = {"steps": steps, "space": PRODUCT, "confidence": None}
    run = sample(constant, **arguments(x0=x0, anneal={"shape": slope, "place": slope}, **options))
    plain = sample(constant, **arguments(x0=x0, **options))
    way = sum(pace(n / steps, 1 / steps, slope) for n in range(steps)) / steps
    v = constant(x0, 0)
    torch.testing.assert_close(run.x["shape"], x0["shape"] + way * v["shape"])
    off = FlatTorus().logmap(run.x["place"], x0["place"] + way * v["place"])
    torch.testing.assert_close(off, torch.zeros_like(off))
    assert torch.equal(run.x["size"], plain.x["size"])  # other channels are unchanged
    torch.testing.assert_close(plain.x["shape"], x0["shape"] + v["shape"])
    assert torch.equal(run.x["shape"], plain.x["shape"]) == (slope == 0 or steps == 1)
    assert torch.equal(run.grid, plain.grid)
    assert run.evaluations == plain.evaluations == steps


@pytest.mark.parametrize("stepper", STEPPERS)
def test_every_stepper_paces_each_of_its_evaluations(stepper):
    """The sampler follows pace(t) v(x, t). A two-stage stepper evaluates it at both of its times."""
    x0 = torch.randn(3, 2, dtype=torch.float64)
    times = [0.0, 0.25, 0.5, 0.75, 1.0]

    def velocity(x, t):
        return torch.sin(x) + t[:, None]

    run = sample(velocity, x0=x0, steps=4, confidence=None, config=SamplingConfig(stepper=stepper, anneal={"x": 3.0}))
    expected = integrate(lambda x, t: pace(float(t), 0.25, 3.0) * (torch.sin(x) + t), x0, times, stepper)
    torch.testing.assert_close(run.x, expected)
    plain = integrate(lambda x, t: torch.sin(x) + t, x0, times, stepper)
    assert not torch.allclose(run.x, plain, atol=1e-2)


def test_each_sample_is_paced_by_its_own_time():
    x0, begin = start(), torch.tensor([0.0, 0.25, 0.5, 0.75], dtype=torch.float64)
    anneal = {"shape": 4.0, "size": 4.0}
    run = Sampler(constant, SamplingConfig(controller=Uniform(2), space=PRODUCT, anneal=anneal, start=begin))(x0)
    h = (1 - begin) / 2
    way = h * (1 + 4 * begin).clamp_max(2.0) + h  # (1 − t)/h is 2 at the first step, and 1 at the last
    v = constant(x0, 0)
    torch.testing.assert_close(run.x["shape"], x0["shape"] + way[:, None] * v["shape"])
    torch.testing.assert_close(run.x["size"], x0["size"] + way[:, None, None])


def test_readings_are_of_the_velocity_without_annealing():
    made = mlp_field()
    x0 = torch.randn(3, 2)
    run = sample(made, x0=x0, steps=4, config=SamplingConfig(anneal={"x": 2.0}, keep_states=True))
    for n, t in enumerate((0.0, 0.25, 0.5, 0.75)):
        found = made.moments(run.states[n], t)
        torch.testing.assert_close(run.mean[n], found.mean)
        torch.testing.assert_close(run.var[n], found.var)
        torch.testing.assert_close(run.states[n + 1], run.states[n] + pace(t, 0.25, 2.0) * found.mean / 4)
    bare = sample(made, x0=x0, steps=4, confidence=None, config=SamplingConfig(anneal={"x": 2.0}))
    assert torch.equal(bare.x, run.x)


def test_annealing_of_a_space():
    x0 = start()
    paced = Space({**PRODUCT.channels, "shape": Channel((3,), anneal=4.0)})
    options = {"x0": x0, "steps": 5, "confidence": None}
    own = sample(constant, **arguments(space=paced, **options))
    said = sample(constant, **arguments(space=PRODUCT, anneal={"shape": 4.0}, **options))
    assert all(torch.equal(own.x[k], said.x[k]) for k in x0)
    plain = sample(constant, **arguments(space=PRODUCT, **options))
    for anneal in ({}, {"shape": 0.0}):  # only the given atoms exist
        found = sample(constant, **arguments(space=paced, anneal=anneal, **options))
        assert all(torch.equal(found.x[k], plain.x[k]) for k in x0)
    assert not torch.equal(own.x["shape"], plain.x["shape"])
    again = Space.from_description(json.loads(json.dumps(paced.describe())))
    assert {k: c.anneal for k, c in again.channels.items()} == {"place": 0.0, "shape": 4.0, "size": 0.0}


# ---- the number of atoms --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("atoms", [ATOMS, ATOMS.tolist(), ATOMS.numpy()], ids=["tensor", "list", "array"])
def test_crystals_have_the_given_numbers_of_atoms(atoms):
    run = sample(
        field(torch.float32),
        8,
        steps=3,
        cond={"atoms": atoms},
        config=SamplingConfig(anneal={"coord": 2.0}, keep_states=True),
    )
    for state in run.states:
        for channel in ("type", "coord"):
            assert not state[channel][~present(ATOMS)].any()
        assert bool((state["type"][present(ATOMS)] != 0).all())
        assert bool(((state["coord"] >= 0) & (state["coord"] < 1)).all())
        assert float(state["lattice"][:, :3].min()) >= 0.5
    assert torch.equal(run.x["coord"][ATOMS == 1], run.x0["coord"][ATOMS == 1])  # a single atom does not move
    assert torch.equal(run.cond["atoms"], ATOMS)
    assert torch.isfinite(run.score("integrated")).all()
    head = run.take(torch.arange(3))
    assert torch.equal(head.cond["atoms"], ATOMS[:3])


STRANGE = {
    "too few": ATOMS[:3],
    "more than there is room for": torch.tensor([2, 9, *[1] * 6]),
    "none": torch.tensor([2, 0, *[1] * 6]),
}


@pytest.mark.parametrize("name", STRANGE)
def test_invalid_numbers_of_atoms_are_refused(name):
    with pytest.raises((ShapeError, UsageError), match="atoms"):
        sample(field(torch.float32), 8, steps=2, cond={"atoms": STRANGE[name]})


# ---- batches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"confidence": None}, {}, {"confidence": Linearised(2)},
                                     {"transport": 2, "stepper": "heun"}], ids=str)  # fmt: skip
def test_results_do_not_depend_on_batches(options):
    made = field(torch.float32)
    options = {"steps": 4, "seed": 3, "anneal": {"coord": 1.0}, "cond": {"atoms": ATOMS}, **options}
    whole, split = (sample(made, 8, **arguments(batch=size, **options)) for size in (16384, 2))
    for name in CHANNELS:
        assert torch.equal(whole.x0[name], split.x0[name])
        torch.testing.assert_close(whole.x[name], split.x[name], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(whole.var[name], split.var[name], rtol=1e-3, atol=1e-6)
    if whole.transported is not None:
        torch.testing.assert_close(whole.transported.var, split.transported.var, rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(whole.transported.profile, split.transported.profile, rtol=1e-3, atol=1e-6)


def test_a_longer_run_starts_with_the_same_crystals():
    net = small(dtype=torch.float32)
    options = {"steps": 4, "space": space(), "confidence": None}
    short = sample(net, 3, **arguments(cond={"atoms": ATOMS[:3]}, **options))
    long = sample(net, 8, **arguments(cond={"atoms": ATOMS}, **options))
    for name in CHANNELS:
        torch.testing.assert_close(short.x[name], long.x[name][:3], rtol=1e-5, atol=1e-5)


def test_confidence_does_not_change_a_crystal():
    made = field(torch.float32)
    plain, sure, other = (
        sample(
            made, 8, steps=3, cond={"atoms": ATOMS}, confidence=reader(c), config=SamplingConfig(anneal={"coord": 2.0})
        )
        for c in (False, True, "diagonal")
    )
    for name in CHANNELS:
        assert torch.equal(sure.x[name], plain.x[name])
        assert torch.equal(other.x[name], plain.x[name])
