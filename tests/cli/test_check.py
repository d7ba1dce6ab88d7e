"""`fmwc check` with each kind of input and with wrong input, and the checks of `fmwc sample`."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import fmwc
from fmwc.checks import Contest, Nearest, check
from fmwc.sampling import Part, Reference, Schedule, Trajectory
from fmwc.uses.best_of import best_of
from tests.command import call, one_line, rows

COUNT = 12


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A folder that `fmwc sample mnist` wrote."""
    folder = tmp_path_factory.mktemp("digits")
    call("sample", "mnist", "-n", COUNT, "--steps", 8, "--device", "cpu", "--out", folder)
    return folder


@pytest.fixture(scope="module")
def arrays(digits):
    """The same digits as arrays; the first three have a wrong label."""
    run = Trajectory.load(digits)
    y = run.cond["y"].clone()
    y[:3] = (y[:3] + 5) % 10
    return run.x.numpy(), y.numpy()


def checked(run, samples, out, *words):
    code, text, err = run("check", samples, *words, "--device", "cpu", "--out", out)
    assert code == 0, err
    return rows(out / "checks.csv"), text


def test_samples_are_checked_with_their_recorded_checkpoint(run, digits, tmp_path):
    table, text = checked(run, digits, tmp_path / "c", "--seed", 3)
    drawn = Trajectory.load(digits)
    found = check(fmwc.load("mnist"), drawn.x, drawn.cond, rivals={"y": 10}, seed=3)
    assert [float(row["score"]) for row in table] == pytest.approx(found.score.tolist(), rel=1e-4, abs=1e-6)
    assert [int(row["rival"]) for row in table] == found.rival.tolist()
    assert [float(row["margin"]) for row in table] == pytest.approx(found.margin.tolist(), rel=1e-4, abs=1e-6)
    assert [row["name"] for row in table] == drawn.names
    assert [int(row["y"]) for row in table] == drawn.cond["y"].tolist()
    ranks = [float(row["rank"]) for row in table]
    assert sorted(ranks) == pytest.approx([i / COUNT for i in range(COUNT)], abs=1e-5)
    assert ranks[int(found.score.argmax())] == 0
    said = json.loads((tmp_path / "c" / "checks.json").read_text())
    assert (said["samples"], said["evidence"], said["evaluations"]) == (COUNT, "contest", 19)
    assert said["provenance"]["checkpoint"] == "mnist"
    assert "contest" in text


def test_wrong_labels_of_arrays_are_detected(run, arrays, tmp_path):
    np.savez(tmp_path / "a.npz", x=arrays[0], y=arrays[1])
    table, text = checked(run, tmp_path / "a.npz", tmp_path / "c", "--checkpoint", "mnist")
    wrong = [int(row["rival"]) for row in table[:3]]
    assert wrong == [0, 1, 2]
    assert all(float(row["margin"]) < 0 for row in table[:3])
    assert all(float(row["margin"]) > 0 for row in table[3:])
    assert sorted(range(COUNT), key=lambda i: float(table[i]["rank"]))[:3] == sorted(
        range(3), key=lambda i: -float(table[i]["score"])
    )
    assert "better fit 0" in " ".join(text.replace("│", " ").split())
    assert "requested 5, better fit 0" in (tmp_path / "c" / "checks.html").read_text()
    assert (tmp_path / "c" / "checks.png").stat().st_size > 1000
    assert json.loads((tmp_path / "c" / "checks.json").read_text())["read_as_something_else"] == 3


def test_pixel_arrays_and_image_folders_give_the_same_results(run, arrays, tmp_path):
    pixels = (arrays[0][:, 0].clip(0, 1) * 255).round().astype(np.uint8)
    np.savez(tmp_path / "a.npz", images=pixels, labels=arrays[1])
    order = []
    for label in sorted(set(arrays[1].tolist())):
        folder = tmp_path / "images" / str(label)
        folder.mkdir(parents=True)
        for i in np.flatnonzero(arrays[1] == label):
            Image.fromarray(pixels[i]).save(folder / f"{i:03d}.png")
            order.append((label, i))
    a, _ = checked(run, tmp_path / "a.npz", tmp_path / "c", "--checkpoint", "mnist", "--evidence", "echo")
    b, _ = checked(run, tmp_path / "images", tmp_path / "d", "--checkpoint", "mnist", "--evidence", "echo")
    assert [row["name"] for row in b] == [f"{label}/{i:03d}.png" for label, i in order]
    # The noise depends on the number of a sample, so the scores are close but not equal.
    apart = [float(row["score"]) - float(a[i]["score"]) for row, (_, i) in zip(b, order, strict=True)]
    assert np.abs(apart).max() < 0.2
    assert "rival" not in a[0]


