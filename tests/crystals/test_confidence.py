"""Selections and rank correlations have closed forms, and separate confidence from size."""

import numpy as np
import pytest
from scipy.stats import spearmanr

from experiments.crystals import confidence as module
from experiments.crystals.confidence import (
    QUANTITIES,
    correlations,
    first_of_kind,
    keys_of,
    selections,
    values_of,
)

NAMES = ("metastable_relaxed", "msun_relaxed", "e_above_hull_relaxed", "rmsd")


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    monkeypatch.setattr("fmwc.metrics.ranking.RESAMPLES", 50)


def tables(good, doubt, atoms=None, alike=None):
    count = len(good)
    energy = [0.0 if one else 1.0 for one in good]
    common = {
        "name": [str(i) for i in range(count)],
        "atoms": [4] * count if atoms is None else list(atoms),
        "metastable": list(good),
        "novel": [True] * count,
        "stable": [None if one else False for one in good],
        "alike": list(range(count)) if alike is None else alike,
        "e_above_hull": energy,
    }
    return {"drawn": {**common, "doubt": list(doubt)}, "relaxed": {**common, "rmsd": energy}}


def test_a_perfect_order_finds_the_good_structures_first():
    good = [i < 20 for i in range(100)]
    made = tables(good, range(100))
    found = selections(made, NAMES, keys_of(made["drawn"])["confidence"])
    assert found["metastable_relaxed"]["means"] == [1, 1, 1, 0.4, 0.2]
    assert found["metastable_relaxed"]["ratio"][0] == pytest.approx(5)
    assert found["metastable_relaxed"]["difference"][0] == pytest.approx(0.8)
    assert found["e_above_hull_relaxed"]["means"][2] == 0
    for (low, high), mean in zip(
        found["metastable_relaxed"]["intervals"], found["metastable_relaxed"]["means"], strict=True
    ):
        assert low <= mean <= high


def test_ties_at_the_edge_count_in_part():
    made = tables([True, True, False, False, False], [0] * 5)  # all are equally sure
    found = selections(made, NAMES, keys_of(made["drawn"])["confidence"])
    assert found["metastable_relaxed"]["means"] == pytest.approx([0.4] * 5)
    made = tables([True, True, False, False, False], [0, 1, 1, 1, 1])
    two_of_five = selections(made, NAMES, keys_of(made["drawn"])["confidence"], shares=(0.2, 0.4, 1.0))
    assert two_of_five["metastable_relaxed"]["means"] == pytest.approx([1, (1 + 1 / 4) / 2, 0.4])


def test_the_surest_of_a_kind_counts_in_a_selection():
    # Structures 0 and 3 are the same. The surer one, 3, counts, although 0 was drawn first.
    assert first_of_kind([0, 1, -1, 0], np.array([4.0, 3, 2, 1])).tolist() == [False, True, False, True]
    made = tables([True] * 4, [4, 3, 2, 1], alike=[0, 1, -1, 0])
    key = keys_of(made["drawn"])["confidence"]
    assert values_of(made, ["msun_relaxed"], key)[0].tolist() == [0, 1, 0, 1]


def test_what_is_unknown_is_not_stable_and_is_counted_apart():
    made = tables([True, False], [0, 1])
    found = values_of(made, ["stable_relaxed", "sun_relaxed", "stable_unknown_relaxed"], np.array([0.0, 1]))
    assert found.tolist() == [[0, 0], [0, 0], [1, 0]]


def test_a_selection_of_each_size_keeps_the_distribution_of_sizes():
    atoms = np.repeat([2, 8, 20], [50, 30, 20])
    key = np.random.default_rng(0).random(100)
    weights = module._first_of_each_size(key, atoms, (0.2, 1.0))
    assert [weights[0, atoms == size].sum() for size in (2, 8, 20)] == pytest.approx([10, 6, 4])
    assert weights[1].tolist() == [1] * 100
    for size in (2, 8, 20):
        inside = atoms == size
        assert key[inside & (weights[0] == 1)].max() < key[inside & (weights[0] == 0)].min()


def test_an_order_by_size_alone_is_worth_nothing_at_equal_sizes():
    generator = np.random.default_rng(1)
    atoms = generator.integers(1, 21, 2000)
    good = generator.random(2000) < 1 / atoms  # small structures are good more often
    doubt = atoms + 0.01 * generator.random(2000)
    made = tables([bool(one) for one in good], doubt, atoms)
    key = keys_of(made["drawn"])["confidence"]
    plain = selections(made, NAMES, key)["metastable_relaxed"]
    matched = selections(made, NAMES, key, atoms.astype(float))["metastable_relaxed"]
    assert plain["ratio"][0] > 2
    assert matched["ratio"][0] == pytest.approx(1, abs=0.25)
    ranks = correlations(made, ["metastable_relaxed"], key, atoms.astype(float))["metastable_relaxed"]
    assert ranks["spearman"][0] == pytest.approx(spearmanr(-key, good)[0])
    assert ranks["spearman"][0] > 0.2
    assert abs(ranks["partial"][0]) < 0.05


def test_partial_correlation_is_that_of_residuals():
    generator = np.random.default_rng(2)
    z = generator.normal(size=500)
    x, y = z + generator.normal(size=500), z + generator.normal(size=500)
    slope = [np.polyval(np.polyfit(z, part, 1), z) for part in (x, y)]
    expected = np.corrcoef(x - slope[0], y - slope[1])[0, 1]
    matrix = np.corrcoef([x, y, z])
    assert module.partial(matrix[0, 1], matrix[0, 2], matrix[1, 2]) == pytest.approx(expected)


def test_missing_values_do_not_count():
    made = tables([True, False, True, False, False], range(5))
    made["relaxed"]["rmsd"] = [0.5, None, 1.5, float("nan"), 4.0]
    found = selections(made, ["rmsd"], keys_of(made["drawn"])["confidence"])["rmsd"]["means"]
    assert found[-1] == pytest.approx(2)
    assert found[0] == pytest.approx(0.5)
    ranks = correlations(made, ["rmsd"], keys_of(made["drawn"])["confidence"], np.full(5, 4.0))
    assert ranks["rmsd"]["spearman"] == [None] * 3  # three values are too few


def test_labels_are_distinct():
    assert len({quantity.label for quantity in QUANTITIES.values()}) == len(QUANTITIES)
