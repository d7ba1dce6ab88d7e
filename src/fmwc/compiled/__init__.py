"""Compiled sampling (experimental): built on private parts of torch; nothing depends on it."""

from fmwc.compiled.compiled import Compiled

__all__ = ["Compiled"]