def test_crystals_are_read_from_cif_files(run, tmp_path):
    structures = pytest.importorskip("pymatgen.core")
    salt = structures.Structure.from_spacegroup(
        "Fm-3m", structures.Lattice.cubic(5.64), ["Na", "Cl"], [[0, 0, 0], [0.5, 0.5, 0.5]]
    )
    crowded = salt.copy()
    crowded.translate_sites(range(4), [0.37, 0.41, 0.43])
    large = salt.copy()
    large.make_supercell([2, 2, 1])
    large.translate_sites([0], [0.1, 0, 0])  # so that no smaller cell holds the same crystal
    for name, one in {"a": salt, "b": crowded, "c": large}.items():
        (tmp_path / f"{name}.cif").write_text(one.to(fmt="cif"))
    (tmp_path / "d.cif").write_text("nothing")
    table, text = checked(run, tmp_path, tmp_path / "c", "--checkpoint", "crystals")
    scores = {row["name"]: row["score"] for row in table}
    assert float(scores["a.cif"]) < float(scores["b.cif"])
    assert [scores["c.cif"], scores["d.cif"]] == ["", ""]
    problems = {row["name"]: row["problem"] for row in table}
    assert "atoms" in problems["c.cif"]
    assert problems["d.cif"]
    assert table[0]["atoms"] == "2"  # of the primitive cell
    assert "echo" in text
    one, _ = checked(run, tmp_path / "a.cif", tmp_path / "one", "--checkpoint", "crystals")
    assert float(one[0]["score"]) == pytest.approx(float(scores["a.cif"]), abs=1e-4)
    code, _, err = run(
        "check", tmp_path / "c.cif", "--checkpoint", "crystals", "--device", "cpu", "--out", tmp_path / "o"
    )
    assert code == 2
    assert "c.cif" in one_line(err)
    assert "atoms" in one_line(err)


NETWORK = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, x, t, y=None):
        target = torch.zeros_like(x) if y is None else y[:, None] * torch.ones_like(x)
        return (target - x) / (1 - t[:, None]) + 0 * self.layer(torch.cat([x, t[:, None]], 1))


def build():
    return Net(), (2,)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_net_for_check.py").write_text(NETWORK)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "own_net_for_check:build"


def test_a_network_of_the_user_needs_no_checkpoint(run, own, tmp_path):
    y = torch.arange(20) % 2
    x = y[:, None] + 0.01 * torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
    asked = y.clone()
    asked[:2] = 1 - asked[:2]
    np.savez(tmp_path / "a.npz", x=x.numpy(), y=asked.numpy())
    table, _ = checked(run, tmp_path / "a.npz", tmp_path / "c", "--network", own)
    assert [float(row["margin"]) < 0 for row in table] == [True] * 2 + [False] * 18
    # With a single class there is no other condition to compare with, so the check is the echo.
    np.savez(tmp_path / "one.npz", x=x.numpy(), y=np.zeros(20, np.int64))
    table, _ = checked(run, tmp_path / "one.npz", tmp_path / "d", "--network", own)
    assert "rival" not in table[0]
    words = ("--network", own, "--evidence", "contest", "--device", "cpu", "--out", tmp_path / "e")
    code, _, err = run("check", tmp_path / "one.npz", *words)
    assert code == 2
    assert "evidence='echo'" in one_line(err)


BAD = {
    "nan": ({"x": lambda x: np.where(np.arange(COUNT)[:, None, None, None] == 2, np.nan, x)}, (), "NaN"),
    "class": ({"y": lambda y: y + 12}, (), "classes"),
    "budget": ({}, ("--evaluations", 9), "evaluations"),
    "evidence": ({}, ("--evidence", "contset"), "contest"),
    "other checkpoint": ({}, ("--checkpoint", "checkerboard"), "shape"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_input_is_one_line_and_writes_nothing(case, run, arrays, tmp_path):
    changes, words, expected = BAD[case]
    held = {name: changes.get(name, lambda v: v)(value) for name, value in zip("xy", arrays, strict=True)}
    np.savez(tmp_path / "a.npz", **{name: value for name, value in held.items() if value is not None})
    words = words if "--checkpoint" in words else ("--checkpoint", "mnist", *words)
    code, _, err = run("check", tmp_path / "a.npz", *words, "--device", "cpu", "--out", tmp_path / "out")
    assert code == 2
    assert expected in one_line(err)
    assert not (tmp_path / "out").exists()


def test_paths_without_samples_are_rejected(run, digits, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.txt").write_text("x")
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 1, 28, 28)))
    for path, expected in (
        ("nowhere", "exist"),
        ("empty", "samples"),
        ("a.txt", "supported"),
    ):
        code, _, err = run("check", tmp_path / path, "--checkpoint", "mnist", "--out", tmp_path / "out")
        assert code == 2
        assert expected in one_line(err)
    code, _, err = run("check", tmp_path / "a.npz", "--out", tmp_path / "out")
    assert code == 2
    assert "--checkpoint" in one_line(err)
    code, _, err = run("check", digits, "--out", digits)
    assert code == 2
    assert "folder" in one_line(err)


