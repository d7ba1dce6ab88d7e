"""The `fmwc` command: `python -m fmwc` does the same.

Exit codes: 0 for success; 1 where `fmwc judge` could not judge a structure; 2 for wrong input (an option, a file, a
path); 70 for an error that was not foreseen; 130 after Ctrl-C, and 128 + n after signal n (143 for SIGTERM, 129 for
SIGHUP, 141 when the reader of a pipe went away). Every error is one line on stderr; `--debug` or `FMWC_DEBUG=1` adds
the traceback.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from types import FrameType
from typing import Any

__all__ = ["Interrupted", "main"]

UNFORESEEN = 70  # EX_SOFTWARE of sysexits.h
SIGPIPE = 13
HINT = " (add --debug to see where)"
LONGEST = 2000  # characters of a message that are printed


class Interrupted(KeyboardInterrupt):
    """A signal that ends the command as Ctrl-C does: context managers are left in order, and files stay whole.

    Arguments:
        number: The signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def main(module: str = "fmwc.cli", name: str = "fmwc") -> None:
    """Run a command line and exit: errors are one line on stderr (see the exit codes above).

    Arguments:
        module: The module whose `app` holds the verbs.
        name: What the command is called in its help.
    """
    words, debug = _debugging(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):  # a name that the terminal's encoding lacks must not end a run
        with suppress(AttributeError, ValueError, OSError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        with _signals():
            code = _run(words, module, name)
            sys.stdout.flush()
    except SystemExit:
        raise
    except KeyboardInterrupt as stop:
        number = stop.number if isinstance(stop, Interrupted) else signal.SIGINT
        name = str(stop) if isinstance(stop, Interrupted) else "Ctrl-C"
        code = _end(stop, f"interrupted ({name}); run the same command again to go on", 128 + number, debug)
    except BrokenPipeError:  # the reader has enough (| head): nothing is wrong, and nobody to tell it to
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + SIGPIPE
    except BaseException as error:
        code = _end(error, *_said(error), debug)
    sys.exit(code)


def _debugging(words: Sequence[str]) -> tuple[list[str], bool]:
    """The words of the command without `--debug`, which may stand anywhere, and whether it was asked for."""
    end = words.index("--") if "--" in words else len(words)
    kept = [word for word in words[:end] if word != "--debug"]
    asked = len(kept) < end or os.environ.get("FMWC_DEBUG", "") not in ("", "0")
    return [*kept, *words[end:]], asked


def _run(words: list[str], module: str, name: str) -> int:
    """Call the verb; the exit code of one that ends early."""
    import typer

    command: Any = typer.main.get_command(import_module(module).app)
    try:
        with command.make_context(name, words) as context:
            command.invoke(context)
    except typer.Exit as stop:
        return stop.exit_code
    return 0


def _said(error: BaseException) -> tuple[str, int]:
    """What to say of an error, and the exit code."""
    from fmwc.errors import FmwcError

    if isinstance(error, FmwcError):
        return str(error), 2
    if isinstance(error, OSError):  # a path that cannot be read or written
        return str(error), 2
    if hasattr(error, "format_message"):  # of click, or of the copy of it inside typer
        return _usage(error), 2
    if isinstance(error, ImportError) and (package := (error.name or "").partition(".")[0]) not in ("", "fmwc"):
        return f"this command needs '{package}'; install it with: pip install 'fmwc[cli]'", 2
    first = next(iter(str(error).strip().splitlines()), "")
    return f"unforeseen {type(error).__name__}: {first}{HINT}", UNFORESEEN


def _usage(error: Any) -> str:
    """One line for a wrong option or argument."""
    message = error.format_message().strip()
    context = getattr(error, "ctx", None)
    if context is None:
        return message
    if type(error).__name__ == "NoArgsIsHelpError":
        print(context.get_help(), file=sys.stderr)
        message = "no verb was given"
    return f"{message.rstrip('.')} (see {context.command_path} --help)"


def _end(error: BaseException, message: str, code: int, debug: bool) -> int:
    """Print one line, after the traceback if it was asked for; the exit code."""
    if debug:
        traceback.print_exception(error)
    line = " ".join(message.removesuffix(HINT if debug else "").split())
    line = "".join(c if c.isprintable() else "?" for c in line)
    with suppress(OSError, ValueError):  # nobody listens any more
        print(f"fmwc: {line[:LONGEST]}", file=sys.stderr, flush=True)
    return code


@contextmanager
def _signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the command as Ctrl-C does; under nohup, SIGHUP stays ignored."""
    before: dict[int, Any] = {}

    def stop(number: int, frame: FrameType | None) -> None:
        for known in before:  # once is enough: what is being cleaned up must not be interrupted again
            signal.signal(known, signal.SIG_IGN)
        raise Interrupted(number)

    for name in ("SIGTERM", "SIGHUP"):  # Windows has no SIGHUP
        number = getattr(signal, name, None)
        if number is None or signal.getsignal(number) == signal.SIG_IGN:
            continue
        with suppress(ValueError):  # not in the main thread, which alone can set handlers
            before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    main()
