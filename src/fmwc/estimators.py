r"""Estimators of the mean and variance of a noisy network's velocity, and of the variance of a trajectory's endpoint.

The velocity is a smooth function of the noise ε of all layers. At ε = 0, the output y_l of layer l has the derivative
s_l = √(θ²(α h²)) with respect to its noise. To first order in the noise, and with all correlations,

.. math:: Var[v] = \sum_l \sum_u s_{l,u}^2 \left( \frac{∂v}{∂y_{l,u}} \right)^2 + O(α^2)

:class:`Linearised` computes this in reverse mode, :class:`Tangent` in forward mode. :class:`Diagonal` is the paper's
estimator (eq:layerprop), :class:`MonteCarlo` the reference for all others, and :class:`Transport` carries the sum
through the whole ODE. Networks only have to be differentiable by torch; `Diagonal` needs a rule for each operation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from threading import RLock
from traceback import walk_tb
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _exit_dual_level
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointError

from fmwc.errors import NoRuleError, UsageError, pick
from fmwc.flow import declared
from fmwc.modes import Scope
from fmwc.moments import Closure, GaussHermite, Gaussian, Moments, as_closure, moments_of
from fmwc.noise import Draw, NoisyLayer, Pass, PushedMode
from fmwc.randomness import Randomness, signs
from fmwc.state import SINGLE, batch_size, channels, first_channel, per_sample, tree_map, unsqueeze_like, wide

__all__ = [
    "ESTIMATORS",
    "Diagonal",
    "Estimator",
    "Linearised",
    "MonteCarlo",
    "Noisy",
    "Record",
    "Tangent",
    "Transport",
    "Transported",
    "as_estimator",
    "as_normal_tensor",
    "contributions",
    "estimator_of",
    "translate_checkpoint_errors",
    "unit_probes",
]


class Noisy(Protocol):
    """Interface of a field that an estimator can read."""

    @property
    def fused(self) -> bool:
        """Whether parts of the network have fused kernels, which torch uses only while no pass runs."""

    def __call__(self, x: Any, t: Tensor, **cond: Any) -> Any:
        """Return the velocity of the plain network."""

    def run(self, current: Pass, x: Any, t: Tensor, *, cond: Mapping[str, Any] | None = None) -> Any:
        """Return the velocity while a pass runs."""


class Estimator(Protocol):
    """Interface of estimators: `estimator(field, x, t, cond, randomness)` returns :class:`fmwc.moments.Moments`.

    If `plain_mean` is true, the mean is bit for bit the plain network's output, so that a sampler may follow it. If an
    attribute `rounds` is true, the variance may be computed in half precision, because its relative error is then the
    rounding error (not so for a difference of draws).
    """

    @property
    def plain_mean(self) -> bool: ...

    def __call__(self, field: Noisy, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Any: ...


def plain_output(field: Noisy, x: Any, t: Tensor, cond: dict[str, Any]) -> Any:
    """Return the network's output without a pass.

    A pass changes the last digits if torch has fused kernels (`field.fused`). Estimators use this output as their mean,
    so that no estimator changes a sample.
    """
    with torch.no_grad():
        return field(x, t, **cond)


def as_normal_tensor(value: Any) -> Any:
    """Copy a tensor that was created in inference mode, which has no derivatives; return other values unchanged."""
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value


def normal_inputs(x: Any, t: Tensor, cond: dict[str, Any]) -> tuple[Any, Tensor, dict[str, Any]]:
    """Return the inputs of a field as tensors that can be differentiated."""
    return tree_map(as_normal_tensor, x), as_normal_tensor(t), {k: as_normal_tensor(c) for k, c in cond.items()}


# ---- recorded passes -------------------------------------------------------------------------------------------------


class Recorded(NamedTuple):
    """Noise of one call of a layer.

    Attributes:
        noisy: The noise of the layer.
        noise: The variances of the outputs.
        cov: The covariance of each output with that of its partner, and the row of the partner; `None` without
            partners.
        owner: The sample index of each row; `None` if the rows are ordered by sample.
    """

    noisy: NoisyLayer
    noise: Tensor
    cov: tuple[Tensor, Tensor] | None
    owner: Tensor | None


class Record(Pass):
    """Pass that records the output of each noisy layer and the variance of its noise.

    Probes are pulled back to the recorded outputs, but not beyond the first noisy layer. An output is recorded as a
    graph edge, which stays valid if the network overwrites the tensor in place.
    """

    following: Callable[[], AbstractContextManager[Any]] = torch.no_grad  # the context in which variances are computed

    def __init__(self) -> None:
        self.outputs: list[GradientEdge] = []
        self.calls: list[Recorded] = []  # one for each output

    def after(self, noisy: NoisyLayer, layer: Any, h: Tensor, y: Tensor) -> Tensor:
        cov = None
        with self.following():
            log_alpha = noisy.log_alpha(h)
            noise = noisy.output_var(layer, h, log_alpha)
            if (partners := noisy.partners(h)) is not None:
                cov = noisy.output_cov(layer, h, log_alpha, partners[0]), partners[0]
        self.calls.append(Recorded(noisy, noise, cov, noisy.owner(h)))
        if not y.requires_grad:
            y = y.detach().requires_grad_()
        self.outputs.append(get_gradient_edge(y))
        return y.clone() if y.is_leaf else y  # torch forbids in-place changes of a leaf


def contributions(gradients: list[Tensor | None], record: Record, count: int) -> Tensor:  # -> (L, B)
    """Return the variance of one probe per call of a layer: s² (∂(w·v)/∂y)², summed over the outputs. First order."""
    zero = wide(record.calls[0].noise).new_zeros(count)

    def of_call(gradient: Tensor | None, call: Recorded) -> Tensor:
        if gradient is None:
            return zero
        g = wide(gradient)
        var = g.square() * wide(call.noise)
        if call.cov is not None:
            cov, partner = call.cov
            var = var + g * g[partner] * wide(cov)
        return per_sample(var, count, call.owner)

    return torch.stack([of_call(*pair) for pair in zip(gradients, record.calls, strict=True)])


def unit_probes(state: Any) -> Iterator[tuple[str, int, Any]]:
    """Yield a one-hot probe for each coordinate of a state, as `(channel, index, probe)`."""
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
            "nn.MultiheadAttention); switch gradient checkpointing off, or use the monte_carlo estimator"
        ) from error


def _gradients(v: Any, record: Record, probe: Any) -> list[Tensor | None]:
    """Return the gradient of a probe at every layer's output; empty if no noise reaches the probed channels."""
    names = [name for name in channels(probe) if channels(v)[name].requires_grad]
    if not names or not record.outputs:
        return []
    with translate_checkpoint_errors():
        return list(
            torch.autograd.grad(
                [channels(v)[n] for n in names],
                record.outputs,
                [channels(probe)[n] for n in names],
                retain_graph=True,
                allow_unused=True,
            )
        )