# ---- fmwc sample -------------------------------------------------------------------------------------------------


def test_sampling_includes_the_requested_check(run, tmp_path):
    words = ("-n", 4, "--steps", 4, "--label", 4, "--check", 20, "--device", "cpu", "--out", tmp_path / "s")
    code, _, err = run("sample", "mnist", *words)
    assert code == 0, err
    made = Trajectory.load(tmp_path / "s")
    contest = Contest.planned("y", torch.arange(10), 20)
    expected = fmwc.sample(
        fmwc.load("mnist"), 4, steps=4, check=contest, confidence=None, cond={"y": torch.full((4,), 4)}
    )
    torch.testing.assert_close(made.evidence["margin"], expected.evidence["margin"], atol=1e-5, rtol=1e-3)
    assert made.made["checked"] == "contest, 19 evaluations"
    table = rows(tmp_path / "s" / "samples.csv")
    assert [int(row["rival"]) for row in table] == made.evidence["rival"].tolist()
    code, _, err = run("sample", "mnist", *words, "--no-check")
    assert code == 2
    assert "contradict" in one_line(err)


def test_best_of_equals_the_library_function(run, tmp_path):
    words = ("-n", 30, "--steps", 10, "--every", 1, "--device", "cpu")
    for name, how in {"n": ("--best-of", 3), "budget": ("--budget", 35)}.items():
        code, _, err = run("sample", "checkerboard", *words, *how, "--out", tmp_path / name)
        assert code == 0, err
        made = Trajectory.load(tmp_path / name)
        expected = best_of(fmwc.load("checkerboard"), 30, 3, steps=10, schedule=Schedule.every(1))
        torch.testing.assert_close(made.x, expected.run.x)
        assert made.made["selected"] == "best of 3"
    bad = {
        "budget": ("--budget", 9),
        "one": ("--budget", 20, "--best-of", 2),
        "--best-of": ("--best-of", 0),
        "score": ("--best-of", 2, "--propagation", "none"),
        "--check": ("--score", "echo"),
    }
    for expected, how in bad.items():
        code, _, err = run("sample", "checkerboard", *words, *how, "--out", tmp_path / "bad")
        assert code == 2
        assert expected in one_line(err)
        assert not (tmp_path / "bad").exists()


# ---- what confidence is made from ------------------------------------------------------------------------------------


@pytest.fixture
def loose(tmp_path, monkeypatch):
    """A network that does not map noise to the data."""
    (tmp_path / "loose_net_for_check.py").write_text(NETWORK.replace("(target - x) / (1 - t[:, None])", "-0.5 * x"))
    monkeypatch.syspath_prepend(str(tmp_path))
    return "loose_net_for_check:build"


@pytest.fixture
def near(loose, tmp_path):
    """A checkpoint of a network of the user with confidence from the nearest training points."""
    from loose_net_for_check import build

    net, space = build()
    field = fmwc.attach(net, space=space)
    data = 0.1 * torch.randn(400, 2, generator=torch.Generator().manual_seed(0))
    found = fmwc.fit_confidence(field, data, pilot=50, conventions=False)
    check = found.checks.get("nearest") or Nearest(data[:300])
    levels = torch.linspace(-5, 5, 11)
    parts = (Part("nearest", 1.0, levels),)
    field.reference = Reference("nearest", None, levels, None, parts, {"nearest": check}, "points are dense")
    fmwc.save(field, tmp_path / "near")
    return tmp_path / "near"


def test_withheld_confidence_is_reported_and_rank_remains(run, near, loose, tmp_path):
    words = ("sample", near, "--network", loose, "-n", 6, "--device", "cpu", "--out")
    code, _, err = run(*words, tmp_path / "a")
    assert code == 0, err
    assert "confidence is based on nearest, because points are dense" in err
    assert {"score", "rank", "confidence"} <= rows(tmp_path / "a" / "samples.csv")[0].keys()
    assert "points are dense" in Trajectory.load(tmp_path / "a").made["made_from"]
    code, _, err = run(*words, tmp_path / "b", "--check", 20)
    assert code == 0, err
    assert err.count("confidence is withheld: the samples were not checked like those of the reference") == 1
    table = rows(tmp_path / "b" / "samples.csv")[0]
    assert {"score", "rank"} <= table.keys()
    assert "confidence" not in table
    code, _, err = run(*words, tmp_path / "c", "--no-check")
    assert code == 0, err
    assert err.count("confidence is withheld: the samples were not checked like those of the reference") == 1
    assert "rank orders" not in err
    assert "rank" not in rows(tmp_path / "c" / "samples.csv")[0]
    code, _, err = run(*words, tmp_path / "d", "--propagation", "none")
    assert code == 0, err
    assert err.count("confidence is withheld: the run was drawn without it") == 1
