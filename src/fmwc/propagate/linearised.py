r"""The linearised estimator: variance to first order in the noise, with every correlation kept.

The velocity is a smooth function of all the ε its layers were given. At ε = 0, layer l's output y_l answers to its
noise with slope s_l = √(θ²(α h²)), so

.. math:: Var[v] = \sum_l \sum_u s_{l,u}^2 \left( \frac{∂v}{∂y_{l,u}} \right)^2 + O(α^2)

Nothing is assumed of the network but that torch can differentiate it, and its mean is the plain forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from torch._C import _exit_dual_level
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointError

from fmwc.errors import UsageError
from fmwc.modes import Scope, compiling
from fmwc.moments import Moments
from fmwc.propagate.estimator import Noisy, plain_output
from fmwc.randomness import Randomness, signs
from fmwc.state import SINGLE, batch_size, channels, each, per_sample, wide
from fmwc.vad import NoisyLayer, Pass, Weights

__all__ = ["Linearised", "Record", "Tangent", "contributions", "outside", "pulling", "require_own_rows", "unit_probes"]

OTHERS = 0.1  # of a sample's own: what may come from rows of others, in a network whose samples see one another


class Record(Pass):
    """Creates a pass that computes the plain network and remembers each noisy layer's output and its noise's variance.

    Layer outputs open the graph that probes are pulled back through; inputs before the first noisy layer stay out
    of it. An output is remembered as its place in the graph, which a network that overwrites it in place (a ReLU with
    inplace=True) does not move.

    Arguments:
        shared: Whether all rows, positions and calls of a layer share one draw of its weights; if not, each unit has
            noise of its own.
    """

    following: Callable[[], AbstractContextManager[Any]] = torch.no_grad  # how variances are computed

    def __init__(self, shared: bool = False) -> None:
        self.shared = shared
        self.outputs: list[GradientEdge] = []
        self.noises: list[Tensor] = []  # variances of outputs; scaled inputs where weights are shared
        self.covs: list[tuple[Tensor, Tensor] | None] = []  # with each row's twin, and which row that is
        self.layers: list[NoisyLayer] = []
        self.modules: list[Any] = []
        self.owners: list[Tensor | None] = []

    def after(self, noisy: NoisyLayer, layer: Any, h: Tensor, y: Tensor) -> Tensor:
        with self.following():
            log_alpha = noisy.log_alpha(h)
            noise = (0.5 * log_alpha).exp() * h if self.shared else noisy.output_var(layer, h, log_alpha)
            cov = None if self.shared else noisy.output_cov(layer, h, log_alpha)
        self.noises.append(noise)
        twins = None if cov is None else noisy.twins(h)
        self.covs.append(None if cov is None or twins is None else (cov, twins[0]))
        if not y.requires_grad:
            y = y.detach().requires_grad_()
        self.outputs.append(get_gradient_edge(y))
        self.layers.append(noisy)
        self.modules.append(layer)
        self.owners.append(noisy.owner(h))
        return y.clone() if y.is_leaf else y  # a leaf may not be overwritten, and the network may want to


def contributions(gradients: list[Tensor | None], record: Record, count: int) -> Tensor:  # -> (L, B)
    """s² (∂(w·v)/∂y)², summed over the units of each layer: one probe's variance, layer by layer.

    Where weights are shared, Σ θ² (Σ √α h ∂(w·v)/∂y)² over the weights of each layer, the inner sum over rows,
    positions and calls; a layer that is called several times has its sum in the place of its first call.
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
    """Raises where the first of some samples depends on rows of a layer that are counted to another.

    A layer may see a sample as several rows, which are counted to samples in their order: samples first. In another
    layout (sequences first, as torch's transformers have it) its variance would go to the wrong ones.
    """
    count, probe = batch_size(v), each(lambda c: torch.zeros_like(c.detach()), v)
    for value in channels(probe).values():
        value[0] = 1
    for noisy, owner, gradient in zip(record.layers, record.owners, _gradients(v, record, probe), strict=False):
        if gradient is None:
            continue
        own, *others = per_sample(wide(gradient).square(), count, owner).tolist()
        if sum(others) > OTHERS * own:
            raise UsageError(
                f"layer '{noisy.name}' sees rows of one sample where those of another are expected, so its noise would "
                "be counted to the wrong one: put samples first (batch_first=True), or exclude the layer; samples that "
                "see one another (a batch norm without running statistics) have no variance of their own"
            )


