r"""The linearised estimator: variance to first order in the noise, with every correlation kept.

The velocity is a smooth function of the noise ε of all layers. At ε = 0, the output y_l of layer l has the slope
s_l = √(θ²(α h²)) in its noise, so

.. math:: Var[v] = \sum_l \sum_u s_{l,u}^2 \left( \frac{∂v}{∂y_{l,u}} \right)^2 + O(α^2)

The mean is the plain forward pass. The network only has to be differentiable by torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import CheckpointError

from fmwc.errors import UsageError
from fmwc.estimators.base import Noisy, normal_inputs, plain_output, register
from fmwc.modes import compiling
from fmwc.moments import Moments
from fmwc.noise import NoisyLayer, Pass
from fmwc.randomness import Randomness, signs
from fmwc.state import SINGLE, batch_size, channels, per_sample, tree_map, wide

__all__ = [
    "Linearised",
    "Record",
    "contributions",
    "translate_checkpoint_errors",
    "unit_probes",
]

OTHERS = 0.1  # the share of a gradient that may come from rows of other samples, if samples interact


class Record(Pass):
    """Pass that records the output of each noisy layer and the variance of its noise.

    Probes are pulled back to the recorded outputs; the graph does not extend to inputs before the first noisy layer. An
    output is recorded as an edge of the graph, which stays valid if the network overwrites the tensor in place.

    Arguments:
        shared: Whether all rows, positions and calls of a layer share one draw of its weights; otherwise each unit has
            independent noise.
    """

    following: Callable[[], AbstractContextManager[Any]] = torch.no_grad  # the context in which variances are computed

    def __init__(self, shared: bool = False) -> None:
        self.shared = shared
        self.outputs: list[GradientEdge] = []
        self.noises: list[Tensor] = []  # variances of outputs; scaled inputs where weights are shared
        self.covs: list[tuple[Tensor, Tensor] | None] = []  # with the paired row, and its index
        self.layers: list[NoisyLayer] = []
        self.modules: list[Any] = []
        self.owners: list[Tensor | None] = []

    def after(self, noisy: NoisyLayer, layer: Any, h: Tensor, y: Tensor) -> Tensor:
        with self.following():
            log_alpha = noisy.log_alpha(h)
            noise = (0.5 * log_alpha).exp() * h if self.shared else noisy.output_var(layer, h, log_alpha)
            cov = None if self.shared else noisy.output_cov(layer, h, log_alpha)
        self.noises.append(noise)
        partners = None if cov is None else noisy.partners(h)
        self.covs.append(None if cov is None or partners is None else (cov, partners[0]))
        if not y.requires_grad:
            y = y.detach().requires_grad_()
        self.outputs.append(get_gradient_edge(y))
        self.layers.append(noisy)
        self.modules.append(layer)
        self.owners.append(noisy.owner(h))
        return y.clone() if y.is_leaf else y  # torch forbids in-place changes of a leaf


def contributions(gradients: list[Tensor | None], record: Record, count: int) -> Tensor:  # -> (L, B)
    """The variance of one probe per layer: s² (∂(w·v)/∂y)², summed over the units.

    With shared weights, Σ θ² (Σ √α h ∂(w·v)/∂y)² over the weights of each layer, with the inner sum over rows,
    positions and calls. The sum of a layer that is called several times is in the row of its first call.
    """
    zero = wide(record.noises[0]).new_zeros(count)
    if record.shared:
        return _shared_contributions(gradients, record, zero)
    rows = zip(gradients, record.noises, record.covs, record.owners, strict=True)
    return torch.stack([zero if g is None else per_sample(_squared(wide(g), s, c), count, o) for g, s, c, o in rows])


def _squared(gradient: Tensor, var: Tensor, cov: tuple[Tensor, Tensor] | None) -> Tensor:
    own = gradient.square() * wide(var)
    return own if cov is None else own + gradient * gradient[cov[1]] * wide(cov[0])


def _shared_contributions(gradients: list[Tensor | None], record: Record, zero: Tensor) -> Tensor:
    found = [zero] * len(record.layers)
    slopes: dict[NoisyLayer, tuple[int, Tensor]] = {}
    calls = zip(record.layers, record.modules, record.noises, record.owners, gradients, strict=True)
    for place, (noisy, layer, scaled, owner, gradient) in enumerate(calls):
        if gradient is not None:
            slope = noisy.weight_slope(layer, wide(scaled), wide(gradient), len(zero), owner)
            first, before = slopes.get(noisy, (place, None))
            slopes[noisy] = first, slope if before is None else before + slope
    for noisy, (first, slope) in slopes.items():
        weight = noisy.kind.weight(record.modules[first]).detach()
        found[first] = (slope * weight).square().flatten(1).sum(1)
    return torch.stack(found)


def require_own_rows(v: Any, record: Record) -> None:
    """Raise if the velocity of the first sample depends on rows of a layer that are assigned to another sample.

    A layer may have several rows per sample, which are assigned to samples in order. With another layout (sequences
    first, as in torch's transformers) variances would go to the wrong samples.
    """
    count, probe = batch_size(v), tree_map(lambda c: torch.zeros_like(c.detach()), v)
    for value in channels(probe).values():
        value[0] = 1
    for noisy, owner, gradient in zip(record.layers, record.owners, _gradients(v, record, probe), strict=False):
        if gradient is None:
            continue
        own, *others = per_sample(wide(gradient).square(), count, owner).tolist()
        if sum(others) > OTHERS * own:
            raise UsageError(
                f"the rows of layer '{noisy.name}' are not in the order of the samples, so its noise would be assigned "
                "to the wrong ones: put samples first (batch_first=True), or exclude the layer; samples that interact "
                "(a batch norm without running statistics) have no variance of their own"
            )


def unit_probes(state: Any) -> Iterator[tuple[str, int, Any]]:
    """A one-hot probe for each coordinate of a state, as `(channel, index, probe)`."""
    for name, value in channels(state).items():
        for index in range(value[0].numel()):
            one = torch.arange(value[0].numel(), device=value.device) == index
            probe = {n: torch.zeros_like(other) for n, other in channels(state).items()}
            probe[name] = one.to(value.dtype).view(value.shape[1:]).expand(value.shape)
            yield name, index, probe if isinstance(state, dict) else probe[SINGLE]


@contextmanager
def translate_checkpoint_errors() -> Iterator[None]:
    """Translate the error of a checkpointed block whose recomputation differs from the pass."""
    try:
        yield
    except CheckpointError as error:
        raise UsageError(
            "the network uses gradient checkpointing, and the recomputation differs from the pass (as with "
            "nn.MultiheadAttention); switch gradient checkpointing off, or use propagation='monte_carlo'"
        ) from error


def _gradients(v: Any, record: Record, probe: Any) -> list[Tensor | None]:
    """The gradient of a probe at every layer's output; empty if no noise reaches the probed channels."""
    names = [name for name in channels(probe) if channels(v)[name].requires_grad]
    if not names or not record.outputs:
        return []
    with translate_checkpoint_errors():
        found = torch.autograd.grad(
            [channels(v)[n] for n in names],
            record.outputs,
            [channels(probe)[n] for n in names],
            retain_graph=True,
            allow_unused=True,
        )
    return list(found)


@register("linearised")
@dataclass(frozen=True, repr=False)
class Linearised:
    """Linearised estimator in reverse mode: pulls probes back through the network.

    With `probes=None` there is one probe per coordinate, and its variance is exact to first order; use it for states of
    a few numbers. With K probes of random signs, the result is an unbiased estimate of each channel's total variance,
    given as the mean over its coordinates (size 1 in every dimension but the first); use it for images.

    Arguments:
        probes: `None`, or the number K of random probes.
        shared: Whether positions (pixels, tokens, recurrent steps) share one draw of a layer's weights; otherwise each
            has independent noise, as in training. Takes the memory of one weight gradient per sample and layer.
    """

    probes: int | None = None
    shared: bool = False
    plain_mean = True
    rounds = True

    def __post_init__(self) -> None:
        if self.probes is not None and self.probes < 1:
            raise UsageError(f"probes is None (exact) or at least 1, got {self.probes}")

    def __repr__(self) -> str:  # references are compared by it, so defaults are left out
        return f"Linearised(probes={self.probes}{', shared=True' if self.shared else ''})"

    def __call__(self, field: Noisy, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Moments:
        record = Record(self.shared)
        with torch.inference_mode(False), torch.enable_grad():
            x, t, cond = normal_inputs(x, t, cond)
            # Derivatives begin at the state, so that a checkpointed block, which is recomputed without hooks, saves the
            # same tensors both times even if every weight is frozen.
            v = field.run(record, tree_map(lambda c: c.detach().clone().requires_grad_().clone(), x), t, cond=cond)
            if not field.row_order_checked and batch_size(v) > 1 and not compiling():
                require_own_rows(v, record)
                field.row_order_checked = True
            mean = plain_output(field, x, t, cond) if field.fused else tree_map(Tensor.detach, v)
            var = self._exact(v, record) if self.probes is None else self._probed(v, record, randomness)
        return Moments(mean, var)

    def _pull(self, v: Any, record: Record, probe: Any) -> Tensor:  # -> (B,)
        gradients = _gradients(v, record, probe)
        if not gradients:
            return wide(next(iter(channels(probe).values()))).new_zeros(batch_size(v))
        return contributions(gradients, record, batch_size(v)).sum(0)

    def _exact(self, v: Any, record: Record) -> Any:
        pulled: dict[str, list[Tensor]] = {name: [] for name in channels(v)}
        for name, _, probe in unit_probes(tree_map(Tensor.detach, v)):
            pulled[name].append(self._pull(v, record, probe))
        found = {name: torch.stack(pulled[name], 1).view(value.shape) for name, value in channels(v).items()}
        return found if isinstance(v, dict) else found[SINGLE]

    def _probed(self, v: Any, record: Record, randomness: Randomness) -> Any:
        assert self.probes is not None
        found: dict[str, Tensor] = {}
        for name, value in channels(v).items():  # without in-place writes, which compile badly
            probes = [signs(randomness, wide(value.detach())).to(value.dtype) for _ in range(self.probes)]
            total = sum(self._pull(v, record, {name: probe}) for probe in probes) / (self.probes * value[0].numel())
            found[name] = total.view(-1, *[1] * (value.ndim - 1))  # type: ignore[union-attr]
        return found if isinstance(v, dict) else found[SINGLE]
