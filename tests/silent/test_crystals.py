"""Crystals are not called stable, charge-balanced or novel without evidence (issue 30, section 3)."""

import json
import math
import re
import sys
import time
import warnings
from base64 import b64decode
from threading import Thread
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from safetensors.numpy import load

pytest.importorskip("pymatgen.core", exc_type=ImportError)
pytest.importorskip("smact.screening", exc_type=ImportError)

from experiments.crystals.evaluate import quality_of
from fmwc.__main__ import main
from fmwc.cli.judge import result_rows
from fmwc.cli.labels import read_labels, read_table
from fmwc.cli.verbs import Filter, Screen
from fmwc.crystals import Candidate, Controls, Hull, Judgement, domain, judge, shipped_hull, validity
from fmwc.crystals.files import write_table
from fmwc.crystals.hull import _Cache
from fmwc.crystals.judge import with_consensus
from fmwc.crystals.report import write_report
from fmwc.crystals.structures import balanced, formula_of
from fmwc.networks import CSPNet
from fmwc.report.gallery import UNKNOWN
from fmwc.screening import driver
from fmwc.screening.results import _first
from fmwc.studio.samples import Content
from tests.crystals.test_report import made

# CHGNet energies (eV/atom) of the references of MP-20. There is no GdI3, and no compound of Er and Br.
GD_I_O = {"O2": -4.913, "I": -1.551, "Gd": -14.047, "IO3": -4.682, "GdIO": -9.536, "Gd2O3": -12.447, "Gd3I": -11.113}
CS_ER_BR = {"Br": -1.614, "Cs": -0.876, "Er": -4.547, "CsBr": -3.337, "CsBr3": -2.632}
GD_I3 = -6.35  # lowers the hull of Gd3(I2O)2 by 0.6 eV/atom, as known prototypes of GdI3 do


class Given:
    """An energy model that gives each structure the energy in its name."""

    name, highest = "chgnet", 118

    def correction(self, candidate):
        return 0.0

    def batches(self, candidates):
        for one in candidates:
            yield [float(one.name)]


def hull(*references):
    pairs = [pair for part in references for pair in part.items()]
    return Hull([formula for formula, _ in pairs], [energy for _, energy in pairs], "chgnet")


def structure(numbers, energy):
    """Atoms on a line, 3 Å apart; the energy is the structure's name."""
    count = len(numbers)
    coords = np.stack([(np.arange(count) + 0.5) / count, np.full(count, 0.5), np.full(count, 0.5)], 1)
    return Candidate(f"{energy}", np.array(numbers), coords, np.diag([3.0 * count, 3.0, 3.0]))


def gd_i_o(above):
    """Gd3(I2O)2 at an energy above the mixture of its known references."""
    energy = hull(GD_I_O).energy(((8, 2), (53, 4), (64, 3)))[0] + above
    return structure([64] * 3 + [53] * 4 + [8] * 2, energy)


# ---- unknown stability -----------------------------------------------------------------------------------------------

VERDICTS = ("stable", "metastable", "sun", "msun")
SALT = structure([55, 35], -3.337)  # CsBr


def judged(structures, references):
    return judge(structures, calculator=Given(), hull=references, known=[structure([3, 9], 0)])


def test_a_salt_without_its_simplest_phase_is_not_called_stable():
    """The references hold Gd3I, but no GdI3, which takes up the iodine that is left over in the decomposition."""
    found = judged([gd_i_o(-0.628)], hull(GD_I_O))
    assert [found[name] for name in VERDICTS] == [[None]] * 4
    assert found["sparse_hull"][0]
    assert math.isnan(found["e_above_hull"][0])


def test_with_that_phase_the_verdict_is_known():
    found = judged([gd_i_o(-0.628)], hull(GD_I_O, {"GdI3": GD_I3}))
    assert found["sparse_hull"] == [""]
    assert found["stable"] == [found["e_above_hull"][0] <= 1e-5]
    assert abs(found["e_above_hull"][0]) < 0.2


def test_a_pair_of_elements_without_any_reference_makes_metastable_unknown():
    energy = hull(CS_ER_BR).energy(((35, 6), (55, 2), (68, 1)))[0]
    given = [structure([55] * 2 + [68] + [35] * 6, energy + above) for above in (-1.05, 0.05)]
    found = judged([*given, SALT], hull(CS_ER_BR))
    # The second structure repeats the first, and lies above the mixture.
    assert [found[name][:2] for name in VERDICTS] == [[None, False], [None, None], [None, False], [None, False]]
    assert [found[name][2] for name in VERDICTS] == [True] * 4
    assert found.good.tolist() == [False, False, True]


@pytest.fixture
def two():
    """A judgement of Gd3(I2O)2 far below its known references, and of CsBr on its hull."""
    return judged([gd_i_o(-0.628), SALT], hull(GD_I_O, CS_ER_BR))


def test_the_unknown_is_neither_good_nor_first_in_tables_and_in_the_studio(two, tmp_path):
    path = next(path for path in write_table(tmp_path / "judged", two.columns) if path.suffix == ".csv")
    table = read_table(path, two["name"])
    for column in VERDICTS:
        options = Filter(tmp_path, tmp_path, labels=str(path), good=column)
        np.testing.assert_equal(read_labels(options, two["name"], None).bad, [math.nan, 0])
    content = Content(SimpleNamespace(names=two["name"]), table)
    np.testing.assert_equal(content.failed, [math.nan, 0])  # a sample without a label has no ring
    assert np.argsort(content.columns["e_above_hull"]).tolist() == [1, 0]


def test_the_unknown_is_last_in_a_campaign(two):
    rows = pa.table({"e_above_hull": two["e_above_hull"], "score": [0.0, 1.0], "index": [0, 1]})
    assert _first(rows, 2)["index"].to_pylist() == [1, 0]


