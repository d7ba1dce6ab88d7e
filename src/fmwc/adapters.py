"""Networks that are called another way, seen as `network(x, t, **cond)`: noise at t = 0, data at t = 1.

A network called like that needs no adapter. For the others, what differs is said in words:

| network | called as | adapter |
|---|---|---|
| torchcfm's UNet | `net(t, x)` | `adapt(net, time_first=True)` |
| diffusers' UNets and DiT | `net(x, 1000·t).sample` | `timestepped(net)`, with `backwards=True` if 1000 is noise |
| diffusers' SD3 | `net(x, timestep=1000·(1 − t)).sample`, velocity towards noise | `timestepped(net, backwards=True)` |
| diffusers' Flux | the same, but it multiplies by 1000 itself | `timestepped(net, backwards=True, scale=1.0)` |
| azula's denoisers | `net(x, 1 − t).mean`, an estimate of the data | `Denoised(net)` |
| a module that returns a tuple | `net(x, t)[0]` | `adapt(net, output=lambda found: found[0])` |

The network itself stays as it is; its layers are those of the adapter under the name `network`.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from fmwc.errors import UsageError

__all__ = ["Adapted", "Denoised", "adapt", "timestepped"]


class Adapted(nn.Module):
    """Creates a network that is called as `(x, t, **cond)` from one that is called another way; see :func:`adapt`."""

    def __init__(
        self,
        network: nn.Module,
        time_first: bool = False,
        time: str | None = None,
        scale: float = 1.0,
        backwards: bool = False,
        output: Callable[[Any], Tensor] | None = None,
        always: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if time_first and time is not None:
            raise UsageError(f"the time comes first or by the name '{time}', not both")
        self.network = network
        self.time_first, self.time = time_first, time
        self.scale, self.backwards, self.output = scale, backwards, output
        self.always = {k: v for k, v in (always or {}).items() if not isinstance(v, Tensor)}
        # Tensors move with the module, and are none of its weights.
        self.fixed = [name for name in (always or {}) if name not in self.always]
        for name in self.fixed:
            self.register_buffer(f"_always_{name}", (always or {})[name], persistent=False)

    def forward(self, x: Any, t: Tensor, **cond: Any) -> Any:
        """The velocity towards data."""
        own = (1 - t if self.backwards else t) * self.scale
        cond = {**self.always, **{name: getattr(self, f"_always_{name}") for name in self.fixed}, **cond}
        if self.time is not None:
            found = self.network(x, **{self.time: own}, **cond)
        else:
            found = self.network(*((own, x) if self.time_first else (x, own)), **cond)
        v = found if self.output is None else self.output(found)
        return -v if self.backwards else v


def adapt(
    network: nn.Module,
    *,
    time_first: bool = False,
    time: str | None = None,
    scale: float = 1.0,
    backwards: bool = False,
    output: Callable[[Any], Tensor] | None = None,
    **always: Any,
) -> Adapted:
    """A network that is called another way, as one that is called `(x, t, **cond)`.

    >>> bilinear = nn.Bilinear(1, 2, 2)  # called as (t, x)
    >>> adapt(bilinear, time_first=True)(torch.zeros(3, 2), torch.zeros(3, 1)).shape
    torch.Size([3, 2])

    Arguments:
        network: Any torch module.
        time_first: It is called as `(t, x)`.
        time: It takes the time by this name (`"timestep"`).
        scale: Its time runs to this number (1000 timesteps).
        backwards: Its time runs from noise at 1 to data at 0, and its velocity points to the noise.
        output: Takes the velocity out of what it returns (`lambda found: found.sample`).
        always: Given to it at every call (`return_dict=False`, positions that all samples share).
    """
    return Adapted(network, time_first, time, scale, backwards, output, always)


def timestepped(network: nn.Module, *, scale: float = 1000.0, backwards: bool = False, **always: Any) -> Adapted:
    """A network with diffusers' manner: `network(x, timestep=…, return_dict=False)[0]`.

    Arguments:
        network: A UNet or a transformer of diffusers.
        scale: The timestep at the end of time: 1000, or 1.0 for Flux, which multiplies itself.
        backwards: Timestep 0 is data, and the network's velocity points to the noise: SD3, Flux, and every network
            trained for `FlowMatchEulerDiscreteScheduler`.
        always: Given to it at every call (`img_ids=…, txt_ids=…`).
    """
    always = {"return_dict": False, **always}
    return Adapted(network, False, "timestep", scale, backwards, itemgetter(0), always)


class Denoised(nn.Module):
    r"""Creates a velocity network from a denoiser with a schedule (azula's): E[x₁ | x] at scales α of data, σ of noise.

    With the denoiser's time s = 1 − t and x = αx₁ + σx₀, the velocity is that of x for the data it expects,

    .. math:: v = -\frac{dx}{ds} = -\left( \left( α' - \frac{σ'α}{σ} \right) E[x_1|x] + \frac{σ'}{σ} x \right)

    Arguments:
        network: Called as `network(x, s, **cond).mean`, with `network.schedule(s)` giving (α, σ).
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        alpha, sigma = (float(scale) for scale in network.schedule(torch.ones(())))  # type: ignore[operator]
        if alpha > 0.1 or abs(sigma - 1) > 0.1:
            raise UsageError(
                f"the schedule ends at {alpha:.3g} of data and {sigma:.3g} of noise; samples start from noise of "
                "scale 1, so take one that ends at 0 and 1 (azula: RectifiedSchedule, VPSchedule, CosineSchedule)"
            )
        self.network = network

    def forward(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        """The velocity towards data."""
        s = (1 - t).to(x.dtype)
        alpha, sigma, d_alpha, d_sigma = (scale[(..., *[None] * (x.ndim - s.ndim))] for scale in self._scales(s))
        data = self.network(x, s, **cond).mean
        # The data appear once, so that what is uncertain about them is counted once (diagonal propagation).
        return (d_sigma * alpha / sigma - d_alpha) * data - d_sigma / sigma * x

    def _scales(self, s: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """α, σ and their slopes."""
        with torch.inference_mode(False):
            (alpha, sigma), pull = torch.func.vjp(self.network.schedule, s.clone())  # type: ignore[arg-type, misc]
            one, none = torch.ones_like(s), torch.zeros_like(s)
            return alpha, sigma, *pull((one, none)), *pull((none, one))
