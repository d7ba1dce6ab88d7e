"""The training loop, shared by all recipes and by :func:`fit_noise`.

An interrupted run resumes from a file and reaches the same weights as an uninterrupted one. On a GPU, with data in
memory, steps are replayed as a CUDA graph.

If torch.distributed is initialised (torchrun), each process trains some samples of every batch, and gradients are
summed over the processes. All processes draw the random numbers of the whole batch from equal generators and use those
of their samples (:class:`fmwc.randomness.Share`). The result is that of one process up to rounding, for any number of
processes, so a run may resume on another number.

`DistributedDataParallel` is not used: it must be called instead of the module, but the losses call the network several
times, under hooks whose inference networks have no forward pass of their own, and it averages gradients with equal
weights, which is wrong if a batch does not divide by the number of processes. One sum of all gradients per step, after
the backward pass, also works with captured graphs, clipping and the moving average.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError as Recomputed
from torch.utils.data import Dataset

from fmwc.calibration import fit_confidence
from fmwc.conventions import check_conventions
from fmwc.data.batches import Batch, Batches, Rows, in_memory, require_rows, select_rows
from fmwc.errors import CheckpointError, MismatchError, NotFiniteError, ShapeError, UsageError, pick, require_finite
from fmwc.field import Field
from fmwc.files import read_tensors, write_tensors
from fmwc.flow import COUPLINGS, Pairs, Space, couple, couples_samples, declared, elbo_loss
from fmwc.identity import SEAL, difference, digest_tensors, plain
from fmwc.modes import Scope, Scopes, Shared, evaluating, tensor_float
from fmwc.noise import cyclic
from fmwc.processes import Processes
from fmwc.randomness import Randomness, Share, Stream, derive
from fmwc.readers import anything, array, mapping, number, optional, record, text, whole
from fmwc.state import State, as_conditions, as_rows, batch_size, channels, precision_of, require_state, tree_map

__all__ = ["DECAYS", "Data", "Loss", "TrainingConfig", "fit_noise", "train"]

Data = State | Dataset[Any] | Iterable[Any] | Batches  # rows in memory, or a source of batches

DECAYS: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
}
PAUSE = 60  # maximum seconds between two resume points, which are also written every `save_every` steps
EVERY = 200  # steps between two reports of the loss; each report waits for the GPU
PAIRED = "paired noise"  # key of paired noise among the conditions; not an identifier, so no condition has it
WARM = 3  # eager steps before a CUDA graph is captured, so that the optimiser's state exists

# `loss(x1, randomness, beta, cond)`: a scalar to minimise. `beta` is the annealed weight of the KL divergence at
# this step, and `cond` are the conditions of the batch, by name.
Loss = Callable[..., Tensor]

PRECISIONS: dict[str, torch.dtype | None] = {"full": None, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class TrainingConfig:
    """Configuration of a training run.

    Arguments:
        iterations: Number of optimiser steps (Adam).
        batch: Samples per step, of all processes together, drawn with replacement from data in memory. A DataLoader
            has its own batch size.
        lr: The initial learning rate.
        decay: `constant` or `cosine`.
        last_lr: The final learning rate of a cosine decay.
        weight_decay: The rate of decoupled weight decay (AdamW); 0 for none.
        clip: The bound on each entry of the gradient; 0 for none. With a bound, NaN entries are set to 0.
        average: The decay rate of a moving average of the weights, which replaces the weights at the end; 0 for none.
        stratified: Draw one sample from each of `batch` equal, consecutive slices of the data. Every sample remains
            equally likely. If the data is sorted by size, all batches have about the same size.
        beta: The weight of the KL divergence.
        cycles, warmup: The cyclic annealing of `beta` (:func:`fmwc.noise.cyclic`).
        seed: The seed of all random numbers.
        save_every: Steps between two resume points.
        minutes: Stop after this many minutes; 0 means never.
        precision: `full` (TensorFloat-32 products on a GPU), or `bf16` by autocast, on a GPU only.
        compiled: Compile the loss, on a GPU. Compiling takes half a minute and pays off after a few thousand steps.
        captured: Replay steps as a CUDA graph, on a GPU: several times faster for small networks. Not for
            networks whose shapes depend on values; not used if the data comes in batches or does not fit on the GPU,
            nor if several processes share a GPU.
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
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.lr > 0:
            raise UsageError(f"lr must be positive, got {self.lr}")
        for name, most in (("last_lr", self.lr), ("weight_decay", math.inf), ("clip", math.inf), ("average", 1.0)):
            if not 0 <= getattr(self, name) <= most:
                raise UsageError(f"{name} must lie between 0 and {most}, got {getattr(self, name)}")

    def lr_at(self, done: int) -> float:
        """Return the learning rate after `done` steps."""
        return self.last_lr + (self.lr - self.last_lr) * DECAYS[self.decay](done / self.iterations)