def test_the_summary_counts_the_unknown_apart(two):
    summary = two.summary()
    for name in VERDICTS:
        assert (summary[name], summary[f"{name}_unknown"]) == (1, 1)
    assert summary["mean_e_above_hull"] == pytest.approx(0, abs=1e-6)
    assert quality_of(two)["metastable"] == 1


def test_the_page_marks_the_unknown_as_not_judged(two, tmp_path):
    run = made(2)
    page = write_report(tmp_path, run, two, numbers=[], provenance={}).read_text()
    data = json.loads(re.search(r'class="gallery-data">(.*?)</script>', page)[1])
    assert load(b64decode(data["tensors"]))["failed"].tolist() == [UNKNOWN, 0]


# ---- charges ---------------------------------------------------------------------------------------------------------


def test_charges_are_those_of_smact():
    """The column is a rule that papers use, by the function and the oxidation states that they use."""
    from smact.screening import smact_validity

    keys = [key for key in shipped_hull().keys if 1 < len(key) < 6][::150]
    given = [structure([z for z, count in key for _ in range(count)], 0) for key in keys]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = [smact_validity(formula_of(key), oxidation_states_set="smact14") for key in keys]
    assert [validity(one).charge for one in given] == theirs
    assert 0.5 < np.mean(theirs) < 0.95


def test_charges_of_many_elements_do_not_take_minutes():
    """SMACT tries every combination of oxidation states: 50 s for these 11 elements."""
    start = time.monotonic()
    assert not balanced(tuple((z, 1 + z % 7) for z in (23, 24, 25, 26, 27, 42, 44, 74, 75, 76, 77, 7, 8, 15, 16)))
    assert time.monotonic() - start < 2


# ---- controls --------------------------------------------------------------------------------------------------------


def test_controls_that_cost_quality_say_so():
    network = CSPNet(8, 1, 2, 4, width=20, given=0.5)
    free = [Controls(), Controls(exclude="Tc,Pm"), Controls(atoms="4")]
    costly = [Controls(system="Li-Fe-P-O"), Controls(elements="Li,Fe,P,O")]
    assert [len(controls.effect(network)) for controls in (*free, *costly)] == [0, 0, 0, 1, 1]


def test_a_formula_whose_ground_state_does_not_fit_is_said_to():
    """LiFePO4 has 28 atoms in its cell, and the flow at most 20."""
    network = CSPNet(8, 1, 2, 4, width=20, given=0.5)
    told = {formula: " ".join(Controls(formula=formula).effect(network)) for formula in ("LiFePO4", "NaCl")}
    assert "28 atoms" in told["LiFePO4"]
    assert "atoms" not in told["NaCl"]


def test_a_warning_of_the_command_is_one_line_without_source_code(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # restored after the test
    monkeypatch.setattr(sys, "argv", ["fmwc", "--version"])
    with pytest.raises(SystemExit):
        main()
    assert "controls.py" not in warnings.formatwarning("no crystal contains Ar", UserWarning, "controls.py", 64)


# ---- known structures and kept energies ------------------------------------------------------------------------------


def test_another_folder_of_known_structures_is_another_judgement(monkeypatch):
    monkeypatch.delenv("FMWC_DATA", raising=False)
    monkeypatch.setattr(domain, "judge", lambda structures, calculator, data: data)
    crystals, run = domain.CrystalDomain(), made(2)
    assert [crystals.judgement(run, data) for data in ("", "mp20", "mp20")] == [None, "mp20", "mp20"]


@pytest.fixture
def known(tmp_path, monkeypatch):
    """FMWC_DATA names a folder of known structures."""
    folder = tmp_path / "mp20"
    folder.mkdir()
    (folder / "train.csv").write_text("material_id,cif\n")
    monkeypatch.setenv("FMWC_DATA", str(folder))
    return folder


def test_screening_judges_novelty_with_the_data_of_the_environment(known, tmp_path):
    options = Screen("crystals", tmp_path / "out")
    plan = SimpleNamespace(domain=domain.CrystalDomain(), field=None, options=options)
    (stage,) = driver._judge(options, plan, {}, "crystals", "")
    assert stage.data == str(known)


def test_a_workflow_judges_novelty_with_the_data_of_the_environment(known, monkeypatch):
    workflow, seen = pytest.importorskip("examples.crystal_workflow", exc_type=ImportError), {}

    def judge_one(structures, **options):
        seen.update(options)
        return Judgement({}, ())

    monkeypatch.setattr(workflow, "judge", judge_one)
    workflow.relax.original(workflow.CrystalSet(structures=[], table={}))
    assert seen["data"] == str(known)


def test_two_judges_keep_the_energies_of_both(tmp_path, monkeypatch):
    monkeypatch.setenv("FMWC_CACHE", str(tmp_path))
    write = np.savez_compressed

    def slowly(*args, **arrays):
        time.sleep(0.2)
        write(*args, **arrays)

    monkeypatch.setattr(np, "savez_compressed", slowly)
    given = [{"a": -1.0}, {"b": -2.0}]
    threads = [Thread(target=_Cache(Given()).add, args=("given", values)) for values in given]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert _Cache(Given()).read("given") == {"a": -1.0, "b": -2.0}


def test_each_printed_column_of_energies_is_a_model():
    one = judged([SALT], hull(CS_ER_BR)).columns | {"e_above_hull_raw": [0.1], "energy_raw": [-3.3]}
    judgement = with_consensus({name: Judgement(one, (SALT,)) for name in ("chgnet", "sevennet")})
    assert [name for name in result_rows(judgement)[0] if name.startswith("by ")] == ["by sevennet"]
