"""Add confidence to a trained model: fit noise to data, or to its own samples, and write a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fmwc.calibration import fit_confidence
from fmwc.checkpoint import about as checkpoint_about
from fmwc.checkpoint import load, save
from fmwc.data import arrays
from fmwc.data.arrays import fingerprint
from fmwc.entry import try_once
from fmwc.errors import CheckpointError, DataError, NotFiniteError, UsageError, pick, require_finite
from fmwc.field import Field, attach
from fmwc.files import claimed, write_json
from fmwc.flow import COUPLINGS, Pairs, Space, as_space, elbo_loss, euclidean
from fmwc.identity import digest_tensors
from fmwc.modes import evaluating
from fmwc.provenance import Clock, provenance, runtime
from fmwc.randomness import derive
from fmwc.readers import array, number, optional, read_json, record, whole
from fmwc.references import Reference
from fmwc.sampling import SCORES, Parts, SamplingConfig, default_estimator, noise, read_with, sample
from fmwc.sampling.scores import FEWEST, parsed
from fmwc.state import State, as_state, batch_size, channels, tree_map
from fmwc.training import fit_noise

__all__ = ["Retrofit", "advice", "held_out_elbo", "retrofit"]

HELD_OUT = 0.1  # the share of the data that the noise is not fitted to
MOST_HELD_OUT = 1024
PAIRS = 4  # times and draws per held-out sample, the same in every evaluation
REFERENCES = 1_000  # samples; more if there are more classes
CLASSES = 1_000  # the most values of a condition that is a class
CHUNK = 128  # held-out samples per batch
LOOKED = "held_out.json"  # the held-out losses so far
LOOKS = 8  # evaluations of the held-out loss, so that the last quarter of the steps can be compared with the rest
ENOUGH = 0.01  # of the total gain; a last quarter that adds less means enough steps

Progress = Callable[[int, int, float, float], None]  # (steps done, steps in all, loss, held-out loss)


@dataclass(frozen=True)
class Retrofit:
    """How the noise is fitted.

    Arguments:
        steps, batch, lr: Options of the optimiser.
        beta: The weight of the KL.
        prior_rate: The prior rate p.
        width: The width of the inference networks.
        include, exclude: Globs over the names of layers that carry noise.
        own_samples: If not 0, fit to this many samples of the network's own instead of data.
        sampling_steps: Euler steps of these samples and of the reference.
        score: The score to compute confidence from; if empty, a pilot run chooses (:func:`fmwc.fit_confidence`).
        captured: Capture a step as a CUDA graph, on a GPU; not for a network that reads a shape from the GPU.
        seed: The seed of all random numbers.
        pairs: How noise and data were paired in the network's training: `independent`, or `ot` (optimal transport
            within each batch).
        conventions: Check that the network is called as in its training.
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
    captured: bool = True
    seed: int = 0
    pairs: str = "independent"
    conventions: bool = True

    def about(self) -> dict[str, Any]:
        """Return the options to record; later ones only if they were used, so that older runs resume."""
        later = {"pairs": "independent", "conventions": True}
        return {name: value for name, value in vars(self).items() if name not in later or value != later[name]}

    def check(self) -> None:
        """Raise if an option is out of range."""
        for name, most in (("steps", 10**8), ("batch", 10**7), ("width", 1 << 16), ("sampling_steps", 10**5)):
            if not 1 <= getattr(self, name) <= most:
                raise UsageError(f"{name} lies between 1 and {most:,}, got {getattr(self, name)}")
        for name in ("lr", "beta"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"{name} is positive, got {getattr(self, name)}")
        fewest = round(1 / HELD_OUT)
        if self.own_samples and not fewest <= self.own_samples <= 10**8:
            raise UsageError(
                f"own_samples lies between {fewest} (a tenth is held out) and {10**8:,}, got {self.own_samples}"
            )
        pick(COUPLINGS, self.pairs, "coupling")
        if self.score:
            pick(SCORES, parsed(self.score)[1], "score")


def held_out_elbo(
    field: Field, x: State, cond: dict[str, Any], beta: float, seed: int = 0, pairs: Pairs = None
) -> float:
    """Return the ELBO loss on samples that the noise was not fitted to, with the same draws in every call."""
    total = 0.0
    with evaluating(field.network), torch.no_grad():
        for look in range(PAIRS):
            for rows in torch.arange(batch_size(x), device=field.device).split(CHUNK):
                part = {k: v[rows] for k, v in cond.items()}
                x1, own = tree_map(lambda c: c[rows], x), derive(seed, look, int(rows[0]))  # noqa: B023
                total += float(elbo_loss(field, x1, beta, seed=own, pairs=pairs, cond=part)) * len(rows)
    return total / (PAIRS * batch_size(x))


