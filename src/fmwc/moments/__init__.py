"""Moments through a network: the Gaussian tensor, its rule table, and closures for nonlinearities."""

import fmwc.moments.table  # noqa: F401  adds in-place forms to the rule table
from fmwc.moments.attention import multi_head_attention
from fmwc.moments.gaussian import (
    CLOSURES,
    EXACT,
    FIRST_ORDER,
    GAUSSIAN,
    INDEPENDENT,
    QUADRATURE,
    RULES,
    Closure,
    GaussHermite,
    Gaussian,
    Moments,
    Rule,
    Taylor,
    as_closure,
    moments_of,
    register,
)
from fmwc.moments.norms import IN_EXPECTATION

__all__ = [
    "CLOSURES",
    "EXACT",
    "FIRST_ORDER",
    "GAUSSIAN",
    "INDEPENDENT",
    "IN_EXPECTATION",
    "QUADRATURE",
    "RULES",
    "Closure",
    "GaussHermite",
    "Gaussian",
    "Moments",
    "Rule",
    "Taylor",
    "as_closure",
    "moments_of",
    "multi_head_attention",
    "register",
]
