"""The command line: :mod:`fmwc.cli.verbs` declares the verbs and their options; the other modules do their work."""

from fmwc.cli.verbs import app

__all__ = ["app"]
