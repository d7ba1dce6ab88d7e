"""Sampling and evaluation of crystals, checked against numbers computed by hand."""

import dataclasses
import math

import numpy as np
import pytest
import torch

pytest.importorskip("pymatgen.core", exc_type=ImportError)

from experiments.common.evaluation import thinned
from experiments.crystals import evaluate
from experiments.crystals.evaluate import heads, hutchinson_rows, lift_of, quality_of
from fmwc.crystals import Judgement
from fmwc.crystals.judge import SHARES
from fmwc.crystals.recipe import SCORE
from fmwc.errors import UsageError
from fmwc.estimators import Diagonal, Linearised
from fmwc.metrics import ranking
from fmwc.metrics.divergence import estimates
from fmwc.sampling import SCORES, SamplingConfig, Schedule, Trajectory
from tests.conftest import awaken
from tests.options import when
from tests.recipes.test_crystals import CHANNELS, TINY, same

NAN = math.nan


@pytest.fixture(autouse=True)
def _no_data_given(monkeypatch):
    monkeypatch.delenv("FMWC_DATA", raising=False)


@pytest.fixture(scope="module")
def field():
    return awaken(TINY.attach(TINY.network()))


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


def test_lift_interval_contains_the_lift():
    generator = np.random.default_rng(1)
    good = generator.random(200) < 0.3
    doubt = generator.normal(size=200) - good
    found = lift_of(doubt, good, intervals=True)
    low, high = found["lift_interval"]
    assert 1 < low < found["lift"] < high
    assert lift_of(doubt, good, intervals=True) == found
    few = lift_of(doubt[:9], np.arange(9) == 4, intervals=True)  # a third of the resamples have no good structure
    assert all(math.isfinite(v) for v in few["lift_interval"])


def test_lift_without_good_samples_is_an_error():
    with pytest.raises(UsageError, match="no sample is positive"):
        lift_of(np.arange(5.0), np.zeros(5, bool))


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


def test_quality_where_none_could_be_judged():
    found = quality_of(judgement([NAN] * 4))
    assert found["problems"] == 4
    assert math.isnan(found["mean_e_above_hull"])
    assert all(math.isnan(v) for v in found["intervals"]["mean_e_above_hull"])
    assert found["intervals"]["metastable_share"] == [0.0, 0.0]


def test_good_samples_are_judged_and_near_the_hull():
    assert judgement([0.0, 0.1, 0.11, NAN]).good.tolist() == [True, True, False, False]


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


@pytest.mark.parametrize(
    ("taught", "left", "enough"), [(11, 10, False), (9, 10, False), (10, 9, False), (0, 0, False), (10, 10, True)]
)
def test_heads_need_enough_labels(taught, left, enough, monkeypatch):
    """The minimum is halves of 20: ten good and ten bad to learn from, and ten good ones to find."""
    monkeypatch.setattr(ranking, "RESAMPLES", 5)
    good = np.concatenate([np.arange(20) < taught, np.arange(20) < left])
    assert bool(heads(run_of(torch.arange(40) / 40), good, torch.arange(40.0))) == enough


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


# ---- Hutchinson's rows ----------------------------------------------------------------------------------------------

FLOPS = {"plain": 1.0, "hutchinson_1": 5.0, "hutchinson_2": 8.0, "linearised": 7.0}
READ = ("per_step_spearman", "per_step_pearson", "integrated_spearman", "integrated_pearson")


