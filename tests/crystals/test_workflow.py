"""Workflows of jobflow: they run here, from their serialised form, and continue with other makers."""

import json
from dataclasses import dataclass

import numpy as np
import pytest

pytest.importorskip("jobflow")
pytest.importorskip("chgnet", exc_type=ImportError)

from jobflow import Maker, job, run_locally
from monty.json import MontyDecoder
from pymatgen.core import Structure

from fmwc.crystals.workflow import CrystalSet, DrawMaker, GenerateMaker, RelaxMaker, for_each
from fmwc.errors import UsageError
from tests.crystals.test_cli import trained  # noqa: F401

pytestmark = pytest.mark.filterwarnings("ignore:cd is deprecated:FutureWarning")


@dataclass
class Density(Maker):
    """Like a maker of atomate2: takes a structure and returns a document."""

    name: str = "density"

    @job
    def make(self, structure, prev_dir=None):
        return {"formula": structure.composition.reduced_formula, "density": float(structure.density)}


def density(structure):
    return Density().make(structure)


def outputs(flow):
    """Run a flow; return the output of each job by its name, the last run of a job counts."""
    found = run_locally(flow, ensure_success=True, raise_immediately=True, log=False)
    names = {one.uuid: one.name for one in flow.jobs}
    return {names.get(uuid, uuid): runs[max(runs)].output for uuid, runs in found.items()}


def test_draw_keep_relax_and_continue(trained, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)  # where jobs run
    draw = DrawMaker(checkpoint=str(trained), count=8, steps=4, seed=3, device="cpu", controls={"formula": "NaCl"})
    made = GenerateMaker(draw_maker=draw, budget=2, relax_maker=RelaxMaker(steps=1), each_maker=Density()).make()
    flow = MontyDecoder().process_decoded(json.loads(made.to_json()))  # as a job store keeps it
    found = outputs(flow)
    drawn, kept, relaxed = (found[name] for name in ("draw crystals", "keep the surest crystals", "relax crystals"))
    assert all(isinstance(one, CrystalSet) for one in (drawn, kept, relaxed))
    assert {one.composition.reduced_formula for one in drawn.structures} == {"NaCl"}
    assert drawn.about["controls"] == {"formula": "NaCl"}
    assert drawn.about["withheld"]
    order = np.argsort(drawn.table["score"], kind="stable")[:2]
    assert kept.table["name"] == relaxed.table["name"] == [drawn.table["name"][i] for i in order]
    assert [one == drawn.structures[i] for one, i in zip(kept.structures, order, strict=True)] == [True, True]
    assert len(relaxed.table["e_above_hull"]) == len(relaxed.structures) == 2
    assert all(isinstance(one, Structure) for one in relaxed.structures)
    documents = [value for value in found.values() if isinstance(value, dict)]
    assert sorted(one["density"] for one in documents) == pytest.approx(
        sorted(float(s.density) for s in relaxed.structures)
    )


def test_a_function_that_returns_a_job_continues_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    salt = Structure.from_spacegroup(
        "Fm-3m", [[5.64, 0, 0], [0, 5.64, 0], [0, 0, 5.64]], ["Na", "Cl"], [[0] * 3, [0.5] * 3]
    )
    found = run_locally(for_each(density, [salt, salt]), ensure_success=True, log=False)
    documents = [run.output for runs in found.values() for run in runs.values() if isinstance(run.output, dict)]
    assert [one["formula"] for one in documents] == ["NaCl", "NaCl"]


def test_the_share_kept_is_that_of_the_crystals_drawn(trained, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    draw = DrawMaker(checkpoint=str(trained), count=6, steps=4, device="cpu")
    flow = GenerateMaker(draw_maker=draw, keep=0.5, relax_maker=None).make()
    assert [one.name for one in flow.jobs] == ["draw crystals", "keep the surest crystals"]
    found = outputs(flow)
    assert len(found["keep the surest crystals"].structures) == max(
        1, round(len(found["draw crystals"].structures) / 2)
    )


def test_wrong_settings_fail_in_one_line(trained, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    wrong = DrawMaker(checkpoint=str(trained), count=1, device="cpu", controls={"system": "Na-Xx"})
    with pytest.raises(UsageError, match="'Xx' is not the symbol of an element"):
        run_locally(wrong.make(), ensure_success=True, raise_immediately=True, log=False)
