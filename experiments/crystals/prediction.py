"""Crystal structure prediction: draw candidates for the compositions of the test split, and match them to the truth.

:func:`draw` needs a GPU, but none of the packages of chemistry. :func:`match` needs them, and runs on several CPU
cores. Both add files to one folder, and both resume.

A candidate is right if pymatgen's `StructureMatcher` matches it to the structure of the test split with the tolerances
of the field (stol 0.5, angle_tol 10, ltol 0.3). Confidence, or the energy, chooses one of several candidates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fmwc.checks import Echo
from fmwc.crystals import mp20
from fmwc.crystals.energy import calculator, energies
from fmwc.crystals.judge import validity
from fmwc.crystals.recipe import READ_BY
from fmwc.crystals.structures import Candidate, Crystals, balanced, candidates, crystals_of, need, quiet, unmeasurable
from fmwc.errors import DataError, MismatchError, UsageError
from fmwc.field import Field
from fmwc.files import read_tensors, write_json, write_tensors
from fmwc.identity import SEAL, difference
from fmwc.metrics.ranking import bootstrap
from fmwc.randomness import derive
from fmwc.readers import array, boolean, mapping, number, optional, read_json, record, text, whole
from fmwc.sampling import SamplingConfig, Schedule, compared, sample

__all__ = ["BATCH", "PUBLISHED", "draw", "match", "matched", "summary", "table"]

BATCH = 2_000  # crystals per file
STEPS = 50
TIMES = (0.66, 0.76, 0.82)  # when the variance is read
VARIANCE = "geometric@0.6-0.9"
TOLERANCES = {"stol": 0.5, "angle_tol": 10, "ltol": 0.3}
JOB = 25  # crystals that a process matches at once
SCORES = ("confidence", "echo", "variance")  # by which candidates are chosen; high = doubtful


class Published(NamedTuple):
    """A published result on the whole test split of MP-20: match rate in percent, RMSE, candidates and source."""

    match_rate: float
    rmse: float
    candidates: int
    source: str


# A match counts only if the candidate (and with one candidate also the truth) is valid by CDVAE's rules, as in the
# evaluation script of DiffCSP that the others use.
PUBLISHED = {
    "CDVAE": Published(33.90, 0.1045, 1, "arXiv:2309.04475, Table 1"),
    "CDVAE, best of 20": Published(66.95, 0.1026, 20, "arXiv:2309.04475, Table 1"),
    "DiffCSP": Published(51.49, 0.0631, 1, "arXiv:2309.04475, Table 1"),
    "DiffCSP, best of 20": Published(77.93, 0.0492, 20, "arXiv:2309.04475, Table 1"),
    "FlowMM": Published(61.39, 0.0566, 1, "arXiv:2406.04713"),
}

# How a file of candidates was drawn: one candidate for each composition from the index `first`.
_ABOUT = record(
    {
        "checkpoint": text(1_000),
        "split": text(10),
        "seed": whole(),
        "steps": whole(1),
        "anneal": optional(number()),
        "candidate": whole(),
        "first": whole(),
    },
    {SEAL: text(64)},
)
_PIECE = record(
    {
        "candidate": whole(),
        "names": array(text(1_000)),
        "rms": array(optional(number())),
        "valid": array(boolean),
        "energy": array(optional(number())),
        "scores": mapping(array(number()), 10),
    }
)


# ---- draw ------------------------------------------------------------------------------------------------------------


def compositions(data: str, split: str, seed: int, count: int = 0) -> Crystals:
    """Return `count` structures of a split in random order, or all; a smaller count gives the first ones."""
    known = mp20.load(data or None, split)
    if not 0 <= count <= len(known):
        raise UsageError(f"count must lie between 1 and {len(known)}, the number of structures in {split}; got {count}")
    order = torch.randperm(len(known), generator=torch.Generator().manual_seed(derive(seed, "compositions")))
    return known.take(order[: count or len(known)])


def draw(
    field: Field,
    out: Path,
    *,
    checkpoint: str = "",
    data: str = "",
    count: int = 0,
    each: int = 1,
    anneal: float | None = None,
    batch: int = BATCH,
    steps: int = STEPS,
    seed: int = 2026,
    split: str = "test",
    say: Callable[[str], None] = print,
) -> list[Path]:
    """Draw candidates for compositions of a split, in files of one candidate for each of `batch` compositions.

    A folder may be extended by more compositions or more candidates: candidates do not depend on their number.

    Arguments:
        field: The field. If it was trained with given types it uses them, else its types are restricted.
        out: The folder.
        checkpoint: The name of the field, which is noted.
        data: The folder of MP-20; `FMWC_DATA` if empty.
        count: The number of compositions, drawn without selection; 0 for all.
        each: The number of candidates per composition.
        anneal: Coordinates move at 1 + anneal·t times their velocity; `None` for the value of the field.
        batch: The number of crystals drawn together.
        steps: The number of steps.
        seed: The seed of the compositions and of the candidates.
        split: The split of the data.
        say: Called with a message after each file.
    """
    total, truth = len(compositions(data, split, seed)), compositions(data, split, seed, count)
    plan = {"checkpoint": checkpoint, "split": split, "seed": seed, "steps": steps, "anneal": anneal}
    written = []
    for candidate in range(each):
        for first in range(0, len(truth), batch):
            part = truth.take(torch.arange(first, min(first + batch, len(truth))))
            path = out / "draws" / f"{candidate:03d}-{first:05d}.safetensors"
            about = {**plan, "candidate": candidate, "first": first}
            if not path.exists() or _count(path, about) < len(part):
                options: dict[str, Any] = {"steps": steps, "seed": seed, "anneal": anneal}
                write_tensors(path, _drawn(field, part, first=candidate * total + first, **options), about)
                say(f"candidate {candidate + 1} of {each}, {first + len(part)} of {len(truth)} compositions")
            written.append(path)
    return written


def _load(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the crystals and scores of a file, and how they were drawn."""
    return read_tensors(path, _ABOUT, "a file of candidates")


