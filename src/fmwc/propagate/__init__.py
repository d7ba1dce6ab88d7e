"""Estimators: from a noisy network to the mean and variance of its velocity. One interface, named choices."""

from fmwc.errors import pick
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