def unit_probes(state: Any) -> Iterator[tuple[str, int, Any]]:
    """One-hot probes for every coordinate of a state: `(channel, index, probe)`."""
    for name, value in channels(state).items():
        for index in range(value[0].numel()):
            one = torch.arange(value[0].numel(), device=value.device) == index
            probe = {n: torch.zeros_like(other) for n, other in channels(state).items()}
            probe[name] = one.to(value.dtype).view(value.shape[1:]).expand(value.shape)
            yield name, index, probe if isinstance(state, dict) else probe[SINGLE]


def outside(value: Any) -> Any:
    """A copy of what was born in inference mode, where there are no derivatives; anything else as it is."""
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value


@contextmanager
def pulling() -> Iterator[None]:
    """Inside, a checkpoint that computes something else on the way back than it did under the pass says what to do."""
    try:
        yield
    except CheckpointError as error:
        raise UsageError(
            "the network is checkpointed, and on the way back it computes another thing than the pass did, as with "
            "nn.MultiheadAttention, which a pass writes out; switch gradient checkpointing off, or use monte_carlo"
        ) from error


def _gradients(v: Any, record: Record, probe: Any) -> list[Tensor | None]:
    """A probe of all channels or some, pulled back to every layer; none where no noise reaches the output."""
    names = [name for name in channels(probe) if channels(v)[name].requires_grad]
    if not names or not record.outputs:
        return []
    with pulling():
        found = torch.autograd.grad(
            [channels(v)[n] for n in names],
            record.outputs,
            [channels(probe)[n] for n in names],
            retain_graph=True,
            allow_unused=True,
        )
    return list(found)