def _count(path: Path, about: dict[str, Any]) -> int:
    """Return the number of crystals in a file; raise if it was drawn with other settings."""
    tensors, earlier = _load(path)
    if earlier != about:
        raise MismatchError(f"{path} was drawn with other settings ({difference(earlier, about)}); change --out")
    return len(tensors["numbers"])


def _drawn(
    field: Field, truth: Crystals, *, steps: int, seed: int, first: int, anneal: float | None
) -> dict[str, torch.Tensor]:
    """Draw one candidate for each structure; return crystals and scores."""
    reference = field.reference
    checks = list(reference.checks.values()) if reference is not None else []
    run = sample(
        field,
        len(truth),
        steps=steps,
        seed=seed,
        cond={"atoms": truth.atoms.to(field.device), "types": truth.numbers.to(field.device)},
        confidence=READ_BY,
        schedule=Schedule.at(TIMES),
        check=checks[0] if checks else Echo.planned(4),
        config=SamplingConfig(batch=len(truth), first=first, anneal=None if anneal is None else {"coord": anneal}),
    )
    scores = {"variance": run.score(VARIANCE), "echo": run.score("echo")}
    if reference is not None:
        scores["confidence"] = compared(run, reference, "the composition is given").score()
    drawn = crystals_of(run)
    found = {"numbers": drawn.numbers.byte(), "coords": drawn.coords, "lengths": drawn.lengths, "angles": drawn.angles}
    found |= {name: score.float().cpu() for name, score in scores.items()}
    return {name: value.contiguous() for name, value in found.items()}


# ---- match -----------------------------------------------------------------------------------------------------------


