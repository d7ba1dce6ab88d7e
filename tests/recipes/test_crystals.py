"""The recipe of crystals: the scales of its network, capacities, samples, and training with a time limit."""

import dataclasses
import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("pymatgen.core", exc_type=ImportError)

import fmwc.training
from fmwc.checkpoint import about, load
from fmwc.crystals.recipe import EVERY, SCORE, Mp20, _capacity
from fmwc.crystals.structures import decode, encode
from fmwc.data.batches import Rows
from fmwc.errors import StoppedError
from fmwc.estimators import Linearised
from fmwc.files import RUN
from fmwc.flow import FlatTorus
from fmwc.quantise import round_weights
from fmwc.randomness import Stream, derive
from fmwc.recipes import fit, fit_joint, fit_network
from fmwc.sampling import SamplingConfig, Schedule, read_with
from tests.options import reader, when
from tests.recipes.conftest import CPU, identical, weights

TINY = Mp20(
    hidden=16, layers=1, frequencies=4, time_features=8, iterations=6, batch=16, noise_steps=2, width=8, references=16,
    steps=4, save_every=4, data="prototypes",
)  # fmt: skip
CHANNELS = ("type", "coord", "lattice")


@pytest.fixture(autouse=True)
def _no_data_given(monkeypatch):
    monkeypatch.delenv("FMWC_DATA", raising=False)


@pytest.fixture(scope="module", params=["retrofit", "joint"])
def fitted(request, tmp_path_factory):
    recipe = dataclasses.replace(TINY, method=request.param)
    out = tmp_path_factory.mktemp(request.param) / "model"
    return recipe, fit(recipe, out, CPU), out


def same(a, b):
    return a.keys() == b.keys() == set(CHANNELS) and all(torch.equal(a[c], b[c]) for c in a)


# ---- the recipe -----------------------------------------------------------------------------------------------------


def test_rows_are_the_data_sorted_by_size():
    state, cond = TINY.rows()
    atoms = cond["atoms"]
    assert bool((atoms.diff() >= 0).all())
    plain, sizes = encode(TINY.crystals())
    assert not bool((sizes.diff() >= 0).all())  # the data are not sorted
    assert atoms.tolist() == sorted(sizes.tolist())
    order = sorted(range(len(sizes)), key=lambda i: int(sizes[i]))  # stable: keeps the order within a size
    assert same(state, {name: value[order] for name, value in plain.items()})
    here = decode(state, atoms, [TINY.crystals().names[i] for i in order])
    assert torch.equal(here.atoms, atoms)


