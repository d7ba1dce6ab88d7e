"""The kinds of layer that can carry noise: one row each, saying how its weights act on an input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmwc.errors import UsageError
from fmwc.vad.attention import Projection

__all__ = ["KINDS", "LayerKind", "kind_of", "kind_of_forward"]

CLOSE = 1e-3  # how far, relative to its largest output, a layer's own function may be from a product with its weight


def _parameter(layer: Any) -> Tensor:
    return layer.weight


@dataclass(frozen=True)
class LayerKind:
    """How a layer applies its weights.

    Arguments:
        apply: `(layer, input, weight) -> output`: the layer with another weight and no bias.
        channels: The name of the attribute that holds the number of input channels.
        spatial: The number of dimensions after the channels; 0 where the channels come last.
        weight: `layer -> weight`: what the layer multiplies its input by, where that is not its parameter `weight`.
    """

    apply: Callable[[Any, Tensor, Tensor], Tensor]
    channels: str
    spatial: int
    weight: Callable[[Any], Tensor] = _parameter


def _linear(layer: Any, x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


def _conv(layer: Any, x: Tensor, weight: Tensor) -> Tensor:
    return layer._conv_forward(x, weight, None)  # honours padding_mode, stride, dilation and groups


def _transposed(name: str, layer: Any, x: Tensor, weight: Tensor) -> Tensor:
    options = layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation
    return getattr(F, name)(x, weight, None, *options)


# Named functions, not lambdas: a row travels with the noise of a layer when it is pickled.
KINDS: dict[type, LayerKind] = {
    nn.Linear: LayerKind(_linear, "in_features", 0),
    Projection: LayerKind(_linear, "in_features", 0),
    nn.Conv1d: LayerKind(_conv, "in_channels", 1),
    nn.Conv2d: LayerKind(_conv, "in_channels", 2),
    nn.Conv3d: LayerKind(_conv, "in_channels", 3),
    nn.ConvTranspose1d: LayerKind(partial(_transposed, "conv_transpose1d"), "in_channels", 1),
    nn.ConvTranspose2d: LayerKind(partial(_transposed, "conv_transpose2d"), "in_channels", 2),
    nn.ConvTranspose3d: LayerKind(partial(_transposed, "conv_transpose3d"), "in_channels", 3),
}

# Layers of other libraries that torch's are no base class of: by name, so that nothing is imported.
BY_NAME: dict[str, LayerKind] = {
    "torch_geometric.nn.dense.linear.Linear": LayerKind(_linear, "in_channels", 0),
}


def kind_of(layer: Any) -> LayerKind | None:
    """The row for a layer, by its class or the nearest base class; `None` for a layer that cannot carry noise."""
    return _row(layer)[1]


def _row(layer: Any) -> tuple[Any, LayerKind | None]:
    """The class that has a row in the table, and its row."""
    for base in type(layer).__mro__:
        if row := KINDS.get(base) or BY_NAME.get(f"{base.__module__}.{base.__qualname__}"):
            return base, row
    return None, None


def kind_of_forward(name: str, layer: Any) -> LayerKind:
    """The row for a layer that is to carry noise, checked against the layer's own function.

    A subclass may compute something else than its base class (an equalised learning rate, a mask, a low-rank update).
    Its noise is that of the weight it really applies: of a linear layer, this is read off its outputs; a layer whose
    function is not a product with one weight is refused.
    """
    base, row = _row(layer)
    assert row is not None
    written = (getattr(type(layer), own, None) is not getattr(base, own, None) for own in ("forward", "_conv_forward"))
    if isinstance(layer, Projection) or layer.weight.is_meta or not (any(written) or "forward" in vars(layer)):
        return row
    candidates = [row, LayerKind(row.apply, row.channels, 0, _seen_weight)] if not row.spatial else [row]
    try:
        found = next((kind for kind in candidates if _explains(kind, layer)), None)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        found = None
    if found is None:
        raise UsageError(
            f"layer '{name}' ({type(layer).__name__}) has a forward of its own that is no product with its weight, so "
            f"its noise is not known: attach(net, exclude=['{name}']), or give the class a row in fmwc.vad.KINDS"
        )
    return found


def _explains(kind: LayerKind, layer: Any) -> bool:
    """Whether a layer's function is the product with the weight of a row, plus a bias."""
    training = layer.training
    layer.eval()
    try:
        with torch.inference_mode(False), torch.no_grad():
            zero, x = (_example(kind, layer, scale) for scale in (0.0, 1.0))
            slope, wanted = layer.forward(x) - layer.forward(zero), kind.apply(layer, x, kind.weight(layer))
            if slope.shape != wanted.shape:
                return False
            close = max(CLOSE, 4 * torch.finfo(slope.dtype).eps)
            return bool((slope - wanted).abs().max() <= close * wanted.abs().max().clamp_min(1e-12))
    finally:
        layer.train(training)


def _example(kind: LayerKind, layer: Any, scale: float) -> Tensor:
    """Two fixed inputs of a layer, large enough for its kernel."""
    sides = [
        d * (k - 1) + 1 + 2 * k
        for k, d in zip(getattr(layer, "kernel_size", ()), getattr(layer, "dilation", ()), strict=True)
    ]
    shape = (2, getattr(layer, kind.channels), *sides)
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return (scale * torch.cos(1 + numbers.square())).reshape(shape).to(layer.weight)


def _seen_weight(layer: Any) -> Tensor:
    """The weight of a linear layer as its own function applies it: its response to each unit vector."""
    unit = torch.eye(layer.in_features, device=layer.weight.device, dtype=layer.weight.dtype)
    return (layer.forward(unit) - layer.forward(torch.zeros_like(unit))).mT
