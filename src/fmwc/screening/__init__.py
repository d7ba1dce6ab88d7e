"""Screening: draw many samples, keep the surest, judge them, in blocks on one process or many."""
