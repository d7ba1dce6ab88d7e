"""Variational adaptive dropout: input-dependent multiplicative noise on the layers of any network."""

from fmwc.noise.layers import KINDS, LayerKind
from fmwc.noise.model import Draw, NoiseModel, NoisyLayer, Pass, Weights
from fmwc.noise.posterior import LOG_ALPHA_RANGE, InferenceNetwork, cyclic, divergence_from_prior, kl, time_features

__all__ = [
    "KINDS",
    "LOG_ALPHA_RANGE",
    "Draw",
    "InferenceNetwork",
    "LayerKind",
    "NoiseModel",
    "NoisyLayer",
    "Pass",
    "Weights",
    "cyclic",
    "divergence_from_prior",
    "kl",
    "time_features",
]
