"""Screening: draw many samples, keep the surest, judge them, in blocks on one process or many."""

from fmwc.screening.driver import screen
from fmwc.screening.parts import merge, status
from fmwc.screening.results import Summary

__all__ = ["Summary", "merge", "screen", "status"]
