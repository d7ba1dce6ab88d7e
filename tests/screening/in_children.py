"""Run campaigns in child processes, which are killed or measured. A script of its own, because pytest must not fork.

python in_children.py kills FOLDER SEED     kill the driver at random moments until the campaign is complete
python in_children.py memory FOLDER COUNT   print the peak of the memory of a campaign, in kilobytes
"""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import fmwc.screening

torch.set_num_threads(1)


def child(work: Callable[[], object], kill_after: float | None = None) -> tuple[int, int]:
    """Run a function in a child; return its status and the peak of its memory."""
    if not (pid := os.fork()):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        work()
        os._exit(0)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    return status, usage.ru_maxrss


def points(folder: str) -> object:
    return fmwc.screening.screen("checkerboard", 160, out=folder, batch=16, block=16, keep=0.5, budget=10)


def kills(folder: str, seed: int) -> None:
    moment, begun = random.Random(seed), time.monotonic()
    assert not child(lambda: points(f"{folder}-undisturbed"))[0]
    seconds = time.monotonic() - begun
    ended = [child(lambda: points(folder), moment.uniform(0.1, 0.6) * seconds)[0] for _ in range(4)]
    assert not child(lambda: points(folder))[0]
    print(sum(map(bool, ended)))


def memory(folder: str, count: int) -> None:
    sys.path.insert(0, str(Path(folder).parent))
    options = {"network": "wide_nets:made", "score": "spread", "steps": 1, "batch": 1024, "keep": 0.3, "budget": 10}
    status, peak = child(lambda: fmwc.screening.screen(f"{folder}-net", count, out=folder, **options))
    assert not status
    print(peak)


if __name__ == "__main__":
    what, folder, *rest = sys.argv[1:]
    {"kills": kills, "memory": memory}[what](folder, *map(int, rest))
