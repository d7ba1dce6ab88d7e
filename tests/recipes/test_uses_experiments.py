"""The three experiments in a study: metrics, styles and successful edits by hand, and what is kept of samples."""

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import experiments.crystals.experiment as crystals
import experiments.uses.evaluate as evaluate
from experiments.checkerboard.experiment import CheckerboardExperiment, square
from experiments.common.experiment import Sizes
from experiments.common.store import result_file
from experiments.crystals.experiment import CrystalExperiment
from experiments.mnist.experiment import MnistExperiment, ink_of, style_of, without_specks
from experiments.uses.folder import drawn_at, judged_at, load_drawn, load_outcomes
from experiments.uses.study import study
from fmwc import checkerboard
from fmwc.crystals.energy import Energies
from fmwc.errors import MismatchError
from fmwc.field import attach
from fmwc.mnist.data import unit
from fmwc.registry import domain_named
from tests.conftest import awaken, mlp_field
from tests.recipes import studies
from tests.recipes.studies import hasty, numbers_in, quiet, shorten
from tests.recipes.test_crystals import TINY


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    shorten(monkeypatch)


@pytest.fixture(scope="module")
def points():
    return studies.points(mlp_field(hidden=8, depth=1))


def test_metrics_of_points_by_hand(points):
    x = np.array([[-1.5, -1.5], [-1.97, -1.5], [0.5, 0.5], [-0.5, -1.5]], dtype=np.float32)
    assert square(x).tolist() == [0, 0, 10, 4]
    found = points.judge({"x": torch.from_numpy(x)})
    assert found["bad"].tolist() == [False, False, False, True]
    assert points.metrics["misplaced"].read(found) == 25
    assert points.metrics["emptiest"].read(found) == 0
    assert points.metrics["at_edges"].read(found) == pytest.approx(100 / 3)  # 0.03 from the left edge
    centres = [(i - 1.5, j - 1.5) for i in range(4) for j in range(4) if (i + j) % 2 == 0]
    assert math.isnan(points.metrics["at_edges"].read({k: v[3:] for k, v in found.items()}))  # none is inside
    two = {k: v[:2] for k, v in found.items()}
    assert math.isnan(evaluate._over_seeds(points.metrics["kl"], [two, two])["std"])  # two have no density
    even = points.judge({"x": torch.tensor(centres)})
    assert points.metrics["emptiest"].read(even) == 12.5


def image(paint, side=28):
    picture = torch.zeros(1, 1, side, side)
    paint(picture[0, 0])
    return picture


def test_the_style_of_a_slanted_line_is_its_slant():
    def line(slope):
        def paint(p):
            for row in range(20):
                p[4 + row, 14 + slope * (row - 10)] = 1.0

        return paint

    for slope in (0, 1, -1):
        ink, slant, width = ink_of(image(line(slope)))[0].tolist()
        assert ink == pytest.approx(20 / 28**2)
        assert slant == pytest.approx(slope, abs=1e-6)
        assert width == pytest.approx(abs(slope), abs=1e-6)  # a diagonal has equal width and height


def test_the_style_of_a_blob_is_its_width():
    def blob(p):
        p[4:24, 10:15] = 0.5

    ink, slant, width = ink_of(image(blob))[0].tolist()
    assert ink == pytest.approx(0.5 * 100 / 28**2)
    assert slant == pytest.approx(0, abs=1e-6)
    assert width == pytest.approx(math.sqrt((5**2 - 1) / (20**2 - 1)))  # the variance of uniform values, (n² − 1) / 12
    assert style_of(torch.zeros(1, 1, 28, 28)).isfinite().all()


def test_specks_do_not_change_the_style():
    def stroke(p):
        p[4:24, 12:15] = 1.0

    clean = image(stroke)
    specked = clean.clone()
    specked[0, 0, 8, 3] = specked[0, 0, 20, 24] = 1.0
    assert not torch.equal(ink_of(specked), ink_of(clean))
    assert torch.equal(style_of(specked), style_of(clean))
    assert torch.equal(without_specks(clean)[0, 0, 5:23], clean[0, 0, 5:23])  # a stroke remains, except for its corners


@pytest.fixture(scope="module")
def digits_experiment(digits, judge_folder):
    torch.manual_seed(0)
    field = awaken(attach(digits.network(), space=(1, 8, 8), width=8))
    made = hasty(MnistExperiment)(
        domain_named("mnist", str(judge_folder)), field, Sizes(16, 2, 2, 2, 2, 14), digits.images("test")
    )
    made.dispersion = False
    return made


def test_digits_are_studied(digits_experiment, tmp_path):
    """Numbers use all guided samples, including those that are not shown."""
    only = "draw:edit,read:edit,draw:guide,read:guide"
    study(digits_experiment, tmp_path, seeds=(1,), only=only, say=quiet)
    found = numbers_in(tmp_path)
    assert {label.partition(",")[0] for label in found["edit"]} == {"style", "class"}
    assert found["guide"]["none"]["samples"] == 14
    assert list(digits_experiment.metrics) == ["fid", "failed", "style"]
    rows = load_drawn(drawn_at(tmp_path, "edit", 1))
    assert rows["seeds"].tensors["images"].shape == rows["class, random"].tensors["images"].shape  # one edit per sample
    assert rows["class, random"].tensors["time"].shape == (4,)
    assert (rows["class, random"].tensors["y"][::2] != rows["seeds"].tensors["y"]).all()
    assert (rows["style, random"].tensors["y"][::2] == rows["seeds"].tensors["y"]).all()
    assert "images" not in load_outcomes(judged_at(tmp_path, "edit", 1))["seeds"]


