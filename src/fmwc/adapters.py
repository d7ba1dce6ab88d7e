"""Adapters that make other networks callable as `network(x, t, **cond)`, with noise at t = 0 and data at t = 1.

| network | called as | adapter |
|---|---|---|
| torchcfm's UNet | `net(t, x)` | `adapt(net, time_first=True)` |
| diffusers' UNets and DiT | `net(x, 1000·t).sample` | `timestepped(net)`, with `backwards=True` if 1000 is noise |
| diffusers' SD3 | `net(x, timestep=1000·(1 − t)).sample`, velocity towards noise | `timestepped(net, backwards=True)` |
| diffusers' Flux | the same, but it multiplies by 1000 itself | `timestepped(net, backwards=True, scale=1.0)` |
| azula's denoisers | `net(x, 1 − t).mean`, an estimate of the data | `Denoised(net)` |
| a network that predicts the noise | `net(x, 1 − t) ≈ x0` | `predicting(net, "noise", "vp", backwards=True)` |
| a network that predicts the data | `net(x, t) ≈ x1` | `predicting(net, "data")` |
| a time of shape (B, 1) | `net(x, t[:, None])` | `adapt(net, column=True)` |
| classifier-free guidance | two calls, with and without the condition | `Guided(net, 2.0, y=10)` |
| a module that returns a tuple | `net(x, t)[0]` | `adapt(net, output=lambda result: result[0])` |

The network is unchanged; below the adapter, the names of its layers begin with `network.`. Adapters of networks that
were not trained on the straight path have a method `path`, and noise is fitted on that path.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from fmwc.conventions import PREDICTIONS, SCHEDULES, PathSchedule
from fmwc.errors import UsageError, pick
from fmwc.flow import declared, rows_of
from fmwc.state import batch_size, tree_map, unsqueeze_like

__all__ = [
    "PREDICTIONS",
    "SCHEDULES",
    "Adapted",
    "Denoised",
    "Guided",
    "Predicting",
    "adapt",
    "path_along",
    "predicting",
    "timestepped",
]


class Adapter(nn.Module):
    """Base class of adapters, which pass on what their network declares (:func:`fmwc.flow.declared`)."""

    network: nn.Module

    def passed_on(self, name: str) -> Any:
        """Return what the network declares, for this adapter."""
        found = declared(self.network, name)
        return self._rows if name == "rows" and found is not None else found

    def inputs(self, x: Any, t: Tensor, cond: dict[str, Any]) -> tuple[Any, Tensor, dict[str, Any]]:
        """Return the state, time and conditions that the network is called with."""
        return x, t, cond

    def _rows(self, x: Any, t: Tensor, **cond: Any) -> dict[str, Any]:
        x, t, cond = self.inputs(x, t, cond)
        return {f"network.{pattern}": owner for pattern, owner in (rows_of(self.network, x, t, cond) or {}).items()}


class Adapted(Adapter):
    """Adapter of a network with another signature, called as `(x, t, **cond)`. `adapt` is an alias of this class.

    >>> bilinear = nn.Bilinear(1, 2, 2)  # called as (t, x)
    >>> adapt(bilinear, time_first=True)(torch.zeros(3, 2), torch.zeros(3, 1)).shape
    torch.Size([3, 2])

    Arguments:
        network: Any torch module.
        time_first: Whether the network is called as `(t, x)`.
        time: The name of the time argument (`"timestep"`), if it is passed by keyword.
        scale: The network's time at the end (1000 for timesteps).
        backwards: Whether the network's time runs from 1 (noise) to 0 (data), and its velocity points to the noise.
        output: Selects the velocity from the network's output (`lambda result: result.sample`).
        column: Whether the network takes times of shape (B, 1).
        always: Keyword arguments of every call (`return_dict=False`, positions that all samples share).
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        time_first: bool = False,
        time: str | None = None,
        scale: float = 1.0,
        backwards: bool = False,
        output: Callable[[Any], Tensor] | None = None,
        column: bool = False,
        **always: Any,
    ) -> None:
        super().__init__()
        if time_first and time is not None:
            raise UsageError(f"give either time_first=True or time='{time}', not both")
        self.network = network
        self.time_first, self.time = time_first, time
        self.scale, self.backwards, self.output, self.column = scale, backwards, output, column
        self.always = {k: v for k, v in always.items() if not isinstance(v, Tensor)}
        self.fixed = [name for name in always if name not in self.always]
        for name in self.fixed:  # tensors move with the module, but are not weights
            self.register_buffer(f"_always_{name}", always[name], persistent=False)

    def forward(self, x: Any, t: Tensor, **cond: Any) -> Any:
        """Return the velocity towards data."""
        v = self.called(x, t, **cond)
        return tree_map(lambda c: -c, v) if self.backwards else v

    def inputs(self, x: Any, t: Tensor, cond: dict[str, Any]) -> tuple[Any, Tensor, dict[str, Any]]:
        """Return the state, time and conditions that the network is called with."""
        time = (1 - t if self.backwards else t) * self.scale
        time = time[:, None] if self.column else time
        return x, time, {**self.always, **{name: getattr(self, f"_always_{name}") for name in self.fixed}, **cond}

    def called(self, x: Any, t: Tensor, **cond: Any) -> Any:
        """Return the network's output, before conversion, at time t."""
        x, time, cond = self.inputs(x, t, cond)
        if self.time is not None:
            value = self.network(x, **{self.time: time}, **cond)
        else:
            value = self.network(*((time, x) if self.time_first else (x, time)), **cond)
        return value if self.output is None else self.output(value)


