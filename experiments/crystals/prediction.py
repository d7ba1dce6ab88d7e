"""Crystal structure prediction: draw candidates for the compositions of the test split, and match them to the truth.

A candidate is right if pymatgen's `StructureMatcher` matches it to the structure of the test split with the tolerances
of the field (stol 0.5, angle_tol 10, ltol 0.3). Confidence, or the energy, chooses one of several candidates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fmwc.crystals import mp20
from fmwc.crystals.energy import calculator, energies
from fmwc.crystals.recipe import READ_BY
from fmwc.crystals.structures import Candidate, Crystals, candidates, crystals_of, need, quiet, unmeasurable
from fmwc.errors import MismatchError, UsageError
from fmwc.field import Field
from fmwc.files import write_json
from fmwc.metrics.ranking import bootstrap
from fmwc.randomness import derive
from fmwc.readers import array, mapping, number, optional, read_json, record, text
from fmwc.sampling import SamplingConfig, Schedule, Trajectory, compared, sample

__all__ = ["CANDIDATES", "PUBLISHED", "match", "predict", "summary"]

CANDIDATES = 20  # per composition
EACH = 5  # compositions per file
STEPS = 50
TIMES = (0.66, 0.76, 0.82)  # when the variance is read, as by `fmwc sample --adaptive`
VARIANCE = "geometric@0.6-0.9"
TOLERANCES = {"stol": 0.5, "angle_tol": 10, "ltol": 0.3}

# Match rate in percent and RMSE with one candidate per composition of the whole test split, from the papers. They count
# a match only if the candidate also passes CDVAE's validity rules, which ours does not need.
PUBLISHED = {"CDVAE": (33.90, 0.1045), "DiffCSP": (51.49, 0.0631), "FlowMM": (61.39, 0.0566)}

_numbers = array(array(optional(number())))
_PIECE = record({"names": array(text(1000)), "rms": _numbers, "energy": _numbers, "scores": mapping(_numbers, 10)})


def predict(
    field: Field,
    out: Path,
    *,
    data: str = "",
    count: int = 100,
    seed: int = 2026,
    split: str = "test",
    model: str = "chgnet",
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Predict the structures of `count` random compositions of a split; return the summary. Resumes if interrupted.

    Arguments:
        field: The field. If it was trained with given types it uses them, else its types are restricted.
        out: The folder of the candidates and the matches.
        data: The folder of MP-20; `FMWC_DATA` if empty.
        count: The number of compositions, drawn without selection.
        seed: The seed of the compositions and of the candidates.
        split: The split of the data.
        model: The energy model of the rival choice.
        say: Called with a message after each file.
    """
    known = mp20.load(data or None, split)
    if not 1 <= count <= len(known):
        raise UsageError(f"count must lie between 1 and {len(known)}, the number of structures in {split}; got {count}")
    order = torch.randperm(len(known), generator=torch.Generator().manual_seed(derive(seed, "compositions")))[:count]
    for folder in ("draws", "matches"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    pieces: list[dict[str, Any]] = []
    for first in range(0, count, EACH):
        truth, name = known.take(order[first : first + EACH]), f"{first:05d}"
        draws, matches = out / "draws" / f"{name}.safetensors", out / "matches" / f"{name}.json"
        if not matches.exists():
            if not draws.exists():
                draw(field, truth, first, seed).save(draws)
            write_json(matches, judged(field, Trajectory.load(draws), truth, model))
            say(f"{first + len(truth)} of {count} compositions")
        pieces.append(read_json(matches, _PIECE))
        if pieces[-1]["names"] != list(truth.names):
            raise MismatchError(f"{matches} holds other compositions (another seed, split or data); use another --out")
    return summary(pieces)


def draw(field: Field, truth: Crystals, first: int, seed: int) -> Trajectory:
    """Draw the candidates of some crystals, the first of which has the number `first`."""
    cond = {
        "atoms": truth.atoms.repeat_interleave(CANDIDATES),
        "types": truth.numbers.repeat_interleave(CANDIDATES, 0),
    }
    count, checks = len(cond["atoms"]), list(field.reference.checks.values()) if field.reference is not None else []
    run = sample(
        field,
        count,
        steps=STEPS,
        seed=seed,
        cond={name: value.to(field.device) for name, value in cond.items()},
        confidence=READ_BY,
        schedule=Schedule.at(TIMES),
        check=checks[0] if checks else False,
        config=SamplingConfig(batch=count, first=first * CANDIDATES),
    )
    return run.compact()


def judged(field: Field, run: Trajectory, truth: Crystals, model: str) -> dict[str, Any]:
    """Return RMSD, energies and scores of the candidates, one row per composition."""
    drawn, real = candidates(crystals_of(run)), candidates(truth)
    rms = [match(candidate, real[i // CANDIDATES]) for i, candidate in enumerate(drawn)]
    scores = {VARIANCE: run.score(VARIANCE)}
    if field.reference is not None:
        scores[field.reference.score] = compared(run, field.reference, "restricted").score()
    energy = energies(drawn, calculator(model)).per_atom
    return {
        "names": list(truth.names),
        "rms": _rows(rms),
        "energy": _rows([float(value) if np.isfinite(value) else None for value in energy]),
        "scores": {name: _rows(score.tolist()) for name, score in scores.items()},
    }


def _rows(values: list[Any]) -> list[list[Any]]:
    return [values[i : i + CANDIDATES] for i in range(0, len(values), CANDIDATES)]


@functools.cache
def _matcher() -> Any:
    return need("pymatgen.analysis.structure_matcher").StructureMatcher(**TOLERANCES)


def match(candidate: Candidate, truth: Candidate) -> float | None:
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


def summary(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """Return match rate and RMSE of each way to choose a candidate, with 90 % intervals over compositions."""
    rms = _array(piece["rms"] for piece in pieces)
    scores = {name: _array(piece["scores"][name] for piece in pieces) for name in pieces[0]["scores"]}
    energy = _array(piece["energy"] for piece in pieces)
    each = np.arange(len(rms))

    def lowest(values: np.ndarray) -> np.ndarray:
        return rms[each, np.where(np.isfinite(values), values, np.inf).argmin(1)]

    best = np.where(np.isfinite(rms), rms, np.inf).min(1)
    chosen = {
        "first": rms[:, 0],
        **{f"surest by {name}": lowest(values) for name, values in scores.items()},
        "lowest energy": lowest(energy),
        f"any of {CANDIDATES}": np.where(np.isfinite(best), best, np.nan),
    }
    average = np.isfinite(rms).mean(1)  # expected match rate of a random candidate
    rows: dict[str, Any] = {
        "random candidate": {**_rate(average), "rmse": float(np.nanmean(rms)) if average.any() else None}
    }
    for name, value in chosen.items():
        found = np.isfinite(value)
        gain = found - average
        rows[name] = {
            **_rate(found),
            "rmse": float(value[found].mean()) if found.any() else None,
            "gain": float(gain.mean()),
            "gain_interval": bootstrap(lambda index, gain=gain: float(gain[index].mean()), len(gain)),  # type: ignore[misc]
        }
    published = {name: {"match_rate": rate / 100, "rmse": rmse} for name, (rate, rmse) in PUBLISHED.items()}
    return {"compositions": len(rms), "candidates": CANDIDATES, "chosen": rows, "published": published}


def _rate(found: np.ndarray) -> dict[str, Any]:
    interval = bootstrap(lambda index: float(found[index].mean()), len(found))
    return {"match_rate": float(found.mean()), "interval": interval}


def _array(parts: Any) -> np.ndarray:  # (N, CANDIDATES)
    return np.array([row for part in parts for row in part], float)
