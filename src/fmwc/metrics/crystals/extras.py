"""Packages that only some users have, imported when they are needed and never before."""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from fmwc.errors import UsageError

__all__ = ["need", "quiet", "said"]


def need(module: str, install: str = "'fmwc[crystals]'") -> Any:
    """A module of a package that may be missing; the error says how to get it."""
    if (found := sys.modules.get(module)) is not None:
        return found
    try:
        with quiet():
            return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        if getattr(error, "name", None) and not str(error.name).startswith(package):
            raise UsageError(f"{package} cannot be imported ({error}); try: pip install {install}") from error
        raise UsageError(f"{package} is not installed: pip install {install}") from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps other packages' warnings and greetings off the terminal."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def said(error: Exception) -> str:
    """What an exception says, in one line of bounded length."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".removesuffix(": ")
