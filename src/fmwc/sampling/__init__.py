"""Sampling: one loop, from noise to a :class:`Trajectory`."""

from fmwc.references import Schedule
from fmwc.sampling.confidence import compared, default_estimator, needs_variance, read_times, read_with
from fmwc.sampling.config import DECODERS, STEPPERS, AsReference, SamplingConfig, Stepper, decode_mean
from fmwc.sampling.controllers import Controller, Damped, Ema, Extrapolated, Grid, Planned, Profile, Uniform
from fmwc.sampling.parts import Parts, growing
from fmwc.sampling.recorder import VarianceRecorder, reread
from fmwc.sampling.sample import for_each, noise, sample, stream
from fmwc.sampling.sampler import Sampler
from fmwc.sampling.schedules import PILOT, fit_grid, fit_schedule, survey
from fmwc.sampling.scores import EARLY, LATE, SCORES, Standard, standard_of
from fmwc.sampling.trajectory import Trajectory

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
    "Parts",
    "Planned",
    "Profile",
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
    "fit_schedule",
    "for_each",
    "growing",
    "needs_variance",
    "noise",
    "read_times",
    "read_with",
    "reread",
    "sample",
    "standard_of",
    "stream",
    "survey",
]