# ---- linearised, in reverse mode -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Linearised:
    """Linearised estimator in reverse mode, which pulls probes back through the network. First order.

    With `probes=None` there is one probe per coordinate, and the variance is exact to first order; use it for states
    with few coordinates. With K probes of random signs, the result is an unbiased estimate of the mean variance over
    each channel's coordinates (size 1 in every dimension but the first); use it for images.

    Arguments:
        probes: `None`, or the number K of random probes.
    """

    probes: int | None = None
    plain_mean = True
    rounds = True

    def __post_init__(self) -> None:
        if self.probes is not None and self.probes < 1:
            raise UsageError(f"probes must be None (exact) or at least 1, got {self.probes}")

    def __call__(self, field: Noisy, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Moments:
        record = Record()
        with torch.inference_mode(False), torch.enable_grad():
            x, t, cond = normal_inputs(x, t, cond)
            # Differentiate from the state on, so that a checkpointed block, recomputed without hooks, saves the
            # same tensors both times even if all weights are frozen.
            v = field.run(record, tree_map(lambda c: c.detach().clone().requires_grad_().clone(), x), t, cond=cond)
            mean = plain_output(field, x, t, cond) if field.fused else tree_map(Tensor.detach, v)
            var = self._exact(v, record) if self.probes is None else self._probed(v, record, randomness)
        return Moments(mean, var if isinstance(v, dict) else var[SINGLE])  # type: ignore[arg-type]

    def _pull(self, v: Any, record: Record, probe: Any) -> Tensor:  # -> (B,)
        gradients = _gradients(v, record, probe)
        if not gradients:
            return wide(first_channel(probe)).new_zeros(batch_size(v))
        return contributions(gradients, record, batch_size(v)).sum(0)

    def _exact(self, v: Any, record: Record) -> dict[str, Tensor]:
        pulled: dict[str, list[Tensor]] = {name: [] for name in channels(v)}
        for name, _, probe in unit_probes(tree_map(Tensor.detach, v)):
            pulled[name].append(self._pull(v, record, probe))
        return {name: torch.stack(pulled[name], 1).view(value.shape) for name, value in channels(v).items()}

    def _probed(self, v: Any, record: Record, randomness: Randomness) -> dict[str, Tensor]:
        count = self.probes or 1

        def average(name: str, value: Tensor) -> Tensor:
            like = value.detach()
            probes = [signs(randomness, wide(like)).to(like.dtype) for _ in range(count)]
            total = torch.as_tensor(sum(self._pull(v, record, {name: probe}) for probe in probes))
            return unsqueeze_like(total / (count * value[0].numel()), value)

        return {name: average(name, value) for name, value in channels(v).items()}


# ---- linearised, in forward mode -------------------------------------------------------------------------------------


class Push(Pass):
    """Pass that pushes one random direction of the noise forward with the values."""

    def __init__(self, randomness: Randomness) -> None:
        self.randomness = randomness

    def after(self, noisy: NoisyLayer, layer: Any, h: Tensor, y: Tensor) -> Tensor:
        value, tangent = forward_ad.unpack_dual(y)
        known = forward_ad.unpack_dual(h).primal
        log_alpha = noisy.log_alpha(known)
        std = noisy.output_var(layer, known, log_alpha).sqrt()
        direction = std * noisy.correlated(layer, known, log_alpha, std, self.randomness.normal(value))
        return forward_ad.make_dual(value, direction if tangent is None else tangent + direction)


class _Contiguous(TorchFunctionMode):
    """Mode in which group norms take contiguous inputs, because their forward mode cannot view a transposed tangent."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.group_norm, torch.group_norm):
            value, tangent = forward_ad.unpack_dual(args[0])
            if tangent is not None:
                args = forward_ad.make_dual(value.contiguous(), tangent.contiguous()), *args[1:]
        return func(*args, **(kwargs or {}))


_FORWARD = RLock()  # all threads share torch's level of forward mode and choice of attention kernels


class _Level(Scope):
    """A level of forward mode, held by one thread at a time."""

    opened = False

    def open(self) -> None:
        self.opened = forward_ad._current_level < 0  # torch raises for a level inside a user's level
        forward_ad.enter_dual_level()

    def close(self) -> None:
        if self.opened:
            with suppress(RuntimeError):  # an interrupt may come before entering or after leaving
                _exit_dual_level(level=0)
            forward_ad._current_level = -1
            self.opened = False


@dataclass(frozen=True)
class Tangent:
    """Linearised estimator in forward mode: one pass gives an unbiased estimate for every coordinate. First order.

    torch has one level of forward mode per process. Concurrent readings therefore take turns, and no other thread may
    use `torch.autograd.forward_ad.dual_level` at the same time.

    Arguments:
        probes: The number of random directions to average.
    """

    probes: int = 1
    plain_mean = True
    rounds = True

    def __call__(self, field: Noisy, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Moments:
        if self.probes < 1:
            raise UsageError(f"tangent needs at least 1 probe, got {self.probes}")
        with _FORWARD, torch.inference_mode(False), torch.no_grad():
            x, t, cond = normal_inputs(x, t, cond)
            try:
                moments, fused = self._pushed(field, x, t, cond, randomness), field.fused
            except NotImplementedError:  # torch's fused attention kernels have no forward mode
                with sdpa_kernel(SDPBackend.MATH):
                    moments, fused = self._pushed(field, x, t, cond, randomness), True
            return moments._replace(mean=plain_output(field, x, t, cond)) if fused else moments

    def _pushed(self, field: Noisy, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Moments:
        mean, var = None, None

        def pushed() -> tuple[Any, Any]:
            push = Push(randomness)
            v = tree_map(forward_ad.unpack_dual, PushedMode(_Contiguous()).call(field.run, push, x, t, cond=cond))
            # Values outlive the level, so they are copied out of their dual pairs.
            tangent = tree_map(lambda c: wide(torch.zeros_like(c.primal) if c.tangent is None else c.tangent), v)
            return tree_map(lambda c: c.primal.clone(), v), tree_map(torch.square, tangent)

        for _ in range(self.probes):
            mean, square = _Level().call(pushed)
            var = square if var is None else tree_map(torch.add, var, square)
        return Moments(mean, tree_map(lambda c: c / self.probes, var))  # type: ignore[arg-type]


# ---- diagonal --------------------------------------------------------------------------------------------------------


class Inflate(Pass):
    r"""Pass that replaces the noise of each layer's weights by variance of its input. Exact for independent inputs.

    For independent inputs, weights N(θ, αθ²) on an input (μ, σ²) give the same output variance as known weights on an
    input of variance αμ² + (1+α)σ². The ordinary linear rule then gives eq:layerprop:

    .. math:: σ_{l+1}^2 = θ^2 (α μ_l^2 + (1 + α) σ_l^2)
    """

    def __init__(self, closure: Closure) -> None:
        self.closure = closure

    def before(self, noisy: NoisyLayer, layer: Any, h: Tensor) -> Tensor:
        mean, var = moments_of(h)
        alpha = noisy.log_alpha(mean).exp()
        return Gaussian(mean, alpha * mean.square() + (1 + alpha) * var, self.closure)


@dataclass(frozen=True)
class Diagonal:
    """Diagonal estimator: closed form and one pass; ignores correlations between activations (eq:layerprop).

    The mean is the closure's E[v]. It differs from the plain network's output, except with `taylor1` in networks
    without a maximum of two activations.

    Arguments:
        closure: `gauss_hermite` (10 nodes), `taylor1`, `taylor2`, or a closure object.
    """

    closure: str | Closure = GaussHermite()
    plain_mean = False
    rounds = True

    def __call__(self, field: Noisy, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Moments:
        if declared(field, "doubled"):
            raise UsageError(
                "diagonal propagation treats the two evaluations of a guided network as independent, but they share "
                "their weights; use the linearised estimator"
            )
        inflate = Inflate(as_closure(self.closure))
        with torch.no_grad():
            try:
                v = field.run(inflate, x, t, cond=cond)
            except NoRuleError as error:
                where = _locate(field, error)
                raise NoRuleError(f"{error}{f' (inside {where})' if where else ''}") from error
        return Moments(tree_map(lambda c: moments_of(c).mean, v), tree_map(lambda c: moments_of(c).var, v))


def _locate(field: Any, error: BaseException) -> str:
    """Return the dotted name of the innermost module in the traceback of an error."""
    network = getattr(field, "network", None)
    if not isinstance(network, nn.Module):
        return ""
    names = {id(module): f"{name or 'network'} ({type(module).__name__})" for name, module in network.named_modules()}
    frames = (frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__))
    return ([""] + [names[id(module)] for module in frames if id(module) in names])[-1]


# ---- Monte Carlo -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MonteCarlo:
    """Monte Carlo estimator: sample mean and unbiased sample variance of posterior draws (eqn:local-reparam). Exact.

    Arguments:
        draws: The number k of draws, at least 2.
        abreast: The number of draws in one batch; it must divide `draws`.
    """

    draws: int = 64
    abreast: int = 1
    plain_mean = False

    def __post_init__(self) -> None:
        if self.draws < 2:
            raise UsageError(f"monte_carlo needs at least 2 draws, got {self.draws}")
        if self.abreast < 1 or self.draws % self.abreast:
            raise UsageError(f"abreast must divide the {self.draws} draws, got {self.abreast}")

    def __call__(self, field: Noisy, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Moments:
        count, side = batch_size(x), self.abreast

        def widen(value: Any) -> Any:
            rows = isinstance(value, Tensor) and value.ndim > 0 and len(value) == count
            return value.repeat(side, *[1] * (value.ndim - 1)) if rows and side > 1 else value

        wide_x, wide_t, wide_cond = tree_map(widen, x), widen(t), {k: widen(v) for k, v in cond.items()}
        with torch.no_grad():
            centre = field(x, t, **cond)  # sum differences from the plain output, to avoid cancellation
            first = second = tree_map(lambda c: torch.zeros_like(wide(c)), centre)
            for _ in range(self.draws // side):
                drawn = field.run(Draw(randomness), wide_x, wide_t, cond=wide_cond)
                shift = tree_map(lambda d, c: wide(d).reshape(side, *c.shape) - c, drawn, centre)
                first = tree_map(lambda s, d: s + d.sum(0), first, shift)
                second = tree_map(lambda s, d: s + d.square().sum(0), second, shift)
            k = self.draws
            mean = tree_map(lambda c, s: c + s / k, centre, first)
            var = tree_map(lambda s2, s1: ((s2 - s1.square() / k) / (k - 1)).clamp_min(0), second, first)
        return Moments(mean, var)


# ---- by name ---------------------------------------------------------------------------------------------------------

ESTIMATORS: dict[str, Estimator] = {
    "linearised": Linearised(),
    "diagonal": Diagonal(),
    "tangent": Tangent(),
    "monte_carlo": MonteCarlo(),
}


def as_estimator(estimator: str | Estimator) -> Estimator:
    """Return an estimator by name; return an estimator object unchanged."""
    return pick(ESTIMATORS, estimator, "propagation") if isinstance(estimator, str) else estimator


def estimator_of(text: str) -> Estimator | None:
    """Return the estimator with this `repr`; `None` if it has options other than integers and None.

    >>> estimator_of("Linearised(probes=2)"), estimator_of("Linearised(closure=mine)")
    (Linearised(probes=2), None)
    """
    kinds = {type(estimator).__name__: estimator for estimator in ESTIMATORS.values()}
    name, _, options = text.removesuffix(")").partition("(")
    if name not in kinds or str(kinds[name]) == text:
        return kinds.get(name)
    pairs = re.findall(r"(\w+)=(\w+)", options)
    try:
        made: Estimator = type(kinds[name])(**{n: None if v == "None" else int(v) for n, v in pairs})
    except (TypeError, ValueError, UsageError):
        return None
    return made if str(made) == text else None


# ---- transport through the ODE ---------------------------------------------------------------------------------------

Advance = Callable[[int, Any, Record], Any]  # (step, state, record) -> the next state


@dataclass(frozen=True)
class Transported:
    """Result of a transport.

    Attributes:
        var: The variance of the endpoint per coordinate or random projection, `(B, probes)`, with each channel
            multiplied by its weight (as in :func:`fmwc.baselines`).
        profile: The variance summed over probes, per step and layer, `(steps, L, B)`.
        layers: The names of the layers, in the order they ran.
    """

    var: Tensor
    profile: Tensor
    layers: tuple[str, ...]


@dataclass(frozen=True)
class Transport:
    r"""Estimator of the endpoint's variance, which pulls probes back through the whole ODE (adjoint). First order.

    The probe w at the endpoint is pulled back step by step, λ_n = (∂x_{n+1}/∂x_n)ᵀ λ_{n+1}, and the noise at every step
    contributes the square of its slope:

    .. math:: Var[w·x_1] = \sum_n \sum_l \sum_u s_{n,l,u}^2 \left( \frac{∂(λ_{n+1}·x_{n+1})}{∂y_{n,l,u}} \right)^2

    This is the limit k → ∞ of the dispersion of k stochastic trajectories. The terms over n and l are the profile. Only
    the states are stored. The backward pass recomputes each step, so memory holds the activations of one step.

    Arguments:
        probes: `None` for one probe per coordinate (exact), or a number of random unit directions.
    """

    probes: int | None = None

    def __post_init__(self) -> None:
        if self.probes is not None and self.probes < 1:
            raise UsageError(f"probes must be None (exact) or at least 1, got {self.probes}")

    def __call__(
        self, advance: Advance, states: list[Any], randomness: Randomness, weights: Mapping[str, float] | None = None
    ) -> Transported:
        """Pull the probes back through the steps.

        Arguments:
            advance: A function that recomputes one step while a record runs.
            states: The states of the trajectory, including the first and the last.
            randomness: The source of random directions.
            weights: The factor of each channel's variance, by name; 1 for channels that are not named.
        """
        end = states[-1]
        count = batch_size(end)
        profile: list[Tensor] = []
        names: tuple[str, ...] = ()
        with torch.inference_mode(False), torch.enable_grad():
            adjoints = [_weighted(probe, weights or {}) for probe in self._ends(end, randomness)]
            total = first_channel(end).new_zeros(count, len(adjoints))
            for step in reversed(range(len(states) - 1)):
                record = Record()
                x = tree_map(lambda c: c.clone().detach().requires_grad_(), states[step])
                after = advance(step, x, record)
                inputs: list[Tensor] = list(channels(x).values())
                # A stepper may evaluate the network several times; each layer still has one row.
                layers = list(dict.fromkeys(call.noisy for call in record.calls))
                rows = torch.tensor([layers.index(call.noisy) for call in record.calls], device=total.device)
                names = tuple(noisy.name for noisy in layers)
                by_layer = total.new_zeros(len(layers), count)
                for i, adjoint in enumerate(adjoints):
                    with translate_checkpoint_errors():
                        gradients = torch.autograd.grad(
                            list(channels(after).values()),
                            [*inputs, *record.outputs],  # type: ignore[arg-type]
                            list(channels(adjoint).values()),
                            retain_graph=i + 1 < len(adjoints),
                            allow_unused=True,
                        )
                    back = [torch.zeros_like(c) if g is None else g for g, c in zip(gradients, inputs, strict=False)]
                    adjoints[i] = dict(zip(x, back, strict=True)) if isinstance(x, dict) else back[0]
                    parts = contributions(list(gradients[len(inputs) :]), record, count)
                    total[:, i] += parts.sum(0)
                    by_layer.index_add_(0, rows, parts)
                profile.append(by_layer)
        return Transported(total, torch.stack(profile[::-1]), names)

    def _ends(self, end: Any, randomness: Randomness) -> list[Any]:
        if self.probes is None:
            return [probe for _, _, probe in unit_probes(end)]

        def direction() -> Any:
            raw = tree_map(randomness.normal, end)
            square = sum(c.flatten(1).square().sum(1) for c in channels(raw).values())
            norm = torch.as_tensor(square).sqrt()
            return tree_map(lambda c: c / unsqueeze_like(norm, c), raw)

        return [direction() for _ in range(self.probes)]


def _weighted(probe: Any, weights: Mapping[str, float]) -> Any:
    """Multiply each channel of a probe by the square root of its weight."""
    scaled = {name: value * weights.get(name, 1.0) ** 0.5 for name, value in channels(probe).items()}
    return scaled if isinstance(probe, dict) else scaled[SINGLE]
