"""Estimators of the mean and variance of a noisy network's velocity. One interface, named choices."""

from fmwc.estimators.base import ESTIMATORS, Estimator, Noisy, as_estimator, as_normal_tensor, estimator_of
from fmwc.estimators.diagonal import Diagonal
from fmwc.estimators.linearised import (
    Linearised,
    Record,
    contributions,
    translate_checkpoint_errors,
    unit_probes,
)
from fmwc.estimators.monte_carlo import MonteCarlo
from fmwc.estimators.tangent import Tangent
from fmwc.estimators.transported import Transport, Transported

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
    "as_normal_tensor",
    "contributions",
    "estimator_of",
    "translate_checkpoint_errors",
    "unit_probes",
]
