"""Best of n keeps the surest candidate per sample and counts all evaluations of the network."""

import pytest
import torch
from torch import nn

import fmwc
from fmwc.checks import Contest, Echo, Nearest
from fmwc.errors import UsageError
from fmwc.sampling import Part, Reference, SamplingConfig
from fmwc.uses.best_of import best_of, candidate_seed, candidates_within
from tests import cells
from tests.options import arguments
from tests.uses.evaluations import Counter

STEPS = 10


class Classes(nn.Module):
    """The velocity to one point per class, with an error that depends on the state: some samples end elsewhere."""

    def __init__(self, classes=3):
        super().__init__()
        self.register_buffer("ends", torch.stack([torch.arange(classes) * 2.0, torch.zeros(classes)], 1))

    def forward(self, x, t, y):
        end = self.ends[y] + 0.8 * torch.sin(3 * x)
        return (end - x) / (1 - t[:, None]).clamp_min(0.05)


@pytest.mark.parametrize("stepper", ["euler", "heun"])
def test_best_of_keeps_the_candidate_of_lowest_score(mlp, stepper):
    fmwc.sample(mlp, 8, steps=1)  # the first reading of a batch of this size also proves whose rows layers see
    spy = Counter(mlp.network)
    done = best_of(mlp, 8, 3, score="peak", steps=STEPS, seed=2, config=SamplingConfig(stepper=stepper))
    assert done.evaluations == spy.rows
    assert done.evaluations == 8 * 3 * STEPS * (2 if stepper == "heun" else 1)
    every = [
        fmwc.sample(mlp, 8, steps=STEPS, seed=candidate_seed(2, j), config=SamplingConfig(stepper=stepper))
        for j in range(3)
    ]
    scores = torch.stack([run.score("peak") for run in every])
    assert torch.equal(done.run.score("peak"), scores.amin(0))
    assert torch.equal(done.branch, scores.argmin(0))
    assert len(done.branch.unique()) > 1
    assert torch.equal(torch.stack([run.x for run in every])[done.branch, torch.arange(8)], done.run.x)
    assert torch.equal(every[0].x, fmwc.sample(mlp, 8, steps=STEPS, seed=2, config=SamplingConfig(stepper=stepper)).x)


def test_evidence_is_that_of_the_kept_candidate_and_checks_are_counted():
    network, y = Classes(), torch.arange(12) % 3
    spy = Counter(network)
    contest = Contest.planned("y", torch.arange(3), 9)
    how = {"steps": STEPS, "confidence": None, "check": contest, "cond": {"y": y}, "space": (2,)}
    done = best_of(network, 12, 4, **arguments(score="contest", **how))
    assert contest.evaluations == 9
    assert done.evaluations == spy.rows == 12 * 4 * (STEPS + 9)
    every = [fmwc.sample(network, 12, **arguments(seed=candidate_seed(0, j), **how)) for j in range(4)]
    scores = torch.stack([run.score("contest") for run in every])
    assert torch.equal(done.run.score("contest"), scores.amin(0))
    margins = torch.stack([run.evidence["margin"] for run in every])
    assert torch.equal(done.run.evidence["margin"], margins[done.branch, torch.arange(12)])
    assert torch.equal(done.run.cond["y"], y)  # each class is drawn as often as before


@pytest.mark.parametrize("check", [9, Echo((0.7, 0.8))])
@pytest.mark.parametrize("kind", ["network", "referred"])
def test_runs_without_confidence_are_ranked_by_their_check(check, kind):
    field = Classes()
    if kind != "network":
        field.layer = nn.Linear(2, 2)
        field = fmwc.attach(field, space=(2,))
    if kind == "referred":
        levels = torch.linspace(0, 1, 11)
        near = Nearest(torch.randn(50, 2))
        field.reference = Reference("nearest", None, levels, None, (Part("nearest", 1.0, levels),), {"nearest": near})
    y = [i % 3 for i in range(12)]
    how = {"steps": STEPS, "confidence": None, "check": check, "cond": {"y": y}, "space": (2,)}
    done = best_of(field, 12, 3, **arguments(**how))
    name = "echo" if isinstance(check, Echo) else "contest"
    every = torch.stack(
        [fmwc.sample(field, 12, **arguments(seed=candidate_seed(0, j), **how)).evidence[name] for j in range(3)]
    )
    assert torch.equal(done.run.score(), every.amin(0))
    assert torch.equal(done.branch, every.argmin(0))
    assert done.run.default_score == name
    assert done.run.rank.shape == (12,)
    assert done.evaluations == 12 * 3 * (STEPS + (check if isinstance(check, int) else check.evaluations))


@pytest.mark.parametrize("batch", [1, 5, 100])
def test_candidates_do_not_depend_on_batch_or_count(mlp, batch):
    whole = best_of(mlp, 12, 2, steps=STEPS, score="peak", seed=1)
    split = best_of(mlp, 12, 2, steps=STEPS, score="peak", seed=1, config=SamplingConfig(batch=batch))
    fewer = best_of(mlp, 7, 2, steps=STEPS, score="peak", seed=1)
    torch.testing.assert_close(split.run.x, whole.run.x)
    torch.testing.assert_close(fewer.run.x, whole.run.x[:7])
    assert torch.equal(split.branch, whole.branch)


def test_budget_is_not_exceeded():
    network = Classes()
    cond = {"y": torch.zeros(5, dtype=torch.long)}
    how = {"steps": STEPS, "confidence": None, "check": Echo((0.7, 0.8)), "cond": cond}
    for budget, n in ((12, 1), (35, 2), (36, 3)):
        spy = Counter(network)
        done = best_of(network, 5, **arguments(budget=budget, score="echo", space=(2,), **how))
        assert done.evaluations == spy.rows == 5 * n * 12
    with pytest.raises(UsageError, match="budget"):
        best_of(network, 5, **arguments(budget=11, score="echo", space=(2,), **how))
    assert candidates_within(100, 50) == 2


def test_crystals_keep_their_number_of_atoms():
    field, atoms = cells.field(torch.float32), torch.tensor([2, 5, 3, 1, 4, 2])
    one = best_of(field, 6, 2, cond={"atoms": atoms}, steps=4, score="peak")
    assert torch.equal(one.run.cond["atoms"], atoms)
    assert (one.run.x["type"][~cells.present(atoms)] == 0).all()


def test_invalid_arguments(mlp):
    for words in ({}, {"n": 2, "budget": 30}, {"n": -1}, {"n": 2, "x0": torch.zeros(4, 2)}):
        with pytest.raises(UsageError):
            best_of(mlp, 4, **arguments(**words))


def test_constant_score_is_refused(mlp):
    with pytest.raises(UsageError, match="rank"):
        best_of(mlp, 4, 2, score=lambda run: torch.ones(len(run)), steps=STEPS)
