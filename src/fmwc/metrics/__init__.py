"""Metrics of sample quality, and of how well a score ranks samples."""