def test_digits_drawn_with_another_judge_are_refused(digits_experiment, tmp_path):
    """Digits are judged while they are drawn."""
    study(digits_experiment, tmp_path, seeds=(1,), only="draw:guide,read:guide", say=quiet)
    other = copy.copy(digits_experiment)
    other.classifier = copy.deepcopy(digits_experiment.classifier)
    next(other.classifier.parameters()).data.add_(1)
    for only in ("draw:guide", "read:guide"):
        with pytest.raises(MismatchError, match=r"made with other settings \(.*judge"):
            study(other, tmp_path, seeds=(1,), only=only, say=quiet)


def test_digits_by_hand(digits_experiment, digits):
    """The data itself has distance 0 and relative spread 1, and an edit succeeds if the style changes."""
    test = digits.images("test")
    kept = digits_experiment.keep(unit(test.x), {"y": test.y})
    found = digits_experiment.judge(kept)
    assert digits_experiment.metrics["fid"].read(found) == pytest.approx(0, abs=0.05)  # kept in half precision
    assert digits_experiment.metrics["style"].read(found) == pytest.approx(1, abs=1e-3)
    good = {**found, "bad": np.zeros(len(test.y), bool)}
    assert not digits_experiment.succeeded("style", good, good).any()
    assert digits_experiment.succeeded("class", good, good).all()
    _, std = digits_experiment._styles
    far = {**good, "style": found["style"] + 2 * std[found["y"]]}
    assert digits_experiment.succeeded("style", good, far).all()
    assert not digits_experiment.succeeded("style", good, {**far, "bad": ~good["bad"]}).any()


def test_digits_without_data_have_no_fid(digits_experiment, judge_folder):
    without = MnistExperiment(
        domain_named("mnist", str(judge_folder)), digits_experiment.field, digits_experiment.sizes
    )
    assert list(without.metrics) == ["failed", "style"]


def test_crystals_are_studied(tmp_path, monkeypatch):
    """Each energy is the position of the structure, so the outcomes are known."""
    pytest.importorskip("pymatgen.core", exc_type=ImportError)

    def energies(those, model):
        return Energies(np.arange(len(those)) / 10, ("",) * (len(those) - 1) + ("too close",))

    monkeypatch.setattr(crystals, "calculator", lambda name: name)
    monkeypatch.setattr(crystals, "energies", energies)
    monkeypatch.setattr(
        crystals, "hull_for", lambda *given, **options: SimpleNamespace(above=lambda key, energy: (energy, ""))
    )
    monkeypatch.delenv("FMWC_DATA", raising=False)
    torch.manual_seed(0)
    subject = hasty(CrystalExperiment)(
        domain_named("crystals"), awaken(TINY.attach(TINY.network())), Sizes(4, 2, 2, 2, 2, 2)
    )
    subject.usual = 1  # few steps, all read
    subject.intents = {"chem-swap": subject.intents["chem-swap"]}
    only = "draw:samples,draw:edit,read:filter,read:trust,read:edit"
    study(subject, tmp_path, seeds=(1,), only=only, say=quiet)
    found = numbers_in(tmp_path)
    assert found["filter"]["finds"] == "good"
    assert {"fewest atoms first"} < set(found["filter"]["compared"])
    assert {label.partition(",")[0] for label in found["edit"]} == {"chem-swap"}
    assert all(0 <= row["useful"] <= 1 for row in found["edit"].values())
    judged = load_outcomes(judged_at(tmp_path, "samples", 1))["samples"]
    assert np.allclose(judged["above"], [0, 0.1, 0.2, math.nan], equal_nan=True)
    assert judged["bad"].tolist() == [False, False, True, True]
    assert subject.metrics["metastable"].read(judged) == 50
    assert subject.metrics["above"].read(judged) == pytest.approx(0.1)
    assert result_file(tmp_path, 1, "draw-edit").exists()
    subject.data = "another hull"  # the same samples are judged again, and numbers of the first hull are dropped
    monkeypatch.setattr(
        crystals, "hull_for", lambda *given, **options: SimpleNamespace(above=lambda key, energy: (energy + 1, ""))
    )
    study(subject, tmp_path, seeds=(1,), only="read:filter", say=quiet)
    assert load_outcomes(judged_at(tmp_path, "samples", 1))["samples"]["bad"].all()
    assert list(numbers_in(tmp_path)) == ["filter"]


@pytest.mark.parametrize("kind", [CheckerboardExperiment, MnistExperiment, CrystalExperiment])
def test_sizes_for_a_gpu_are_larger(kind):
    assert kind.sizes_for("cuda").samples > kind.sizes_for("cpu").samples


def test_kl_detects_points_that_avoid_the_edges():
    x = checkerboard.sample(1_000, 3)
    place = x - x.floor()
    trimmed = x[((place > 0.1) & (place < 0.9)).all(1)]
    read = CheckerboardExperiment.metrics["kl"].read
    data, away = ({"x": some.numpy(), "bad": np.zeros(len(some), bool)} for some in (x, trimmed))
    assert read(data) < 0.03
    assert read(away) > 2 * read(data)
