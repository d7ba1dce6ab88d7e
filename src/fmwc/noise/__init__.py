"""Variational adaptive dropout: input-dependent multiplicative noise on the layers of any network."""

from fmwc.noise.layers import (
    KINDS,
    LOG_ALPHA_RANGE,
    InferenceNetwork,
    LayerKind,
    cyclic,
    divergence_from_prior,
    kl,
    time_features,
)
from fmwc.noise.model import Draw, NoiseModel, NoisyLayer, Pass, rows_of_share

__all__ = [
    "KINDS",
    "LOG_ALPHA_RANGE",
    "Draw",
    "InferenceNetwork",
    "LayerKind",
    "NoiseModel",
    "NoisyLayer",
    "Pass",
    "cyclic",
    "divergence_from_prior",
    "kl",
    "rows_of_share",
    "time_features",
]
