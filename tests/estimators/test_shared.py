"""One draw of the weights for all positions: linearised against draws of whole weights."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fmwc
from fmwc.estimators import Linearised, MonteCarlo, Tangent
from fmwc.noise import Pass
from fmwc.sampling import SamplingConfig

SMALL = -7.0  # log α: small noise, where first order holds


class Convolutions(nn.Module):
    """Strides, groups, circular padding and a transposed convolution."""

    shape = (2, 8)

    def __init__(self):
        super().__init__()
        self.a = nn.Conv1d(2, 6, 3, stride=2, padding=1, padding_mode="circular")
        self.b = nn.Conv1d(6, 6, 3, padding=1, groups=2)
        self.c = nn.ConvTranspose1d(6, 2, 4, stride=2, padding=1)

    def forward(self, x, t):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x) + t[:, None, None]))))


class Pictures(nn.Module):
    shape = (1, 4, 4)

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 1, 3, padding=1)

    def forward(self, x, t):
        return self.b(torch.tanh(self.a(x)))


class Tokens(nn.Module):
    """The same layers for every token, one of them on a flattened batch of tokens."""

    shape = (5, 2)

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(2, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x, t):
        h = torch.tanh(self.a(x))
        h = h + torch.tanh(self.b(h.flatten(0, 1))).view_as(h)
        return self.c(h.mean(1, keepdim=True) + h)


class Attending(nn.Module):
    shape = (3, 4)

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x, t):
        return x + self.attention(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    """Two layers that are called at every recurrent step."""

    shape = (4, 2)

    def __init__(self):
        super().__init__()
        self.into, self.back, self.out = nn.Linear(2, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x, t):
        h, found = x.new_zeros(len(x), 6), []
        for step in x.unbind(1):
            h = torch.tanh(self.into(step) + self.back(h))
            found.append(self.out(h))
        return torch.stack(found, 1)


class Ragged(nn.Module):
    """A flat list of rows, as in graph networks, with one unused row."""

    shape = (3, 2)

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 8), nn.Linear(8, 2)

    def _flat(self, n):
        sample = torch.arange(len(n)).repeat_interleave(n)
        return sample, torch.cat([torch.arange(int(k)) for k in n])

    def rows(self, x, t, n):
        return [torch.cat([self._flat(n)[0], torch.tensor([len(n)])])]

    def forward(self, x, t, n):
        sample, place = self._flat(n)
        h = self.b(torch.tanh(self.a(torch.cat([x[sample, place], torch.ones(1, 2)]))))[:-1]
        mixed = torch.zeros(len(x), 2).index_add(0, sample, h)
        return torch.zeros_like(x).index_put((sample, place), h + mixed[sample])


class ByHand(Pass):
    """One draw of each layer's weights, ω = θ(1 + √α ε), for all samples and all calls."""

    def __init__(self, generator):
        self.generator, self.noise = generator, {}

    def after(self, noisy, layer, h, y):
        if noisy not in self.noise:
            self.noise[noisy] = torch.randn(layer.weight.shape, generator=self.generator)
        std = noisy.log_alpha(h).exp().sqrt()
        return y + noisy.kind.apply(layer, std * h, layer.weight * self.noise[noisy])


def by_hand(field, x, t, cond, draws):
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        return torch.stack([field.run(ByHand(generator), x, t, cond=cond) for _ in range(draws)]).var(0)


NETS = [Convolutions, Pictures, Tokens, Attending, Recurrent, Ragged]


def made(kind, log_alpha=SMALL):
    torch.manual_seed(0)
    net = kind()
    space = kind.shape
    if kind is Ragged:
        space = fmwc.flow.Space({"x": fmwc.flow.Channel(kind.shape, rows="n")})
    field = fmwc.attach(net, space=space, initial_log_alpha=log_alpha)
    for noisy in field.noise.layers:  # α that depends on the input, so that it differs between positions
        nn.init.normal_(noisy.inference.out.weight, std=0.3)
    x = torch.randn(3, *kind.shape)
    cond = {}
    if kind is Ragged:
        cond = {"n": torch.tensor([3, 1, 2])}
        x = x * (torch.arange(3) < cond["n"][:, None])[..., None]
    return field, x, cond


