r"""Softmax and attention.

The softmax p = softmax(z) is taken to first order. Its Jacobian is p_i (δ_ij − p_j), so

.. math:: E[p_i] ≈ p_i(μ), \qquad Var[p_i] ≈ p_i^2 \Bigl[ σ_i^2 (1 - 2 p_i) + \sum_j p_j^2 σ_j^2 \Bigr]

The variance of log p_i omits the leading p_i². Attention is composed of the rules of its parts (product, softmax,
product), with queries, keys and values treated as independent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fmwc.errors import NoRuleError
from fmwc.moments.gaussian import FIRST_ORDER, Gaussian, arguments, refusal, register

T = Tensor
_LOGARITHMS = (F.log_softmax, torch.log_softmax, T.log_softmax)


@register(F.softmax, torch.softmax, T.softmax, *_LOGARITHMS, exactness=FIRST_ORDER)
def softmax(func: Any, args: Any, kwargs: Any) -> Gaussian:
    """p, p²[σ²(1 − 2p) + Σp²σ²]; the log-softmax omits the leading p²."""
    x, dim = arguments(args, kwargs, "input", dim=None)
    if dim is None:  # torch would guess
        raise NoRuleError(refusal(func, args, kwargs))
    mean = func(x._mean, *args[1:], **kwargs)
    p = mean.exp() if func in _LOGARITHMS else mean
    var = x._var.to(p.dtype) * (1 - 2 * p) + (p.square() * x._var).sum(dim, keepdim=True)
    # The bracket is non-negative up to rounding.
    return Gaussian(mean, (var if func in _LOGARITHMS else var * p.square()).clamp_min(0), x._closure)


@register(F.scaled_dot_product_attention, exactness=FIRST_ORDER)
def attention(func: Any, args: Any, kwargs: Any) -> Any:
    """softmax(q kᵀ / √d + mask) v from the rules of its parts, with q, k, v and the scores treated as independent."""

    def bind(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
             scale: float | None = None, enable_gqa: bool = False) -> Any:  # fmt: skip
        if dropout_p > 0:
            raise NoRuleError("attention's dropout is on; pass dropout_p=0.0 in evaluation mode")
        if enable_gqa:
            groups = query.shape[-3] // key.shape[-3]
            key, value = (v.repeat_interleave(groups, -3) for v in (key, value))
        if is_causal:
            attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        scores = (query * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)) @ key.transpose(-2, -1)
        if attn_mask is not None:
            blocked = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, -math.inf) if blocked else scores + attn_mask
        return torch.softmax(scores, -1) @ value

    return bind(*args, **kwargs)


Project = Callable[[str, Any, Tensor, Any], Any]  # (which, input, weight, bias) -> output


def _linear(which: str, x: Any, weight: Tensor, bias: Any) -> Any:
    return F.linear(x, weight, bias)


def multi_head_attention(
    query: Any,  # (L, B, E), or (L, E); keys and values the same with S
    key: Any,
    value: Any,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Any,
    in_proj_bias: Any,
    bias_k: Any,
    bias_v: Any,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Any,
    out_proj_bias: Any,
    training: bool = True,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Any = None,
    k_proj_weight: Any = None,
    v_proj_weight: Any = None,
    static_k: Any = None,
    static_v: Any = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    project: Project = _linear,
) -> tuple[Any, Any]:
    """Compute torch's multi_head_attention_forward, with its four projections computed by `project`, batch first."""
    if static_k is not None or static_v is not None:
        raise NoRuleError("no rule carries a variance through attention with static keys; use the linearised estimator")
    batched = query.ndim == 3
    q, k, v = (x.transpose(0, 1) if batched else x.unsqueeze(0) for x in (query, key, value))  # (B, L, E)
    weights = (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else in_proj_weight.chunk(3)
    biases = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)
    q, k, v = (
        project(which, x, weight, bias)
        for which, x, weight, bias in zip(("q", "k", "v"), (q, k, v), weights, biases, strict=True)
    )
    extra = [(bias_k, bias_v)] if bias_k is not None else []  # a token added to every sample
    if add_zero_attn:
        extra.append((q.new_zeros(1, 1, q.shape[-1]), q.new_zeros(1, 1, q.shape[-1])))
    for more_k, more_v in extra:
        k, v = (torch.cat([x, m.expand(len(x), 1, -1)], 1) for x, m in ((k, more_k), (v, more_v)))
    q, k, v = (x.unflatten(-1, (num_heads, -1)).transpose(1, 2) for x in (q, k, v))  # (B, H, L, E/H)

    mask = _merged(attn_mask, key_padding_mask, q, k.shape[2], len(extra))
    dropped = dropout_p if training else 0.0
    attended = None
    if need_weights:
        scores = (q * math.sqrt(1 / q.shape[-1])) @ k.transpose(-2, -1)
        attended = F.dropout(torch.softmax(scores if mask is None else scores + mask, -1), dropped, dropped > 0)
        y = attended @ v
        attended = attended.mean(1) if average_attn_weights else attended
    else:
        y = F.scaled_dot_product_attention(q, k, v, mask, dropped)
    y = project("out", y.transpose(1, 2).flatten(2), out_proj_weight, out_proj_bias)
    if batched:
        return y.transpose(0, 1), attended
    return y.squeeze(0), None if attended is None else attended.squeeze(0)


def _merged(attn_mask: Any, key_padding_mask: Any, q: Any, keys: int, extra: int) -> Any:  # -> (B, H, L, S) or less
    """Return both masks as one additive mask of the scores; extra tokens are never masked."""

    def added(mask: Tensor) -> Tensor:
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=q.dtype, device=mask.device).masked_fill(mask, -math.inf)
        return F.pad(mask, (0, extra)) if extra else mask

    total = None
    if attn_mask is not None:
        total = added(attn_mask)
        total = total if total.ndim == 2 else total.unflatten(0, (-1, q.shape[1]))
    if key_padding_mask is not None:
        padding = added(key_padding_mask).reshape(-1, 1, 1, keys)
        total = padding if total is None else total + padding
    return total


@register(F.multi_head_attention_forward, exactness=FIRST_ORDER, family="multi-head attention")
def multi_head(func: Any, args: Any, kwargs: Any) -> Any:
    """The rules of its parts: three projections, attention per head, and the output projection."""
    return multi_head_attention(*args, **kwargs)
