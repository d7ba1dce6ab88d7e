"""Reproduction of the crystal columns: finished tasks are stored, joined to result files, and not repeated."""

import dataclasses
import json
import math

import pytest
import torch

pytest.importorskip("pymatgen.core", exc_type=ImportError)

from safetensors.torch import load_file

from experiments.common.store import experiment_of_results, read_results
from experiments.crystals import evaluate
from experiments.crystals import reproduce as module
from experiments.crystals.reproduce import DRAWS, READINGS, reproduce
from experiments.crystals.tables import tables
from fmwc.checkpoint import load
from fmwc.crystals import Judgement
from fmwc.crystals.judge import SHARES
from fmwc.crystals.recipe import SCORE, Mp20
from fmwc.crystals.structures import candidates
from fmwc.errors import MismatchError, UnknownNameError, UsageError
from fmwc.metrics import ranking
from fmwc.sampling import SCORES, Trajectory
from tests.options import arguments
from tests.recipes.conftest import CPU, identical, weights
from tests.recipes.test_crystals import CHANNELS, TINY, same

SIZE = {"count": 24, "draws": 2, "few": 6, "ks": (1, 2, 4)}


@pytest.fixture(autouse=True)
def _no_data_given(monkeypatch):
    monkeypatch.delenv("FMWC_DATA", raising=False)


@pytest.fixture
def quick(monkeypatch):
    """Tasks that return their names, to test how they are called."""
    done = []

    def task(name):
        def work(context):
            done.append((context.seed, name))
            return {"name": name}

        return work

    monkeypatch.setattr(module, "DRAWS", {name: task(f"draw-{name}") for name in DRAWS})
    monkeypatch.setattr(module, "READINGS", {name: task(name) for name in READINGS})
    monkeypatch.setattr(Mp20, "reference", lambda self, field: (None, {}))
    return done


@pytest.fixture
def again(tmp_path):
    def run(recipe=TINY, **options):
        messages = []
        return reproduce(recipe, tmp_path, CPU, **{"say": messages.append, **SIZE, **options}), messages

    return run


# ---- which tasks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("only", "error", "message"),
    [
        ("flow", UsageError, "network:seed, draw:name or read:name, got 'flow'"),
        ("flow:x", UsageError, "got 'flow:x'"),
        ("joint:-1", UsageError, "got 'joint:-1'"),
        ("draw:sweeps", UnknownNameError, "unknown drawing 'sweeps'; did you mean 'sweep'"),
        ("read:sweep", UnknownNameError, "unknown reading 'sweep'.* Known: hutchinson, joint, retrofit, screening"),
        ("read", UnknownNameError, "unknown reading ''"),
        ("ensemble:0", UnknownNameError, "unknown network 'ensemble'.* Known: flow, joint, retrofit"),
        ("draw:joint,read:nothing", UnknownNameError, "unknown reading 'nothing'"),
        ("flow:0,,flow:1", UnknownNameError, "unknown network ''"),
    ],
)
def test_unknown_tasks_are_refused_before_any_work(only, error, message, again, tmp_path, quick):
    with pytest.raises(error, match=message) as raised:
        again(only=only)
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())
    assert quick == []


@pytest.mark.parametrize("change", [{"count": 0}, {"draws": 1}], ids=str)
def test_impossible_sizes_are_refused_before_any_work(change, again, tmp_path):
    with pytest.raises(UsageError, match="at least 1 crystal and 2 trajectories"):
        again(**change)
    assert not list(tmp_path.iterdir())


def test_one_network_is_trained_alone(again, tmp_path, quick):
    paths, messages = again(only="flow:7")
    assert paths == quick == []
    files = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert files == {"models/flow-cosine-7.safetensors"}
    assert len(messages) == 1
    assert again(only="flow:7")[1] == []


