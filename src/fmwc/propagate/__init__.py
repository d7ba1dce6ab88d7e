"""Estimators: from a noisy network to the mean and variance of its velocity. One interface, named choices."""

import re

from fmwc.errors import UsageError, pick
from fmwc.propagate.diagonal import Diagonal
from fmwc.propagate.estimator import Estimator, Noisy
from fmwc.propagate.linearised import Linearised, Record, Tangent, outside, unit_probes
from fmwc.propagate.monte_carlo import MonteCarlo
from fmwc.propagate.transported import Transport, Transported

__all__ = [
    "ESTIMATORS",
    "Diagonal",
    "Estimator",
    "Linearised",
    "MonteCarlo",
    "Noisy",
    "Record",
    "Tangent",
    "Transport",
    "Transported",
    "as_estimator",
    "estimator_of",
    "outside",
    "unit_probes",
]

ESTIMATORS: dict[str, Estimator] = {
    "diagonal": Diagonal(),
    "linearised": Linearised(),
    "tangent": Tangent(),
    "monte_carlo": MonteCarlo(),
}


def as_estimator(estimator: "str | Estimator") -> Estimator:
    """An estimator by name, or as it is."""
    return pick(ESTIMATORS, estimator, "propagation") if isinstance(estimator, str) else estimator


def estimator_of(text: str) -> Estimator | None:
    """The estimator that was written as this text; `None` where its options are more than whole numbers.

    >>> estimator_of("Linearised(probes=2)"), estimator_of("Linearised(closure=mine)")
    (Linearised(probes=2), None)
    """
    kinds = {type(estimator).__name__: estimator for estimator in ESTIMATORS.values()}
    name, _, options = text.removesuffix(")").partition("(")
    if name not in kinds or str(kinds[name]) == text:
        return kinds.get(name)
    words = {"None": None, "True": True, "False": False}
    found = re.findall(r"(\w+)=(\w+)", options)
    try:
        made: Estimator = type(kinds[name])(**{n: words[v] if v in words else int(v) for n, v in found})
    except (TypeError, ValueError, UsageError):
        return None
    return made if str(made) == text else None