class _Average:
    """A moving average of weights, w̄ ← w̄ + (1 − min(rate, (1 + n)/(10 + n)))(w − w̄) after n steps.

    torch's AveragedModel reads its counter on the host in every update, which a captured CUDA graph cannot do.
    """

    def __init__(self, parameters: list[nn.Parameter], rate: float) -> None:
        self.parameters, self.rate = parameters, rate
        self.values = [p.detach().clone() for p in parameters]
        self.share = torch.zeros((), device=parameters[0].device)

    def set_step(self, done: int) -> None:
        self.share.fill_(1 - min(self.rate, (1 + done) / (10 + done)))

    @torch.no_grad()
    def update(self) -> None:
        ahead = torch._foreach_sub([p.detach() for p in self.parameters], self.values)
        torch._foreach_mul_(ahead, self.share)  # lerp would read its weight on the host
        torch._foreach_add_(self.values, ahead)

    @torch.no_grad()
    def copy_to_parameters(self) -> None:
        torch._foreach_copy_([p.detach() for p in self.parameters], self.values)


class _Training:
    """A training run: a step, and the state that it changes."""

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        source: Rows | Batches,
        config: TrainingConfig,
        generator: torch.Generator,
    ) -> None:
        self.source, self.config, self.generator, self.processes = source, config, generator, Processes()
        self.buffers = list(module.buffers())
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.device = device = self.parameters[0].device
        self.cuda = cuda = device.type == "cuda"
        self.randomness = Stream(None if cuda else generator)  # compiled code can only use the GPU's default generator
        self.loss = torch.compile(loss) if cuda and config.compiled else loss
        rate = torch.tensor(config.lr, device=device) if cuda else config.lr
        kind = torch.optim.AdamW if config.weight_decay else torch.optim.Adam
        self.optimiser = kind(self.parameters, lr=rate, weight_decay=config.weight_decay, capturable=cuda, fused=cuda)
        self.average = _Average(self.parameters, config.average) if config.average else None
        self.beta, self.latest = torch.zeros((), device=device), torch.zeros((), device=device)
        self.kept = [*self.parameters, *(self.average.values if self.average else ()), *self.buffers]
        self.done, self.eager = 0, 0
        self.unused: set[int] = set()  # parameters without a gradient in any process
        self.history: list[tuple[int, float]] = []
        self.graph: torch.cuda.CUDAGraph | None = None
        alone = not self.processes.joined or self.processes.nccl  # gloo sums on the CPU, which cannot be captured
        self.capturable = cuda and config.captured and isinstance(source, Rows) and source.resident and alone

    def advance(self) -> None:
        """Take one step. If a graph was captured, replay it."""
        config, cuda = self.config, self.cuda
        # torch's schedulers compute the rate recursively or as a factor, which rounds differently with `last_lr`.
        for group in self.optimiser.param_groups:
            group["lr"].fill_(config.lr_at(self.done)) if cuda else group.update(lr=config.lr_at(self.done))
        if self.average:
            self.average.set_step(self.done)
        self.beta.fill_(config.beta * cyclic(self.done, config.iterations, config.cycles, config.warmup))
        if self.capturable and self.graph is None and self.eager == WARM:
            self.optimiser.zero_grad(set_to_none=True)
            # NCCL has threads of its own, whose calls must not end the capture.
            self.graph = _captured(self.step, "thread_local" if self.processes.joined else "global")
        self.graph.replay() if self.graph else self.step()
        self.eager += 1
        self.done += 1

    def step(self) -> None:
        x1, cond, randomness = self.draw()
        self.optimiser.zero_grad(set_to_none=True)
        half = self.cuda and self.config.precision != "full"
        with torch.autocast(self.device.type, PRECISIONS[self.config.precision], enabled=half):
            value = self.loss(x1, randomness, self.beta, cond)
        try:
            value.backward()
        except Recomputed as error:
            raise UsageError(
                "the network uses gradient checkpointing, which recomputes its layers without their noise; switch it "
                "off while fitting the noise"
            ) from error
        value = value.detach()
        if isinstance(randomness, Share):
            value = self.sum_gradients(value, randomness.part)
        if clip := self.config.clip:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.nan_to_num_(0.0, clip, -clip)
            nn.utils.clip_grad_value_(self.parameters, clip)
        self.optimiser.step()
        if self.average:
            self.average.update()
        self.latest.copy_(value)

    def draw(self) -> tuple[State, dict[str, Any], Randomness]:
        """Return samples on the device, their conditions, and the source of their random numbers."""
        if not self.processes.joined:
            return *self.move(self.source.draw(self.generator)), self.randomness
        x1, cond, samples, total, load = self.source.draw_part(self.generator)
        share = Share(self.randomness, self._to_device(samples), total, lambda: self.move(load()))
        if self.config.compiled and isinstance(self.source, Rows):
            share.batch()  # outside the compiled loss
        return *self.move((x1, cond)), share

    def move(self, batch: Batch) -> Batch:
        x1, cond = batch
        return tree_map(self._to_device, x1), {name: tree_map(self._to_device, row) for name, row in cond.items()}

    def _to_device(self, value: Tensor) -> Tensor:
        if self.cuda and not value.is_cuda:  # copies from pinned memory do not wait for the steps in the GPU's queue
            return value.pin_memory().to(self.device, non_blocking=True)
        return value.to(self.device)

    @torch.no_grad()
    def sum_gradients(self, value: Tensor, part: float) -> Tensor:
        """Replace gradients by those of the whole batch; return its loss.

        Arguments:
            value: The loss of this process's samples.
            part: Their share of the batch.
        """
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        used = torch.tensor([float(p.grad is not None) for p in self.parameters], device=value.device)
        flat = torch.cat([*(g.flatten() for g in gradients), used.to(value), value.reshape(1)]).mul_(part)
        self.processes.sum(flat)
        *sums, used, whole = flat.split([*(g.numel() for g in gradients), len(used), 1])
        torch._foreach_copy_(gradients, [a.view_as(g) for a, g in zip(sums, gradients, strict=True)])
        if any(p.grad is None for p in self.parameters) and not (
            self.cuda and torch.cuda.is_current_stream_capturing()
        ):
            self.unused = {i for i, share in enumerate(used.tolist()) if not share}  # by all processes
        for i, (parameter, gradient) in enumerate(zip(self.parameters, gradients, strict=True)):
            parameter.grad = None if i in self.unused else gradient  # an optimiser would decay weights without a loss
        return whole[0]

    def agree(self) -> None:
        """Raise if the processes do not draw the same random numbers."""
        remedy = "a part of the network that draws its own, such as dropout, needs a batch that they share equally"
        drawn = {"random numbers": self.generator.get_state().tolist()} if self.processes.joined else {}
        self.processes.agree({"steps done": self.done, **drawn}, remedy)

    def report(self) -> tuple[int, float]:
        """Add the latest loss to the history; raise if it is not finite, unless gradients are clipped."""
        loss = float(self.latest)
        if not self.config.clip and not math.isfinite(loss):
            raise NotFiniteError(f"the loss is {loss} at step {self.done}; lower lr, or look for outliers in the data")
        self.history.append((self.done, loss))
        return self.history[-1]

    def save(self, path: Path, identity: dict[str, Any]) -> None:
        for parameter in self.parameters:
            require_finite(parameter, f"a weight at step {self.done}")  # such a point could not be resumed
        save_point(path, identity, self)