def advice(looks: list[tuple[int, float]]) -> str:
    """Say in words whether more steps would help, from (step, held-out loss).

    >>> advice([(0, 1.0), (200, 0.5), (400, 0.4), (600, 0.401), (800, 0.4)])
    'the held-out loss fell from 1 to 0.4, and by 0.2 % of that in the last quarter: enough steps'
    """
    first, last = looks[0][1], looks[-1][1]
    if not last < first:
        return f"the held-out loss did not fall ({first:.4g}, then {last:.4g}): lower --lr, or check the data"
    before = [loss for step, loss in looks if step <= 0.75 * looks[-1][0]][-1]
    share = (before - last) / (first - last)
    if share < -ENOUGH:
        return f"the held-out loss fell from {first:.4g} to {last:.4g}, but rose in the last quarter: lower --lr"
    said = "enough steps" if share < ENOUGH else "more steps may help"
    return (
        f"the held-out loss fell from {first:.4g} to {last:.4g}, and by {100 * share:.1f} % of that in the last "
        f"quarter: {said}"
    )


def retrofit(
    network: nn.Module,
    out: Path,
    data: arrays.Samples | None = None,
    how: Retrofit | None = None,
    *,
    space: Space | None = None,
    device: torch.device | str = "cpu",
    entry: str = "",
    progress: Progress | None = None,
    force: bool = False,
) -> tuple[Field, list[tuple[int, float]]]:
    """Fit noise to a network, fit its reference, and write the checkpoint. Resumes if interrupted.

    Arguments:
        network: The trained network, called as `network(x, t, **cond)`. Its weights do not change.
        out: The checkpoint's folder.
        data: Samples like those it generates, with conditions; with `how.own_samples`, only the conditions are used.
        how: Sizes and rates.
        space: The space of the samples; by default Euclidean, of the data's shape.
        device: Where to compute.
        entry: The name of the function that builds the network, for the record.
        progress: Called after each eighth of the steps.
        force: Write into a folder that is not empty.

    Returns:
        The field, and (step, held-out loss) along the way, which :func:`advice` interprets.
    """
    device, clock, how = torch.device(device), Clock(torch.device(device)), how or Retrofit()
    how.check()
    network = network.to(device)
    if not how.own_samples and (data is None or data.x is None):
        held = f", which holds {', '.join(data.cond)}" if data is not None else ""
        raise UsageError(
            f"give data (an array x in the file{held}), or draw the network's own samples: --own-samples N"
        )
    about = {
        **how.about(),
        "network": digest_tensors(network.state_dict(), type(network).__qualname__),
        "data": None if data is None else fingerprint(*(v for v in (data.x, *data.cond.values()) if v is not None)),
        "conditions": None if data is None else list(data.cond),
        "space": None if space is None else space.describe(),
        "entry": entry,
        **runtime(device),
    }
    with claimed(out, "retrofit", about, force=force, resumes=True) as folder:
        if folder.finished:
            field = load(out, network, space=space, device=device)
            return field, [(int(step), float(loss)) for step, loss in checkpoint_about(out)["metrics"]["held_out"]]
        if how.own_samples:
            data = _own_samples(network, how, space, data, device, folder.work)
        assert data is not None
        field, found, x = _fit(network, folder.work, data, how, space, device, progress)
        field.reference = _reference(field, how, x, data.cond, folder.work)
        save(
            field,
            folder.path,
            recipe={"name": "own", "network": entry, **how.about()},
            metrics={"held_out": found},
            provenance=provenance(device, clock.seconds, seeds=[how.seed]),
        )
        return field, found


