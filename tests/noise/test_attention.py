"""Noise in nn.MultiheadAttention: each projection is a noisy layer, and torch may use fused kernels without a pass."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fmwc.errors import UsageError
from fmwc.estimators import Diagonal, MonteCarlo, Tangent
from fmwc.field import Field, attach
from fmwc.noise import Pass
from fmwc.sampling import sample
from tests.conftest import awaken
from tests.reference import assert_within

TOKENS, WIDTH, HEADS = 3, 8, 2
FORBIDDEN = torch.tensor([[0, 0, 1], [1, 0, 0], [0, 0, 0]]) > 0
WAYS = {  # options of the module, and of its call
    "plain": ({}, {"need_weights": False}),
    "with weights": ({}, {"need_weights": True}),
    "masked": ({}, {"attn_mask": FORBIDDEN}),
    "no bias": ({"bias": False}, {}),
    "length first": ({"batch_first": False}, {}),
    "of several sizes": ({"kdim": 6, "vdim": 4}, {}),
}


class Fused(nn.Module):
    """Self-attention, or attention to slices of the input, with torch's module."""

    def __init__(self, **options):
        super().__init__()
        options = {"batch_first": True, **options}
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, **options)
        self.call = {}

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        a = self.attention
        key, value = (x if n == WIDTH else x[..., :n] for n in (a.kdim, a.vdim))
        q, k, v = (h if a.batch_first else h.transpose(0, 1) for h in (x, key, value))
        y, weights = a(q, k, v, **self.call)
        y = y if a.batch_first else y.transpose(0, 1)
        return y if weights is None else y + weights.mean()


class ByHand(nn.Module):
    """The same attention with four linear layers."""

    def __init__(self, fused: Fused):
        super().__init__()
        a = self.attention = nn.Module()
        for which, size in (("q", WIDTH), ("k", fused.attention.kdim), ("v", fused.attention.vdim), ("out", WIDTH)):
            a.add_module(f"{which}_proj", nn.Linear(size, WIDTH, bias=fused.attention.in_proj_bias is not None))
        theirs = fused.attention
        separate = (theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight)
        weights = separate if theirs.in_proj_weight is None else theirs.in_proj_weight.chunk(3)
        with torch.no_grad():
            for i, layer in enumerate((a.q_proj, a.k_proj, a.v_proj)):
                layer.weight.copy_(weights[i])
                if theirs.in_proj_bias is not None:
                    layer.bias.copy_(theirs.in_proj_bias.chunk(3)[i])
        a.out_proj.load_state_dict(theirs.out_proj.state_dict())
        self.call = fused.call

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        a = self.attention
        q, k, v = (layer(x[..., : layer.in_features]) for layer in (a.q_proj, a.k_proj, a.v_proj))
        q, k, v = (h.unflatten(-1, (HEADS, -1)).transpose(1, 2) for h in (q, k, v))
        scores = q * (1 / q.shape[-1]) ** 0.5 @ k.mT
        if (mask := self.call.get("attn_mask")) is not None:
            scores = scores.masked_fill(mask, -torch.inf)
        weights = torch.softmax(scores, -1)
        y = a.out_proj((weights @ v).transpose(1, 2).flatten(2))
        return y + weights.mean(1).mean() if self.call.get("need_weights", True) else y


def pair(way: str, **options) -> tuple[Field, Field]:
    built, called = WAYS[way]
    torch.manual_seed(0)
    fused = Fused(**built).double()
    fused.call = called
    if fused.attention.in_proj_bias is not None:
        nn.init.normal_(fused.attention.in_proj_bias)
    hand = ByHand(fused).double()
    return tuple(awaken(attach(n.eval(), space=(TOKENS, WIDTH), width=8, **options)) for n in (fused, hand))


