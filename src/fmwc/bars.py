"""Live bars on the terminal, for long work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["sampling_bar", "stages_bar", "training_bar"]

console = Console(stderr=True)


@contextmanager
def training_bar() -> Iterator[Callable[[str, int, int, float], None]]:
    """A live bar, one line a stage of training, with the loss."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
    )
    with Progress(*columns, console=console) as bar:
        tasks: dict[str, Any] = {}

        def show(stage: str, done: int, total: int, loss: float) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(f"training the {stage}", total=total, loss=loss)
            bar.update(tasks[stage], completed=done, loss=loss)

        yield show


@contextmanager
def sampling_bar(what: str, count: int | None) -> Iterator[Callable[[int], None]]:
    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), console=console) as bar:
        task = bar.add_task(what, total=count)
        yield lambda done: bar.advance(task, done)


@contextmanager
def stages_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A live bar, one line a stage of work that comes in stages."""
    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), console=console) as bar:
        tasks: dict[str, Any] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done)

        yield show
