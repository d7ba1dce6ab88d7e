"""Lift, quality and heads of crystals, by hand."""

import math

import numpy as np
import pytest
import torch

pytest.importorskip("pymatgen.core", exc_type=ImportError)

from experiments.crystals.evaluate import heads, lift_of, quality_of
from fmwc.crystals import Judgement
from fmwc.crystals.judge import SHARES
from fmwc.metrics import ranking
from fmwc.sampling import Trajectory
from tests.recipes.test_crystals import CHANNELS

NAN = math.nan


@pytest.fixture(autouse=True)
def _no_data_given(monkeypatch):
    monkeypatch.delenv("FMWC_DATA", raising=False)


def judgement(above, **columns):
    """Return judged structures with these energies above the hull. NaN is a structure that could not be judged."""
    energies = list(above)
    known = [not math.isnan(e) for e in energies]
    found = {"e_above_hull": energies, "problem": ["" if k else "flat" for k in known]}
    found |= {name: list(known) for name in SHARES}
    found |= {"metastable": [e <= 0.1 for e in energies], "stable": [e <= 0 for e in energies]}
    return Judgement({**found, **columns}, tuple(energies))


# ---- lift -----------------------------------------------------------------------------------------------------------


def test_lift_by_hand():
    good = np.zeros(20, bool)
    good[[0, 3, 9]] = True  # first, fourth and tenth of the surest
    found = lift_of(np.arange(20.0), good)
    assert found["auprc"] == pytest.approx((1 / 1 + 2 / 4 + 3 / 10) / 3)
    assert found["prevalence"] == pytest.approx(3 / 20)
    assert found["lift"] == pytest.approx(0.6 / 0.15)
    assert found["precision_5%"] == 1.0  # one of one
    assert found["precision_10%"] == 0.5  # one of two
    assert "lift_interval" not in found
    order = np.random.default_rng(0).permutation(20)  # in any order, and as tensors
    assert lift_of(torch.arange(20.0)[order], good[order]) == pytest.approx(found)
    turned = lift_of(-np.arange(20.0), good)
    assert turned["auprc"] == pytest.approx((1 / 11 + 2 / 17 + 3 / 20) / 3)
    assert turned["precision_10%"] == 0


# ---- quality --------------------------------------------------------------------------------------------------------


def test_quality_where_some_could_not_be_judged():
    found = quality_of(judgement([0.0, 0.3, NAN, 0.05, NAN, 0.25] * 5, novel=[None] * 30))
    assert (found["structures"], found["problems"], found["judged"]) == (30, 10, 20)
    assert found["mean_e_above_hull"] == pytest.approx(0.15)
    assert found["metastable_share"] == pytest.approx(10 / 30)  # of all of them
    low, high = found["intervals"]["mean_e_above_hull"]
    assert 0.08 < low < 0.15 < high < 0.22
    low, high = found["intervals"]["metastable_share"]
    assert 0.15 < low < 1 / 3 < high < 0.55
    assert "novel_share" not in found["intervals"]
    assert found["novel"] is None


# ---- heads ----------------------------------------------------------------------------------------------------------


def run_of(doubt):
    """Return a run whose variance increases with a given number per sample."""
    count, generator = len(doubt), torch.Generator().manual_seed(0)
    grid = torch.linspace(0, 1, 6)[:, None].repeat(1, count)
    var = {c: doubt.exp()[None, :, None] * (0.9 + 0.2 * torch.rand(5, count, 1, generator=generator)) for c in CHANNELS}
    x = {c: torch.zeros(count, 2) for c in CHANNELS}
    mean = {c: torch.zeros_like(v) for c, v in var.items()}
    return Trajectory(x, x, grid[:-1], mean, var, grid, cond={"atoms": torch.full((count,), 2)})


@pytest.fixture
def excess():
    return torch.randn(160, generator=torch.Generator().manual_seed(0))


def test_heads_are_evaluated_on_the_second_half(excess, monkeypatch):
    """In the last part, the labels of the first half are inverted."""
    monkeypatch.setattr(ranking, "RESAMPLES", 30)
    run, good = run_of(excess), (excess < -0.3).numpy()
    found = heads(run, good, excess)
    assert found.keys() == {"l1", "boosting", "label_free"}
    assert all(row["auprc"] > 0.9 for row in found.values())
    assert all(row["prevalence"] == pytest.approx(good[80:].mean()) for row in found.values())
    assert found["label_free"]["auprc"] == pytest.approx(1.0)
    turned = heads(run, np.concatenate([~good[:80], good[80:]]), excess)
    assert max(turned["l1"]["lift"], turned["boosting"]["lift"]) < 1
    assert turned["label_free"] == found["label_free"]
