"""What controls of chemistry cost in quality: crystals drawn under controls against those that rejection keeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.common.evaluation import spearman
from experiments.crystals.evaluate import lift_of
from fmwc.crystals import Controls, judge
from fmwc.crystals.structures import Crystals, crystals_of
from fmwc.errors import MismatchError
from fmwc.field import Field
from fmwc.metrics.ranking import bootstrap
from fmwc.sampling import SamplingConfig, Trajectory, sample
from fmwc.sampling.trajectory import join
from fmwc.state import select_conditions

__all__ = ["FREE", "SETS", "controlled"]

EACH = 25  # crystals per file
STEPS = 50
FREE = "free"  # the set without controls, from which rejection selects
SETS = {
    FREE: Controls(),
    # No radioactive, toxic or precious metals.
    "exclude": Controls(exclude="Tc,Pm,Po,Ac,Th,Pa,U,Np,Pu,Be,As,Cd,Hg,Tl,Pb,Ru,Rh,Pd,Re,Os,Ir,Pt,Au"),
    # Elements of batteries.
    "elements": Controls(elements="Li,Na,K,Mg,Ca,Al,Si,P,S,O,F,Cl,Ti,V,Mn,Fe,Co,Ni,Cu,Zn"),
    "system": Controls(system="Li-Fe-P-O"),
}


def controlled(
    field: Field,
    out: Path,
    *,
    count: int = 100,
    pool: int = 400,
    seed: int = 2026,
    model: str = "chgnet",
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Draw and judge `count` crystals under each control, and `pool` crystals without; resumes if interrupted.

    Arguments:
        field: The field.
        out: The folder of the samples.
        count: The number of crystals under each control.
        pool: The number of crystals without controls, of which rejection keeps those that meet a control.
        seed: The seed of the samples.
        model: The energy model that judges.
        say: Called with a message after each file.
    """
    (out / "draws").mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    runs = {name: _drawn(field, out, name, pool if name == FREE else count, seed, say) for name in SETS}
    free = crystals_of(runs[FREE])
    for name, controls in SETS.items():
        drawn = crystals_of(runs[name])
        entry: dict[str, Any] = {"controls": str(controls), "drawn": _quality(drawn, runs[name], model)}
        if name != FREE:
            entry["violations"] = int((~_meets(drawn, controls)).sum())
            kept = _meets(free, controls)
            entry["accepted"] = float(kept.double().mean())
            if kept.any():
                entry["rejection"] = _quality(free.take(kept), None, model)
        results[name] = entry
    return {"seed": seed, "steps": STEPS, "sets": results}


def _drawn(field: Field, out: Path, name: str, count: int, seed: int, say: Callable[[str], None]) -> Trajectory:
    """Return the samples of a set, drawn in files of `EACH`."""
    cond, runs = SETS[name].conditions(field, count, seed), []
    for number, first in enumerate(range(0, count, EACH)):
        path = out / "draws" / f"{name}-{number:03d}.safetensors"
        if not path.exists():
            rows = slice(first, min(first + EACH, count))
            size = rows.stop - first
            given = {k: v.to(field.device) for k, v in select_conditions(cond, rows, count).items()}
            config = SamplingConfig(batch=size, first=first)
            sample(field, size, steps=STEPS, seed=seed, cond=given, config=config).compact().save(path)
            say(f"{name}: {rows.stop} of {count}")
        runs.append(Trajectory.load(path))
        if runs[-1].seed != seed:
            raise MismatchError(f"{path} was drawn with seed {runs[-1].seed}, not {seed}; use another --out")
    return join(runs)


def _meets(crystals: Crystals, controls: Controls) -> torch.Tensor:  # -> (N,)
    """Return which crystals meet a control."""
    allowed = torch.zeros(129, dtype=torch.bool)
    allowed[[0, *controls.allowed]] = True
    inside = allowed[crystals.numbers].all(1)
    if controls.system:
        return inside & torch.stack([(crystals.numbers == z).any(1) for z in controls.allowed]).all(0)
    return inside


def _quality(crystals: Crystals, run: Trajectory | None, model: str) -> dict[str, Any]:
    """Return the energies above the hull and, for a run, how well its score orders them."""
    judgement = judge(crystals, calculator=model)
    above, good = np.array(judgement["e_above_hull"], float), judgement.good
    known = np.isfinite(above)
    quality: dict[str, Any] = {
        "structures": len(good),
        "judged": int(known.sum()),
        "unknown": judgement["metastable"].count(None),
        "mean_e_above_hull": float(above[known].mean()) if known.any() else None,
        "metastable": float(good.mean()),
        "metastable_interval": bootstrap(lambda index: float(good[index].mean()), len(good)),
    }
    if known.any():
        quality["mean_interval"] = bootstrap(lambda index: float(above[known][index].mean()), int(known.sum()))
    if run is not None and 0 < good.sum() < len(good):
        score = run.score().cpu()
        quality["ranked"] = {
            "score": run.default_score,
            "spearman": spearman(score.numpy()[known], above[known]),
            **lift_of(score, good, intervals=True),
        }
    return quality
