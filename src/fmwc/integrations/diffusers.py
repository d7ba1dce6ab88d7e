r"""Confidence of the images of diffusers' pipelines that use `FlowMatchEulerDiscreteScheduler` (SD3, Flux, Lumina2, …).

>>> with Confidence(pipe, field) as confidence:  # doctest: +SKIP
...     images = pipe(prompt, callback_on_step_end=confidence).images
>>> confidence.trajectory.score(), confidence.doubt_map()  # doctest: +SKIP

The variance is that of the velocity that moves the latents: guided, normalised and with the pipeline's sign. The
pipeline computes it from one or two evaluations of its network, v = f(o₁, o₂). Autograd records the pipeline's
operations from these evaluations to the end of the step, and the directions δ that the estimator pushes through the
network are pushed through f:

.. math:: Var[v] = E \left[ \left( \sum_k \frac{∂f}{∂o_k} δ_k \right)^2 \right]

Both evaluations of an image use the same draw of the weights, so that shared errors cancel in the guided velocity. This
is first order in the noise and exact for classifier-free guidance, which is linear. The pipeline continues with its own
numbers, so the images are bit for bit the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
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
from fmwc.estimators import Tangent
from fmwc.field import Field
from fmwc.modes import eagerly
from fmwc.noise import Pass, check_rows
from fmwc.randomness import Blocks, derive
from fmwc.sampling import ReadWith, Reference, Trajectory
from fmwc.sampling.confidence import CHANGED, compared
from fmwc.state import as_whole, has_rows, require_labels, unsqueeze_like

__all__ = ["Best", "Confidence", "check", "encode", "velocity"]

SCHEDULER = "FlowMatchEulerDiscreteScheduler"
SCORES = ("integrated", "geometric", "endpoint", "peak")  # candidates if there are labels
FEWEST = 8  # images of a reference
NO_REFERENCE = "there is no reference for images like these; call Confidence.fit_reference(prompts, n)"

# ---- one step of a pipeline ------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """One evaluation of the network: its arguments by name (the first is the state), and its output, a leaf."""

    args: dict[str, Any]
    output: Tensor


class Step:
    """The velocity of one step, as a field that an estimator can read.

    Arguments:
        network: The pipeline's network.
        calls: Its evaluations.
        after: The latents after the step, with the graph from the outputs of the evaluations.
        start, end: The noise levels.
    """

    fused = False
    noise: Any = None  # the noise model, for an estimator

    def __init__(self, network: nn.Module, calls: Sequence[Call], after: Tensor, start: float, end: float) -> None:
        if not after.requires_grad:
            raise UsageError("the latents cannot be traced back to the pipeline's network; read another pipeline")
        self.network, self.calls, self.after, self.start, self.end = network, calls, after.detach(), start, end
        self.count = len(after)
        self.evaluations = sum(len(call.output) for call in calls) // self.count
        with torch.enable_grad():
            self.probe = torch.zeros_like(after, requires_grad=True)
            outputs = [call.output for call in calls]
            self.pulled = torch.autograd.grad(after / (end - start), outputs, self.probe, create_graph=True)

    def __call__(self, x: Any, t: Tensor, **cond: Any) -> Tensor:
        """Return the mean, which is not needed."""
        return torch.zeros_like(self.after)

    def run(self, current: Pass, x: Any, t: Tensor, *, cond: Mapping[str, Any] | None = None) -> Tensor:
        """Evaluate the network for all calls under a pass; return a dual number with the tangent of v."""
        doubled, inputs = self.evaluations > 1, stacked(self.calls, self.count)

        def evaluate(current: Pass, proven: Any = None) -> Tensor:
            scope = self.noise.during(current, t, None, doubled, proven)
            out: Tensor = eagerly(scope.call)(self.network, **inputs)[0]
            return out.unflatten(0, (self.count, -1))

        with torch.no_grad():
            proven = check_rows(self.noise, evaluate, x, {}, doubled=doubled) if self.count > 1 else None
        parts = evaluate(current, proven).transpose(0, 1)
        split = parts.split([len(call.output) // self.count for call in self.calls])
        tangents = [forward_ad.unpack_dual(part.flatten(0, 1)).tangent for part in split]
        return forward_ad.make_dual(torch.zeros_like(self.after), self.linear(tangents))

    def linear(self, changes: Sequence[Tensor | None]) -> Tensor:
        """Return the derivative of f, applied to a change of each call's output."""
        # A derivative in forward mode from two in reverse mode: that of the pulled-back probe by the probe.
        pairs = [(p, c.to(p.dtype)) for p, c in zip(self.pulled, changes, strict=True) if c is not None]
        pulled, like = zip(*pairs, strict=True)
        return torch.autograd.grad(pulled, self.probe, like, retain_graph=True)[0]

    def weights(self) -> list[float]:
        """Return the weight of each evaluation in f; not a number if it is not the same everywhere."""
        ones, found = [torch.ones_like(call.output) for call in self.calls], []
        for number in range(self.evaluations):
            rows = torch.arange(self.evaluations).repeat_interleave(self.count) == number
            masks = rows.to(self.after.device).split([len(one) for one in ones])
            low, high = self.linear([o * unsqueeze_like(m, o) for o, m in zip(ones, masks, strict=True)]).aminmax()
            found.append(float(low) if high - low <= 1e-3 * high.abs().clamp_min(1) else torch.nan)
        return found


