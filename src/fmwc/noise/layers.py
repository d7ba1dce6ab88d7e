"""The layers that can carry noise: a table of layer kinds, the projections of attention, and the choice by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from fmwc.errors import UsageError
from fmwc.modes import Scope
from fmwc.moments import multi_head_attention

__all__ = ["KINDS", "ExplicitAttention", "LayerKind", "Projection", "checked_kind", "choose_layers", "layer_kind"]

CLOSE = 1e-3  # the tolerance, relative to the largest output, between a layer and a product with its weight


@dataclass(frozen=True, eq=False)
class Projection:
    """One projection of `nn.MultiheadAttention`: rows of a packed weight, or a weight of its own.

    Arguments:
        attention: The attention module.
        which: `q`, `k`, `v` or `out`.
    """

    attention: nn.MultiheadAttention
    which: str

    @property
    def weight(self) -> Tensor:
        if self.which == "out":
            return self.attention.out_proj.weight
        packed = self.attention.in_proj_weight
        own = f"{self.which}_proj_weight"
        return getattr(self.attention, own) if packed is None else packed.chunk(3)["qkv".index(self.which)]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]


# ---- kinds of layer --------------------------------------------------------------------------------------------------


def _parameter(layer: Any) -> Tensor:
    return layer.weight


@dataclass(frozen=True)
class LayerKind:
    """How a kind of layer applies its weights.

    Arguments:
        apply: `(layer, input, weight) -> output`: the layer with another weight and no bias.
        channels: The attribute that holds the number of input channels.
        spatial: The number of dimensions after the channels; 0 if the channels come last.
        weight: `layer -> weight`, if the effective weight is not the parameter `weight`.
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


# Named functions instead of lambdas, because a row is pickled with the noise of a layer.
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

# Layers of other libraries that do not derive from torch's, by name, so that nothing is imported.
BY_NAME: dict[str, LayerKind] = {
    "torch_geometric.nn.dense.linear.Linear": LayerKind(_linear, "in_channels", 0),
}


def _row(layer: Any) -> tuple[Any, LayerKind | None]:
    """The nearest base class of a layer with a row in the table, and the row."""
    for base in type(layer).__mro__:
        if row := KINDS.get(base) or BY_NAME.get(f"{base.__module__}.{base.__qualname__}"):
            return base, row
    return None, None


def layer_kind(layer: Any) -> LayerKind | None:
    """The row of a layer, by its class or the nearest base class; `None` for a layer that cannot carry noise."""
    return _row(layer)[1]


def checked_kind(name: str, layer: Any) -> LayerKind:
    """The row of a layer, checked against the layer's own function.

    A subclass may compute another function than its base class (an equalised learning rate, a mask, a low-rank update).
    For a linear layer, the effective weight is read from its outputs. A layer that is not a product with one weight is
    refused.
    """
    base, row = _row(layer)
    assert row is not None
    written = (getattr(type(layer), own, None) is not getattr(base, own, None) for own in ("forward", "_conv_forward"))
    if isinstance(layer, Projection) or layer.weight.is_meta or not (any(written) or "forward" in vars(layer)):
        return row
    candidates = [row] if row.spatial else [row, LayerKind(row.apply, row.channels, 0, _effective_weight)]
    try:
        found = next((kind for kind in candidates if _explains(kind, layer)), None)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        found = None
    if found is None:
        raise UsageError(
            f"layer '{name}' ({type(layer).__name__}) overrides forward with a function that is no product with its "
            f"weight, so its noise is not known; use attach(net, exclude=['{name}']), or add its class to "
            "fmwc.noise.KINDS"
        )
    return found


def _explains(kind: LayerKind, layer: Any) -> bool:
    """Whether the layer is the product with the weight of a row, plus a bias."""
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
    kernel, dilation = getattr(layer, "kernel_size", ()), getattr(layer, "dilation", ())
    sides = [d * (k - 1) + 1 + 2 * k for k, d in zip(kernel, dilation, strict=True)]
    shape = (2, getattr(layer, kind.channels), *sides)
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return (scale * torch.cos(1 + numbers.square())).reshape(shape).to(layer.weight)