def states(count: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, TOKENS, WIDTH, dtype=torch.float64, generator=generator)
    return x, torch.rand(count, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("way", WAYS)
def test_equals_four_linear_layers(way):
    fused, hand = pair(way)
    x, t = states()
    parts = [f"attention.{which}_proj" for which in ("q", "k", "v", "out")]
    assert fused.noise.names == hand.noise.names == parts
    torch.testing.assert_close(fused(x, t), hand(x, t))
    torch.testing.assert_close(fused.draw(x, t, seed=0), hand.draw(x, t, seed=0))
    # Without attention weights, torch calls a kernel without forward mode, so tangents are tried twice and drawn again.
    tangent = [] if way == "plain" else [Tangent(3)]
    for estimator in ("linearised", "diagonal", MonteCarlo(4, abreast=2), *tangent):
        found, expected = (f.moments(x, t, estimator, seed=0) for f in (fused, hand))
        torch.testing.assert_close(found.mean, expected.mean)
        torch.testing.assert_close(found.var, expected.var)
        assert bool((found.var > 0).all())
    (_, kl), (_, expected) = (f.draw_with_kl(x, t, seed=0) for f in (fused, hand))
    torch.testing.assert_close(kl, expected)


@pytest.mark.parametrize("part", ["q", "k", "v", "out"])
def test_each_projection_alone(part):
    fused, hand = pair("plain", include=[f"*.{part}_proj"])
    x, t = states()
    for estimator in ("linearised", "diagonal"):
        found = fused.moments(x, t, estimator).var
        torch.testing.assert_close(found, hand.moments(x, t, estimator).var)
        assert bool((found > 0).all())


def test_draws_against_the_linearised_variance():
    fused, _ = pair("plain", initial_log_alpha=-9.0)
    for layer in fused.noise.layers:
        nn.init.zeros_(layer.inference.out.weight)
    x, t = states(1)
    found = fused.moments(x, t).var
    drawn = fused.moments(x, t, MonteCarlo(4000, abreast=4000), seed=0).var
    assert_within(drawn, found, found * (2 / 4000) ** 0.5 + 1e-3 * found)


def test_noise_learns_and_copies_stand_alone():
    fused, _ = pair("plain")
    x, t = states()
    fused.network.train()
    v, kl = fused.draw_with_kl(x, t, seed=0)
    (v.square().mean() + kl).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in fused.parameters())
    var = fused.moments(x, t).var
    twin = copy.deepcopy(fused)
    assert twin.noise._places[0][1].attention is twin.network.attention
    with torch.no_grad():
        twin.network.attention.in_proj_weight.mul_(2)
    assert torch.equal(fused.moments(x, t).var, var)
    assert not torch.equal(twin.moments(x, t).var, var)


# ---- torch's fused path ----------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    def __init__(self, **options):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True, **options)
        self.encoder, self.out = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, t: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.out(self.encoder(x + t[:, None, None], src_key_padding_mask=padding))


def encoder(**options) -> nn.Module:
    torch.manual_seed(0)
    return Encoder(**options).eval()


@pytest.mark.parametrize("options", [{}, {"norm_first": True, "activation": "gelu"}, {"dropout": 0.0}], ids=str)
def test_attaching_changes_no_bit_and_no_estimator_changes_the_mean(options):
    network = encoder(**options)
    x, t = torch.randn(3, TOKENS, WIDTH), torch.rand(3)
    with torch.no_grad():
        before = network(x, t)  # fused
        layerwise = network.requires_grad_(True)
    field = awaken(attach(layerwise, space=(TOKENS, WIDTH), width=8))
    with torch.no_grad():
        assert torch.equal(network(x, t), before)
        assert torch.equal(field(x, t), before)
    for estimator in ("linearised", "tangent"):
        assert torch.equal(field.moments(x, t, estimator, seed=0).mean, before)


KERNELS = {"_transformer_encoder_layer_fwd": encoder, "_native_multi_head_attention": Fused}


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_fused_path_is_on_at_rest_and_off_during_a_pass(kernel, monkeypatch):
    network = KERNELS[kernel]().eval()
    calls = []
    fused = getattr(torch, kernel)
    monkeypatch.setattr(torch, kernel, lambda *a: calls.append(1) or fused(*a))
    x, t = torch.randn(3, TOKENS, WIDTH), torch.rand(3)
    with torch.no_grad():
        network(x, t)
        before = len(calls)
        field = attach(network, width=8, exclude=["*.q_proj"])
        field.draw(x, t, seed=0)
        field.moments(x, t, "diagonal")
        field.moments(x, t, Tangent())  # one more call, for the mean of the plain network
        with pytest.raises(RuntimeError):
            field.run(Pass(), torch.randn(3, TOKENS, 5), t)
        assert len(calls) == 2 * before > 0
        field(x, t)
        assert len(calls) == 3 * before


