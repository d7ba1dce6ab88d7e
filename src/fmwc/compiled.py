"""Compiled sampling: a field's velocity and variance as graphs of tensor operations, without Python.

Experimental: this module uses private parts of torch. Nothing in the library depends on it.

The uncompiled code runs once while `make_fx` records its tensor operations, including the backward passes of probes.
The graph is simplified, compiled by a backend of torch.compile, and optionally captured as a CUDA graph. dynamo, which
traces Python, would have to support hooks, gradient edges and Gaussian tensors. A recorded graph contains none of
them, so each estimator and the velocity become one graph. Results agree with the uncompiled field up to the
rounding of fused operations; with `half`, variances agree up to the rounding of half-precision products.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._functorch.compile_utils import fx_graph_cse
from torch._guards import TracingContext, tracing
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from fmwc.errors import UsageError
from fmwc.estimators import Estimator, Linearised
from fmwc.field import Field
from fmwc.modes import Scope, Scopes, as_compiled, evaluating
from fmwc.moments import Moments
from fmwc.randomness import Randomness, RecordingRandomness, ReplayedRandomness

__all__ = ["Compiled"]

WARM = 3  # runs before a CUDA graph is captured, so that libraries allocate their workspaces

Run = Callable[[list[Tensor]], Any]


def _print_to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _is_fast_in_half(device: torch.device) -> bool:
    """Return whether a device multiplies bfloat16 in hardware: a GPU, or a CPU that reports it."""
    has_bf16: Callable[[], bool] = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    return device.type == "cuda" or (device.type == "cpu" and has_bf16())


def _of_field(name: str) -> Any:
    """Return a property that reads and sets an attribute of the field."""
    return property(lambda self: getattr(self.field, name), lambda self, value: setattr(self.field, name, value))


class Compiled(nn.Module):
    """Compiled field, sampled like the field: `sample(Compiled(field), 1000)`.

    Reuse the object, which holds the compiled graphs. Each batch size is compiled when it first occurs, so choose a
    number of samples that is a multiple of the batch size. Weights may change between runs. Samples agree with those of
    the field up to rounding. They may differ in the last digits with and without confidence, because kernels are fused
    differently. Threads that share the object take turns.

    Arguments:
        field: A field whose network does the same operations for all values of its inputs. If the number of rows
            depends on values, the network needs a method `reserve(**cond)` in addition to `rows`, which returns a
            static capacity.
        backend: A backend of torch.compile; `eager` runs the recorded graph and needs no C++ compiler.
        say: A function that is called with a message when a graph is compiled.
        half: Whether to compute products that affect only the variance in half precision (bfloat16). By default, on
            devices where that is fast. Means and samples do not change.
        cuda_graph: Whether to capture compiled graphs as CUDA graphs on a GPU. The network must then run without
            synchronising with the CPU and without allocating memory outside torch.
    """

    def __init__(
        self,
        field: Field,
        backend: str = "inductor",
        say: Callable[[str], None] = _print_to_stderr,
        half: bool | None = None,
        *,
        cuda_graph: bool = False,
    ) -> None:
        super().__init__()
        self.field, self.backend, self.say, self._half = field, backend, say, half
        self.cuda_graph = cuda_graph
        self._graphs: dict[tuple[Hashable, ...], Run] = {}
        self._draws: dict[Hashable, list[tuple[str, Tensor]]] = {}  # the random numbers of each kind of reading
        self._squares: dict[str, Tensor] = {}
        self._weights: list[int] = []  # addresses
        self._cond: tuple[Any, ...] | None = None
        self._capacity: Hashable = None
        self._capacities: dict[Any, Any] = {}
        self._lock = _Lock()

    space, device, network, fused = map(_of_field, ("space", "device", "network", "fused"))
    reference, schedule, row_order_checked = map(_of_field, ("reference", "schedule", "row_order_checked"))
    # Not compiled, because transport differentiates through a step and draws are rarely repeated.
    run, draw, check_finite, checksum = map(_of_field, ("run", "draw", "check_finite", "checksum"))

    @property
    def halves(self) -> bool:
        """Whether variances are computed in half precision."""
        return _is_fast_in_half(self.device) if self._half is None else self._half

    def constant_weights(self) -> Scope:
        """Update θ² in the memory that graphs read; discard graphs if weights have moved."""
        with self._lock.lock:
            weights = [p.data_ptr() for p in (*self.field.parameters(), *self.field.buffers())]
            squares = self.field.noise.squared_weights()
            if weights != self._weights:
                self._graphs.clear()
                self._weights, self._squares = weights, squares
            else:
                for name, square in squares.items():
                    self._squares[name].copy_(square)
        return Scope()

    def forward(self, x: Any, t: Tensor, **cond: Any) -> Any:
        """Return the velocity without noise."""

        def velocity(x: Any, t: Tensor, cond: dict[str, Any]) -> Any:
            return self.field(x, t, **cond)

        with self._lock.lock:
            return self._call("the velocity", velocity, (x, t, cond), self._reserved(cond))

    def reader(self, estimator: Estimator) -> Estimator:
        """Return a version of an estimator that reads this field with compiled graphs."""
        return _Reading(self, estimator)

    def read(self, estimator: Estimator, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Moments:
        """Compute velocity and variance in one graph.

        Random numbers are drawn outside the graph. They equal those of the uncompiled field unless rows are reserved.
        """
        with self._lock.lock:
            return self._read(estimator, x, t, cond, randomness)

    def _read(self, estimator: Estimator, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Moments:
        capacity = self._reserved(cond)
        kind = estimator, _signature(x), _signature(cond), capacity
        if kind in self._draws:
            drawn = [getattr(randomness, method)(like) for method, like in self._draws[kind]]
        else:
            recording = RecordingRandomness(randomness)
            if isinstance(estimator, Linearised) and not self.field.row_order_checked:  # the check reads values
                self.field.moments(x, t, estimator, seed=0, cond=cond)
            Scopes(evaluating(self.field), as_compiled()).call(estimator, self.field, x, t, cond, recording)
            drawn, self._draws[kind] = recording.drawn, recording.requests

        def reading(x: Any, t: Tensor, cond: dict[str, Any], drawn: list[Tensor], squares: dict[str, Tensor]) -> Any:
            constant = self.field.noise.constant_weights(squares)
            mean, var = constant.call(estimator, self.field, x, t, cond, ReplayedRandomness(drawn))
            return (mean if getattr(estimator, "plain_mean", False) else self.field(x, t, **cond)), var

        half = self.halves and getattr(estimator, "rounds", False)
        args = (x, t, cond, drawn, self._squares)
        return Moments(*self._call(f"a reading by {estimator}", reading, args, capacity, half))

    def _reserved(self, cond: dict[str, Any]) -> Hashable:
        """Return the network's capacity for rows; computed once per batch, because it waits for the device."""
        values = tuple(cond.values())
        if self._cond is None or [*map(id, values)] != [*map(id, self._cond)]:
            reserve = getattr(self.field.network, "reserve", None)
            scope = _Capacities(self.field.network, self._capacities)
            self._capacity = scope.call(reserve, **cond) if reserve else None
            self._cond = values
        return self._capacity

    def _call(
        self, what: str, function: Callable[..., Any], args: tuple[Any, ...], capacity: Hashable, half: bool = False
    ) -> Any:
        # A scalar expanded to a batch has other strides than a batch, and graphs depend on strides.
        tensors = [leaf.contiguous() for leaf in tree_flatten(args)[0] if isinstance(leaf, Tensor)]
        device = tensors[0].device.type
        precision = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        key = (what, capacity, _signature(args), precision)
        if key not in self._graphs:
            for other in [k for k in self._graphs if (k[0], k[2:]) == (what, key[2:])]:
                del self._graphs[other]  # its capacity was too small
            capacities = _Capacities(self.field.network, self._capacities)
            self._graphs[key] = capacities.call(self._compile, what, function, args, tensors, half)
        return self._graphs[key](tensors)

    def _compile(
        self, what: str, function: Callable[..., Any], args: tuple[Any, ...], tensors: list[Tensor], half: bool
    ) -> Run:
        from torch._dynamo import lookup_backend  # takes seconds to import

        begin = time.perf_counter()
        self.say(f"compiling {what} for a batch of {len(tensors[0])} …")
        leaves, tree = tree_flatten(args)
        structure = []  # of the outputs

        def of_tensors(*tensors: Tensor) -> tuple[Tensor, ...]:
            rest = iter(tensors)
            outputs = function(*tree_unflatten([next(rest) if isinstance(v, Tensor) else v for v in leaves], tree))
            flat, spec = tree_flatten(outputs)
            structure.append(spec)
            return tuple(flat)

        def record() -> Any:
            with torch.no_grad():
                of_tensors(*tensors)  # so that invalid inputs raise their usual errors
                try:
                    self._try_without_values(*args[:3])
                    return make_fx(of_tensors)(*tensors)
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError as error:
                    reason = str(error).splitlines()[0]
                    raise UsageError(
                        f"this network cannot be compiled ({reason}); sample the uncompiled field"
                    ) from error

        graph = Scopes(evaluating(self.field), as_compiled()).call(record)
        transpose_backward_convolutions(graph.graph)
        remove_duplicates(graph)
        if half:
            halve_variances(graph.graph, len(tree_flatten(args[0])[0]))
        graph.graph.eliminate_dead_code()
        graph.recompile()
        # Call the backend directly; torch.compile would trace Python again and check guards in every call. torch's
        # disk cache needs a shape environment even if no shape is dynamic.
        context = TracingContext(FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True))
        with torch.no_grad(), tracing(context):
            compiled = lookup_backend(self.backend)(graph, tensors)

        def run(tensors: list[Tensor]) -> Any:
            with torch.no_grad():
                return tree_unflatten(list(compiled(*tensors)), structure[0])

        run(tensors)
        result: Run = run
        if self.cuda_graph and tensors[0].is_cuda:
            result = _captured(run, tensors, {id(s) for s in self._squares.values()})
        self.say(f"compiled {what} in {time.perf_counter() - begin:.0f} s")
        return result

    def _try_without_values(self, x: Any, t: Tensor, cond: dict[str, Any]) -> None:
        """Raise if shapes depend on values, because the graph would be valid for these values only."""
        with torch.autocast(t.device.type, enabled=False), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            x, t, cond = tree_map_only(Tensor, mode.from_tensor, (x, t, cond))
            self.field(x, t, **cond)


