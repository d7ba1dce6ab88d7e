"""Velocity networks in plain torch. They know nothing of confidence."""

from fmwc.nets.mlp import MLP

__all__ = ["MLP", "NETS"]

NETS = {"MLP": MLP}  # by the name a checkpoint records
