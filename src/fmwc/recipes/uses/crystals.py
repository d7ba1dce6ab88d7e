"""Crystals as a subject."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fmwc.data.crystals import Crystals as Structures
from fmwc.data.crystals import decode
from fmwc.field import Field
from fmwc.metrics.crystals.candidates import candidates
from fmwc.metrics.crystals.edits import MODES, success
from fmwc.metrics.crystals.energy import calculator, energies
from fmwc.metrics.crystals.judge import METASTABLE
from fmwc.metrics.crystals.references import hull_for
from fmwc.metrics.crystals.validity import validity
from fmwc.randomness import derive
from fmwc.recipes.crystals.recipe import READ_BY, batch_for
from fmwc.recipes.uses.subject import Intent, Metric, Outcome, Sizes, Subject
from fmwc.sampling import Trajectory

__all__ = ["Crystals"]

WORDS = {
    "chem-swap": "another formula, RMSD above 0.10, nearer the hull",
    "polymorph": "the same formula, RMSD above 0.10, nearer the hull",
    "all-channels": "RMSD above 0.10, nearer the hull",
}


def _mean(found: Outcome) -> float:
    known = found["above"][np.isfinite(found["above"])]
    return float(known.mean()) if len(known) else math.nan


METRICS = {
    "above": Metric(_mean, "mean energy above the hull, eV/atom", digits=3),
    "metastable": Metric(lambda found: 100 * float(1 - found["bad"].mean()), "metastable, %", higher=True, digits=1),
    "valid": Metric(lambda found: 100 * float(found["valid"].mean()), "valid, %", higher=True, digits=1),
}
# Bits of ±1; fractions of a cell; and all channels, each in the root of its weight in the loss.
SCALES = {"chem-swap": (0.3, 1.0, 2.0), "polymorph": (0.1, 0.3, 1.0), "all-channels": (1.0, 3.0, 10.0)}
CHOSEN = {
    "chem-swap": (0.3, 0.2, "transported"),
    "polymorph": (0.1, 0.4, "variance"),
    "all-channels": (1.0, 0.4, "transported"),
}


def _intent(name: str) -> Intent:
    scale, before, peak = CHOSEN[name]
    return Intent(MODES[name].channel, scale, WORDS[name], scales=SCALES[name], before=before, peak=peak)


INTENTS = {name: _intent(name) for name in MODES}


class Crystals(Subject):
    """Creates the crystals' subject. What `--wide` tried on validation seed 100 chose scales and times.

    Arguments:
        model: The energy model that judges.
        data: MP-20, for the hull of its structures; the package's own if empty.
    """

    name, bad, good, finds = "crystals", "not metastable", "metastable", "good"
    metrics = METRICS
    intents = INTENTS
    usual, dispersion = 5, False  # which blows up where a lattice does
    risks = (0.5, 0.6)
    before, scale = 0.6, 0.3
    scales = (0.3, 1.0, 3.0)
    befores = (0.1, 0.2, 0.4, 0.6)

    def __init__(self, field: Field, sizes: Sizes | None = None, model: str = "chgnet", data: str = "") -> None:
        super().__init__(field, sizes)
        self.model, self.data = model, data

    @staticmethod
    def sizes_for(device: str) -> Sizes:
        return Sizes(1_000, 50, 20, 500, 300, 100) if device == "cuda" else Sizes(100, 10, 4, 50, 50, 10)

    def draw(self, count: int, seed: int, **options: Any) -> Trajectory:
        network: Any = self.field.network
        atoms = network.draw_sizes(count, derive(seed, "atoms")).to(self.field.device)
        return self.drawn(count, seed, atoms=atoms, **options)

    def options(self) -> dict[str, Any]:
        return {**super().options(), "batch": min(1_000, batch_for(self.field.device)), "confidence": READ_BY}

    def kept(self, x: Any, cond: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = decode(x, cond["atoms"])
        return {
            "numbers": found.numbers.to(torch.uint8),
            "coords": found.coords,
            "cell": torch.cat([found.lengths, found.angles], 1),
        }

    def read(self, kept: Mapping[str, Tensor]) -> Outcome:
        those = candidates(_structures(kept))
        computed = energies(those, calculator(self.model))
        hull = hull_for(self.model, self.data or None)
        above = [
            math.nan if problem else hull.above(candidate.key, energy)[0]
            for candidate, energy, problem in zip(those, computed.per_atom.tolist(), computed.problems, strict=True)
        ]
        found = {name: value.numpy() for name, value in kept.items()}
        valid = np.array([validity(candidate).distances for candidate in those])
        return {**found, "above": np.array(above), "valid": valid, "bad": ~(np.array(above) <= METASTABLE)}

    def scores(self, run: Trajectory) -> dict[str, Tensor]:
        return {**super().scores(run), "fewest atoms first": run.cond["atoms"].float()}

    def succeeded(self, intent: str, before: Outcome, after: Outcome) -> np.ndarray:
        return success(intent, _structures(before), _structures(after), before["above"], after["above"]).numpy()


def _structures(found: Mapping[str, Any]) -> Structures:
    """What was kept, as crystals."""
    numbers, coords, cell = (torch.as_tensor(found[name]) for name in ("numbers", "coords", "cell"))
    names = tuple(str(i) for i in range(len(numbers)))
    return Structures(numbers.long(), coords, cell[:, :3], cell[:, 3:], names)
