r"""Confidence of the images of diffusers' pipelines that use `FlowMatchEulerDiscreteScheduler` (SD3, Flux, Lumina2, …).

>>> confidence = Confidence(pipe, field)  # doctest: +SKIP
>>> images = pipe(prompt, callback_on_step_end=confidence).images  # doctest: +SKIP
>>> confidence.trajectory.score(), confidence.doubt_map()  # doctest: +SKIP

The variance is that of the velocity which the scheduler receives: guided, normalised and with the pipeline's sign. The
pipeline computes it from one or two evaluations of its network, v = f(o₁, o₂). Hooks record the evaluations of a step
and the graph of f, and the step's random directions δ are pushed through the network (:class:`Tangent`) and through f:

.. math:: Var[v] = E \left[ \left( \sum_k \frac{∂f}{∂o_k} δ_k \right)^2 \right]

Both evaluations of an image use the same draw of the weights, so that shared errors cancel in the guided velocity. This
is first order in the noise and exact for classifier-free guidance, which is linear. The pipeline continues with its own
numbers, so the images are bit for bit the same.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

import fmwc.checks
from fmwc.adapters import Adapted
from fmwc.calibration import labels_choose
from fmwc.checks import CheckResult
from fmwc.errors import ShapeError, UsageError
from fmwc.estimators import Estimator, Tangent, as_estimator
from fmwc.field import Field
from fmwc.flow import euclidean
from fmwc.modes import eagerly
from fmwc.noise import Pass
from fmwc.randomness import Blocks, derive
from fmwc.sampling import ReadWith, Reference, Schedule, Trajectory
from fmwc.sampling.confidence import CHANGED, EVERY_STEP, compared, is_due
from fmwc.sampling.trajectory import FreeSignals
from fmwc.state import as_whole, has_rows, require_labels, unsqueeze_like

__all__ = ["Best", "Confidence", "check", "encode", "velocity"]

SCHEDULER = "FlowMatchEulerDiscreteScheduler"
SCORES = ("integrated", "geometric", "endpoint", "peak", "spread", "detour")  # candidates if there are labels
FEWEST = 8  # images of a reference
LEVELS = 1001  # quantiles of a reference
OWN = ("callback_on_step_end", "generator", "return_dict")  # arguments of the pipeline that fmwc sets

NO_REFERENCE = "there is no reference for images like these; call Confidence.fit_reference(prompts, n)"


# ---- one step of a pipeline ------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """One call of the pipeline's network.

    Attributes:
        kwargs: Its arguments by name; the first one is the state.
        output: Its output, a leaf of the graph of f.
    """

    kwargs: dict[str, Any]
    output: Tensor

    @property
    def rows(self) -> int:
        return len(self.output)


class Step:
    """The velocity of one step, as a field that an estimator can read.

    Arguments:
        network: The pipeline's network.
        noise: Its noise model.
        calls: The calls of the network.
        v: The velocity as the scheduler receives it, with its graph.
    """

    fused = False
    row_order_checked = True

    def __init__(self, network: nn.Module, noise: Any, calls: Sequence[Call], v: Tensor) -> None:
        if not v.requires_grad:
            raise UsageError("the pipeline's velocity cannot be traced back to its network; read another pipeline")
        self.network, self.noise, self.calls = network, noise, calls
        self.v, self.count = v.detach(), len(v)
        self.evaluations = sum(call.rows for call in calls) // self.count
        with torch.enable_grad():
            leaves = [call.output for call in calls]
            self.probe = torch.zeros_like(v, requires_grad=True)
            self.pulled = torch.autograd.grad(v, leaves, self.probe, create_graph=True, allow_unused=True)

    def __call__(self, x: Any, t: Tensor, **cond: Any) -> Tensor:
        """Return the velocity of the pipeline."""
        return self.v

    def run(self, current: Pass, x: Any, t: Tensor, *, cond: Mapping[str, Any] | None = None) -> Tensor:
        """Evaluate the network once for all calls under a pass; return the velocity, by the derivative of f."""
        kwargs = stacked(self.calls, self.count)
        scope = self.noise.during(current, t, (), self.evaluations > 1)
        out = eagerly(scope.call)(self.network, **kwargs)[0]
        parts = out.unflatten(0, (self.count, self.evaluations)).transpose(0, 1)
        duals = [forward_ad.unpack_dual(part.flatten(0, 1)) for part in self._of_calls(parts)]
        v = self.v + self.linear([d.primal - call.output.detach() for d, call in zip(duals, self.calls, strict=True)])
        tangents = [d.tangent for d in duals]
        if all(tangent is None for tangent in tangents):
            return v
        return forward_ad.make_dual(v, self.linear(tangents))

    def linear(self, changes: Sequence[Tensor | None]) -> Tensor:
        """Return the derivative of f, applied to a change of each call's output."""
        # Both directions of a derivative in reverse mode: the derivative of the pulled-back probe by the probe.
        both = zip(self.pulled, changes, strict=True)
        pairs = [(p, c.to(p.dtype)) for p, c in both if p is not None and c is not None]
        with torch.enable_grad():
            (found,) = torch.autograd.grad(
                [p for p, _ in pairs],
                self.probe,
                [c for _, c in pairs],
                retain_graph=True,
                create_graph=any(c.requires_grad for _, c in pairs),
            )
        return found

    def weights(self) -> str:
        """Describe f by the weight of each evaluation; `varying` if it is not the same everywhere."""
        found = []
        for number in range(self.evaluations):
            one = torch.arange(self.evaluations) == number
            rows = [torch.ones_like(c.output).unflatten(0, (-1, self.count)) for c in self.calls]
            sizes = [len(row) for row in rows]
            parts = [r * m.to(r).reshape(-1, *[1] * (r.ndim - 1)) for r, m in zip(rows, one.split(sizes), strict=True)]
            low, high = self.linear([part.flatten(0, 1) for part in parts]).aminmax()
            found.append(f"{float(low):.4g}" if high - low <= 1e-3 * high.abs().clamp_min(1) else "varying")
        return "/".join(found)

    def _of_calls(self, parts: Tensor) -> tuple[Tensor, ...]:  # (evaluations, B, *)
        return parts.split([call.rows // self.count for call in self.calls])


def stacked(calls: Sequence[Call], count: int) -> dict[str, Any]:
    """Return the arguments of one call with all evaluations of an image in adjacent rows.

    Pipelines evaluate a guided velocity in one call on two blocks of rows (SD3), or in two calls (Lumina2).
    """
    evaluations = sum(call.rows for call in calls)
    if evaluations % count or evaluations // count > 2:
        raise UsageError(
            f"the pipeline evaluated its network {evaluations / count:g} times per image in one step; 1 and 2 are "
            "supported: switch off further guidance (skip_guidance_layers, perturbed attention)"
        )
    if evaluations == count:
        return dict(calls[0].kwargs)

    def merged(name: str, values: list[Any]) -> Any:
        has = [has_rows(v, call.rows) and not name.endswith("_ids") for v, call in zip(values, calls, strict=True)]
        if all(has):
            if len({value.shape[1:] for value in values}) > 1:
                raise UsageError(
                    f"the evaluations with and without the prompt have '{name}' of shapes "
                    f"{' and '.join(str(tuple(value.shape[1:])) for value in values)}; pad both prompts to one length"
                )
            return torch.cat(values).unflatten(0, (2, count)).transpose(0, 1).flatten(0, 1)
        if any(value is not values[0] and not _equal(value, values[0]) for value in values):
            raise UsageError(f"the evaluations of the guided velocity differ in '{name}', which has no row per image")
        return values[0]

    return {name: merged(name, [call.kwargs[name] for call in calls]) for name in calls[0].kwargs}


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    return bool(type(a) is type(b) and not isinstance(a, Tensor) and a == b)


class Tap:
    """Hooks on a pipeline's network and scheduler, which see the calls and the velocity of every step.

    Between the first call of a step and the scheduler, autograd records the pipeline's operations. Pipelines run under
    `torch.no_grad`, which restores the mode at their end even after an exception.

    Arguments:
        pipe: The pipeline.
        begin: Called when the pipeline sets its timesteps.
        wanted: Returns whether to record the present step.
        read: Called with the calls, the velocity with its graph, the state, the time and the state after the step.
    """

    def __init__(
        self, pipe: Any, begin: Callable[[], None], wanted: Callable[[], bool], read: Callable[..., None]
    ) -> None:
        self.pipe, self.network, self.scheduler = pipe, network_of(pipe), scheduler_of(pipe)
        self.begin, self.wanted, self.read = begin, wanted, read
        self.active = self.busy = False
        self.calls: list[Call] = []
        called = pipe.transformer if getattr(pipe, "transformer", None) is not None else pipe.unet
        self.handles = (
            called.register_forward_pre_hook(self._before, with_kwargs=True),
            called.register_forward_hook(self._after, with_kwargs=True),
        )
        wraps = {"step": self._step, "set_timesteps": self._set_timesteps}
        for name, function in wraps.items():
            method = getattr(self.scheduler, name)
            # Pipelines inspect the signatures of these methods.
            setattr(self.scheduler, name, functools.wraps(method)(functools.partial(function, method)))

    def remove(self) -> None:
        """Remove the hooks."""
        self.active = False
        for handle in self.handles:
            handle.remove()
        for name in ("step", "set_timesteps"):
            vars(self.scheduler).pop(name, None)

    def _set_timesteps(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self.active, self.calls = True, []
        self.begin()
        return method(*args, **options)

    def _running(self) -> bool:
        """Return whether the pipeline is running in this thread."""
        frame: Any = sys._getframe()
        while frame is not None:
            if frame.f_code.co_name == "__call__" and frame.f_locals.get("self") is self.pipe:
                return True
            frame = frame.f_back
        return False

    def _before(self, network: nn.Module, args: Any, kwargs: Any) -> None:
        if self.active and not self.busy:
            if not self._running():  # an earlier run was interrupted
                self.active, self.calls = False, []
                return
            if torch.is_inference_mode_enabled():
                raise UsageError("variances cannot be read in torch.inference_mode; use torch.no_grad for the pipeline")
            torch.set_grad_enabled(False)  # enabled after an earlier call of this step

    def _after(self, network: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if not self.active or self.busy or not self.wanted():
            return None
        first = output[0]
        if not isinstance(first, Tensor):
            raise UsageError(f"{type(network).__name__} returns a {type(first).__name__}; one tensor is supported")
        leaf = first.detach().requires_grad_()
        bound = inspect.signature(self.network.forward).bind(*args, **kwargs).arguments
        self.calls.append(Call({**bound, **bound.pop("kwargs", {})}, leaf))
        torch.set_grad_enabled(True)
        changed = leaf.clone()  # the pipeline may change its output in place
        if isinstance(output, tuple):
            return (changed, *output[1:])
        output[0 if isinstance(output, list) else next(iter(output))] = changed
        return output

    def _step(self, method: Callable[..., Any], v: Tensor, timestep: Any, sample: Tensor, *args: Any, **kw: Any) -> Any:
        if not self.active:
            return method(v, timestep, sample, *args, **kw)
        if self.calls:
            torch.set_grad_enabled(False)
        calls, self.calls = self.calls, []
        t = 1 - torch.as_tensor(timestep).float() / self.scheduler.config.num_train_timesteps
        result = method(v.detach(), timestep, sample, *args, **kw)
        after = result[0] if isinstance(result, tuple) else result.prev_sample
        self.busy = True
        try:
            self.read(calls, v, sample, t, after)
        finally:
            self.busy = False
        return result


def network_of(pipe: Any) -> Any:
    """Return the velocity network of a pipeline; if it is compiled, the module that was compiled."""
    for name in ("transformer", "unet"):
        if isinstance(network := getattr(pipe, name, None), nn.Module):
            return getattr(network, "_orig_mod", network)
    raise UsageError(f"pipe must be a pipeline of diffusers with a transformer or unet, got {type(pipe).__name__}")


def texts_of(prompts: Any) -> list[Any] | None:
    """Return prompts, or classes, as a list; a single one becomes a list of one."""
    return [prompts] if isinstance(prompts, (str, int)) else None if prompts is None else list(prompts)


def scheduler_of(pipe: Any) -> Any:
    """Return the scheduler of a pipeline; raise if it is not that of a flow with noise at timestep 1000."""
    if "callback_on_step_end" not in inspect.signature(type(pipe).__call__).parameters:
        raise UsageError(
            f"{type(pipe).__name__} takes no callback_on_step_end, so its steps cannot be read; sample its network "
            "with fmwc: fmwc.attach(fmwc.adapters.timestepped(pipe.transformer, backwards=True), space=...)"
        )
    scheduler: Any = getattr(pipe, "scheduler", None)
    if SCHEDULER not in (kind.__name__ for kind in type(scheduler).__mro__):
        raise UsageError(
            f"the pipeline's scheduler is {type(scheduler).__name__}; use pipe.scheduler = {SCHEDULER}.from_config("
            "pipe.scheduler.config) if the model is a flow"
        )
    if scheduler.config.get("invert_sigmas"):
        raise UsageError("a scheduler with inverted sigmas (Mochi) is not supported")
    if scheduler.config.get("stochastic_sampling"):
        raise UsageError("a scheduler with stochastic_sampling is not supported; its images have no single trajectory")
    if "step" in vars(scheduler):
        raise UsageError("the pipeline is already read by a Confidence; call its remove() first")
    return scheduler


# ---- confidence ------------------------------------------------------------------------------------------------------


class Best(NamedTuple):
    """Result of :meth:`Confidence.best_of`.

    Attributes:
        images: The surest image of each prompt.
        score: Its score, `(B,)`.
        seed: Its seed, `(B,)`: `pipe(..., generator=torch.Generator().manual_seed(seed))` draws it again.
        evaluations: Evaluations of the network per prompt in all runs, without those of the readings.
    """

    images: list[Any]
    score: Tensor
    seed: Tensor
    evaluations: int


class Confidence:
    """Callback of a pipeline that reads the variance of the velocity at each step.

    The hooks remain in the pipeline until :meth:`remove`, or the end of a `with` block. A run without the callback
    reads its first step only. Each reading takes one more evaluation of the network in forward mode per probe.

    Arguments:
        pipe: A pipeline of diffusers.
        field: A field whose network is `pipe.transformer` or an adapter of it (:func:`velocity`).
        estimator: The estimator of the variance. It must return one variance per coordinate.
        schedule: When to read the variance; at every step by default.
        score: The score of the images. The default is that of the field's reference if it is one of pipelines, else
            `integrated`, which only grows along the trajectory.
        stop: Interrupt the run when the integrated score of every image exceeds this number, or the number per image.
            Nothing is lost if the score is `integrated`: the final scores would also exceed it.
        seed: The seed of the probes.

    Attributes:
        stopped: The number of steps after which the run was interrupted; 0 if it was not.
    """

    tensor_inputs = ("latents",)  # read by diffusers' MultiPipelineCallbacks

    def __init__(
        self,
        pipe: Any,
        field: Field,
        *,
        estimator: str | Estimator = Tangent(),  # noqa: B008
        schedule: Schedule = EVERY_STEP,
        score: str = "",
        stop: float | Tensor | None = None,
        seed: int = 0,
    ) -> None:
        network = network_of(pipe)
        if not isinstance(field, Field) or not any(m is network for m in field.network.modules()):
            raise UsageError(
                "the field must be attached to the pipeline's network: fmwc.attach(pipe.transformer), or attach an "
                "adapter of it"
            )
        known = getattr(field.reference, "score", "")
        self.score = score or (known if known in SCORES else SCORES[0])
        self.pipe, self.field, self.seed = pipe, field, as_whole(seed, "seed")
        self.estimator, self.schedule, self.stop = as_estimator(estimator), schedule, stop
        self._tap = Tap(pipe, self._begin, self._wanted, self._read)
        try:
            self._begin()
        except UsageError:
            self.remove()
            raise

    def __enter__(self) -> Confidence:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the hooks from the pipeline."""
        self._tap.remove()

    # ---- while a pipeline runs ----

    def _begin(self) -> None:
        network, noise = (next(module.parameters()) for module in (self._tap.network, self.field.noise))
        if (network.device, network.dtype) != (noise.device, noise.dtype):
            raise UsageError(
                f"the network is {network.dtype} on {network.device}, but its noise {noise.dtype} on {noise.device}; "
                f"use field.to(pipe.device, pipe.dtype)"
            )
        if self.stop is not None and not self._stops:
            raise UsageError(f"{type(self.pipe).__name__} cannot be interrupted; leave out stop")
        self.stopped = self._step = 0
        self._called = True  # by the pipeline, after the step before
        self._readings: list[tuple[int, Tensor]] = []  # number of the step, variance per position
        self._times: list[Tensor] = []
        self._x0: Any = None
        self._x: Any = None
        self._free: FreeSignals | None = None
        self._made: list[str] = []  # settings, and the steps at which they changed
        self._left: tuple[Any, int] = (None, 0)  # the latents after the step before, and their version
        self._edited = 0
        self._evaluations = 0
        self._partial: Any = 0.0
        self._layout: dict[str, Any] = {}

    @property
    def _stops(self) -> bool:
        """Whether the pipeline can be interrupted."""
        return hasattr(type(self.pipe), "interrupt")

    @property
    def _sigmas(self) -> Tensor:
        """The noise level at the start of each step, and at the end."""
        return self._tap.scheduler.sigmas[self._tap.scheduler.begin_index or 0 :]

    @property
    def _steps(self) -> int:
        return len(self._sigmas) - 1

    def _wanted(self) -> bool:
        now = 1 - self._sigmas[self._step : self._step + 1]
        before = self._times[-1][:1].to(now) if self._times else None
        return self._called and is_due(self.schedule, self._step, self._steps, before, now)

    def _read(self, calls: list[Call], v: Tensor, x: Tensor, t: Tensor, after: Tensor) -> None:
        """Read one step, which began at x and t and ended at `after`."""
        if not self._called:
            self._tap.active = False  # the pipeline runs without the callback
            return
        times = t.to(x.device).expand(len(x))
        latents, version = self._left
        if latents is not None and (latents._version != version or not torch.equal(x, latents)):
            self._edited = self._edited or self._step
        if self._free is None:
            self._x0 = x
            self._free = FreeSignals(euclidean(tuple(x.shape[1:])), x.float(), self._steps)
        if calls:
            step = Step(self._tap.network, self.field.noise, calls, v)
            self._settings(step, x)
            self._evaluations = step.evaluations
            self._layout = calls[0].kwargs
            randomness = Blocks(derive(self.seed, "pipeline", self._step), 0, len(x))
            var = self.estimator(step, x, times, {}, randomness).var
            if var.shape != x.shape:
                raise UsageError(f"{self.estimator} returns no variance per coordinate; use Tangent() or MonteCarlo()")
            self._readings.append((self._step, self._positions(var)))
        self._times.append(times)
        self._free.guess(self._step, x.float(), times, -v.detach().float())
        self._free.move(after.float())
        self._x = after
        end = 1 - self._sigmas[self._step + 1].to(times)
        if self._readings:
            self._partial = self._partial + self._readings[-1][1].flatten(1).sum(1).sqrt() * (end - times)
        self._step += 1
        self._called = False
        if self._step == self._steps:
            self._tap.active = False

    def __call__(self, pipe: Any, step: int, timestep: Any, callback_kwargs: dict[str, Any]) -> dict[str, Any]:
        """Finish a step; the pipeline calls this as `callback_on_step_end`."""
        if not self._step or pipe.scheduler is not self._tap.scheduler:
            raise UsageError("the pipeline's network or scheduler was replaced; make a new Confidence")
        if (latents := callback_kwargs.get("latents")) is None:
            raise UsageError("callback_on_step_end_tensor_inputs must hold 'latents'")
        self._called, self._left = True, (latents, latents._version)
        if self.stop is None or self._step == self._steps:
            return callback_kwargs
        if bool((self._partial > torch.as_tensor(self.stop).to(self._partial)).all()):
            self.stopped, self._tap.active = self._step, False
            pipe._interrupt = True
        return callback_kwargs

    def _positions(self, var: Tensor) -> Tensor:  # (B, *) -> (B, H, W)
        """Return the variance summed over the channels of each latent position."""
        if var.ndim != 3:
            return var.sum(1)
        if not hasattr(self.pipe, "_unpack_latents"):
            return var.sum(2)
        rows, columns = _grid(self._layout, var.shape[1])
        scale = self.pipe.vae_scale_factor
        return self.pipe._unpack_latents(var, 2 * rows * scale, 2 * columns * scale, scale).sum(1).squeeze(1)

    def _settings(self, step: Step, x: Tensor) -> None:
        """Note what else than steps and readings makes scores of runs incomparable, if it changed at this step."""
        shape = "x".join(map(str, x.shape[1:]))
        guidance = step.calls[0].kwargs.get("guidance")
        weights = step.weights()
        if guidance is None and "varying" in weights:  # guidance with a normalisation
            guidance = torch.tensor(float(getattr(self.pipe, "guidance_scale", None) or torch.nan))
        scale = "" if guidance is None else f", guidance {float(guidance.flatten()[0]):.4g}"
        made = f"Euler ({shape}, weights {weights}{scale})"
        if not self._made or not self._made[-1].startswith(made):
            self._made.append(f"{made} from step {self._step}" if self._made else made)

    # ---- after a run ----

    @property
    def trajectory(self) -> Trajectory:
        """The last run: `.score()`, `.rank`, and `.confidence`, or `.withheld` if it cannot be compared.

        `x` are the final latents, and `var` is the variance per latent position, summed over channels. Velocities are
        not kept: `mean` is not a number.
        """
        if self._free is None or not self._readings or (not self._called and not self.stopped):
            raise UsageError("nothing was read; call pipe(..., callback_on_step_end=confidence) first")
        numbers, var = zip(*self._readings, strict=True)
        times = torch.stack(self._times)
        run = Trajectory(
            x=self._x,
            x0=self._x0,
            times=times[list(numbers)],
            mean=torch.full_like(torch.stack(var), torch.nan),
            var=torch.stack(var),
            grid=torch.cat([times, torch.ones_like(times[:1])]),
            default_score=self.score,
            evaluations=self._step * self._evaluations,
            evidence=self._free.evidence(),
            seed=self.seed,
        )
        reference: Reference | None = self.field.reference
        if self.stopped:
            return replace(run, without=f"the run was stopped after {self.stopped} of {self._steps} steps")
        if self._edited:
            return replace(run, without=f"the latents were changed after step {self._edited}")
        if reference is None:
            return replace(run, without=NO_REFERENCE)
        made, without = self._read_with(run), ""
        if reference.read_with is None:
            without = f"the reference, {reference.score}, is not one of pipelines; call Confidence.fit_reference"
        elif differs := reference.read_with.differs(made, variance=reference.needs_variance):
            without = f"the reference was made with {differs}"
        elif reference.weights not in (None, self.field.checksum()):
            without = CHANGED
        return compared(run, reference, without)

    def _read_with(self, run: Trajectory) -> ReadWith:
        times = tuple(round(float(t), 6) for t in run.times[:, 0])
        return ReadWith(str(self.estimator), self._step, ", ".join(self._made), times)

    def doubt_map(self, size: Sequence[int] | None = None) -> Tensor:  # -> (B, H, W)
        r"""Return the variance of the velocity accumulated along the trajectory, Σ Var[v] Δt, at each pixel.

        For a video, the map has a dimension for the latent frames before the last two.

        Arguments:
            size: The height and width of the map; by default those of the images. `(0, 0)` returns the latent
                positions.
        """
        run = self.trajectory
        latent = (run.var * unsqueeze_like(run.weights, run.var).to(run.var)).sum(0)
        if size is not None and not any(size):
            return latent
        if latent.ndim < 3:
            raise UsageError("the latents have no rows and columns; use doubt_map((0, 0))")
        scale = self.pipe.vae_scale_factor
        size = [side * scale for side in latent.shape[-2:]] if size is None else list(size)
        several = latent.flatten(1, -3) if latent.ndim > 3 else latent[:, None]  # frames of a video
        pixels = F.interpolate(several, size=size, mode="bilinear", align_corners=False)
        return pixels if latent.ndim > 3 else pixels[:, 0]

    def threshold(self, confidence: float) -> float:
        """Return the integrated score at which an image has this confidence, for `stop`.

        It holds for runs with the settings of the reference, such as steps and guidance.
        """
        reference = self.field.reference
        if reference is None or reference.withheld:
            raise UsageError(NO_REFERENCE if reference is None else reference.withheld)
        if reference.score != "integrated":
            raise UsageError(
                f"stop needs the score integrated, but the score of the reference is {reference.score}; use "
                "Confidence(pipe, field).fit_reference(prompts, n) without labels"
            )
        if not 0 <= confidence <= 1:
            raise UsageError(f"confidence must lie in [0, 1], got {confidence}")
        return float(reference.quantiles.quantile(1 - confidence))

    # ---- several runs ----

    def _draw(self, seed: int, call: dict[str, Any]) -> Any:
        """Run the pipeline with a seed and return its images."""
        generator = torch.Generator().manual_seed(seed)
        return self.pipe(**call, generator=generator, callback_on_step_end=self).images

    def fit_reference(
        self,
        prompts: Sequence[str] | None = None,
        n: int = 1,
        *,
        labels: Callable[[Any], Any] | None = None,
        seed: int = 0,
        **call: Any,
    ) -> Reference:
        """Draw `n` images of each prompt, and store their scores as the reference of the field's confidence.

        Use prompts like those of later runs, and the same settings: steps, guidance, size and estimator.

        Arguments:
            prompts: The prompts; leave out if `call` holds embeddings.
            n: The number of runs, each with all prompts and its own seed.
            labels: A function of the images of one run that returns which of them failed. The score that separates the
                failures best becomes the score of the confidence. If none is better than chance, confidence is
                withheld. Without labels, the score is not tested.
            seed: The seed of the first run.
            call: Other arguments of the pipeline, such as `num_inference_steps`.
        """
        call = _arguments(self.pipe, call, prompts) | ({} if labels else {"output_type": "latent"})
        names = (self.score,) if labels is None else SCORES
        scores: dict[str, list[Tensor]] = {name: [] for name in names}
        failed: list[Tensor] = []
        stop, self.stop = self.stop, None
        try:
            for number in range(as_whole(n, "n", 1)):
                images = self._draw(seed + number, call)
                run = self.trajectory
                for name, found in scores.items():
                    found.append(run.score(name))
                if labels is not None:
                    result = require_labels(labels(images), "the result of labels")
                    failed.append(torch.from_numpy(result).reshape(-1).to(run.grid.device))
        finally:
            self.stop = stop
        values = {name: torch.cat(found) for name, found in scores.items()}
        count = len(next(iter(values.values())))
        if count < FEWEST:
            raise UsageError(f"a reference needs at least {FEWEST} images, got {count}; give more prompts or raise n")
        score, reason, withheld = self.score, f"the score {self.score} was not tested with labels", ""
        candidates: list[dict[str, Any]] = []
        if labels is not None:
            candidates, reason, withheld = _by_labels(values, torch.cat(failed))
            score = candidates[0]["score"]
        self.score = score
        self.field.reference = Reference(
            score,
            self._read_with(run),
            values[score].quantile(torch.linspace(0, 1, LEVELS, device=values[score].device)),
            reason=reason,
            withheld=withheld,
            candidates=tuple(candidates),
            weights=self.field.checksum(),
        )
        return self.field.reference

    def best_of(self, n: int, prompts: Sequence[str] | None = None, *, seed: int = 0, **call: Any) -> Best:
        """Draw `n` candidates per prompt and return the surest. A candidate is the image of the pipeline for its seed.

        With the score `integrated`, a run ends as soon as the scores of all its images exceed those of the best so far.

        Arguments:
            n: The number of candidates; their seeds are `seed`, `seed + 1`, …
            prompts: The prompts; leave out if `call` holds embeddings.
            seed: The seed of the first candidate.
            call: Other arguments of the pipeline.
        """
        call = _arguments(self.pipe, call, prompts)
        stop, best = self.stop, None
        ends = self.score == "integrated" and self._stops
        evaluations = 0
        try:
            for number in range(as_whole(n, "n", 1)):
                self.stop = best.score if best is not None and ends else None
                images = self._draw(seed + number, call)
                run = self.trajectory
                evaluations += run.evaluations
                if self.stopped:
                    continue
                score, seeds = run.score(self.score), torch.full((len(run),), seed + number)
                if best is None:
                    best = Best(list(images), score, seeds, 0)
                    continue
                better = score < best.score
                chosen = [new if b else old for new, old, b in zip(images, best.images, better.tolist(), strict=True)]
                best = Best(chosen, score.minimum(best.score), torch.where(better.cpu(), seeds, best.seed), 0)
        finally:
            self.stop = stop
        assert best is not None  # the first run is not stopped
        return best._replace(evaluations=evaluations)


def _arguments(pipe: Any, call: dict[str, Any], prompts: Any) -> dict[str, Any]:
    """Return the arguments of the pipeline; raise if they hold one that fmwc sets."""
    if taken := [name for name in OWN if name in call]:
        raise UsageError(f"fmwc sets the pipeline's argument {taken[0]}; leave it out (seed= sets the seeds)")
    if prompts is None:
        return dict(call)
    names = list(inspect.signature(type(pipe).__call__).parameters)
    return {**call, "prompt" if "prompt" in names else names[1]: texts_of(prompts)}


def _grid(layout: Mapping[str, Any], tokens: int) -> tuple[int, int]:
    """Return the rows and columns of packed latents, from the positions that the pipeline gives its network."""
    if (ids := layout.get("img_ids")) is not None:
        last = ids.reshape(-1, ids.shape[-1])[:tokens].amax(0)
        return int(last[1]) + 1, int(last[2]) + 1
    shape = layout.get("img_shapes")
    while isinstance(shape, (list, tuple)) and shape and isinstance(shape[0], (list, tuple)):
        shape = shape[0]
    if shape is not None and len(shape) == 3:
        return int(shape[1]), int(shape[2])
    side = round(tokens**0.5)
    if side * side != tokens:
        raise ShapeError(f"the pipeline packs its latents into {tokens} tokens of unknown layout; use square images")
    return side, side


def _by_labels(scores: Mapping[str, Tensor], failed: Tensor) -> tuple[list[dict[str, Any]], str, str]:
    """Return the scores by their AUROC, best first, the reason for the choice, and why confidence is withheld."""
    count, bad = len(next(iter(scores.values()))), int(failed.sum())
    good = count - bad
    if len(failed) != count or not bad or not good:
        raise UsageError(
            f"labels must return one value per image, with failures and successes among them; got {bad} failures in "
            f"{len(failed)} labels for {count} images"
        )
    name, by_score = labels_choose(scores, failed)
    rows = [{"score": name, "auroc": round(by_score[name], 4)} for name in sorted(by_score, key=lambda n: -by_score[n])]
    best = rows[0]["score"]
    reason = f"of {len(failed)} labels with {bad} failures, {best} has AUROC {by_score[best]:.2f}"
    return rows, reason, "" if name else f"no score is better than chance ({reason})"


# ---- the network of a pipeline as a velocity network -----------------------------------------------------------------


def velocity(
    pipe: Any, prompts: Sequence[str] | None = None, *, batch: int = 16, **call: Any
) -> tuple[Adapted, dict[str, Any]]:
    """Return the pipeline's network called as `network(x, t, **cond)`, and the conditions of prompts, one row for each.

    The conventions are measured on two steps of the pipeline without guidance: how it converts times, and which sign
    its velocity has.

    >>> network, cond = velocity(pipe, captions)  # doctest: +SKIP
    >>> field = fmwc.attach(network, space=tuple(latents.shape[1:]))  # doctest: +SKIP
    >>> fmwc.fit_noise(field, latents, cond=cond, batch=8)  # doctest: +SKIP

    Arguments:
        pipe: The pipeline.
        prompts: The prompts; leave out if `call` holds embeddings.
        batch: The number of prompts encoded together.
        call: Other arguments of the pipeline, such as `height` and `width`. `guidance_scale` is 1 unless the network
            takes it as an input (Flux).
    """
    network, texts = network_of(pipe), texts_of(prompts)
    config = getattr(network, "config", {})
    if not config.get("guidance_embeds"):
        call = {"guidance_scale": 1.0, **call}
    call = {**call, "num_inference_steps": 2, "output_type": "latent"}
    seen: list[tuple[list[Call], Tensor, float]] = []
    tap = Tap(
        pipe,
        lambda: None,
        lambda: True,
        lambda calls, v, x, t, after: seen.append((calls, _sign(network, calls, v), float(1 - t))),
    )
    parts = [None] if texts is None else [texts[i : i + batch] for i in range(0, len(texts), batch)]
    conds: list[tuple[dict[str, Any], int]] = []  # with the number of rows
    try:
        with torch.no_grad():
            for part in parts:
                seen.clear()
                pipe(**_arguments(pipe, call, part))
                first = seen[0][0][0]
                conds.append((_conditions(first), first.rows))
    finally:
        tap.remove()
    rows: dict[str, Tensor] = {}
    for name in conds[0][0]:
        values = [cond[name] for cond, _ in conds]
        if name.endswith("_ids") or not all(has_rows(cond[name], count) for cond, count in conds):
            continue
        if len({value.shape[1:] for value in values}) > 1:
            raise UsageError(
                f"batches of prompts have '{name}' of different lengths; raise batch to {len(texts or ())}"
            )
        rows[name] = torch.cat(values)
    fixed = {name: value for name, value in conds[0][0].items() if name not in rows}
    return Adapted(network, time="timestep", output=_Output(config), **_convention(seen), **fixed), rows


class _Output:
    """Select the velocity from the network's output, without a predicted scale (PixArt, Sana)."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        channels, out = config.get("in_channels"), config.get("out_channels")
        self.halves = 2 if channels and out == 2 * channels else 1

    def __call__(self, output: Any) -> Tensor:
        return output[0].chunk(self.halves, dim=1)[0]


def _conditions(call: Call) -> dict[str, Any]:
    if "timestep" not in call.kwargs:
        raise UsageError("the pipeline's network has no argument timestep; wrap it with fmwc.adapters.adapt instead")
    return {name: value for name, value in list(call.kwargs.items())[1:] if name != "timestep"}


def _sign(network: nn.Module, calls: list[Call], v: Tensor) -> Tensor:
    """Return the factor between the network's output and the velocity that the scheduler receives."""
    if len(calls) != 1 or calls[0].rows != len(v):
        raise UsageError("the pipeline evaluates its network more than once per step without guidance")
    return Step(network, None, calls, v).linear([torch.ones_like(calls[0].output)])


def _convention(seen: Sequence[tuple[list[Call], Tensor, float]]) -> dict[str, Any]:
    """Return the options of the adapter: the scale of time, and whether time and velocity are reversed."""
    (tau0, s0), (tau1, s1) = ((float(calls[0].kwargs["timestep"].flatten()[0]), s) for calls, _, s in seen)
    slope = (tau1 - tau0) / (s1 - s0)
    start, sign = tau0 - slope * s0, float(seen[0][1].flatten()[0])
    same = all(bool((factor == sign).all()) for _, factor, _ in seen)
    backwards, forwards = abs(start) < 1e-3 * abs(slope), abs(start + slope) < 1e-3 * abs(slope)
    if not same or (backwards, forwards, sign) not in ((True, False, 1.0), (False, True, -1.0)):
        raise UsageError(
            f"the pipeline's conventions are not known: its network's time is {start:.4g} + {slope:.4g} s at noise "
            f"level s, and its velocity has the factor {sign:.4g}; wrap the network with fmwc.adapters.adapt instead"
        )
    return {"scale": float(f"{abs(slope):.6g}"), "backwards": backwards}


# ---- checks ----------------------------------------------------------------------------------------------------------


def encode(pipe: Any, images: Any) -> Tensor:
    """Return the latents of images as the pipeline's network sees them.

    Arguments:
        pipe: The pipeline.
        images: PIL images, or arrays and tensors with values in [0, 1].
    """
    return _encoded(pipe, pipe.image_processor.preprocess(images))


def _encoded(pipe: Any, pixels: Tensor) -> Tensor:
    vae = pipe.vae
    with torch.no_grad():
        encoded = vae.encode(pixels.to(vae.device, vae.dtype))
        latents = encoded.latent_dist.mode() if hasattr(encoded, "latent_dist") else encoded.latent
        latents = (latents - (vae.config.get("shift_factor") or 0.0)) * vae.config.get("scaling_factor", 1.0)
    return pipe._pack_latents(latents, *latents.shape) if hasattr(pipe, "_pack_latents") else latents


class _ByText(nn.Module):
    """Network whose condition is a list of texts."""

    def __init__(self, network: nn.Module, texts: Sequence[str], cond: dict[str, Any]) -> None:
        super().__init__()
        self.network, self.texts, self.cond = network, {text: i for i, text in enumerate(texts)}, cond

    def forward(self, x: Tensor, t: Tensor, prompt: Sequence[str]) -> Tensor:
        rows = torch.tensor([self.texts[text] for text in prompt], device=x.device)
        return self.network(x, t, **{name: value[rows.to(value.device)] for name, value in self.cond.items()})


def check(
    pipe: Any,
    x: Any,
    prompts: Sequence[str],
    rivals: Sequence[str] | None = None,
    *,
    call: Mapping[str, Any] | None = None,
    **options: Any,
) -> CheckResult:
    """Score finished images by how well the pipeline's network explains them (:func:`fmwc.check`).

    With rivals, the check is a contest: the residual of the velocity under an image's own prompt is compared with that
    under the rival prompts. Without, it is an echo: the residual under its own prompt, on noised copies of the image.

    Arguments:
        pipe: The pipeline, with its text encoders.
        x: Latents as the network sees them, or images (PIL or arrays), which are encoded.
        prompts: The prompt of each image.
        rivals: Other prompts, or all prompts.
        call: Arguments of the pipeline, such as `height` and `width` if `x` are packed latents of another size.
        options: Those of :func:`fmwc.check`, such as `evaluations` and `seed`.
    """
    own, others = texts_of(prompts) or [], texts_of(rivals)
    texts = list(dict.fromkeys([*own, *(others or ())]))
    size: dict[str, Any] = {}
    if isinstance(x, Tensor):
        latents, scale = x, pipe.vae_scale_factor
        if x.ndim == 4:
            size = {"height": x.shape[2] * scale, "width": x.shape[3] * scale}
    else:
        pixels = pipe.image_processor.preprocess(x)
        latents = _encoded(pipe, pixels)
        size = {"height": pixels.shape[2], "width": pixels.shape[3]}
    network, cond = velocity(pipe, texts, **{**size, **(call or {})})
    against = None if others is None else {"prompt": others}
    return fmwc.checks.check(_ByText(network, texts, cond), latents, {"prompt": own}, rivals=against, **options)
