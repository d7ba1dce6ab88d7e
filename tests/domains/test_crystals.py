"""The domain of crystals: files that other programs read, tables, drawing and judging."""

import csv
import dataclasses
import math

import numpy as np
import pytest
import torch

pytest.importorskip("pymatgen.core", exc_type=ImportError)
pytest.importorskip("chgnet", exc_type=ImportError)
pytest.importorskip("pyarrow.parquet", exc_type=ImportError)

import fmwc.crystals.domain as room
from experiments.common.registry import experiment_named
from fmwc.checkpoint import load
from fmwc.crystals.domain import CrystalDomain
from fmwc.crystals.recipe import SCORE
from fmwc.crystals.structures import crystals_of, encode, quiet
from fmwc.recipes import fit
from fmwc.sampling import Reference, Schedule, Trajectory, read_with
from tests.options import arguments
from tests.recipes.conftest import CPU
from tests.recipes.test_crystals import CHANNELS, TINY, same

COUNT = 10
FIRST = ["name", "formula", "atoms"]
OWN = ["score", "rank", "score_type", "score_coord", "score_lattice"]
JUDGED = [
    "energy_per_atom", "e_above_hull", "distances_ok", "apart_ok", "charge_ok", "density_ok", "valid", "unique",
    "novel", "stable", "metastable", "sun", "msun", "competing_phases", "own_phases", "decomposition", "sparse_hull",
    "twin", "twin_split", "problem",
]  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _no_data_given():
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("FMWC_DATA", raising=False)
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    out = tmp_path_factory.mktemp("crystals") / "model"
    fit(TINY, out, CPU)
    return out


@pytest.fixture(scope="module")
def field(checkpoint):
    """Use confidence from the variance, because a pilot run finds no useful evidence on such a poor network."""
    field = load(checkpoint)
    run = TINY.draw(field, 16, 5, confidence=room.READ_BY, schedule=Schedule.every(room.EVERY))
    quantiles = run.score(SCORE).quantile(torch.linspace(0, 1, 101))
    field.reference = Reference(
        SCORE, read_with(room.READ_BY, TINY.steps, "euler", Schedule.every(room.EVERY)), quantiles
    )
    return field


@pytest.fixture
def setting():
    return CrystalDomain()


@pytest.fixture(scope="module")
def drawn(field):
    """A run of an almost untrained network: most structures cannot be judged."""
    return CrystalDomain().draw(field, COUNT, 1, None, steps=4)


@pytest.fixture(scope="module")
def salts():
    """Eight prototypes that CHGNet knows, of which the first has two atoms in one place; the last is the most sure."""
    found = TINY.crystals()
    small = ((found.atoms > 1) & (found.atoms < 7) & (found.numbers.max(1).values < 84)).nonzero()[:8, 0]
    those = found.take(small)
    coords = those.coords.clone()
    coords[0, 1] = coords[0, 0]
    x, atoms = encode(dataclasses.replace(those, coords=coords))
    grid = torch.linspace(0, 1, 11)[:, None].repeat(1, 8)
    doubt = torch.arange(8, 0, -1.0)
    var = {c: (k * doubt.square()).expand(10, 8)[..., None] for k, c in enumerate(CHANNELS, 1)}
    mean, x0 = ({c: torch.zeros_like(v) for c, v in s.items()} for s in (var, x))
    return Trajectory(x, x0, grid[:-1].clone(), mean, var, grid, cond={"atoms": atoms}, default_score="type/integrated")


@pytest.fixture(scope="module")
def written(salts, tmp_path_factory):
    out = tmp_path_factory.mktemp("salts")
    return out, CrystalDomain().write_samples(salts, out)


@pytest.fixture
def no_picture(monkeypatch):
    """Skip the drawings, which take longer than the rest."""
    monkeypatch.setattr(room, "sorted_by_confidence", lambda *args, **options: None)
    monkeypatch.setattr(room, "png", lambda picture: b"")


def rows_of(path):
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def value(text):
    """Return a cell of the CSV in the type that Parquet has."""
    if text in ("", "true", "false"):
        return {"": None, "true": True, "false": False}[text]
    try:
        return float(text)
    except ValueError:
        return text


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelled", [str, str.capitalize, str.upper], ids=["ours", "pandas", "spreadsheets"])
def test_verdicts_of_a_saved_table_are_read_in_any_spelling(salts, written, spelled):
    words = {"true": spelled("true"), "false": spelled("false")}
    rows = rows_of(written[0] / "samples.csv")
    table = {name: [words.get(row[name], row[name]) for row in rows] for name in rows[0]}
    known = CrystalDomain().with_files(salts, table, *written[:1] * 2).judgement(salts)
    expected = [row["metastable"] == "true" for row in rows]
    assert known.good.tolist() == expected
    assert len({*expected}) == 2


