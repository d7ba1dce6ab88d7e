"""Diagnostics of a flow: its divergence, and how the variance follows it."""

from fmwc.diagnostics.divergence import divergence

__all__ = ["divergence"]
