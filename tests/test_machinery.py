"""A field under compilation, autocast, DDP, torch.func, gradient checkpointing, copies and pickles."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointError, checkpoint

import fmwc
from fmwc.errors import UsageError
from fmwc.estimators import Linearised, MonteCarlo
from fmwc.networks import MLP
from fmwc.sampling import SamplingConfig
from tests.conftest import awaken, mlp_field


@pytest.fixture
def place():
    return torch.randn(6, 2), torch.rand(6)


def far_apart(a, b):
    return ((a - b).abs() / b.abs()).max()


# ---- torch.compile (with the hooks kept in: tests/noise/test_compiling.py) -------------------------------------------


def compiled(what, **options):
    torch.compiler.reset()
    return torch.compile(what, backend="aot_eager", **options)  # traces like the default, and compiles no kernels


def test_field_compiles_to_one_graph(mlp, place):
    torch.testing.assert_close(compiled(mlp, fullgraph=True)(*place), mlp(*place))


def test_sampler_step_compiles_to_one_graph(mlp, place):
    def step(x, t, dt):
        middle = x + dt / 2 * mlp(x, t)
        return x + dt * mlp(middle, t + dt / 2)

    torch.testing.assert_close(compiled(step, fullgraph=True)(*place, 0.1), step(*place, 0.1))


def test_noise_works_on_a_network_that_was_compiled_before(place):
    network = MLP(2, 16, 2, 8)
    alone = fmwc.attach(network, space=(2,), width=8).moments(*place).var
    fast = compiled(network)
    fast(*place)  # compiled without hooks; torch does not check whether hooks were added
    field = fmwc.attach(fast, space=(2,), width=8)
    assert bool((alone > 0).all())
    torch.testing.assert_close(field.moments(*place).var, alone)
    assert not torch.equal(field.draw(*place, seed=0), network(*place))
    plain = fmwc.sample(network, 4, steps=3, confidence=None, config=SamplingConfig(space=(2,)))
    torch.testing.assert_close(fmwc.sample(field, 4, steps=3).x, plain.x)


# ---- autocast --------------------------------------------------------------------------------------------------------


def test_autocast_keeps_the_variance():
    field = mlp_field()
    x, t = torch.randn(6, *field.space.channels["x"].shape), torch.rand(6)
    exact = field.moments(x, t).var
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert field(x, t).dtype == torch.bfloat16
        assert torch.equal(field(x, t), field.network(x, t))
        found, drawn = field.moments(x, t), field.moments(x, t, MonteCarlo(1024), seed=0)
    assert found.var.dtype == torch.float32
    assert found.mean.dtype == torch.bfloat16
    assert far_apart(found.var, exact) < 0.1  # bfloat16 has three digits
    assert 0.9 < drawn.var.mean() / exact.mean() < 1.1  # sums in bfloat16 would give 0.8


def test_training_under_autocast(mlp):
    data = torch.randn(32, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = fmwc.elbo_loss(mlp, data, seed=0)
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in mlp.parameters())
    assert abs(loss - fmwc.elbo_loss(mlp, data, seed=0)) < 0.05


# ---- torch.func ------------------------------------------------------------------------------------------------------


def test_functional_call_takes_other_weights(mlp, place):
    other = mlp_field(seed=1)
    found = torch.func.functional_call(mlp, other.state_dict(), place)
    assert torch.equal(found, other(*place))
    assert not torch.equal(found, mlp(*place))


def test_vmap_over_samples(mlp, place):
    one = torch.func.vmap(lambda x, t: mlp(x[None], t[None])[0])
    torch.testing.assert_close(one(*place), mlp(*place))


def test_jvp_and_vjp_are_transposes(mlp, place):
    x, t = place
    u, w = torch.randn(2, *x.shape)
    value, forward = torch.func.jvp(lambda x: mlp(x, t), (x,), (u,))
    again, pull = torch.func.vjp(lambda x: mlp(x, t), x)
    assert torch.equal(again, mlp(x, t))
    torch.testing.assert_close(value, again)
    torch.testing.assert_close((forward * w).sum(), (pull(w)[0] * u).sum())


def test_a_draw_has_derivatives_with_the_same_noise(mlp, place):
    x, t = (v.double() for v in place)
    field = mlp.double()
    u = torch.randn_like(x)
    _, slope = torch.func.jvp(lambda x: field.run(_noise(field), x, t), (x,), (u,))
    step = 1e-6
    apart = field.run(_noise(field), x + step * u, t) - field.run(_noise(field), x - step * u, t)
    torch.testing.assert_close(slope, apart / (2 * step), rtol=1e-5, atol=1e-7)


def _noise(field):
    return fmwc.noise.Draw(fmwc.randomness.as_randomness(0, field.device))


# ---- gradient checkpointing ------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Two blocks whose activations are recomputed in the backward pass."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 16))
        self.second = nn.Sequential(nn.SiLU(), nn.Linear(16, 2))

    def forward(self, x, t):
        h = torch.cat([x, t[:, None]], 1)
        for block in (self.first, self.second):
            h = block(h) if self.reentrant is None else checkpoint(block, h, use_reentrant=self.reentrant)
        return h


def blocks(reentrant):
    torch.manual_seed(0)
    return awaken(fmwc.attach(Checkpointed(reentrant), space=(2,), width=8))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("estimator", [Linearised(), Linearised(4), "tangent", "monte_carlo"], ids=str)
def test_the_variance_is_the_same_with_checkpointing(estimator, frozen, place):
    found = []
    for reentrant in (None, False):
        field = blocks(reentrant)
        field.network.requires_grad_(not frozen)
        found.append(field.moments(*place, estimator, seed=0).var)
    torch.testing.assert_close(*found)
    assert bool((found[0] > 0).all())


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_training_noise_through_a_checkpoint_is_refused(place):
    """The recomputation would lack the noise. Torch detects this, so there is no silent wrong gradient."""
    with pytest.raises(CheckpointError, match="tensors"):
        fmwc.elbo_loss(blocks(False), torch.randn(8, 2), seed=0).backward()
    with pytest.raises(UsageError, match="checkpointing"):
        fmwc.fit_noise(blocks(False), torch.randn(8, 2), steps=1)
    with pytest.raises(UsageError, match="use_reentrant"):
        fmwc.elbo_loss(blocks(True), torch.randn(8, 2), seed=0)
    with pytest.raises(UsageError, match="gradients"):
        blocks(True).moments(*place)


# ---- copies ----------------------------------------------------------------------------------------------------------


def on_disk(field):
    file = io.BytesIO()
    torch.save(field, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # a whole module, as some users save it; the file is trusted


def by_weights(field):
    again = fmwc.attach(MLP(2, 16, 2, 8), space=(2,), width=8, seed=9)
    again.load_state_dict(field.state_dict())
    return again


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda field: pickle.loads(pickle.dumps(field)),  # trusted bytes, as multiprocessing sends them
    "torch.save": on_disk,
    "state_dict": by_weights,
}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_uses_its_own_noise(how, mlp, place):
    var, drawn = mlp.moments(*place).var, mlp.draw(*place, seed=0)
    twin = COPIES[how](mlp)
    assert torch.equal(twin.moments(*place).var, var)
    assert torch.equal(twin.draw(*place, seed=0), drawn)
    assert not set(twin.parameters()) & set(mlp.parameters())
    with torch.no_grad():
        for p in twin.noise.parameters():
            p.zero_()  # log α = 0: far more noise
    assert bool((twin.moments(*place).var > 2 * var).all())
    assert torch.equal(mlp.moments(*place).var, var)
    assert twin.noise.running is not mlp.noise.running
    twin.detach()
    assert torch.equal(mlp.moments(*place).var, var)


def test_a_copy_of_the_network_alone_is_the_plain_network(mlp, place):
    """An example is a moving average of the weights."""
    plain = copy.deepcopy(mlp.network)
    assert torch.equal(plain(*place), mlp(*place))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in plain.modules())
    assert bool((fmwc.attach(plain, space=(2,)).moments(*place).var > 0).all())


class Loss(nn.Module):
    """A module whose forward is the loss, to be wrapped by DDP."""

    def __init__(self, field):
        super().__init__()
        self.field = field

    def forward(self, x1, seed):
        return fmwc.elbo_loss(self.field, x1, seed=seed)


def test_one_process_of_ddp_wraps_a_field(mlp, place, tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(mlp.network)
        field = fmwc.attach(wrapped, space=(2,))
        assert torch.equal(field(*place), mlp(*place))
        assert bool((field.moments(*place).var > 0).all())
        DistributedDataParallel(Loss(mlp))(torch.randn(8, 2), seed=0).backward()
        assert all(torch.isfinite(p.grad).all() for p in mlp.parameters())
    finally:
        torch.distributed.destroy_process_group()
