"""Attention rules: the plain result without noise, and Monte Carlo for small noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor as T

from fmwc.moments import Gaussian, moments_of
from tests.moments.operands import gaussian, plain
from tests.reference import assert_within, delta, drawn

ATTENTIONS = (F.scaled_dot_product_attention, F.multi_head_attention_forward)
QKV = ((2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 3))  # (B, H, L, E), (B, H, S, E), (B, H, S, V)
FORBIDDEN = torch.tensor([[0, 0, 1, 0, 0], [0, 1, 0, 0, 1], [0, 0, 0, 0, 0]]) > 0
ATTENTION = {
    "plain": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v), QKV),
    "masked": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, ~FORBIDDEN), QKV),
    "biased": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, plain(3, 5), scale=0.7), QKV),
    "causal": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), QKV),
    "grouped": (
        lambda q, k, v: (
            F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True) + (k.sum() + v.sum()) * 0
        ),
        QKV,
    ),
    "only values random": (
        lambda v: F.scaled_dot_product_attention(plain(2, 2, 3, 4), plain(2, 2, 5, 4, seed=8), v),
        QKV[2:],
    ),
    "only queries random": (
        lambda q: F.scaled_dot_product_attention(q, plain(2, 2, 5, 4), plain(2, 2, 5, 3, seed=8)),
        QKV[:1],
    ),
}


def heads(need_weights: bool = False, batch: bool = True, **options: Any) -> Callable[..., Any]:
    """Call torch's multi-head attention with the arguments that differ between tests."""
    masks = {k: options.pop(k) for k in ("attn_mask", "key_padding_mask") if k in options}
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(4, 2, **options).double().eval()
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn_like(p) * 0.5)
    layer.requires_grad_(False)

    def call(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x if batch else x[0] for x in (q, k, v))
        y, weights = layer(q, k, v, need_weights=need_weights, **masks)
        return weights if need_weights else y

    return call


TOKENS = ((2, 3, 4), (2, 5, 4), (2, 5, 4))  # batch first
PADDING = torch.tensor([[0, 0, 0, 0, 1], [0, 0, 1, 1, 1]]) > 0
HEADS = {
    "plain": (heads(batch_first=True), TOKENS),
    "of its own sizes": (heads(batch_first=True, kdim=3, vdim=6), ((2, 3, 4), (2, 5, 3), (2, 5, 6))),
    "length first": (heads(), ((3, 2, 4), (5, 2, 4), (5, 2, 4))),
    "no batch": (heads(batch=False), ((1, 3, 4), (1, 5, 4), (1, 5, 4))),
    "no bias": (heads(batch_first=True, bias=False), TOKENS),
    "extra tokens": (heads(batch_first=True, add_bias_kv=True, add_zero_attn=True, key_padding_mask=PADDING), TOKENS),
    "padded": (heads(batch_first=True, key_padding_mask=PADDING, attn_mask=FORBIDDEN), TOKENS),
    "biased": (heads(batch_first=True, attn_mask=plain(3, 5)), TOKENS),
    "a mask a head": (heads(batch_first=True, attn_mask=FORBIDDEN.expand(4, 3, 5)), TOKENS),
    "weights": (heads(True, batch_first=True, attn_mask=FORBIDDEN), TOKENS),
}
COMPOSED = {
    **{f"attention, {name}": case for name, case in ATTENTION.items()},
    **{f"heads, {name}": case for name, case in HEADS.items()},
}


@pytest.mark.parametrize("name", COMPOSED)
def test_attention(name):
    """Without noise the result equals torch's. Sums over tokens ignore their correlations."""
    f, shapes = COMPOSED[name]
    inputs = [gaussian(*shape, seed=i, low=-1, high=1) for i, shape in enumerate(shapes)]
    sure = f(*(Gaussian(x._mean, torch.zeros_like(x._var)) for x in inputs))
    torch.testing.assert_close(moments_of(sure).mean, f(*(x._mean for x in inputs)))
    assert not moments_of(sure).var.any()
    # To first order, the rule ignores correlations of scores that share a query or a key, and of heads.
    small = [Gaussian(x._mean, x._var * 1e-6) for x in inputs]
    found, (mean, var) = moments_of(f(*small)), delta(f, [moments_of(x) for x in small])
    torch.testing.assert_close(found.mean, mean, rtol=1e-4, atol=1e-6)
    ratio = (found.var.sum() / var.sum()).item()
    assert 0.3 < ratio < 3
    if name == "attention, only values random":
        torch.testing.assert_close(found.var, var)


@pytest.mark.parametrize("bias", [0.0, plain(3, 5), torch.zeros(3, 5).double().masked_fill(FORBIDDEN, -torch.inf)])
def test_attention_in_closed_form(bias):
    """Compute scores, softmax (by its Jacobian) and values, each for independent inputs."""
    (q, vq), (k, vk), (v, vv) = moments = [moments_of(gaussian(*shape, seed=i)) for i, shape in enumerate(QKV)]
    scale = 0.7
    weights = torch.softmax(scale * q @ k.mT + bias, -1)
    score_var = scale**2 * (vq @ k.mT**2 + q**2 @ vk.mT + vq @ vk.mT)
    jacobian = torch.diag_embed(weights) - weights[..., :, None] * weights[..., None, :]
    weight_var = (jacobian.square() @ score_var[..., None])[..., 0]
    expected = weight_var @ v**2 + weights**2 @ vv + weight_var @ vv
    mask = None if isinstance(bias, float) else bias
    found = moments_of(F.scaled_dot_product_attention(*(Gaussian(*m) for m in moments), mask, scale=scale))
    torch.testing.assert_close(found.mean, weights @ v)
    torch.testing.assert_close(found.var, expected)


def test_attention_of_independent_scores_against_monte_carlo():
    """Use one dimension and one query, so that all scores are independent."""
    shapes = ((1, 4, 1), (1, 4, 3))

    def f(k: T, v: T) -> T:
        return F.scaled_dot_product_attention(torch.ones(1, 1, 1, dtype=torch.float64), k, v)

    inputs = [Gaussian(x._mean, x._var * 1e-2) for x in (gaussian(*s, seed=i) for i, s in enumerate(shapes))]
    # Softmax weights are correlated through their sum. This has little effect here, because the values are similar.
    inputs[1] = Gaussian(inputs[1]._mean * 0, inputs[1]._var)
    found = moments_of(f(*inputs))
    mean, var, mean_error, var_error = drawn(f, [moments_of(x) for x in inputs], draws=20_000)
    assert_within(found.mean, mean, mean_error + 1e-4)
    assert_within(found.var, var, var_error)
