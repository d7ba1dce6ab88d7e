"""Networks with unusual layouts, precisions and data: they work, or the error names the fix."""

import pytest
import torch
from torch import nn

import fmwc
from fmwc.errors import UsageError
from fmwc.estimators import Linearised, MonteCarlo
from fmwc.networks import MLP
from fmwc.sampling import Grid, SamplingConfig
from fmwc.uses.best_of import best_of
from fmwc.uses.edit import edit

SHAPE = (5, 3)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


# ---- layouts ---------------------------------------------------------------------------------------------------------


class Sequence(nn.Module):
    """A transformer with batch first or sequence first inside."""

    def __init__(self, batch_first):
        super().__init__()
        self.into, self.out, self.batch_first = nn.Linear(4, 8), nn.Linear(8, 3), batch_first
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x, t):
        h = torch.cat([x, t[:, None, None].expand(*x.shape[:2], 1)], -1)
        h = h if self.batch_first else h.transpose(0, 1)
        h = self.out(self.encoder(self.into(h)))
        return h if self.batch_first else h.transpose(0, 1)


class Tokens(nn.Module):
    """A network whose rows are ordered by token: the first tokens of all samples, then the second, …"""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x, t):
        return self.layer(x.transpose(0, 1).flatten(0, 1)).unflatten(0, (5, -1)).transpose(0, 1)


@pytest.mark.parametrize("net", [Sequence(batch_first=False), Tokens()], ids=["transformer", "tokens"])
def test_batch_dimension_must_come_first(net):
    for call in (
        lambda field: field.moments(torch.randn(2, *SHAPE), 0.5),
        lambda field: fmwc.sample(field, 4, steps=2, confidence=Linearised(2)),
        lambda field: fmwc.fit_noise(field, torch.randn(8, *SHAPE), steps=1),
    ):
        with pytest.raises(UsageError, match="first"):
            call(fmwc.attach(net, space=SHAPE))


def test_sequences_with_samples_first_agree_with_draws():
    field = fmwc.attach(Sequence(batch_first=True).eval(), space=SHAPE, initial_log_alpha=-8.0)
    x, t = torch.randn(4, *SHAPE), torch.rand(4)
    ratio = field.moments(x, t).var.sum((1, 2)) / field.moments(x, t, MonteCarlo(2048, 128), seed=0).var.sum((1, 2))
    torch.testing.assert_close(ratio, torch.ones(4), rtol=0, atol=0.15)


def test_networks_whose_samples_interact_are_refused():
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False))
    net.forward = lambda x, t: nn.Sequential.forward(net, x)
    with pytest.raises(UsageError, match="interact"):
        fmwc.attach(net, space=(2,)).moments(torch.randn(3, 2), 0.5)


# ---- precisions ------------------------------------------------------------------------------------------------------


def test_a_network_in_double_precision_is_sampled_and_fitted_in_it():
    field = fmwc.attach(MLP(2, 8, 2).double(), space=(2,))
    fmwc.fit_noise(field, torch.randn(16, 2), steps=2)
    run = fmwc.sample(field, 4, steps=4)
    assert run.x.dtype == run.var.dtype == torch.float64
    single = fmwc.sample(fmwc.attach(MLP(2, 8, 2), space=(2,)), 4, steps=4)
    torch.testing.assert_close(run.x0, single.x0.double(), rtol=0, atol=0)  # the same noise


# ---- conditions ------------------------------------------------------------------------------------------------------


class Named(nn.Module):
    """A network whose conditions are named like options of this library."""

    NAMES = ("batch", "times", "start", "keep", "steps")

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, x, t, *, batch, times, start, keep, steps):
        given = [t, batch, times, start, keep, steps]
        return self.layers(torch.cat([x, torch.stack([c.to(x.dtype) for c in given], 1)], 1))


def test_conditions_may_have_the_names_of_options():
    field = fmwc.attach(Named(), space=(2,))
    data, classes = torch.randn(40, 2), torch.arange(40) % 2
    cond = {name: torch.rand(40) for name in Named.NAMES} | {"keep": classes}
    few = {name: value[:6] for name, value in cond.items()}
    fmwc.fit_noise(field, data, 3, batch=8, conventions=False, confidence=False, cond=cond)
    reference = fmwc.fit_confidence(field, data, cond=cond, pilot=16, steps=4, conventions=False)
    assert reference.classes == {"keep": (0, 1)}
    field.reference = reference._replace(withheld="")  # an untrained network; streams need a reference

    run = fmwc.sample(field, 6, steps=4, confidence=Linearised(), cond=few, config=SamplingConfig(batch=4))
    assert run.cond.keys() == set(Named.NAMES)
    x, t = run.x0, torch.zeros(6)
    torch.testing.assert_close(field.moments(x, t, cond=few).mean, field.network(x, t, **few))
    plain = fmwc.sample(
        field.network, x0=x, confidence=None, cond=few, config=SamplingConfig(controller=Grid([0, 0.5, 1]), space=(2,))
    ).x
    half = x + field.network(x, t, **few) / 2
    torch.testing.assert_close(plain, half + field.network(half, t + 0.5, **few) / 2)
    streamed = torch.cat(
        [
            part.x
            for part in fmwc.sampling.stream(
                field, 6, steps=4, confidence=None, cond=few, config=SamplingConfig(batch=4)
            )
        ]
    )
    torch.testing.assert_close(streamed, run.x)

    found = fmwc.check(field, run.x, few, evaluations=6)
    assert found.evidence == "contest"
    assert torch.isfinite(found.score).all()
    loss = fmwc.elbo_loss(field, data, cond=cond) + fmwc.flow.flow_matching_loss(field, 2, data, cond=cond)
    assert torch.isfinite(loss)
    watched = fmwc.VarianceRecorder(field).read([x, run.x], [0.0, 1.0], cond=few)
    assert watched.cond.keys() == set(Named.NAMES)
    changed = edit(field, run, None, at=0.5, scale=0.1, cond={"start": few["start"] + 1})
    torch.testing.assert_close(changed.cond["start"], few["start"] + 1)
    assert len(best_of(field, 6, 2, steps=4, cond=few, check=2, confidence=None).run) == 6
    assert fmwc.sampling.fit_grid(field, 3, pilot=6, cond=few).steps == 3
    with pytest.raises(UsageError, match="name"):
        fmwc.sample(field, 6, cond=classes[:6])
    with pytest.raises(TypeError, match="unexpected"):
        edit(field, run, None, at=0.5, scale=0.1, y=classes[:6])
