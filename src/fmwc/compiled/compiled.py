"""A field compiled for sampling: its velocity and its readings are graphs of tensor operations, with no Python inside.

The reference's own code is run once and what it does is written down (`make_fx`), the pulling back of probes included;
then torch compiles that, and on a GPU it is captured as a CUDA graph. dynamo, which reads Python, would have to
understand hooks, gradient edges and moments that travel as tensors; written down below all of these, every estimator
is one graph beside the velocity, and computes what it computes uncompiled: to the rounding of fused operations, and
where half precision is fast, to that of products for the variance alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from fmwc.compiled import graphs
from fmwc.errors import UsageError
from fmwc.estimators import Estimator, Linearised
from fmwc.field import Field
from fmwc.flow import Space
from fmwc.modes import Scope, Scopes, as_compiled, evaluating
from fmwc.moments import Moments
from fmwc.randomness import Given, Noting, Randomness

__all__ = ["Compiled"]

WARM = 3  # runs before a CUDA graph is captured, so that libraries have their workspaces

Run = Callable[[list[Tensor]], Any]


def _on_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _is_fast_in_half(device: torch.device) -> bool:
    """Whether it has products of bfloat16: a GPU, and the processors that say so."""
    own: Callable[[], bool] = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    return device.type == "cuda" or (device.type == "cpu" and own())


class Compiled(nn.Module):
    """Creates a compiled field, to sample as the field itself: `sample(Compiled(field), 1000)`.

    Hold on to it: what was compiled is kept here. Each batch size is compiled when it is first seen, so take a number
    of samples that the batch divides. Weights may change between runs. Samples are those of the field to rounding, and
    no longer bit for bit the same with and without confidence, because a reading is fused otherwise than a velocity.
    Threads that share it take turns.

    Arguments:
        field: A field whose network does the same whatever the values of its inputs. One whose rows depend on them has
            a method `reserve(**cond)` beside `rows`, which says what room it will take.
        backend: One of torch.compile's; `eager` runs the graph as it is written down, and needs no C++ compiler.
        say: Told what is compiled, and how long it took.
        cuda_graph: Whether to capture what was compiled as a CUDA graph on a GPU. The network must then run without
            synchronising with the CPU and without memory of its own.
        half: Whether products that the variance alone depends on are taken in half precision (bfloat16): if nothing is
            said, where that is fast. The mean is computed as without, and so are samples.
    """

    def __init__(
        self,
        field: Field,
        backend: str = "inductor",
        say: Callable[[str], None] = _on_stderr,
        half: bool | None = None,
        *,
        cuda_graph: bool = False,
    ) -> None:
        super().__init__()
        self.field, self.backend, self.say, self._half = field, backend, say, half
        self.cuda_graph = cuda_graph
        self._made: dict[tuple[Hashable, ...], Run] = {}
        self._draws: dict[Hashable, list[tuple[str, Tensor]]] = {}
        self._squares: dict[str, Tensor] = {}
        self._weights: list[int] = []
        self._cond: tuple[Any, ...] | None = None
        self._room: Hashable = None
        self._rooms: dict[Any, Any] = {}
        self._turn = _Turn()

    @property
    def halves(self) -> bool:
        """Whether readings are in half precision."""
        return _is_fast_in_half(self.device) if self._half is None else self._half

    @property
    def space(self) -> Space | None:
        return self.field.space

    @property
    def device(self) -> torch.device:
        return self.field.device

    @property
    def reference(self) -> Any:
        return self.field.reference

    @property
    def schedule(self) -> Any:
        return self.field.schedule

    @schedule.setter
    def schedule(self, schedule: Any) -> None:
        self.field.schedule = schedule

    @property
    def fused(self) -> bool:
        return self.field.fused

    @property
    def run(self) -> Callable[..., Any]:
        return self.field.run  # transport differentiates through a step: uncompiled

    @property
    def draw(self) -> Callable[..., Any]:
        return self.field.draw

    @property
    def network(self) -> nn.Module:
        return self.field.network

    def check_finite(self) -> None:
        self.field.check_finite()

    @property
    def row_order_checked(self) -> bool:
        return self.field.row_order_checked

    def constant_weights(self) -> Scope:
        """Bring θ² up to date, in the memory that graphs read it from; weights that moved need new graphs."""
        with self._turn.lock:
            self._bring_up_to_date()
        return Scope()

    def _bring_up_to_date(self) -> None:
        weights = [p.data_ptr() for p in (*self.field.parameters(), *self.field.buffers())]
        if weights != self._weights:
            self._made.clear()
            self._weights, self._squares = weights, self.field.noise.squared_weights()
        else:
            for name, square in self.field.noise.squared_weights().items():
                self._squares[name].copy_(square)

    def forward(self, x: Any, t: Tensor, **cond: Any) -> Any:
        """The velocity, without noise."""

        def velocity(x: Any, t: Tensor, cond: dict[str, Any]) -> Any:
            return self.field(x, t, **cond)

        with self._turn.lock:
            return self._call("the velocity", velocity, (x, t, cond), self._reserved(cond))

    def reader(self, estimator: Estimator) -> Estimator:
        """An estimator's reading of this field, compiled."""
        return _Reading(self, estimator)

    def read(self, estimator: Estimator, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Moments:
        """Velocity and variance in one graph, which takes what both need once; random numbers are drawn outside, the
        same as uncompiled (but for noise of rows, where there are rows in reserve)."""
        with self._turn.lock:
            return self._read(estimator, x, t, cond, randomness)

    def _read(self, estimator: Estimator, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Moments:
        room, kind = self._reserved(cond), (estimator, _shape(x), _shape(cond))
        if (kind, room) in self._draws:
            drawn = [getattr(randomness, method)(like) for method, like in self._draws[kind, room]]
        else:
            noting = Noting(randomness)
            if isinstance(estimator, Linearised) and not self.field.row_order_checked:  # it takes a look at values
                self.field.moments(x, t, estimator, seed=0, cond=cond)
            Scopes(evaluating(self.field), as_compiled()).call(estimator, self.field, x, t, cond, noting)
            drawn, self._draws[kind, room] = noting.drawn, noting.asked

        def reading(x: Any, t: Tensor, cond: dict[str, Any], drawn: list[Tensor], squares: dict[str, Tensor]) -> Any:
            steady = self.field.noise.constant_weights(squares)
            mean, var = steady.call(estimator, self.field, x, t, cond, Given(drawn))
            return (mean if getattr(estimator, "plain_mean", False) else self.field(x, t, **cond)), var

        half = self.halves and getattr(estimator, "rounds", False)
        given = (x, t, cond, drawn, self._squares)
        return Moments(*self._call(f"a reading by {estimator}", reading, given, room, half))

    def _reserved(self, cond: dict[str, Any]) -> Hashable:
        """The room that rows take, asked once a batch: it waits for the device."""
        given = tuple(cond.values())
        if self._cond is None or len(given) != len(self._cond) or any(a is not b for a, b in zip(given, self._cond)):  # noqa: B905
            reserve = getattr(self.field.network, "reserve", None)
            room = _Rooms(self.field.network, self._rooms).call(reserve, **cond) if reserve else None
            self._cond, self._room = given, room
        return self._room

    def _call(
        self, what: str, function: Callable[..., Any], args: tuple[Any, ...], room: Hashable, half: bool = False
    ) -> Any:
        # One number expanded to a batch has other strides than a batch of numbers, and graphs go by strides.
        tensors = [leaf.contiguous() for leaf in tree_flatten(args)[0] if isinstance(leaf, Tensor)]
        kind = tensors[0].device.type
        precision = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        key = (what, room, _shape(args), precision)
        if key not in self._made:
            for other in [k for k in self._made if (k[0], k[2:]) == (what, key[2:])]:
                del self._made[other]  # of a room that was too small, and is never asked for again
            rooms = _Rooms(self.field.network, self._rooms)
            self._made[key] = rooms.call(self._make, what, function, args, tensors, half)
        return self._made[key](tensors)

    def _try_without_values(self, x: Any, t: Tensor, cond: dict[str, Any]) -> None:
        """Raises where shapes depend on values, which would be written down as they are for these."""
        with torch.autocast(t.device.type, enabled=False), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            x, t, cond = tree_map_only(Tensor, mode.from_tensor, (x, t, cond))
            self.field(x, t, **cond)

    def _make(
        self, what: str, function: Callable[..., Any], args: tuple[Any, ...], tensors: list[Tensor], half: bool
    ) -> Run:
        from torch._dynamo import lookup_backend  # takes seconds to import

        begin = time.perf_counter()
        self.say(f"compiling {what} for a batch of {len(tensors[0])} …")
        leaves, tree = tree_flatten(args)

        form = []  # of what it gives

        def of_tensors(*tensors: Tensor) -> tuple[Tensor, ...]:
            rest = iter(tensors)
            given = function(*tree_unflatten([next(rest) if isinstance(v, Tensor) else v for v in leaves], tree))
            flat, spec = tree_flatten(given)
            form.append(spec)
            return tuple(flat)

        def written_down() -> Any:
            with torch.no_grad():
                of_tensors(*tensors)  # what is wrong with the input says so here, in its own words
                try:
                    self._try_without_values(*args[:3])
                    return make_fx(of_tensors)(*tensors)
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError as error:
                    reason = str(error).splitlines()[0]
                    raise UsageError(f"this network cannot be compiled; sample the field itself ({reason})") from error

        graph = Scopes(evaluating(self.field), as_compiled()).call(written_down)
        graphs.without_backward(graph.graph)
        graphs.once(graph)
        if half:
            graphs.in_half(graph.graph, len(tree_flatten(args[0])[0]))
        graph.graph.eliminate_dead_code()
        graph.recompile()
        # Not torch.compile, which reads Python again to find this graph in it, and looks at every call whether it may.
        # Shapes of their own kind, even if none is free: without it torch would not look into its cache on disk.
        shapes = TracingContext(FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True))
        with torch.no_grad(), tracing(shapes):
            compiled = lookup_backend(self.backend)(graph, tensors)

        def run(tensors: list[Tensor]) -> Any:
            with torch.no_grad():
                return tree_unflatten(list(compiled(*tensors)), form[0])

        run(tensors)
        made: Run = run
        if self.cuda_graph and tensors[0].is_cuda:
            made = _captured(run, tensors, {id(s) for s in self._squares.values()})
        self.say(f"compiled {what} in {time.perf_counter() - begin:.0f} s")
        return made


@dataclass(frozen=True)
class _Reading:
    """Creates the estimator that reads a compiled field."""

    compiled: Compiled
    estimator: Estimator
    plain_mean = True

    def __call__(self, field: Any, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Moments:
        return self.compiled.read(self.estimator, x, t, cond, randomness)


def _shape(tree: Any) -> Hashable:
    """What two calls must have in common to share a graph."""
    leaves, spec = tree_flatten(tree)
    return spec, tuple((v.shape, v.dtype, v.device) if isinstance(v, Tensor) else v for v in leaves)


class _Turn:
    """A lock that a copy has anew."""

    def __init__(self) -> None:
        self.lock = RLock()

    def __reduce__(self) -> Any:
        return _Turn, ()


class _Rooms(Scope):
    """Gives a network that keeps rooms ours instead: a training that goes by its own must not find them."""

    before: Any = None

    def __init__(self, network: Any, rooms: dict[Any, Any]) -> None:
        self.network, self.static_capacity = network, rooms

    def open(self) -> None:
        self.before = getattr(self.network, "static_capacity", None)
        if self.before is not None:
            self.network.static_capacity = self.static_capacity

    def close(self) -> None:
        if self.before is not None:
            self.network.static_capacity, self.before = self.before, None


def _captured(run: Run, tensors: list[Tensor], stays: set[int]) -> Run:
    """The same as one CUDA graph: inputs are copied to where it reads them, outputs from where it leaves them.

    Arguments:
        stays: The inputs, by their `id`, that are always the same tensors, and read where they are.
    """
    inputs = [t if id(t) in stays else t.clone() for t in tensors]
    moving = [i for i, t in enumerate(tensors) if id(t) not in stays]
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(WARM):
            run(inputs)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run(inputs)
    leaves, tree = tree_flatten(outputs)

    def replay(tensors: list[Tensor]) -> Any:
        for i in moving:
            inputs[i].copy_(tensors[i])
        graph.replay()
        return tree_unflatten([leaf.clone() for leaf in leaves], tree)

    return replay
