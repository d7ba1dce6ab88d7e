"""The experiments by name."""

from __future__ import annotations

from experiments.checkerboard.experiment import CheckerboardExperiment
from experiments.common.experiment import Experiment
from experiments.crystals.experiment import CrystalExperiment
from experiments.mnist.experiment import MnistExperiment
from fmwc.errors import UsageError
from fmwc.registry import domain_named, domain_of

EXPERIMENTS: dict[str, type[Experiment]] = {
    "checkerboard": CheckerboardExperiment,
    "mnist": MnistExperiment,
    "crystals": CrystalExperiment,
}


def experiment_named(name: str, judge: str = "") -> Experiment:
    """Return an experiment, optionally with a custom judge."""
    domain = domain_named(name, judge)
    return EXPERIMENTS[domain.name](domain)


def experiment_of(name: str, checkpoint: str, judge: str = "", verb: str = "evaluate") -> Experiment:
    """Return an experiment for a checkpoint of the same domain."""
    domain = domain_of(checkpoint or domain_named(name).name, judge)
    if domain.name != domain_named(name).name:
        raise UsageError(
            f"{checkpoint} is a checkpoint of {domain.name}; use python -m experiments {verb} {domain.name}"
        )
    return EXPERIMENTS[domain.name](domain)
