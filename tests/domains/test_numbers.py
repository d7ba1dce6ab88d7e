"""Headline numbers of `python -m experiments evaluate` and of short tables come with counts and intervals."""

import json

import numpy as np

import fmwc
from experiments.common.evaluation import with_intervals
from fmwc.registry import domain_named

FOUND = {"failure": 0.02, "auprc": {"peak": 0.27}, "heads": {"l1": 0.5}, "kept_80": {"peak": 0.0}}


def test_rankings_of_two_failures_are_left_out():
    bad = np.arange(100) < 2
    found = with_intervals(FOUND, bad, "failed", np.arange(100.0))
    assert found["failed_samples"] == 2
    assert found["auprc"] == found["heads"] == "too few to tell (2 failed)"
    assert found["kept_80"] == FOUND["kept_80"]
    json.dumps(found, allow_nan=False)


def test_rankings_of_many_failures_have_an_interval():
    bad = np.arange(100) < 40
    found = with_intervals(FOUND, bad, "failed", -np.arange(100.0))
    assert found["auprc"] == FOUND["auprc"]
    assert found["auprc_with_90%_interval"] == "1.00 [1.00, 1.00]"
    low, high = found["failed_share_90%_interval"]
    assert low < 0.4 < high


def test_the_short_table_of_few_failures():
    chosen = domain_named("checkerboard")
    run = fmwc.sample(fmwc.load("checkerboard"), 60, steps=5)
    for failures in (0, 2, 20):
        rows = {row[""]: row["value"] for row in chosen.numbers(run, np.arange(60) < failures)}
        values = [value for name, value in rows.items() if name.startswith("AUPRC")]
        assert bool(values) == (failures > 0)
        assert all(("too few" in value) == (failures < 10) for value in values)
