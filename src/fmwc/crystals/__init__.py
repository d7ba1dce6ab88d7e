"""Crystals: structure files, energies, the convex hull, validity, uniqueness and novelty.

pymatgen, ASE and the energy models are imported on first use; install them with `pip install 'fmwc[crystals]'`.
"""

from fmwc.crystals.controls import Controls
from fmwc.crystals.energy import CALCULATORS, Calculator, Energies, calculator, energies
from fmwc.crystals.files import read
from fmwc.crystals.hull import Hull, folder_hull, hull_for, reference_hull, shipped_hull
from fmwc.crystals.judge import Judgement, Validity, judge, validity
from fmwc.crystals.matching import Known, unique
from fmwc.crystals.relaxation import Relaxed, relax, relax_all
from fmwc.crystals.structures import Candidate, candidates

__all__ = [
    "CALCULATORS",
    "Calculator",
    "Candidate",
    "Controls",
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
    "relax_all",
    "shipped_hull",
    "unique",
    "validity",
]