def match(
    out: Path, *, data: str = "", model: str = "chgnet", jobs: int = 1, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Match the candidates in a folder to the truth; return the summary.

    Arguments:
        out: The folder that :func:`draw` wrote. The results of each of its files are kept there.
        data: The folder of MP-20; `FMWC_DATA` if empty.
        model: The energy model that chooses candidates in comparison; empty for none.
        jobs: The number of processes.
        say: Called with a message after each file.
    """
    draws = sorted((out / "draws").glob("*.safetensors"))
    if not draws:
        raise DataError(f"{out / 'draws'} holds no candidates; draw them first: python -m experiments predict draw")
    plan = _load(draws[0])[1]
    truth = compositions(data, plan["split"], plan["seed"])
    pieces: list[dict[str, Any]] = []
    with _processes(jobs) as apply:
        for path in draws:
            target, (tensors, about) = out / "matches" / f"{path.stem}.json", _load(path)
            real = truth.take(torch.arange(about["first"], about["first"] + len(tensors["numbers"])))
            if not torch.equal(tensors["numbers"].long(), real.numbers):
                raise MismatchError(f"{path} holds other compositions than {plan['split']} of the data; check --data")
            scores = {name: tensors[name].tolist() for name in SCORES if name in tensors}
            piece = read_json(target, _PIECE) if target.exists() else {}
            if (piece.get("names"), piece.get("scores")) != (list(real.names), scores):  # results of other draws
                piece = {
                    "candidate": about["candidate"],
                    "names": list(real.names),
                    **_judged(tensors, real, model, apply),
                    "scores": scores,
                }
                write_json(target, piece)
                say(f"{len(pieces) + 1} of {len(draws)} files")
            pieces.append(piece)
    return {**{name: plan[name] for name in ("checkpoint", "split", "seed", "steps", "anneal")}, **summary(pieces)}


Apply = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]


@contextmanager
def _processes(jobs: int) -> Iterator[Apply]:
    """Return a function like `map` that uses several processes."""
    if jobs < 2:
        yield map
        return
    with ProcessPoolExecutor(jobs, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        yield pool.map


def _judged(tensors: dict[str, torch.Tensor], real: Crystals, model: str, apply: Apply) -> dict[str, Any]:
    """Return RMSD, validity and energies of one candidate per structure."""
    coords, lengths, angles = (tensors[name] for name in ("coords", "lengths", "angles"))
    drawn, truth = candidates(Crystals(real.numbers, coords, lengths, angles, real.names)), candidates(real)
    pairs = [(drawn[i : i + JOB], truth[i : i + JOB]) for i in range(0, len(drawn), JOB)]
    parts = list(apply(functools.partial(_results, model), pairs))
    rms, valid, energy = ([value for part in parts for value in part[i]] for i in range(3))
    return {"rms": rms, "valid": valid, "energy": energy}


def _results(model: str, pair: tuple[list[Candidate], list[Candidate]]) -> tuple[list[Any], list[bool], list[Any]]:
    drawn, real = pair
    rms = [matched(*one) for one in zip(drawn, real, strict=True)]
    valid = [validity(one).apart and balanced(one.key) for one in drawn]
    values = energies(drawn, _calculator(model)).per_atom if model else np.full(len(drawn), np.nan)
    return rms, valid, [float(value) if np.isfinite(value) else None for value in values]


_calculator = functools.cache(calculator)


@functools.cache
def _matcher() -> Any:
    return need("pymatgen.analysis.structure_matcher").StructureMatcher(**TOLERANCES)


def matched(candidate: Candidate, truth: Candidate) -> float | None:
    """Return the RMSD of a candidate from the truth, per cube root of the volume per atom; `None` without a match."""
    if unmeasurable(candidate):
        return None
    try:
        with quiet():
            found = _matcher().get_rms_dist(candidate.structure(), truth.structure())
    except Exception:  # odd cells fail in many ways; they do not match
        return None
    return None if found is None else float(found[0])


# ---- the summary -----------------------------------------------------------------------------------------------------


def summary(pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return match rate and RMSE of the first candidates, and of each way to choose one of several.

    Each number is given twice: for all matches, and for those that CDVAE's rules call valid, as published rows count
    them. Intervals hold 90 % of resampled sets of compositions.
    """
    names, rows = ["rms", "valid", "energy", *pieces[0]["scores"]], _rows(pieces)
    most = max(map(len, rows))
    first = np.array([row[0] for row in rows], float)  # (N, names)
    several = np.array([row for row in rows if len(row) == most], float)  # (M, candidates, names)
    result: dict[str, Any] = {"compositions": len(first), "valid": float(first[:, 1].mean())}
    if most > 1:
        result |= {"compositions with several candidates": len(several), "candidates": most}
    for label, needs in (("all matches", 0.0), ("valid matches", 1.0)):
        rms = np.where(first[:, 1] >= needs, first[:, 0], np.nan)
        result[label] = {"first candidate": _measured(rms)}
        if most > 1:
            columns = dict(zip(names, np.moveaxis(several, -1, 0), strict=True))
            columns["rms"] = np.where(columns["valid"] >= needs, columns["rms"], np.nan)
            result[label] |= {f"{name} of {most}": row for name, row in _choices(columns).items()}
    return {**result, "published": {name: row._asdict() for name, row in PUBLISHED.items()}}


def _rows(pieces: Sequence[dict[str, Any]]) -> list[list[tuple[Any, ...]]]:
    """Return the candidates of each composition, in the order in which they were drawn."""
    found: dict[str, dict[int, tuple[Any, ...]]] = {}
    for piece in pieces:
        columns = piece["rms"], piece["valid"], piece["energy"], *piece["scores"].values()
        for name, row in zip(piece["names"], zip(*columns, strict=True), strict=True):
            found.setdefault(name, {})[piece["candidate"]] = row
    return [[row for _, row in sorted(rows.items())] for rows in found.values()]


def _choices(columns: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return the results of each way to choose one candidate, and its gain over a random candidate."""
    rms, scores = columns["rms"], {n: c for n, c in columns.items() if n not in ("rms", "valid", "energy")}
    average = np.isfinite(rms).mean(1)  # the expected match rate of a random candidate

    def lowest(values: np.ndarray) -> np.ndarray:
        return rms[np.arange(len(rms)), np.where(np.isfinite(values), values, np.inf).argmin(1)]

    chosen = {"first": rms[:, 0], **{f"surest by {name}": lowest(values) for name, values in scores.items()}}
    if np.isfinite(columns["energy"]).any():
        chosen["lowest energy"] = lowest(columns["energy"])
    best = np.where(np.isfinite(rms), rms, np.inf).min(1)
    chosen["best (oracle)"] = np.where(np.isfinite(best), best, np.nan)
    rows = {name: _measured(value, average) for name, value in chosen.items()}
    return {"random": _rate("match_rate", average), **rows}


def _measured(rms: np.ndarray, average: np.ndarray | None = None) -> dict[str, Any]:
    """Return match rate, RMSE and, if the match rates of random candidates are given, the gain over them."""
    found = np.isfinite(rms)
    rmse = _rate("rmse", rms[found]) if found.any() else {"rmse": None}
    return {**_rate("match_rate", found), **rmse, **({} if average is None else _rate("gain", found - average))}


def _rate(name: str, values: np.ndarray) -> dict[str, Any]:
    interval = bootstrap(lambda index: float(values[index].mean()), len(values))
    return {name: float(values.mean()), f"{name}_interval": interval}


def table(numbers: dict[str, Any]) -> list[dict[str, str]]:
    """Return the results of :func:`match` as rows to print: ours, then the published ones."""

    def shown(row: dict[str, Any], name: str, scale: float, digits: int) -> str:
        if row.get(name) is None:
            return ""
        low, high = (f"{scale * value:.{digits}f}" for value in row[f"{name}_interval"])
        return f"{scale * row[name]:.{digits}f} [{low}, {high}]"

    columns = ("", "match rate, %", "RMSE", "gain, %", "match rate if valid, %", "RMSE if valid")
    cells = []
    for name, row in numbers["all matches"].items():
        valid = numbers["valid matches"][name]
        mine = shown(row, "match_rate", 100, 1), shown(row, "rmse", 1, 4), shown(row, "gain", 100, 1)
        cells.append((name, *mine, shown(valid, "match_rate", 100, 1), shown(valid, "rmse", 1, 4)))
    for name, row in numbers["published"].items():
        cells.append((f"{name} ({row['source']})", "", "", "", f"{row['match_rate']:.2f}", f"{row['rmse']:.4f}"))
    return [dict(zip(columns, row, strict=True)) for row in cells]
