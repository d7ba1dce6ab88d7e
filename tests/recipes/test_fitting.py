"""Training by a recipe into a checkpoint, also after interruptions."""

import dataclasses

import pytest
import torch

from fmwc.checkerboard.recipe import Checkerboard
from fmwc.checkpoint import about, load
from fmwc.errors import CheckpointError, DataError
from fmwc.files import RUN, WORK
from fmwc.mnist.recipe import Mnist, labels
from fmwc.recipes import fit, fit_network
from fmwc.sampling import read_with, sample
from tests.recipes.conftest import BOARD, CPU, identical, weights


@pytest.fixture
def unreferenced(monkeypatch):
    """Skip the reference scores, which take longer than training; few tests need them."""
    for kind in (Checkerboard, Mnist):
        monkeypatch.setattr(kind, "reference", lambda self, field: (None, {"read": 1.0}))


@pytest.fixture(scope="module")
def fitted(digits, tmp_path_factory):
    out = tmp_path_factory.mktemp("fitted") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fmwc.mnist.recipe.batch_for", lambda device: 80)  # faster for a small network
        return fit(digits, out, CPU), out


# ---- the checkpoint -------------------------------------------------------------------------------------------------


def test_a_folder_holds_the_checkpoint_and_nothing_else(fitted, digits):
    field, out = fitted
    assert {p.name for p in out.iterdir()} == {"model.safetensors", "recipe.json", RUN}
    again = load(out)
    assert identical(weights(again), weights(field))
    assert again.space.describe() == digits.space().describe()


def test_the_reference_is_chosen_by_a_pilot_run(fitted):
    field, out = fitted
    for reference in (field.reference, load(out).reference):
        assert {row["score"] for row in reference.candidates} >= {"contest + 0.3 spread@0.3-0.8", reference.score}
        assert reference.read_with == read_with(None, 50, "euler")
        assert reference.standard is None  # neither the echo nor the contest is standardised within a class
        assert reference.classes == {"y": tuple(range(10))}
        assert reference.quantiles.shape == (1001,)
        assert bool((reference.quantiles.diff() >= 0).all())
    run = sample(load(out), 40, cond={"y": labels(40)})  # with the settings of the reference, which are the default
    assert run.default_score == field.reference.score
    assert not len(run.times)
    assert bool(run.withheld) == bool(field.reference.withheld)


def test_the_reference_of_the_checkerboard_has_a_separate_seed(tmp_path):
    field = fit(BOARD, tmp_path / "model", CPU)
    again = load(tmp_path / "model").reference
    assert again.score == field.reference.score == "nearest"  # points in the plane are dense
    assert again.read_with is None  # this score needs no trajectory
    assert torch.equal(again.checks["nearest"].points, field.reference.checks["nearest"].points)
    assert field.reference.standard is None
    assert 0 <= about(tmp_path / "model")["metrics"]["misplacement"] <= 1
    assert sample(field, 20).reference is not None


@pytest.mark.usefixtures("unreferenced")
def test_a_retrofit_does_not_change_the_flow(recipe, tmp_path):
    field = fit(recipe, tmp_path / "model", CPU)
    network = recipe.network()
    first = weights(network)
    fit_network(recipe, network)
    assert identical(weights(field.network), weights(network))
    assert not identical(weights(network), first)
    assert not identical(weights(field.noise), weights(recipe.attach(recipe.network()).noise))


@pytest.mark.usefixtures("unreferenced")
@pytest.mark.parametrize("method", ["retrofit", "joint"])
def test_the_result_depends_on_the_seed_only(recipe, method, tmp_path):
    state = torch.get_rng_state()
    recipe = dataclasses.replace(recipe, method=method)
    seeds = {"a": 0, "b": 0, "c": 1}
    a, b, c = (fit(dataclasses.replace(recipe, seed=seed), tmp_path / name, CPU) for name, seed in seeds.items())
    assert identical(weights(a), weights(b))
    assert not any(torch.equal(weights(a)[k], v) for k, v in weights(c).items() if v.ndim > 1)
    assert torch.equal(torch.get_rng_state(), state)
    assert about(tmp_path / "c")["recipe"]["method"] == method


# ---- a run that was killed ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unreferenced")
@pytest.mark.parametrize(
    ("method", "stage", "left"),
    [
        ("retrofit", "flow", {"flow.resume"}),
        ("retrofit", "noise", {"flow.resume"}),
        ("joint", "joint", {"joint.resume"}),
    ],
    ids=["in the flow", "in the noise", "in both at once"],
)
def test_a_killed_training_resumes_to_the_same_weights(recipe, method, stage, left, tmp_path):
    recipe = dataclasses.replace(recipe, method=method)
    undisturbed = fit(recipe, tmp_path / "whole", CPU)
    out, told = tmp_path / "killed", []

    def kill(at, done, total, loss):
        told.append((at, done, total))
        if at == stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(recipe, out, CPU, kill)
    assert told[-1] == (stage, *[recipe.noise_steps if stage == "noise" else recipe.iterations] * 2)
    assert {p.name for p in (out / WORK).iterdir()} == left
    assert {p.name for p in out.iterdir()} == {RUN, WORK}
    with pytest.raises(CheckpointError, match=r"holds no recipe\.json"):
        load(out)
    assert identical(weights(fit(recipe, out, CPU)), weights(undisturbed))
    assert {p.name for p in out.iterdir()} == {"model.safetensors", "recipe.json", RUN}


@dataclasses.dataclass(frozen=True)
class Limited(Checkerboard):
    """A recipe with a time limit, like that of crystals."""

    minutes: float = 0.0
    enough: float = 1.0


@pytest.mark.usefixtures("unreferenced")
def test_a_stage_ended_by_the_time_limit_is_not_trained_further(tmp_path, monkeypatch):
    recipe = Limited(**{**dataclasses.asdict(BOARD), "iterations": 50, "minutes": 1.0, "enough": 0.1})
    now = iter(range(0, 10**6, 5))  # each reading adds five seconds, so the flow ends after a few steps

    def kill(at, done, total, loss):
        if at == "noise":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fmwc.training.time.monotonic", lambda: next(now))
        with pytest.raises(KeyboardInterrupt):
            fit(recipe, tmp_path / "killed", CPU, kill)
    fit(recipe, tmp_path / "killed", CPU)
    trained = about(tmp_path / "killed")["trained"]
    assert 5 <= trained["steps"] < 50


# ---- places that are not to be written to ---------------------------------------------------------------------------


def test_unreadable_data_is_refused_before_anything_is_written(digits, tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        fit(dataclasses.replace(digits, data=str(tmp_path / "none.npz")), tmp_path / "model", CPU)
    assert not (tmp_path / "model").exists()