def _fit(
    network: nn.Module,
    work: Path,
    data: arrays.Samples,
    how: Retrofit,
    space: Space | None,
    device: torch.device,
    progress: Progress | None,
) -> tuple[Field, list[tuple[int, float]], State]:
    """Attach noise and fit it to nine tenths of the data; also return the held-out losses and the data as a state."""
    x: State = as_state(data.x, "the data", network)
    count = batch_size(x)
    aside = min(MOST_HELD_OUT, round(HELD_OUT * count))
    if aside < 1:
        raise DataError(f"{count} samples are too few: a tenth of them is held out, which is less than one")
    field = attach(
        network,
        include=how.include,
        exclude=how.exclude,
        space=space or (None if isinstance(x, dict) else euclidean(x.shape[1:])),
        prior_rate=how.prior_rate,
        width=how.width,
        seed=derive(how.seed, "noise"),
    ).to(device)
    for value in (*channels(x).values(), *data.cond.values()):
        require_finite(value, "the data")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(derive(how.seed, "held out")))
    fresh, fresh_cond = _rows(x, data.cond, order[:aside], device)
    rest, rest_cond = _rows(x, data.cond, order[aside:], torch.device("cpu"))
    looks = _read_looks(work / LOOKED)

    def look(done: int, loss: float | None = None) -> None:
        looks[done] = held_out_elbo(field, fresh, fresh_cond, how.beta, how.seed, how.pairs)
        rows = [{"step": step, "loss": found if math.isfinite(found) else None} for step, found in looks.items()]
        write_json(work / LOOKED, rows)
        if progress:
            progress(done, how.steps, looks[done] if loss is None else loss, looks[done])

    try_once(network, fresh, fresh_cond)
    if 0 not in looks:
        look(0)
    fit_noise(
        field,
        rest,
        how.steps,
        beta=how.beta,
        batch=how.batch,
        lr=how.lr,
        captured=how.captured,
        pairs=None if how.pairs == "independent" else how.pairs,
        conventions=how.conventions,
        confidence=False,  # fitted afterwards, with the given steps and score
        seed=derive(how.seed, "retrofit"),
        resume=work / "noise.resume",
        progress=look,
        every=max(1, how.steps // LOOKS),
        cond=rest_cond,
    )
    found = sorted(looks.items())
    if not math.isfinite(found[-1][1]):
        raise NotFiniteError("the held-out loss is not finite, and no checkpoint was written; lower --lr")
    return field, found, x


_LOOKS = array(record({"step": whole(), "loss": optional(number())}), most=100_000)


def _read_looks(path: Path) -> dict[int, float]:
    """Return the held-out losses of an interrupted run, by step; those after its resume point are computed again."""
    if not path.is_file():
        return {}
    rows = read_json(path, _LOOKS, error=CheckpointError)
    return {row["step"]: math.nan if row["loss"] is None else float(row["loss"]) for row in rows}


def _own_samples(
    network: nn.Module,
    how: Retrofit,
    space: Space | None,
    data: arrays.Samples | None,
    device: torch.device,
    work: Path,
) -> arrays.Samples:
    """Draw samples of the network, with the conditions of the data, repeated as needed."""
    cond: dict[str, Any] = {} if data is None else _repeated(data.cond, how.own_samples, device)
    where: Any = space
    if where is None and data is not None and isinstance(data.x, Tensor):
        where = data.x.shape[1:]
    if where is None:
        raise UsageError("the shape of a sample is not known; let the function return (network, space), or give data")
    space = as_space(where)
    few = {k: v[:2] for k, v in cond.items()}
    try_once(network, noise(space, 2, 0, device, cond=few), few)
    run = sample(
        network,
        how.own_samples,
        steps=how.sampling_steps,
        seed=derive(how.seed, "own samples"),
        confidence=None,
        cond=cond,
        config=SamplingConfig(space=where, batch=how.batch, parts=Parts(work / "own")),
    )
    return arrays.Samples(tree_map(lambda c: c.cpu(), run.x), {k: v.cpu() for k, v in cond.items()})


def _rows(x: State, cond: dict[str, Any], rows: Tensor, device: torch.device) -> tuple[State, dict[str, Any]]:
    return tree_map(lambda c: c[rows].to(device), x), {k: v[rows].to(device) for k, v in cond.items()}


def _repeated(cond: dict[str, Tensor], count: int, device: torch.device) -> dict[str, Any]:
    return {k: v[torch.arange(count) % len(v)].to(device) for k, v in cond.items()}


def _class(field: Field, cond: dict[str, Tensor]) -> str | None:
    """Return the condition that is a class: the only integer one, with few enough values."""
    assert field.space is not None
    counts = {channel.rows for channel in field.space.channels.values()}  # such as numbers of atoms: not classes
    whole = [
        name
        for name, value in cond.items()
        if name not in counts and value.ndim == 1 and not value.is_floating_point() and int(value.min()) >= 0
    ]
    return whole[0] if len(whole) == 1 and len(cond[whole[0]].unique()) <= CLASSES else None


def _in_turn(y: Tensor, count: int) -> Tensor:  # (N,) -> (count,)
    """Return rows of the data that go through the classes in turn, so that each has equally many."""
    members = [(y == label).nonzero()[:, 0] for label in y.unique()]
    rows = [torch.arange(-(-count // len(members))) % len(of) for of in members]
    return torch.stack([of[row] for of, row in zip(members, rows, strict=True)], 1).flatten()[:count]


def _reference(field: Field, how: Retrofit, x: State, cond: dict[str, Tensor], work: Path) -> Reference:
    """Return the reference that a pilot run chooses, or that of the given score."""
    assert field.space is not None
    if not how.score:
        return fit_confidence(
            field,
            None if how.own_samples else x,
            cond=cond,
            steps=how.sampling_steps,
            seed=derive(how.seed, "reference"),
            batch=how.batch,
            conventions=False,
        )
    score = how.score
    within, count = _class(field, cond), REFERENCES
    if within is not None:
        count = max(count, FEWEST * len(cond[within].unique()))
        rows = _in_turn(cond[within], count)
        cond = {name: value[rows] for name, value in cond.items()}
    run = sample(
        field,
        count,
        steps=how.sampling_steps,
        seed=derive(how.seed, "reference"),
        cond=_repeated(cond, count, field.device),
        config=SamplingConfig(batch=how.batch, parts=Parts(work / "reference")),
    )
    run = run.ranked_by(score, within=within)
    scores = run.score()
    levels = torch.linspace(0, 1, 1001, device=field.device, dtype=scores.dtype)
    made = read_with(default_estimator(field.space), how.sampling_steps, "euler")
    return Reference(score, made, scores.quantile(levels), run.standard)
