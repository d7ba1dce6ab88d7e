"""Crystals judged: energies, the convex hull, validity, uniqueness and novelty.

pymatgen, ASE and the energy models are imported when they are needed: `pip install 'fmwc[crystals]'`.
"""

from fmwc.metrics.crystals.candidates import Candidate, candidates
from fmwc.metrics.crystals.energy import CALCULATORS, Calculator, Energies, calculator, energies
from fmwc.metrics.crystals.hull import Hull
from fmwc.metrics.crystals.judge import Judgement, judge
from fmwc.metrics.crystals.matching import Known, unique
from fmwc.metrics.crystals.reading import read
from fmwc.metrics.crystals.references import folder_hull, hull_for, reference_hull, shipped_hull
from fmwc.metrics.crystals.relaxing import Relaxed, relax
from fmwc.metrics.crystals.validity import Validity, validity

__all__ = [
    "CALCULATORS",
    "Calculator",
    "Candidate",
    "Energies",
    "Hull",
    "Judgement",
    "Known",
    "Relaxed",
    "Validity",
    "calculator",
    "candidates",
    "energies",
    "folder_hull",
    "hull_for",
    "judge",
    "read",
    "reference_hull",
    "relax",
    "shipped_hull",
    "unique",
    "validity",
]
