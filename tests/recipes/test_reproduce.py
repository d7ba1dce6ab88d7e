"""Reproduction of the MNIST columns: finished tasks are stored, and joined to a result file."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch

import experiments.mnist.evaluate as evaluate
import experiments.mnist.reproduce as reproduction
import fmwc.mnist.recipe as mnist_recipe
from experiments.common.store import experiment_of_results, read_results
from experiments.mnist.reproduce import TASKS, reproduce
from fmwc.checkpoint import load, save_network
from fmwc.errors import FmwcError, MismatchError, UnknownNameError, UsageError
from fmwc.mnist.classifier import failed
from fmwc.mnist.recipe import Mnist, labels
from fmwc.sampling import SCORES, SamplingConfig, Trajectory, default_estimator, sample
from tests.options import arguments, reader
from tests.recipes.conftest import CPU, identical, weights

SIZE = {"count": 160, "steps": 6, "draws": 5, "few": 80}

# ---- which tasks ----------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch):
    """Tasks that return their names, to test how they are called."""
    done = []

    def task(name):
        def read(context):
            done.append((context.seed, name))
            return {"name": name}

        return read

    monkeypatch.setattr(reproduction, "TASKS", {name: task(name) for name in TASKS})
    monkeypatch.setattr(Mnist, "reference", lambda self, field: (None, {}))
    return done


@pytest.fixture
def again(digits, judge_folder, tmp_path):
    def run(**options):
        said = []
        options = {"judge": judge_folder, "say": said.append, **SIZE, **options}
        recipe = options.pop("recipe", digits)
        return reproduce(recipe, options.pop("out", tmp_path), CPU, **options), said

    return run


@pytest.mark.parametrize(
    ("only", "error", "message"),
    [
        ("flow", UsageError, "network:seed or read:name, got 'flow'"),
        ("flow:x", UsageError, "got 'flow:x'"),
        ("flow:-1", UsageError, "got 'flow:-1'"),
        ("flow:", UsageError, "got 'flow:'"),
        ("read:nothing", UnknownNameError, "unknown reading 'nothing'"),
        ("read:rival", UnknownNameError, "did you mean 'rivals'"),
        ("read", UnknownNameError, "unknown reading ''"),
        ("nonsense:1", UnknownNameError, "unknown network 'nonsense'"),
        ("flow:0,read:nothing", UnknownNameError, "unknown reading"),
        ("flow:0,,flow:1", UnknownNameError, "unknown network ''"),
    ],
)
def test_unknown_tasks_are_refused_before_training(only, error, message, again, tmp_path, quick):
    with pytest.raises(error, match=message) as raised:
        again(only=only)
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("quick")
def test_a_network_of_a_seed_is_trained_and_nothing_else(again, tmp_path):
    paths, said = again(only="flow:7")
    assert paths == []
    assert {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()} == {
        "models/flow-cosine-7.safetensors"
    }
    assert len(said) == 1
    assert again(only="flow:7")[1] == []


@pytest.mark.parametrize("network", reproduction.NETWORKS)
def test_every_network_has_a_task(network, again, tmp_path, quick):
    again(only=f"{network}:2")
    assert (tmp_path / "models" / f"{network}-cosine-2.safetensors").is_file()
    assert quick == []


def test_each_task_has_a_file_and_runs_once(again, tmp_path, quick):
    again(only=" read:joint , flow:3,read:plain")
    assert quick == [(0, "joint"), (0, "plain")]
    assert {p.name for p in (tmp_path / "pieces").iterdir()} == {"0-joint.json", "0-plain.json"}
    piece = json.loads((tmp_path / "pieces" / "0-joint.json").read_text())
    assert piece["numbers"] == {"name": "joint"}
    assert piece["provenance"]["samples"] == 160
    assert "data" not in piece["provenance"]["recipe"]
    assert not (tmp_path / "cells").exists()

    _, said = again(only="read:joint,read:head")
    assert quick[2:] == [(0, "head")]
    assert "0-joint.json already exists; skipped" in said


def test_task_files_are_joined_to_one_result_per_seed(again, tmp_path, quick):
    again(only="read:joint", seeds=(0, 5))
    paths, _ = again(seeds=(0, 5))
    assert [p.relative_to(tmp_path).as_posix() for p in paths] == ["cells/0.json", "cells/5.json"]
    assert sorted(quick) == sorted((seed, name) for seed in (0, 5) for name in TASKS)
    for seed, cell in zip((0, 5), read_results(tmp_path), strict=True):
        assert cell["seed"] == seed
        assert cell["numbers"] == {name: {"name": name} for name in TASKS}
        assert cell["provenance"]["pieces"].keys() == TASKS.keys()
        assert cell["provenance"]["seeds"] == [seed]
    folders = {p.name for p in (tmp_path / "models").iterdir() if p.is_dir()}
    assert folders == {"mnist", "mnist-joint"}
    retrofit = load(tmp_path / "models" / "mnist")
    assert not identical(weights(retrofit), weights(load(tmp_path / "models" / "mnist-joint")))
    assert again(seeds=(0, 5))[0] == paths
    assert len(quick) == 2 * len(TASKS)


def test_an_interrupted_task_keeps_earlier_files(again, tmp_path, quick, monkeypatch):
    def die(context):
        raise KeyboardInterrupt

    alive = reproduction.TASKS["plain"]
    monkeypatch.setitem(reproduction.TASKS, "plain", die)
    with pytest.raises(KeyboardInterrupt):
        again()
    assert {p.name for p in (tmp_path / "pieces").iterdir()} == {"0-retrofit.json", "0-joint.json"}
    monkeypatch.setitem(reproduction.TASKS, "plain", alive)
    again()
    assert [name for _, name in quick] == list(TASKS)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("change", "what"),
    [({"count": 170}, "samples"), ({"steps": 7}, "steps"), ({"draws": 6}, "draws"), ({"few": 90}, "few")],
    ids=lambda value: str(value),
)
def test_pieces_made_with_other_settings_are_refused(change, what, again):
    again(only="read:rivals")
    with pytest.raises(MismatchError, match=rf"0-rivals\.json was made with other settings \(.*{what}"):
        again(only="read:rivals", **change)


@pytest.mark.usefixtures("quick")
def test_pieces_of_another_recipe_are_refused_and_where_the_data_is_may_change(again, digits, digits_file, tmp_path):
    again(only="read:rivals")
    with pytest.raises(MismatchError, match=r"made with other settings \(.*recipe"):
        again(only="read:rivals", recipe=dataclasses.replace(digits, lr=2e-3))
    copy = tmp_path / "copy.npz"
    copy.write_bytes(digits_file.read_bytes())
    again(only="read:rivals", recipe=dataclasses.replace(digits, data=str(copy), save_every=1, compiled=False))


@pytest.mark.usefixtures("quick")
def test_networks_and_pieces_of_other_data_or_another_judge_are_refused(again, digits, judge_folder, tmp_path):
    again(only="flow:0,read:rivals")
    fewer = tmp_path / "fewer.npz"
    images = digits.images()
    np.savez(fewer, x=images.x[:500, 0].numpy(), y=images.y[:500].numpy())
    other = dataclasses.replace(digits, data=str(fewer))
    with pytest.raises(MismatchError, match="trained with another recipe"):
        again(only="flow:0", recipe=other)
    with pytest.raises(MismatchError, match=r"made with other settings \(.*data"):
        again(only="read:rivals", recipe=other)
    judge = reproduction.load_network(judge_folder)
    with torch.no_grad():
        judge.out.bias[0] += 1
    with pytest.raises(MismatchError, match=r"made with other settings \(.*judge"):
        again(only="read:rivals", judge=save_network(judge, tmp_path / "other"))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("change", "message"),
    [({"count": 0}, "got 0 and 6"), ({"steps": 0}, "got 160 and 0"), ({"draws": 4}, "draws must be at least 5, got 4")],
    ids=str,
)
def test_wrong_sizes_are_refused_before_training(change, message, again, tmp_path):
    with pytest.raises(UsageError, match=message):
        again(**change)
    assert not list(tmp_path.iterdir())


def test_an_unknown_judge_is_reported(again, tmp_path):
    with pytest.raises(FmwcError, match="unknown checkpoint"):
        again(judge=tmp_path / "nobody", only="flow:0")


# ---- all of it, small -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(digits, judge_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("results") / "mnist"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"STATES": 8, "HUTCHINSON": 2, "PROBES": 2, "STEPS": (2,), "DRAWS": 4}.items():
            patch.setattr(evaluate, name, value)
        for place in (evaluate, mnist_recipe, reproduction):
            patch.setattr(place, "batch_for", lambda device: 160)
        patch.setattr(mnist_recipe, "sample", lambda *a, steps, **k: sample(*a, **arguments(steps=2, **k)))
        paths = reproduce(digits, out, CPU, judge=judge_folder, say=lambda text: None, **SIZE)
    assert paths == [out / "cells" / "0.json"]
    return out


def numbers(value):
    if isinstance(value, dict):
        return [n for v in value.values() for n in numbers(v)]
    if isinstance(value, list):
        return [n for v in value for n in numbers(v)]
    return [value] if isinstance(value, float) else []


def test_every_task_gives_numbers_that_are_finite(whole):
    cell = read_results(whole)[0]
    assert cell["numbers"].keys() == TASKS.keys()
    for name, found in cell["numbers"].items():
        values = numbers(found)
        assert values, name
        assert all(math.isfinite(v) for v in values), name


def test_confidence_changed_no_sample(whole):
    found = read_results(whole)[0]["numbers"]
    assert found["retrofit"]["bit_for_bit"]
    assert found["joint"]["bit_for_bit"]
    for key in ("fid", "failure"):  # a retrofit, and UA-Flow's variance on the flow, sample as the flow does
        assert found["retrofit"][key] == pytest.approx(found["plain"][key], rel=1e-4)
        assert found["variance"][key] == pytest.approx(found["plain"][key], rel=1e-4)
        assert found["plain"]["members"][0][key] == pytest.approx(found["plain"][key], rel=1e-4)
        assert found["joint"][key] != found["plain"][key] or key == "failure"
    assert len(found["plain"]["members"]) == 5


def test_every_score_is_read_for_every_method(whole):
    found = read_results(whole)[0]["numbers"]
    scores = set(SCORES)
    for part in (found["retrofit"], found["joint"]):
        assert part["linearised"].keys() == part["diagonal"].keys() == part["every_5th"].keys() == scores
        assert part["heads"].keys() == {"l1", "boosting", "label_free", "failure"}
        assert {"pixels", "projections_1", "projections_2", "k5"} <= part["transported"]["scores"].keys()
        assert part["transported"]["samples"] == 80
        assert part["retention"]["integrated"]["1"] == pytest.approx(part["failure"])
    for part in (found["head"]["scores"], found["variance"]["scores"], *found["rivals"].values()):
        assert part.keys() == scores
    assert found["rivals"].keys() == {"state_sensitivity", "posterior_trace"}
    assert found["repeats"].keys() == {"1001"}


def test_judge_accuracy_and_lowest_fid(whole, judge_folder):
    plain = read_results(whole)[0]["numbers"]["plain"]
    assert plain["judge_accuracy"] > 0.9
    assert 0 < plain["floor_fid"] < plain["fid"]


def test_the_samples_shown_have_the_scores_of_the_retrofit(whole, digits, judge_folder):
    shown = Trajectory.load(whole / "samples.safetensors")
    assert len(shown) == 160
    assert torch.equal(shown.cond["y"], labels(160))
    assert shown.transported.var.shape == (160, 8)
    field = load(whole / "models" / "mnist")
    read = default_estimator(field.space)
    run = sample(
        field,
        160,
        steps=6,
        seed=shown.seed,
        confidence=reader(read),
        cond={"y": labels(160)},
        config=SamplingConfig(batch=160),
    )
    torch.testing.assert_close(run.x, shown.x)
    for name in ("integrated", "endpoint", "temporal_ratio"):
        torch.testing.assert_close(shown.score(name), run.score(name), rtol=1e-3, atol=1e-5)
    judge = reproduction.load_network(judge_folder)
    cell = read_results(whole)[0]["numbers"]["retrofit"]
    assert failed(judge, shown.x, shown.cond["y"]).mean() == pytest.approx(cell["failure"], abs=0.02)


def test_checkpoints_have_a_reference_of_all_classes(whole):
    for name in ("mnist", "mnist-joint"):
        assert load(whole / "models" / name).reference.classes == {"y": tuple(range(10))}


def test_no_file_of_results_holds_a_path(whole, digits):
    for path in whole.rglob("*.json"):
        assert digits.data not in path.read_text()


def test_results_name_their_experiment(whole):
    assert experiment_of_results(whole) == "mnist"