def stacked(calls: Sequence[Call], count: int) -> dict[str, Any]:
    """Return the arguments of one call with all evaluations of an image in adjacent rows.

    Pipelines evaluate a guided velocity in one call on two blocks of rows (SD3), or in two calls (Lumina2).
    """
    evaluations = sum(len(call.output) for call in calls) / count
    if evaluations not in (1, 2):
        raise UsageError(
            f"the pipeline evaluated its network {evaluations:g} times per image in one step; 1 and 2 are "
            "supported: switch off further guidance (skip_guidance_layers, perturbed attention)"
        )

    def merged(name: str) -> Any:
        values = [call.args[name] for call in calls]
        if all(is_row(name, value, call) for value, call in zip(values, calls, strict=True)):
            if len({value.shape[1:] for value in values}) > 1:
                raise UsageError(
                    f"the two evaluations have '{name}' of different lengths; pad both prompts to one length"
                )
            return torch.cat(values).unflatten(0, (-1, count)).transpose(0, 1).flatten(0, 1)
        if not all(same(value, values[0]) for value in values):
            raise UsageError(f"the two evaluations differ in '{name}', which has no row per image")
        return values[0]

    return {name: merged(name) for name in calls[0].args}


def is_row(name: str, value: Any, call: Call) -> bool:
    """Return whether an argument of the network has a row for each image; positions (`img_ids`) have none."""
    return has_rows(value, len(call.output)) and not name.endswith("_ids")


def same(a: Any, b: Any) -> bool:
    """Return whether two arguments of the network are equal."""
    tensors = isinstance(a, Tensor) and isinstance(b, Tensor)
    return a is b or (torch.equal(a, b) if tensors else type(a) is type(b) and bool(a == b))


# ---- reading a pipeline ----------------------------------------------------------------------------------------------


def network_of(pipe: Any) -> tuple[nn.Module, nn.Module]:
    """Return the velocity network of a pipeline as it is called, and uncompiled."""
    for name in ("transformer", "unet"):
        if isinstance(network := getattr(pipe, name, None), nn.Module):
            return network, getattr(network, "_orig_mod", network)
    raise UsageError(f"pipe must be a pipeline of diffusers with a transformer or unet, got {type(pipe).__name__}")


def scheduler_of(pipe: Any) -> Any:
    """Return the scheduler of a pipeline; raise if the pipeline cannot be read."""
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
    for option in ("invert_sigmas", "stochastic_sampling"):
        if scheduler.config.get(option):
            raise UsageError(f"a scheduler with {option} is not supported")
    return scheduler


