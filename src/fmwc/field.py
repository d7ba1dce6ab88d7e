"""The field: a network seen as a velocity field with a noise model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fmwc.errors import NotFiniteError, ShapeError, UsageError, require_finite
from fmwc.estimators import Estimator, as_estimator
from fmwc.flow import Space, as_space, euclidean
from fmwc.modes import Scope, eagerly, evaluating
from fmwc.moments import Moments
from fmwc.noise import Draw, NoiseModel, Pass, kl
from fmwc.randomness import Randomness, as_randomness
from fmwc.references import Reference, Schedule
from fmwc.state import State, as_conditions, as_state, as_whole, batch_size, blame_conditions, channels, require_state

__all__ = ["Field", "attach", "checked"]


class Field(nn.Module):
    """Creates a velocity field with a noise model. Called, it is the plain network.

    Arguments:
        network: Any module called as `network(x, t, **cond)`. Where samples have different numbers of rows (atoms,
            edges), it has a method `rows(x, t, **cond)`: for each kind of rows, the sample each belongs to. One that
            evaluates sample i twice, as 2i and 2i + 1 with the same weights, says so by a true `doubled`.
        noise: Its noise model.
        space: Where the states live, or the shape of one sample; learned from the first data it sees if not given.
        prior_rate: The prior rate p of the KL.
        kl_factor: The leading factor of the KL; 1 is the paper's formula as printed.
    """

    def __init__(
        self,
        network: nn.Module,
        noise: NoiseModel,
        space: Space | Sequence[int] | int | None = None,
        prior_rate: float = 0.3,
        kl_factor: float = 0.5,
    ) -> None:
        super().__init__()
        if not 0 < prior_rate < 1:
            raise UsageError(f"prior_rate lies strictly between 0 and 1, got {prior_rate}")
        self.kl_factor = kl_factor
        self.network = network
        self.noise = noise
        self.space = None if space is None else as_space(space)
        self.prior_rate = prior_rate
        self.reference: Reference | None = None
        self.schedule: Schedule | None = None
        self.row_order_checked = False  # that layers see samples in their order: looked at when first read

    @property
    def device(self) -> torch.device:
        return next(self.noise.parameters()).device

    @property
    def fused(self) -> bool:
        """Whether torch may compute the plain network otherwise than layer by layer, as a pass does."""
        return self.noise.fused

    def constant_weights(self) -> Scope:
        """A scope that caches terms that depend on the weights alone, while the weights are constant."""
        return self.noise.constant_weights()

    def forward(self, x: Any, t: Any, **cond: Any) -> Any:
        """The network's own output, untouched. One time for all, as a solver gives it, is given to each."""
        return self.network(x, _for_each(x, t), **cond)

    def run(self, current: Pass, x: Any, t: Any, *, cond: Mapping[str, Any] | None = None) -> Any:
        """The network's output with a pass running at its noisy layers."""
        if not torch.compiler.is_dynamo_compiling():
            return eagerly(self._run)(current, x, t, cond or {})
        if self.noise.hooks_kept:
            return self._run(current, x, t, cond or {})
        # Hooks come and go here, so the pass runs between two compiled pieces.
        return torch.compiler.disable(self.run)(current, x, t, cond=cond)

    def _run(self, current: Pass, x: Any, t: Any, cond: Mapping[str, Any]) -> Any:
        if not self.noise.attached:
            raise UsageError("the noise of this field was detached; attach the network again")
        if not torch.compiler.is_dynamo_compiling():
            self.check_layers()
        t, rows = _for_each(x, t), getattr(self.network, "rows", None)
        doubled = bool(getattr(self.network, "doubled", False))
        running = current, self._times(x, t), rows(x, t, **cond) if rows else (), doubled
        if torch.compiler.is_dynamo_compiling():
            with self.noise.tracing(*running):
                v = self.network(x, t, **cond)
        else:
            v = self.noise.during(*running).call(self.network, x, t, **cond)
        require_state(v, "the network's velocity")
        return v

    def draw(
        self,
        x: Any,
        t: Any,
        *,
        seed: Randomness | torch.Generator | int | None = None,
        cond: Mapping[str, Any] | None = None,
    ) -> Any:
        """The velocity under one draw of the weights from the posterior, ω ~ q(ω | x, t)."""
        x, t = checked(self, x, t)
        cond = as_conditions(cond)
        try:
            return self.draw_with_kl(x, t, seed=seed, cond=cond)[0]
        except (AttributeError, IndexError, RuntimeError, TypeError) as error:
            blame_conditions(error, cond, batch_size(x))
            raise

    def draw_with_kl(
        self,
        x: Any,
        t: Any,
        *,
        seed: Randomness | torch.Generator | int | None = None,
        cond: Mapping[str, Any] | None = None,
    ) -> tuple[Any, Tensor]:
        """The same, with the KL of the posterior it was drawn from: what training needs. Values are not checked."""
        draw = Draw(as_randomness(seed, self.device))
        v = self.run(draw, x, t, cond=cond)
        return v, kl(draw.log_alphas, self.prior_rate, self.kl_factor, draw.owners, batch_size(x))

    def moments(
        self,
        x: Any,
        t: Any,
        propagation: str | Estimator = "linearised",
        *,
        seed: Randomness | torch.Generator | int | None = None,
        cond: Mapping[str, Any] | None = None,
    ) -> Moments:
        """Mean and variance of the velocity at (x, t).

        Arguments:
            x: States, `(B, *)` or a dict of channels.
            t: A number, or one time a sample.
            propagation: `linearised`, `diagonal`, `tangent`, `monte_carlo`, or an estimator with its own options.
            seed: Randomness for the estimators that need it.
            cond: The conditions, by name; given to the network.
        """
        if torch.compiler.is_dynamo_compiling():  # a reading runs between two compiled pieces
            return torch.compiler.disable(self.moments)(x, t, propagation, seed=seed, cond=cond)
        estimator = as_estimator(propagation)
        x, t = checked(self, x, t)
        cond = as_conditions(cond)
        given = self, x, t, cond, as_randomness(seed, self.device)
        try:
            found: Moments = evaluating(self.network).call(estimator, *given)
        except (AttributeError, IndexError, RuntimeError, TypeError) as error:
            blame_conditions(error, cond, batch_size(x))
            raise
        for name, var in channels(found.var).items():
            if not torch.isfinite(var).all():
                self.check_finite()
                raise NotFiniteError(f"the variance of channel '{name}' is not finite, though weights and state are")
        return found

    def detach(self) -> nn.Module:
        """Takes the noise off again and gives back the network."""
        self.noise.remove()
        return self.network

    def learn_space(self, x1: State) -> Space:
        """The space of the states, from data, unless it is known already; data of another shape is refused."""
        if self.space is None:
            if isinstance(x1, dict):
                raise UsageError("a state of several channels needs its space: attach(net, space=...)")
            self.space = euclidean(x1.shape[1:])
        self.space.check(x1)
        return self.space

    def check_layers(self) -> None:
        """Raise where a layer that carries noise was replaced after :func:`attach`."""
        self.noise.check_layers(self.network)

    def check_finite(self) -> None:
        """Raises where a weight of the network or of the noise model is NaN or infinite."""
        for name, parameter in self.named_parameters():
            require_finite(parameter, f"weight '{name}'")

    @staticmethod
    def _times(x: Any, t: Any) -> Tensor:
        count = batch_size(x)
        t = torch.as_tensor(t, device=next(iter(channels(x).values())).device)
        if t.numel() not in (1, count):
            raise ShapeError(f"t is one number or one a sample ({count}), got shape {tuple(t.shape)}")
        return t.reshape(-1).expand(count)


