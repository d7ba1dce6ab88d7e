"""Figures and tables of a results folder of crystals."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.figure import Figure

from experiments.crystals.evaluate import lift_of, quality_of
from experiments.crystals.figures import write_figures
from experiments.crystals.tables import FILTERS, PAPER_SWEEP, headline, tables, tables_of
from fmwc.crystals import figures as crystals_drawn
from fmwc.crystals.recipe import SCORE
from fmwc.errors import CheckpointError, ShapeError
from fmwc.report.table import Table
from tests.crystals.test_report import CHANNELS, COUNT, NAN, judged, made

SCORES = ("integrated", "peak", "temporal_ratio", "endpoint")
LOST = {  # missing part: the tables that then have more dashes
    "quality": {"table1_quality", "sampler"},
    "trained": {"table1_quality"},
    "own": {"table2_auprc", "sampler"},
    "linearised": {"table2_auprc", "channels"},
    "diagonal": {"table2_auprc", "channels"},
    "heads": {"table2_auprc"},
    "thresholds": {"thresholds"},
}


@pytest.fixture(scope="module")
def run():
    return made()


def hutchinson():
    """Rows in the format of `hutchinson_rows`."""
    rows = [("Hutchinson", 1, 3e9, 0.55), ("Hutchinson", 10, 21e9, 0.88), ("Hutchinson", 500, 1001e9, 0.99)]
    for name, flops, value in (("diagonal", 2e9, 0.3), ("linearised", 6e9, 0.78)):
        rows += [(n, None, flops, value) for n in (name, *(f"{name}, {c}" for c in CHANNELS))]
    rows.append(("number of atoms", None, 0.0, 0.4))
    fields = [f"{regime}_{kind}" for regime in ("per_step", "integrated") for kind in ("spearman", "pearson")]
    return [{"name": n, "K": k, "flops": f, **dict.fromkeys(fields, value)} for n, k, f, value in rows]


def cell_of(run):
    judgement = judged(run)
    good = np.array(judgement["metastable"])
    lift = lift_of(run.score(), good)
    every = dict.fromkeys([SCORE, *SCORES, *(f"{c}/{s}" for c in CHANNELS for s in SCORES)], lift)
    quality = quality_of(judgement)
    method = {
        "quality": quality,
        "bit_for_bit": True,
        "trained": {"steps": 61_234, "of": 75_000},
        "own": {**lift, "lift_interval": [1.5, 2.5]},
        **dict.fromkeys(("linearised", "every_5th", "diagonal"), every),
        "dispersion": lift,
        **{heads: dict.fromkeys(("l1", "boosting", "label_free"), lift) for heads in ("heads", "heads_diagonal")},
        "thresholds": dict.fromkeys(("0.2", "0.0", "0.05", "0.1"), lift),
        "baselines": {"atoms": lift},
        "sampler": {"50 steps, anneal 0": {"quality": quality, "own": lift}},
    }
    about = {"commit": "abc123", "device": "a GPU", "seconds": 12.0, "date": "2026-11-15T12:00:00+00:00"}
    about |= {"samples": COUNT, "recipe": {"steps": 50}}
    about["pieces"] = {
        "draw-sweep": {"commit": "def456", "samples": COUNT, "few": 1_040},
        "draw-samplers": {"commit": "789"},
    }
    numbers = {"retrofit": method, "joint": {**method, "bit_for_bit": False}, "hutchinson": hutchinson()}
    return {"setting": "crystals", "seed": 0, "provenance": about, "numbers": numbers}


@pytest.fixture
def folder(tmp_path, run):
    (tmp_path / "cells").mkdir()
    (tmp_path / "judged").mkdir()
    (tmp_path / "cells" / "0.json").write_text(json.dumps(cell_of(run)))
    run.save(tmp_path / "draws" / "retrofit-0.safetensors")
    energy = np.where(np.arange(COUNT) % 9 == 8, NAN, np.linspace(-0.02, 0.6, COUNT))
    (tmp_path / "judged" / "retrofit-0.csv").write_text(Table.from_columns(judged(run, energy).columns).csv())
    return SimpleNamespace(out=tmp_path, energy=energy)


def test_figures_use_the_stored_run_and_judgement(folder, monkeypatch):
    seen = []
    monkeypatch.setattr(crystals_drawn, "sorted_by_confidence", lambda *a, **k: seen.append(a) or Figure())
    paths = write_figures(folder.out)
    assert [path.name for path in paths] == [f"{n}.png" for n in ("crystals", "precision", "channels", "hutchinson")]
    assert all(path.parent.name == "figures" and path.stat().st_size > 1000 for path in paths)
    np.testing.assert_array_equal(seen[0][2], folder.energy)
    np.testing.assert_array_equal(seen[0][3], np.isfinite(folder.energy))


def test_figures_of_incomplete_folders(folder, monkeypatch):
    monkeypatch.setattr(crystals_drawn, "sorted_by_confidence", lambda *a, **k: Figure())
    cell = json.loads((folder.out / "cells" / "0.json").read_text())
    del cell["numbers"]["hutchinson"]
    (folder.out / "cells" / "0.json").write_text(json.dumps(cell))
    assert len(write_figures(folder.out)) == 3
    table = folder.out / "judged" / "retrofit-0.csv"
    table.write_text("\n".join(table.read_text().splitlines()[:10]) + "\n")
    with pytest.raises(ShapeError, match="64 structures and 9 judgements"):
        write_figures(folder.out)
    for text in ("name\n1\n", "e_above_hull,distances_ok\nhigh,true\n"):
        table.write_text(text)
        with pytest.raises(CheckpointError, match="reproduce crystals"):
            write_figures(folder.out)
    table.unlink()
    with pytest.raises(CheckpointError, match="reproduce crystals"):
        write_figures(folder.out)


def test_tables_with_the_papers_numbers(folder):
    summary, text = tables(folder.out)
    rows = json.loads(summary.read_text())["tables"]
    page = text.read_text()
    assert list(rows) == ["table1_quality", "table2_auprc", "channels", "thresholds", "universality", "hutchinson",
                          "sampler"]  # fmt: skip
    first = rows["table1_quality"][0]
    assert first["paper, FM"] == first["paper, FMwC"] == "0.21"
    assert re.fullmatch(r"0\.290 \[0\.\d{3}, 0\.\d{3}\]", first["FM + retrofit"])
    assert rows["table1_quality"][-1]["FMwC, joint"] == "61,234 of 75,000"
    filters = {row[""]: row for row in rows["table2_auprc"]}
    assert filters[f"FM + retrofit: the score of the variance, {SCORE}"]["lift"].endswith("[1.50, 2.50]")
    assert filters["FMwC, joint: diagonal, all/endpoint"]["paper, lift"] == "1.3"
    assert (
        filters["FMwC, joint: random order"]["AUPRC"] == filters["FMwC, joint: random order"]["AUPRC of a random order"]
    )
    assert filters["FM + retrofit: no model, ranked by atoms"]["AUPRC"] != "—"
    assert [row["maximum, eV/atom"] for row in rows["thresholds"][:4]] == ["0.0", "0.05", "0.1", "0.2"]
    assert rows["universality"][0]["Spearman, integrated"] == "0.96"
    assert len(rows["universality"]) == 10
    assert "FM + retrofit yes; FMwC, joint NO" in page
    assert page.count("Commit abc123; a GPU; seed 0; 64 structures; 50 steps; 2026-11-15.") == 4
    assert page.count("Commit 789; a GPU; seed 0; 2026-11-15.") == 1
    assert [row[""] for row in rows["sampler"]][:2] == [
        "FM + retrofit: as in the other tables",
        "FM + retrofit: 50 steps, anneal 0",
    ]
    assert page.count("Commit def456; a GPU; seed 0; 1,040 structures; 50 steps; 2026-11-15.") == 2


def test_sweep_rows_match_the_papers_by_number_of_probes(run):
    rows = tables_of(cell_of(run)["numbers"])["hutchinson"].rows
    assert [row["K"] for row in rows] == ["1", "10", "500", "—", "—", "—"]
    assert [row["paper: Spearman, per step"] for row in rows[:3]] == ["0.500", "0.745", "0.868"]
    assert [row["GFLOPs per evaluation"] for row in rows] == ["3.0", "21.0", "1001.0", "2.0", "6.0", "0.0"]
    assert float(rows[0]["Spearman, per step"]) < float(rows[2]["Spearman, per step"])
    assert (
        "linearised is matched per step by K = 10 (Spearman), K = 10 (Pearson)"
        in tables_of(cell_of(run)["numbers"])["hutchinson"].note
    )


def dashes(table):
    return sum(value == "—" for row in table.rows for value in row.values())


@pytest.mark.parametrize(
    "missing",
    ["quality", "own", "linearised", "diagonal", "heads", "thresholds", "baselines", "trained", "bit_for_bit"],
)
def test_missing_numbers_are_dashes(run, missing):
    numbers = cell_of(run)["numbers"]
    del numbers["retrofit"][missing]
    whole, cut = tables_of(cell_of(run)["numbers"]), tables_of(numbers)
    for name, table in cut.items():
        table.markdown()
        assert len(table.rows) == len(whole[name].rows) - (missing == "baselines" and name == "table2_auprc")
    assert all(list(row) == list(t.rows[0]) for t in cut.values() for row in t.rows)
    changed = {name for name in cut if dashes(cut[name]) > dashes(whole[name])}
    assert changed == LOST.get(missing, set())


@pytest.mark.parametrize("numbers", [{}, {"retrofit": {}}, {"joint": {"own": {}}}, {"hutchinson": []}])
def test_tables_of_empty_results(tmp_path, numbers):
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / "0.json").write_text(json.dumps({"numbers": numbers}))
    _, text = tables(tmp_path)
    assert "Commit —; —; seed —; — structures" in text.read_text()
    assert "nan" not in text.read_text().lower()
    assert not headline(tmp_path).rows
    assert len(tables_of(numbers)["hutchinson"].rows) == len(PAPER_SWEEP)
    (tmp_path / "cells" / "0.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no numbers"):
        tables(tmp_path)


def test_missing_method_has_no_column(run, tmp_path):
    cell = cell_of(run)
    del cell["numbers"]["joint"]
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / "0.json").write_text(json.dumps(cell))
    assert {tuple(row) for row in headline(tmp_path).rows} == {("", "paper", "FM + retrofit")}


def test_nan_is_a_dash(run):
    numbers = cell_of(run)["numbers"]
    numbers["retrofit"]["quality"] = quality_of_none(run)
    column = [row["FM + retrofit"] for row in tables_of(numbers)["table1_quality"].rows]
    assert column[:2] == ["—", "—"]
    assert column[7] == "—"  # novelty was not judged
    assert column[4] == "0.0"


def quality_of_none(run):
    """The summary if nothing was judged and there is no training set."""
    return json.loads(json.dumps(judged(run, np.full(COUNT, NAN), "no", novel=None).summary()))


def test_headline(folder):
    table = headline(folder.out)
    rows = table.rows
    assert list(rows[0]) == ["", "paper", "FM + retrofit", "FMwC, joint"]
    labels = [row[""] for row in rows]
    assert len(set(labels)) == len(labels)
    assert rows[0]["paper"] == "0.21; 0.21"
    assert [row["paper"] for row in rows if row[""] == "lift: diagonal, all/integrated"] == ["1.3"]
    assert rows[-1]["FMwC, joint"] == "—" != rows[-1]["FM + retrofit"]
    lines = table.markdown().splitlines()
    assert r"\|∇·v\|, integrated" in lines[-1]
    assert len(lines) == len(rows) + 2
    assert len(FILTERS) == len({path for *_, path in FILTERS})
