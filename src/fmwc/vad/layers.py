"""The kinds of layer that can carry noise: one row each, saying how its weights act on an input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fmwc.vad.attention import Projection

__all__ = ["KINDS", "LayerKind", "kind_of"]


@dataclass(frozen=True)
class LayerKind:
    """How a layer applies its weights.

    Arguments:
        apply: `(layer, input, weight) -> output`: the layer with another weight and no bias.
        channels: The name of the attribute that holds the number of input channels.
        spatial: The number of dimensions after the channels; 0 where the channels come last.
    """

    apply: Callable[[Any, Tensor, Tensor], Tensor]
    channels: str
    spatial: int


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
    rows = (KINDS.get(base) or BY_NAME.get(f"{base.__module__}.{base.__qualname__}") for base in type(layer).__mro__)
    return next(filter(None, rows), None)
