"""Rewinding never increases a score, and counts all evaluations of the network."""

import pytest
import torch

import fmwc
from fmwc.errors import ShapeError, UsageError
from fmwc.sampling import SamplingConfig
from fmwc.uses.rewind import resample, rewind
from tests import cells
from tests.uses.evaluations import Counter

STEPS = 10


@pytest.mark.parametrize("stepper", ["euler", "heun"])
@pytest.mark.parametrize("keep_states", [True, False])
def test_rewind_does_not_increase_scores(mlp, stepper, keep_states):
    run = fmwc.sample(mlp, 40, steps=STEPS, config=SamplingConfig(keep_states=keep_states, stepper=stepper))
    which = run.score("peak").argsort(descending=True)[:10]
    spy = Counter(mlp.network)
    done = rewind(
        mlp, run, which, before=0.2, scale=0.5, branches=4, score="peak", config=SamplingConfig(stepper=stepper)
    )
    assert done.evaluations == spy.rows > 0
    assert (done.run.score("peak") <= run.score("peak")).all()
    assert (done.run.score("peak")[which] < run.score("peak")[which]).any()
    others = torch.ones(40, dtype=torch.bool)
    others[which] = False
    assert torch.equal(done.run.x[others], run.x[others])
    assert ((done.branch > 0) == (done.run.x != run.x).any(1)).all()
    assert done.branch.max() <= 3


def test_rewind_takes_masks_functions_and_no_samples(mlp):
    run = fmwc.sample(mlp, 12, steps=STEPS, config=SamplingConfig(keep_states=True))
    mask = torch.arange(12) < 4

    def nearest(trajectory):
        return trajectory.x.norm(dim=1).numpy()

    done = rewind(mlp, run, mask, score=nearest, branches=3, scale=1.0)
    assert (done.run.x.norm(dim=1) <= run.x.norm(dim=1)).all()
    assert (done.branch[4:] == 0).all()
    none = rewind(mlp, run, torch.zeros(12, dtype=torch.bool))
    assert none.evaluations == 0
    assert torch.equal(none.run.x, run.x)


def test_kept_branches_have_all_their_states(mlp):
    run = fmwc.sample(mlp, 12, steps=STEPS, config=SamplingConfig(keep_states=True))
    done = rewind(mlp, run, torch.arange(12), scale=1.0, branches=4)
    torch.testing.assert_close(done.run.states[-1], done.run.x)
    assert (done.branch > 0).any()


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("budget", [3, 57, 400])
def test_resample_does_not_exceed_its_budget(mlp, fresh, budget):
    run = fmwc.sample(mlp, 40, steps=STEPS, config=SamplingConfig(keep_states=True))
    spy = Counter(mlp.network)
    done = resample(mlp, run, budget, fresh=fresh, score="peak", scale=0.5)
    assert done.evaluations == spy.rows <= budget
    assert budget - done.evaluations < STEPS
    assert (done.run.score("peak") <= run.score("peak")).all()
    moved = (done.run.x != run.x).any(1)
    assert ((done.branch > 0) == moved).all()
    assert torch.equal(done.run.x0[~moved], run.x0[~moved])


def test_recomputed_states_count_in_the_budget(mlp):
    run = fmwc.sample(mlp, 10, steps=STEPS)
    spy = Counter(mlp.network)
    done = resample(mlp, run, 150, score="peak")
    assert done.evaluations == spy.rows <= 150
    assert done.run.states is None
    with pytest.raises(UsageError, match="takes 100 evaluations of 99"):
        resample(mlp, run, 99)


def test_rewound_crystals_keep_their_number_of_atoms():
    field = cells.field(torch.float32)
    atoms = torch.tensor([2, 5, 3, 1, 4, 2])
    run = fmwc.sample(field, 6, steps=4, cond={"atoms": atoms}, config=SamplingConfig(keep_states=True))
    done = rewind(field, run, torch.tensor([4, 1]), scale=0.5, branches=3, score="peak", channel="type", before=0.3)
    assert (done.run.score("peak") <= run.score("peak")).all()
    assert (done.run.x["type"][~cells.present(atoms)] == 0).all()
    anew = resample(field, run, 40, fresh=True, score="peak")
    assert (anew.run.x["coord"][~cells.present(atoms)] == 0).all()


def test_invalid_arguments(mlp):
    run = fmwc.sample(mlp, 6, steps=4, config=SamplingConfig(keep_states=True))
    with pytest.raises(UsageError, match="branches must be at least 2"):
        rewind(mlp, run, torch.arange(2), branches=1)
    with pytest.raises(UsageError, match="at least 0"):
        rewind(mlp, run, torch.arange(2), before=-0.1)
    with pytest.raises(UsageError, match="0 to 5"):
        rewind(mlp, run, torch.tensor([6]))
    with pytest.raises(UsageError, match="twice"):
        rewind(mlp, run, torch.tensor([1, 1]))
    with pytest.raises(ShapeError, match="one entry per sample"):
        rewind(mlp, run, torch.ones(5, dtype=torch.bool))
    with pytest.raises(ShapeError, match="one number per sample"):
        rewind(mlp, run, torch.arange(2), score=lambda run: torch.zeros(3))
    with pytest.raises(UsageError, match="Known: x"):
        rewind(mlp, run, torch.arange(2), channel="y")
    with pytest.raises(UsageError, match="at least 1 evaluation"):
        resample(mlp, run, 0)
    with pytest.raises(UsageError, match="share"):
        resample(mlp, run, 10, share=0.0)
