"""Screen drawn crystals: judge them before and after relaxation, and compare statistics and confidence.

Each step reads and writes files of one folder:

| file | written by |
|---|---|
| samples.safetensors | `fmwc sample crystals --judge none` |
| relaxed.npz | `complete` |
| fingerprints-drawn.npz, -relaxed.npz, -test.npz | `complete` |
| judged-drawn.json, judged-relaxed.json, judged-test.json | `judged` |
| numbers.json, tables.md, figures | `python -m experiments screen` |
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.crystals.confidence import (
    ORDERS,
    PLAIN,
    QUANTITIES,
    SHARES,
    Columns,
    correlations,
    keys_of,
    selections,
    values_of,
)
from experiments.crystals.relaxations import Relaxations, read_relaxed, relax_in_processes
from fmwc.crystals import Candidate, candidates, hull_for, judge, mp20
from fmwc.crystals.energy import Calculator
from fmwc.crystals.fingerprints import Fingerprints, fingerprints, read_fingerprints
from fmwc.crystals.hull import SHIPPED
from fmwc.crystals.matching import Known, alike
from fmwc.crystals.statistics import properties, real_structures, statistics
from fmwc.crystals.structures import ELEMENTS, Crystals, crystals_of, refusal
from fmwc.errors import DataError, MismatchError, UsageError
from fmwc.files import write_json
from fmwc.readers import anything, array, mapping, read_json, record
from fmwc.sampling import Trajectory

__all__ = ["SETS", "complete", "cores", "drawn_run", "judged", "screen", "tables_of_structures"]

SETS = ("drawn", "relaxed", "test")
LARGEST = 1 << 28  # maximum bytes of a table
SUMMARY = ("unique", "novel", "stable", "stable_unknown", "metastable", "sun", "msun")  # shares of a set

Say = Callable[[str], None]

_JUDGED = record({"columns": mapping(array(anything)), "about": mapping(anything)})


# ---- judging ---------------------------------------------------------------------------------------------------------


class _Stored(Calculator):
    """A calculator that returns energies which are known already."""

    ase = None

    def __init__(self, model: str, energies: Mapping[str, float | str]) -> None:
        self.name, self.highest, self._energies = model, ELEMENTS, energies

    def batches(self, candidates: Sequence[Candidate]) -> Iterator[list[float | str]]:
        yield [self._energies[one.name] for one in candidates]


@functools.lru_cache(maxsize=1)
def _known(data: str) -> Known:
    """Return all structures of the references, with which novelty is judged."""
    return Known(mp20.load_all(data or None))


def _judged(structures: Crystals | Sequence[Any], model: str | Calculator, data: str, relaxed: bool) -> dict[str, Any]:
    """Return the columns of a judgement, the properties of each structure, and the first one of its kind."""
    given = candidates(structures)
    name = model if isinstance(model, str) else model.name
    # The package's references of CHGNet hold all of MP-20.
    systems = [one.key for one in given if not refusal(one)]
    hull = hull_for(name, None if name == "chgnet" else data or None, systems=systems, relax=relaxed)
    hull = hull.relaxed or hull if relaxed else hull
    columns = judge(given, calculator=model, hull=hull, known=_known(data)).columns
    return {**columns, **properties(given), "alike": alike(given, [not refusal(one) for one in given])}


def judge_drawn(run: Trajectory, model: str, data: str) -> dict[str, Any]:
    """Return a table of drawn structures, with their doubt: the surest has the lowest. A run may have no scores."""
    doubt = run.score().double().cpu().tolist() if _scored(run) else [None] * len(run)
    return {**_judged(crystals_of(run), model, data, False), "doubt": doubt}


def _scored(run: Trajectory) -> bool:
    """Return whether the run has scores; one that was drawn without variance may have none."""
    try:
        return bool(run.score().isfinite().any())
    except UsageError:
        return False


def judge_relaxed(relaxations: Relaxations, drawn: Columns, data: str) -> dict[str, Any]:
    """Return a table of relaxed structures, which are the first of the drawn ones."""
    rows = relaxations.rows
    found = [(one.candidate.name, one.candidate.formula) for one in rows]
    if found != list(zip(drawn["name"], drawn["formula"], strict=True))[: len(rows)]:
        raise MismatchError("the relaxed structures are not the first of the drawn ones; relax these samples")
    known = {one.candidate.name: one.problem or one.energy for one in rows}
    columns = _judged([one.candidate for one in rows], _Stored(relaxations.model, known), data, True)
    before = np.array(drawn["energy_per_atom"][: len(rows)], float)
    return {
        **columns,
        "rmsd": [one.rmsd for one in rows],
        "relax_steps": [one.steps for one in rows],
        "converged": [one.converged for one in rows],
        "energy_drop": (before - [one.energy for one in rows]).tolist(),
    }


def tables_of_structures(folder: Path) -> dict[str, Columns]:
    """Return the tables of relaxed structures and of the same as drawn; empty if none is relaxed, or without scores."""
    paths = {kind: folder / f"judged-{kind}.json" for kind in ("drawn", "relaxed")}
    if not all(path.exists() for path in paths.values()):
        return {}
    made: dict[str, Columns] = {k: read_json(p, _JUDGED, LARGEST)["columns"] for k, p in paths.items()}
    if None in made["drawn"]["doubt"]:
        return {}
    return {**made, "drawn": head(made["drawn"], len(made["relaxed"]["name"]))}


def judged(folder: Path, kind: str, about: Mapping[str, Any], compute: Callable[[], Columns], say: Say) -> Columns:
    """Return the table of a set of structures from its file; compute and write it if there is none.

    Arguments:
        folder: The folder.
        kind: One of `SETS`.
        about: What the table depends on; a file with other entries is refused.
        compute: Computes the table.
        say: Called with a message when it is written.
    """
    path = folder / f"judged-{kind}.json"
    if path.exists():
        content = read_json(path, _JUDGED, LARGEST)
        if content["about"] != about:
            raise MismatchError(f"{path} is about {content['about']}, not {dict(about)}; delete it to judge again")
        found: Columns = content["columns"]
        return found
    columns = {name: [_plain(value) for value in values] for name, values in compute().items()}
    write_json(path, {"about": dict(about), "columns": columns})
    say(f"wrote {path}")
    return columns


def _plain(value: Any) -> Any:
    """Return a value for a JSON file."""
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- the numbers -----------------------------------------------------------------------------------------------------


def drawn_run(folder: Path) -> Trajectory:
    """Return the samples of a folder."""
    return Trajectory.load(folder / "samples.safetensors")


def _fingerprints(folder: Path, kind: str, given: Crystals | Sequence[Any]) -> Fingerprints | None:
    path = folder / f"fingerprints-{kind}.npz"
    if not path.exists():
        return None
    found = read_fingerprints(path, candidates(given))
    if not found.complete:
        raise DataError(f"{path} is not complete; use --relax again")
    return found


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def complete(
    folder: Path, count: int, steps: int, *, data: str = "", model: str = "chgnet", jobs: int = 1, say: Say = print
) -> None:
    """Relax the first structures of a folder, and compute all fingerprints; resumes if interrupted.

    Arguments:
        folder: A folder with samples.
        count: The number of structures to relax.
        steps: The maximum number of steps of a relaxation.
        data, model: As for `screen`.
        jobs: The number of processes.
        say: Called with messages about the progress.
    """

    def show(stage: str, done: int, total: int) -> None:
        say(f"{stage}: {done} of {total}")

    drawn, relaxed = candidates(crystals_of(drawn_run(folder))), folder / "relaxed.npz"
    relax_in_processes(drawn[:count], relaxed, model=model, steps=steps, jobs=jobs, say=say)
    sets: dict[str, Any] = {"drawn": drawn, "relaxed": [one.candidate for one in read_relaxed(relaxed).rows]}
    for kind, given in {**sets, "test": mp20.load(data or None, "test")}.items():
        fingerprints(given, jobs=jobs, kept=folder / f"fingerprints-{kind}.npz", progress=show)


def head(columns: Columns, count: int) -> Columns:
    """Return the first rows of a table."""
    return {name: values[:count] for name, values in columns.items()}


def _summary(table: Columns, stage: str) -> dict[str, Any]:
    """Return shares of all structures, and means of known energies and of the relaxation."""
    order = np.arange(len(table["name"]), dtype=float)
    names = [name for name, one in QUANTITIES.items() if one.stage == stage and one.column in (*table, *SUMMARY)]
    values = values_of({stage: table}, names, order)
    means = {
        QUANTITIES[name].column: float(row[np.isfinite(row)].mean()) if np.isfinite(row).any() else None
        for name, row in zip(names, values, strict=True)
    }
    return {**means, "problems": sum(bool(problem) for problem in table["problem"])}


def screen(folder: Path, *, data: str = "", model: str = "chgnet", say: Say = print) -> dict[str, Any]:
    """Judge the samples of a folder and, if there are any, the relaxed structures; return all numbers.

    Arguments:
        folder: The folder; the description of this module lists its files.
        data: The folder of MP-20; `FMWC_DATA` if empty.
        model: The energy model that judges.
        say: Called with a message after each file.
    """
    run = drawn_run(folder)
    crystals = crystals_of(run)
    about = {"model": model, "samples": run.seed, "count": len(run), "score": run.default_score}
    drawn = judged(folder, "drawn", about, lambda: judge_drawn(run, model, data), say)
    real = judged(folder, "test", {"split": "test"}, lambda: real_structures(data or None)[1], say)
    if model != "chgnet":  # the stored energies are CHGNet's
        real = {**real, "energy_per_atom": [None] * len(real["name"])}
    prints = {"drawn": _fingerprints(folder, "drawn", crystals)}
    prints["test"] = _fingerprints(folder, "test", mp20.load(data or None, "test")) if prints["drawn"] else None

    def measured(table: Columns, stage: str, found: Fingerprints | None) -> dict[str, Any]:
        values = statistics(table, real, found, prints["test"])
        return {**{name: _plain(value) for name, value in values.items()}, **_summary(table, stage)}

    sets = {"drawn": measured(drawn, "drawn", prints["drawn"]), "test": _of_real(real)}
    numbers: dict[str, Any] = {**about, "sets": sets}
    ranked = _scored(run)
    if ranked:
        numbers["confidence"] = {"drawn": _orders({"drawn": drawn}, ("drawn",), ("confidence",))}
    if not (path := folder / "relaxed.npz").exists():
        return numbers
    relaxations = read_relaxed(path)
    count = len(relaxations.rows)
    about = {**about, "model": relaxations.model, "limit": relaxations.limit, "relaxed": count}
    if relaxations.model == "chgnet":  # the package's references, of which more may be relaxed later
        about["references"] = hashlib.sha256(SHIPPED.read_bytes()).hexdigest()[:16]
    relaxed = judged(folder, "relaxed", about, lambda: judge_relaxed(relaxations, drawn, data), say)
    few = head(drawn, count)
    found = _fingerprints(folder, "relaxed", [one.candidate for one in relaxations.rows])
    sets["same, drawn"] = measured(few, "drawn", prints["drawn"].take(count) if prints["drawn"] else None)
    sets["relaxed"] = measured(relaxed, "relaxed", found)
    numbers["relaxation"] = {"limit": relaxations.limit, "structures": count}
    if ranked:
        numbers["confidence"]["relaxed"] = _orders({"drawn": few, "relaxed": relaxed}, ("drawn", "relaxed"))
    return numbers


def _of_real(real: Columns) -> dict[str, Any]:
    """Return the statistics of real structures themselves."""
    distances = ("wasserstein", "space_group_distance")  # from itself
    found = statistics(real, real)
    return {name: _plain(value) for name, value in found.items() if not name.startswith(distances)}


def _orders(
    tables: Mapping[str, Columns], stages: Sequence[str], orders: Sequence[str] = tuple(ORDERS)
) -> dict[str, Any]:
    """Return selections and correlations of orders, for the quantities of some stages."""
    names = [name for name, one in QUANTITIES.items() if one.stage in stages]
    keys, atoms = keys_of(tables["drawn"]), np.array(tables["drawn"]["atoms"], float)
    found: dict[str, Any] = {"structures": len(atoms), "shares": list(SHARES)}
    for order in orders:
        found[order] = {"selections": selections(tables, names, keys[order])}
        found[order]["correlations"] = correlations(tables, names, keys[order], atoms)
        if order in PLAIN:
            found[order]["equal sizes"] = selections(tables, names, keys[order], atoms)
    return found