def _effective_weight(layer: Any) -> Tensor:
    """The weight that a linear layer applies: its response to each unit vector."""
    unit = torch.eye(layer.in_features, device=layer.weight.device, dtype=layer.weight.dtype)
    return (layer.forward(unit) - layer.forward(torch.zeros_like(unit))).mT


# ---- the choice of layers --------------------------------------------------------------------------------------------


def choose_layers(network: nn.Module, include: Sequence[str], exclude: Sequence[str]) -> dict[str, Any]:
    """The layers that can carry noise and whose dotted name matches a glob pattern.

    A layer that is used in two places matches by either name, and is returned under its first.
    """
    able: dict[str, Any] = {}
    parts: dict[nn.Module, dict[str, Projection]] = {}
    for name, module in network.named_modules(remove_duplicate=False):
        if isinstance(module, nn.MultiheadAttention):
            own = parts.setdefault(
                module, {f"{which}_proj": Projection(module, which) for which in ("q", "k", "v", "out")}
            )
            able |= {f"{name}.{part}".lstrip("."): layer for part, layer in own.items()}
        elif layer_kind(module) is not None:
            able.setdefault(name, module)  # an attention's out_proj is in the table already
    if not able:
        kinds = sorted(
            {type(m).__name__ for m in network.modules() if next(m.parameters(recurse=False), None) is not None}
        )
        held = f" (its weights are in {', '.join(kinds)})" if kinds else ""
        raise UsageError(
            f"the network has no linear or convolution layer to carry the noise{held}; write one of them as nn.Linear "
            "or nn.Conv, or add its class to fmwc.noise.KINDS"
        )
    listed = f"the layers are: {', '.join(able)}"
    if not include:
        raise UsageError(f"include is empty; {listed}")
    for pattern in (*include, *exclude):
        if not any(fnmatchcase(name, pattern) for name in able):
            raise UsageError(f"pattern '{pattern}' matches no layer; {listed}")
    wanted = {layer for name, layer in able.items() if any(fnmatchcase(name, p) for p in include)}
    wanted -= {layer for name, layer in able.items() if any(fnmatchcase(name, p) for p in exclude)}
    if not wanted:
        raise UsageError(f"exclude leaves no layer to carry noise; {listed}")
    first = {layer: name for name, layer in reversed(able.items()) if layer in wanted}
    chosen = {name: layer for name, layer in able.items() if first.get(layer) == name}
    for name, layer in chosen.items():
        if is_lazy(layer.weight):
            raise UsageError(f"layer '{name}' is not initialised; run the network once on data before attach")
    return chosen


# ---- the projections of attention ------------------------------------------------------------------------------------

_OUT_WEIGHT = 11  # the argument of multi_head_attention_forward by which a module is recognised

Call = Callable[[Any, Tensor, Any], Any]  # (input, weight, bias) -> output, with noise


class ExplicitAttention(TorchFunctionMode):
    """Context in which the projections of some attention modules are called one by one.

    torch computes the projections of `nn.MultiheadAttention` from bare weights inside one function, out of the reach of
    hooks. Here that function is replaced by :func:`fmwc.moments.multi_head_attention`. An active function mode also
    keeps torch from its fused attention kernels, which bypass hooks.

    Arguments:
        calls: For each module, the functions that replace some of its projections (`q`, `k`, `v`, `out`).
    """

    def __init__(self, calls: Mapping[nn.MultiheadAttention, Mapping[str, Call]]) -> None:
        super().__init__()
        self.calls = {id(module.out_proj.weight): chosen for module, chosen in calls.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        chosen = self.calls.get(id(args[_OUT_WEIGHT])) if func is F.multi_head_attention_forward else None
        if chosen is None:
            return func(*args, **kwargs)

        def project(which: str, x: Any, weight: Tensor, bias: Any) -> Any:
            return chosen.get(which, F.linear)(x, weight, bias)

        return multi_head_attention(*args, **{**kwargs, "project": project})

    def scope(self) -> Scope:
        """The same context as a scope, which also survives interrupts."""
        return _PushedMode(self)


class _PushedMode(Scope):
    mode: ExplicitAttention | None = None

    def __init__(self, mode: ExplicitAttention) -> None:
        self.mode = mode

    def open(self) -> None:
        _push_mode(self.mode)

    def close(self) -> None:
        while any(mode is self.mode for mode in _get_current_function_mode_stack()):
            _pop_mode()