class Reader:
    """Callback of a pipeline, with hooks that see the evaluations of its network, for `read` at the end of each step.

    From the first evaluation of a step to the callback, autograd records the pipeline's operations. Pipelines run under
    `torch.no_grad`, which restores the mode at their end even after an exception.
    """

    tensor_inputs = ("latents",)  # asked for by diffusers' MultiPipelineCallbacks

    def __init__(self, pipe: Any, begin: Callable[[], object], read: Callable[[Step], object]) -> None:
        called, self.network = network_of(pipe)
        self.pipe, self.scheduler, self._begin, self._read = pipe, scheduler_of(pipe), begin, read
        if any(isinstance(getattr(hook, "__self__", None), Reader) for hook in called._forward_hooks.values()):
            raise UsageError("the pipeline is already read by a Confidence; call its remove() first")
        self._timesteps = self.scheduler.timesteps  # a new tensor in each run of the pipeline
        self._running, self._step, self._calls = False, 0, list[Call]()
        self._handles = (
            called.register_forward_pre_hook(self._before, with_kwargs=True),
            called.register_forward_hook(self._after, with_kwargs=True),
        )

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the hooks from the pipeline."""
        for handle in self._handles:
            handle.remove()

    @property
    def _sigmas(self) -> list[float]:
        """The noise level at the start of each step, and at the end."""
        return self.scheduler.sigmas[self.scheduler.begin_index or 0 :].tolist()

    def _before(self, network: nn.Module, args: Any, kwargs: Any) -> None:
        if self.scheduler.timesteps is not self._timesteps:
            if torch.is_inference_mode_enabled():
                raise UsageError("variances cannot be read in torch.inference_mode; use torch.no_grad for the pipeline")
            self._timesteps, self._running, self._step, self._calls = self.scheduler.timesteps, True, 0, []
            self._begin()
        elif self._calls:
            if (self.scheduler.step_index or 0) > self._step + (self.scheduler.begin_index or 0):
                self._running, self._calls = False, []
                raise UsageError("a step ended without callback_on_step_end=confidence; pass it, or call its remove()")
            if _time(self._named(args, kwargs)) == _time(self._calls[0].args):
                torch.set_grad_enabled(False)  # the second evaluation of this step
            else:
                self._running, self._calls = False, []  # an earlier run was interrupted

    def _after(self, network: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if not self._running or torch.is_grad_enabled():
            return None
        if not isinstance(first := output[0], Tensor):
            raise UsageError(f"{type(network).__name__} returns a {type(first).__name__}; one tensor is supported")
        leaf = first.detach().requires_grad_()
        self._calls.append(Call(self._named(args, kwargs), leaf))
        torch.set_grad_enabled(True)
        changed = leaf.clone()  # the pipeline may change its output in place
        if isinstance(output, tuple):
            return (changed, *output[1:])
        output[0 if isinstance(output, list) else next(iter(output))] = changed
        return output

    def _named(self, args: Any, kwargs: Any) -> dict[str, Any]:
        named = inspect.signature(self.network.forward).bind(*args, **kwargs).arguments
        named = {**named, **named.pop("kwargs", {})}
        if "timestep" not in named:
            raise UsageError(
                "the pipeline's network has no argument timestep; wrap it with fmwc.adapters.adapt instead"
            )
        return named

    def __call__(self, pipe: Any, step: int, timestep: Any, given: dict[str, Any]) -> dict[str, Any]:
        """Finish a step; the pipeline calls this as `callback_on_step_end`."""
        torch.set_grad_enabled(False)
        calls, self._calls = self._calls, []
        if not calls or pipe.scheduler is not self.scheduler:
            raise UsageError("the pipeline's network or scheduler was replaced; make a new Confidence")
        if "latents" not in given:
            raise UsageError("callback_on_step_end_tensor_inputs must hold 'latents'")
        latents = given["latents"].detach()
        self._running = False  # the reading evaluates the network
        self._read(Step(self.network, calls, given["latents"], *self._sigmas[self._step : self._step + 2]))
        self._step += 1
        self._running = self._step < len(self._sigmas) - 1
        return given | {"latents": latents}


def _time(args: Mapping[str, Any]) -> float:
    """Return the network's time in a call."""
    return float(torch.as_tensor(args["timestep"]).flatten()[0])


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


