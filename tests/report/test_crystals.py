"""The page, the figures and the tables of crystals: made from whatever a run holds."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fmwc.data.crystals import Crystals, encode
from fmwc.errors import CheckpointError, ShapeError, UsageError
from fmwc.metrics.crystals import Judgement
from fmwc.metrics.crystals.candidates import candidates
from fmwc.recipes.crystals.reading import crystals_of, hutchinson_rows, lift_of, quality_of
from fmwc.report import crystals_drawn
from fmwc.report.crystal_files import csv_text
from fmwc.report.crystals import write_figures, write_report
from fmwc.report.paper.crystals import headline, tables, write_tables
from fmwc.report.paper.crystals_rows import FILTERS, PAPER_SWEEP
from fmwc.report.tables import markdown
from fmwc.sampling import Trajectory
from fmwc.sampling.scores import standard_of

NAN = float("nan")
COUNT = 64
CHANNELS = ("type", "coord", "lattice")
SCORES = ("integrated", "peak", "temporal_ratio", "endpoint")
LOST = {  # what is missing: the tables that have new dashes for it
    "quality": {"table1_quality"},
    "trained": {"table1_quality"},
    "own": {"table2_auprc"},
    "linearised": {"table2_auprc", "channels"},
    "diagonal": {"table2_auprc", "channels"},
    "heads": {"table2_auprc"},
    "thresholds": {"thresholds"},
}
SECTIONS = [
    "Structures in the order of the model&#x27;s confidence",
    "What the surest are worth",
    "When the model is unsure, channel by channel",
    "The 20 surest",
    "The 10 most doubtful",
    "The numbers",
    "What this cannot tell you",
    "Where this comes from",
]


def made(count: int = COUNT, read: int = 10) -> Trajectory:
    """Salts of 2 to 4 atoms, the doubtful ones last."""
    generator = torch.Generator().manual_seed(0)
    atoms = 2 + torch.arange(count) % 3
    present = torch.arange(4) < atoms[:, None]
    numbers = torch.tensor([11, 17, 8, 26]).repeat(count, 1) * present
    coords = torch.rand(count, 4, 3, generator=generator) * present[..., None]
    lengths, angles = 3 + 3 * torch.rand(count, 3, generator=generator), torch.full((count, 3), 90.0)
    x, _ = encode(Crystals(numbers, coords, lengths, angles, tuple(map(str, range(count)))))
    grid = torch.linspace(0, 1, read + 1)[:, None].repeat(1, count)
    hill = 1.2 - (grid[:-1] - 0.4) ** 2  # (R, B)
    doubt = 1 + torch.arange(count) / count
    var = {c: (hill * doubt**k)[..., None] for k, c in enumerate(CHANNELS, 1)}
    mean = {c: torch.zeros_like(v) for c, v in var.items()}
    x0 = {c: torch.zeros_like(v) for c, v in x.items()}
    return Trajectory(
        x, x0, grid[:-1].clone(), mean, var, grid, cond={"atoms": atoms}, default_score="integrated", seed=3
    )


def judged(run: Trajectory, energy=None, problem: str = "", novel=True) -> Judgement:
    """As an energy model would: the higher, the later in the run."""
    those = candidates(crystals_of(run))
    count = len(those)
    energy = np.linspace(-0.02, 0.6, count) if energy is None else np.asarray(energy, float)
    fine = np.isfinite(energy)
    yes, known = [bool(v) for v in fine], [bool(v) for v in energy <= 0.1]
    columns = {
        "name": [c.name for c in those],
        "formula": ["?"] * count,
        "atoms": [len(c) for c in those],
        "energy_per_atom": energy.tolist(),
        "e_above_hull": energy.tolist(),
        **dict.fromkeys(("distances_ok", "apart_ok", "density_ok", "unique"), yes),
        "charge_ok": [bool(v) and i % 7 > 0 for i, v in enumerate(yes)],
        "valid": [bool(v) and i % 7 > 0 for i, v in enumerate(yes)],
        "novel": [novel] * count,
        "stable": [bool(v) for v in energy <= 0],
        "metastable": known,
        "sun": [None if novel is None else bool(v) for v in energy <= 0],
        "msun": [None if novel is None else v for v in known],
        "problem": ["" if ok else problem for ok in yes],
    }
    return Judgement(columns, tuple(those))


@pytest.fixture(scope="module")
def run():
    return made()


def page_of(tmp_path, run, judgement, numbers=(), about=None):
    return write_report(tmp_path, run, judgement, numbers=list(numbers), provenance=about or {}).read_text()


# ---- the page ----------------------------------------------------------------------------------------------------


def test_the_page_is_whole_and_fetches_nothing(tmp_path, run):
    energy = np.where(np.arange(COUNT) == COUNT - 1, NAN, np.linspace(-0.02, 0.6, COUNT))
    judgement = judged(run, energy, "atoms 1 & 2 <coincide>: 0 Å")
    page = page_of(
        tmp_path, run, judgement, [{"score": "own", "AUPRC": "0.5"}], {"commit": "<script>alert(1)</script>"}
    )
    assert page.rstrip().endswith("</html>")
    assert re.findall(r"<h2 [^>]*>(.*?)</h2>", page) == SECTIONS
    assert page.count("<img ") == page.count('<img src="data:') == 3
    assert not re.search(r'(src|href)\s*=\s*"(?!data:)', page)
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "atoms 1 &amp; 2 &lt;coincide&gt;: 0 Å" in page
    assert "no: charge" in page


def test_the_main_numbers_are_those_of_the_ranking(tmp_path, run):
    judgement = judged(run)
    page = page_of(tmp_path, run, judgement)
    found = lift_of(run.score(), np.array(judgement["metastable"]))
    tiles = re.findall(r"<dt>([^<]*)</dt><dd class=\"[a-z]*\">([^<]*)</dd>", page)
    assert [value for _, value in tiles] == [
        f"{found['prevalence']:.1%}",
        "100.0%",
        f"{found['lift']:.1f}×",
        f"{np.mean(judgement['e_above_hull']):.2f}",
    ]
    assert found["precision_10%"] == 1
    assert "(6 of 6)" in tiles[1][0]


def test_structures_are_listed_from_both_ends(tmp_path, run):
    page = page_of(tmp_path, run, judged(run))
    sure, doubtful = re.findall(r"<tbody>(.*?)</tbody>", page)
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", sure + doubtful)]
    assert [row[0] for row in rows] == [str(i) for i in (*range(1, 21), *range(COUNT - 9, COUNT + 1))]
    assert [row[1] for row in rows[:2]] == ["00000", "00001"]
    assert rows[0][2:6] == ["NaCl", "2", f"{run.confidence[0]:.3f}", "−0.020"]
    assert '<th scope="col">problem</th>' not in page  # there was none


@pytest.mark.parametrize("count", [1, 2, 30])
def test_few_structures_are_listed_whole(tmp_path, count):
    few = made(count)
    page = page_of(tmp_path, few, judged(few))
    assert "All structures, the surest first" in page
    assert len(re.findall("<tr>", page)) == count + 1


def test_a_run_that_cannot_be_judged_has_a_page(tmp_path, run):
    page = page_of(tmp_path, run, judged(run, np.full(COUNT, NAN), "the model does not know Cf"))
    assert "None of them could be judged" in page
    assert page.count("the model does not know Cf") == 30
    assert page.count("<img ") == 3


def test_a_run_without_a_good_structure_has_a_page(tmp_path, run):
    page = page_of(tmp_path, run, judged(run, np.full(COUNT, 0.7), novel=None))
    assert "None of them is within 0.1 eV/atom" in page
    assert 'class="">0.70</dd>' in page
    assert "100.0%" in page_of(tmp_path, run, judged(run, np.zeros(COUNT)))


def test_what_cannot_be_ranked_is_refused(tmp_path, run):
    empty = {c: v[:0] for c, v in run.var.items()}
    bare = replace(run, times=run.times[:0], mean=empty, var=empty)
    with pytest.raises(UsageError, match="confidence=True"):
        page_of(tmp_path, bare, judged(run))
    with pytest.raises(UsageError, match="atoms=counts"):
        page_of(tmp_path, replace(run, cond={}), judged(run))
    with pytest.raises(ShapeError, match="64 structures, 30 judgements"):
        page_of(tmp_path, run, judged(made(30)))
    assert not list(tmp_path.iterdir())


def test_the_order_is_the_runs_own(tmp_path, run):
    """Among structures of the same size, if that is how the run ranks."""
    within = replace(run, standard=standard_of("atoms", run.score("integrated"), run.cond["atoms"]))
    page = page_of(tmp_path, within, judged(run))
    first = re.findall(r"<tbody><tr><td[^>]*>1</td><td[^>]*>(.*?)</td>", page)[0]
    assert int(first) == int(within.score().argmin())


# ---- a results folder --------------------------------------------------------------------------------------------


def hutchinson():
    generator = torch.Generator().manual_seed(1)
    reference = -torch.rand(4, 40, generator=generator) - 0.5
    noise = torch.randn(4, 40, generator=generator)
    sweep = {f"k{k}": reference + 0.5 * noise / k**0.5 for k in (1, 10, 500)} | {"reference": reference}
    for name, size in (("linearised", 0.2), ("diagonal", 0.6)):
        sweep |= {f"{name}.{c}": (reference.abs() + size * noise).abs() for c in CHANNELS}
    return hutchinson_rows(sweep, {"hutchinson_1": 3e9, "hutchinson_2": 5e9, "linearised": 6e9, "diagonal": 2e9})


def cell_of(run):
    judgement = judged(run)
    good = np.array(judgement["metastable"])
    lift = lift_of(run.score(), good)
    every = {f"{c}/{s}": lift for c in ("all", *CHANNELS) for s in SCORES}
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
    about |= {"samples": COUNT, "steps": 50, "pieces": {"hutchinson": {"commit": "def456", "samples": 1_040}}}
    numbers = {"retrofit": method, "joint": {**method, "bit_for_bit": False}, "hutchinson": hutchinson()}
    return {"setting": "crystals", "seed": 0, "provenance": about, "numbers": numbers}


@pytest.fixture
def folder(tmp_path, run):
    (tmp_path / "cells").mkdir()
    (tmp_path / "judged").mkdir()
    (tmp_path / "cells" / "0.json").write_text(json.dumps(cell_of(run)))
    run.save(tmp_path / "draws" / "retrofit-run.safetensors")
    energy = np.where(np.arange(COUNT) % 9 == 8, NAN, np.linspace(-0.02, 0.6, COUNT))
    (tmp_path / "judged" / "retrofit.csv").write_text(csv_text(judged(run, energy).columns))
    return SimpleNamespace(out=tmp_path, energy=energy)


def test_figures_are_drawn_from_what_was_kept(folder, monkeypatch):
    seen = []
    drawn = crystals_drawn.sorted_by_confidence
    monkeypatch.setattr(crystals_drawn, "sorted_by_confidence", lambda *a, **k: seen.append(a) or drawn(*a, **k))
    paths = write_figures(folder.out)
    assert [path.name for path in paths] == [f"{n}.png" for n in ("crystals", "precision", "channels", "hutchinson")]
    assert all(path.parent.name == "figures" and path.stat().st_size > 1000 for path in paths)
    np.testing.assert_array_equal(seen[0][2], folder.energy)
    np.testing.assert_array_equal(seen[0][3], np.isfinite(folder.energy))


def test_figures_without_a_sweep_and_of_a_folder_cut_short(folder):
    cell = json.loads((folder.out / "cells" / "0.json").read_text())
    del cell["numbers"]["hutchinson"]
    (folder.out / "cells" / "0.json").write_text(json.dumps(cell))
    assert len(write_figures(folder.out)) == 3
    table = folder.out / "judged" / "retrofit.csv"
    table.write_text("\n".join(table.read_text().splitlines()[:10]) + "\n")
    with pytest.raises(ShapeError, match="64 structures, 9 judgements"):
        write_figures(folder.out)
    for text in ("name\n1\n", "e_above_hull,distances_ok\nhigh,true\n"):
        table.write_text(text)
        with pytest.raises(CheckpointError, match="reproduce crystals"):
            write_figures(folder.out)
    table.unlink()
    with pytest.raises(CheckpointError, match="reproduce crystals"):
        write_figures(folder.out)


def test_tables_stand_beside_the_papers(folder):
    summary, text = write_tables(folder.out)
    rows = json.loads(summary.read_text())["tables"]
    page = text.read_text()
    assert list(rows) == ["table1_quality", "table2_auprc", "channels", "thresholds", "universality", "hutchinson",
                          "sampler"]  # fmt: skip
    first = rows["table1_quality"][0]
    assert first["paper, FM"] == first["paper, FMwC"] == "0.21"
    assert re.fullmatch(r"0\.290 \[0\.\d{3}, 0\.\d{3}\]", first["FM + retrofit"])
    assert rows["table1_quality"][-1]["FMwC, joint"] == "61,234 of 75,000"
    filters = {row[""]: row for row in rows["table2_auprc"]}
    assert filters["FM + retrofit: the run's own score"]["lift"].endswith("[1.50, 2.50]")
    assert filters["FMwC, joint: diagonal, endpoint"]["paper, lift"] == "1.3"
    assert filters["FMwC, joint: random order"]["AUPRC"] == filters["FMwC, joint: random order"]["a random order's"]
    assert filters["FM + retrofit: no model, ranked by atoms"]["AUPRC"] != "—"
    assert [row["at most, eV/atom"] for row in rows["thresholds"][:4]] == ["0.0", "0.05", "0.1", "0.2"]
    assert rows["universality"][0]["Spearman, integrated"] == "0.96"
    assert len(rows["universality"]) == 9
    assert "FM + retrofit yes; FMwC, joint NO" in page
    assert page.count("Commit abc123; a GPU; seed 0; 64 structures; 50 steps; 2026-11-15.") == 5
    assert page.count("Commit def456; a GPU; seed 0; 1,040 structures; 50 steps; 2026-11-15.") == 2


def test_the_papers_sweep_stands_beside_the_same_number_of_probes(run):
    rows = tables(cell_of(run)["numbers"])["hutchinson"].rows
    assert [row["K"] for row in rows] == ["1", "10", "500", "—", "—"]
    assert [row["paper: Spearman, per step"] for row in rows[:3]] == ["0.500", "0.745", "0.868"]
    assert [row["GFLOPs a query"] for row in rows] == ["3.0", "21.0", "1001.0", "2.0", "6.0"]
    assert float(rows[0]["Spearman, per step"]) < float(rows[2]["Spearman, per step"])
    assert "linearised is reached per step by K = " in tables(cell_of(run)["numbers"])["hutchinson"].note


def dashes(table):
    return sum(value == "—" for row in table.rows for value in row.values())


@pytest.mark.parametrize(
    "missing",
    ["quality", "own", "linearised", "diagonal", "heads", "thresholds", "baselines", "trained", "bit_for_bit"],
)
def test_what_is_missing_is_a_dash(run, missing):
    numbers = cell_of(run)["numbers"]
    del numbers["retrofit"][missing]
    whole, cut = tables(cell_of(run)["numbers"]), tables(numbers)
    for name, table in cut.items():
        markdown(table.rows, list(table.rows[0]))
        assert len(table.rows) == len(whole[name].rows) - (missing == "baselines" and name == "table2_auprc")
    assert all(list(row) == list(t.rows[0]) for t in cut.values() for row in t.rows)
    changed = {name for name in cut if dashes(cut[name]) > dashes(whole[name])}
    assert changed == LOST.get(missing, set())


@pytest.mark.parametrize("numbers", [{}, {"retrofit": {}}, {"joint": {"own": {}}}, {"hutchinson": []}])
def test_an_empty_cell_has_tables(tmp_path, numbers):
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / "0.json").write_text(json.dumps({"numbers": numbers}))
    _, text = write_tables(tmp_path)
    assert "Commit —; —; seed —; — structures" in text.read_text()
    assert "nan" not in text.read_text().lower()
    assert {row["FM + retrofit"] for row in headline(tmp_path)} == {"—"}
    assert len(tables(numbers)["hutchinson"].rows) == len(PAPER_SWEEP)
    (tmp_path / "cells" / "0.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no numbers"):
        write_tables(tmp_path)


def test_what_is_not_a_number_is_a_dash(run):
    numbers = cell_of(run)["numbers"]
    numbers["retrofit"]["quality"] = quality_of_none(run)
    column = [row["FM + retrofit"] for row in tables(numbers)["table1_quality"].rows]
    assert column[:2] == ["—", "—"]
    assert column[7] == "—"  # novelty was not judged
    assert column[4] == "0.0"


def quality_of_none(run):
    """Nothing judged, and no training set: what `quality_of` gives but for its intervals."""
    return json.loads(json.dumps(judged(run, np.full(COUNT, NAN), "no", novel=None).summary()))


def test_the_headline_is_made_from_the_cell(folder):
    rows = headline(folder.out)
    assert list(rows[0]) == ["", "paper", "FM + retrofit", "FMwC, joint"]
    labels = [row[""] for row in rows]
    assert len(set(labels)) == len(labels)
    assert rows[0]["paper"] == "0.21; 0.21"
    assert [row["paper"] for row in rows if row[""] == "lift: diagonal, integrated"] == ["1.3"]
    assert rows[-1]["FMwC, joint"] == "—" != rows[-1]["FM + retrofit"]
    lines = markdown(rows, list(rows[0])).splitlines()
    assert r"\|∇·v\|, integrated" in lines[-1]
    assert len(lines) == len(rows) + 2
    assert len(FILTERS) == len({path for *_, path in FILTERS})
