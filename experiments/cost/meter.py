"""Measure the time of tasks in interleaved rounds, so that other load affects all alike, and their peak memory."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fmwc.provenance import Clock


@dataclass
class Meter:
    """Measures every task in every round until the time limit.

    Arguments:
        device: The device of the tasks.
        rounds: The number of measurements per task.
        until: The time limit, by `time.perf_counter`.
        say: Called with progress messages.
    """

    device: torch.device
    rounds: int
    until: float
    say: Callable[[str], None]
    left_out: list[str] = field(default_factory=list)

    def __call__(self, tasks: Mapping[str, Callable[[], object]], what: str) -> dict[str, dict[str, Any]]:
        """Return the median time, its ratio to the first task with the range, and the peak memory of each task.

        Each task first runs twice, to compile and to estimate whether its rounds fit. The time limit may be exceeded
        by these two runs of one task and by one round.
        """
        fitting: dict[str, Callable[[], object]] = {}
        first: dict[str, float] = {}
        memory: dict[str, float | None] = {}

        def fits(more: float) -> bool:
            return time.perf_counter() + self.rounds * (sum(first.values()) + more) < self.until

        for name, task in tasks.items():
            seconds = math.inf
            if fits(0):
                self._seconds(task)
            if fits(0):
                reset_peak(self.device)
                seconds = self._seconds(task)
            if not fits(seconds):
                self.left_out.append(f"{what}: {name}")
                continue
            fitting[name], first[name], memory[name] = task, seconds, peak(self.device)
            self.say(f"{what}: {name}, {seconds:.3g} s")
        times: dict[str, list[float]] = {name: [] for name in fitting}
        rounds = 0
        while rounds < self.rounds and (not rounds or time.perf_counter() + sum(first.values()) < self.until):
            for name, task in fitting.items():
                times[name].append(self._seconds(task))
            rounds += 1
        return {name: row | {"peak_mib": memory[name], "rounds": rounds} for name, row in spread(times).items()}

    def _seconds(self, task: Callable[[], object]) -> float:
        clock = Clock(self.device)
        task()
        return clock.seconds


def spread(times: Mapping[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return the median times, and their ratios to the median of the first task.

    >>> spread({"plain": [2.0, 1.0, 3.0], "read": [4.0, 6.0, 5.0]})["read"]
    {'seconds': 5.0, 'ratio': 2.5, 'lowest': 2.0, 'highest': 3.0}
    """
    if not times:
        return {}
    unit = statistics.median(next(iter(times.values())))
    return {
        name: {
            "seconds": statistics.median(values),
            "ratio": statistics.median(values) / unit,
            "lowest": min(values) / unit,
            "highest": max(values) / unit,
        }
        for name, values in times.items()
    }


def reset_peak(device: torch.device) -> None:
    """Reset the peak memory if possible."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # not Linux, or not permitted: peaks then count from the start of the process
        return


def peak(device: torch.device) -> float | None:
    """Return the peak memory in MiB, of torch on a GPU or else of the process; `None` if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**10
    except (OSError, StopIteration):  # not Linux
        return None
