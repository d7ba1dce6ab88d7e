"""Messages and progress bars on stderr. Rich is imported on first use, so that `fmwc --help` stays fast."""

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
    """Print one line on stderr; control characters become question marks."""
    print(shown(text), file=sys.stderr, flush=True)


def _bars(*columns: ProgressColumn) -> Progress:
    """Create progress bars on stderr, without markup in descriptions, which may contain names chosen by users."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    standard = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    # In Jupyter, rich needs ipywidgets, so bars are plain text there too.
    console = Console(stderr=True, force_jupyter=False, markup=False, emoji=False, highlight=False)
    return Progress(*standard, *columns, console=console)


@contextmanager
def _stages(*columns: ProgressColumn) -> Iterator[Callable[..., None]]:
    with _bars(*columns) as bars:
        tasks: dict[str, Any] = {}

        def show(stage: str, done: int, total: int, **numbers: Any) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(shown(stage), total=total, **numbers)
            bars.update(tasks[stage], completed=done, **numbers)

        yield show


@contextmanager
def stages_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Show one progress bar per stage of work, with its rate and the time left."""
    from rich.progress import ProgressColumn, TimeRemainingColumn
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Any) -> Text:
            return Text(f"{task.speed:.1f}/s" if task.speed else "")

    with _stages(Rate(), TimeRemainingColumn()) as show:
        yield show


@contextmanager
def training_bar() -> Iterator[Callable[[str, int, int, float], None]]:
    """Show one progress bar per stage of training, with the loss."""
    from rich.progress import TextColumn, TimeRemainingColumn

    with _stages(TimeRemainingColumn(), TextColumn("loss {task.fields[loss]:.4f}")) as show:
        yield lambda stage, done, total, loss: show(f"training: {stage}", done, total, loss=loss)


@contextmanager
def sampling_bar(what: str, count: int | None) -> Iterator[Callable[[int], None]]:
    """Show one progress bar that counts samples."""
    with _bars() as bars:
        task = bars.add_task(shown(what), total=count)
        yield lambda done: bars.advance(task, done)