def test_rows_of_the_sweep():
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(3, 12, generator=generator)
    noise = torch.randn(4, 3, 12, generator=generator)
    parts = torch.rand(2, 3, 12, generator=generator) * reference.abs() / 2
    sweep = {
        "k10": -reference,  # its magnitude is compared
        "k2": noise[0],
        "k1": noise[1],
        "reference": reference,
        "linearised.type": parts[0],
        "linearised.coord": parts[1],
        "linearised.lattice": reference.abs() - 4 * parts[0] / 10 - parts[1],
        "atoms": torch.arange(12.0),
    }
    rows = hutchinson_rows(sweep, FLOPS, {"type": 0.4})  # the weight of a channel's variance, if not 1
    assert [(row["name"], row["K"]) for row in rows] == [
        ("Hutchinson", 1),
        ("Hutchinson", 2),
        ("Hutchinson", 10),
        ("linearised", None),
        ("linearised, type", None),
        ("linearised, coord", None),
        ("linearised, lattice", None),
        ("number of atoms", None),
    ]
    assert [row["flops"] for row in rows] == [5.0, 8.0, 5.0 + 9 * 3.0, 7.0, 7.0, 7.0, 7.0, 0.0]  # affine in K
    for perfect in (rows[2], rows[3]):
        assert [perfect[name] for name in READ] == pytest.approx([1.0] * 4)
    for row in (rows[0], rows[1], rows[4], rows[-1]):
        assert all(row[name] < 0.99 for name in READ)
    del sweep["atoms"]
    assert hutchinson_rows(sweep, FLOPS, {"type": 0.4}) == rows[:-1]


# ---- thinned --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "every"), [(6, 5), (10, 5), (7, 2), (4, 9)])
def test_thinned_run_equals_a_run_with_fewer_readings(steps, every, field):
    full, seldom = (
        TINY.draw(field, 4, 1, steps=steps, confidence=Diagonal(), schedule=when(k)).compact() for k in (1, every)
    )
    thin = thinned(full, every)
    assert torch.equal(thin.times, seldom.times)
    assert thin.times[-1, 0] == pytest.approx(1 - 1 / steps)
    for c in CHANNELS:
        torch.testing.assert_close(thin.var[c], seldom.var[c])
        torch.testing.assert_close(thin.score("integrated", channel=c), seldom.score("integrated", channel=c))
    assert same(thin.x, full.x)


def test_lifts_of_every_score_of_every_channel(field):
    run = TINY.draw(field, 3, 1, confidence=Diagonal())
    good = np.array([True, False, True])
    found = evaluate.lifts(run, good)
    assert found.keys() == {*(f"{c}/{s}" for c in ("all", *CHANNELS) for s in SCORES), f"all/{SCORE}"}
    assert found["type/peak"] == lift_of(run.score("type/peak"), good)
    assert found["coord/peak"] == lift_of(run.score("peak", channel="coord"), good)
    assert found["all/peak"] == lift_of(run.score("peak"), good)


# ---- drawing --------------------------------------------------------------------------------------------------------


def test_runs_are_compact_and_have_the_same_crystals(field):
    plain = TINY.draw(field, 6, 2, confidence=None)
    run, diagonal = evaluate.draw_linearised(TINY, field, 6, 2), evaluate.draw_diagonal(TINY, field, 6, 2)
    assert same(run.x, plain.x)
    assert same(diagonal.x, plain.x)
    assert (len(run.times), len(diagonal.times)) == (4, 1)
    assert all(value.shape == (4, 6, 1) for value in run.var.values())
    own = TINY.draw(field, 6, 2, confidence=Linearised(2))
    exact = TINY.draw(field, 6, 2, confidence=Diagonal(), schedule=Schedule.every(5))
    for c in CHANNELS:
        torch.testing.assert_close(run.score("integrated", channel=c), own.score("integrated", channel=c))
        torch.testing.assert_close(diagonal.score("peak", channel=c), exact.score("peak", channel=c))
    few = evaluate.draw_linearised(TINY, field, 6, 2, schedule=Schedule.every(2))
    assert len(few.times) == 2


def test_dispersion_of_a_run(field):
    run = TINY.draw(field, 5, 2, confidence=None)
    found = evaluate.draw_dispersion(TINY, field, run, 3)
    assert found.shape == (5,)
    assert bool((found > 0).all())
    assert torch.equal(found, evaluate.draw_dispersion(TINY, field, run, 3))
    other = evaluate.draw_dispersion(TINY, field, dataclasses.replace(run, seed=3), 3)
    assert not torch.equal(found, other)


