"""The paper's estimator: a diagonal Gaussian carried through the network (eq:layerprop)."""

from __future__ import annotations

from dataclasses import dataclass
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn

from fmwc.errors import NoRuleError, UsageError
from fmwc.estimators.base import Noisy, register
from fmwc.moments import Closure, GaussHermite, Gaussian, Moments, as_closure, moments_of
from fmwc.noise import NoisyLayer, Pass
from fmwc.randomness import Randomness
from fmwc.state import tree_map

__all__ = ["Diagonal", "Inflate"]


class Inflate(Pass):
    r"""Pass that moves the noise of each layer's weights into the variance of its input.

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


@register("diagonal")
@dataclass(frozen=True)
class Diagonal:
    """Diagonal estimator: closed form, one pass, with correlations between activations ignored.

    The mean is the closure's E[v]. It differs from the plain network's output, except with `taylor1` in networks
    without a maximum of two activations.

    Arguments:
        closure: `gauss_hermite` (10 nodes), `taylor1`, `taylor2`, or a closure object.
    """

    closure: str | Closure = GaussHermite()
    plain_mean = False
    rounds = True

    def __call__(self, field: Noisy, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Moments:
        if getattr(getattr(field, "network", None), "doubled", False):
            raise UsageError(
                "diagonal propagation treats the two evaluations of a guided network as independent, but they share "
                "their weights; use propagation='linearised'"
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
    """The dotted name of the innermost module in the traceback of an error."""
    network = getattr(field, "network", None)
    if not isinstance(network, nn.Module):
        return ""
    names = {id(module): f"{name or 'network'} ({type(module).__name__})" for name, module in network.named_modules()}
    frames = (frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__))
    return ([""] + [names[id(module)] for module in frames if id(module) in names])[-1]
