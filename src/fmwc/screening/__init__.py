"""Screening: draw many samples, keep the surest, judge them, in blocks on one process or many."""

from fmwc.screening.campaign import status
from fmwc.screening.driver import screen
from fmwc.screening.results import Summary

__all__ = ["Summary", "screen", "status"]
