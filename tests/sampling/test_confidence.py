"""Confidence is the position in a comparable reference, or withheld; rank is the position within the run."""

import dataclasses
import re

import pytest
import torch

import fmwc
from fmwc.checks import Echo
from fmwc.errors import UsageError
from fmwc.estimators import Diagonal, Linearised
from fmwc.sampling import (
    Part,
    ReadWith,
    Reference,
    SamplingConfig,
    Schedule,
    Trajectory,
    read_with,
    sample,
    stream,
)
from fmwc.sampling.trajectory import combined
from tests.conftest import dict_field, mlp_field
from tests.options import arguments, reader, when

LEVELS = torch.linspace(0, 1, 101)


def referred(field, score="peak", steps=10, schedule=1, **reference):
    """Return the field with a reference from samples of another seed."""
    made = read_with("linearised", steps, "euler", when(schedule))
    run = sample(field, 60, steps=steps, seed=9, schedule=when(schedule))
    field.reference = Reference(score, made, run.score(score).quantile(LEVELS), **reference)
    return field


OTHERWISE = {
    "steps": {"steps": 11},
    "heun": {"steps": 10, "stepper": "heun"},
    "Diagonal": {"steps": 10, "confidence": Diagonal()},
    "probes": {"steps": 10, "confidence": Linearised(3)},
    "times": {"steps": 10, "schedule": Schedule.every(2)},
    "start|t = 0": {"steps": 10, "start": 0.1},
}


@pytest.mark.parametrize("difference", OTHERWISE)
def test_runs_with_other_settings_name_the_difference(difference, mlp):
    run = sample(referred(mlp), 6, **arguments(**OTHERWISE[difference]))
    assert run.confidence is None
    assert re.search(difference, run.withheld)
    assert sorted(run.rank.tolist()) == pytest.approx([i / 6 for i in range(6)])
    assert run.default_score == "peak"


def test_default_estimator_is_that_of_the_reference(mlp):
    referred(mlp, schedule=[0.2, 0.5, 0.9])
    run = sample(mlp, 4, steps=10)
    assert run.times[:, 0].tolist() == pytest.approx([0.2, 0.5, 0.9])
    assert not run.withheld
    assert len(sample(mlp, 4, steps=20).times) == 20  # its times belong to ten steps
    mlp.reference = mlp.reference._replace(read_with=read_with(Linearised(3), 10, "euler"))
    assert not sample(mlp, 4, steps=10).withheld  # also named by its estimator


@pytest.mark.parametrize("field", [mlp_field, dict_field])
def test_confidence_does_not_depend_on_the_batch(field):
    field = referred(field())
    together = sample(field, 7, steps=10)
    for i in range(7):
        alone = sample(field, 1, steps=10, config=SamplingConfig(first=i))
        torch.testing.assert_close(alone.confidence, together.confidence[i : i + 1], rtol=0, atol=0.011)
        assert alone.rank.tolist() == [0.5]


def test_constant_scores_are_not_ranked(mlp):
    run = sample(mlp, 6, steps=10)
    still = dataclasses.replace(run, var=torch.full_like(run.var, 0.25))
    assert len(still.surest(1.0)) == 6  # nothing is chosen
    with pytest.raises(UsageError, match="rank"):
        still.surest(0.5)
    for found in (still, still.take(torch.arange(3))):
        with pytest.raises(UsageError, match="rank"):
            found.rank  # noqa: B018
    assert "rank orders" not in still.withheld
    assert "rank" not in still.tensors()
    assert "score" in still.tensors()


@pytest.mark.parametrize("how", ["reference", "fresh", "steps"])
def test_files_keep_rank_evidence_and_why_there_is_no_confidence(how, mlp, tmp_path):
    field = mlp if how == "fresh" else referred(mlp)
    run = sample(field, 6, steps=11 if how == "steps" else 10, check=Echo((0.3, 0.7))).take(torch.tensor([4, 1, 2]))
    run.save(tmp_path / "run.safetensors")
    back = Trajectory.load(tmp_path / "run.safetensors")
    assert back.withheld == run.withheld
    assert bool(back.withheld) == (how != "reference")
    assert torch.equal(back.rank, run.rank)
    assert back.evidence.keys() == run.evidence.keys() >= {"guess", "guess_t", "detour", "echo"}
    for name, value in run.evidence.items():
        assert torch.equal(back.evidence[name], value)
    for name in ("spread", "detour", "echo"):
        assert torch.equal(back.score(name), run.score(name))
    if how == "reference":
        assert torch.equal(back.confidence, run.confidence)


