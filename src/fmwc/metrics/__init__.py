"""Metrics: how good samples are, and how well a score tells which."""