adapt = Adapted


def timestepped(network: nn.Module, *, scale: float = 1000.0, backwards: bool = False, **always: Any) -> Adapted:
    """Adapt a network of diffusers, called as `network(x, timestep=…, return_dict=False)[0]`.

    Arguments:
        network: A UNet or a transformer of diffusers.
        scale: The last timestep: 1000, or 1.0 for Flux, which multiplies by 1000 itself.
        backwards: Whether timestep 0 is data and the network's velocity points to the noise, as in SD3, Flux, and every
            network trained for `FlowMatchEulerDiscreteScheduler`.
        always: Keyword arguments of every call (`img_ids=…, txt_ids=…`).
    """
    options = {"return_dict": False, **always}
    return Adapted(network, time="timestep", scale=scale, backwards=backwards, output=itemgetter(0), **options)


# ---- networks that predict data or noise -----------------------------------------------------------------------------

FLOOR = 1e-2  # distance from t = 0 and t = 1, where a prediction would be divided by zero


def _scales(schedule: PathSchedule, t: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return α, σ and their derivatives."""
    with torch.inference_mode(False):
        (alpha, sigma), pull = torch.func.vjp(schedule, t.clone())  # type: ignore[misc]
        one, zero = torch.ones_like(t), torch.zeros_like(t)
        return alpha, sigma, pull((one, zero))[0], pull((zero, one))[0]


def _scale_like(scale: Tensor, x: Tensor) -> Tensor:  # (B,) -> (B, 1, …)
    return unsqueeze_like(scale, x).to(x.dtype)


def _mixed(x0: Any, x1: Any, scales: tuple[Tensor, ...]) -> tuple[Any, Any]:
    """Return α x1 + σ x0 and its derivative."""

    def weighted(data: Tensor, noise: Tensor) -> Any:
        return tree_map(lambda a, b: _scale_like(data, a) * a + _scale_like(noise, b) * b, x1, x0)

    return weighted(*scales[:2]), weighted(*scales[2:])


def path_along(schedule: PathSchedule, x0: Any, x1: Any, t: Tensor) -> tuple[Any, Any]:
    """Return the point α x1 + σ x0 at time t, and its velocity."""
    return _mixed(x0, x1, _scales(schedule, t))


class Predicting(Adapted):
    r"""Adapter of a network that predicts the data or the noise of x = α x1 + σ x0. Exact.

    `predicting` is an alias of this class.

    .. math:: v = α' x_1 + σ' x_0, \quad x_0 = (x - α x_1) / σ \text{ or } x_1 = (x - σ x_0) / α

    >>> denoiser = nn.Bilinear(2, 1, 2)  # called as (x, s), s of shape (B, 1), noise at s = 1
    >>> net = predicting(denoiser, "noise", "cosine", backwards=True, column=True)
    >>> net(torch.zeros(3, 2), torch.rand(3)).shape
    torch.Size([3, 2])

    Arguments:
        network: Any torch module.
        predicts: `data` (x₁; often named x₀ in diffusion models) or `noise` (ε).
        schedule: `linear` (α = t, σ = 1 − t), `cosine`, `vp` (DDPM's), or a function that returns (α, σ) at time t,
            with data at t = 1.
        floor: The smallest distance of times from 0 and 1, where a prediction would be divided by zero.
        call: Options of :class:`Adapted`. With `backwards`, only the network's time is reversed, because predictions
            have no direction.
    """

    def __init__(
        self,
        network: nn.Module,
        predicts: str,
        schedule: str | PathSchedule = "linear",
        *,
        floor: float = FLOOR,
        **call: Any,
    ) -> None:
        super().__init__(network, **call)
        self.velocity = pick(PREDICTIONS, predicts, "prediction")
        self.schedule = pick(SCHEDULES, schedule, "schedule") if isinstance(schedule, str) else schedule
        if not 0 < floor < 0.5:
            raise UsageError(f"floor must lie between 0 and 0.5, got {floor}")
        self.floor = floor

    def forward(self, x: Any, t: Tensor, **cond: Any) -> Any:
        """Return the velocity towards data."""
        t = t.clamp(self.floor, 1 - self.floor)
        scales = _scales(self.schedule, t)
        prediction = self.called(x, t, **cond)
        return tree_map(lambda x, p: self.velocity(x, p, *(_scale_like(scale, x) for scale in scales)), x, prediction)

    def path(self, x0: Any, x1: Any, t: Tensor) -> tuple[Any, Any]:
        """Return the path that the network was trained on: α x1 + σ x0 at t, and its velocity."""
        return path_along(self.schedule, x0, x1, t.clamp(self.floor, 1 - self.floor))


predicting = Predicting


class Denoised(Adapter):
    r"""Adapter of a denoiser E[x₁ | x] with a schedule (azula's) of scales α of data and σ of noise.

    With the denoiser's time s = 1 − t and x = αx₁ + σx₀, the velocity is that of x given the expected data,

    .. math:: v = -\frac{dx}{ds} = -\left( \left( α' - \frac{σ'α}{σ} \right) E[x_1|x] + \frac{σ'}{σ} x \right)

    Arguments:
        network: A denoiser, called as `network(x, s, **cond).mean`; `network.schedule(s)` returns (α, σ).
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        alpha, sigma = (float(scale) for scale in network.schedule(torch.ones(())))  # type: ignore[operator]
        if alpha > 0.1 or abs(sigma - 1) > 0.1:
            raise UsageError(
                f"the schedule ends at scale {alpha:.3g} of data and {sigma:.3g} of noise, but samples start from pure "
                "noise of scale 1; use one that ends at 0 and 1 (azula: RectifiedSchedule, VPSchedule, CosineSchedule)"
            )
        self.network = network

    def forward(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        """Return the velocity towards data."""
        x, s, cond = self.inputs(x, t, cond)
        alpha, sigma, d_alpha, d_sigma = (_scale_like(scale, x) for scale in self._scales(s))
        data = self.network(x, s, **cond).mean
        # The data occur once in the formula, so that diagonal propagation counts their variance once.
        return (d_sigma * alpha / sigma - d_alpha) * data - d_sigma / sigma * x

    def inputs(self, x: Tensor, t: Tensor, cond: dict[str, Any]) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Return the state, time and conditions that the network is called with."""
        return x, (1 - t).to(x.dtype), cond

    def path(self, x0: Any, x1: Any, t: Tensor) -> tuple[Any, Any]:
        """Return the path of the schedule: α x1 + σ x0 at t, and its velocity."""
        alpha, sigma, d_alpha, d_sigma = self._scales(1 - t)
        return _mixed(x0, x1, (alpha, sigma, -d_alpha, -d_sigma))

    def _scales(self, s: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return _scales(self.network.schedule, s)  # type: ignore[arg-type]


# ---- guidance --------------------------------------------------------------------------------------------------------


class Guided(Adapter):
    r"""Network with classifier-free guidance, v = v_∅ + w (v_c − v_∅), evaluated in one call on a doubled batch.

    Both evaluations of a sample use the same draw of the weights, so shared errors cancel in the difference. Two
    separate calls would have independent noise and another variance. Estimators that keep correlations (`linearised`,
    `tangent`, `monte_carlo`) account for this; `diagonal` does not and raises an error.

    Arguments:
        network: Called as `network(x, t, **cond)`.
        weight: The weight w: 1 is the network with its condition, 0 without.
        null: For each guiding condition, by name, the value that means "no condition": a number, or a tensor with the
            shape of one row. Other conditions are the same in both evaluations.
    """

    doubled = True

    def __init__(self, network: nn.Module, weight: float = 2.0, **null: Any) -> None:
        super().__init__()
        if not null:
            raise UsageError("give the value that means no condition by name, for example Guided(net, 2.0, y=10)")
        if declared(network, "doubled"):
            raise UsageError(
                "the network is evaluated twice already, by other guidance; give one Guided all conditions"
            )
        self.network, self.weight, self.nulls = network, weight, list(null)
        for name, value in null.items():
            self.register_buffer(f"_null_{name}", torch.as_tensor(value), persistent=False)

    def forward(self, x: Any, t: Tensor, **cond: Any) -> Any:
        """Return the guided velocity."""
        twice, times, both = self.inputs(x, t, cond)
        v = self.network(twice, times, **both)
        return tree_map(lambda c: self._guided(c.unflatten(0, (-1, 2))), v)

    def conditional(self, x: Any, t: Tensor, **cond: Any) -> Any:
        """Return the velocity with the condition and without guidance, as the network was trained."""
        return self.network(x, t, **cond)

    def _guided(self, v: Tensor) -> Tensor:  # (B, 2, *)
        return v[:, 1] + self.weight * (v[:, 0] - v[:, 1])

    def inputs(self, x: Any, t: Tensor, cond: dict[str, Any]) -> tuple[Any, Tensor, dict[str, Any]]:
        """Return the doubled batch that the network is called with."""
        # Interleaved, because the noise model expects the rows of a sample to be adjacent.
        twice = tree_map(lambda c: c.repeat_interleave(2, 0), x)
        return twice, t.expand(batch_size(x)).repeat_interleave(2), self._both(cond, batch_size(x))

    def _both(self, cond: dict[str, Any], count: int) -> dict[str, Any]:
        if missing := [name for name in self.nulls if name not in cond]:
            raise UsageError(f"guidance needs the condition '{missing[0]}'; give cond={{'{missing[0]}': ...}}")
        return {name: self._pair(name, value, count) for name, value in cond.items()}

    def _pair(self, name: str, value: Any, count: int) -> Any:
        if not isinstance(value, Tensor) or value.ndim == 0 or len(value) != count:
            if name in self.nulls:
                raise UsageError(
                    f"the guiding condition '{name}' must be a tensor with a row per sample, got {value!r:.60}"
                )
            return value
        twice = value.repeat_interleave(2, 0)
        if name not in self.nulls:
            return twice
        null = getattr(self, f"_null_{name}").to(value.dtype).expand(value[0].shape)
        second = torch.arange(len(twice), device=value.device) % 2 == 1
        return torch.where(unsqueeze_like(second, value), null, twice)
