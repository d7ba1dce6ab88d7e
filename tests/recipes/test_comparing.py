"""Networks of a comparison, each trained once, and result files."""

import dataclasses
import json

import pytest
import torch

import fmwc.training
from experiments.common import store
from experiments.common.comparisons import HeteroscedasticVariance
from experiments.common.store import Networks, check_settings, experiment_of_results, read_results
from fmwc.errors import CheckpointError, MismatchError
from fmwc.sampling import sample
from tests.options import arguments
from tests.recipes.conftest import BOARD, CPU, identical, weights

METHODS = ("flow", "retrofit", "joint", "dropout", "head", "variance")


def networks(recipe, folder):
    said = []
    return Networks(recipe, folder, CPU, said.append), said


def run(recipe, field, **options):
    cond = {k: v[:6] for k, v in recipe.rows()[1].items()}
    return sample(field, 6, **arguments(steps=3, space=recipe.space(), cond=cond, **{"confidence": None, **options}))


@pytest.fixture
def no_training(monkeypatch):
    def fail(*args, **kwargs):
        pytest.fail("trained again")

    def forbid():
        monkeypatch.setattr(store, "FITS", dict.fromkeys(store.FITS, fail))

    return forbid


@pytest.mark.parametrize("method", METHODS)
def test_networks_are_trained_once(method, recipe, tmp_path, no_training):
    first, said = networks(recipe, tmp_path)
    made = getattr(first, method)(3)
    assert any(text.startswith(f"trained {method}, cosine, seed 3") for text in said)
    no_training()
    again, said = networks(recipe, tmp_path)
    assert identical(weights(getattr(again, method)(3)), weights(made))
    assert said == []
    assert not list(tmp_path.glob("*.resume"))


def test_each_seed_and_each_method_has_a_file(tmp_path):
    made, _ = networks(BOARD, tmp_path)
    made.retrofit(0)
    made.flow(1001)
    made.variance(0)
    names = {"flow-cosine-0", "retrofit-cosine-0", "flow-cosine-1001", "variance-cosine-0"}
    assert {p.stem for p in tmp_path.iterdir()} == names


def test_retrofit_samples_equal_those_of_the_flow(recipe, tmp_path):
    made, _ = networks(recipe, tmp_path)
    flow = run(recipe, made.flow(0))
    assert torch.equal(run(recipe, made.retrofit(0), confidence=True).x, flow.x)
    assert not torch.allclose(run(recipe, made.joint(0)).x, flow.x)


def test_a_variance_leaves_the_flows_samples(recipe, tmp_path):
    made, _ = networks(recipe, tmp_path)
    flow, head = made.flow(0), made.variance(0)
    for part in ("weight", "bias"):
        own = getattr(flow.out, part)
        assert torch.equal(getattr(head.network.out, part)[: len(own)], own)
    rest = {k: v for k, v in weights(flow).items() if not k.startswith("out.")}
    assert identical({k: weights(head.network)[k] for k in rest}, rest)
    read = run(recipe, head, confidence=HeteroscedasticVariance())
    torch.testing.assert_close(read.x, run(recipe, flow).x)
    assert not torch.allclose(read.var, torch.ones(()))  # the loss decreased
    assert not torch.allclose(run(recipe, made.head(0)).x, read.x)


@pytest.mark.parametrize("method", ["flow", "joint", "variance"])
def test_interrupted_training_resumes_to_the_same_weights(method, recipe, tmp_path, monkeypatch):
    recipe = dataclasses.replace(recipe, noise_steps=4)
    undisturbed, _ = networks(recipe, tmp_path / "whole")
    expected = weights(getattr(undisturbed, method)(0))
    killed, _ = networks(recipe, tmp_path / "killed")
    keep = fmwc.training.save_point

    def save_and_die(path, identity, run):
        keep(path, identity, run)
        if run.done == 2 and path.name == f"{method}-cosine-0.resume":
            raise KeyboardInterrupt

    monkeypatch.setattr(fmwc.training, "save_point", save_and_die)
    with pytest.raises(KeyboardInterrupt):
        getattr(killed, method)(0)
    assert (tmp_path / "killed" / f"{method}-cosine-0.resume").exists()
    monkeypatch.setattr(fmwc.training, "save_point", keep)
    assert identical(weights(getattr(killed, method)(0)), expected)
    assert not list((tmp_path / "killed").glob("*.resume"))


@pytest.mark.parametrize("change", [{"lr": 2e-3}, {"iterations": 5}, {"batch": 9}], ids=str)
def test_weights_of_another_recipe_are_refused(change, tmp_path):
    networks(BOARD, tmp_path)[0].flow(0)
    other, _ = networks(dataclasses.replace(BOARD, **change), tmp_path)
    with pytest.raises(MismatchError, match="trained with another recipe"):
        other.flow(0)


def test_weights_of_another_size_and_truncated_files_are_refused(tmp_path):
    networks(BOARD, tmp_path)[0].flow(0)
    other, _ = networks(dataclasses.replace(BOARD, hidden=12), tmp_path)
    with pytest.raises(MismatchError, match=r"trained with another recipe \(hidden: 8 before, 12 now\)"):
        other.flow(0)
    file = tmp_path / "flow-cosine-0.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="is not a safetensors file, or is truncated"):
        networks(BOARD, tmp_path)[0].flow(0)


def test_settings_that_do_not_affect_weights_may_change(digits, digits_file, tmp_path, no_training):
    made = networks(digits, tmp_path)[0].flow(0)
    copy = tmp_path / "copy.npz"
    copy.write_bytes(digits_file.read_bytes())
    no_training()
    moved = dataclasses.replace(digits, save_every=1, data=str(copy), compiled=not digits.compiled)
    assert identical(weights(networks(moved, tmp_path)[0].flow(0)), weights(made))


# ---- cells ----------------------------------------------------------------------------------------------------------


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_results_are_read_in_the_order_of_their_seeds(tmp_path):
    for seed in (1, 0, 2):
        write(tmp_path / "cells" / f"{seed}.json", {"seed": seed})
    assert [cell["seed"] for cell in read_results(tmp_path)] == [0, 1, 2]
    write(tmp_path / "cells" / "1.json", "{")
    with pytest.raises(CheckpointError, match=r"1\.json is not JSON .*; delete it"):
        read_results(tmp_path)
    with pytest.raises(CheckpointError, match="holds no results"):
        read_results(tmp_path / "nothing")


def test_results_of_other_settings_are_refused_with_the_differences(tmp_path):
    made = {"samples": 100, "steps": 50, "windows": (0.3, 0.7)}
    path = write(tmp_path / "0.json", {"provenance": {**made, "seconds": 3}})
    check_settings(path, made)
    with pytest.raises(MismatchError, match="draws: none before, 5 now"):  # their number is unknown
        check_settings(path, {**made, "draws": 5})
    with pytest.raises(MismatchError, match=r"made with other settings \(steps: 50 before, 40 now; windows: "):
        check_settings(path, {**made, "steps": 40, "windows": (0.2, 0.7)})


def test_a_results_folder_names_its_experiment(tmp_path):
    write(tmp_path / "a" / "cells" / "0.json", {"seed": 0})
    assert experiment_of_results(tmp_path / "a") == "checkerboard"
    write(tmp_path / "b" / "cells" / "0.json", {"seed": 0, "setting": "mnist"})
    assert experiment_of_results(tmp_path / "b") == "mnist"
