"""benchmarks/refit_reference.py writes the same reference as training, and keeps the weights."""

import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

import fmwc
from benchmarks.refit_reference import recipe_of, refit
from fmwc.checkpoint import about, update
from fmwc.errors import DataError, UsageError
from fmwc.recipes import fit
from fmwc.sampling import Reference
from tests.recipes.conftest import CPU, identical, weights


@pytest.fixture
def made(recipe, tmp_path):
    """Return a checkpoint after training, and a copy with an old reference."""
    fit(recipe, tmp_path / "new", CPU)
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    update(tmp_path / "old", reference=Reference("peak", None, torch.linspace(0, 1, 11)))
    return tmp_path


@pytest.mark.parametrize("elsewhere", [True, False])
def test_the_reference_is_that_of_training_and_the_weights_stay(recipe, made, elsewhere):
    out = made / ("elsewhere" if elsewhere else "old")
    refit(str(made / "old"), out, "cpu", getattr(recipe, "data", ""))
    found, expected = fmwc.load(out), fmwc.load(made / "new")
    assert found.reference.score == expected.reference.score
    assert found.reference.checks == expected.reference.checks
    torch.testing.assert_close(found.reference.quantiles, expected.reference.quantiles)
    assert identical(weights(found), weights(expected))
    record, before = about(out), about(made / "new")
    assert {k: record[k] for k in ("recipe", "data", "metrics")} == {
        k: before[k] for k in ("recipe", "data", "metrics")
    }
    assert "commit" in record["provenance"]["reference"]
    assert (fmwc.load(made / "old").reference.score == "peak") == elsewhere


def test_other_data_and_options_are_refused(digits, tmp_path):
    fit(digits, tmp_path / "x", CPU)
    with np.load(digits.data) as held:
        np.savez(tmp_path / "other.npz", x=held["x"][::-1], y=held["y"][::-1])
    with pytest.raises(DataError, match="was trained on data"):
        refit(str(tmp_path / "x"), tmp_path / "x", "cpu", str(tmp_path / "other.npz"))
    assert recipe_of(about(tmp_path / "x"), "somewhere", 90).references == 90
    with pytest.raises(UsageError, match="takes no data; leave out --data"):
        recipe_of(about("checkerboard"), "somewhere")


def test_it_needs_no_pymatgen():
    code = "import sys; sys.modules['pymatgen'] = None; from benchmarks import refit_reference as r; r.main()"
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "mnist-joint" in done.stdout
