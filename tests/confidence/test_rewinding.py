"""Rewinding never makes the score worse, and its evaluations are those the network saw."""

import pytest
import torch

import fmwc
from fmwc.confidence.rewinding import resample, rewind
from fmwc.errors import ShapeError, UsageError
from tests import cells

STEPS = 10


class Spy:
    """Counts the samples that pass through a field's network."""

    def __init__(self, field):
        self.rows = 0
        field.network.register_forward_pre_hook(self.count, with_kwargs=True)

    def count(self, module, args, kwargs):
        x = args[0]
        self.rows += len(next(iter(x.values())) if isinstance(x, dict) else x)


@pytest.mark.parametrize("stepper", ["euler", "heun"])
@pytest.mark.parametrize("keep_states", [True, False])
def test_rewinding_never_makes_the_score_worse_and_is_counted(mlp, stepper, keep_states):
    run = fmwc.sample(mlp, 40, steps=STEPS, keep_states=keep_states, stepper=stepper)
    which = run.score("peak").argsort(descending=True)[:10]
    spy = Spy(mlp)
    done = rewind(mlp, run, which, before=0.2, scale=0.5, branches=4, score="peak", stepper=stepper)
    assert done.evaluations == spy.rows > 0
    assert (done.run.score("peak") <= run.score("peak")).all()
    assert (done.run.score("peak")[which] < run.score("peak")[which]).any()
    others = torch.ones(40, dtype=torch.bool)
    others[which] = False
    assert torch.equal(done.run.x[others], run.x[others])
    assert ((done.branch > 0) == (done.run.x != run.x).any(1)).all()
    assert done.branch.max() <= 3


def test_a_mask_a_function_and_no_sample_will_do(mlp):
    run = fmwc.sample(mlp, 12, steps=STEPS, keep_states=True)
    mask = torch.arange(12) < 4

    def nearest(trajectory):
        return trajectory.x.norm(dim=1).numpy()

    done = rewind(mlp, run, mask, score=nearest, branches=3, scale=1.0)
    assert (done.run.x.norm(dim=1) <= run.x.norm(dim=1)).all()
    assert (done.branch[4:] == 0).all()
    none = rewind(mlp, run, torch.zeros(12, dtype=torch.bool))
    assert none.evaluations == 0
    assert torch.equal(none.run.x, run.x)


def test_a_kept_branch_is_a_whole_way(mlp):
    """Rewound samples can be rewound again: their states end at their ends."""
    run = fmwc.sample(mlp, 12, steps=STEPS, keep_states=True)
    done = rewind(mlp, run, torch.arange(12), scale=1.0, branches=4)
    torch.testing.assert_close(done.run.states[-1], done.run.x)
    assert (done.branch > 0).any()


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("budget", [3, 57, 400])
def test_resampling_keeps_to_its_budget(mlp, fresh, budget):
    run = fmwc.sample(mlp, 40, steps=STEPS, keep_states=True)
    spy = Spy(mlp)
    done = resample(mlp, run, budget, fresh=fresh, score="peak", scale=0.5)
    assert done.evaluations == spy.rows <= budget
    assert budget - done.evaluations < STEPS
    assert (done.run.score("peak") <= run.score("peak")).all()
    moved = (done.run.x != run.x).any(1)
    assert ((done.branch > 0) == moved).all()
    assert torch.equal(done.run.x0[~moved], run.x0[~moved])


def test_states_that_were_not_kept_count_in_the_budget(mlp):
    run = fmwc.sample(mlp, 10, steps=STEPS)
    spy = Spy(mlp)
    done = resample(mlp, run, 150, score="peak")
    assert done.evaluations == spy.rows <= 150
    assert done.run.states is None
    with pytest.raises(UsageError, match="takes 100 of 99"):
        resample(mlp, run, 99)


def test_crystals_are_rewound_with_their_atoms():
    field = cells.field(torch.float32)
    atoms = torch.tensor([2, 5, 3, 1, 4, 2])
    run = fmwc.sample(field, 6, steps=4, atoms=atoms, keep_states=True)
    done = rewind(field, run, torch.tensor([4, 1]), scale=0.5, branches=3, score="peak", channel="type", before=0.3)
    assert (done.run.score("peak") <= run.score("peak")).all()
    assert (done.run.x["type"][~cells.present(atoms)] == 0).all()
    anew = resample(field, run, 40, fresh=True, score="peak")
    assert (anew.run.x["coord"][~cells.present(atoms)] == 0).all()


def test_errors_say_what_to_do(mlp):
    run = fmwc.sample(mlp, 6, steps=4, keep_states=True)
    with pytest.raises(UsageError, match="at least 2 branches"):
        rewind(mlp, run, torch.arange(2), branches=1)
    with pytest.raises(UsageError, match="at least 0"):
        rewind(mlp, run, torch.arange(2), before=-0.1)
    with pytest.raises(UsageError, match="0 to 5"):
        rewind(mlp, run, torch.tensor([6]))
    with pytest.raises(UsageError, match="twice"):
        rewind(mlp, run, torch.tensor([1, 1]))
    with pytest.raises(ShapeError, match="one entry a sample"):
        rewind(mlp, run, torch.ones(5, dtype=torch.bool))
    with pytest.raises(ShapeError, match="one number per sample"):
        rewind(mlp, run, torch.arange(2), score=lambda run: torch.zeros(3))
    with pytest.raises(UsageError, match="Known: x"):
        rewind(mlp, run, torch.arange(2), channel="y")
    with pytest.raises(UsageError, match="at least 1 evaluation"):
        resample(mlp, run, 0)
    with pytest.raises(UsageError, match="share"):
        resample(mlp, run, 10, share=0.0)