@pytest.mark.parametrize("kind", NETS)
def test_linearised_is_the_variance_of_whole_weight_draws(kind):
    """Against the estimator's own draws, and draws of weights that all samples share, without vectorisation."""
    field, x, cond = made(kind)
    exact = field.moments(x, 0.3, Linearised(shared=True), cond=cond).var
    where = exact > 0
    own = field.moments(x, 0.3, MonteCarlo(4000, 100, shared=True), seed=1, cond=cond).var
    assert ((own / exact)[where] - 1).abs().max() < 5 * (2 / 4000) ** 0.5
    hand = by_hand(field, x, 0.3, cond, 1000)
    assert ((hand / exact)[where] - 1).abs().max() < 5 * (2 / 1000) ** 0.5
    apart = field.moments(x, 0.3, Linearised(), cond=cond).var
    assert ((exact / apart)[where] - 1).abs().max() > 0.2  # the two variances differ


@pytest.mark.parametrize("kind", NETS)
def test_probes_and_tangents_agree_with_the_exact_sum(kind):
    field, x, cond = made(kind)
    exact = field.moments(x, 0.3, Linearised(shared=True), cond=cond).var
    probed = field.moments(x, 0.3, Linearised(300, shared=True), seed=0, cond=cond).var
    torch.testing.assert_close(probed.flatten(), exact.flatten(1).mean(1), rtol=0.3, atol=0)
    if kind is not Attending:
        pushed = field.moments(x, 0.3, Tangent(400, shared=True), seed=0, cond=cond).var
        where = exact > 0
        assert ((pushed / exact)[where] - 1).abs().max() < 5 * (2 / 400) ** 0.5


def test_shared_noise_is_the_same_without_positions():
    """If every layer sees one row per sample once, both kinds of noise are the same."""
    field = fmwc.attach(fmwc.networks.MLP(dim=2, hidden=16, depth=2), space=2)
    x = torch.randn(5, 2)
    one, other = (field.moments(x, 0.4, Linearised(shared=shared)).var for shared in (False, True))
    torch.testing.assert_close(one, other)


def test_one_linear_layer_over_tokens_in_closed_form():
    """v = Σ_p W h_p: each weight's noise meets the sum of √α h over tokens, before it is squared."""

    class Summed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 3)

        def forward(self, x, t):
            return self.layer(x).sum(1)

    field = fmwc.attach(Summed())
    x = torch.randn(4, 5, 2)
    alpha = torch.tensor(-3.0).exp()
    weight = field.network.layer.weight
    apart, shared = (field.moments(x, 0.5, Linearised(shared=s)).var for s in (False, True))
    torch.testing.assert_close(apart, alpha * F.linear(x.square().sum(1), weight.square()))
    torch.testing.assert_close(shared, alpha * F.linear(x.sum(1).square(), weight.square()))


def test_repr_omits_the_default_of_shared():
    """References are compared by these representations."""
    assert repr(Linearised()) == "Linearised(probes=None)"
    assert repr(Linearised(2)) == "Linearised(probes=2)"
    assert repr(Tangent()) == "Tangent(probes=1)"
    assert repr(MonteCarlo()) == "MonteCarlo(draws=64, abreast=1)"
    assert repr(Linearised(2, shared=True)) == "Linearised(probes=2, shared=True)"
    assert Linearised(2) != Linearised(2, shared=True)


def test_samples_do_not_change_or_depend_on_the_batch():
    field, *_ = made(Tokens)
    runs = [
        fmwc.sample(field, 6, steps=4, confidence=Linearised(2, shared=True), config=SamplingConfig(batch=b))
        for b in (6, 4)
    ]
    plain = fmwc.sample(field, 6, steps=4, confidence=None)
    for run in runs:
        torch.testing.assert_close(run.x, plain.x)
    torch.testing.assert_close(runs[0].score("integrated"), runs[1].score("integrated"))
