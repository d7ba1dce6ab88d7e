"""Moments through a network: the Gaussian tensor, its rule table, and closures for nonlinearities."""

from fmwc.moments import norms as norms  # fills the table
from fmwc.moments import rules as rules
from fmwc.moments.closures import CLOSURES, Closure, GaussHermite, Moments, Taylor, as_closure
from fmwc.moments.gaussian import EXACT, FIRST_ORDER, INDEPENDENT, RULES, Gaussian, Rule, moments_of, register
from fmwc.moments.norms import IN_EXPECTATION

__all__ = [
    "CLOSURES",
    "EXACT",
    "FIRST_ORDER",
    "INDEPENDENT",
    "IN_EXPECTATION",
    "RULES",
    "Closure",
    "GaussHermite",
    "Gaussian",
    "Moments",
    "Rule",
    "Taylor",
    "as_closure",
    "moments_of",
    "register",
]