@dataclass(frozen=True)
class _Reading:
    """Estimator that reads a compiled field."""

    compiled: Compiled
    estimator: Estimator
    plain_mean = True

    def __call__(self, field: Any, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Moments:
        return self.compiled.read(self.estimator, x, t, cond, randomness)


def _signature(tree: Any) -> Hashable:
    """Return a key that two calls must share to use the same graph."""
    leaves, spec = tree_flatten(tree)
    return spec, tuple((v.shape, v.dtype, v.device) if isinstance(v, Tensor) else v for v in leaves)


class _Lock:
    """Lock of which every copy of the object has a new one."""

    def __init__(self) -> None:
        self.lock = RLock()

    def __reduce__(self) -> Any:
        return _Lock, ()


class _Capacities(Scope):
    """Scope in which a network uses the static capacities of the compiled field, to hide them from training."""

    before: Any = None

    def __init__(self, network: Any, capacities: dict[Any, Any]) -> None:
        self.network, self.capacities = network, capacities

    def open(self) -> None:
        self.before = getattr(self.network, "static_capacity", None)
        if self.before is not None:
            self.network.static_capacity = self.capacities

    def close(self) -> None:
        if self.before is not None:
            self.network.static_capacity, self.before = self.before, None


def _captured(run: Run, tensors: list[Tensor], fixed: set[int]) -> Run:
    """Capture a function as one CUDA graph. Inputs are copied into its memory, and outputs out of it.

    Arguments:
        fixed: The `id` of each input that is the same tensor in every call; these are not copied.
    """
    inputs = [t if id(t) in fixed else t.clone() for t in tensors]
    moving = [i for i, t in enumerate(tensors) if id(t) not in fixed]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM):
            run(inputs)
    torch.cuda.current_stream().wait_stream(stream)
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