def test_finished_tasks_are_not_repeated(again, tmp_path, quick):
    again(only=" draw:joint , read:joint")
    assert quick == [(0, "draw-joint"), (0, "joint")]
    assert {p.name for p in (tmp_path / "pieces").iterdir()} == {"0-draw-joint.json", "0-joint.json"}
    piece = json.loads((tmp_path / "pieces" / "0-joint.json").read_text())
    assert piece["numbers"] == {"name": "joint"}
    assert (piece["provenance"]["samples"], piece["provenance"]["calculator"]) == (24, "chgnet")
    assert "data" not in piece["provenance"]["recipe"]
    cell = json.loads((tmp_path / "cells" / "0.json").read_text())
    assert cell["numbers"] == {"joint": {"name": "joint"}}  # the results so far
    _, messages = again(only="read:joint,read:hutchinson")
    assert quick[2:] == [(0, "hutchinson")]
    assert "0-joint.json already exists; skipped" in messages


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"count": 25}, "samples"),
        ({"draws": 3}, "draws"),
        ({"few": 7}, "few"),
        ({"calculator": "mace"}, "calculator"),
        ({"recipe": dataclasses.replace(TINY, steps=5)}, "recipe"),
        ({"recipe": dataclasses.replace(TINY, anneal=1.0)}, "recipe"),
        ({"recipe": dataclasses.replace(TINY, lr=1e-3)}, "recipe"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_pieces_made_with_other_settings_are_refused(change, what, again):
    again(only="read:joint")
    with pytest.raises(MismatchError, match=rf"0-joint\.json was made with other settings \(.*{what}"):
        again(only="read:joint", **change)


@pytest.mark.usefixtures("quick")
def test_settings_without_effect_on_numbers_may_change(again):
    again(only="read:joint,draw:joint")
    other = dataclasses.replace(TINY, save_every=1, minutes=5.0, compiled=False)
    assert again(other, only="read:joint")[1] == ["0-joint.json already exists; skipped"]
    assert again(only="draw:joint", calculator="mace")[1] == [
        "0-draw-joint.json already exists; skipped"
    ]  # not judged yet


def test_tasks_are_joined_to_one_result_file_per_seed(again, tmp_path, quick):
    again(only="draw:joint", seeds=(0, 5))
    paths, _ = again(seeds=(0, 5))
    assert [p.relative_to(tmp_path).as_posix() for p in paths] == ["cells/0.json", "cells/5.json"]
    names = [*READINGS, *(f"draw-{n}" for n in DRAWS)]
    assert sorted(quick) == sorted((seed, name) for seed in (0, 5) for name in names)
    for seed, cell in zip((0, 5), read_results(tmp_path), strict=True):
        assert (cell["seed"], cell["setting"]) == (seed, "crystals")
        assert cell["numbers"] == {name: {"name": name} for name in READINGS}
        assert cell["provenance"]["pieces"].keys() == set(names)
    assert {p.name for p in (tmp_path / "models").iterdir() if p.is_dir()} == {"crystals", "crystals-joint"}
    assert again(seeds=(0, 5))[0] == paths
    assert len(quick) == 2 * len(names)


def test_interruption_keeps_finished_tasks(again, tmp_path, quick, monkeypatch):
    def die(context):
        raise KeyboardInterrupt

    alive = module.DRAWS["sweep"]
    monkeypatch.setitem(module.DRAWS, "sweep", die)
    with pytest.raises(KeyboardInterrupt):
        again()
    assert {p.name for p in (tmp_path / "pieces").iterdir()} == {"0-draw-retrofit.json", "0-draw-joint.json"}
    monkeypatch.setitem(module.DRAWS, "sweep", alive)
    again()
    assert [name for _, name in quick] == [*(f"draw-{n}" for n in DRAWS), *READINGS]


def test_samples_changed_by_confidence_are_recorded(again, tmp_path, monkeypatch):
    def other(recipe, field, count, seed, **options):
        return recipe.draw(field, count, seed + 1, **arguments(**options))

    monkeypatch.setattr(module, "draw_linearised", other)
    again(only="draw:retrofit")
    drawn = json.loads((tmp_path / "pieces" / "0-draw-retrofit.json").read_text())["numbers"]
    assert not drawn["bit_for_bit"]
    assert drawn["largest_difference"] > 1e-3


# ---- all of it, small -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    for package in ("chgnet", "matminer", "smact"):
        pytest.importorskip(package, exc_type=ImportError)
    out = tmp_path_factory.mktemp("results") / "crystals"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("FMWC_DATA", raising=False)
        patch.setattr(module, "SAMPLERS", ((5, 0.0),))
        patch.setattr(module, "SCREENED", 1)
        patch.setattr(module, "RELAX_STEPS", 2)
        patch.setattr(module, "cores", lambda: 1)
        patch.setattr(ranking, "RESAMPLES", 50)
        paths = reproduce(TINY, out, CPU, say=lambda text: None, **SIZE)
    assert paths == [out / "cells" / "0.json"]
    return out


def test_result_file_holds_every_task(whole):
    cell = read_results(whole)[0]
    found = cell["numbers"]
    assert found.keys() == READINGS.keys()
    for kind in ("retrofit", "joint"):
        assert found[kind]["bit_for_bit"]
        assert found[kind]["quality"]["structures"] == 24
        assert 0 < found[kind]["quality"]["problems"] < 24  # an almost untrained network
        assert math.isfinite(found[kind]["quality"]["mean_e_above_hull"])
        assert found[kind]["trained"] == {"steps": 6, "of": 6}
    assert found["retrofit"]["sampler"].keys() == {"5 steps, anneal 0"}
    assert experiment_of_results(whole) == "crystals"


def test_result_file_holds_hutchinson_rows(whole):
    rows = read_results(whole)[0]["numbers"]["hutchinson"]
    assert [row["K"] for row in rows[:3]] == [1, 2, 4]
    assert {row["name"] for row in rows} >= {"Hutchinson", "linearised", "diagonal", "linearised, type"}
    assert all(row["flops"] > 0 for row in rows if row["name"] != "number of atoms")
    counted = json.loads((whole / "draws" / "sweep-0.json").read_text())
    assert {"plain", "linearised, 1 probe a channel", *module.ESTIMATORS} <= counted.keys()
    assert load_file(whole / "draws" / "sweep-0.safetensors")["reference"].shape == (1, 6)


def test_screening_reaches_the_tables(whole):
    found = read_results(whole)[0]["numbers"]["screening"]
    assert (found["sets"]["drawn"]["structures"], found["sets"]["relaxed"]["structures"]) == (24, 10)
    assert found["score"] == SCORE
    assert "coverage_recall" in found["sets"]["relaxed"]
    text = tables(whole)[1].read_text()
    assert "ours, relaxed" in text
    assert "Every quantity against confidence" in text


def test_each_judged_structure_has_a_row(whole):
    for name in ("retrofit-0", "joint-0", "sampler-5-0-0"):
        lines = (whole / "judged" / f"{name}.csv").read_text().splitlines()
        assert len(lines) == 25
        assert lines[0].startswith("name,formula,atoms,")


def test_checkpoints_reproduce_the_runs_of_the_evaluation_seed(whole):
    for kind, folder in (("retrofit", "crystals"), ("joint", "crystals-joint")):
        run, field = Trajectory.load(whole / "draws" / f"{kind}-0.safetensors"), load(whole / "models" / folder)
        assert field.reference is not None
        drawn = TINY.draw(field, 24, run.seed, confidence=None)
        assert same(run.x, drawn.x)
        assert run.seed not in (0, 100)
    assert not identical(weights(load(whole / "models" / "crystals")), weights(load(whole / "models/crystals-joint")))


def test_second_call_computes_nothing(whole, monkeypatch):
    def fail(*args, **kwargs):
        pytest.fail("computed again")

    for name in ("draw_linearised", "draw_diagonal", "draw_dispersion", "sweep", "flops", "judge"):
        monkeypatch.setattr(module, name, fail)
    before = (whole / "cells" / "0.json").read_bytes()
    messages = []
    reproduce(TINY, whole, CPU, say=messages.append, **SIZE)
    assert len(messages) == len(DRAWS) + len(READINGS)
    assert all(text.endswith("already exists; skipped") for text in messages)
    assert json.loads((whole / "cells" / "0.json").read_bytes()) == json.loads(before)


def test_every_measure_is_computed_if_some_are_good(again, tmp_path, monkeypatch):
    """The judge accepts every other crystal."""

    def every_other(crystals, known, calculator):
        structures = candidates(crystals)
        every = [True] * len(structures)
        columns = {"name": [c.name for c in structures], "e_above_hull": [0.01, 0.5] * (len(structures) // 2)}
        columns |= dict.fromkeys(SHARES, every) | {"metastable": [True, False] * (len(structures) // 2)}
        return Judgement({**columns, "problem": [""] * len(structures)}, tuple(structures))

    monkeypatch.setattr(module, "judge", every_other)
    monkeypatch.setattr(module, "SAMPLERS", ((5, 0.0),))
    monkeypatch.setattr(ranking, "RESAMPLES", 50)
    recipe = dataclasses.replace(TINY, steps=20)
    again(recipe, only="draw:retrofit,draw:samplers,read:retrofit", count=44)
    found = json.loads((tmp_path / "pieces" / "0-retrofit.json").read_text())["numbers"]
    run = Trajectory.load(tmp_path / "draws" / "retrofit-0.safetensors")
    scores = evaluate.EVERY_SCORE.keys()
    assert {f"{c}/{s}" for c in CHANNELS for s in SCORES} < scores
    assert found["linearised"].keys() == found["every_5th"].keys() == found["diagonal"].keys() == scores
    assert found["heads"].keys() == found["heads_diagonal"].keys() == {"l1", "boosting", "label_free"}
    assert found["thresholds"].keys() == {"0.05", "0.1", "0.2"}  # none is at 0
    assert found["own"]["prevalence"] == 0.5
    good = torch.arange(44).numpy() % 2 == 0
    assert found["own"]["auprc"] == pytest.approx(evaluate.lift_of(run.score(SCORE), good)["auprc"])
    assert found["own"]["lift_interval"][0] <= found["own"]["lift"] <= found["own"]["lift_interval"][1]
    for name in ("type/peak", "lattice/integrated"):
        assert found["linearised"][name] == pytest.approx(evaluate.lift_of(run.score(name), good))
    assert found["baselines"]["atoms"] == pytest.approx(evaluate.lift_of(run.cond["atoms"], good))
    spread = load_file(tmp_path / "draws" / "retrofit-dispersion-0.safetensors")["dispersion"]
    assert found["dispersion"] == pytest.approx(evaluate.lift_of(spread, good))
    assert found["sampler"]["5 steps, anneal 0"]["own"]["prevalence"] == 0.5