def test_the_network_has_the_scales_of_the_data():
    """Recompute the statistics of lattices along their paths, and of the velocities of lattice and coordinates."""
    network = TINY.network()
    state, cond = TINY.rows()
    atoms, count = cond["atoms"], len(cond["atoms"])
    space = TINY.space().given(cond)
    randomness = Stream(torch.Generator().manual_seed(derive("scales")))
    t = randomness.uniform(torch.empty(count))
    x0 = space.noise(count, randomness)
    lattice = x0["lattice"] + t[:, None] * (state["lattice"] - x0["lattice"])
    torch.testing.assert_close(network.lattice_mean, lattice.mean(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(network.lattice_std, lattice.std(0), rtol=1e-4, atol=1e-4)
    ahead = state["lattice"] - x0["lattice"]
    torch.testing.assert_close(network.velocity_mean, ahead.mean(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(network.velocity_std, ahead.std(0), rtol=1e-4, atol=1e-4)
    squares = []
    for i, n in enumerate(atoms.tolist()):
        u = FlatTorus().logmap(x0["coord"][i, :n], state["coord"][i, :n])
        squares += (u - u.mean(0)).square().flatten().tolist()
    assert float(network.coord_std) == pytest.approx((sum(squares) / len(squares)) ** 0.5, rel=1e-4)
    assert network.sizes.tolist() == [atoms.tolist().count(n) for n in range(21)]
    logs = TINY.crystals().lengths.log()
    manifold = TINY.space().channels["lattice"].manifold
    assert manifold.mean == pytest.approx(logs.mean(0).tolist(), abs=6e-5)
    assert manifold.std == pytest.approx(logs.std(0).tolist(), abs=6e-5)


@pytest.mark.parametrize("batch", [1, 16, 197])
def test_no_batch_exceeds_the_capacity(batch):
    atoms = TINY.rows()[1]["atoms"]
    source, generator = Rows(atoms, {}, batch, True, CPU), torch.Generator().manual_seed(0)
    rows, pairs = _capacity(atoms, batch)
    for _ in range(400):
        drawn = source.draw(generator)[0]
        assert int(drawn.sum()) <= rows
        assert int((drawn * (drawn - 1)).sum()) < pairs  # one additional pair is a placeholder
    assert dataclasses.replace(TINY, batch=batch).network().static_capacity[batch] == (rows, pairs)
    assert not dataclasses.replace(TINY, batch=batch, stratified=False).network().static_capacity


def test_the_network_depends_on_the_seed_only():
    state = torch.get_rng_state()
    first = weights(TINY.network())
    assert torch.equal(torch.get_rng_state(), state)
    torch.randn(3)
    assert identical(weights(TINY.network()), first)
    assert identical(weights(dataclasses.replace(TINY, method="joint", batch=8, lr=1e-3).network()), first)
    other = weights(dataclasses.replace(TINY, seed=1).network())
    assert not any(torch.equal(other[k], v) for k, v in first.items() if v.ndim > 1)


# ---- what is drawn --------------------------------------------------------------------------------------------------


def test_crystals_depend_neither_on_the_batch_size_nor_on_their_number():
    field = TINY.attach(TINY.network())
    whole, split, longer = (
        TINY.draw(field, n, 3, config=SamplingConfig(batch=b)) for n, b in ((30, 30), (30, 7), (45, 45))
    )
    assert torch.equal(whole.cond["atoms"], split.cond["atoms"])
    assert torch.equal(whole.cond["atoms"], longer.cond["atoms"][:30])
    for other in (split, longer.take(torch.arange(30))):
        assert same(whole.x0, other.x0)
        for c in CHANNELS:
            torch.testing.assert_close(whole.x[c], other.x[c], rtol=1e-5, atol=1e-5)
        assert torch.equal(decode(whole.x, whole.cond["atoms"]).numbers, decode(other.x, other.cond["atoms"]).numbers)
        torch.testing.assert_close(whole.score(SCORE), other.score(SCORE), rtol=1e-4, atol=1e-6)
    assert not torch.equal(TINY.draw(field, 30, 4).x["lattice"], whole.x["lattice"])


def test_crystals_do_not_depend_on_the_estimator():
    field = TINY.attach(TINY.network())
    plain = TINY.draw(field.network, 20, 3, confidence=None)
    assert len(plain.times) == 0
    for confidence in (Linearised(1), "diagonal"):
        run = TINY.draw(field, 20, 3, confidence=reader(confidence), schedule=Schedule.every(2))
        assert same(run.x, plain.x)
        assert run.times[:, 0].tolist() == [0.25, 0.75]


def test_sizes_have_the_frequencies_of_the_data():
    network, atoms = TINY.network(), TINY.rows()[1]["atoms"]
    drawn = network.draw_sizes(20_000, 1)
    share = torch.bincount(atoms, minlength=21).double() / len(atoms)
    found = torch.bincount(drawn, minlength=21).double() / len(drawn)
    error = (share * (1 - share) / len(drawn)).sqrt()
    assert bool(((found - share).abs() <= 5 * error).all())
    assert not bool(found[share == 0].any())
    run = TINY.draw(network, 25, 9, confidence=None)
    assert torch.equal(run.cond["atoms"], network.draw_sizes(25, derive(9, "atoms")))
    assert torch.equal(decode(run.x, run.cond["atoms"]).atoms, run.cond["atoms"])


# ---- fitting --------------------------------------------------------------------------------------------------------


def test_a_loaded_checkpoint_draws_the_same_crystals(fitted):
    recipe, field, out = fitted
    again = load(out)
    assert identical(weights(again), weights(field))
    assert json.dumps(again.space.describe()) == json.dumps(recipe.space().describe())
    first, second = (recipe.draw(f, 20, 7, schedule=when(EVERY), confidence=Linearised(1)) for f in (field, again))
    assert same(first.x, second.x)
    assert same(first.var, second.var)
    assert torch.equal(first.score(SCORE), second.score(SCORE))
    first, second = (recipe.draw(f, 20, 7) for f in (field, again))  # by the score chosen by the pilot run
    assert first.withheld == second.withheld
    torch.testing.assert_close(first.score(), second.score())


def test_the_reference_is_fitted_to_crystals_of_a_separate_seed(fitted):
    """The pilot run tried the echo, which is not better than chance on an almost untrained network."""
    recipe, field, out = fitted
    for reference in (field.reference, load(out).reference):
        assert reference.score == "echo + 0.5 spread@0.6-1"
        assert reference.read_with == read_with(None, 4, "euler")
        assert reference.checks.keys() == {"echo"}
        assert reference.quantiles.shape == (1001,)
        assert reference.withheld
    kept = field.reference.quantiles
    again, _ = recipe.reference(field)
    assert torch.equal(again.quantiles, kept)
    other, _ = dataclasses.replace(recipe, seed=1).reference(field)
    assert not torch.equal(other.quantiles, kept)
    field.reference = again
    run = recipe.draw(field, 5, 1)
    assert run.confidence is None
    assert "no evidence" in run.withheld
    assert sorted(run.rank.tolist()) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8])


def test_weights_are_quantised(fitted):
    _, field, out = fitted
    before = weights(field)
    round_weights(field)
    assert identical(weights(field), before)
    assert list(about(out)["files"]) == ["model.safetensors"]
    assert {p.name for p in out.iterdir()} == {"model.safetensors", "recipe.json", RUN}
    kinds = {name: tensor.dtype for name, tensor in load_file(out / "model.safetensors").items()}
    for name, value in before.items():
        assert kinds[name] == (torch.int8 if value.ndim > 1 else value.dtype)


def test_a_retrofit_does_not_change_the_crystals_of_the_flow(tmp_path):
    network = TINY.network()
    first = weights(network)
    fit_network(TINY, network)
    assert not identical(weights(network), first)
    field = fit(TINY, tmp_path / "model", CPU)
    assert identical(weights(field.network), weights(network))
    assert not identical(weights(field.noise), weights(TINY.attach(TINY.network()).noise))
    flow = TINY.draw(network, 20, 2, confidence=None)
    assert same(TINY.draw(field, 20, 2, confidence=Linearised(2)).x, flow.x)
    joint = fit(dataclasses.replace(TINY, method="joint"), tmp_path / "joint", CPU)
    assert not torch.equal(TINY.draw(joint, 20, 2, confidence=None).x["type"], flow.x["type"])


# ---- stopped by the clock -------------------------------------------------------------------------------------------


def field_of(recipe):
    return recipe.attach(recipe.network())


@pytest.mark.parametrize(
    ("build", "train"),
    [(Mp20.network, fit_network), (field_of, fit_joint)],
    ids=["flow", "joint"],
)
@pytest.mark.parametrize("seconds", [2, 6])
def test_training_stopped_by_the_time_limit_resumes_to_the_same_weights(build, train, seconds, tmp_path, monkeypatch):
    undisturbed = build(TINY)
    train(TINY, undisturbed)
    point = tmp_path / "point.resume"
    ticks = itertools.count()
    monkeypatch.setattr(
        fmwc.training, "time", SimpleNamespace(monotonic=lambda: next(ticks))
    )  # each reading of the clock adds a second
    stopped = build(TINY)
    with pytest.raises(StoppedError, match="resume"):
        train(dataclasses.replace(TINY, minutes=seconds / 60), stopped, resume=point)
    assert not identical(weights(stopped), weights(undisturbed))
    assert point.exists()
    monkeypatch.undo()
    resumed = build(TINY)
    train(TINY, resumed, resume=point)
    assert identical(weights(resumed), weights(undisturbed))


def test_a_given_flow_is_not_trained_further(tmp_path):
    first = fit(TINY, tmp_path / "first", CPU)
    given = dataclasses.replace(TINY, flow=str(tmp_path / "first"), seed=7)
    second = fit(given, tmp_path / "second", CPU)
    assert identical(weights(second.network), weights(first.network))
    assert not identical(weights(second.noise), weights(first.noise))
