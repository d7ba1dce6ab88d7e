"""Add confidence to a trained model: fit noise to data or to samples of the model, and write a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fmwc.calibration import fit_confidence, pilot_conditions
from fmwc.checkpoint import about as checkpoint_about
from fmwc.checkpoint import load, save
from fmwc.checks.evidence import discrete_conditions
from fmwc.data import arrays
from fmwc.data.arrays import fingerprint
from fmwc.entry import try_once
from fmwc.errors import CheckpointError, DataError, NotFiniteError, UsageError, pick, require_finite
from fmwc.field import Field, attach
from fmwc.files import write_json
from fmwc.flow import COUPLINGS, Pairs, Space, elbo_loss, euclidean
from fmwc.identity import digest_tensors
from fmwc.modes import evaluating
from fmwc.processes import Processes, first_before_others, resumed_by_first
from fmwc.provenance import Clock, provenance, runtime
from fmwc.randomness import derive
from fmwc.readers import array, number, optional, read_json, record, whole
from fmwc.sampling import SCORES, Reference, SamplingConfig, Trajectory, default_estimator, noise, read_with, sample
from fmwc.sampling.trajectory import FEWEST, parsed
from fmwc.state import State, as_state, batch_size, channels, tree_map
from fmwc.training import fit_noise

__all__ = ["Retrofit", "advice", "held_out_elbo", "retrofit"]

HELD_OUT = 0.1  # share of the data held out from fitting
MOST_HELD_OUT = 1024
DRAWS = 4  # random times and noises per held-out sample, the same in every evaluation
REFERENCES = 1_000  # reference samples; more if there are many classes
CLASSES = 1_000  # a condition with more values than this is not a class
CHUNK = 128  # held-out samples per batch
LOSSES = "held_out.json"  # the held-out losses of an interrupted run
EVALUATIONS = 8  # evaluations of the held-out loss; the last quarter of the steps is compared with the rest
ENOUGH = 0.01  # training has converged if the last quarter adds less than this share of the total gain

Progress = Callable[[int, int, float, float], None]  # (steps done, total steps, loss, held-out loss)


@dataclass(frozen=True)
class Retrofit:
    """Configuration of the noise fit.

    Arguments:
        steps, batch, lr: Number of steps, batch size and learning rate of the optimiser.
        beta: The weight of the KL divergence.
        prior_rate: The prior rate p.
        width: The width of the inference networks.
        include, exclude: Glob patterns of the names of layers with and without noise.
        own_samples: If not 0, fit to this many samples drawn from the network instead of to data.
        sampling_steps: Euler steps of these samples and of the reference samples.
        score: The score to compute confidence from; if empty, it is chosen by :func:`fmwc.fit_confidence`.
        captured: On a GPU, replay steps as a CUDA graph, which is faster for small networks. Not for networks whose
            shapes depend on values or that read values on the host.
        seed: The seed of all random numbers.
        pairs: How noise and data were paired in the network's training: `independent`, or `ot` (optimal transport
            within each batch).
        conventions: Check that time and velocity have the conventions of the network's training.
    """

    steps: int = 2_000
    batch: int = 256
    lr: float = 1e-3
    beta: float = 1e-3
    prior_rate: float = 0.3
    width: int = 64
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    own_samples: int = 0
    sampling_steps: int = 50
    score: str = ""
    captured: bool = False
    seed: int = 0
    pairs: str = "independent"
    conventions: bool = True

    def about(self) -> dict[str, Any]:
        """Return the options to record."""
        return dict(vars(self))

    def check(self) -> None:
        """Raise if an option is out of range."""
        for name, most in (("steps", 10**8), ("batch", 10**7), ("width", 1 << 16), ("sampling_steps", 10**5)):
            if not 1 <= getattr(self, name) <= most:
                raise UsageError(f"{name} must lie between 1 and {most:,}, got {getattr(self, name)}")
        for name in ("lr", "beta"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"{name} must be positive and finite, got {getattr(self, name)}")
        fewest = round(1 / HELD_OUT)
        if self.own_samples and not fewest <= self.own_samples <= 10**8:
            raise UsageError(
                f"own_samples must lie between {fewest} (a tenth is held out) and {10**8:,}, got {self.own_samples}"
            )
        pick(COUPLINGS, self.pairs, "coupling")
        if self.score:
            pick(SCORES, parsed(self.score)[1], "score")


def held_out_elbo(
    field: Field, x: State, cond: dict[str, Any], beta: float, seed: int = 0, pairs: Pairs = None
) -> float:
    """Return the ELBO loss on held-out samples, with the same random draws in every call."""
    total = 0.0
    with evaluating(field.network), torch.no_grad():
        for draw in range(DRAWS):
            for rows in torch.arange(batch_size(x), device=field.device).split(CHUNK):
                x1, given = _rows(x, cond, rows, field.device)
                seeded = derive(seed, draw, int(rows[0]))
                total += float(elbo_loss(field, x1, beta, seed=seeded, pairs=pairs, cond=given)) * len(rows)
    return total / (DRAWS * batch_size(x))


def advice(losses: list[tuple[int, float]]) -> str:
    """Describe whether more steps would help, given pairs (step, held-out loss).

    >>> advice([(0, 1.0), (200, 0.5), (400, 0.4), (600, 0.401), (800, 0.4)])
    'the held-out loss fell from 1 to 0.4, with 0.2 % of the decrease in the last quarter of the steps: enough steps'
    """
    first, last = losses[0][1], losses[-1][1]
    if not last < first:
        return f"the held-out loss did not fall ({first:.4g} before, {last:.4g} after): lower --lr, or check the data"
    before = [loss for step, loss in losses if step <= 0.75 * losses[-1][0]][-1]
    share = (before - last) / (first - last)
    if share < -ENOUGH:
        return f"the held-out loss fell from {first:.4g} to {last:.4g}, but rose in the last quarter: lower --lr"
    verdict = "enough steps" if share < ENOUGH else "more steps may help"
    return (
        f"the held-out loss fell from {first:.4g} to {last:.4g}, with {100 * share:.1f} % of the decrease in the last "
        f"quarter of the steps: {verdict}"
    )


def retrofit(
    network: nn.Module,
    out: Path,
    data: arrays.Samples | None = None,
    config: Retrofit | None = None,
    *,
    space: Space | None = None,
    device: torch.device | str = "cpu",
    entry: str = "",
    progress: Progress | None = None,
    force: bool = False,
) -> tuple[Field, list[tuple[int, float]]]:
    """Fit noise and a reference to a trained network, and write a checkpoint. Resumes if interrupted.

    Of several processes (:mod:`fmwc.processes`), the first writes, and the others return what it has written.

    Arguments:
        network: The trained network, called as `network(x, t, **cond)`. Its weights do not change.
        out: The checkpoint's folder.
        data: Training samples with their conditions; with `own_samples`, only the conditions are used.
        config: Configuration of the fit.
        space: The space of the samples; by default Euclidean, of the data's shape.
        device: Where to compute.
        entry: The name of the function that builds the network; it is recorded in the checkpoint.
        progress: Called after each eighth of the steps with the steps done, the total, the loss and the held-out loss.
        force: Write into a folder that is not empty.

    Returns:
        The field, and pairs (step, held-out loss), which :func:`advice` interprets.
    """
    device, clock, config = torch.device(device), Clock(torch.device(device)), config or Retrofit()
    config.check()
    network = network.to(device)
    if not config.own_samples and (data is None or data.x is None):
        found = f"; the file has only {', '.join(data.cond)}" if data is not None else ""
        raise UsageError(
            f"there are no training samples{found}; give a file with an array x, or draw samples with --own-samples N"
        )
    about = {
        **config.about(),
        "network": digest_tensors(network.state_dict(), type(network).__qualname__),
        "data": None if data is None else fingerprint(*(v for v in (data.x, *data.cond.values()) if v is not None)),
        "conditions": None if data is None else list(data.cond),
        "space": None if space is None else space.describe(),
        "entry": entry,
        **runtime(device),
    }
    first = Processes().first
    with resumed_by_first(out, {"command": "retrofit", **about}, force=force) as folder:
        if not folder.finished:
            if config.own_samples:
                with first_before_others():
                    data = _own_samples(network, config, space, data, device, folder.work)
            assert data is not None
            field, losses, x = _fit(network, folder.work, data, config, space, device, progress)
            if first:
                field.reference = _reference(field, config, x, data.cond)
                save(
                    field,
                    folder.path,
                    recipe={"name": "own", "network": entry, **config.about()},
                    metrics={"held_out": losses},
                    provenance=provenance(device, clock.seconds, seeds=[config.seed]),
                )
                return field, losses
    field = load(out, network, space=space, device=device)
    return field, [(int(step), float(loss)) for step, loss in checkpoint_about(out)["metrics"]["held_out"]]


def _fit(
    network: nn.Module,
    work: Path,
    data: arrays.Samples,
    config: Retrofit,
    space: Space | None,
    device: torch.device,
    progress: Progress | None,
) -> tuple[Field, list[tuple[int, float]], State]:
    """Attach noise and fit it to nine tenths of the data; return the field, the held-out losses, and the data.

    Of several processes, only the first computes the held-out losses.
    """
    x: State = as_state(data.x, "the data", network)
    count = batch_size(x)
    held_out = min(MOST_HELD_OUT, round(HELD_OUT * count))
    if held_out < 1:
        raise DataError(f"{count} samples are too few: a tenth of them is held out; give at least 10")
    field = attach(
        network,
        include=config.include,
        exclude=config.exclude,
        space=space or (None if isinstance(x, dict) else euclidean(x.shape[1:])),
        prior_rate=config.prior_rate,
        width=config.width,
        seed=derive(config.seed, "noise"),
    ).to(device)
    for value in (*channels(x).values(), *data.cond.values()):
        require_finite(value, "the data")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(derive(config.seed, "held out")))
    test, test_cond = _rows(x, data.cond, order[:held_out], device)
    train, train_cond = _rows(x, data.cond, order[held_out:], torch.device("cpu"))
    losses = _read_losses(work / LOSSES)

    def evaluate(done: int, loss: float | None = None) -> None:
        losses[done] = held_out_elbo(field, test, test_cond, config.beta, config.seed, config.pairs)
        rows = [{"step": step, "loss": value if math.isfinite(value) else None} for step, value in losses.items()]
        write_json(work / LOSSES, rows)
        if progress:
            progress(done, config.steps, losses[done] if loss is None else loss, losses[done])

    try_once(network, test, test_cond)
    first = Processes().first
    if first and 0 not in losses:
        evaluate(0)
    fit_noise(
        field,
        train,
        config.steps,
        beta=config.beta,
        batch=config.batch,
        lr=config.lr,
        captured=config.captured,
        pairs=None if config.pairs == "independent" else config.pairs,
        conventions=config.conventions,
        confidence=False,  # fitted below, with the given steps and score
        seed=derive(config.seed, "retrofit"),
        resume=work / "noise.resume",
        progress=evaluate,
        every=max(1, config.steps // EVALUATIONS),
        cond=train_cond,
    )
    history = sorted(losses.items())
    if first and not math.isfinite(history[-1][1]):
        raise NotFiniteError("the held-out loss is not finite, and no checkpoint was written; lower --lr")
    return field, history, x


_LOSSES = array(record({"step": whole(), "loss": optional(number())}), most=100_000)


def _read_losses(path: Path) -> dict[int, float]:
    """Return the held-out losses of an interrupted run by step. Those after its resume point are recomputed."""
    if not path.is_file():
        return {}
    rows = read_json(path, _LOSSES, error=CheckpointError)
    return {row["step"]: math.nan if row["loss"] is None else float(row["loss"]) for row in rows}


def _own_samples(
    network: nn.Module,
    config: Retrofit,
    space: Space | None,
    data: arrays.Samples | None,
    device: torch.device,
    work: Path,
) -> arrays.Samples:
    """Draw samples from the network, under the conditions of the data, repeated as needed."""
    if space is None and data is not None and isinstance(data.x, Tensor):
        space = euclidean(data.x.shape[1:])
    if space is None:
        raise UsageError("the shape of a sample is not known; return (network, space) from the function, or give data")
    cond = pilot_conditions({} if data is None else data.cond, "", config.own_samples, config.seed)
    cond = {k: v.to(device) for k, v in cond.items()}
    first = {k: v[:2] for k, v in cond.items()}
    try_once(network, noise(space, 2, 0, device, cond=first), first)
    if (kept := work / "own.safetensors").is_file():  # of an interrupted run, or of the first process
        run = Trajectory.load(kept)
        return arrays.Samples(run.x, {k: v.cpu() for k, v in cond.items()})
    run = sample(
        network,
        config.own_samples,
        steps=config.sampling_steps,
        seed=derive(config.seed, "own samples"),
        confidence=None,
        cond=cond,
        config=SamplingConfig(space=space, batch=config.batch),
    )
    run.save(kept)
    return arrays.Samples(tree_map(lambda c: c.cpu(), run.x), {k: v.cpu() for k, v in cond.items()})


def _rows(x: State, cond: dict[str, Any], rows: Tensor, device: torch.device) -> tuple[State, dict[str, Any]]:
    return tree_map(lambda c: c[rows].to(device), x), {k: v[rows].to(device) for k, v in cond.items()}


def _class(cond: dict[str, Tensor], space: Space, count: int) -> str:
    """Return the name of the class condition; empty unless there is exactly one, with at most `CLASSES` values."""
    names = [name for name in discrete_conditions(cond, space, count) if int(cond[name].min()) >= 0]
    return names[0] if len(names) == 1 and len(cond[names[0]].unique()) <= CLASSES else ""


def _reference(field: Field, config: Retrofit, x: State, cond: dict[str, Tensor]) -> Reference:
    """Return the reference for the given score, or the one that a pilot run chooses."""
    assert field.space is not None
    if not config.score:
        return fit_confidence(
            field,
            None if config.own_samples else x,
            cond=cond,
            steps=config.sampling_steps,
            seed=derive(config.seed, "reference"),
            batch=config.batch,
            conventions=False,
        )
    within = _class(cond, field.space, batch_size(x))
    count = max(REFERENCES, FEWEST * len(cond[within].unique()) if within else 0)
    run = sample(
        field,
        count,
        steps=config.sampling_steps,
        seed=derive(config.seed, "reference"),
        cond={name: v.to(field.device) for name, v in pilot_conditions(cond, within, count, config.seed).items()},
        config=SamplingConfig(batch=config.batch),
    )
    run = run.ranked_by(config.score, within=within or None)
    scores = run.score()
    levels = torch.linspace(0, 1, 1001, device=field.device, dtype=scores.dtype)
    made = read_with(default_estimator(field.space), config.sampling_steps, "euler")
    quantiles = scores.quantile(levels)
    return Reference(config.score, made, quantiles, run.standard, weights=field.checksum(), space=field.space)
