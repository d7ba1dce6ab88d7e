"""One background thread that runs jobs one after another. Each job reports its progress and can be cancelled."""

from __future__ import annotations

import secrets
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fmwc.errors import FmwcError

__all__ = ["Cancelled", "Job", "Tell", "Worker"]

Tell = Callable[[str, Any], None]  # publishes an event: its name and its data
PERIOD = 0.25  # seconds between two reports of progress
REMEMBERED = 200  # finished jobs


class Cancelled(Exception):
    """Raised inside a job after a user cancelled it."""


@dataclass(eq=False)
class Job:
    """One piece of work.

    Arguments:
        title: What it does, as a noun phrase.
        work: Called with the job in the worker's thread. Its result must be JSON.
        ended: Called with the job when it has ended in any way.
        run: The run that it works on, if any.
    """

    title: str
    work: Callable[[Job], Any]
    ended: Callable[[Job], Any] = lambda job: None
    run: str = ""
    id: str = field(default_factory=lambda: secrets.token_hex(6))
    state: str = "waiting"
    stage: str = ""
    share: float = 0.0
    left: float | None = None
    error: str = ""
    result: Any = None
    tell: Callable[[], None] = lambda: None
    stop: threading.Event = field(default_factory=threading.Event)
    begun: float = 0.0
    told: float = 0.0

    def progress(self, share: float, stage: str | None = None) -> None:
        """Report the finished share of a stage of the work; raise if the job was cancelled."""
        if self.stop.is_set():
            raise Cancelled
        now, new = time.monotonic(), stage is not None and stage != self.stage
        if new:
            self.begun, self.stage = now, stage or ""
        self.share = min(1.0, max(0.0, share))
        self.left = (now - self.begun) * (1 - self.share) / self.share if self.share > 0.02 else None
        if new or now - self.told > PERIOD:
            self.told = now
            self.tell()

    @contextmanager
    def bar(self, stage: str, count: int) -> Iterator[Callable[[int], None]]:
        """Report progress as one of the bars of :mod:`fmwc.progress`."""
        done = 0

        def show(more: int) -> None:
            nonlocal done
            done += more
            self.progress(done / max(1, count))

        self.progress(0, stage)
        yield show

    def as_dict(self) -> dict[str, Any]:
        """Return what the page shows of the job."""
        names = ("id", "title", "run", "state", "stage", "share", "left", "error", "result")
        return {name: getattr(self, name) for name in names}


class Worker:
    """Runs jobs one after another.

    Arguments:
        tell: Publishes every change of a job.
    """

    def __init__(self, tell: Tell) -> None:
        self.tell = tell
        self.jobs: dict[str, Job] = {}
        self.waiting: deque[Job] = deque()
        self.running: Job | None = None
        self.changed = threading.Condition()
        self.closed = False
        self.thread = threading.Thread(target=self._work, name="fmwc-studio-worker", daemon=True)
        self.thread.start()

    def add(self, job: Job) -> Job:
        """Add a job to the end of the queue."""
        job.tell = lambda: self.tell("job", self.shown(job))
        with self.changed:
            ended = [other for other in self.jobs.values() if other.state not in ("waiting", "running")]
            for other in ended[: len(ended) - REMEMBERED]:
                del self.jobs[other.id]
            self.jobs[job.id] = job
            self.waiting.append(job)
            self.changed.notify()
        job.tell()
        return job

    def cancel(self, job: Job) -> None:
        """Cancel a job; one that runs ends at its next report of progress."""
        job.stop.set()
        with self.changed:
            waits = job in self.waiting
            if waits:
                self.waiting.remove(job)
        if waits:
            self._end(job, "cancelled")

    def close(self) -> None:
        """Cancel all jobs and wait for the thread, for at most ten seconds."""
        with self.changed:
            self.closed = True
            self.waiting.clear()
            if self.running is not None:
                self.running.stop.set()
            self.changed.notify()
        self.thread.join(10)

    def shown(self, job: Job) -> dict[str, Any]:
        """Return what the page shows of a job, with the number of jobs before it."""
        with self.changed:
            place = self.waiting.index(job) + (self.running is not None) if job in self.waiting else 0
        return {**job.as_dict(), "place": place}

    def all(self) -> list[dict[str, Any]]:
        """Return all jobs, latest first."""
        return [self.shown(job) for job in reversed([*self.jobs.values()])]

    def _work(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.waiting or self.closed)
                if self.closed:
                    return
                job = self.running = self.waiting.popleft()
                others = [*self.waiting]
            job.state, job.begun = "running", time.monotonic()
            for one in (job, *others):  # the others have moved up
                one.tell()
            state = self._run(job)
            with self.changed:
                self.running = None
            self._end(job, state)

    def _run(self, job: Job) -> str:
        """Run a job; return the state in which it ended."""
        try:
            job.result = job.work(job)
        except Cancelled:
            return "cancelled"
        except (FmwcError, OSError) as error:
            job.error = str(error)
            return "failed"
        except Exception as error:  # the studio must outlive any error of a network or a judge
            traceback.print_exc(file=sys.stderr)
            first = next(iter(str(error).strip().splitlines()), "")
            job.error = f"unexpected {type(error).__name__}: {first} (the terminal shows the traceback)"
            return "failed"
        return "done"

    def _end(self, job: Job, state: str) -> None:
        job.state, job.left = state, None
        job.ended(job)
        job.tell()