def linear_rows(atoms):
    """FLOPs of the plain network: rows · in · out · 2 per linear layer, and a 3×3 product per pair."""
    h, f, waves = TINY.hidden, TINY.time_features, 6 * TINY.frequencies + 3
    crystals, total, pairs = len(atoms), int(atoms.sum()), int((atoms * (atoms - 1)).sum())
    assert pairs not in (crystals, total)
    waves += -waves % 8
    of_crystals = 1 * f + 2 * h * 6
    of_atoms = 7 * h + (h + f) * h + h * 3 + h * 7
    of_pairs = 3 * 3  # the metric
    for _ in range(TINY.layers):
        of_crystals += (h + 6) * h
        of_atoms += h * h + h * h + 2 * h * h + h * h
        of_pairs += waves * h + h * h
    return 2 * (crystals * of_crystals + total * of_atoms + pairs * of_pairs)


def test_flops_equal_a_count_by_hand(field):
    read = {f"linearised_{k}": Linearised(k) for k in (1, 2, 3)}
    found = evaluate.flops(TINY, field, {**read, "diagonal": Diagonal()}, count=7)
    atoms = TINY.draw(field, 7, 0, confidence=None).cond["atoms"]
    assert found["plain"] == pytest.approx(linear_rows(atoms) / 7)
    assert found["plain"] < found["hutchinson_1"] < found["hutchinson_2"]
    assert found["plain"] < found["linearised_1"] < found["linearised_2"]
    assert found["plain"] < found["diagonal"]
    rise = found["linearised_2"] - found["linearised_1"]
    assert found["linearised_3"] - found["linearised_2"] == pytest.approx(rise)  # the same for each probe
    # One pull is one backward pass, which costs about as much as the forward pass, without gradients of weights.
    assert 0.5 < (found["hutchinson_2"] - found["hutchinson_1"]) / found["plain"] < 1.5
    assert rise < 3 * found["plain"]  # one probe per channel; no backward pass through the waves, which have no noise


def test_sweep_evaluates_at_the_states_of_one_run(field):
    ks = (1, 2, 4)
    found = evaluate.sweep(TINY, field, 5, 3, {"diagonal": Diagonal()}, ks, every=2)
    assert found.keys() == {"k1", "k2", "k4", "reference", *(f"diagonal.{c}" for c in CHANNELS)}
    assert all(value.shape == (2, 5) for value in found.values())
    run = TINY.draw(field, 5, 3, confidence=None, config=SamplingConfig(keep_states=True))
    for row, step in enumerate((1, 3)):
        x, t = run.states[step], run.grid[step]
        single = estimates(field, x, t, 8, seed=3, cond=run.cond)
        assert torch.equal(found["k1"][row], single[0])
        torch.testing.assert_close(found["k4"][row], (single[0] + single[1] + single[2] + single[3]) / 4)
        torch.testing.assert_close(found["reference"][row], single[4:].mean(0))
        moments = field.moments(x, t, Diagonal(), cond=run.cond)
        for c in CHANNELS:
            expected = moments.var[c].expand_as(moments.mean[c]).flatten(1).sum(1)
            torch.testing.assert_close(found[f"diagonal.{c}"][row], expected)


def test_reference_of_the_sweep_uses_other_probes(field, monkeypatch):
    def numbered(velocity, x, t, probes, **options):
        return torch.arange(float(probes))[:, None].expand(-1, len(x["lattice"]))

    monkeypatch.setattr(evaluate, "estimates", numbered)
    found = evaluate.sweep(TINY, field, 3, 0, {}, (1, 2, 6))
    assert {name: float(value[0, 0]) for name, value in found.items()} == {
        "k1": 0.0,
        "k2": 0.5,
        "k6": 2.5,  # of 0 to 5
        "reference": 8.5,  # of 6 to 11
    }
    assert found["reference"].shape == (1, 3)
