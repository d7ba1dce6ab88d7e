"""The command line. :mod:`fmwc.cli.verbs` declares the commands and options; the other modules implement them."""

from fmwc.cli.verbs import app

__all__ = ["app"]
