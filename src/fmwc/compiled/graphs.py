"""What is done to a graph before torch compiles it: convolutions on the way back, what is computed twice, precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch._functorch.compile_utils import fx_graph_cse
from torch._ops import OpOverload

__all__ = ["Product", "in_half", "once", "without_backward"]

SAME = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)  # as what they are given
THIN = 16  # terms that a product sums; of fewer, a GPU is slower in half precision


def without_backward(graph: torch.fx.Graph) -> None:
    """Writes convolutions that are pulled back to their input as the transposed convolutions they are.

    Those torch's compiler lays out in memory as it does the others. `convolution_backward` it calls as it is, with what
    the convolution was given copied to another layout, for the sake of its shape.
    """
    backward, forward = torch.ops.aten.convolution_backward.default, torch.ops.aten.convolution.default
    for node in graph.find_nodes(op="call_function", target=backward):
        g, x, weight, _, stride, padding, dilation, transposed, _, groups, mask = node.args
        sides, precisions = x.meta["val"].ndim - 2, {n.meta["val"].dtype for n in (g, x, weight)}
        usual = all(len(given) == sides for given in (stride, padding, dilation)) and len(precisions) == 1
        if transposed or not usual or list(mask) != [True, False, False]:
            continue
        given, left, kernel = (n.meta["val"].shape[2:] for n in (x, g, weight))
        sizes = zip(given, left, kernel, stride, padding, dilation, strict=True)
        # Rows that a stride has left out.
        rest = [n - ((m - 1) * s - 2 * p + d * (k - 1) + 1) for n, m, k, s, p, d in sizes]
        with graph.inserting_before(node):
            pulled = graph.call_function(forward, (g, weight, None, stride, padding, dilation, True, rest, groups))
        pulled.meta["val"] = x.meta["val"]  # of the same shape; another may be pulled back through it
        for first in list(node.users):  # of three outputs, of which it has one
            first.replace_all_uses_with(pulled)
            graph.erase_node(first)
        graph.erase_node(node)


def once(module: torch.fx.GraphModule) -> None:
    """Leaves one of what is computed twice, as a velocity and a reading's own mean may be. Where something is written
    in place or drawn, two that look the same need not be, and all is left as it is."""
    called = module.graph.find_nodes
    operations = [node.target for node in module.graph.nodes if isinstance(node.target, OpOverload)]
    if any(_writes(op) or torch.Tag.nondeterministic_seeded in op.tags for op in operations):
        return
    for node in (node for same in SAME for node in called(op="call_function", target=same)):
        node.replace_all_uses_with(node.args[0])
    weights: dict[Any, torch.fx.Node] = {}
    for node in called(op="get_attr"):
        node.replace_all_uses_with(weights.setdefault(node.target, node))
    module.graph.eliminate_dead_code()
    module.graph = fx_graph_cse(module.graph)


def _writes(target: Any) -> bool:
    return isinstance(target, OpOverload) and target._schema.is_mutable


class Product(NamedTuple):
    """A product of two factors, and what is added to it."""

    target: Any
    args: tuple[Any, ...]
    added: torch.fx.Node | None = None
    terms: int = 0  # that it sums

    @classmethod
    def of(cls, node: torch.fx.Node) -> Product | None:
        """A node told apart; none if it is no product."""
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


def in_half(graph: torch.fx.Graph, means: int) -> None:
    """Takes products that the mean does not depend on in bfloat16: both factors, and what they come to, which is given
    back as it was before anything is added to it.

    Arguments:
        means: How many of the graph's first outputs are the mean. What is written in place may be a part of it.
    """
    aten: Any = torch.ops.aten
    outputs: Any = graph.output_node().args[0]
    of_mean = _ancestors([*outputs[:means], *(node for node in graph.nodes if _writes(node.target))])
    for node in [node for node in graph.nodes if node not in of_mean]:
        found, made = Product.of(node), node.meta.get("val")
        if found is None or made.dtype != torch.float32 or found.terms < THIN:
            continue

        def call(target: Any, *args: Any, as_: Any = made, **options: Any) -> torch.fx.Node:
            new = graph.call_function(target, args, options)
            new.meta["val"] = as_
            return new

        def cast(value: Any, dtype: torch.dtype) -> Any:
            is_node = isinstance(value, torch.fx.Node)
            return call(aten._to_copy.default, value, as_=value.meta["val"], dtype=dtype) if is_node else value

        with graph.inserting_before(node):
            half = call(found.target, *(cast(arg, torch.bfloat16) for arg in found.args))
            whole = cast(half, made.dtype)
            if (added := found.added) is not None:
                if found.target is aten.convolution.default:  # a number a channel
                    added = call(aten.view.default, added, [-1, *[1] * (made.ndim - 2)], as_=added.meta["val"])
                whole = call(aten.add.Tensor, whole, added)
        node.replace_all_uses_with(whole)
        graph.erase_node(node)


def _ancestors(nodes: Sequence[torch.fx.Node]) -> set[torch.fx.Node]:
    """All that some nodes depend on, and they themselves."""
    found: set[torch.fx.Node] = set()
    rest = list(nodes)
    while rest:
        node = rest.pop()
        if node not in found:
            found.add(node)
            rest += node.all_input_nodes
    return found