def checked(field: Any, x: Any, t: Any) -> tuple[Any, Tensor]:
    """A state and a time per sample as a field reads them: of its space, on its device, in its network's precision.

    Arguments:
        field: A field, compiled or not.
        x: States: tensors, arrays or lists.
        t: A number, or one time a sample.
    """
    x = as_state(x, "the state", field.network, field.device)
    if not batch_size(x):
        raise ShapeError("a reading takes at least 1 sample")
    if field.space is not None:
        field.space.check(x)
    for name, value in channels(x).items():
        require_finite(value, f"the state's channel '{name}'")
    count, like = batch_size(x), next(iter(channels(x).values()))
    # A state in half precision keeps the times it is given: half precision is too coarse for them.
    dtype = torch.promote_types(like.dtype, torch.float32) if isinstance(t, Tensor) else like.dtype
    try:
        times = torch.as_tensor(t, device=like.device, dtype=dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"t is a number, or one per sample ({count}), got {t!r:.60}") from error
    if times.shape not in ((), (1,), (count,)):
        column = "; give t[:, 0]" if times.shape == (count, 1) else ""
        raise ShapeError(f"t is one number or one a sample ({count}), got shape {tuple(times.shape)}{column}")
    require_finite(times, "t")
    return x, times.expand(count)


