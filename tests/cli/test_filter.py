"""`fmwc filter` on points, on crystals with their files, and with wrong input."""

import json
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import fmwc
from fmwc.__main__ import main
from fmwc.checkerboard.data import misplaced
from fmwc.crystals import Candidate
from fmwc.crystals.files import write_cifs, write_structures, write_table
from fmwc.files import write_text
from fmwc.identity import seal
from fmwc.report.table import Table
from fmwc.sampling import Trajectory, standard_of
from tests.command import one_line, rows

COUNT = 600


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")  # no line of the printed table is wrapped


@pytest.fixture(scope="module")
def points(tmp_path_factory):
    """A folder that `fmwc sample checkerboard` wrote, with a score of the variance."""
    folder = tmp_path_factory.mktemp("points")
    with pytest.MonkeyPatch.context() as patch:
        words = ["sample", "checkerboard", "-n", COUNT, "--steps", 10, "--score", "temporal_ratio"]
        words += ["--device", "cpu", "--out", folder]
        patch.setattr(sys, "argv", ["fmwc", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            main()
    assert not stop.value.code
    return folder


def trajectory(count, seed=0):
    """A run of two channels with `count` samples, some doubtful in one of them."""
    generator = torch.Generator().manual_seed(seed)
    x = {"coord": torch.rand(count, 2, generator=generator), "type": torch.rand(count, 1, generator=generator)}
    var = {name: torch.rand(4, count, 1, generator=generator) for name in x}
    zero = {name: torch.zeros_like(value) for name, value in var.items()}
    times = torch.linspace(0, 0.75, 4)[:, None].expand(4, count).contiguous()
    grid = torch.linspace(0, 1, 5)[:, None].expand(5, count).contiguous()
    x0 = {name: torch.zeros_like(value) for name, value in x.items()}
    return Trajectory(x, x0, times, zero, var, grid, default_score="integrated", cond={"atoms": torch.arange(count)})


@pytest.fixture
def crystals(tmp_path):
    """A folder like those of `fmwc sample crystals`; structure 2 has no file."""
    folder = tmp_path / "crystals"
    folder.mkdir()
    made = trajectory(8)
    made.save(folder / "samples.safetensors")
    cell, places = 4 * np.eye(3), np.array([[0, 0, 0], [0.5, 0.5, 0.5]])
    candidates = [
        Candidate(f"{i:05d}", np.array([55, 17]), places, cell * (np.nan if i == 2 else 1), problem="")
        for i in range(8)
    ]
    table = {
        "name": [c.name for c in candidates],
        "formula": ["CsCl"] * 8,
        "score": made.score().tolist(),
        "e_above_hull": [0.01 * i if i != 2 else float("nan") for i in range(8)],
        "metastable": [i < 6 and i != 2 for i in range(8)],
        "problem": ["a comma, and a \"quote\"" if i == 2 else "" for i in range(8)],
    }  # fmt: skip
    write_text(folder / "samples.csv", Table.from_columns(table).csv())
    write_cifs(folder / "cif", candidates, table)
    write_structures(folder, candidates, table, "extxyz,poscar,db", symprec=0.1)
    return folder, made, table


# ---- what is kept ------------------------------------------------------------------------------------------------


def test_keep_a_share(run, points, tmp_path):
    code, out, err = run("filter", points, "--keep", 0.8, "--out", tmp_path / "kept")
    assert code == 0, err
    assert "480 of 600 (80.0%)" in out
    before, kept = Trajectory.load(points), Trajectory.load(tmp_path / "kept")
    expected = before.surest(0.8)
    assert torch.equal(kept.x, expected.x)
    assert torch.allclose(kept.rank, expected.rank)  # the rank among all samples
    table, old = rows(tmp_path / "kept" / "samples.csv"), rows(points / "samples.csv")
    assert [*table[0]] == [*old[0], "place"]
    left = [{k: v for k, v in row.items() if k != "place"} for row in table]
    assert left == [row for row in old if row in left]  # unchanged and in order
    assert sorted(int(row["place"]) for row in table) == list(range(1, 481))
    ranked = sorted(table, key=lambda row: int(row["place"]))
    assert [float(row["score"]) for row in ranked] == sorted(float(row["score"]) for row in table)


@pytest.fixture
def labels(points, tmp_path):
    bad = misplaced(Trajectory.load(points).x)
    return bad, write_text(tmp_path / "labels.csv", "id,bad\n" + "".join(f"{i},{int(b)}\n" for i, b in enumerate(bad)))


def test_a_certificate_and_its_use_on_new_samples(run, points, labels, tmp_path):
    bad, file = labels
    risk = round(float(bad.mean()) * 0.9, 3)
    words = ("filter", points, "--max-risk", risk, "--labels", file, "--out", tmp_path / "kept")
    code, out, err = run(*words)
    assert code == 0, err
    made = json.loads((tmp_path / "kept" / "promise.json").read_text())
    assert made["for"]["score"] == "temporal_ratio"
    assert made["bound"] <= made["max_risk"] == risk
    assert made["probability"] == 0.9
    before = Trajectory.load(points)
    kept = before.score().double() <= made["threshold"]
    assert torch.equal(Trajectory.load(tmp_path / "kept").x, before.x[kept])
    assert f"at most {risk:.4g} of samples with temporal_ratio ≤ {made['threshold']:.6g} fail" in out
    assert f"{bad[kept].sum()} of {kept.sum()}" in out
    assert f"{bad.sum()} of 600" in out

    code, out, err = run("filter", points, "--promise", tmp_path / "kept", "--out", tmp_path / "new")
    assert code == 0, err
    assert torch.equal(Trajectory.load(tmp_path / "new").x, before.x[kept])
    words = ("filter", points, "--promise", tmp_path / "kept" / "promise.json", "--out", tmp_path / "other")
    code, _, err = run(*words, "--score", "peak")
    assert code == 2
    assert "temporal_ratio" in one_line(err)
    write_text(tmp_path / "strict.json", json.dumps(seal({**made, "threshold": -1.0})))
    code, _, err = run("filter", points, "--promise", tmp_path / "strict.json", "--out", tmp_path / "other")
    assert code == 2
    assert "kept" in one_line(err)
    assert not (tmp_path / "other").exists()


def test_partial_labels_in_every_format(run, points, labels, tmp_path):
    bad, _ = labels
    some = ["" if i % 2 else str(bool(b)) for i, b in enumerate(bad)]
    forms = {
        "text": "\n".join(some) + "\n",
        "good": "good\n" + "".join(f"{ {'True': 0, 'False': 1, '': ''}[s] }\n" for s in some) + "\n",
        "bom": "\ufeffBad,who\n" + "".join(f"{s.lower()},me\n" for s in some),
    }
    seen = set()
    for name, text in forms.items():
        file = write_text(tmp_path / f"{name}.csv", text)
        code, out, err = run("filter", points, "--keep", 0.5, "--labels", file, "--out", tmp_path / name)
        assert code == 0, err
        assert f"{bad[::2].sum()} of 300" in out
        seen.add((tmp_path / name / "samples.csv").read_text())
        code, out, err = run("filter", points, "--max-risk", 0.3, "--labels", file, "--out", tmp_path / f"{name}-risk")
        assert code == 0, err
        assert "based on 300 labels" in out  # thresholds come from unlabelled samples
    assert len(seen) == 1
    none = write_text(tmp_path / "none.txt", "\n" * 600)
    code, out, err = run("filter", points, "--keep", 0.5, "--labels", none, "--out", tmp_path / "none")
    assert code == 0, err
    assert "no labels" in out


# ---- crystals ----------------------------------------------------------------------------------------------------


def test_crystals_keep_their_rows_and_files(run, crystals, tmp_path):
    folder, made, _ = crystals
    words = ("filter", folder, "--budget", 5, "--labels", "metastable", "--out", tmp_path / "kept")
    code, out, err = run(*words)
    assert code == 0, err
    order = made.score().argsort()
    surest = sorted(order[:5].tolist())
    table = rows(tmp_path / "kept" / "samples.csv")
    assert [row["name"] for row in table] == [f"{i:05d}" for i in surest]
    assert [int(row["place"]) for row in table] == [order.tolist().index(i) + 1 for i in surest]
    old = {row["name"]: row for row in rows(folder / "samples.csv")}
    assert all({k: v for k, v in row.items() if k != "place"} == old[row["name"]] for row in table)
    writable = {f"{i:05d}" for i in surest if i != 2}
    assert {p.stem for p in (tmp_path / "kept" / "cif").iterdir()} == writable
    assert all(p.read_text() == (folder / "cif" / p.name).read_text() for p in (tmp_path / "kept" / "cif").iterdir())
    frames = (tmp_path / "kept" / "samples.xyz").read_text()
    assert frames.count("Lattice=") == len(writable)
    assert all(f"name={name} " in frames.replace('"', "") for name in writable)
    for place, suffix in (("poscar", ".vasp"), ("symmetrised", ".cif")):
        assert {p.name for p in (tmp_path / "kept" / place).iterdir()} == {name + suffix for name in writable}
    database = pytest.importorskip("ase.db").connect(tmp_path / "kept" / "samples.db")
    assert {row.data.name for row in database.select()} == writable
    assert [row.data.name for row in database.select("score<0")] == []
    assert len([*database.select(formula="CsCl")]) == len(writable)
    assert "3 of 8" in out  # 2, 6 and 7 are not metastable
    assert torch.equal(Trajectory.load(tmp_path / "kept").x["coord"], made.x["coord"][surest])
    code, _, err = run("filter", folder, "--keep", 0.5, "--score", "type/integrated", "--out", tmp_path / "type")
    assert code == 0, err
    assert torch.equal(Trajectory.load(tmp_path / "type").x["type"], made.surest(0.5, "type/integrated").x["type"])


# ---- bad input ---------------------------------------------------------------------------------------------------

BAD = {
    "no choice": ((), "none"),
    "a budget larger than the set": (("--budget", 601), "601"),
    "risk without labels": (("--max-risk", 0.05), "--labels"),
    "too few labels": (("--max-risk", 0.001, "--labels", "{labels}"), "2402"),
    "labels of another length": (
        ("--keep", 0.5, "--labels", "{short}"),
        "600",
    ),
    "labels that are none": (("--keep", 0.5, "--labels", "{words}"), "2"),
    "score": (("--keep", 0.5, "--score", "peek"), "peak"),
    "another JSON file": (("--promise", "{json}"), "certificate"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_input_is_one_line_and_writes_nothing(case, run, points, labels, tmp_path):
    words, expected = BAD[case]
    files = {
        "short": "0\n1\n0\n",
        "words": "0\nmaybe\n" + "1\n" * 598,
        "columns": "a,b\n0,1\n",
        "both": "bad,good\n0,1\n",
        "empty": "",
        "all": "1\n" * 600,
        "json": "[1, 2]",
    }
    places = {name: write_text(tmp_path / name, text) for name, text in files.items()}
    places |= {"labels": labels[1], "out": tmp_path / "out", "samples": points / "samples.safetensors"}
    code, _, err = run("filter", points, *(str(w).format(**places) for w in words), "--out", tmp_path / "out")
    assert code == 2
    assert expected in one_line(err)
    assert not (tmp_path / "out").exists()


def test_files_without_samples_are_rejected(run, points, tmp_path):
    def refused(source, expected, out=tmp_path / "out", *more):
        code, _, err = run("filter", source, "--keep", 0.5, "--out", out, *more)
        assert code == 2
        assert expected in one_line(err)

    other = tmp_path / "other"
    other.mkdir()
    (other / "samples.safetensors").write_bytes((points / "samples.safetensors").read_bytes())
    write_text(other / "samples.csv", "x_0\n1\n")
    refused(other, "600")
    plain = tmp_path / "plain"
    plain.mkdir()
    fmwc.sample(fmwc.load("checkerboard"), 5, steps=2, confidence=None).save(plain)
    refused(plain, "variance")
    assert not (tmp_path / "out").exists()
    before = (points / "samples.csv").read_bytes()
    refused(points, "folder", points, "--force")
    assert (points / "samples.csv").read_bytes() == before
    (tmp_path / "mine").mkdir()
    write_text(tmp_path / "mine" / "thesis.txt", "mine")
    refused(points, "empty", tmp_path / "mine")
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


# ---- promises are bound to what they were made for -------------------------------------------------------------------


def call(*words):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["fmwc", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            main()
    assert not stop.value.code


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """Samples with other weights, steps, seeds and schedules, edited samples, and a certificate for the first."""
    base = tmp_path_factory.mktemp("drawn")
    field = fmwc.load("checkerboard")
    with torch.no_grad():
        field.network.out.bias[0] += 1e-3
    fmwc.save(field, base / "trained-again", recipe=fmwc.checkpoint.about("checkerboard")["recipe"])
    few = ("-n", 300, "--device", "cpu")
    small = (*few, "--steps", 10, "--every", 1)
    every = {
        "first": ("checkerboard", *small),
        "another seed": ("checkerboard", *small, "--seed", 1),
        "other weights": (base / "trained-again", *small),
        "other steps": ("checkerboard", *few, "--steps", 5, "--every", 1),
        "another stepper": ("checkerboard", *small, "--stepper", "midpoint"),
    }
    for name, words in every.items():
        call("sample", *words, "--out", base / name)
    call("edit", base / "first", "--at", "0.5", "--out", base / "edited", "--device", "cpu")
    call("filter", base / "first", "--max-risk", 0.5, "--labels", "misplaced", "--out", base / "promised")
    call("filter", base / "first", "--budget", 100, "--out", base / "filtered")
    return base


def test_a_certificate_applies_to_another_seed(run, drawn, tmp_path):
    code, out, err = run("filter", drawn / "another seed", "--promise", drawn / "promised", "--out", tmp_path / "kept")
    assert code == 0, err
    assert "at most 0.5 of samples" in out


DIFFERENT = {
    "other weights": "checkpoint",
    "other steps": "steps",
    "another stepper": "stepper",
    "filtered": "selected",
    "edited": "edit",
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_certificate_is_rejected_for_samples_drawn_differently(run, drawn, name, tmp_path):
    code, _, err = run("filter", drawn / name, "--promise", drawn / "promised", "--out", tmp_path / "kept")
    assert code == 2
    assert DIFFERENT[name] in one_line(err)
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"threshold": float("inf")},
        {"max_risk": 0.01},
        {"sha256": "0" * 64},
    ],
    ids=str,
)
def test_a_changed_certificate_is_rejected(run, drawn, change, tmp_path):
    content = {**json.loads((drawn / "promised" / "promise.json").read_text()), **change}
    for name, made in {"as it is": content, "with its hash": seal(content)}.items():
        if name == "with its hash" and "sha256" in change:
            continue
        file = write_text(tmp_path / f"{name}.json", json.dumps(made))
        code, _, err = run("filter", drawn / "first", "--promise", file, "--out", tmp_path / "kept")
        assert code == 2
        assert one_line(err)


def standardised(tmp_path, source):
    """A run whose score is standardised within its two classes."""
    made, y = trajectory(400), torch.arange(400) % 2
    standard = standard_of("y", made.score(), y)._replace(source=source)
    replace(made, cond={"y": y}, standard=standard).save(write_text(tmp_path / "run" / "x", "").parent)
    return write_text(tmp_path / "labels.txt", "0\n" * 400)


def test_no_certificate_for_scores_standardised_over_the_run(run, tmp_path):
    labels = standardised(tmp_path, "run")
    words = ("filter", tmp_path / "run", "--max-risk", 0.1, "--labels", labels, "--out", tmp_path / "kept")
    code, _, err = run(*words)
    assert code == 2
    assert "standardised" in one_line(err)
    code, _, err = run(*words, "--score", "integrated")
    assert code == 0, err


# ---- labels are matched by name --------------------------------------------------------------------------------------


def judged(points, tmp_path, names=None, order=None, extra=""):
    """Write labels by name in a given order."""
    bad = misplaced(Trajectory.load(points).x)
    names = names or [f"{i:05d}" for i in range(COUNT)]
    lines = [f"{name},{int(not b)},{int(b)}\n" for name, b in zip(names, bad, strict=True)]
    lines = [lines[i] for i in (range(COUNT) if order is None else order)]
    return write_text(tmp_path / "judged.csv", "name,metastable,odd\n" + "".join(lines) + extra)


@pytest.mark.parametrize("column", [("--good", "metastable"), ("--bad", "odd")])
@pytest.mark.parametrize("suffix", ["", ".cif"])
def test_labels_are_matched_by_name_in_any_order(run, points, tmp_path, column, suffix):
    names = [f"{i:05d}{suffix}" for i in range(COUNT)]
    file = judged(points, tmp_path, names, np.random.default_rng(0).permutation(COUNT))
    run("filter", points, "--max-risk", 0.3, "--labels", "misplaced", "--out", tmp_path / "own")
    code, _, err = run("filter", points, "--max-risk", 0.3, "--labels", file, *column, "--out", tmp_path / "sorted")
    assert code == 0, err
    assert (tmp_path / "own" / "samples.csv").read_text() == (tmp_path / "sorted" / "samples.csv").read_text()


def test_repeated_names_and_files_of_other_samples_are_rejected(run, points, tmp_path):
    twice = judged(points, tmp_path, order=[*range(COUNT), 3])
    words = ("--good", "metastable", "--out", tmp_path / "k")
    code, _, err = run("filter", points, "--keep", 0.5, "--labels", twice, *words)
    assert code == 2
    assert "00003" in one_line(err)
    others = judged(points, tmp_path, names=[f"mp-{i}" for i in range(COUNT)])
    code, _, err = run("filter", points, "--keep", 0.5, "--labels", others, *words)
    assert code == 2
    assert "none" in one_line(err)
    code, _, err = run("filter", points, "--keep", 0.5, "--labels", others, "--good", "stable", *words[2:])
    assert code == 2
    assert "stable" in one_line(err)


def test_labels_that_need_novelty_are_rejected_without_it(run, points, tmp_path):
    """Without known structures, `sun` is false for unstable structures and empty for others."""
    bad = misplaced(Trajectory.load(points).x)

    def call(head, cells, column):
        rows = [",".join([f"{i:05d}", *cells(b)]) + "\n" for i, b in enumerate(bad)]
        file = write_text(tmp_path / "judged.csv", head + "\n" + "".join(rows))
        words = ("--labels", file, "--good", column, "--out", tmp_path / "k", "--force")
        return run("filter", points, "--keep", 0.5, *words)

    unknown = [
        ("name,sun", lambda b: ["false" if b else ""], "sun"),
        ("name,msun,novel", lambda b: ["false" if b else "", ""], "msun"),
        ("name,novel", lambda b: [""], "novel"),
    ]
    for case in unknown:
        code, _, err = call(*case)
        assert code == 2
        assert "novelty" in one_line(err)
    known = [
        ("name,sun,novel", lambda b: ["false" if b else "", "true"], "sun"),  # unknown for another reason
        ("name,sun", lambda b: ["false" if b else "true"], "sun"),
        ("name,sun", lambda b: ["false"], "sun"),
    ]
    for case in known:
        code, _, err = call(*case)
        assert code == 0, err


def test_the_table_of_samples_is_matched_by_name(run, points, tmp_path):
    shutil.copytree(points, tmp_path / "copy")
    head, *lines = (points / "samples.csv").read_text().splitlines(keepends=True)
    (tmp_path / "copy" / "samples.csv").write_text(head + "".join(lines[::-1]))
    for source, out in ((points, "a"), (tmp_path / "copy", "b")):
        code, _, err = run("filter", source, "--keep", 0.5, "--out", tmp_path / out)
        assert code == 0, err
    assert (tmp_path / "a" / "samples.csv").read_text() == (tmp_path / "b" / "samples.csv").read_text()


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "a\\b", ""])
def test_names_cannot_lead_out_of_the_folder(run, crystals, tmp_path, name):
    folder, _, _ = crystals
    write_text(tmp_path / "secret.cif", "mine")
    text = (folder / "samples.csv").read_text()
    (folder / "samples.csv").write_text(text.replace("00003,", f"{name},", 1))
    code, _, err = run("filter", folder, "--keep", 1.0, "--out", tmp_path / "kept")
    assert code == 2
    assert "valid" in one_line(err)


def test_a_sample_without_a_finite_score_is_never_kept(run, crystals, tmp_path, monkeypatch):
    folder, _, _ = crystals
    own = Trajectory.score

    def score(self, *args, **options):
        found = own(self, *args, **options)
        if len(found) == 8:
            found[3], found[4] = float("nan"), -float("inf")
        return found

    monkeypatch.setattr(Trajectory, "score", score)
    code, out, err = run("filter", folder, "--keep", 1, "--out", tmp_path / "kept")
    assert code == 0, err
    assert "6 of 8" in out
    assert "2 (score not finite; not kept)" in out
    assert {row["name"] for row in rows(tmp_path / "kept" / "samples.csv")}.isdisjoint({"00003", "00004"})


HOSTILE = {
    "nul": (b"name,bad\n00000\0,1\n", "NUL"),
    "long": (b"name,bad\n" + b"0" * 200_000 + b",1\n", "field"),
    "names twice": (b"name,name,bad\n00000,00000,1\n", "column"),
    "long row": (b"name,bad\n00000,1,1,1\n", "row"),
    "word": (b"name,bad\n00000,perhaps\n", "'perhaps'"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_malformed_labels_are_one_line(run, crystals, tmp_path, case):
    content, said = HOSTILE[case]
    (tmp_path / "labels.csv").write_bytes(content)
    code, _, err = run(
        "filter", crystals[0], "--keep", 0.5, "--labels", tmp_path / "labels.csv", "--out", tmp_path / "k"
    )
    assert code == 2
    assert said in one_line(err)


def test_labels_written_by_other_programs(run, crystals, tmp_path):
    """A byte-order mark, Windows line endings, quotes, and file names as sample names."""
    text = '\ufeff"name","note","good"\r\n' + "".join(f'"{i:05d}.cif","a, ""b""",{i % 2}\r\n' for i in range(8))
    (tmp_path / "labels.csv").write_text(text, newline="")
    words = ("filter", crystals[0], "--keep", 1, "--labels", tmp_path / "labels.csv", "--out", tmp_path / "k")
    code, out, err = run(*words)
    assert code == 0, err
    assert "4 of 8 (50.0%" in out


# ---- labels by a condition, and the tables of the judge --------------------------------------------------------------


def energies(points, tmp_path, name="dft.csv", **cells):
    """Write a table of energies: 0.1 for misplaced points, 0.01 for others; `cells` replaces some of them."""
    bad = misplaced(Trajectory.load(points).x)
    values = {f"{i:05d}": f"{0.1 if b else 0.01}" for i, b in enumerate(bad)} | cells
    lines = [f"{name},{value},{'x' if value == '' else ''}\n" for name, value in values.items()]
    return write_text(tmp_path / name, "name,e_above_hull,problem\n" + "".join(lines)), bad


@pytest.mark.parametrize(
    "words",
    [
        ("--column", "e_above_hull", "--good", "<= 0.05"),
        ("--bad", "e_above_hull >= 0.05"),
    ],
)
def test_labels_by_a_condition(run, points, tmp_path, words):
    file, _ = energies(points, tmp_path)
    run("filter", points, "--max-risk", 0.3, "--labels", "misplaced", "--out", tmp_path / "own")
    code, _, err = run("filter", points, "--max-risk", 0.3, "--labels", file, *words, "--out", tmp_path / "kept")
    assert code == 0, err
    assert (tmp_path / "own" / "promise.json").read_text() == (tmp_path / "kept" / "promise.json").read_text()


def test_missing_values_have_no_label_and_those_with_a_problem_failed(run, points, tmp_path):
    first = {f"{i:05d}": "nan" for i in range(100)}
    file, bad = energies(points, tmp_path, **first, **{f"{i:05d}": "" for i in range(100, 110)})
    words = ("--good", "e_above_hull <= 0.05", "--out", tmp_path / "kept")
    code, out, err = run("filter", points, "--keep", 0.5, "--labels", file, *words)
    assert code == 0, err
    assert f"{bad[110:].sum() + 10} of 500" in out


@pytest.mark.parametrize("form", ["a folder of the judge", "judged.csv", "judged.parquet"])
def test_labels_from_the_tables_of_the_judge(run, points, tmp_path, form):
    pytest.importorskip("pyarrow")
    bad = misplaced(Trajectory.load(points).x).tolist()
    columns = {
        "name": [f"{i:05d}.cif" for i in range(COUNT)],
        "formula": ["NaCl"] * COUNT,
        "e_above_hull": [float("nan") if i == 0 else 0.2 * b for i, b in enumerate(bad)],
        "metastable": [i > 0 and not b for i, b in enumerate(bad)],
        "stable": [None if i % 2 else not b for i, b in enumerate(bad)],
        "problem": ["collapsed"] + [""] * (COUNT - 1),
    }
    write_table(tmp_path / "judged", columns)
    source = tmp_path if form == "a folder of the judge" else tmp_path / form
    failed = sum(bad) + (not bad[0])
    given = {
        (): f"{failed} of {COUNT}",
        ("--good", "metastable"): f"{failed} of {COUNT}",
        ("--good", "e_above_hull <= 0.1"): f"{failed} of {COUNT}",
        ("--column", "stable"): f"{sum(bad[::2])} of {COUNT // 2}",  # unknown where the cell is empty
    }
    for i, (words, expected) in enumerate(given.items()):
        code, out, err = run("filter", points, "--keep", 0.5, "--labels", source, *words, "--out", tmp_path / f"k{i}")
        assert code == 0, err
        assert expected in out
        assert ("good samples are those with metastable in judged." in out) == (not words)


CONDITIONS = {
    "an unknown column": (("--good", "e_hull <= 0.1"), "e_hull"),
    "two columns": (("--column", "problem", "--good", "e_above_hull <= 0.1"), "both"),
    "a condition without a number": (("--good", "e_above_hull <= low"), "number"),
    "text": (("--good", "problem <= 0.05"), "number"),
}


@pytest.mark.parametrize("case", CONDITIONS)
def test_wrong_conditions_are_one_line(case, run, points, tmp_path):
    words, expected = CONDITIONS[case]
    file, _ = energies(points, tmp_path, **{"00007": ""})
    code, _, err = run("filter", points, "--keep", 0.5, "--labels", file, *words, "--out", tmp_path / "out")
    assert code == 2
    assert expected in one_line(err)
    assert not (tmp_path / "out").exists()


def test_labels_of_other_crystals_are_refused(run, crystals, tmp_path):
    """Samples of two runs have the same names, but seldom the same formulas."""
    pytest.importorskip("ase")
    folder, _, _ = crystals
    words = ("filter", folder, "--keep", 1, "--labels", tmp_path / "dft.csv", "--out", tmp_path / "kept")
    write_text(
        tmp_path / "dft.csv", "name,formula,bad\n00000,Cl2 Cs2,0\n00001,ClCs,1\n00003,not known,0\n00009,NaCl,1\n"
    )
    code, out, err = run(*words)
    assert code == 0, err
    assert "1 of 3" in out
    write_text(tmp_path / "dft.csv", "name,formula,bad\n00000,CsCl,0\n00004,NaCl,1\n")
    code, _, err = run(*words, "--force")
    assert code == 2
    assert "NaCl" in one_line(err)
