"""The posterior of variational adaptive dropout, and the layers that can carry it.

The inference network E_γ (sec:method-fmwc) and its closed-form KL, a table of layer kinds, the choice of layers by
name, and the projections of attention.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from fmwc.errors import UsageError
from fmwc.modes import Scope
from fmwc.moments import multi_head_attention

# ---- the posterior ---------------------------------------------------------------------------------------------------

LOG_ALPHA_RANGE = (-10.0, 4.0)  # from negligible noise to noise that dominates the weight
TIME_FEATURES = 16


def time_features(t: Tensor) -> Tensor:  # (B,) -> (B, F)
    """Return cosines and sines of π k t, smooth on [0, 1]: k = 0 … F/2 − 1 and 1 … F/2."""
    k = torch.arange(TIME_FEATURES // 2, device=t.device, dtype=t.dtype)
    angle = math.pi * t[..., None]
    return torch.cat([torch.cos(angle * k), torch.sin(angle * (k + 1))], -1)


def _seeded_linear(inputs: int, outputs: int, generator: torch.Generator | None) -> nn.Linear:
    """Return a linear layer with torch's initialisation, drawn from a generator instead of the global one."""
    layer = nn.utils.skip_init(nn.Linear, inputs, outputs, device=torch.get_default_device())
    if layer.weight.is_meta:
        return layer
    nn.init.kaiming_uniform_(layer.weight, a=math.sqrt(5), generator=generator)
    bound = 1 / math.sqrt(inputs)
    nn.init.uniform_(layer.bias, -bound, bound, generator=generator)
    return layer


