"""Reading a way again: what the run itself read, where the noise and the estimator are the same."""

import pytest
import torch
from torch import nn

import fmwc
from fmwc.compiled import Compiled
from fmwc.errors import UsageError
from fmwc.estimators import Linearised
from fmwc.networks import MLP
from fmwc.sampling import SamplingConfig, Schedule, reread, sample
from tests.options import reader, when


def fields():
    torch.manual_seed(0)
    network = MLP(2, 8, 2)
    return [fmwc.attach(network, space=(2,)) for _ in range(2)]


@pytest.mark.parametrize("schedule", [1, 3, (0.25, 0.6)])
def test_the_same_noise_reads_the_same(schedule):
    field, _ = fields()
    run = sample(
        field, 7, steps=10, schedule=when(schedule), confidence=Linearised(), config=SamplingConfig(keep_states=True)
    )
    again = reread(field, run, reader("linearised"), schedule=when(schedule), batch=3)
    torch.testing.assert_close(again.times, run.times)
    torch.testing.assert_close(again.var, run.var)
    torch.testing.assert_close(again.mean, run.mean)
    assert torch.equal(again.x, run.x)


def test_another_noise_reads_otherwise_and_moves_nothing():
    field, other = fields()
    run = sample(field, 5, steps=6, config=SamplingConfig(keep_states=True))
    with torch.no_grad():
        for layer in other.noise.layers:
            layer.inference.out.bias += 1.0  # log α, one higher everywhere
    again = reread(other, run, reader("linearised"))
    assert torch.equal(again.x, run.x)
    torch.testing.assert_close(again.var, run.var * torch.e)


def test_random_probes_do_not_depend_on_batches():
    field, _ = fields()
    run = sample(field, 9, steps=4, confidence=None, config=SamplingConfig(keep_states=True))
    one, some = (reread(field, run, Linearised(2), batch=size) for size in (9, 2))
    torch.testing.assert_close(one.var, some.var)


def test_what_cannot_be_read_again_is_said():
    field, _ = fields()
    with pytest.raises(UsageError, match="keep_states=True"):
        reread(field, sample(field, 3, steps=2), reader("linearised"))
    for schedule in (0, -1, True, 1.5):
        with pytest.raises(UsageError, match="every k-th step"):
            Schedule.every(schedule)
    with pytest.raises(UsageError, match="at least 1 time"):
        Schedule.at([])


def test_a_network_in_training_mode_is_read_in_evaluation_mode():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    net.forward = lambda x, t: nn.Sequential.forward(net, x)
    field = fmwc.attach(net, space=(2,)).train()
    run = sample(field, 4, steps=3, config=SamplingConfig(keep_states=True))
    torch.testing.assert_close(reread(field, run, reader("linearised")).var, run.var)
    assert net.training


def test_a_compiled_field_is_read_again(monkeypatch):
    field, _ = fields()
    run = sample(field, 4, steps=3, config=SamplingConfig(keep_states=True))
    fast = Compiled(field, "eager", lambda text: None)
    torch.testing.assert_close(reread(fast, run, reader("linearised")).var, run.var)
