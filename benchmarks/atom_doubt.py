"""Compare measures of the doubt of single atoms with how far each atom moves when the crystal is relaxed.

python -m benchmarks.atom_doubt --seeds 100 --count 60 --out OUT

The measures: the echo of each atom (`RowEcho`) by its type, its position, or both, and the variance of the velocity at
the same noisy states by `Tangent`. `within`: the mean Spearman correlation between the atoms of one crystal, over
crystals with at least four atoms in which some atom moves by 0.1 Å. `pooled`: over all atoms. `found`: the share of
crystals in which the most doubtful atom is the one that moves farthest, and `by chance`. `OUT/atom_doubt.json` is
written after every seed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

import fmwc
from fmwc.checks import Echo
from fmwc.checks.evidence import renoised, squares
from fmwc.crystals import calculator, relax
from fmwc.crystals.structures import candidates, crystals_of
from fmwc.estimators import Tangent
from fmwc.files import write_json
from fmwc.modes import evaluating
from fmwc.provenance import Clock, provenance
from fmwc.randomness import Blocks
from fmwc.registry import domain_named
from fmwc.sampling import Trajectory

STEPS, MOVED, FEWEST = 100, 0.1, 4
PROBES = 4
CHANNELS = {"type": ("type",), "position": ("coord",), "both": ("type", "coord")}


def measures(field: Any, run: Trajectory, seed: int) -> dict[str, np.ndarray]:
    """Return each measure, `(B, atoms)`."""
    echo: Echo = field.reference.checks["echo"]
    space = field.space.given(run.cond)
    logs: dict[str, list[np.ndarray]] = {}
    with evaluating(field), torch.no_grad():
        for draw in range(echo.draws):
            for t in echo.times:
                x0, x1, at = renoised(space, run.x, t, seed, 0, draw)
                error = squares(field, space, x0, x1, at, run.cond)
                x_t, _ = space.path(x0, x1, at)
                var = Tangent(PROBES)(field, x_t, at, run.cond, Blocks(seed, 0, len(run))).var
                for kind, found in (("echo", error), ("variance", var)):
                    for name in ("type", "coord"):
                        value = found[name].mean(2).clamp_min(1e-30).log().numpy()
                        logs.setdefault(f"{kind} {name}", []).append(value)
    means = {name: np.mean(values, 0) for name, values in logs.items()}
    return {
        f"{kind}, {words}": np.mean([means[f"{kind} {name}"] for name in names], 0)
        for kind in ("echo", "variance")
        for words, names in CHANNELS.items()
    }


def displacements(run: Trajectory) -> list[np.ndarray | None]:
    """Return how far each atom moves in Å, relative to their mean; `None` if the relaxation fails."""
    model = calculator("chgnet")
    ase, found = model.ase(), []
    for candidate in candidates(crystals_of(run)):
        after = relax(candidate, model, STEPS, ase=ase)
        delta = after.candidate.coords - candidate.coords
        delta = delta - delta.round()
        delta = (delta - delta.mean(0)) @ after.candidate.cell
        found.append(None if after.problem else np.linalg.norm(delta, axis=1))
    return found


def compared(doubt: np.ndarray, moved: list[np.ndarray | None]) -> dict[str, Any]:
    pairs = [(row[: len(m)], m) for row, m in zip(doubt, moved, strict=True) if m is not None]
    chosen = [(d, m) for d, m in pairs if len(m) >= FEWEST and m.max() >= MOVED]
    within = np.array([spearmanr(d, m).statistic for d, m in chosen])
    drawn = np.random.default_rng(0).integers(0, len(within), (1000, len(within)))
    pooled = spearmanr(np.concatenate([d for d, _ in pairs]), np.concatenate([m for _, m in pairs])).statistic
    return {
        "within": round(float(within.mean()), 3),
        "interval": [round(float(q), 3) for q in np.quantile(within[drawn].mean(1), (0.05, 0.95))],
        "pooled": round(float(pooled), 3),
        "found": round(float(np.mean([d.argmax() == m.argmax() for d, m in chosen])), 3),
        "by chance": round(float(np.mean([1 / len(m) for _, m in chosen])), 3),
        "crystals": len(chosen),
        "relaxed": len(pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    domain, field = domain_named("crystals"), fmwc.load("crystals")
    clock, doubts, moved = Clock(field.device), {}, []
    for number, seed in enumerate(options.seeds, 1):
        run = domain.draw(field, options.count, seed, None, confidence=None, check=False)
        for name, value in measures(field, run, seed).items():
            doubts.setdefault(name, []).append(value)
        moved += displacements(run)
        table = {name: compared(np.concatenate(values), moved) for name, values in doubts.items()}
        about = provenance(field.device, clock.seconds, seeds=options.seeds[:number], count=options.count)
        write_json(options.out / "atom_doubt.json", {"table": table, "provenance": about})
        print(table, flush=True)


if __name__ == "__main__":
    main()
