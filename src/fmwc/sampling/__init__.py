"""Sampling: integrate noise to a :class:`Trajectory` with confidence."""

from fmwc.sampling.adaptive import Damped, Ema, Extrapolated
from fmwc.sampling.confidence import (
    Part,
    ReadWith,
    Reference,
    Schedule,
    compared,
    default_estimator,
    read_times,
    read_with,
)
from fmwc.sampling.config import (
    DECODERS,
    STEPPERS,
    AsReference,
    Controller,
    Grid,
    SamplingConfig,
    Stepper,
    Uniform,
    decode_mean,
)
from fmwc.sampling.pilot import PILOT, fit_grid
from fmwc.sampling.recorder import VarianceRecorder, reread
from fmwc.sampling.sampler import Sampler, noise, sample, stream
from fmwc.sampling.storage import growing
from fmwc.sampling.trajectory import EARLY, LATE, SCORES, Standard, Trajectory, needs_variance, standard_of

__all__ = [
    "DECODERS",
    "EARLY",
    "LATE",
    "PILOT",
    "SCORES",
    "STEPPERS",
    "AsReference",
    "Controller",
    "Damped",
    "Ema",
    "Extrapolated",
    "Grid",
    "Part",
    "ReadWith",
    "Reference",
    "Sampler",
    "SamplingConfig",
    "Schedule",
    "Standard",
    "Stepper",
    "Trajectory",
    "Uniform",
    "VarianceRecorder",
    "compared",
    "decode_mean",
    "default_estimator",
    "fit_grid",
    "growing",
    "needs_variance",
    "noise",
    "read_times",
    "read_with",
    "reread",
    "sample",
    "standard_of",
    "stream",
]