class Confidence(Reader):
    """Callback of a pipeline that reads the variance of the velocity at each step.

    The hooks remain in the pipeline until :meth:`remove`, or the end of a `with` block; until then, pass this callback
    to the pipeline. Among several (`MultiPipelineCallbacks`), it comes first. Each reading takes one more evaluation of
    the network in forward mode per probe.

    Arguments:
        pipe: A pipeline of diffusers.
        field: A field whose network is `pipe.transformer` or an adapter of it (:func:`velocity`).
        probes: The number of random directions per reading.
        every: Steps between two readings; the last step is always read.
        score: The score of the images. The default is that of the field's reference if it is one of pipelines, else
            `integrated`, which only grows along the trajectory.
        stop: Interrupt the run when the integrated score of every image exceeds this number, or the number per image.
            Nothing is lost if the score is `integrated`: the final scores would also exceed it.
        seed: The seed of the probes.

    Attributes:
        stopped: The number of steps after which the run was interrupted; 0 if it was not.
    """

    def __init__(
        self,
        pipe: Any,
        field: Field,
        *,
        probes: int = 1,
        every: int = 1,
        score: str = "",
        stop: float | Tensor | None = None,
        seed: int = 0,
    ) -> None:
        network = network_of(pipe)[1]
        if not isinstance(field, Field) or not any(module is network for module in field.network.modules()):
            raise UsageError(
                "the field must be attached to the pipeline's network: fmwc.attach(pipe.transformer), or attach an "
                "adapter of it"
            )
        known = getattr(field.reference, "score", "")
        self.field, self.score = field, score or (known if known in SCORES else SCORES[0])
        self.estimator, self.every = Tangent(as_whole(probes, "probes", 1)), as_whole(every, "every", 1)
        self.stop, self.seed, self.stopped = stop, as_whole(seed, "seed"), 0
        super().__init__(pipe, self._reset, self._take)

    # ---- while a pipeline runs ----

    def _reset(self) -> None:
        """Forget the run before."""
        network, noise = (next(module.parameters()) for module in (self.network, self.field.noise))
        if (network.device, network.dtype) != (noise.device, noise.dtype):
            raise UsageError(
                f"the network is {network.dtype} on {network.device}, but its noise {noise.dtype} on {noise.device}; "
                "use field.to(pipe.device, pipe.dtype)"
            )
        if self.stop is not None and not hasattr(type(self.pipe), "interrupt"):
            raise UsageError(f"{type(self.pipe).__name__} cannot be interrupted; leave out stop")
        self.stopped = self._edited = 0
        self._latents = torch.empty(0)
        self._readings: dict[int, Tensor] = {}  # by step: the variance per position
        self._settings: dict[int, Tensor] = {}  # by the step since which they hold

    def _take(self, step: Step) -> None:
        """Read one step."""
        number, last, latents, args = self._step, len(self._sigmas) - 2, step.after, step.calls[0].args
        if number:  # the network sees the latents of the step before, alone or beside other channels or tokens
            x = next(iter(args.values()))[tuple(slice(n) for n in latents.shape)].to(latents)
            self._edited = self._edited or number * (not same(x, self._latents))
        self._latents = latents.clone()  # a later callback may change them in place
        guidance = args.get("guidance", getattr(self.pipe, "guidance_scale", None))
        scale = torch.nan if guidance is None else float(torch.as_tensor(guidance).max())
        made = torch.tensor([*step.weights(), scale])
        known = list(self._settings.values())[-1:]
        if not known or len(known[0]) != len(made) or not torch.allclose(known[0], made, rtol=0.02, equal_nan=True):
            self._settings[number] = made
        if (last - number) % self.every == 0:
            step.noise = self.field.noise
            t = torch.full((step.count,), 1 - step.start, device=latents.device)
            randomness = Blocks(derive(self.seed, "pipeline", number), 0, step.count)
            self._readings[number] = self._positions(self.estimator(step, latents, t, {}, randomness).var, args)
        if self.stop is not None and self._readings and number < last:
            score = self._trajectory(number + 1, step.end).score("integrated")
            if bool((score > torch.as_tensor(self.stop).to(score)).all()):
                self.stopped, self.pipe._interrupt = number + 1, True

    def _positions(self, var: Tensor, layout: Mapping[str, Any]) -> Tensor:  # (B, *) -> (B, H, W)
        """Return the variance summed over the channels of each latent position."""
        if var.ndim != 3:
            return var.sum(1)
        if not hasattr(self.pipe, "_unpack_latents"):
            return var.sum(2)
        (rows, columns), scale = _grid(layout, var.shape[1]), self.pipe.vae_scale_factor
        return self.pipe._unpack_latents(var, 2 * rows * scale, 2 * columns * scale, scale).sum(1).squeeze(1)

    # ---- after a run ----

    def _trajectory(self, steps: int, end: float = 0.0) -> Trajectory:
        """Return the first steps of the run."""
        var = torch.stack(list(self._readings.values()))
        grid = 1 - torch.tensor([*self._sigmas[:steps], end], device=var.device)[:, None].expand(-1, len(var[0]))
        return Trajectory(
            x=self._latents,
            x0=torch.full_like(self._latents, torch.nan),
            times=grid[list(self._readings)],
            mean=torch.full_like(var, torch.nan),
            var=var,
            grid=grid,
            default_score=self.score,
            evaluations=steps * (len(self._settings[0]) - 1),
            seed=self.seed,
        )

    @property
    def trajectory(self) -> Trajectory:
        """The last run: `.score()`, `.rank`, and `.confidence`, or `.withheld` if it cannot be compared.

        `x` are the final latents, and `var` is the variance per latent position, summed over channels. Noise and
        velocities are not kept: `x0` and `mean` are not numbers.
        """
        steps = len(self._sigmas) - 1
        if self._step == 0 or (self._step < steps and not self.stopped):
            raise UsageError("nothing was read; call pipe(..., callback_on_step_end=confidence) first")
        run, reference = self._trajectory(self._step), self.field.reference
        if self.stopped:
            return replace(run, without=f"the run was stopped after {self.stopped} of {steps} steps")
        if self._edited:
            return replace(run, without=f"the latents were changed after step {self._edited}")
        if reference is None or reference.read_with is None:
            return replace(run, without=NO_REFERENCE)
        differs = reference.read_with.differs(self._read_with(run), variance=reference.needs_variance)
        changed = CHANGED if reference.weights not in (None, self.field.checksum()) else ""
        return compared(run, reference, f"the reference was made with {differs}" if differs else changed)

    def _read_with(self, run: Trajectory) -> ReadWith:
        """Return the settings that make scores comparable, with the weights of the evaluations, which show guidance."""
        made = ["x".join(map(str, run.x.shape[1:]))]
        for step, (*weights, guidance) in ((step, made.tolist()) for step, made in self._settings.items()):
            since = f"from step {step} " if step else ""
            made.append(f"{since}weights {'/'.join(f'{w:.4g}' for w in weights)}, guidance {guidance:.4g}")
        times = tuple(round(float(t), 6) for t in run.times[:, 0])
        return ReadWith(str(self.estimator), self._step, f"Euler ({', '.join(made)})", times)

    def doubt_map(self) -> Tensor:  # -> (B, H, W)
        r"""Return the variance of the velocity accumulated along the trajectory, Σ Var[v] Δt, at each pixel.

        For a video, the map has a dimension for the latent frames before the last two.
        """
        run = self.trajectory
        latent = (run.var * unsqueeze_like(run.weights, run.var).to(run.var)).sum(0)
        if latent.ndim < 3:
            raise UsageError("the latents have no rows and columns; use trajectory.var")
        size = [side * self.pipe.vae_scale_factor for side in latent.shape[-2:]]
        frames = latent.reshape(len(latent), -1, *latent.shape[-2:])
        return F.interpolate(frames, size=size, mode="bilinear").reshape(*latent.shape[:-2], *size)

    # ---- several runs ----

    def _draw(self, seed: int, call: dict[str, Any], stop: float | Tensor | None = None) -> Any:
        """Run the pipeline with a seed and return its images."""
        before, self.stop = self.stop, stop
        try:
            generator = torch.Generator().manual_seed(seed)
            return self.pipe(**call, generator=generator, callback_on_step_end=self).images
        finally:
            self.stop = before

    def fit_reference(
        self,
        prompts: Any = None,
        n: int = 1,
        *,
        labels: Callable[[Any], Any] | None = None,
        seed: int = 0,
        **call: Any,
    ) -> Reference:
        """Draw `n` images of each prompt, and store their scores as the reference of the field's confidence.

        Use prompts like those of later runs, and the same settings: steps, guidance, size and probes.

        Arguments:
            prompts: The prompts, or classes; leave out if `call` holds embeddings.
            n: The number of runs, each with all prompts and its own seed.
            labels: A function of the images of one run that returns which of them failed. The score that separates the
                failures best becomes the score of the confidence. If none is better than chance, confidence is
                withheld. Without labels, the score is not tested.
            seed: The seed of the first run.
            call: Other arguments of the pipeline, such as `num_inference_steps`.
        """
        call = _arguments(self.pipe, call, prompts) | ({} if labels else {"output_type": "latent"})
        runs, failed = list[Trajectory](), list[Tensor]()
        for number in range(as_whole(n, "n", 1)):
            images = self._draw(seed + number, call)
            runs.append(self.trajectory)
            if labels is not None:
                found = require_labels(labels(images), "the result of labels")
                failed.append(torch.from_numpy(found).reshape(-1).to(runs[-1].grid.device))
        if (count := sum(map(len, runs))) < FEWEST:
            raise UsageError(f"a reference needs at least {FEWEST} images, got {count}; give more prompts or raise n")
        names = (self.score,) if labels is None else SCORES
        scores = {name: torch.cat([run.score(name) for run in runs]) for name in names}
        reason, withheld = f"the score {self.score} was not tested with labels", ""
        if labels is not None:
            self.score, reason, withheld = _by_labels(scores, torch.cat(failed))
        values = scores[self.score]
        quantiles = values.quantile(torch.linspace(0, 1, 1001, device=values.device))
        made = self._read_with(runs[-1])
        weights = self.field.checksum()
        self.field.reference = Reference(self.score, made, quantiles, reason=reason, withheld=withheld, weights=weights)
        return self.field.reference

    def best_of(self, n: int, prompts: Any = None, *, seed: int = 0, **call: Any) -> Best:
        """Draw `n` candidates per prompt and return the surest. A candidate is the image of the pipeline for its seed.

        With the score `integrated`, a run ends as soon as the scores of all its images exceed those of the best so far.

        Arguments:
            n: The number of candidates; their seeds are `seed`, `seed + 1`, …
            prompts: The prompts, or classes; leave out if `call` holds embeddings.
            seed: The seed of the first candidate.
            call: Other arguments of the pipeline.
        """
        call, best = _arguments(self.pipe, call, prompts), Best([], torch.empty(0), torch.empty(0), 0)
        ends = self.score == "integrated" and hasattr(type(self.pipe), "interrupt")
        for number in range(as_whole(n, "n", 1)):
            images = self._draw(seed + number, call, best.score if ends and number else None)
            run = self.trajectory
            evaluations = best.evaluations + run.evaluations
            if self.stopped:
                best = best._replace(evaluations=evaluations)
                continue
            score = run.score(self.score)
            old = best if number else Best(list(images), torch.full_like(score, torch.inf), torch.zeros(len(run)), 0)
            better = score < old.score
            chosen = [new if b else kept for new, kept, b in zip(images, old.images, better.tolist(), strict=True)]
            seeds = torch.where(better.cpu(), seed + number, old.seed).long()
            best = Best(chosen, score.minimum(old.score), seeds, evaluations)
        return best


