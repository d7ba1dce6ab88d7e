"""The noise model of a network: an inference network beside each chosen layer, joined to it by hooks.

The hooks are in only while a pass runs in any thread, or while :meth:`NoiseModel.hooked` keeps them. At other times the
network has none, so that whatever looks for hooks (torch.compile, a copy, a pickle) finds the network its author wrote.

What runs is kept in context variables, so a hook acts only in the thread and task whose pass runs: other threads may
sample the same field, or call the network, at the same time. A network that calls its layers from threads of its own
must hand them its context (`contextvars.copy_context().run`); `nn.DataParallel` does not. torch looks for hooks before
it uses its fused kernel for `nn.TransformerEncoderLayer`: while a pass runs in one thread, other threads compute such
layers one by one, which may differ in the last digits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fmwc.errors import ShapeError, UsageError
from fmwc.modes import Bound, Scope, Scopes, Shared, compiling
from fmwc.vad.attention import Call, Projection, WrittenOut, projections
from fmwc.vad.inference import InferenceNetwork, time_features
from fmwc.vad.layers import kind_of, kind_of_forward
from fmwc.vad.passes import Pass

__all__ = ["NoiseModel", "NoisyLayer", "choose_layers"]


class _State:
    """What runs: a pass, the time features of its batch, and the sample each row belongs to; or θ² alone."""

    def __init__(
        self,
        current: Pass | None = None,
        features: Tensor | None = None,
        owners: Mapping[int, Tensor] = MappingProxyType({}),  # by their number of rows
        squares: Mapping[str, Tensor] = MappingProxyType({}),  # by layer
        twins: Mapping[int, tuple[Tensor, Tensor]] | None = None,  # by their number of rows
    ) -> None:
        self.current, self.features, self.owners, self.squares = current, features, owners, squares
        self.twins = twins
        self.differentiable = torch.is_grad_enabled()  # whether the pass began where derivatives are kept
        self.over = False


_IDLE = _State()
_PASSES: ContextVar[Mapping[_Running, _State]] = ContextVar("passes", default=MappingProxyType({}))
_STEADY: ContextVar[Mapping[_Running, _State]] = ContextVar("steady", default=MappingProxyType({}))


class _Running(threading.local):
    """What the hooks of one noise model share: the key by which they find what runs in the current context.

    torch.compile cannot trace context variables; what it traces is kept in this object, which is local to the thread.
    """

    def __init__(self) -> None:  # once per thread
        self.kept = 0  # how many times the hooks are kept in by this thread
        self.traced: _State | None = None

    def __reduce__(self) -> Any:
        return _Running, ()  # a copy is another key

    @property
    def state(self) -> _State:
        """The pass that runs in this context, or one that does nothing."""
        if self.traced is not None or torch.compiler.is_dynamo_compiling():
            return self.traced or _IDLE
        return self._find(_PASSES)

    @property
    def squares(self) -> Mapping[str, Tensor]:
        """θ² by layer, where the weights are constant."""
        return _IDLE.squares if torch.compiler.is_dynamo_compiling() else self._find(_STEADY).squares

    def _find(self, variable: ContextVar[Mapping[_Running, _State]]) -> _State:
        found = variable.get().get(self, _IDLE)
        return _IDLE if found.over else found


class _Within(Bound):
    """A state that is found in this context until it is over; also in copies of the context, which may outlive it."""

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


class NoisyLayer(nn.Module):
    """Creates the noise of one layer, ω ~ N(θ, α θ²) with α from the layer's input and the time (eq:vad).

    It holds the inference network only; the layer itself stays where its author put it.
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
        self.kind = kind_of_forward(name, layer)
        self.running = running
        self.inference = InferenceNetwork(getattr(layer, self.kind.channels), width, initial_log_alpha, generator)

    def log_alpha(self, h: Tensor) -> Tensor:
        """log α per input channel, shaped to multiply `h`. Spatial inputs are pooled, so α is shared over space."""
        features = self.running.state.features
        assert features is not None
        if self.kind.spatial:
            pooled = h.mean(tuple(range(-self.kind.spatial, 0)))
            log_alpha = self.inference(pooled, _rows(features, pooled))
            return log_alpha[(..., *[None] * self.kind.spatial)]
        return self.inference(h, _rows(features, h, self.owner(h)))

    def owner(self, h: Tensor) -> Tensor | None:
        """The sample each row of the layer's input belongs to, where the network says so (:meth:`Field.run`)."""
        return self.running.state.owners.get(h.shape[0])

    def output_var(self, layer: Any, h: Tensor, log_alpha: Tensor) -> Tensor:
        """θ²(α h²): the variance the noise adds to the layer's output. Exact for a known input."""
        return self.kind.apply(layer, log_alpha.exp() * h.square(), self._square(layer))

    def _square(self, layer: Any) -> Tensor:
        square = self.running.squares.get(self.name)
        return self.kind.weight(layer).square() if square is None else square

    @property
    def samples(self) -> int:
        """The number of samples in the pass that runs."""
        features = self.running.state.features
        assert features is not None
        return len(features)

    def twins(self, h: Tensor) -> tuple[Tensor, Tensor] | None:
        """Where a network evaluates each sample twice with the same weights (:class:`fmwc.adapters.Guided`): for each
        row of the layer's input, the row of the other evaluation, and whether it is the second one. Else `None`."""
        state = self.running.state
        if state.twins is None:
            return None
        if (known := state.twins.get(h.shape[0])) is not None:
            return known
        if h.shape[0] % (2 * self.samples):
            raise ShapeError(f"layer '{self.name}' saw {h.shape[0]} rows for {self.samples} samples, each twice")
        rows = torch.arange(h.shape[0], device=h.device).view(self.samples, 2, -1)
        return rows.flip(1).flatten(), (rows > rows.flip(1)).flatten()

    def output_cov(self, layer: Any, h: Tensor, log_alpha: Tensor) -> Tensor | None:
        """θ²(√α h · √α' h'): the covariance of each output with that of its twin; `None` where there are none."""
        if (twins := self.twins(h)) is None:
            return None
        scaled = (0.5 * log_alpha).exp() * h
        return self.kind.apply(layer, scaled * scaled[twins[0]], self._square(layer))

    def joined(self, layer: Any, h: Tensor, log_alpha: Tensor, std: Tensor, noise: Tensor) -> Tensor:
        """Standard normal numbers, one per output, as one draw of the weights gives them to twins: the second of two
        rows has the first's numbers as far as their inputs are alike."""
        if (cov := self.output_cov(layer, h, log_alpha)) is None:
            return noise
        twins = self.twins(h)
        assert twins is not None
        other, second = twins
        alike = (cov / (std * std[other]).clamp_min(torch.finfo(std.dtype).tiny)).clamp(-1, 1)
        rest = (1 - alike.square()).clamp_min(torch.finfo(std.dtype).eps).sqrt()  # the floor keeps its slope finite
        return torch.where(second[(..., *[None] * (noise.ndim - 1))], alike * noise[other] + rest * noise, noise)

    def whole(self, layer: Any, h: Tensor, log_alpha: Tensor, noise: Tensor) -> Tensor:  # noise: (B, *weight)
        """(θ √α ε) h: what one draw of the weights per sample adds to every row of the sample. Exact."""
        scaled, place = _by_sample((0.5 * log_alpha).exp() * h, self.samples, self.owner(h))
        weight = self.kind.weight(layer)
        found = torch.func.vmap(lambda h, e: self.kind.apply(layer, h, weight * e))(scaled, noise).flatten(0, 1)
        return found if place is None else torch.cat([found, torch.zeros_like(found[:1])])[place]

    def weight_slope(
        self, layer: Any, scaled: Tensor, gradient: Tensor, count: int, owner: Tensor | None
    ) -> Tensor:  # -> (B, *weight)
        """∂/∂ε of what gradients at the layer's outputs are of, over θ: a sum over each sample's rows and positions.

        Arguments:
            scaled: √α h.
        """
        weight = self.kind.weight(layer)

        def slope(h: Tensor, g: Tensor) -> Tensor:
            return torch.func.vjp(lambda w: self.kind.apply(layer, h, w), weight)[1](g)[0]

        return torch.func.vmap(slope)(_by_sample(scaled, count, owner)[0], _by_sample(gradient, count, owner)[0])

    def before(self, layer: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        current = self.running.state.current
        if current is None:
            return None
        if not args:
            raise UsageError(
                f"layer '{self.name}' is called by keyword; call it as layer(x), or exclude it from the noise"
            )
        return (current.before(self, layer, args[0]), *args[1:])

    def after(self, layer: Any, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        current = self.running.state.current
        return None if current is None else self._noised(current, layer, args[0], output)

    def calling(self, layer: Any) -> Call:
        """The layer as a function that does with its input and output what its hooks would."""

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
                f"layer '{self.name}' runs without derivatives (under no_grad, or a reentrant checkpoint), so its "
                "noise cannot be followed; say use_reentrant=False, or exclude the layer from the noise"
            )
        return current.after(self, layer, h, y)


def _by_sample(value: Tensor, count: int, owner: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Rows of a layer as `(B, k, …)`, and the place of each row among those B·k; `None` where they are in order.

    Samples that have fewer rows than others are filled up with zeros; the place of a row of no sample is the last.
    """
    if owner is None:
        return value.reshape(count, -1, *value.shape[1:]), None
    if compiling():  # the largest number of rows would be written down as it is now
        raise UsageError(
            "shared noise of samples with different numbers of rows is not compiled; read the field itself"
        )
    rank = _rank(owner, count)
    most = int(torch.where(owner < count, rank, 0).max()) + 1
    place = torch.where(owner < count, owner * most + rank, count * most)
    filled = value.new_zeros(count * most + 1, *value.shape[1:]).index_copy(0, place, value)
    return filled[:-1].view(count, most, *value.shape[1:]), place


def _rank(owner: Tensor, count: int) -> Tensor:  # (R,) -> (R,)
    """For each row, how many rows of the same sample come before it."""
    order, start = _starts(owner, count)
    rank = torch.arange(len(owner), device=owner.device) - start[owner[order]]
    return torch.empty_like(rank).index_copy(0, order, rank)


def _starts(owner: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The order of rows by sample, and where each sample begins in it."""
    number = owner.new_zeros(count + 1).index_add(0, owner, torch.ones_like(owner))
    return owner.argsort(stable=True), number.cumsum(0) - number


def _twins(owner: Tensor, evaluations: int) -> tuple[Tensor, Tensor]:  # owner: of 2B evaluations
    """For each row, that of the sample's other evaluation, and whether it is of the second."""
    number = owner.bincount(minlength=evaluations)[:evaluations]
    if not torch.equal(number[::2], number[1::2]):
        raise ShapeError("the two evaluations of a guided sample have different numbers of rows; they must have equal")
    order, start = _starts(owner, evaluations)
    there = owner < evaluations
    other = torch.where(there, owner ^ 1, owner)
    return order[start[other] + _rank(owner, evaluations)], there & (owner % 2 == 1)


def _rows(features: Tensor, h: Tensor, owner: Tensor | None = None) -> Tensor:  # (B, F) -> (*h.shape[:-1], F)
    """Time features for every row of a layer's input, whose rows may be several a sample."""
    if owner is not None:
        features = features[owner.clamp_max(len(features) - 1)]  # a row of no sample may have any time
        return features[(slice(None), *[None] * (h.ndim - 2))].expand(*h.shape[:-1], -1)
    each, rest = divmod(h.shape[0], features.shape[0])
    if rest:
        raise ShapeError(
            f"a layer saw {h.shape[0]} rows for {features.shape[0]} times: give one t a sample, put samples first "
            "(batch_first=True), say whose rows they are with a method rows, or exclude the layer"
        )
    if each > 1:
        features = features.repeat_interleave(each, 0)
    return features[(slice(None), *[None] * (h.ndim - 2))].expand(*h.shape[:-1], -1)


def choose_layers(network: nn.Module, include: Sequence[str], exclude: Sequence[str]) -> dict[str, Any]:
    """The layers that can carry noise and whose dotted name matches a glob pattern.

    A layer that is used in two places goes by either name, and is given by its first.
    """
    able: dict[str, Any] = {}
    parts: dict[nn.Module, dict[str, Projection]] = {}
    for name, module in network.named_modules(remove_duplicate=False):
        if isinstance(module, nn.MultiheadAttention):
            own = parts.setdefault(module, projections(module))
            able |= {f"{name}.{part}".lstrip("."): layer for part, layer in own.items()}
        elif kind_of(module) is not None:
            able.setdefault(name, module)  # an attention's out_proj is in the table already
    if not able:
        kinds = sorted(
            {type(m).__name__ for m in network.modules() if next(m.parameters(recurse=False), None) is not None}
        )
        held = f"; its weights are held by {', '.join(kinds)}" if kinds else ""
        raise UsageError(
            f"the network has no linear or convolution layer, so there is nothing to carry the noise{held}: write one "
            "of them as nn.Linear or nn.Conv, or give its kind a row in fmwc.vad.KINDS"
        )
    if not include:
        raise UsageError(f"include names no layer; the layers are: {', '.join(able)}")
    for pattern in (*include, *exclude):
        if not any(fnmatchcase(name, pattern) for name in able):
            raise UsageError(f"pattern '{pattern}' matches no layer; the layers are: {', '.join(able)}")
    wanted = {layer for name, layer in able.items() if any(fnmatchcase(name, p) for p in include)}
    wanted -= {layer for name, layer in able.items() if any(fnmatchcase(name, p) for p in exclude)}
    if not wanted:
        raise UsageError(f"exclude leaves no layer to carry noise; the layers are: {', '.join(able)}")
    first = {layer: name for name, layer in reversed(able.items()) if layer in wanted}
    chosen = {name: layer for name, layer in able.items() if first.get(layer) == name}
    for name, layer in chosen.items():
        if is_lazy(layer.weight):
            raise UsageError(f"layer '{name}' does not know its size yet; run the network once on data, then attach")
    return chosen


class NoiseModel(nn.Module):
    """Creates the noise of a network. No layer is replaced and no `forward` is patched.

    Arguments:
        network: Any torch module.
        include, exclude: Glob patterns over the dotted names of its linear and convolution layers, and of the
            projections of `nn.MultiheadAttention`: `q_proj`, `k_proj`, `v_proj`, `out_proj`.
        width: The width of the inference networks.
        initial_log_alpha: log α before training.
        generator: Draws the first weights of the inference networks; torch's own if `None`.
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
        parameter = next(iter(chosen.values())).weight
        self.to(device=parameter.device, dtype=parameter.dtype)
        # The user's own layers, which are not this module's: a tuple keeps them from being registered.
        self._places: tuple[tuple[Any, Any], ...] = tuple(zip(self.layers, chosen.values(), strict=True))
        self._attentions = tuple(m for m in network.modules() if isinstance(m, nn.MultiheadAttention))
        self._network: tuple[nn.Module, ...] = (network,)

    @property
    def fused(self) -> bool:
        """Whether torch has kernels for whole parts of the network, which it uses where no pass runs."""
        return bool(self._attentions)

    @property
    def attached(self) -> bool:
        """Whether there is a network to run a pass on."""
        return bool(self._places)

    @property
    def kept(self) -> bool:
        """Whether the hooks are kept in by this thread (:meth:`hooked`)."""
        return self.running.kept > 0

    def remove(self) -> None:
        """Lets go of the network: no pass can run on it any more."""
        self._places, self._attentions, self._network = (), (), ()

    def check_layers(self, network: nn.Module | None = None) -> None:
        """Raise where a layer that carries noise is no longer in the network under its name.

        A layer that was replaced after the noise was attached would run without noise, and its variance be missing.

        Arguments:
            network: The network that runs, where it may be another one; it may wrap the one noise was attached to.
        """
        for root in self._network:
            if network is not None and not any(module is root for module in network.modules()):
                raise UsageError("the field's network was replaced after attach; attach noise to the new one")
            for noisy, layer in self._places:
                if (now := _at(root, noisy.name, layer)) is not None:
                    raise UsageError(
                        f"layer '{noisy.name}' was {now} after attach, so its noise would be missing; attach the "
                        "network again: fmwc.attach(field.detach())"
                    )

    def squares(self) -> dict[str, Tensor]:
        """θ² of every noisy layer, as the weights are now."""
        self.check_layers()
        with torch.inference_mode(False), torch.no_grad():
            return {noisy.name: noisy.kind.weight(layer).square() for noisy, layer in self._places}

    def steady(self, squares: Mapping[str, Tensor] | None = None) -> Scope:
        """A scope in which the weights are constant, as while sampling: θ² is computed once, here, or is what is given.

        It ends with the run that opened it, so that no θ² outlives its weights: an optimiser's captured graph changes
        weights without a trace that a longer memory could be checked by.
        """
        return _Within(_STEADY, self.running, _State(squares=self.squares() if squares is None else squares))

    def hooked(self) -> Scope:
        """A scope that keeps the hooks in while many passes run in this thread; around a loop whose body is compiled,
        which cannot put them in."""
        return Scopes(_HOOKS.holding([self]), _Kept(self.running))

    def during(
        self, current: Pass, t: Tensor, owners: Sequence[Tensor] = (), doubled: bool = False
    ) -> Scope:  # t: (B,)
        """A scope in which a pass runs: the hooks act, in this thread and task. A pass inside a pass replaces it.

        Arguments:
            owners: For each kind of rows that layers may see, the sample each row belongs to; `B` for none. A layer's
                rows are recognised by their number, so two kinds must not have the same.
            doubled: The network evaluates sample i twice, as 2i and 2i + 1, with the same weights; owners are of those.
        """
        inside: Scope = _Within(_PASSES, self.running, self._state(current, t, owners, doubled))
        if self._attentions and self.running.state.current is None:
            inside = Scopes(WrittenOut(self._calls()).scope(), inside)
        return inside if self.kept else Scopes(_HOOKS.holding([self]), inside)

    @contextmanager
    def tracing(self, current: Pass, t: Tensor, owners: Sequence[Tensor] = (), doubled: bool = False) -> Iterator[None]:
        """The same where torch.compile traces it, with the hooks kept in."""
        running, outer = self.running, self.running.traced
        running.traced = self._state(current, t, owners, doubled)
        try:
            if self._attentions and outer is None:
                with WrittenOut(self._calls()):
                    yield
            else:
                yield
        finally:
            running.traced = outer

    def _state(self, current: Pass, t: Tensor, owners: Sequence[Tensor], doubled: bool) -> _State:
        by_number, count = {len(owner): owner for owner in owners}, len(t) * (2 if doubled else 1)
        if len(by_number) < len(owners):
            raise ShapeError(f"two kinds of rows have the same number, {sorted(map(len, owners))}; pad one of them")
        if (same := by_number.get(count)) is not None and not torch.equal(same.cpu(), torch.arange(count)):
            raise ShapeError(f"a kind of rows has as many as there are samples, {count}; pad it, to tell them apart")
        features = time_features(t.to(next(self.layers.parameters()).dtype))
        if not doubled:
            return _State(current, features, by_number)
        twins = {number: _twins(owner, count) for number, owner in by_number.items()}
        return _State(current, features, {number: o // 2 for number, o in by_number.items()}, twins=twins)

    def _calls(self) -> dict[nn.MultiheadAttention, dict[str, Call]]:
        """How the projections of each attention that carry noise are called."""
        calls: dict[nn.MultiheadAttention, dict[str, Call]] = {m: {} for m in self._attentions}
        for noisy, layer in self._places:
            if isinstance(layer, Projection):
                calls[layer.attention][layer.which] = noisy.calling(layer)
        return calls

    def put_hooks(self) -> None:
        """Put in the hooks that are missing, nearer to the layer than any that its author has put there."""
        for noisy, layer in self._hooked_places():
            if not _own(layer._forward_pre_hooks, noisy):
                layer.register_forward_pre_hook(noisy.before)
            if not _own(layer._forward_hooks, noisy):
                layer.register_forward_hook(noisy.after, prepend=True)

    def take_hooks(self) -> None:
        """Take out every hook of this noise model, whoever put it there."""
        for noisy, layer in self._hooked_places():
            for hooks in (layer._forward_pre_hooks, layer._forward_hooks):
                for key in _own(hooks, noisy):
                    hooks.pop(key, None)

    def _hooked_places(self) -> list[tuple[NoisyLayer, Any]]:
        return [(noisy, layer) for noisy, layer in self._places if not isinstance(layer, Projection)]


def _at(network: nn.Module, name: str, layer: Any) -> str | None:
    """What became of a layer in words, or `None` where it is still in its place."""
    expected = layer.attention if isinstance(layer, Projection) else layer
    path = name.split(".")[: -1 if isinstance(layer, Projection) else None]
    found: Any = network
    for part in filter(None, path):
        found = getattr(found, part, None)
    if found is expected:
        return None
    return "removed" if found is None else f"replaced by another {type(found).__name__}"


def _own(hooks: Mapping[int, Any], noisy: NoisyLayer) -> list[int]:
    """The keys of a layer's hooks that are its noise's."""
    return [key for key, hook in list(hooks.items()) if getattr(hook, "__self__", None) is noisy]


# Found on the layers themselves rather than by handles, so that an interrupt cannot lose one.
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