def test_pymatgen_reads_the_cif_files(salts, written):
    from pymatgen.core import Structure

    out, paths = written
    assert [p.name for p in paths] == [
        "samples.safetensors", "cif", "samples.csv", "samples.parquet", "crystals.png"
    ]  # fmt: skip
    assert (out / "crystals.png").read_bytes().startswith(b"\x89PNG")
    rows = rows_of(out / "samples.csv")
    assert len(rows) == len(list((out / "cif").iterdir())) == 8
    crystals = crystals_of(salts)
    for i, row in enumerate(rows):
        file = out / "cif" / f"{row['name']}.cif"
        assert f"# rank: {float(row['rank'])}" in file.read_text()
        assert int(row["atoms"]) == crystals.atoms[i]
        if i > 0:  # pymatgen refuses two atoms at one position
            with quiet():
                structure = Structure.from_file(file)
            assert structure.composition.reduced_formula == row["formula"]
            assert len(structure) == int(row["atoms"])
            assert structure.lattice.abc == pytest.approx(crystals.lengths[i].tolist(), rel=1e-5)
        assert float(row["score"]) == pytest.approx(8 - i)
        assert float(row["rank"]) == pytest.approx(i / 8)
        for k, c in enumerate(CHANNELS, 1):
            assert float(row[f"score_{c}"]) == pytest.approx(math.sqrt(k) * (8 - i), rel=1e-5)
    assert "coincide" in rows[0]["problem"]
    assert rows[0]["e_above_hull"] == ""
    assert rows[0]["valid"] == "false"
    assert all((row["e_above_hull"] == "") == (row["sparse_hull"] != "") for row in rows[1:])
    assert all(-0.5 < float(row["e_above_hull"]) < 5 for row in rows[1:] if row["e_above_hull"])
    assert all(row["problem"] == "" for row in rows[1:])
    assert all(row["novel"] == "" for row in rows)  # there is no training set


def test_csv_and_parquet_hold_the_same_table(written):
    from pyarrow import parquet

    out, _ = written
    rows, columns = rows_of(out / "samples.csv"), parquet.read_table(out / "samples.parquet").to_pydict()
    assert list(columns) == list(rows[0]) == [*FIRST, *OWN, *JUDGED]
    for name, values in columns.items():
        for row, expected in zip(rows, values, strict=True):
            found = row[name] if isinstance(expected, str) else value(row[name])
            assert found == (pytest.approx(expected) if isinstance(expected, float) else expected), name


@pytest.mark.usefixtures("no_picture")
def test_ase_reads_extended_xyz(setting, salts, tmp_path):
    ase = pytest.importorskip("ase.io")
    written = setting.write_samples(salts, tmp_path, "extxyz")
    assert "samples.xyz" in {p.name for p in written}
    assert not (tmp_path / "cif").exists()
    frames = ase.read(tmp_path / "samples.xyz", index=":")
    rows = rows_of(tmp_path / "samples.csv")
    assert len(frames) == len(rows) == 8
    for frame, row in zip(frames, rows, strict=True):
        assert str(frame.info["name"]).zfill(5) == row["name"]
        assert len(frame) == int(row["atoms"])
        assert frame.pbc.all()
        assert frame.info["rank"] == pytest.approx(float(row["rank"]))
        assert bool(frame.info["distances_ok"]) == (row["distances_ok"] == "true")
    assert frames[1].info["e_above_hull"] == pytest.approx(float(rows[1]["e_above_hull"]))
    assert "e_above_hull" not in frames[0].info


@pytest.mark.usefixtures("no_picture")
def test_the_table_has_a_row_for_every_crystal(setting, drawn, tmp_path):
    setting.write_samples(drawn, tmp_path)
    rows = rows_of(tmp_path / "samples.csv")
    assert [row["name"] for row in rows] == [f"{i:05d}" for i in range(COUNT)]
    assert sum(row["problem"] != "" for row in rows) > 0
    assert [float(row["confidence"]) for row in rows] == pytest.approx(drawn.confidence.tolist())
    again = Trajectory.load(tmp_path)
    assert same(again.x, drawn.x)
    torch.testing.assert_close(again.score(), drawn.score())
    assert torch.equal(again.confidence, drawn.confidence)


# ---- drawing --------------------------------------------------------------------------------------------------------


def test_compact_batches_have_the_same_scores(setting, field):
    options = {"steps": 4, "batch": 4}
    whole = setting.draw(field, COUNT, 1, None, **arguments(**options))
    compact = setting.draw(field, COUNT, 1, None, **arguments(compact=True, **options))
    assert same(compact.x, whole.x)
    torch.testing.assert_close(compact.score("type/integrated"), whole.score("type/integrated"))


# ---- the judge ------------------------------------------------------------------------------------------------------


def test_crystals_fail_unless_they_are_metastable(setting, salts):
    bad, above = setting.judge(salts), np.array(setting.judgement(salts)["e_above_hull"], float)
    assert bad.tolist() == [not (e <= 0.1) for e in above]
    assert bad[0]  # it could not be judged
    assert not bad.all()


def test_novelty_is_judged_against_all_known_structures(setting, salts, monkeypatch):
    monkeypatch.setattr(room.mp20, "load_all", lambda where: {"test": crystals_of(salts).take([2, 3])})
    monkeypatch.setattr(room.mp20, "energies", lambda where: None)
    monkeypatch.setenv("FMWC_DATA", "somewhere")
    judgement = setting.judgement(salts)
    novel = judgement["novel"]
    assert judgement["twin"][2:4] == judgement["name"][2:4]
    assert judgement["twin_split"][2:4] == ["test", "test"]
    assert novel[2] is novel[3] is False
    assert novel[0] is False  # two atoms at one position are not novel
    assert any(novel)


def test_evaluation_reports_quality_and_identical_crystals(field):
    told = []
    found = experiment_named("crystals").evaluate(field, 6, 3, "", told.append)
    assert found["bit_for_bit"] is True
    assert found["quality"]["structures"] == 6
    assert sum(told) >= 6