def _arguments(pipe: Any, call: dict[str, Any], prompts: Any) -> dict[str, Any]:
    """Return the arguments of the pipeline; its prompts are `prompt`, or the first argument (`class_labels`)."""
    for name in ("callback_on_step_end", "generator", "return_dict"):
        if name in call:
            raise UsageError(f"fmwc sets the pipeline's argument {name}; leave it out (seed= sets the seeds)")
    names = list(inspect.signature(type(pipe).__call__).parameters)
    given = {} if prompts is None else {"prompt" if "prompt" in names else names[1]: _listed(prompts)}
    return {**call, **given}


def _listed(prompts: Any) -> list[Any]:
    return [prompts] if isinstance(prompts, (str, int)) else list(prompts)


def _grid(layout: Mapping[str, Any], tokens: int) -> tuple[int, int]:
    """Return the rows and columns of packed latents, from the positions that the pipeline gives its network."""
    if (ids := layout.get("img_ids")) is not None:
        last = ids.reshape(-1, ids.shape[-1])[:tokens].amax(0)
        return int(last[1]) + 1, int(last[2]) + 1
    side = round(tokens**0.5)
    if side * side != tokens:
        raise ShapeError(f"the pipeline packs its latents into {tokens} tokens of unknown layout; use square images")
    return side, side


