"""Headline numbers of `python -m experiments evaluate` and of short tables come with counts and intervals."""

import json

import numpy as np

from experiments.common.evaluation import with_intervals

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