# ---- passes over a recorded graph ------------------------------------------------------------------------------------

SAME = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)  # operations that return their input
THIN = 16  # summed terms below which half precision makes a product slower on a GPU


def transpose_backward_convolutions(graph: torch.fx.Graph) -> None:
    """Replace gradients of convolutions with respect to their input by transposed convolutions.

    torch's compiler optimises the memory layout of transposed convolutions. It does not optimise
    `convolution_backward`, and copies the convolution's input to another layout although only its shape is used.
    """
    backward, forward = torch.ops.aten.convolution_backward.default, torch.ops.aten.convolution.default
    for node in graph.find_nodes(op="call_function", target=backward):
        g, x, weight, _, stride, padding, dilation, transposed, _, groups, mask = node.args
        sides, precisions = x.meta["val"].ndim - 2, {n.meta["val"].dtype for n in (g, x, weight)}
        usual = all(len(option) == sides for option in (stride, padding, dilation)) and len(precisions) == 1
        if transposed or not usual or list(mask) != [True, False, False]:
            continue
        before, after, kernel = (n.meta["val"].shape[2:] for n in (x, g, weight))
        sizes = zip(before, after, kernel, stride, padding, dilation, strict=True)
        rest = [n - ((m - 1) * s - 2 * p + d * (k - 1) + 1) for n, m, k, s, p, d in sizes]  # rows skipped by the stride
        with graph.inserting_before(node):
            gradient = graph.call_function(forward, (g, weight, None, stride, padding, dilation, True, rest, groups))
        gradient.meta["val"] = x.meta["val"]  # has the same shape; another probe may be pulled back through it
        for first in list(node.users):  # the first of three outputs, and the only one used
            first.replace_all_uses_with(gradient)
            graph.erase_node(first)
        graph.erase_node(node)