def _by_labels(scores: Mapping[str, Tensor], failed: Tensor) -> tuple[str, str, str]:
    """Return the score with the highest AUROC, the reason for the choice, and why confidence is withheld."""
    count, bad = len(next(iter(scores.values()))), int(failed.sum())
    if len(failed) != count or not 0 < bad < count:
        raise UsageError(
            f"labels must return one value per image, with failures and successes among them; got {bad} failures in "
            f"{len(failed)} labels for {count} images"
        )
    chosen, found = labels_choose(scores, failed)
    name = max(found, key=found.__getitem__)
    reason = f"of {count} labels with {bad} failures, {name} has AUROC {found[name]:.2f}"
    return name, reason, "" if chosen else f"no score is better than chance ({reason})"


# ---- the network of a pipeline as a velocity network -----------------------------------------------------------------


def velocity(pipe: Any, prompts: Any = None, *, batch: int = 16, **call: Any) -> tuple[Adapted, dict[str, Any]]:
    """Return the pipeline's network called as `network(x, t, **cond)`, and the conditions of prompts, one row for each.

    The conventions are measured on two steps of the pipeline without guidance: how it converts times, and which sign
    its velocity has.

    >>> network, cond = velocity(pipe, captions)  # doctest: +SKIP
    >>> field = fmwc.attach(network, space=tuple(latents.shape[1:]))  # doctest: +SKIP
    >>> fmwc.fit_noise(field, latents, cond=cond, batch=8)  # doctest: +SKIP

    Arguments:
        pipe: The pipeline.
        prompts: The prompts, or classes; leave out if `call` holds embeddings.
        batch: The number of prompts encoded together.
        call: Other arguments of the pipeline, such as `height` and `width`. `guidance_scale` is 1 unless the network
            takes it as an input (Flux).
    """
    network, steps, parts = network_of(pipe)[1], list[Step](), list[Call]()
    if not getattr(network, "config", {}).get("guidance_embeds"):
        call = {"guidance_scale": 1.0, **call}
    texts = None if prompts is None else _listed(prompts)
    with Reader(pipe, steps.clear, steps.append) as reader, torch.no_grad():
        for i in range(0, 1 if texts is None else len(texts), batch):
            given = _arguments(pipe, call, None if texts is None else texts[i : i + batch])
            pipe(**given, num_inference_steps=2, output_type="latent", callback_on_step_end=reader)
            parts.append(steps[0].calls[0])
    rows = {}
    for name in list(parts[0].args)[1:]:
        if name != "timestep" and all(is_row(name, part.args[name], part) for part in parts):
            values = [part.args[name] for part in parts]
            if len({value.shape[1:] for value in values}) > 1:
                raise UsageError(
                    f"batches of prompts have '{name}' of different lengths; raise batch to {len(texts or ())}"
                )
            rows[name] = torch.cat(values)
    taken = (next(iter(parts[0].args)), "timestep", *rows)
    fixed = {name: value for name, value in parts[0].args.items() if name not in taken}
    return Adapted(network, time="timestep", output=itemgetter(0), **_convention(steps), **fixed), rows


