"""Every network of benchmarks/foreign_networks.py with noise attached."""

import copy

import pytest
import torch

import fmwc
from benchmarks.foreign_networks import NETWORKS, compare
from fmwc.estimators import Linearised, MonteCarlo, Tangent


@pytest.fixture(params=NETWORKS)
def foreign(request):
    found = NETWORKS[request.param]
    if found.missing:
        pytest.skip(f"{found.needs} is not installed; make test-interop has it")
    return found


@pytest.mark.parametrize("derivatives", [False, True])
def test_attaching_does_not_change_outputs(foreign, derivatives):
    x, t, cond = foreign.inputs(3)
    field = foreign.field()
    plain = copy.deepcopy(field.network)  # the same network without noise
    with torch.set_grad_enabled(derivatives):
        output = plain(x, t, **cond)
        assert torch.equal(field(x, t, **cond), output)
        for estimator in (Linearised(2), MonteCarlo(2)):
            field.moments(x, t, estimator, seed=0, cond=cond)
        assert torch.equal(field(x, t, **cond), output)
        assert torch.equal(field.detach()(x, t, **cond), output)
    assert {k: v.tolist() for k, v in plain.state_dict().items()} == {
        k: v.tolist() for k, v in field.network.state_dict().items()
    }


def test_variance_agrees_with_draws(foreign):
    x, t, cond = foreign.inputs(8)
    found = compare(foreign.field(), x, t, cond, draws=1024 if x[0].numel() <= 16 else 128)
    assert 0.9 < found["ratio"] < 1.1
    assert 0.9 < found["median"] < 1.1
    assert 0.7 < found["16 probes"] < 1.3
    assert found["spearman"] > found["spearman of draws with other draws"] - 0.02


def test_forward_mode_agrees(foreign):
    x, t, cond = foreign.inputs(4)
    field = foreign.field()
    exact = field.moments(x, t, cond=cond).var.mean()
    found = field.moments(x, t, Tangent(32), seed=0, cond=cond)
    with torch.no_grad():
        assert torch.equal(found.mean, field(x, t, **cond))
    forward = found.var.mean()
    assert 0.7 < forward / exact < 1.4  # 32 random directions of few outputs


def test_confidence_does_not_change_samples(foreign):
    field = foreign.field()
    cond = foreign.cond(4)
    plain = fmwc.sample(field, 4, steps=4, confidence=None, cond=cond)
    run = fmwc.sample(field, 4, steps=4, cond=cond)
    assert torch.equal(run.x, plain.x)
    assert run.rank.shape == (4,)
    assert bool((run.std > 0).all())


def test_noise_is_trained_and_saved(foreign, tmp_path):
    field = foreign.field()
    x, t, cond = foreign.inputs(8)
    before = {k: v.clone() for k, v in field.network.state_dict().items()}
    bias = field.noise.layers[0].inference.out.bias.detach().clone()
    fmwc.fit_noise(field, x, steps=2, batch=4, cond=cond)
    assert not torch.equal(field.noise.layers[0].inference.out.bias, bias)
    assert all(torch.equal(v, before[k]) for k, v in field.network.state_dict().items())
    fmwc.save(field, tmp_path / "kept")
    torch.manual_seed(99)
    again = fmwc.load(tmp_path / "kept", network=foreign.build().eval())
    assert torch.equal(
        again.moments(x, t, Linearised(1), seed=0, cond=cond).var,
        field.moments(x, t, Linearised(1), seed=0, cond=cond).var,
    )