def _for_each(x: Any, t: Any) -> Any:
    """One time for all samples, as a solver gives it, as one per sample; anything else as it is."""
    if isinstance(t, (int, float, np.number)) and not isinstance(t, bool):
        like = next(iter(channels(x).values()))
        dtype = like.dtype if like.is_floating_point() else None
        return torch.full((batch_size(x),), float(t), dtype=dtype, device=like.device)
    return t.expand(batch_size(x)) if isinstance(t, Tensor) and not t.ndim else t


TIME_NAMES = {"t", "time", "times", "timestep", "timesteps"}


def _check_call(network: nn.Module) -> None:
    """Raise where a network's own signature says that it takes the time first."""
    try:
        names = [
            p.name for p in inspect.signature(network.forward).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD
        ]
    except (TypeError, ValueError):
        return
    if len(names) > 1 and names[0] in TIME_NAMES and names[1] not in TIME_NAMES:
        raise UsageError(
            f"the network is called as ({names[0]}, {names[1]}), and fields call it as (x, t); use "
            "fmwc.adapters.adapt(net, time_first=True)"
        )


def attach(
    network: nn.Module,
    *,
    include: str | Sequence[str] = ("*",),
    exclude: str | Sequence[str] = (),
    space: Space | Sequence[int] | int | None = None,
    prior_rate: float = 0.3,
    kl_factor: float = 0.5,
    width: int = 64,
    initial_log_alpha: float = -3.0,
    seed: int = 0,
) -> Field:
    """Gives a velocity network a noise model, and leaves it as its author wrote it.

    >>> from fmwc.networks import MLP
    >>> net = MLP(dim=2, hidden=16, depth=2)
    >>> field = attach(net, space=(2,))
    >>> x, t = torch.zeros(3, 2), torch.full((3,), 0.5)
    >>> bool((field(x, t) == net(x, t)).all()), field.moments(x, t).var.shape
    (True, torch.Size([3, 2]))

    Arguments:
        network: Any module called as `network(x, t, **cond)`.
        include, exclude: Glob patterns, or one, over the names of its linear and convolution layers.
        space: The shape of one sample (one number for a vector), or a space; learned from the first data if not given.
        prior_rate: The prior rate p of the KL.
        width: The width of the inference networks.
        kl_factor: The leading factor of the KL; 1 is the paper's formula as printed.
        initial_log_alpha: log α before training.
        seed: Seeds the first weights of the inference networks.
    """
    if not isinstance(network, nn.Module):
        raise UsageError(f"noise is attached to the layers of a torch module, got {type(network).__name__}")
    _check_call(network)
    include, exclude = ((names,) if isinstance(names, str) else names for names in (include, exclude))
    device = torch.get_default_device()
    generator = torch.Generator("cpu" if device.type == "meta" else device).manual_seed(as_whole(seed, "seed"))
    noise = NoiseModel(network, include, exclude, width, initial_log_alpha, generator)
    return Field(network, noise, space, prior_rate, kl_factor)
