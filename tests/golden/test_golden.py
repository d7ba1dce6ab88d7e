"""Every case gives the recorded results; on the same machine, bit for bit."""

import json

import pytest

from tests.golden.cases import CASES
from tests.golden.record import GOLDEN, found, machine

RECORDED = json.loads(GOLDEN.read_text())
SAME = RECORDED["machine"] == machine()
RTOL = 1e-4  # of means and first values, on other machines


def test_every_case_is_recorded():
    assert list(RECORDED["cases"]) == list(CASES)


def differences(before, after):
    """Return a description of how a value has changed; empty if it has not."""
    if before == after:
        return ""
    for name in ("dtype", "shape"):
        if before.get(name) != after.get(name):
            return f"{name} {after.get(name)}, not {before.get(name)}"
    if SAME:
        if before["dtype"] == "text":
            return f"another text, {after['length']} characters long, not {before['length']}"
        told = [(n, after[n], before[n]) for n in ("mean", "first") if after.get(n) != before.get(n)]
        return "; ".join(f"{n} {a}, not {b}" for n, a, b in told) or "other values, of the same mean and first values"
    for name in ("mean", "first"):
        if name in before and after[name] != pytest.approx(before[name], rel=RTOL, abs=1e-6, nan_ok=True):
            return f"{name} {after[name]}, not {before[name]}"
    return ""


@pytest.mark.parametrize("name", CASES)
def test_results_match_the_recording(name):
    before, after = RECORDED["cases"][name], found(name)
    changed = {key: differences(before[key], after[key]) for key in before if key in after}
    changed |= {key: "not given any more" for key in before if key not in after}
    changed |= {key: "was not given before" for key in after if key not in before}
    wrong = [f"{key}: {text}" for key, text in changed.items() if text]
    assert not wrong, f"{len(wrong)} of {len(before)} values have changed:\n" + "\n".join(wrong[:20])
