"""Fields: velocity networks with a noise model, and :func:`attach`, which makes them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import numpy as np
import torch
from torch import Tensor, nn

from fmwc.errors import NotFiniteError, ShapeError, UsageError, require_finite
from fmwc.estimators import Estimator, as_estimator
from fmwc.flow import DECLARED, Space, as_space, declared, euclidean, rows_of
from fmwc.identity import checksum
from fmwc.modes import Scope, compiling, eagerly, evaluating
from fmwc.moments import Moments
from fmwc.noise import Draw, NoiseModel, Pass, check_rows, kl, rows_of_share
from fmwc.randomness import Randomness, Share, as_randomness
from fmwc.state import (
    State,
    as_conditions,
    as_state,
    as_whole,
    batch_size,
    blame_conditions,
    channels,
    first_channel,
    require_state,
)

if TYPE_CHECKING:
    from fmwc.sampling.confidence import Reference

__all__ = ["Field", "attach", "checked"]


Seed: TypeAlias = Randomness | torch.Generator | int | None
NETWORK_ERRORS = (AttributeError, IndexError, RuntimeError, TypeError)  # raised by a network for a wrong condition


class Field(nn.Module):
    """Velocity field with a noise model. Calling it returns the plain network's output.

    Arguments:
        network: Any module called as `network(x, t, **cond)`. If samples have different numbers of rows (atoms, edges),
            it needs a method `rows(x, t, **cond)` that says which layers see which rows (:func:`fmwc.flow.rows_of`). If
            it evaluates sample i twice, as 2i and 2i + 1 with the same weights, it needs an attribute `doubled = True`.
        noise: The noise model of the network.
        space: The space of the states, or the shape of one sample; taken from the first data if not given.
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
            raise UsageError(f"prior_rate must lie strictly between 0 and 1, got {prior_rate}")
        self.kl_factor = kl_factor
        self.network = network
        self.noise = noise
        self.space = None if space is None else as_space(space)
        self.prior_rate = prior_rate
        self.reference: Reference | None = None
        for name in DECLARED:  # raises if a part of the network declares what the network hides
            declared(network, name)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        weights = chain(self.noise.parameters(), self.network.parameters())
        return next((p.device for p in weights), torch.device("cpu"))

    @property
    def fused(self) -> bool:
        """Whether parts of the network have fused kernels, which torch uses only while no pass runs."""
        return self.noise.fused

    def constant_weights(self) -> Scope:
        """Return a scope that caches weight-dependent terms while the weights are constant."""
        return self.noise.constant_weights()

    def forward(self, x: Any, t: Any, **cond: Any) -> Any:
        """Return the plain network's output. A scalar time, as solvers pass it, is expanded to all samples."""
        return self.network(x, _expanded(x, t), **cond)

    def run(self, current: Pass, x: Any, t: Any, *, cond: Mapping[str, Any] | None = None) -> Any:
        """Return the network's output under a pass."""
        if not torch.compiler.is_dynamo_compiling():
            return self._run(current, x, t, cond or {})
        if self.noise.hooks_kept:
            return self._run(current, x, t, cond or {})
        # Hooks are registered and removed in this call, so it is a graph break for torch.compile.
        return torch.compiler.disable(self.run)(current, x, t, cond=cond)

    def _run(self, current: Pass, x: Any, t: Any, cond: Mapping[str, Any]) -> Any:
        if not self.noise.attached:
            raise UsageError("the noise of this field was detached; call fmwc.attach(network) again")
        if not torch.compiler.is_dynamo_compiling():
            self.noise.require_layers()
            self.check_layers()
        t = _expanded(x, t)
        rows, doubled = rows_of(self.network, x, t, cond), bool(declared(self.network, "doubled"))
        self._share_rows(current, rows, t, doubled)
        if torch.compiler.is_dynamo_compiling():
            with self.noise.tracing(current, self._times(x, t), rows, doubled):
                v = self.network(x, t, **cond)
        else:
            proven = None if self._static(t) else self._proven(x, t, cond, rows, doubled)
            scope = self.noise.during(current, self._times(x, t), rows, doubled, proven)
            v = eagerly(scope.call)(self.network, x, t, **cond)
        require_state(v, "the network's velocity")
        return v

    @staticmethod
    def _static(t: Tensor) -> bool:
        """Return whether the running code must not read values, because it is compiled or captured."""
        return compiling() or (t.is_cuda and torch.cuda.is_current_stream_capturing())

    def _share_rows(self, current: Pass, rows: Mapping[str, Tensor | int] | None, t: Tensor, doubled: bool) -> None:
        """Tell a share of a batch which rows of the whole batch are its own."""
        share = getattr(current, "randomness", None)
        if rows is None or not isinstance(share, Share):
            return
        x, given = share.batch()
        whole, each = rows_of(self.network, x, t.new_zeros(share.total), given) or {}, 2 if doubled else 1
        here, everywhere = (
            {pattern: owner // each for pattern, owner in kinds.items() if isinstance(owner, Tensor)}
            for kinds in (rows, whole)
        )
        share.owned = rows_of_share(share, here, everywhere, checked=not self._static(t))

    def check_rows(self, x: Any, t: Any, *, cond: Mapping[str, Any] | None = None) -> None:
        """Raise if the rows of a layer cannot be assigned to samples."""
        cond, t = cond or {}, _expanded(x, t)
        self._proven(x, t, cond, rows_of(self.network, x, t, cond), bool(declared(self.network, "doubled")))

    def _proven(
        self, x: Any, t: Any, cond: Mapping[str, Any], rows: Mapping[str, Tensor | int] | None, doubled: bool
    ) -> Mapping[str, frozenset[int]] | None:
        if batch_size(x) < 2:  # all rows are those of the only sample
            return None

        def run(current: Pass) -> Any:
            scope = self.noise.during(current, self._times(x, t), rows, doubled)
            v = evaluating(self.network).call(eagerly(scope.call), self.network, x, t, **cond)
            require_state(v, "the network's velocity")
            return v

        with torch.no_grad():
            found = check_rows(self.noise, run, x, cond, rows is not None, doubled)
        return None if rows is not None else found

    @overload
    def draw(
        self, x: Tensor, t: float | Tensor, *, seed: Seed = None, cond: Mapping[str, Any] | None = None
    ) -> Tensor: ...
    @overload
    def draw(
        self, x: dict[str, Tensor], t: float | Tensor, *, seed: Seed = None, cond: Mapping[str, Any] | None = None
    ) -> dict[str, Tensor]: ...
    @overload
    def draw(self, x: Any, t: Any, *, seed: Seed = None, cond: Mapping[str, Any] | None = None) -> Any: ...
    def draw(self, x: Any, t: Any, *, seed: Seed = None, cond: Mapping[str, Any] | None = None) -> Any:
        """Return the velocity under one draw of the weights from the posterior, ω ~ q(ω | x, t). Exact."""
        x, t = checked(self, x, t)
        cond = as_conditions(cond)
        try:
            return self.draw_with_kl(x, t, seed=seed, cond=cond)[0]
        except NETWORK_ERRORS as error:
            blame_conditions(error, cond, batch_size(x))
            raise

    def draw_with_kl(
        self, x: Any, t: Any, *, seed: Seed = None, cond: Mapping[str, Any] | None = None
    ) -> tuple[Any, Tensor]:
        """Return the velocity under one draw and the KL of the posterior, for training. Values are not checked."""
        randomness = as_randomness(seed, self.device)
        draw = Draw(randomness)
        v = self.run(draw, x, t, cond=cond)
        owned = randomness.owned if isinstance(randomness, Share) else {}
        numbers = {place: owned[pattern][2] for place, pattern in enumerate(draw.patterns) if pattern in owned}
        return v, kl(draw.log_alphas, self.prior_rate, self.kl_factor, draw.owners, batch_size(x), numbers)

    def moments(
        self,
        x: Any,
        t: Any,
        propagation: str | Estimator = "linearised",
        *,
        seed: Seed = None,
        cond: Mapping[str, Any] | None = None,
    ) -> Moments:
        """Return the mean and variance of the velocity at (x, t).

        Arguments:
            x: States, `(B, *)` or a dict of channels.
            t: A number, or one time per sample.
            propagation: `linearised`, `diagonal`, `tangent`, `monte_carlo`, or an estimator object with options.
            seed: The seed of estimators that need randomness.
            cond: Conditions by name, passed to the network.
        """
        if torch.compiler.is_dynamo_compiling():  # a reading is a graph break
            return torch.compiler.disable(self.moments)(x, t, propagation, seed=seed, cond=cond)
        estimator = as_estimator(propagation)
        x, t = checked(self, x, t)
        cond = as_conditions(cond)
        randomness = as_randomness(seed, self.device)
        try:
            moments: Moments = evaluating(self.network).call(estimator, self, x, t, cond, randomness)
        except NETWORK_ERRORS as error:
            blame_conditions(error, cond, batch_size(x))
            raise
        for name, var in channels(moments.var).items():
            if not torch.isfinite(var).all():
                self.check_finite()
                raise NotFiniteError(f"the variance of channel '{name}' is not finite, although weights and state are")
        return moments

    def checksum(self) -> int:
        """Return a number that changes if a parameter or buffer of the network or of the noise model changes."""
        return checksum(self.state_dict())

    def detach(self) -> nn.Module:
        """Remove the noise and return the network."""
        self.noise.remove()
        return self.network

    def learn_space(self, x1: State) -> Space:
        """Return the space of the states; set it from the data if it is not known yet. Raise if the data do not fit."""
        if self.space is None:
            if isinstance(x1, dict):
                raise UsageError("a state with several channels needs a space; use attach(net, space=...)")
            self.space = euclidean(x1.shape[1:])
        self.space.check(x1)
        return self.space

    def check_layers(self) -> None:
        """Raise if a layer that carries noise was replaced after :func:`attach`."""
        self.noise.check_layers(self.network)

    def check_finite(self) -> None:
        """Raise if a weight of the network or of the noise model is NaN or infinite."""
        for name, parameter in self.named_parameters():
            require_finite(parameter, f"weight '{name}'")

    @staticmethod
    def _times(x: Any, t: Any) -> Tensor:
        count = batch_size(x)
        t = torch.as_tensor(t, device=first_channel(x).device)
        if t.numel() not in (1, count):
            raise ShapeError(f"t must be one number, or one per sample ({count}), got shape {tuple(t.shape)}")
        return t.reshape(-1).expand(count)


def checked(field: Any, x: Any, t: Any) -> tuple[Any, Tensor]:
    """Check states and times, and move them to the device and precision of the field's network.

    Arguments:
        field: A field.
        x: States: tensors, arrays or lists.
        t: A number, or one time per sample.
    """
    x = as_state(x, "the state", field.network, field.device)
    if not batch_size(x):
        raise ShapeError("the state holds no samples; give at least 1")
    if field.space is not None:
        field.space.check(x)
    for name, value in channels(x).items():
        require_finite(value, f"the state's channel '{name}'")
    count, like = batch_size(x), first_channel(x)
    # Times stay in single precision if the state is in half precision, which is too coarse for times.
    dtype = torch.promote_types(like.dtype, torch.float32) if isinstance(t, Tensor) else like.dtype
    try:
        times = torch.as_tensor(t, device=like.device, dtype=dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"t must be one number, or one per sample ({count}), got {t!r:.60}") from error
    if times.shape not in ((), (1,), (count,)):
        column = "; give t[:, 0]" if times.shape == (count, 1) else ""
        raise ShapeError(f"t must be one number, or one per sample ({count}), got shape {tuple(times.shape)}{column}")
    require_finite(times, "t")
    return x, times.expand(count)


def _expanded(x: Any, t: Any) -> Any:
    """Expand a scalar time, as solvers pass it, to one time per sample; return other values unchanged."""
    if isinstance(t, (int, float, np.number)) and not isinstance(t, bool):
        like = first_channel(x)
        dtype = like.dtype if like.is_floating_point() else None
        return torch.full((batch_size(x),), float(t), dtype=dtype, device=like.device)
    return t.expand(batch_size(x)) if isinstance(t, Tensor) and not t.ndim else t


TIME_NAMES = {"t", "time", "times", "timestep", "timesteps"}


def _check_call(network: nn.Module) -> None:
    """Raise if the network's signature takes the time as the first argument."""
    try:
        names = [
            p.name for p in inspect.signature(network.forward).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD
        ]
    except (TypeError, ValueError):
        return
    if len(names) > 1 and names[0] in TIME_NAMES and names[1] not in TIME_NAMES:
        raise UsageError(
            f"the network takes ({names[0]}, {names[1]}), but fields call it as (x, t); use "
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
    """Attach a noise model to a velocity network. The network is not changed.

    >>> from fmwc.networks import MLP
    >>> net = MLP(dim=2, hidden=16, depth=2)
    >>> field = attach(net, space=(2,))
    >>> x, t = torch.zeros(3, 2), torch.full((3,), 0.5)
    >>> bool((field(x, t) == net(x, t)).all()), field.moments(x, t).var.shape
    (True, torch.Size([3, 2]))

    Arguments:
        network: Any module called as `network(x, t, **cond)`.
        include, exclude: One or more glob patterns for the dotted names of the linear and convolution layers that carry
            noise.
        space: The shape of one sample (an integer for a vector), or a space; taken from the first data if not given.
        prior_rate: The prior rate p of the KL.
        width: The hidden width of the inference networks.
        kl_factor: The leading factor of the KL; 1 is the paper's formula as printed.
        initial_log_alpha: The value of log α (the noise level) before training.
        seed: The seed of the initial weights of the inference networks.
    """
    if not isinstance(network, nn.Module):
        raise UsageError(f"network must be a torch module, got {type(network).__name__}")
    _check_call(network)
    lazy = nn.UninitializedParameter, nn.UninitializedBuffer  # refused below
    weights = (*network.parameters(), *network.buffers())
    if any(value.is_inference() for value in weights if not isinstance(value, lazy)):
        raise UsageError(
            "the network's weights were created under torch.inference_mode, so they have no derivatives; outside of "
            "it, use attach(copy.deepcopy(net))"
        )
    include, exclude = ((names,) if isinstance(names, str) else names for names in (include, exclude))
    device = torch.get_default_device()
    generator = torch.Generator("cpu" if device.type == "meta" else device).manual_seed(as_whole(seed, "seed"))
    with torch.inference_mode(False):
        noise = NoiseModel(network, include, exclude, width, initial_log_alpha, generator)
    return Field(network, noise, space, prior_rate, kl_factor)