def _captured(step: Callable[[], None], errors: str) -> torch.cuda.CUDAGraph:
    """Capture a step as a CUDA graph. `errors` is torch's `capture_error_mode`."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode=errors):
            step()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"a step cannot be captured as a CUDA graph; train with captured=False, or --no-capture ({reason})"
        ) from error
    return graph


@torch.inference_mode(False)  # also if the caller has disabled gradients
@torch.enable_grad()
def train(
    module: nn.Module,
    loss: Loss,
    data: Data,
    config: TrainingConfig,
    *,
    cond: Mapping[str, State] | None = None,
    resume: str | Path | None = None,
    identity: Mapping[str, Any] | None = None,
    progress: Callable[[int, float], None] | None = None,
    every: int = EVERY,
) -> list[tuple[int, float]]:
    """Train the parameters of `module` that require a gradient; return pairs (step, loss).

    Arguments:
        module: The module to train, on its device.
        loss: The objective, `loss(x1, randomness, beta, cond)`.
        data: `(N, *)` or a dict of channels, moved to the module's device at once, or batch by batch if they take much
            of a GPU's memory; or a Dataset, a DataLoader or another iterable of batches
            (:class:`fmwc.data.batches.Batches`), moved batch by batch. With several processes, each is given the same
            data and trains some samples of every batch.
        config: The configuration.
        cond: The conditions of data in memory, by name, `(N, *)` each.
        resume: A file for resume points. If it exists, training resumes from it and reaches the same weights as an
            uninterrupted run. The first process writes it, and all read it.
        identity: Values that the result depends on, besides the configuration and the data, by name. A resume point
            with a different identity is refused.
        progress: Called with the steps done and the latest loss.
        every: Steps between two calls of `progress`.
    """
    device = next(p for p in module.parameters() if p.requires_grad).device
    source = _source(data, as_conditions(cond), config, device)
    resume = Path(resume) if resume else None
    about: dict[str, Any] = {}
    processes = Processes()
    if resume or processes.joined:
        about = {k: v for k, v in vars(config).items() if k not in ("save_every", "minutes")}
        about |= {"data": source.fingerprint(), "device": device.type, **(identity or {})}
    processes.agree(about, "start all of them with the same settings, data and network")
    # Gradient noise is far larger than the rounding error of TensorFloat-32.
    with _generator(device, config.seed) as generator, tensor_float(device.type == "cuda"):
        run = _Training(module, loss, source, config, generator)
        if resume and resume.exists():
            read_point(resume, about, run)
            source.skip(run.done)
        processes.agree({"steps done": run.done}, "the resume file must be in a file system that all of them share")
        processes.copy_from_first(run.kept)
        saved = time.monotonic()
        until = time.monotonic() + 60 * config.minutes if config.minutes else math.inf
        while run.done < config.iterations and not (config.minutes and processes.first_says(time.monotonic() >= until)):
            run.advance()
            last = run.done == config.iterations
            if run.done % every == 0 or last:
                run.agree()
                step, value = run.report()
                if progress and processes.first:
                    progress(step, value)
            now = time.monotonic()
            due = last or run.done % config.save_every == 0 or now >= min(until, saved + PAUSE)
            if resume and due and processes.first:
                run.save(resume, about)
                saved = time.monotonic()
    if run.average:
        run.average.copy_to_parameters()
    processes.copy_from_first(run.buffers)  # batch norms have seen different samples
    if not run.history or run.history[-1][0] < run.done:  # the time limit ended the run
        run.history.append((run.done, run.history[-1][1] if run.history else math.nan))
    return run.history


def _source(data: Data, cond: dict[str, State], config: TrainingConfig, device: torch.device) -> Rows | Batches:
    """Return the source of batches."""
    if in_memory(data):
        return Rows(data, cond, config.batch, config.stratified, device)  # type: ignore[arg-type]
    if cond:
        raise UsageError("conditions must come with the batches of a loader, as pairs (x, {'y': y}); leave out cond")
    if config.stratified:
        raise UsageError("stratified batches need data in memory; give tensors, or stratified=False")
    return data if isinstance(data, Batches) else Batches(data, config.batch, config.seed)


@contextmanager
def _generator(device: torch.device, seed: int) -> Iterator[torch.Generator]:
    """Yield a seeded generator: on a GPU the default one of the device, which is restored afterwards."""
    if device.type != "cuda":
        yield torch.Generator(device=device).manual_seed(seed)
        return
    with torch.random.fork_rng(devices=[device]):
        yield torch.cuda.default_generators[device.index or 0].manual_seed(seed)


# ---- resume points -----------------------------------------------------------------------------------------------

STATE = ("step", "exp_avg", "exp_avg_sq")  # of Adam
_POINT = record(
    {
        "done": whole(),
        "identity": mapping(anything, 1000),
        "history": array(array(optional(number()), 2, 2)),
        SEAL: text(64, "[0-9a-f]{64}"),
    }
)


def save_point(path: Path, identity: dict[str, Any], run: _Training) -> None:
    """Write weights, averages, buffers, and the state of the optimiser and the generator to one file, atomically."""
    tensors = {f"kept.{i}": value.detach().cpu().clone().contiguous() for i, value in enumerate(run.kept)}
    for i, parameter in enumerate(run.parameters):
        for name, value in run.optimiser.state.get(parameter, {}).items():
            tensors[f"optimiser.{i}.{name}"] = torch.as_tensor(value).detach().cpu().clone().contiguous()
    tensors["generator"] = run.generator.get_state().cpu()
    history = [[step, loss if math.isfinite(loss) else None] for step, loss in run.history]
    write_tensors(path, tensors, {"done": run.done, "identity": plain(identity), "history": history})


def read_point(path: Path, identity: dict[str, Any], run: _Training) -> None:
    """Restore a run from a file that :func:`save_point` wrote."""
    tensors, about = read_tensors(path, _POINT, "a resume point")
    if rows := difference(about["identity"], identity):
        raise MismatchError(f"{path} belongs to a run with other settings ({rows}); delete it, or use another --out")
    try:
        kept = [tensors[f"kept.{i}"] for i in range(sum(key.startswith("kept.") for key in tensors))]
        if [(v.shape, v.dtype) for v in kept] != [(v.shape, v.dtype) for v in run.kept]:
            raise CheckpointError(f"{path} belongs to another architecture; delete it, or use another --out")
        # A parameter without a gradient, such as that of an unused layer, has no state.
        states = {
            i: {name: tensors[f"optimiser.{i}.{name}"] for name in STATE}
            for i in range(len(run.parameters))
            if f"optimiser.{i}.step" in tensors
        }
        run.optimiser.load_state_dict({"state": states, "param_groups": run.optimiser.state_dict()["param_groups"]})
        run.generator.set_state(tensors["generator"])
    except (KeyError, RuntimeError, TypeError) as error:
        raise CheckpointError(f"{path} was written on another kind of device; resume there, or delete it") from error
    with torch.no_grad():
        for value, read in zip(run.kept, kept, strict=True):
            value.copy_(read)
    run.done = about["done"]
    run.history = [(int(step), math.nan if loss is None else float(loss)) for step, loss in about["history"]]


# ---- the noise of a trained network ------------------------------------------------------------------------------


def fit_noise(
    field: Field,
    data: Data,
    steps: int = 2_000,
    *,
    beta: float = 1e-3,
    batch: int = 1024,
    lr: float = 1e-3,
    decay: str = "cosine",
    seed: int = 0,
    precision: str = "full",
    compiled: bool = False,
    captured: bool = False,
    stratified: bool = False,
    pairs: Pairs = None,
    conventions: bool = True,
    confidence: bool = True,
    resume: str | Path | None = None,
    identity: Mapping[str, Any] | None = None,
    progress: Callable[[int, float], None] | None = None,
    every: int = EVERY,
    cond: Mapping[str, Any] | None = None,
) -> list[tuple[int, float]]:
    """Fit the noise of a trained network; return pairs (step, loss).

    The network is frozen and only the inference networks are trained, so the field's samples remain bit for bit those
    of the network. Afterwards, :func:`fmwc.fit_confidence` chooses the confidence score, unless `confidence=False`.
    `lr`, `decay`, `precision`, `compiled` and `stratified` are described in :class:`TrainingConfig`.

    Arguments:
        field: An attached field.
        data: Training samples of the network, or samples drawn from it: `(N, *)` or a dict of channels; or a Dataset, a
            DataLoader or another iterable of batches, which is read batch by batch; the checks before and after
            training see its first 20,000 samples. A batch is `x`, or a pair `(x, {"y": y})` with its conditions.
        steps: Number of optimiser steps.
        beta: The weight of the KL divergence.
        batch: Samples per step; a DataLoader has its own batch size.
        captured: On a GPU, replay steps as a CUDA graph, which is faster for small networks. Not for networks whose
            shapes depend on values or that read values on the host.
        pairs: The coupling of noise and data in the network's training: `None` (independent), `"ot"` (optimal transport
            within each batch), a function `(x1, randomness) -> x0`, or tensors x0 with one row per sample. The noise
            must be distributed as that of the field's space, from which samples start.
        conventions: Check on one batch that time and velocity have the conventions of the network's training
            (:func:`fmwc.conventions.check_conventions`).
        resume: A file for resume points. Resuming does not detect a change of a function `pairs`.
        identity: Values that the result depends on, besides these arguments, the network's weights and the noise model.
        progress: Called with the steps done and the latest loss.
        every: Steps between two calls of `progress`.
        cond: The conditions of data in memory, by name, with one row per sample.
    """
    field.noise.require_layers()
    source: Data
    if in_memory(data):
        source = known = _tensors(field, data)
        cond = {k: torch.as_tensor(v) for k, v in as_conditions(cond).items()}
        given = cond
        batch = min(batch, batch_size(known))
    else:
        coupled = couples_samples(pairs) or declared(field.network, "rows") is not None
        convert = lambda x: _tensors(field, x)  # noqa: E731
        source = batches = Batches(data, batch, derive(seed, "data"), convert, whole=coupled)
        known, given = batches.head()
    if field.space is not None:
        field.space.check_rows(given, batch_size(known))
    with _frozen(field.network):  # in training mode, a call would update batch norms
        _learn_space(field, known, given)
    field.check_finite()
    if isinstance(pairs, str):
        pick(COUPLINGS, pairs, "coupling")
        if pairs != "independent":  # pairs are computed on the host, which a CUDA graph cannot wait for
            compiled = captured = False
    config = TrainingConfig(
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
        captured=captured and _capturable(field.network, batch if stratified else None),
        stratified=stratified,
    )
    rows = dict(cond or {})
    if pairs is not None and in_memory(pairs):
        if not in_memory(data):
            raise UsageError(
                "pairs given as tensors need data in memory; give tensors, or a function (x1, randomness) -> x0"
            )
        rows[PAIRED] = _paired(field, pairs, known)
    if in_memory(data):
        require_rows(rows, batch_size(known))
    assert field.space is not None
    if pairs is not None and not isinstance(pairs, str):
        _require_source(field, field.space, known, given, rows.get(PAIRED, pairs), seed)
    useless = ""
    if conventions:
        found = check_conventions(field, field.space, known, given, seed=seed, pairs=rows.get(PAIRED, pairs))
        useless = found.withheld

    def loss(x1: State, randomness: Stream, weight: Tensor, cond: dict[str, Any]) -> Tensor:
        given = {name: value for name, value in cond.items() if name != PAIRED}
        return elbo_loss(field, x1, weight, seed=randomness, pairs=cond.get(PAIRED, pairs), cond=given)

    about = _identity(field, pairs, identity) if resume or Processes().joined else None
    with _frozen(field.network), field.noise.keep_hooks():
        history = train(
            field.noise, loss, source, config, cond=rows, resume=resume, identity=about, progress=progress, every=every
        )
    if confidence:  # in every process, with the same result
        made = fit_confidence(field, known, cond=given, seed=derive(seed, "confidence"), conventions=False)
        field.reference = made._replace(withheld=useless or made.withheld)
    return history


def _identity(field: Field, pairs: Pairs, more: Mapping[str, Any] | None) -> dict[str, Any]:
    return {
        "network": digest_tensors(field.network.state_dict()),
        "noise": field.noise.options,
        "layers": field.noise.names,
        "prior_rate": field.prior_rate,
        "kl_factor": field.kl_factor,
        "space": field.space.describe() if field.space else None,
        **({"pairs": pairs} if isinstance(pairs, str) else {}),
        **(more or {}),
    }


def _capturable(network: nn.Module, batch: int | None) -> bool:
    """Return whether a network can be captured. One with static capacities must have one for this batch size."""
    capacity = getattr(network, "static_capacity", None)
    return capacity is None or batch in capacity


SOURCE_ROWS = 512  # rows of pairs that are compared with the noise of the space
SHUFFLES = 100
CLEARLY = 3.0  # factor by which the distance must exceed that of every random split


def _require_source(field: Field, space: Space, x1: State, cond: Mapping[str, State], pairs: Any, seed: int) -> None:
    """Raise if the paired noise is not distributed as the noise of the space, from which samples and checks start.

    The energy distance between both is compared with that between random halves of all rows.
    """
    generator = torch.Generator().manual_seed(derive(seed, "source"))
    rows = torch.randperm(batch_size(x1), generator=generator)[:SOURCE_ROWS]
    few, given = select_rows((x1, dict(cond)), rows)
    few, given = tree_map(lambda c: c.to(field.device), few), {k: v.to(field.device) for k, v in given.items()}
    randomness = Stream(torch.Generator(field.device).manual_seed(derive(seed, "source")))
    space, count = space.given(given), len(rows)
    theirs = couple(tree_map(lambda c: c[rows], pairs) if in_memory(pairs) else pairs, space, few, randomness)
    ours = space.noise(count, randomness, field.device)
    both = [torch.cat([channels(theirs)[n].to(c), c]).flatten(1).double().cpu() for n, c in channels(ours).items()]
    points = torch.cat([value / value.std().clamp_min(1e-12) for value in both], 1)
    apart = torch.cdist(points, points)
    side = torch.cat([torch.ones(count), -torch.ones(count)]).double()
    splits = torch.stack([side, *(side[torch.randperm(2 * count, generator=generator)] for _ in range(SHUFFLES))])
    distance, *chance = (-((splits @ apart) * splits).sum(1)).tolist()
    if distance > CLEARLY * max(chance):
        raise UsageError(
            "pairs start from another distribution than the noise of the field's space, from which samples start; "
            "attach with a space that draws it: Space({'x': Channel(shape, manifold, noise='own')}), where the "
            "manifold has a method noise(randomness, like)"
        )


def _paired(field: Field, x0: Any, data: State) -> State:
    """Return the noise that is paired with the data; raise if their shapes do not match."""
    x0 = _tensors(field, x0)
    assert field.space is not None
    return couple(x0, field.space, data, Stream())


def _learn_space(field: Field, data: State, cond: Mapping[str, Tensor]) -> None:
    """Infer the space from the data; raise if the network does not run on the data."""
    before = field.space
    field.learn_space(data)
    try:
        with torch.no_grad():
            x = tree_map(lambda c: c[:2].to(field.device), data)
            first = {k: v[:2].to(field.device) for k, v in cond.items()}
            v = field(x, torch.zeros(batch_size(x), device=field.device), **first)
        require_state(v, "the network's velocity")
        field.learn_space(v)
    except (AssertionError, RuntimeError, TypeError, IndexError, ShapeError, ValueError) as error:
        field.space = before
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        shapes = ", ".join(str(tuple(c.shape)) for c in channels(data).values())
        raise ShapeError(f"the network does not run on data of shape {shapes}: {reason}") from error
    field.check_rows(x, 0.5, cond=first)


def _tensors(field: Field, data: Any) -> State:
    """Return data as tensors of the network's precision."""
    rows = tree_map(lambda c: as_rows(c, "the data"), data)
    if not all(value.is_floating_point() for value in channels(rows).values()):
        raise UsageError(
            "the data are integers, but a flow needs floating-point numbers; convert them, as in x.float() / 255"
        )
    return tree_map(lambda c: c.to(precision_of(field.network)), rows)


def _set_gradient(parameter: nn.Parameter, required: bool) -> None:
    parameter.requires_grad_(required)


_GRADIENTS: Shared[nn.Parameter] = Shared(
    lambda parameter: parameter.requires_grad, lambda parameter: _set_gradient(parameter, False), _set_gradient
)


def _frozen(network: nn.Module) -> Scope:
    """Return a scope in which parameters have no gradients and modules are in evaluation mode."""
    return Scopes(_GRADIENTS.holding(network.parameters()), evaluating(network))
