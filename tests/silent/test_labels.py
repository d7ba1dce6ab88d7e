"""Guards issue 30: labels and ranks (sections 2 and 4), and the scores and edits of section 6."""

import dataclasses
import inspect

import torch

from fmwc.sampling import Reference, Trajectory, read_with, sample
from tests.conftest import mlp_field

LEVELS = torch.linspace(0, 2, 101)


def run_of(count, **changes):
    """Return a run of a small field whose confidence is withheld, with other values of some fields."""
    return dataclasses.replace(sample(mlp_field(), count, steps=4), **changes)


def test_confidence_never_raises():
    run = run_of(4)
    assert hasattr(run, "confidence")
    assert run.confidence is None
    assert run.withheld
    assert "confidence" in dict(inspect.getmembers(run))
    assert "confidence" not in run.tensors()


def test_a_run_that_lacks_the_score_of_its_reference_has_no_confidence():
    run = run_of(4, default_score="contest", reference=LEVELS, without="")
    assert run.confidence is None
    assert "contest" in run.withheld


def test_equal_scores_keep_the_confidence_that_a_reference_gives_them(tmp_path):
    field = mlp_field()
    field.reference = Reference("peak", read_with("linearised", 4, "euler"), LEVELS)
    run = sample(field, 3, steps=4)
    equal = dataclasses.replace(run, var=torch.full_like(run.var, 0.25))
    again = Trajectory.load(equal.save(tmp_path))
    assert torch.equal(again.confidence, equal.confidence)
    assert "confidence" in equal.tensors()