def test_every_layer_of_an_encoder_is_called():
    field = awaken(attach(encoder(), width=8))
    assert len(field.noise.names) == 2 * 6 + 1
    x, t = torch.randn(2, TOKENS, WIDTH), torch.rand(2)
    for name in field.noise.names:
        alone = attach(field.network, include=[name], width=8)
        for estimator in ("linearised", Diagonal()):
            assert bool((alone.moments(x, t, estimator).var.sum((1, 2)) > 0).all()), name


def test_noise_of_padding_does_not_reach_other_rows():
    field = attach(encoder(), width=8)
    x, t = torch.randn(1, TOKENS, WIDTH), torch.rand(1)
    padding = torch.tensor([[False, False, True]])
    for estimator in ("linearised", "diagonal"):
        whole = field.moments(x, t, estimator, cond={"padding": padding})
        short = field.moments(x[:, :2], t, estimator, cond={"padding": padding[:, :2]})
        torch.testing.assert_close(whole.var[:, :2], short.var, rtol=1e-4, atol=1e-8)


def test_samples_are_the_plain_networks_bit_for_bit():
    field = attach(encoder(), space=(TOKENS, WIDTH), width=8)
    plain = sample(field, 3, steps=4, seed=0, confidence=None)
    assert torch.equal(sample(field, 3, steps=4, seed=0).x, plain.x)
    assert torch.equal(sample(field, 3, steps=4, seed=0, confidence=Diagonal()).x, plain.x)


class Direct(nn.Module):
    """A network that calls fused attention directly."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_forward_mode_goes_through_fused_attention():
    torch.manual_seed(0)
    field = awaken(attach(Direct(), space=(TOKENS, WIDTH), width=8)).double()
    x, t = states()
    found = field.moments(x, t, Tangent(400), seed=0)
    assert torch.equal(found.mean, field(x, t))
    expected = field.moments(x, t).var
    assert_within(found.var, expected, expected * (2 / 400) ** 0.5)  # the mean of 400 squared Gaussians


class Twice(nn.Module):
    """One attention used twice, optionally with gradient checkpointing."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.early = self.late = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.reentrant = reentrant

    def block(self, x: Tensor) -> Tensor:
        return x + self.early(x, x, x, need_weights=False)[0]

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.block(x) if self.reentrant is None else checkpoint(self.block, x, use_reentrant=self.reentrant)
        return h + self.late(h, h, h, need_weights=False)[0]


def test_attention_used_twice_matches_either_name():
    names = ["early.q_proj", "early.k_proj", "early.v_proj", "early.out_proj"]
    assert attach(Twice()).noise.names == names
    assert attach(Twice(), include=["late.v_proj"]).noise.names == ["early.v_proj"]
    assert attach(Twice(), exclude=["late.?_proj"]).noise.names == ["early.out_proj"]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_checkpointed_attention_is_refused_only_with_derivatives():
    x, t = states()
    field = awaken(attach(Twice(False).double(), space=(TOKENS, WIDTH), width=8))
    with pytest.raises(UsageError, match="switch gradient checkpointing off"):
        field.moments(x, t)
    whole = awaken(attach(Twice().double(), space=(TOKENS, WIDTH), width=8))
    whole.load_state_dict(field.state_dict())
    for estimator in (MonteCarlo(4), Tangent(2)):
        found, expected = (f.moments(x, t, estimator, seed=0).var for f in (field, whole))
        torch.testing.assert_close(found, expected)
    with pytest.raises(UsageError, match=r"'early\.q_proj' runs without gradients .* use_reentrant=False"):
        attach(Twice(True).double(), space=(TOKENS, WIDTH)).moments(x, t)