def _convention(steps: Sequence[Step]) -> dict[str, Any]:
    """Return the options of the adapter: the scale of time, and whether time and velocity are reversed."""
    if any(len(step.calls) > 1 or step.evaluations > 1 for step in steps):
        raise UsageError("the pipeline evaluates its network more than once per step without guidance")
    signs = [step.weights()[0] for step in steps]
    first, second = (_time(step.calls[0].args) for step in steps)
    slope = (second - first) / (steps[1].start - steps[0].start)
    start = first - slope * steps[0].start  # at noise level 0
    for backwards, sign, zero in ((True, 1.0, start), (False, -1.0, start + slope)):
        if abs(zero) < 1e-3 * abs(slope) and all(abs(found - sign) < 0.02 for found in signs):
            return {"scale": float(f"{abs(slope):.4g}"), "backwards": backwards}
    raise UsageError(
        f"the pipeline's conventions are not known: its network's time is {start:.4g} + {slope:.4g} s at noise level s "
        f"and its velocity has the factor {signs[0]:.4g}; wrap the network with fmwc.adapters.adapt instead"
    )


# ---- checks ----------------------------------------------------------------------------------------------------------


def encode(pipe: Any, images: Any) -> Tensor:
    """Return the latents of images as the pipeline's network sees them.

    Arguments:
        pipe: The pipeline.
        images: PIL images, or arrays and tensors with values in [0, 1].
    """
    vae, pixels = pipe.vae, pipe.image_processor.preprocess(images)
    with torch.no_grad():
        encoded = vae.encode(pixels.to(vae.device, vae.dtype))
    latents = encoded.latent_dist.mode() if hasattr(encoded, "latent_dist") else encoded.latent
    latents = (latents - (vae.config.get("shift_factor") or 0.0)) * vae.config.get("scaling_factor", 1.0)
    return pipe._pack_latents(latents, *latents.shape) if hasattr(pipe, "_pack_latents") else latents


def check(
    pipe: Any, x: Any, prompts: Any, rivals: Any = None, *, call: Mapping[str, Any] | None = None, **options: Any
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
    own, others = _listed(prompts), _listed(rivals or ())
    texts = list(dict.fromkeys([*own, *others]))
    sides: Sequence[int] = ()
    if isinstance(x, Tensor):
        latents = x
        if x.ndim == 4:
            sides = [side * pipe.vae_scale_factor for side in x.shape[2:]]
    else:
        latents, sides = encode(pipe, x), pipe.image_processor.preprocess(x).shape[2:]
    size = dict(zip(("height", "width"), sides, strict=False))
    network, cond = velocity(pipe, texts, **{**size, **(call or {})})

    def by_text(x: Tensor, t: Tensor, prompt: Sequence[Any]) -> Tensor:
        rows = torch.tensor([texts.index(text) for text in prompt], device=x.device)
        return network(x, t, **{name: value[rows.to(value.device)] for name, value in cond.items()})

    against = {"prompt": others} if others else None
    return fmwc.checks.check(by_text, latents, {"prompt": own}, rivals=against, **options)