def remove_duplicates(module: torch.fx.GraphModule) -> None:
    """Compute equal terms once, such as those that the velocity and the mean of a reading share.

    Graphs with in-place writes or random numbers are not changed, because equal operations may differ there.
    """
    operations = [node.target for node in module.graph.nodes if isinstance(node.target, OpOverload)]
    if any(_writes(op) or torch.Tag.nondeterministic_seeded in op.tags for op in operations):
        return
    for target in SAME:
        for node in module.graph.find_nodes(op="call_function", target=target):
            node.replace_all_uses_with(node.args[0])
    weights: dict[Any, torch.fx.Node] = {}
    for node in module.graph.find_nodes(op="get_attr"):
        node.replace_all_uses_with(weights.setdefault(node.target, node))
    module.graph.eliminate_dead_code()
    module.graph = fx_graph_cse(module.graph)


def _writes(target: Any) -> bool:
    return isinstance(target, OpOverload) and target._schema.is_mutable


class Product(NamedTuple):
    """Product of two factors, the term that is added to it, and the number of terms that it sums."""

    target: Any
    args: tuple[Any, ...]
    added: torch.fx.Node | None = None
    terms: int = 0

    @classmethod
    def of(cls, node: torch.fx.Node) -> Product | None:
        """Return the parts of a node; `None` if it is not a product."""
        aten: Any = torch.ops.aten
        args: Any = node.args
        if node.target is aten.convolution.default:
            x, weight, bias, *rest = args
            terms = weight.meta["val"].numel() // node.meta["val"].shape[1]
            return cls(node.target, (x, weight, None, *rest), bias, terms)
        if node.target in (aten.mm.default, aten.bmm.default):
            return cls(node.target, args, None, args[1].meta["val"].shape[-2])
        if node.target in (aten.addmm.default, aten.baddbmm.default) and not node.kwargs:
            alone = aten.mm.default if node.target is aten.addmm.default else aten.bmm.default
            return cls(alone, args[1:], args[0], args[2].meta["val"].shape[-2])
        return None


def halve_variances(graph: torch.fx.Graph, means: int) -> None:
    """Compute products that the mean does not depend on in bfloat16.

    Both factors and the product are in half precision; the product is converted back before anything is added to it.

    Arguments:
        means: The number of leading outputs that hold the mean. Values that are written in place count as part of it.
    """
    aten: Any = torch.ops.aten
    outputs: Any = graph.output_node().args[0]
    of_mean = _ancestors([*outputs[:means], *(node for node in graph.nodes if _writes(node.target))])
    for node in [node for node in graph.nodes if node not in of_mean]:
        product, value = Product.of(node), node.meta.get("val")
        if product is None or value.dtype != torch.float32 or product.terms < THIN:
            continue

        def call(target: Any, *args: Any, like: Any = value, **options: Any) -> torch.fx.Node:
            new = graph.call_function(target, args, options)
            new.meta["val"] = like
            return new

        def cast(value: Any, dtype: torch.dtype) -> Any:
            is_node = isinstance(value, torch.fx.Node)
            return call(aten._to_copy.default, value, like=value.meta["val"], dtype=dtype) if is_node else value

        with graph.inserting_before(node):
            half = call(product.target, *(cast(arg, torch.bfloat16) for arg in product.args))
            whole = cast(half, value.dtype)
            if (added := product.added) is not None:
                if product.target is aten.convolution.default:  # one number per channel
                    added = call(aten.view.default, added, [-1, *[1] * (value.ndim - 2)], like=added.meta["val"])
                whole = call(aten.add.Tensor, whole, added)
        node.replace_all_uses_with(whole)
        graph.erase_node(node)


def _ancestors(nodes: Sequence[torch.fx.Node]) -> set[torch.fx.Node]:
    """Return nodes and everything that they depend on."""
    ancestors: set[torch.fx.Node] = set()
    rest = list(nodes)
    while rest:
        node = rest.pop()
        if node not in ancestors:
            ancestors.add(node)
            rest += node.all_input_nodes
    return ancestors
