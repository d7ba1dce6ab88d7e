"""Checks: evidence from finished samples of any source. Checks need no noise model and no training."""

from fmwc.checks.check import CheckResult, check, choose_check
from fmwc.checks.evidence import Contest, Echo, Evidence, Nearest, RowEcho, embedded, residuals, run_checks

__all__ = [
    "CheckResult",
    "Contest",
    "Echo",
    "Evidence",
    "Nearest",
    "RowEcho",
    "check",
    "choose_check",
    "embedded",
    "residuals",
    "run_checks",
]
