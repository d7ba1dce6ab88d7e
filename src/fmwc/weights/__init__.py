"""Shipped checkpoints, one folder each."""
