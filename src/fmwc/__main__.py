"""The `fmwc` command; `python -m fmwc` does the same.

Exit codes: 0 for success; 1 if `fmwc judge` could not judge a structure; 2 for wrong input (an option, a file, a path);
70 for an unexpected error; 130 after Ctrl-C, and 128 + n after signal n (143 for SIGTERM, 129 for SIGHUP, 141 if the
reader of a pipe closed it). Every error is one line on stderr; `--debug` or `FMWC_DEBUG=1` adds the traceback.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from types import FrameType
from typing import Any

__all__ = ["Interrupted", "main"]

WRONG_INPUT = 2
UNEXPECTED = 70  # EX_SOFTWARE of sysexits.h
SIGPIPE = 13
HINT = " (add --debug for the traceback)"
STUDIO = ("starlette", "uvicorn")  # packages of the extra `studio`
LONGEST = 2000  # characters printed of a message


class Interrupted(KeyboardInterrupt):
    """A signal that ends the command like Ctrl-C: context managers exit in order, and no file is left incomplete.

    Arguments:
        number: The signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def main(module: str = "fmwc.cli", name: str = "fmwc") -> None:
    """Run the command line and exit. Errors are printed as one line on stderr.

    Arguments:
        module: The module of the Typer application `app`.
        name: The command's name in the help text.
    """
    words, debug = _without_debug(sys.argv[1:])
    warnings.formatwarning = lambda message, *_, **__: f"{name}: warning: {message}\n"  # without a line of the source
    for stream in (sys.stdout, sys.stderr):  # characters that the terminal cannot encode must not end a run
        with suppress(AttributeError, ValueError, OSError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        with _signals():
            code = _run(words, module, name)
            sys.stdout.flush()
    except SystemExit:
        raise
    except KeyboardInterrupt as stop:
        number, reason = (stop.number, str(stop)) if isinstance(stop, Interrupted) else (signal.SIGINT, "Ctrl-C")
        code = _report(stop, f"interrupted ({reason}); run the same command again", 128 + number, debug)
    except BrokenPipeError:  # for example with `| head`: not an error, but nothing more can be printed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + SIGPIPE
    except BaseException as error:
        code = _report(error, *_described(error), debug)
    _exit(code)


def _exit(code: int) -> None:
    """Exit. After an error in one of several processes, do so at once: gloo would wait for the others at exit."""
    distributed = sys.modules.get("torch.distributed")
    if code and distributed is not None and distributed.is_available() and distributed.is_initialized():
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _without_debug(words: Sequence[str]) -> tuple[list[str], bool]:
    """Remove `--debug` from the command line; also return whether to print tracebacks."""
    end = words.index("--") if "--" in words else len(words)
    others = [word for word in words[:end] if word != "--debug"]
    debug = len(others) < end or os.environ.get("FMWC_DEBUG", "") not in ("", "0")
    return [*others, *words[end:]], debug


def _run(words: list[str], module: str, name: str) -> int:
    """Run the command; return its exit code."""
    import typer

    command: Any = typer.main.get_command(import_module(module).app)
    if f"_{name.upper()}_COMPLETE" in os.environ:  # a shell asks for completions (fmwc --install-completion)
        command.main(words, prog_name=name)
    try:
        with command.make_context(name, words) as context:
            command.invoke(context)
    except typer.Exit as stop:
        return stop.exit_code
    return 0


def _described(error: BaseException) -> tuple[str, int]:
    """Return the message and the exit code for an error."""
    from fmwc.errors import FmwcError

    if isinstance(error, (FmwcError, OSError)):  # an OSError names a path that cannot be read or written
        return str(error), WRONG_INPUT
    if hasattr(error, "format_message"):  # an error of click, or of the copy of click inside typer
        return _usage(error), WRONG_INPUT
    if isinstance(error, ImportError) and (package := (error.name or "").partition(".")[0]) not in ("", "fmwc"):
        extra = "studio" if package in STUDIO else "cli"
        return f"this command needs '{package}'; install it with: pip install 'fmwc[{extra}]'", WRONG_INPUT
    first = next(iter(str(error).strip().splitlines()), "")
    return f"unexpected {type(error).__name__}: {first}{HINT}", UNEXPECTED


def _usage(error: Any) -> str:
    """Return the message for a wrong option or argument."""
    message = error.format_message().strip()
    context = getattr(error, "ctx", None)
    if context is None:
        return message
    if type(error).__name__ == "NoArgsIsHelpError":
        print(context.get_help(), file=sys.stderr)
        message = "no command was given"
    return f"{message.rstrip('.')} (see {context.command_path} --help)"


def _report(error: BaseException, message: str, code: int, debug: bool) -> int:
    """Print the message as one line, after the traceback if `debug` is set; return the exit code."""
    if debug:
        traceback.print_exception(error)
    line = " ".join(message.removesuffix(HINT if debug else "").split())
    line = "".join(c if c.isprintable() else "?" for c in line)
    with suppress(OSError, ValueError):  # stderr is closed
        if "MASTER_ADDR" in os.environ and not import_module("fmwc.processes").reports_errors():
            return code
        print(f"fmwc: {line[:LONGEST]}", file=sys.stderr, flush=True)
    return code


@contextmanager
def _signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the command like Ctrl-C. Under nohup, SIGHUP stays ignored."""
    before: dict[int, Any] = {}

    def stop(number: int, frame: FrameType | None) -> None:
        for known in before:  # a second signal must not interrupt the cleanup
            signal.signal(known, signal.SIG_IGN)
        raise Interrupted(number)

    for name in ("SIGTERM", "SIGHUP"):  # Windows has no SIGHUP
        number = getattr(signal, name, None)
        if number is None or signal.getsignal(number) == signal.SIG_IGN:
            continue
        with suppress(ValueError):  # only the main thread can set handlers
            before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    main()
