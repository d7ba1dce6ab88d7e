"""nn.MultiheadAttention: four projections that torch never calls as layers, made layers of their own while a pass runs.

torch computes the projections inside one function from bare weights, so no hook of a layer sees them. While a pass
runs, that function is written out (:func:`fmwc.moments.multi_head_attention`), and each projection is a noisy layer.
torch's fused kernels for evaluation, which bypass hooks altogether, are not used for as long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from fmwc.modes import Scope
from fmwc.moments import multi_head_attention

__all__ = ["Projection", "WrittenOut", "projections"]

_OUT_WEIGHT = 11  # where multi_head_attention_forward is given the last projection's weight, by which a module is known


@dataclass(frozen=True, eq=False)
class Projection:
    """Creates a view of one projection: rows of a packed weight, or a weight of its own.

    Arguments:
        attention: The module it belongs to.
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


def projections(attention: nn.MultiheadAttention) -> dict[str, Projection]:
    return {f"{which}_proj": Projection(attention, which) for which in ("q", "k", "v", "out")}


Call = Callable[[Any, Tensor, Any], Any]  # (input, weight, bias) -> output, with noise


class WrittenOut(TorchFunctionMode):
    """Creates a context in which the projections of some attention modules are called one by one.

    torch's fused kernels keep out of any such mode, so that every layer is called.

    Arguments:
        calls: For each module, how some of its projections (`q`, `k`, `v`, `out`) are called.
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
        """The same as a scope."""
        return _Pushed(self)


class _Pushed(Scope):
    """A function mode on this thread's stack, taken off on any exit."""

    mode: WrittenOut | None = None

    def __init__(self, mode: WrittenOut) -> None:
        self.mode = mode

    def open(self) -> None:
        _push_mode(self.mode)

    def close(self) -> None:
        while any(mode is self.mode for mode in _get_current_function_mode_stack()):
            _pop_mode()
