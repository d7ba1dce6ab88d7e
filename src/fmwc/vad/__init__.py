"""Variational adaptive dropout: input-dependent multiplicative noise on the layers of any network."""

from fmwc.vad.kl import cyclic, divergence_from_prior, kl
from fmwc.vad.layers import KINDS, LayerKind
from fmwc.vad.noise import NoiseModel, NoisyLayer
from fmwc.vad.passes import Draw, Pass, Weights

__all__ = [
    "KINDS",
    "Draw",
    "LayerKind",
    "NoiseModel",
    "NoisyLayer",
    "Pass",
    "Weights",
    "cyclic",
    "divergence_from_prior",
    "kl",
]
