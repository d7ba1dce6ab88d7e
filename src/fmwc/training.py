"""One training loop, for every recipe: resumable to the same weights, and a captured CUDA graph on a GPU."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from fmwc.choosing import fit_confidence
from fmwc.conventions import check_conventions
from fmwc.data import fingerprint
from fmwc.errors import DataError, NotFiniteError, ShapeError, UsageError, pick, require_finite
from fmwc.field import Field
from fmwc.flow import COUPLINGS, Pairs, couple, elbo
from fmwc.identity import digest_tensors
from fmwc.modes import Scope, Scopes, Shared, evaluating, tensor_float
from fmwc.propagate import Linearised
from fmwc.randomness import Stream, derive
from fmwc.resume import read_point, save_point
from fmwc.state import State, as_rows, batch_size, channels, each, precision_of, require_state
from fmwc.vad import cyclic

__all__ = ["DECAYS", "Loss", "Plan", "fit_noise", "train"]

DECAYS: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
}
PAUSE = 60  # seconds between two resume points, at most; they are also written every `Plan.save_every` steps
EVERY = 200  # steps between looks at the loss, which on a GPU wait for it
PAIRED = "paired noise"  # the name of rows that are noise, which no condition of a network can have
WARM = 3  # eager steps before a CUDA graph is captured, so that the optimiser's state exists; they are real steps


# `loss(x1, randomness, beta, **cond)`: a scalar to minimise; `beta` is the KL's weight at this step, annealed.
Loss = Callable[..., Tensor]

PRECISIONS: dict[str, torch.dtype | None] = {"full": None, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Plan:
    """Creates a training plan.

    Arguments:
        iterations: Steps of the optimiser (Adam).
        batch: Data a step, drawn with replacement.
        lr: The learning rate at the start.
        decay: `constant` or `cosine`.
        last_lr: The learning rate a cosine ends at.
        weight_decay: Shrinks weights at every step (AdamW).
        clip: Bounds each gradient's entries, if not 0. What is not a number then counts as 0: a bad batch is survived.
        average: Keeps a moving average of the weights with this rate, which is what training gives, if not 0.
        stratified: Draws one sample from each of `batch` equal slices of the data in their order, in place of any:
            every sample as likely as before. With data sorted by size, batches are then alike in size.
        beta: The weight of the KL.
        cycles, warmup: Its cyclic annealing.
        seed: Seeds everything that is drawn.
        save_every: Steps between two resume points.
        minutes: Stop after so much time, wherever the schedule is; 0 is never.
        precision: `full` (products in TensorFloat-32 on a GPU), or `bf16` by autocast, on a GPU only.
        compiled: Whether the loss is compiled, on a GPU. It takes half a minute, and pays from a few thousand steps on.
        captured: Whether a step is captured as a CUDA graph, on a GPU: several times as fast where networks are small,
            and not for those that wait for the GPU to know a shape.
    """

    iterations: int
    batch: int = 4096
    lr: float = 1e-3
    decay: str = "constant"
    beta: float = 1e-3
    cycles: int = 4
    warmup: float = 0.1
    seed: int = 0
    last_lr: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.0
    average: float = 0.0
    stratified: bool = False
    save_every: int = 1000
    minutes: float = 0.0
    precision: str = "full"
    compiled: bool = False
    captured: bool = True

    def __post_init__(self) -> None:
        pick(DECAYS, self.decay, "decay")
        pick(PRECISIONS, self.precision, "precision")
        for name in ("iterations", "batch", "save_every", "cycles"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is at least 1, got {getattr(self, name)}")
        if not self.lr > 0:
            raise UsageError(f"lr is positive, got {self.lr}")
        for name, most in (("last_lr", self.lr), ("weight_decay", math.inf), ("clip", math.inf), ("average", 1.0)):
            if not 0 <= getattr(self, name) <= most:
                raise UsageError(f"{name} lies between 0 and {most}, got {getattr(self, name)}")

    def lr_at(self, done: int) -> float:
        """The learning rate after so many steps."""
        return self.last_lr + (self.lr - self.last_lr) * DECAYS[self.decay](done / self.iterations)

    def draw(self, rows: int, generator: torch.Generator, device: torch.device) -> Tensor:
        """Which rows of the data one step sees."""
        if not self.stratified:
            return torch.randint(rows, (self.batch,), generator=generator, device=device)
        place = torch.rand(self.batch, generator=generator, device=device, dtype=torch.float64)
        place = (place + torch.arange(self.batch, device=device)) * (rows / self.batch)
        return place.long().clamp_max(rows - 1)


class _Average:
    """Creates a moving average of weights, w̄ ← w̄ + (1 − min(rate, (1 + n)/(10 + n)))(w − w̄) after n steps."""

    def __init__(self, parameters: list[nn.Parameter], rate: float) -> None:
        self.parameters, self.rate = parameters, rate
        self.values = [p.detach().clone() for p in parameters]
        self.share = torch.zeros((), device=parameters[0].device)

    def pace(self, done: int) -> None:
        self.share.fill_(1 - min(self.rate, (1 + done) / (10 + done)))

    def update(self) -> None:
        with torch.no_grad():
            # Not lerp, which reads its weight on the host: a captured graph cannot.
            ahead = torch._foreach_sub([p.detach() for p in self.parameters], self.values)
            torch._foreach_mul_(ahead, self.share)
            torch._foreach_add_(self.values, ahead)

    def give(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_([p.detach() for p in self.parameters], self.values)


def _captured(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            step()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"a step cannot be captured as a CUDA graph; train with captured=False, or --no-capture ({reason})"
        ) from error
    return graph


@torch.inference_mode(False)  # also where the caller has switched gradients off
@torch.enable_grad()
def train(
    module: nn.Module,
    loss: Loss,
    data: State,
    plan: Plan,
    *,
    cond: Mapping[str, State] | None = None,
    resume: str | Path | None = None,
    identity: Mapping[str, Any] | None = None,
    progress: Callable[[int, float], None] | None = None,
    every: int = EVERY,
) -> list[tuple[int, float]]:
    """Train the parameters of `module` that require a gradient; return (step, loss) along the way.

    Arguments:
        module: What is trained, on its device.
        loss: The objective, `loss(x1, randomness, beta, **cond)`.
        data: All of the data, `(N, *)` or a dict of channels; kept on the module's device.
        plan: How long, how fast.
        cond: What goes with each sample (its class), by the name the loss takes it under: `(N, *)` each.
        resume: A file for resume points. If it exists, training resumes from it, to the weights that an undisturbed run
            would have reached.
        identity: What the result depends on beside the plan and the data, by name (options of the module and the loss):
            a resume point of a training with another identity is refused.
        progress: Called with the steps done and the latest loss,
        every: after so many steps.
    """
    total = batch_size(data)
    if total < 1:
        raise DataError("the data holds no sample; training needs at least 1")
    for value in channels(data).values():
        require_finite(value, "the training data")
    if plan.stratified and plan.batch > total:
        raise UsageError(f"a stratified batch of {plan.batch} needs as many samples; --set batch={total}, or fewer")
    if reserved := {"x1", "randomness", "beta"} & (cond or {}).keys():
        raise UsageError(f"a condition cannot be named {reserved.pop()}, which is the loss's own word; rename it")
    rows: dict[str, State] = {"x1": data, **(cond or {})}
    _check_rows(rows, total)
    resume = Path(resume) if resume else None
    parameters = [p for p in module.parameters() if p.requires_grad]
    device = parameters[0].device
    literals = {k: v for k, v in vars(plan).items() if k not in ("save_every", "minutes")}
    own = {**literals, "data": fingerprint(*rows.values()), "device": device.type, **(identity or {})}
    rows = {name: each(lambda c: c.to(device), row) for name, row in rows.items()}
    cuda = device.type == "cuda"
    # A gradient's own noise is far larger than what TensorFloat-32 leaves out.
    with _generator(device, plan.seed) as generator, tensor_float(cuda):
        randomness = Stream(None if cuda else generator)  # a GPU's own generator: compiled code knows no other
        half = cuda and plan.precision != "full"
        objective = torch.compile(loss) if cuda and plan.compiled else loss
        rate = torch.tensor(plan.lr, device=device) if cuda else plan.lr
        kind = torch.optim.AdamW if plan.weight_decay else torch.optim.Adam
        optimiser = kind(parameters, lr=rate, weight_decay=plan.weight_decay, capturable=cuda, fused=cuda)
        average = _Average(parameters, plan.average) if plan.average else None
        beta = torch.zeros((), device=device)
        latest = torch.zeros((), device=device)

        def step() -> None:
            index = plan.draw(total, generator, device)
            batch = {name: each(lambda c: c[index], row) for name, row in rows.items()}
            optimiser.zero_grad(set_to_none=True)
            with torch.autocast(device.type, PRECISIONS[plan.precision], enabled=half):
                value = objective(batch.pop("x1"), randomness, beta, **batch)
            try:
                value.backward()
            except CheckpointError as error:
                raise UsageError(
                    "the network is checkpointed: on the way back its layers are computed again, without their noise; "
                    "switch gradient checkpointing off while the noise learns"
                ) from error
            if plan.clip:
                for parameter in parameters:
                    if parameter.grad is not None:
                        parameter.grad.nan_to_num_(0.0, plan.clip, -plan.clip)
                nn.utils.clip_grad_value_(parameters, plan.clip)
            optimiser.step()
            if average:
                average.update()
            latest.copy_(value.detach())

        kept = [*parameters, *(average.values if average else ()), *module.buffers()]
        history: list[tuple[int, float]] = []
        done = 0
        if resume and resume.exists():
            done, history = read_point(resume, own, kept, parameters, optimiser, generator)
        first, graph, saved = done, None, time.monotonic()
        until = time.monotonic() + 60 * plan.minutes if plan.minutes else math.inf
        while done < plan.iterations and time.monotonic() < until:
            for group in optimiser.param_groups:
                group["lr"].fill_(plan.lr_at(done)) if cuda else group.update(lr=plan.lr_at(done))
            if average:
                average.pace(done)
            beta.fill_(plan.beta * cyclic(done, plan.iterations, plan.cycles, plan.warmup))
            if cuda and plan.captured and graph is None and done - first == WARM:
                optimiser.zero_grad(set_to_none=True)
                graph = _captured(step)
            graph.replay() if graph else step()
            done += 1
            if done % every == 0 or done == plan.iterations:
                history.append((done, float(latest) if plan.clip else _finite(float(latest), done)))
                if progress:
                    progress(done, history[-1][1])
            now = time.monotonic()
            if resume and (done % plan.save_every == 0 or done == plan.iterations or now >= min(until, saved + PAUSE)):
                for parameter in parameters:
                    require_finite(parameter, f"a weight at step {done}")  # a point that cannot be resumed
                save_point(resume, own, done, history, kept, parameters, optimiser, generator)
                saved = time.monotonic()
    if average:
        average.give()
    if done < plan.iterations and (not history or history[-1][0] < done):
        history.append((done, history[-1][1] if history else math.nan))
    return history


def fit_noise(
    field: Field,
    data: State,
    steps: int = 2_000,
    *,
    beta: float = 1e-3,
    batch: int = 1024,
    lr: float = 1e-3,
    decay: str = "cosine",
    seed: int = 0,
    precision: str = "full",
    compiled: bool = False,
    captured: bool = True,
    stratified: bool = False,
    pairs: Pairs = None,
    conventions: bool = True,
    confidence: bool = True,
    resume: str | Path | None = None,
    identity: Mapping[str, Any] | None = None,
    progress: Callable[[int, float], None] | None = None,
    every: int = EVERY,
    **cond: Tensor,
) -> list[tuple[int, float]]:
    """Fit the noise of a trained network: it is frozen as it is, and only the inference networks learn.

    Afterwards the field's samples are still the network's own, bit for bit. It ends by choosing what the confidence is
    made from (:func:`fmwc.fit_confidence`), unless `confidence=False`.

    Arguments:
        field: An attached field.
        data: Samples of the kind the network generates, `(N, *)` or a dict of channels; its own samples will do.
        steps: Steps of the optimiser.
        beta: The weight of the KL.
        captured: On a GPU a step is a CUDA graph; switch it off for a network that waits for the GPU to know a shape.
        pairs: Which noise goes with which data, as in the network's training: `None` (independent), `"ot"` (optimal
            transport within each batch), a function `(x1, randomness) -> x0`, or tensors x0 with a row per sample.
            With other pairs than the network's, the noise learns to move its velocity towards that of those pairs.
        conventions: Whether to check on a batch that the network is called as it was trained
            (:func:`fmwc.conventions.check_conventions`).
        resume: A file for resume points. A function of your own is not part of its identity.
        identity: What the result depends on beside these arguments, the network's weights and the noise model
            (:func:`train`).
        progress: Called with the steps done and the latest loss,
        every: after so many steps.
        cond: What the network takes beside x and t (its class, say), a row for each sample.
    """
    data, cond = _tensors(field, data), {name: torch.as_tensor(value) for name, value in cond.items()}
    if field.space is not None:
        field.space.check_rows(cond, batch_size(data))
    with _frozen(field.network):  # a look in training mode would move a batch norm
        _learn_space(field, data, cond)
    field.check_finite()
    batch = min(batch, batch_size(data))
    if isinstance(pairs, str):
        pick(COUPLINGS, pairs, "coupling")
    if isinstance(pairs, str) and pairs != "independent":  # solved on the host, which a graph cannot wait for
        compiled = captured = False
    rooms = getattr(field.network, "rooms", None)  # for how many rows a graph has room, by batch; it has no more
    plan = Plan(
        steps,
        batch,
        lr,
        decay,
        beta,
        cycles=1,
        warmup=0.0,
        seed=seed,
        precision=precision,
        compiled=compiled,
        captured=captured and (rooms is None or (stratified and batch in rooms)),
        stratified=stratified,
    )

    given = isinstance(pairs, (Tensor, dict, np.ndarray, list, tuple))
    rows = {**cond, PAIRED: _paired(field, pairs, data)} if given else cond
    _check_rows(rows, batch_size(data))
    if conventions:
        assert field.space is not None
        check_conventions(field, field.space, data, cond, seed=seed, pairs=rows.get(PAIRED, pairs))

    def loss(x1: State, randomness: Stream, weight: Tensor, **cond: Any) -> Tensor:
        return elbo(field, x1, weight, seed=randomness, pairs=cond.pop(PAIRED, pairs), **cond)

    about: dict[str, Any] = {}
    if resume:
        about = {
            "network": digest_tensors(field.network.state_dict()),
            "noise": field.noise.options,
            "layers": field.noise.names,
            "prior_rate": field.prior_rate,
            "kl_factor": field.kl_factor,
            "space": field.space.describe() if field.space else None,
            **({"pairs": pairs} if isinstance(pairs, str) else {}),
            **(identity or {}),
        }
    with _frozen(field.network), field.noise.hooked():
        history = train(
            field.noise, loss, data, plan, cond=rows, resume=resume, identity=about, progress=progress, every=every
        )
    if confidence:
        fit_confidence(field, data, cond=cond, seed=derive(seed, "confidence"), conventions=False)
    return history


def _check_rows(rows: Mapping[str, State], total: int) -> None:
    for name, row in rows.items():
        for value in channels(row).values():
            if len(value) != total:
                raise ShapeError(f"one row of '{name}' a sample: got {len(value)} for {total} samples")


def _paired(field: Field, x0: Any, data: State) -> State:
    """Noise that was given with the data, as tensors; checked against it."""
    x0 = _tensors(field, x0)
    assert field.space is not None
    return couple(x0, field.space, data, Stream())


def _learn_space(field: Field, data: State, cond: Mapping[str, Tensor]) -> None:
    """Takes the space from the data, unless the network cannot run on it."""
    before = field.space
    field.learn_space(data)
    try:
        with torch.no_grad():
            x = each(lambda c: c[:2].to(field.device), data)
            few = {k: v[:2].to(field.device) for k, v in cond.items()}
            v = field(x, torch.zeros(batch_size(x), device=field.device), **few)
        require_state(v, "the network's velocity")
        field.learn_space(v)
    except (AssertionError, RuntimeError, TypeError, IndexError, ShapeError, ValueError) as error:
        field.space = before
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        shapes = ", ".join(str(tuple(c.shape)) for c in channels(data).values())
        raise ShapeError(f"the network does not run on data of shape {shapes}: {reason}") from error
    if not field.rows_known and batch_size(x) > 1:
        field.moments(x, 0.5, Linearised(1), seed=0, **few)


def _tensors(field: Field, data: Any) -> State:
    """The data as tensors of the network's precision: scikit-learn's are arrays, and lists are as good."""
    if not isinstance(data, (Tensor, dict, np.ndarray, list, tuple)):
        raise UsageError(
            f"the data is one tensor with a row a sample, or a dict of channels, got {type(data).__name__}; of a data "
            "set, torch.stack([x for x, *_ in dataset])"
        )
    found = each(lambda c: as_rows(c, "the data"), data)
    if not all(value.is_floating_point() for value in channels(found).values()):
        raise UsageError("the data is of whole numbers, and a flow has no path between them; scale it, x.float() / 255")
    return each(lambda c: c.to(precision_of(field.network)), found)


def _set_gradient(parameter: nn.Parameter, required: bool) -> None:
    parameter.requires_grad_(required)


_GRADIENTS: Shared[nn.Parameter] = Shared(
    lambda parameter: parameter.requires_grad, lambda parameter: _set_gradient(parameter, False), _set_gradient
)


def _frozen(network: nn.Module) -> Scope:
    """A scope in which parameters have no gradients, and modules are in evaluation mode."""
    return Scopes(_GRADIENTS.holding(network.parameters()), evaluating(network))


@contextmanager
def _generator(device: torch.device, seed: int) -> Iterator[torch.Generator]:
    """A seeded generator: on a GPU the device's own, which is put back afterwards."""
    if device.type != "cuda":
        yield torch.Generator(device=device).manual_seed(seed)
        return
    with torch.random.fork_rng(devices=[device]):
        yield torch.cuda.default_generators[device.index or 0].manual_seed(seed)


def _finite(value: float, step: int) -> float:
    if not math.isfinite(value):
        raise NotFiniteError(f"the loss is {value} at step {step}; lower lr, or look for outliers in the data")
    return value
