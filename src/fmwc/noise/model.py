"""The noise model of a network: an inference network for each chosen layer, connected to the layer by hooks.

The hooks exist only while a pass runs in any thread, or inside :meth:`NoiseModel.keep_hooks`. At other times the
network has none, so that torch.compile, copies and pickles see the unmodified network.

The running pass is stored in context variables, so a hook acts only in the thread and task whose pass runs: other
threads may sample the same field, or call the network, at the same time. A network that starts threads for its layers
must run them in a copy of its context (`contextvars.copy_context().run`); `nn.DataParallel` does not. If hooks exist,
torch does not use its fused kernel for `nn.TransformerEncoderLayer`: while a pass runs in one thread, results of such
layers in other threads may differ in the last digits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmwc.errors import ShapeError, UsageError
from fmwc.modes import Bound, Scope, Scopes, Shared
from fmwc.noise.layers import (
    Call,
    ExplicitAttention,
    InferenceNetwork,
    Projection,
    checked_kind,
    choose_layers,
    require_layers,
    time_features,
)
from fmwc.randomness import Randomness, Share, normal_rows
from fmwc.state import unsqueeze_like

# ---- passes ----------------------------------------------------------------------------------------------------------


class Pass:
    """One run of the network, in which noisy layers may change their input and output. This base class changes nothing.

    Each noisy layer calls `before` with its input and `after` with its output. `noisy` is the noise of the layer and
    `layer` is the module in the network. Without a pass, the network is unchanged. Estimators define their own passes
    (:mod:`fmwc.estimators`).
    """

    def before(self, noisy: NoisyLayer, layer: Any, h: Tensor) -> Tensor:
        """Return the input of the layer."""
        return h

    def after(self, noisy: NoisyLayer, layer: Any, h: Tensor, y: Tensor) -> Tensor:
        """Return the output of the layer."""
        return y


class Draw(Pass):
    r"""Pass that draws the weights once, by local reparameterisation (eqn:local-reparam). Exact.

    .. math:: y = θh + b + \sqrt{θ^2 (α h^2)} \; ε, \quad ε ∼ N(0, 1)

    A layer draws independently for each position of a sample (pixels, tokens, recurrent steps).

    Arguments:
        randomness: The source of ε.
    """

    def __init__(self, randomness: Randomness) -> None:
        self.randomness = randomness
        self.log_alphas: list[Tensor] = []
        self.owners: list[Tensor | None] = []
        self.patterns: list[str] = []  # of declared owners, for each call; empty if rows are in order

    def after(self, noisy: NoisyLayer, layer: Any, h: Tensor, y: Tensor) -> Tensor:
        log_alpha, owner = noisy.log_alpha(h), noisy.owner(h)
        pattern = "" if owner is None or noisy.rows is None else noisy.rows.pattern
        self.log_alphas.append(log_alpha)
        self.owners.append(owner)
        self.patterns.append(pattern)
        var = noisy.output_var(layer, h, log_alpha)
        # The floor keeps the derivative of the square root finite where the input is exactly zero.
        std = var.clamp_min(torch.finfo(var.dtype).tiny).sqrt()
        return y + std * noisy.correlated(layer, h, log_alpha, std, normal_rows(self.randomness, y, pattern))


# ---- the running pass ------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """Rows that a network declares for some layers (:func:`fmwc.flow.rows_of`).

    Attributes:
        pattern: The pattern of the layers' names.
        each: The number of rows per evaluation of a sample, in order; 0 if `owner` is given.
        owner: The sample of each row; the number of samples for unused rows.
        partners: The counterpart of each row in its sample's other evaluation, and whether it is in the second one.
    """

    pattern: str
    each: int
    owner: Tensor | None = None
    partners: tuple[Tensor, Tensor] | None = None


class _State:
    """The running pass with the time features and the rows of its batch, or only cached squared weights."""

    def __init__(
        self,
        current: Pass | None = None,
        features: Tensor | None = None,
        rows: Mapping[str, Rows] = MappingProxyType({}),  # by layer, if the network declares them
        proven: Mapping[str, frozenset[int]] | None = None,  # the numbers of rows in the proof, by layer
        squares: Mapping[str, Tensor] = MappingProxyType({}),  # by layer
        doubled: bool = False,
    ) -> None:
        self.current, self.features, self.rows, self.squares = current, features, rows, squares
        self.proven, self.doubled = proven, doubled
        self.differentiable = torch.is_grad_enabled()
        self.over = False


_IDLE = _State()
_PASSES: ContextVar[Mapping[_Running, _State]] = ContextVar("passes", default=MappingProxyType({}))
_CONSTANT: ContextVar[Mapping[_Running, _State]] = ContextVar("constant_weights", default=MappingProxyType({}))


class _Running(threading.local):
    """Key under which the hooks of a noise model look up the state of the current context.

    torch.compile cannot trace context variables, so the state of a traced pass is stored here, in thread-local storage.
    """

    def __init__(self) -> None:  # once per thread
        self.kept = 0  # nested keep_hooks scopes of this thread
        self.traced: _State | None = None

    def __reduce__(self) -> Any:
        return _Running, ()  # a copy is a new key

    @property
    def state(self) -> _State:
        """The state of the pass that runs in this context, or the idle state."""
        if self.traced is not None or torch.compiler.is_dynamo_compiling():
            return self.traced or _IDLE
        return self._find(_PASSES)

    @property
    def squares(self) -> Mapping[str, Tensor]:
        """Cached θ² by layer, inside :meth:`NoiseModel.constant_weights`."""
        return _IDLE.squares if torch.compiler.is_dynamo_compiling() else self._find(_CONSTANT).squares

    def _find(self, variable: ContextVar[Mapping[_Running, _State]]) -> _State:
        state = variable.get().get(self, _IDLE)
        return _IDLE if state.over else state


class _Within(Bound):
    """Scope in which hooks see a state, in this context and in copies of it."""

    state: _State | None = None

    def __init__(self, variable: ContextVar[Mapping[_Running, _State]], running: _Running, state: _State) -> None:
        super().__init__(variable, None)
        self.running, self.state = running, state

    def open(self) -> None:
        assert self.state is not None
        self.value = {**self.variable.get(), self.running: self.state}
        super().open()

    def close(self) -> None:
        if self.state is not None:
            self.state.over = True
        super().close()


# ---- the noise of one layer ------------------------------------------------------------------------------------------


class NoisyLayer(nn.Module):
    """Noise of one layer: ω ~ N(θ, α θ²), where α depends on the layer's input and the time (eq:vad).

    The module holds only the inference network; the layer stays in the user's network.
    """

    def __init__(
        self,
        name: str,
        layer: Any,
        running: _Running,
        width: int,
        initial_log_alpha: float,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.kind = checked_kind(name, layer)
        self.running = running
        self.inference = InferenceNetwork(getattr(layer, self.kind.channels), width, initial_log_alpha, generator)

    @property
    def _features(self) -> Tensor:
        features = self.running.state.features
        assert features is not None
        return features

    @property
    def samples(self) -> int:
        """The number of samples in the running pass."""
        return len(self._features)

    @property
    def rows(self) -> Rows | None:
        """The rows that the network declares for this layer; `None` if it declares no rows."""
        return self.running.state.rows.get(self.name)

    def log_alpha(self, h: Tensor) -> Tensor:
        """Return log α per input channel, shaped to multiply `h`. Spatial inputs are averaged over space."""
        owner = self.owner(h)
        if self.kind.spatial:
            pooled = h.mean(tuple(range(-self.kind.spatial, 0)))
            log_alpha = self.inference(pooled, _repeat_features(self._features, pooled, owner))
            return log_alpha[(..., *[None] * self.kind.spatial)]
        return self.inference(h, _repeat_features(self._features, h, owner))

    def owner(self, h: Tensor) -> Tensor | None:
        """Return the sample of each row of the layer's input, or `None` if rows are in order, equally many for each.

        Raise if the rows cannot be assigned to samples.
        """
        state, number, rows = self.running.state, h.shape[0], self.rows
        count = self.samples * (2 if state.doubled else 1)
        if rows is None:
            proven = state.proven is None or number in state.proven.get(self.name, ())
            if h.ndim < 2 + self.kind.spatial or number % count or not proven:
                raise ShapeError(
                    f"layer '{self.name}' received {number} rows for {count} samples, which do not say whose they are: "
                    "give one t per sample, put samples first (batch_first=True), declare the rows with a method rows "
                    "on the network, or exclude the layer"
                )
            return None
        if number != (declared := count * rows.each if rows.owner is None else len(rows.owner)):
            raise ShapeError(
                f"layer '{self.name}' received {number} rows, but the network's method rows declares {declared} for "
                f"'{rows.pattern}'; give this layer a pattern of its own"
            )
        return rows.owner

    def output_var(self, layer: Any, h: Tensor, log_alpha: Tensor) -> Tensor:
        """Return θ²(α h²): the variance of the layer's output due to the noise. Exact for a known input."""
        return self.kind.apply(layer, log_alpha.exp() * h.square(), self._square(layer))

    def _square(self, layer: Any) -> Tensor:
        square = self.running.squares.get(self.name)
        return self.kind.weight(layer).square() if square is None else square

    def partners(self, h: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return, for each row, its counterpart in the sample's other evaluation, and whether it is in the second one.

        `None` if the network does not evaluate each sample twice with the same weights
        (:class:`fmwc.adapters.Guided`).
        """
        if not self.running.state.doubled:
            return None
        if self.rows is not None and self.rows.partners is not None:
            return self.rows.partners
        rows = torch.arange(h.shape[0], device=h.device).view(self.samples, 2, -1)
        return rows.flip(1).flatten(), (rows > rows.flip(1)).flatten()

    def output_cov(self, layer: Any, h: Tensor, log_alpha: Tensor, partner: Tensor) -> Tensor:
        """Return θ²(√α h · √α' h'): the covariance of each output with its partner's. Exact for a known input."""
        scaled = (0.5 * log_alpha).exp() * h
        return self.kind.apply(layer, scaled * scaled[partner], self._square(layer))

    def correlated(self, layer: Any, h: Tensor, log_alpha: Tensor, std: Tensor, noise: Tensor) -> Tensor:
        """Correlate standard normal output noise between partners, as one draw of the weights would. Exact."""
        if (partners := self.partners(h)) is None:
            return noise
        other, second = partners
        cov = self.output_cov(layer, h, log_alpha, other)
        correlation = (cov / (std * std[other]).clamp_min(torch.finfo(std.dtype).tiny)).clamp(-1, 1)
        # The floor keeps the derivative of the square root finite.
        rest = (1 - correlation.square()).clamp_min(torch.finfo(std.dtype).eps).sqrt()
        return torch.where(unsqueeze_like(second, noise), correlation * noise[other] + rest * noise, noise)

    def before(self, layer: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Forward pre-hook of the layer."""
        current = self.running.state.current
        if current is None:
            return None
        if not args:
            raise UsageError(
                f"layer '{self.name}' is called by keyword; call it as layer(x), or exclude it from the noise"
            )
        return (current.before(self, layer, args[0]), *args[1:])

    def after(self, layer: Any, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        """Forward hook of the layer."""
        current = self.running.state.current
        return None if current is None else self._noised(current, layer, args[0], output)

    def calling(self, layer: Any) -> Call:
        """Return a linear function that applies the running pass, for projections, which have no hooks."""

        def call(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            current = self.running.state.current
            if current is None:
                return F.linear(x, weight, bias)
            x = current.before(self, layer, x)
            return self._noised(current, layer, x, F.linear(x, weight, bias))

        return call

    def _noised(self, current: Pass, layer: Any, h: Tensor, y: Tensor) -> Tensor:
        if self.running.state.differentiable and not torch.is_grad_enabled():
            raise UsageError(
                f"layer '{self.name}' runs without gradients (under no_grad or a reentrant checkpoint), so its "
                "noise cannot be traced; use use_reentrant=False, or exclude the layer from the noise"
            )
        return current.after(self, layer, h, y)


# ---- rows of layers --------------------------------------------------------------------------------------------------


def _rank(owner: Tensor, count: int) -> Tensor:  # (R,) -> (R,)
    """Return, for each row, the number of earlier rows of the same sample."""
    order, start = _starts(owner, count)
    rank = torch.arange(len(owner), device=owner.device) - start[owner[order]]
    return torch.empty_like(rank).index_copy(0, order, rank)


def _numbers(owner: Tensor, count: int) -> Tensor:  # -> (count + 1,)
    """Return the number of rows of each sample, and of unused rows."""
    return owner.new_zeros(count + 1).index_add(0, owner, torch.ones_like(owner))


def _starts(owner: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the order that sorts rows by sample, and where each sample starts in it."""
    number = _numbers(owner, count)
    return owner.argsort(stable=True), number.cumsum(0) - number


def rows_of_share(
    share: Share, owners: Mapping[str, Tensor], whole: Mapping[str, Tensor], checked: bool = True
) -> dict[str, tuple[int, Tensor, Tensor]]:
    """Return the rows of a share's samples among those of the whole batch (:attr:`fmwc.randomness.Share.owned`).

    Arguments:
        share: The share.
        owners: By pattern, the sample of each row; the number of samples if unused.
        whole: The same for the whole batch.
        checked: Whether to compare numbers of rows, which reads values.
    """

    def find(here: Tensor, everywhere: Tensor) -> tuple[int, Tensor, Tensor]:
        numbers = _numbers(everywhere, share.total)
        if checked and not torch.equal(_numbers(here, share.count)[:-1], numbers[share.samples]):
            raise ShapeError("the number of rows of a sample depends on its state; train with one process")
        order, start = _starts(everywhere, share.total)
        sample = share.samples[here.clamp_max(share.count - 1)]
        position = torch.where(here < share.count, start[sample] + _rank(here, share.count), 0)
        return len(everywhere), order[position], numbers[:-1].sum().clamp_min(1) * share.part

    return {pattern: find(here, whole[pattern]) for pattern, here in owners.items()}


def _partners(owner: Tensor, evaluations: int) -> tuple[Tensor, Tensor]:  # owner: of 2B evaluations
    """Return, for each row, its counterpart in the sample's other evaluation, and whether it is in the second one."""
    number = owner.bincount(minlength=evaluations)[:evaluations]
    if not torch.equal(number[::2], number[1::2]):
        raise ShapeError("the two evaluations of a guided sample must have equal numbers of rows")
    order, start = _starts(owner, evaluations)
    used = owner < evaluations
    other = torch.where(used, owner ^ 1, owner)
    return order[start[other] + _rank(owner, evaluations)], used & (owner % 2 == 1)


def _repeat_features(
    features: Tensor, h: Tensor, owner: Tensor | None = None
) -> Tensor:  # (B, F) -> (*h.shape[:-1], F)
    """Return the time features of each row of a layer's input, which may have several rows per sample."""
    if owner is not None:
        features = features[owner.clamp_max(len(features) - 1)]  # an unused row may have any time
    elif (each := h.shape[0] // features.shape[0]) > 1:
        features = features.repeat_interleave(each, 0)
    return features[(slice(None), *[None] * (h.ndim - 2))].expand(*h.shape[:-1], -1)


# ---- the noise of a network ------------------------------------------------------------------------------------------


class NoiseModel(nn.Module):
    """Noise model of a network. No layer is replaced and no `forward` is patched.

    Arguments:
        network: Any torch module.
        include, exclude: Glob patterns over the dotted names of its linear and convolution layers, and of the
            projections of `nn.MultiheadAttention`: `q_proj`, `k_proj`, `v_proj`, `out_proj`.
        width: The width of the inference networks.
        initial_log_alpha: log α before training.
        generator: The source of the initial weights of the inference networks; torch's global generator if `None`.
    """

    def __init__(
        self,
        network: nn.Module,
        include: Sequence[str] = ("*",),
        exclude: Sequence[str] = (),
        width: int = 64,
        initial_log_alpha: float = -3.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        chosen = choose_layers(network, include, exclude)
        self.options: dict[str, Any] = {
            "include": list(include),
            "exclude": list(exclude),
            "width": width,
            "initial_log_alpha": initial_log_alpha,
        }
        self.names = list(chosen)
        self.running = _Running()
        self.layers = nn.ModuleList(
            NoisyLayer(name, layer, self.running, width, initial_log_alpha, generator) for name, layer in chosen.items()
        )
        for layer in list(chosen.values())[:1]:
            self.to(device=layer.weight.device, dtype=layer.weight.dtype)
        # Tuples, so that the user's own modules are not registered as parts of this one.
        self._places: tuple[tuple[Any, Any], ...] = tuple(zip(self.layers, chosen.values(), strict=True))
        self._attentions = tuple(m for m in network.modules() if isinstance(m, nn.MultiheadAttention))
        self._network: tuple[nn.Module, ...] = (network,)
        self._matches: dict[tuple[str, ...], dict[str, str]] = {}  # the pattern of each layer, by declared patterns
        self.proofs: dict[Any, Any] = {}  # that rows are in order, by shapes of the inputs (fmwc.noise.rows)

    @property
    def fused(self) -> bool:
        """Whether parts of the network have fused kernels, which torch uses only while no pass runs."""
        return len(self._attentions) > 0

    @property
    def attached(self) -> bool:
        """Whether the noise model refers to a network; false after :meth:`remove`."""
        return len(self._network) > 0  # torch 2.11 cannot compile bool of a tuple

    @property
    def hooks_kept(self) -> bool:
        """Whether this thread is inside :meth:`keep_hooks`."""
        return self.running.kept > 0

    def remove(self) -> None:
        """Release the network. Afterwards, no pass can run on it."""
        self._places, self._attentions, self._network = (), (), ()

    def check_layers(self, network: nn.Module | None = None) -> None:
        """Raise if a layer that carries noise was replaced after the noise was attached.

        The new layer would run without noise, and its variance would be missing.

        Arguments:
            network: The network about to run; raise unless it is or contains the network that the noise was attached
                to.
        """
        for root in self._network:
            if network is not None and not any(module is root for module in network.modules()):
                raise UsageError("the field's network was replaced after attach; call fmwc.attach on the new network")
            for noisy, layer in self._places:
                if (change := _change(root, noisy.name, layer)) is not None:
                    raise UsageError(
                        f"layer '{noisy.name}' was {change} after attach, so its noise would be missing; attach the "
                        "network again: fmwc.attach(field.detach())"
                    )

    def require_layers(self) -> None:
        """Raise if no layer carries noise."""
        for root in self._network:
            require_layers(root, self.names)

    def squared_weights(self) -> dict[str, Tensor]:
        """Return the current θ² of every noisy layer."""
        self.check_layers()
        with torch.inference_mode(False), torch.no_grad():
            return {noisy.name: noisy.kind.weight(layer).square() for noisy, layer in self._places}

    def constant_weights(self, squares: Mapping[str, Tensor] | None = None) -> Scope:
        """Return a scope that caches θ² while the weights are constant, as in sampling.

        The cache ends with the scope, because an optimiser in a captured graph changes weights undetectably.

        Arguments:
            squares: θ² by layer; computed here if `None`.
        """
        squares = self.squared_weights() if squares is None else squares
        return _Within(_CONSTANT, self.running, _State(squares=squares))

    def keep_hooks(self) -> Scope:
        """Return a scope that keeps the hooks over many passes of this thread, for loops whose body is compiled."""
        return Scopes(_HOOKS.holding([self]), _Kept(self.running))

    def during(
        self,
        current: Pass,
        t: Tensor,  # (B,)
        rows: Mapping[str, Tensor | int] | None = None,
        doubled: bool = False,
        proven: Mapping[str, frozenset[int]] | None = None,
    ) -> Scope:
        """Return a scope in which a pass runs in this thread and task. A nested pass replaces the outer one.

        Arguments:
            current: The pass.
            t: The time of each sample.
            rows: By pattern of layer names, the sample of each row (`B` for unused rows), or the number of rows of
                every sample (:func:`fmwc.flow.rows_of`). If `None`, rows are in the order of the samples, equally many
                for each.
            doubled: Whether the network evaluates sample i twice, as 2i and 2i + 1, with the same weights; `rows`
                then holds evaluations instead of samples.
            proven: The numbers of rows that each layer may receive; any multiple of `B` if `None`.
        """
        scopes: list[Scope] = [_Within(_PASSES, self.running, self._state(current, t, rows, doubled, proven))]
        if self._attentions and self.running.state.current is None:
            scopes.insert(0, ExplicitAttention(self._calls()).scope())
        if not self.hooks_kept:
            scopes.insert(0, _HOOKS.holding([self]))
        return Scopes(*scopes)

    @contextmanager
    def tracing(
        self, current: Pass, t: Tensor, rows: Mapping[str, Tensor | int] | None = None, doubled: bool = False
    ) -> Iterator[None]:
        """Run a pass as :meth:`during` does, under torch.compile and inside :meth:`keep_hooks`."""
        running, outer = self.running, self.running.traced
        running.traced = self._state(current, t, rows, doubled)
        try:
            with ExplicitAttention(self._calls()) if self._attentions and outer is None else nullcontext():
                yield
        finally:
            running.traced = outer

    def _state(
        self,
        current: Pass,
        t: Tensor,
        rows: Mapping[str, Tensor | int] | None,
        doubled: bool,
        proven: Mapping[str, frozenset[int]] | None = None,
    ) -> _State:
        features = time_features(t.to(next(self.layers.parameters()).dtype))
        count = len(t) * (2 if doubled else 1)

        def of_pattern(pattern: str, owner: Tensor | int) -> Rows:
            if isinstance(owner, int):
                return Rows(pattern, owner)
            return Rows(pattern, 0, owner // 2, _partners(owner, count)) if doubled else Rows(pattern, 0, owner)

        kinds = {pattern: of_pattern(pattern, owner) for pattern, owner in (rows or {}).items()}
        by_layer = {name: kinds[pattern] for name, pattern in self._matching(tuple(kinds)).items()} if kinds else {}
        return _State(current, features, by_layer, proven, doubled=doubled)

    def _matching(self, patterns: tuple[str, ...]) -> dict[str, str]:
        """Return the first pattern that matches the name of each layer; raise if there is none."""
        if patterns not in self._matches:
            found = {}
            for name in self.names:
                plain = name.replace("_orig_mod.", "")  # the name of a compiled module
                match = next((pattern for pattern in patterns if fnmatchcase(plain, pattern)), None)
                if match is None:
                    raise UsageError(
                        f"the network's method rows does not say whose rows layer '{name}' sees; it declares "
                        f"{', '.join(map(repr, patterns))}"
                    )
                found[name] = match
            self._matches[patterns] = found
        return self._matches[patterns]

    def _calls(self) -> dict[nn.MultiheadAttention, dict[str, Call]]:
        calls: dict[nn.MultiheadAttention, dict[str, Call]] = {m: {} for m in self._attentions}
        for noisy, layer in self._places:
            if isinstance(layer, Projection):
                calls[layer.attention][layer.which] = noisy.calling(layer)
        return calls

    def put_hooks(self) -> None:
        """Register missing hooks closest to the layer, inside any other hooks."""
        for noisy, layer in self._hooked_places():
            if not _hooks_of(noisy, layer._forward_pre_hooks):
                layer.register_forward_pre_hook(noisy.before)
            if not _hooks_of(noisy, layer._forward_hooks):
                layer.register_forward_hook(noisy.after, prepend=True)

    def take_hooks(self) -> None:
        """Remove every hook of this noise model."""
        for noisy, layer in self._hooked_places():
            for hooks in (layer._forward_pre_hooks, layer._forward_hooks):
                for key in _hooks_of(noisy, hooks):
                    hooks.pop(key, None)

    def _hooked_places(self) -> list[tuple[NoisyLayer, Any]]:
        return [(noisy, layer) for noisy, layer in self._places if not isinstance(layer, Projection)]


def _change(network: nn.Module, name: str, layer: Any) -> str | None:
    """Describe how a layer was changed; `None` if it is still in its place."""
    expected = layer.attention if isinstance(layer, Projection) else layer
    path = name.split(".")[: -1 if isinstance(layer, Projection) else None]
    module: Any = network
    for part in filter(None, path):
        module = getattr(module, part, None)
    if module is expected:
        return None
    return "removed" if module is None else f"replaced by another {type(module).__name__}"


def _hooks_of(noisy: NoisyLayer, hooks: Mapping[int, Any]) -> list[int]:
    """Return the keys of a layer's hooks that belong to its noise."""
    return [key for key, hook in list(hooks.items()) if getattr(hook, "__self__", None) is noisy]


# Hooks are looked up on the layers instead of kept as handles, so that an interrupt cannot leave one behind.
_HOOKS: Shared[NoiseModel] = Shared(
    lambda noise: None, lambda noise: noise.put_hooks(), lambda noise, _: noise.take_hooks()
)


class _Kept(Scope):
    counted = False

    def __init__(self, running: _Running) -> None:
        self.running = running

    def open(self) -> None:
        self.counted = True
        self.running.kept += 1

    def close(self) -> None:
        if self.counted:
            self.counted = False
            self.running.kept -= 1
