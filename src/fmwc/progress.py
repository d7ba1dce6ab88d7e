"""Messages and progress bars on stderr. Rich is imported when a bar is shown, so that `fmwc --help` stays fast."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fmwc.readers import shown

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

__all__ = ["sampling_bar", "say_on_stderr", "stages_bar", "training_bar"]


def say_on_stderr(text: str) -> None:
    """Print one line on stderr, control characters as question marks."""
    print(shown(text), file=sys.stderr, flush=True)


def _progress(*more: ProgressColumn) -> Progress:
    """Create a bar on stderr, without markup in descriptions, which may contain a user's names."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), *more)
    return Progress(*columns, console=Console(stderr=True, markup=False, emoji=False, highlight=False))


@contextmanager
def training_bar() -> Iterator[Callable[[str, int, int, float], None]]:
    """Show one bar per stage of training, with the loss."""
    from rich.progress import TextColumn, TimeRemainingColumn

    with _progress(TimeRemainingColumn(), TextColumn("loss {task.fields[loss]:.4f}")) as bar:
        tasks: dict[str, Any] = {}

        def show(stage: str, done: int, total: int, loss: float) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(shown(f"training the {stage}"), total=total, loss=loss)
            bar.update(tasks[stage], completed=done, loss=loss)

        yield show


@contextmanager
def sampling_bar(what: str, count: int | None) -> Iterator[Callable[[int], None]]:
    """Show one bar that counts samples."""
    with _progress() as bar:
        task = bar.add_task(shown(what), total=count)
        yield lambda done: bar.advance(task, done)


@contextmanager
def stages_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Show one bar per stage of work."""
    with _progress() as bar:
        tasks: dict[str, Any] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(shown(stage), total=total)
            bar.update(tasks[stage], completed=done)

        yield show
