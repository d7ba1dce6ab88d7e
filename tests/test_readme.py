"""Printed numbers are those of `results/`; that code and commands run is tested in test_documents.py."""

import json
import re
from pathlib import Path

import pytest

from fmwc.recipes.comparing import cells
from fmwc.report.bench_tables import bench_tables
from fmwc.report.paper import crystals, mnist
from fmwc.report.paper.checkerboard import TABLES
from fmwc.report.results import headline_table, summarise
from fmwc.report.tables import markdown

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results" / "checkerboard"
MNIST = ROOT / "results" / "mnist"
CRYSTALS = ROOT / "results" / "crystals"
README = (ROOT / "README.md").read_text()


def test_the_tables_are_those_of_the_results():
    assert headline_table(json.loads((RESULTS / "summary.json").read_text())) in README
    for table in bench_tables(ROOT / "results" / "bench"):
        assert table in README


def test_the_mnist_table_is_that_of_the_cell():
    (cell,) = cells(MNIST)
    assert mnist.headline(cell["numbers"]) in README
    summary = json.loads((MNIST / "summary.json").read_text())
    assert {name: table.rows for name, table in mnist.tables(cell["numbers"]).items()} == summary["tables"]


def test_the_crystals_table_is_that_of_the_cell():
    rows = crystals.headline(CRYSTALS)
    assert markdown(rows, list(rows[0])) in README
    joint = crystals.headline(CRYSTALS / "earlier")[:6]
    assert markdown(joint, list(joint[0])) in README
    (cell,) = cells(CRYSTALS)
    summary = json.loads((CRYSTALS / "summary.json").read_text())
    assert {name: table.rows for name, table in crystals.tables(cell["numbers"]).items()} == summary["tables"]


def test_the_default_is_as_cheap_as_was_asked_for():
    """Linearised on the default schedule: at most 1.25 times plain sampling on two cores, 1.15 on an H200."""
    for machine, most, settings in (
        ("cpu", 1.25, ("checkerboard", "mnist", "crystals")),
        ("h200", 1.15, ("mnist", "crystals")),
    ):
        for setting in settings:
            costs = json.loads((ROOT / "results" / "bench" / machine / f"{setting}.json").read_text())
            assert costs["compiled"]["linearised in bf16, few readings"]["ratio"] <= most
            assert costs["provenance"]["steps"] == 50


def test_the_summary_is_made_from_the_cells():
    summary = json.loads((RESULTS / "summary.json").read_text())
    assert json.loads(json.dumps(summarise(cells(RESULTS)))) == summary["tables"]


@pytest.mark.parametrize("name", TABLES)
def test_every_entry_of_every_table_was_measured_on_three_seeds(name):
    summary = json.loads((RESULTS / "summary.json").read_text())["tables"][name]
    assert len(summary) == len(TABLES[name].rows)  # no two rows share a label
    for row in summary.values():
        for heading in TABLES[name].columns:
            assert row[heading]["seeds"] == 3


def test_every_picture_and_page_that_is_linked_is_there():
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / link).exists(), link


RETROFIT = {
    path.stem: json.loads(path.read_text())["numbers"] for path in (ROOT / "results" / "retrofit").glob("*.json")
}


@pytest.mark.parametrize("setting", ["checkerboard", "mnist"])
def test_a_retrofit_has_most_of_joint_trainings_lift_with_few_of_its_steps(setting):
    rows = RETROFIT[setting]
    for source in ("data", "own samples"):
        few = [
            r
            for name, r in rows.items()
            if name.startswith(f"{source}, ") and r["steps"] <= 0.1 * rows["joint"]["steps"]
        ]
        assert max(r["lift"] for r in few) >= 0.9 * rows["joint"]["lift"]


def test_the_table_of_retrofits_is_that_of_the_results():
    page = (ROOT / "docs" / "five_minutes.md").read_text()
    for setting, word, digits in (
        ("checkerboard", "Checkerboard", 1),
        ("mnist", "digits", 1),
        ("crystals", "crystals", 2),
    ):
        for source in ("data", "own samples"):
            rows = [RETROFIT[setting].get(f"{source}, {steps}") for steps in (100, 300, 1000)]
            numbers = [f"{row['lift']:.{digits}f}" if row else "—" for row in rows]
            (row,) = re.findall(rf"^\| {word}, {source} +\|(.*)\|$", page, re.M)
            assert [cell.strip() for cell in row.split("|")][:3] == numbers
