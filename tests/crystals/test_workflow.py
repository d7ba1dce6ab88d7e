"""The example of jobflow runs here, from its serialised form, and continues with other makers."""

import json
from dataclasses import dataclass

import numpy as np
import pytest

pytest.importorskip("jobflow")
pytest.importorskip("chgnet", exc_type=ImportError)

from jobflow import Maker, job, run_locally
from monty.json import MontyDecoder
from pymatgen.core import Structure

from examples.crystal_workflow import workflow
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


@pytest.mark.parametrize("each", [Density(), density], ids=["maker", "function"])
def test_draw_keep_relax_and_continue(each, trained, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)  # where jobs run
    made = workflow(
        8, 2, {"formula": "NaCl"}, relax_steps=1, continue_with=each, checkpoint=str(trained), steps=4, seed=3
    )
    flow = MontyDecoder().process_decoded(json.loads(made.to_json()))  # as a job store keeps it
    found = run_locally(flow, ensure_success=True, raise_immediately=True, log=False)
    names = {one.uuid: one.name for one in flow.jobs}
    outputs = {names.get(uuid, uuid): runs[max(runs)].output for uuid, runs in found.items()}
    drawn, kept, relaxed = (outputs[name] for name in ("draw crystals", "keep the surest crystals", "relax crystals"))
    assert {one.composition.reduced_formula for one in drawn.structures} == {"NaCl"}
    order = np.argsort(drawn.table["score"], kind="stable")[:2]
    assert kept.table["name"] == relaxed.table["name"] == [drawn.table["name"][i] for i in order]
    assert [one == drawn.structures[i] for one, i in zip(kept.structures, order, strict=True)] == [True, True]
    assert len(relaxed.table["e_above_hull"]) == 2
    assert all(isinstance(one, Structure) for one in relaxed.structures)
    documents = [value for value in outputs.values() if isinstance(value, dict)]
    assert sorted(one["density"] for one in documents) == pytest.approx(sorted(s.density for s in relaxed.structures))