@dataclass(frozen=True, repr=False)
class Linearised:
    """Creates the linearised estimator by pulling probes back through the network (adjoint).

    With `probes=None` there is one probe a coordinate: the variance of each, exact to first order; right for states
    of a few numbers. With K probes of random signs, it is an unbiased estimate of each channel's total variance, given
    as the mean over its coordinates (size 1 in every dimension but the first); right for images.

    Arguments:
        probes: `None`, or the number K of random probes.
        shared: Whether positions (pixels, tokens, steps of a recurrence) share one draw of a layer's weights; if not,
            each has noise of its own, as in training. Costs the memory of one weight gradient per sample and layer.
    """

    probes: int | None = None
    shared: bool = False
    plain_mean = True
    rounds = True

    def __post_init__(self) -> None:
        if self.probes is not None and self.probes < 1:
            raise UsageError(f"probes is None (exact) or at least 1, got {self.probes}")

    def __repr__(self) -> str:  # references are compared by it, so what is not used is not in it
        return f"Linearised(probes={self.probes}{', shared=True' if self.shared else ''})"

    def __call__(self, field: Noisy, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Moments:
        record = Record(self.shared)
        with torch.inference_mode(False), torch.enable_grad():
            x, t, cond = each(outside, x), outside(t), {k: outside(c) for k, c in cond.items()}
            # Derivatives begin at the state, so that a checkpointed block, which is computed again on the way back and
            # without hooks, keeps the same things both times even where every weight is frozen.
            v = field.run(record, each(lambda c: c.detach().clone().requires_grad_().clone(), x), t, **cond)
            if not field.rows_known and batch_size(v) > 1 and not compiling():
                require_own_rows(v, record)
                field.rows_known = True
            mean = plain_output(field, x, t, cond) if field.fused else each(Tensor.detach, v)
            var = self._exact(v, record) if self.probes is None else self._probed(v, record, randomness)
        return Moments(mean, var)

    def _pull(self, v: Any, record: Record, probe: Any) -> Tensor:  # -> (B,)
        gradients = _gradients(v, record, probe)
        if not gradients:
            return wide(next(iter(channels(probe).values()))).new_zeros(batch_size(v))
        return contributions(gradients, record, batch_size(v)).sum(0)

    def _exact(self, v: Any, record: Record) -> Any:
        pulled: dict[str, list[Tensor]] = {name: [] for name in channels(v)}
        for name, _, probe in unit_probes(each(Tensor.detach, v)):
            pulled[name].append(self._pull(v, record, probe))
        found = {name: torch.stack(pulled[name], 1).view(value.shape) for name, value in channels(v).items()}
        return found if isinstance(v, dict) else found[SINGLE]

    def _probed(self, v: Any, record: Record, randomness: Randomness) -> Any:
        assert self.probes is not None
        found: dict[str, Tensor] = {}
        for name, value in channels(v).items():  # nothing is written in place, so that it compiles well
            probes = [signs(randomness, wide(value.detach())).to(value.dtype) for _ in range(self.probes)]
            total = sum(self._pull(v, record, {name: probe}) for probe in probes) / (self.probes * value[0].numel())
            found[name] = total.view(-1, *[1] * (value.ndim - 1))  # type: ignore[union-attr]
        return found if isinstance(v, dict) else found[SINGLE]


class Push(Pass):
    """Creates a pass that pushes one random direction of the noise forward with the values (forward mode)."""

    def __init__(self, randomness: Randomness, shared: bool = False) -> None:
        self.randomness = randomness
        self.weights = Weights(randomness) if shared else None

    def after(self, noisy: NoisyLayer, layer: Any, h: Tensor, y: Tensor) -> Tensor:
        value, tangent = forward_ad.unpack_dual(y)
        known = forward_ad.unpack_dual(h).primal
        log_alpha = noisy.log_alpha(known)
        if self.weights is not None:
            direction = self.weights(noisy, layer, known, log_alpha)
        else:
            std = noisy.output_var(layer, known, log_alpha).sqrt()
            direction = std * noisy.joined(layer, known, log_alpha, std, self.randomness.normal(value))
        return forward_ad.make_dual(value, direction if tangent is None else tangent + direction)


_FORWARD = RLock()  # torch has one level of forward mode for all threads, and one choice of attention kernels


class _Level(Scope):
    """A level of forward mode, which one thread at a time may have."""

    opened = False

    def open(self) -> None:
        self.opened = forward_ad._current_level < 0  # within a level of the user's, torch refuses another
        forward_ad.enter_dual_level()

    def close(self) -> None:
        if self.opened:
            with suppress(RuntimeError):  # an interrupt may have come before it was entered, or after it was left
                _exit_dual_level(level=0)
            forward_ad._current_level = -1
            self.opened = False


@dataclass(frozen=True, repr=False)
class Tangent:
    """Creates the linearised estimator by forward mode: one pass gives an unbiased variance of every coordinate.

    torch has one level of forward mode for the whole process, so threads that read tangents take turns, and no other
    thread may be inside `torch.autograd.forward_ad.dual_level` at the same time.

    Arguments:
        probes: The number of random directions that are averaged.
        shared: As in :class:`Linearised`.
    """

    probes: int = 1
    shared: bool = False
    plain_mean = True
    rounds = True

    def __repr__(self) -> str:
        return f"Tangent(probes={self.probes}{', shared=True' if self.shared else ''})"

    def __call__(self, field: Noisy, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Moments:
        if self.probes < 1:
            raise UsageError(f"tangent takes at least 1 probe, got {self.probes}")
        with _FORWARD, torch.inference_mode(False), torch.no_grad():
            x, t, cond = each(outside, x), outside(t), {k: outside(c) for k, c in cond.items()}
            try:
                found, fused = self._pushed(field, x, t, cond, randomness), field.fused
            except NotImplementedError:  # torch's fused attention has no forward mode; written out, it has
                with sdpa_kernel(SDPBackend.MATH):
                    found, fused = self._pushed(field, x, t, cond, randomness), True
            return found._replace(mean=plain_output(field, x, t, cond)) if fused else found

    def _pushed(self, field: Noisy, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Moments:
        mean, var = None, None

        def pushed() -> tuple[Any, Any]:
            v = each(forward_ad.unpack_dual, field.run(Push(randomness, self.shared), x, t, **cond))
            # Values are kept beyond the level, so they are copied out of their dual pairs.
            tangent = each(lambda c: wide(torch.zeros_like(c.primal) if c.tangent is None else c.tangent), v)
            return each(lambda c: c.primal.clone(), v), each(torch.square, tangent)

        for _ in range(self.probes):
            mean, square = _Level().call(pushed)
            var = square if var is None else each(torch.add, var, square)
        return Moments(mean, each(lambda c: c / self.probes, var))  # type: ignore[arg-type]
