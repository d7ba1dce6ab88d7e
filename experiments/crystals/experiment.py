"""The crystal experiment of the paper."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.common.evaluation import with_intervals
from experiments.common.experiment import Experiment, Intent, Metric, Outcome, Sizes
from experiments.crystals.evaluate import evaluate_run
from experiments.crystals.figures import write_figures
from experiments.crystals.reproduce import reproduce
from experiments.crystals.tables import tables
from fmwc.crystals.energy import calculator, energies
from fmwc.crystals.hull import hull_for
from fmwc.crystals.judge import METASTABLE, above_hull, validity
from fmwc.crystals.matching import MODES, changes, success, useful
from fmwc.crystals.recipe import Mp20, batch_for
from fmwc.crystals.structures import CHANNELS, Crystals, candidates, decode
from fmwc.domains import Show
from fmwc.errors import UsageError
from fmwc.field import Field
from fmwc.progress import say_on_stderr
from fmwc.recipes import override
from fmwc.sampling import SamplingConfig, Schedule, Trajectory

__all__ = ["CrystalExperiment"]


def _mean(outcome: Outcome) -> float:
    known = outcome["above"][np.isfinite(outcome["above"])]
    return float(known.mean()) if len(known) else math.nan


# Per mode: the criterion of success, and the scale, time and peak chosen on seed 100. The unit of a scale is a bit of
# ±1, a fraction of the cell, or for all channels the root of each channel's weight in the loss.
EDITS: dict[str, tuple[str, float, float, str]] = {
    "chem-swap": ("another formula, RMSD above 0.10, nearer the hull", 1.0, 0.4, "transported"),
    "polymorph": ("the same formula, RMSD above 0.10, nearer the hull", 0.3, 0.4, "variance"),
    "all-channels": ("RMSD above 0.10, nearer the hull", 1.0, 0.1, "transported"),
}


class CrystalExperiment(Experiment):
    """Crystals. Scales and times were chosen on validation seed 100.

    Arguments:
        data: The folder of MP-20, whose hull is used; if empty, the hull of the package.
    """

    draws, seeds, reproduced = 5, "0", 2_500
    bad, good, finds = "not metastable", "metastable", "good"
    metrics: Mapping[str, Metric] = {
        "above": Metric(_mean, "mean energy above the hull, eV/atom", digits=3),
        "metastable": Metric(lambda f: 100 * float(1 - f["bad"].mean()), "metastable, %", higher=True, digits=1),
        "valid": Metric(lambda f: 100 * float(f["valid"].mean()), "valid, %", higher=True, digits=1),
    }
    intents: Mapping[str, Intent] = {
        name: Intent(MODES[name].channel, scale, words, before=before, peak=peak)
        for name, (words, scale, before, peak) in EDITS.items()
    }
    usual, dispersion = 5, False  # the dispersion diverges if a lattice does
    risks = (0.5, 0.6)

    def __init__(self, domain: Any, field: Field | None = None, sizes: Sizes | None = None, data: str = "") -> None:
        super().__init__(domain, field, sizes)
        self.data = data

    # ---- the paper's tables ------------------------------------------------------------------------------------------

    def evaluate(self, field: Field, count: int, seed: int, data: str, progress: Show) -> dict[str, Any]:
        run = self.domain.draw(field, count, seed, progress, schedule=Schedule.every(self.domain.every))
        few = min(count, batch_for(field.device))
        plain = self.domain.draw(field, few, seed, None, confidence=None)  # the first structures of the run
        same = all(torch.equal(run.x[c][:few], plain.x[c]) for c in CHANNELS)
        measures = {"bit_for_bit": same, **evaluate_run(run, self.domain.judgement(run, data))}
        return with_intervals(measures, ~self.domain.judge(run), "metastable", -run.score().cpu())

    def reproduce(
        self, recipe: Any, out: Path, device: torch.device, seeds: Sequence[int], *, count: int, draws: int, only: str
    ) -> None:
        if not isinstance(recipe, Mp20):
            raise UsageError("reproduce needs a recipe of a flow; choose another preset")
        options: dict[str, Any] = {"count": count, "draws": draws, "only": only, "say": say_on_stderr}
        reproduce(recipe, out, device, seeds=seeds, calculator=self.domain.calculator, **options)
        if (out / "draws" / f"retrofit-{seeds[0]}.safetensors").exists() and (out / "cells").is_dir():
            write_figures(out)

    def tables(self, out: Path) -> list[Path]:
        return tables(out)

    # ---- the study ---------------------------------------------------------------------------------------------------

    def with_field(self, field: Field, data: str = "", changes: Sequence[str] = ()) -> Experiment:
        sizes = override(self.sizes_for(field.device.type), changes, "size")
        return type(self)(self.domain, field, sizes, data)  # does not require the judge, which sampling does not need

    @staticmethod
    def sizes_for(device: str) -> Sizes:
        return Sizes(1_000, 50, 20, 500, 100) if device == "cuda" else Sizes(100, 10, 4, 50, 10)

    def options(self) -> dict[str, Any]:
        return {**super().options(), "config": SamplingConfig(batch=min(1_000, batch_for(self.field.device)))}

    def judged_by(self) -> dict[str, str]:
        return {"model": self.domain.calculator, "data": self.data}

    def keep(self, x: Any, cond: Mapping[str, Tensor]) -> dict[str, Tensor]:
        crystals = decode(x, cond["atoms"])
        cell = torch.cat([crystals.lengths, crystals.angles], 1)
        return {"numbers": crystals.numbers.to(torch.uint8), "coords": crystals.coords, "cell": cell}

    def judge(self, kept: Mapping[str, Tensor]) -> Outcome:
        structures, model = candidates(_structures(kept)), self.domain.calculator
        computed = energies(structures, calculator(model))
        systems = [one.key for one, problem in zip(structures, computed.problems, strict=True) if not problem]
        hull = hull_for(model, self.data or None, systems=systems)
        above = np.array(above_hull(structures, computed, hull)[0])
        arrays = {name: value.numpy() for name, value in kept.items()}
        valid = np.array([validity(candidate).distances for candidate in structures])
        return {**arrays, "above": above, "valid": valid, "bad": ~(above <= METASTABLE)}

    def scores(self, run: Trajectory) -> dict[str, Tensor]:
        return {**super().scores(run), "fewest atoms first": run.cond["atoms"].float()}

    def succeeded(self, intent: str, before: Outcome, after: Outcome) -> np.ndarray:
        return success(intent, _structures(before), _structures(after), before["above"], after["above"]).numpy()

    def useful(self, before: Outcome, after: Outcome) -> np.ndarray:
        """Return whether each edit is metastable, and a polymorph or a substitution (matching.py)."""
        return useful(changes(_structures(before), _structures(after)), ~after["bad"])


def _structures(kept: Mapping[str, Any]) -> Crystals:
    """Return the arrays of `keep` as crystals."""
    numbers, coords, cell = (torch.as_tensor(kept[name]) for name in ("numbers", "coords", "cell"))
    names = tuple(str(i) for i in range(len(numbers)))
    return Crystals(numbers.long(), coords, cell[:, :3], cell[:, 3:], names)
