"""Variational adaptive dropout: input-dependent multiplicative noise on the layers of any network."""

from fmwc.noise.layers import (
    KINDS,
    LOG_ALPHA_RANGE,
    InferenceNetwork,
    LayerKind,
    PushedMode,
    cyclic,
    divergence_from_prior,
    kl,
    time_features,
)
from fmwc.noise.model import Draw, NoiseModel, NoisyLayer, Pass, rows_of_share
from fmwc.noise.rows import check_rows

__all__ = [
    "KINDS",
    "LOG_ALPHA_RANGE",
    "Draw",
    "InferenceNetwork",
    "LayerKind",
    "NoiseModel",
    "NoisyLayer",
    "Pass",
    "PushedMode",
    "check_rows",
    "cyclic",
    "divergence_from_prior",
    "kl",
    "rows_of_share",
    "time_features",
]
