"""What a user names as `module:function`: imported, called without arguments, and whatever goes wrong is one line."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from fmwc.errors import UsageError

__all__ = ["called", "one_line"]

T = TypeVar("T")


def called(entry: str, what: str) -> Any:
    """What the function of a module returns. The module is looked for where Python looks, and in the working directory.

    Arguments:
        entry: `package.module:function`; the function takes no arguments.
        what: What it is to return, for messages.
    """
    module_name, colon, name = entry.partition(":")
    if not colon or not name.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
        raise UsageError(f"{what} is named module:function, such as my_models:make, got '{_printable(entry)}'")
    with _importing_from(os.getcwd()):
        module = _guarded(lambda: importlib.import_module(module_name), f"module '{module_name}' cannot be imported")
        function = _guarded(lambda: getattr(module, name, None), f"'{entry}' cannot be looked up")
        if function is None:
            raise UsageError(f"module '{module_name}' has no '{name}'")
        if not callable(function) or (hasattr(function, "state_dict") and not isinstance(function, type)):
            raise UsageError(f"'{entry}' is to be a function without arguments that returns {what}")
        _require_no_arguments(entry, function)
        found = _guarded(function, f"'{entry}' failed")
        if inspect.iscoroutine(found):
            found.close()  # else Python warns that nobody waited for it
            raise UsageError(f"'{entry}' is asynchronous; give a plain function that returns {what}")
        return found


def one_line(error: BaseException, longest: int = 200) -> str:
    """What an exception says, in one line of bounded length."""
    try:
        words = " ".join(str(error).split())
    except Exception:  # of a class of the user's own
        words = ""
    return _printable(f"{type(error).__name__}: {words}"[:longest]).removesuffix(": ")


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)[:200]


def _require_no_arguments(entry: str, function: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # what is built in may have none
        return
    try:
        signature.bind()
    except TypeError as error:
        raise UsageError(f"'{entry}' is called without arguments, and it has some: {error}") from error


def _guarded(function: Callable[[], T], problem: str) -> T:
    """Call a user's code. It may raise anything, SystemExit too; only an interrupt is passed on."""
    try:
        return function()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise UsageError(f"{problem}: {one_line(error)}") from error


@contextmanager
def _importing_from(folder: str) -> Iterator[None]:
    """Inside, modules are also looked for in a folder: also those that a function imports when it is called."""
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with suppress(ValueError):  # a module may have put its own in order
            sys.path.remove(folder)
