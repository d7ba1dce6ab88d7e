"""Baselines and rivals: what else one can do, and what it costs."""

from fmwc.baselines.dispersion import dispersion, ensemble_ends, stochastic_ends
from fmwc.baselines.dropout import Dropout
from fmwc.baselines.rivals import HeteroscedasticHead, HeteroscedasticVariance, PosteriorTrace, StateSensitivity, nll

__all__ = [
    "Dropout",
    "HeteroscedasticHead",
    "HeteroscedasticVariance",
    "PosteriorTrace",
    "StateSensitivity",
    "dispersion",
    "ensemble_ends",
    "nll",
    "stochastic_ends",
]