class InferenceNetwork(nn.Module):
    r"""Inference network E_γ: log α per input channel of one layer, from the layer's input h and the time.

    .. math:: \log α = W_2\, \mathrm{SiLU}(W_1 [h, f(t)] + b_1) + b_2, \quad \text{clamped}

    W₂ is initialised to zero, so that every α starts at the same value for all inputs.

    Arguments:
        channels: The number of input channels of the layer.
        width: The hidden width; the paper's is 64.
        initial_log_alpha: The initial value of b₂.
        generator: The source of the initial weights; torch's global generator if `None`.
    """

    def __init__(
        self,
        channels: int,
        width: int = 64,
        initial_log_alpha: float = -3.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.hidden = _seeded_linear(channels + TIME_FEATURES, width, generator)
        self.out = _seeded_linear(width, channels, generator)
        nn.init.zeros_(self.out.weight)
        nn.init.constant_(self.out.bias, initial_log_alpha)

    def forward(self, h: Tensor, features: Tensor) -> Tensor:  # (..., C), (..., F) -> (..., C)
        return self.out(F.silu(self.hidden(torch.cat([h, features], -1)))).clamp(*LOG_ALPHA_RANGE)


def divergence_from_prior(log_alpha: Tensor, prior_rate: float, factor: float = 0.5) -> Tensor:
    r"""Return KL[N(θ, αθ²) ‖ N(0, rθ²)] per weight, r = p/(1−p) (eqn:kl_analytical, with the ½ it lacks). Exact.

    .. math:: \tfrac12 \left[ \frac{α + 1}{r} - 1 + \log r - \log α \right]

    Arguments:
        log_alpha: log α, of any shape.
        prior_rate: The prior rate p.
        factor: The leading factor; 1 is the paper's formula as printed.
    """
    if not 0 < prior_rate < 1:
        raise UsageError(f"prior_rate must lie strictly between 0 and 1, got {prior_rate}")
    r = prior_rate / (1 - prior_rate)
    return factor * ((log_alpha.exp() + 1) / r - 1 + math.log(r) - log_alpha)


def kl(
    log_alphas: Sequence[Tensor],
    prior_rate: float,
    factor: float = 0.5,
    owners: Sequence[Tensor | None] | None = None,
    count: int = 0,
    numbers: Mapping[int, Tensor] = MappingProxyType({}),
) -> Tensor:
    """Return the KL of a network: the mean over batch and channels, summed over layers.

    Arguments:
        log_alphas: log α of each layer.
        prior_rate: The prior rate p.
        factor: The leading factor.
        owners: For each layer, the sample index of each row; `None` if the rows are ordered by sample.
        count: The number of samples. Rows with owner `count` are unused and excluded from the mean.
        numbers: What to divide a sum over used rows by, by the position of the layer; their number if not given.
    """
    if not log_alphas:
        raise UsageError(
            "the network called no noisy layer, so there is no noise to train; check attach's include and exclude"
        )

    def mean(place: int, log_alpha: Tensor, owner: Tensor | None) -> Tensor:
        divergence = divergence_from_prior(log_alpha, prior_rate, factor)
        if owner is None:
            return divergence.mean()
        used = (owner < count).to(divergence.dtype)
        number = numbers.get(place, used.sum().clamp_min(1))
        return (divergence.flatten(1).mean(1) * used).sum() / number

    pairs = zip(log_alphas, owners or [None] * len(log_alphas), strict=True)
    return torch.stack([mean(place, *pair) for place, pair in enumerate(pairs)]).sum()


def cyclic(step: int, total: int, cycles: int = 4, warmup: float = 0.1) -> float:
    """Return the factor on β at a step. Each cycle rises from 0 to 1 over its first `warmup`, then stays at 1.

    >>> [cyclic(s, 400) for s in (0, 5, 10, 99, 100)]
    [0.0, 0.5, 1.0, 1.0, 0.0]
    """
    position = (step * cycles / max(total, 1)) % 1
    return 1.0 if warmup <= 0 else min(position / warmup, 1.0)


# ---- kinds of layer --------------------------------------------------------------------------------------------------

CLOSE = 1e-3  # tolerance, relative to the largest output, when a layer is compared with a product with its weight


@dataclass(frozen=True, eq=False)
class Projection:
    """One projection of `nn.MultiheadAttention`: rows of the packed weight, or a separate weight.

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
        if packed is None:
            return getattr(self.attention, f"{self.which}_proj_weight")
        return packed.chunk(3)["qkv".index(self.which)]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]


def _parameter(layer: Any) -> Tensor:
    return layer.weight


@dataclass(frozen=True)
class LayerKind:
    """How a kind of layer applies its weights.

    Arguments:
        apply: `(layer, input, weight) -> output`: computes the layer with the given weight and no bias.
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


# Named functions instead of lambdas, because a NoisyLayer is pickled with its LayerKind.
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

# Layers of other libraries that do not subclass torch's; listed by name to avoid the import.
BY_NAME: dict[str, LayerKind] = {
    "torch_geometric.nn.dense.linear.Linear": LayerKind(_linear, "in_channels", 0),
}


def _row(layer: Any) -> tuple[Any, LayerKind | None]:
    """Return the nearest base class of a layer that has an entry in the table, and the entry."""
    for base in type(layer).__mro__:
        if row := KINDS.get(base) or BY_NAME.get(f"{base.__module__}.{base.__qualname__}"):
            return base, row
    return None, None


def layer_kind(layer: Any) -> LayerKind | None:
    """Return the table entry for a layer, by its class or nearest base class; `None` if it cannot carry noise."""
    return _row(layer)[1]


def checked_kind(name: str, layer: Any) -> LayerKind:
    """Return the table entry for a layer, after comparing it with the layer's output.

    A subclass may change what its base class computes (an equalised learning rate, a mask, a low-rank update). For a
    linear layer, the effective weight is then computed from its outputs. Raise if the layer is not a product with one
    weight.
    """
    base, row = _row(layer)
    assert row is not None
    methods = "forward", "_conv_forward"
    overridden = any(getattr(type(layer), name, None) is not getattr(base, name, None) for name in methods)
    if isinstance(layer, Projection) or layer.weight.is_meta or not (overridden or "forward" in vars(layer)):
        return row
    candidates = [row] if row.spatial else [row, LayerKind(row.apply, row.channels, 0, _effective_weight)]
    try:
        kind = next((kind for kind in candidates if _explains(kind, layer)), None)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        kind = None
    if kind is None:
        raise UsageError(
            f"layer '{name}' ({type(layer).__name__}) overrides forward and is not a product with its weight, so it "
            f"cannot carry noise; use attach(net, exclude=['{name}']), or add its class to "
            "fmwc.noise.KINDS"
        )
    return kind


def _explains(kind: LayerKind, layer: Any) -> bool:
    """Return whether the layer is the product with the entry's weight, plus a bias."""
    training = layer.training
    layer.eval()
    try:
        with torch.inference_mode(False), torch.no_grad():
            zero, x = (_example(kind, layer, scale) for scale in (0.0, 1.0))
            slope, expected = layer.forward(x) - layer.forward(zero), kind.apply(layer, x, kind.weight(layer))
            if slope.shape != expected.shape:
                return False
            close = max(CLOSE, 4 * torch.finfo(slope.dtype).eps)
            return bool((slope - expected).abs().max() <= close * expected.abs().max().clamp_min(1e-12))
    finally:
        layer.train(training)


def _example(kind: LayerKind, layer: Any, scale: float) -> Tensor:
    """Return a fixed test input for a layer, larger than its kernel, multiplied by `scale`."""
    kernel, dilation = getattr(layer, "kernel_size", ()), getattr(layer, "dilation", ())
    sides = [d * (k - 1) + 1 + 2 * k for k, d in zip(kernel, dilation, strict=True)]
    shape = (2, getattr(layer, kind.channels), *sides)
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return (scale * torch.cos(1 + numbers.square())).reshape(shape).to(layer.weight)


def _effective_weight(layer: Any) -> Tensor:
    """Return the weight that a linear layer applies: its response to each unit vector."""
    unit = torch.eye(layer.in_features, device=layer.weight.device, dtype=layer.weight.dtype)
    return (layer.forward(unit) - layer.forward(torch.zeros_like(unit))).mT


# ---- the choice of layers --------------------------------------------------------------------------------------------


def choose_layers(network: nn.Module, include: Sequence[str], exclude: Sequence[str]) -> dict[str, Any]:
    """Return the layers that can carry noise and whose dotted name matches a glob pattern.

    A layer that is used in two places matches by either name and is returned under the first.
    """
    layers = _candidates(network)
    if not layers and tuple(include) == ("*",) and not exclude:
        return {}  # confidence needs no noise if it comes from checks of finished samples
    require_layers(network, layers)
    listed = f"the layers are: {', '.join(layers)}"
    if not include:
        raise UsageError(f"include is empty; {listed}")

    def matching(patterns: Sequence[str]) -> set[Any]:
        matches = {pattern: [name for name in layers if fnmatchcase(name, pattern)] for pattern in patterns}
        for pattern, names in matches.items():
            if not names:
                raise UsageError(f"pattern '{pattern}' matches no layer; {listed}")
        return {layers[name] for names in matches.values() for name in names}

    wanted = matching(include) - matching(exclude)
    if not wanted:
        raise UsageError(f"exclude removes every layer that include selects; {listed}")
    first = {layer: name for name, layer in reversed(layers.items()) if layer in wanted}
    chosen = {name: layer for name, layer in layers.items() if first.get(layer) == name}
    for name, layer in chosen.items():
        if is_lazy(layer.weight):
            raise UsageError(f"layer '{name}' is not initialised; run the network once on data before attach")
    return chosen


def require_layers(network: nn.Module, layers: Collection[str]) -> None:
    """Raise if there are no layers that can carry noise."""
    if not layers:
        holders = (m for m in network.modules() if next(m.parameters(recurse=False), None) is not None)
        kinds = ", ".join(sorted({type(m).__name__ for m in holders}))
        raise UsageError(
            f"the network has no linear or convolution layer that can carry noise"
            f"{f' (its weights are in {kinds})' if kinds else ''}, so it has no variance; write one of them as "
            "nn.Linear or nn.Conv, add its class to fmwc.noise.KINDS, or use fit_confidence, which needs no noise"
        )


def _candidates(network: nn.Module) -> dict[str, Any]:
    """Return every layer that can carry noise, by dotted name; a layer used in two places has two names."""
    layers: dict[str, Any] = {}
    parts: dict[nn.Module, dict[str, Projection]] = {}
    for name, module in network.named_modules(remove_duplicate=False):
        if isinstance(module, nn.MultiheadAttention):
            if module not in parts:
                parts[module] = {f"{which}_proj": Projection(module, which) for which in ("q", "k", "v", "out")}
            layers |= {f"{name}.{part}".lstrip("."): layer for part, layer in parts[module].items()}
        elif layer_kind(module) is not None:
            layers.setdefault(name, module)  # the out_proj of an attention module is already listed
    return layers


# ---- the projections of attention ------------------------------------------------------------------------------------

_WEIGHTS = (5, 6, 7, 8, 11, 12)  # positions of parameters in multi_head_attention_forward

Call = Callable[[Any, Tensor, Any], Any]  # (input, weight, bias) -> output, with noise


class ExplicitAttention(TorchFunctionMode):
    """Context in which the projections of some attention modules are called one by one.

    torch computes the projections of `nn.MultiheadAttention` from bare weights inside one function, where hooks cannot
    act. This context replaces that function by :func:`fmwc.moments.multi_head_attention`. An active function mode also
    prevents torch from using its fused attention kernels, which bypass hooks.

    Arguments:
        calls: For each module, the functions that replace some of its projections (`q`, `k`, `v`, `out`).
    """

    def __init__(self, calls: Mapping[nn.MultiheadAttention, Mapping[str, Call]]) -> None:
        super().__init__()
        # A call is recognised by any parameter of its module: a parametrised weight (weight norm) is a new tensor in
        # every call.
        own = {m: {id(p) for part in (m, m.out_proj) for p in part.parameters(recurse=False)} for m in calls}
        shared = Counter(key for keys in own.values() for key in keys)
        self.calls: dict[int, Mapping[str, Call]] = {}
        for module, chosen in calls.items():
            keys = {key for key in own[module] if shared[key] == 1}
            if chosen and not keys:
                raise UsageError(
                    "the calls of an nn.MultiheadAttention cannot be recognised, because all of its weights are "
                    "parametrised or shared with another; exclude its projections: exclude=['*_proj']"
                )
            self.calls |= dict.fromkeys(keys, chosen)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.multi_head_attention_forward:
            return func(*args, **kwargs)
        weights = *(args[place] for place in _WEIGHTS), *(kwargs.get(f"{which}_proj_weight") for which in "qkv")
        chosen = next((self.calls[id(weight)] for weight in weights if id(weight) in self.calls), None)
        if chosen is None:
            return func(*args, **kwargs)

        def project(which: str, x: Any, weight: Tensor, bias: Any) -> Any:
            return chosen.get(which, F.linear)(x, weight, bias)

        return multi_head_attention(*args, **{**kwargs, "project": project})

    def scope(self) -> Scope:
        """Return the same context as a scope, which also survives interrupts."""
        return PushedMode(self)


class PushedMode(Scope):
    """Scope in which a function mode is active, also undone after interrupts."""

    mode: TorchFunctionMode | None = None

    def __init__(self, mode: TorchFunctionMode) -> None:
        self.mode = mode

    def open(self) -> None:
        _push_mode(self.mode)

    def close(self) -> None:
        while any(mode is self.mode for mode in _get_current_function_mode_stack()):
            _pop_mode()