# ---- scores that read no variance ------------------------------------------------------------------------------------


def summed(field, *names, checks=None, **cond):
    """Return the field with a reference whose score is a sum of free signals and checks."""
    checks = checks or {}
    run = sample(field, 60, steps=10, seed=9, confidence=None, cond=cond)
    for one in checks.values():
        other = sample(field, 60, steps=10, seed=9, confidence=None, check=one, cond=cond)
        run = dataclasses.replace(run, evidence={**run.evidence, **other.evidence})
    parts = tuple(Part(name, 1.0, run.score(name).quantile(LEVELS)) for name in names)
    total = combined([(run.score(p.score), p.weight, p.quantiles) for p in parts])
    made = ReadWith("", 10, "euler", ())
    field.reference = Reference(" + ".join(names), made, total.quantile(LEVELS), None, parts, checks)
    return field


@pytest.mark.parametrize("names", [("spread@0.2-0.9", "detour"), ("echo", "spread@0.2-0.9")], ids=" + ".join)
def test_a_stream_takes_references_of_free_signals_and_checks(names, mlp):
    field = summed(mlp, *names, checks={"echo": Echo((0.3, 0.7))} if "echo" in names else None)
    whole = sample(field, 11, steps=10, seed=3)
    assert not len(whole.times)  # no variance is read
    assert whole.default_score == " + ".join(names)
    parts = list(stream(field, 11, steps=10, seed=3, config=SamplingConfig(batch=4)))
    torch.testing.assert_close(torch.cat([part.confidence for part in parts]), whole.confidence, rtol=0, atol=0.011)
    torch.testing.assert_close(sample(field, 1, steps=10, seed=3).confidence, whole.confidence[:1], rtol=0, atol=0.011)
    with pytest.raises(UsageError, match="euler"):
        next(stream(field, 11, steps=12))


def test_the_variance_can_be_requested(mlp):
    field = summed(mlp, "spread@0.2-0.9", "detour")
    plain, read = (sample(field, 5, steps=10, confidence=reader(how)) for how in (True, "linearised"))
    assert len(read.times) == 10
    assert torch.equal(plain.x, read.x)
    torch.testing.assert_close(plain.confidence, read.confidence)
    assert read.ranked_by("peak").withheld
    assert fmwc.sample(field, 5, steps=10, confidence=None).withheld


# ---- evidence of checks alone ----------------------------------------------------------------------------------------


def test_a_run_is_ranked_by_the_only_check_it_has(mlp):
    for network in (mlp, mlp.network):
        run = sample(network, 6, steps=10, confidence=None, check=8, config=SamplingConfig(space=(2,)))
        assert run.default_score == "echo"
        assert torch.equal(run.rank.argsort(), (-run.evidence["echo"]).argsort())
        assert run.withheld.endswith("rank orders the samples of this run")
    bare = sample(mlp, 6, steps=10, confidence=None)
    assert "rank" not in bare.withheld
    with pytest.raises(UsageError, match="variance"):
        bare.rank  # noqa: B018


def test_another_check_ranks_without_confidence(mlp):
    field = referred(mlp)
    field.reference = field.reference._replace(read_with=None)
    run = sample(field, 6, steps=10, confidence=None, check=8)
    assert run.default_score == "echo"
    assert "lacks the score peak" in run.withheld
    summed(mlp, "echo", "spread@0.2-0.9", checks={"echo": Echo((0.3, 0.7))})
    for check, score in ((Echo((0.5,)), "echo + spread@0.2-0.9"), (False, "spread@0.2-0.9")):
        run = sample(mlp, 6, steps=10, check=check)
        assert run.default_score == score
        assert "not checked like those of the reference" in run.withheld
        assert len(run.rank.unique()) == 6
