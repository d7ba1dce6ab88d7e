"""Checks: evidence from a finished sample, wherever it comes from. Checks need no noise model and no training."""

from fmwc.checks.check import CheckResult, check, choose_check, run_checks
from fmwc.checks.nearest import Nearest, embedded
from fmwc.checks.residuals import Contest, Echo, Evidence, residuals

__all__ = [
    "CheckResult",
    "Contest",
    "Echo",
    "Evidence",
    "Nearest",
    "check",
    "choose_check",
    "embedded",
    "residuals",
    "run_checks",
]
