"""Run the blocks of a campaign on Ray Data, on this machine or on a cluster.

Consecutive stages that need the same device are a pool of actors, which load their weights once. Results are files, so
only blocks on their way from one pool to the next pass through Ray, and nothing is lost with it.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from ipaddress import ip_address
from itertools import groupby
from pathlib import Path
from socket import create_connection
from typing import Any

import numpy as np

from fmwc.entry import one_line
from fmwc.errors import FmwcError, UsageError
from fmwc.modes import one_thread
from fmwc.readers import shown
from fmwc.screening.blocks import Outcome, Segment, Work, advance, failed, finish
from fmwc.screening.stages import Compute, Stage

__all__ = ["connected"]

STORE = 200 << 20  # bytes of shared memory of a local Ray
IN_FLIGHT = 2  # blocks per actor: one that runs and one that waits
TRIES = 3  # of a block whose worker died; Ray itself would never give up
CUDA = "cuda"
ENVIRONMENT = {  # Ray reads these when it is imported, and passes them on to its processes
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # 15 by default, which starves on a busy machine
}
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # a local Ray listens on 127.0.0.1 only


class RayError(FmwcError):
    """Ray could not run the blocks."""


class Group:
    """Actor that takes blocks through consecutive stages.

    Arguments:
        segment: The segment of the campaign.
        stages: The first of its stages and the one after the last, as numbers.
        folder: The working directory of the driver, which relative paths refer to.
    """

    def __init__(self, segment: Segment, stages: tuple[int, int], folder: str) -> None:
        self.segment, self.stages = segment, segment.stages[slice(*stages)]
        self.last = stages[1] == len(segment.stages)
        self.folder = folder
        self.opened: list[tuple[Stage, Compute]] = []

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        item = batch["item"][0]
        if not isinstance(item, (Outcome, Exception)):
            try:
                with one_thread():
                    os.chdir(self.folder)
                    self.opened = self.opened or [(stage, stage.open()) for stage in self.stages]
                    item = self.advanced(item)
            except Exception as error:  # no fault of the block: the driver raises it
                passes = isinstance(error, (FmwcError, OSError, ImportError))  # others may not unpickle there
                item = error if passes else RayError(one_line(error, 500))
        column = np.empty(1, object)
        column[0] = item
        return {"item": column}

    def advanced(self, item: Work | int) -> Work | Outcome:
        """Take a block through the stages; return its outcome if it is finished or has failed."""
        block = int(item.block if isinstance(item, Work) else item)
        tries = _tries(self.segment, block)
        with tries.open("ab") as file:  # one byte for each time that a worker began it
            file.write(b".")
        if tries.stat().st_size > TRIES:
            return Outcome(block, "its worker died")
        try:
            work = advance(item if isinstance(item, Work) else self.segment.begin(block), self.opened)
            done = finish(self.segment, work) if self.last else work
        except Exception as error:
            done = failed(block, error)
        tries.unlink(missing_ok=True)
        return done


def _tries(segment: Segment, block: int) -> Path:
    """Return the file that counts how often workers began a block in this run."""
    return segment.path(block).with_suffix(".tries")


@contextmanager
def connected(workers: int, address: str) -> Iterator[Callable[[Segment, list[int]], Iterator[Outcome]]]:
    """Connect to Ray, or start it on this machine, and yield the engine. A connection that exists is used.

    Arguments:
        workers: The number of actors on CPUs; 0 for one per CPU of the cluster.
        address: The address of a running Ray; empty or `local` to start one.
    """
    local = address in ("", "local")
    for name, value in {**ENVIRONMENT, **(LOOPBACK if local else {})}.items():
        os.environ.setdefault(name, value)
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise UsageError(
            f"several workers need Ray, which is not installed ({error}); install it with: pip install 'fmwc[scale]'"
        ) from error
    if ray.is_initialized():
        yield partial(_run, ray, workers)
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    with tempfile.TemporaryDirectory(prefix="fmwc-ray-", ignore_cleanup_errors=True) as folder:
        if local:
            cpus = workers or os.cpu_count() or 1
            options |= {"num_cpus": cpus, "object_store_memory": STORE, "_temp_dir": folder, "include_dashboard": False}
        try:
            host, _, port = address.rpartition(":")
            if host:  # Ray itself would try for minutes
                create_connection((host.strip("[]"), int(port)), timeout=10).close()
            ray.init(address="local" if local else address, **options)
        except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
            at = f"there is no Ray at {shown(address)}; start it with: ray start --head"
            raise RayError(f"{'Ray did not start' if local else at} ({one_line(error)})") from error
        try:
            listens = ray.util.get_node_ip_address()
            if local and not ip_address(listens).is_loopback:
                raise RayError(
                    f"Ray listens on {listens}, where other machines may reach it: a program imported it before this "
                    "command could set its options; use one worker, or start Ray yourself and give its address"
                )
            logging.getLogger("ray.data").setLevel(logging.CRITICAL)
            yield partial(_run, ray, workers)
        finally:
            ray.shutdown()


def _run(ray: Any, workers: int, segment: Segment, todo: list[int]) -> Iterator[Outcome]:
    """Compute blocks; yield the outcome of each as it comes."""
    for block in todo:
        _tries(segment, block).unlink(missing_ok=True)
    blocks = ray.data.from_items(list(todo), override_num_blocks=len(todo))
    start = 0
    for device, stages in groupby(segment.stages, key=lambda stage: stage.device):
        stop = start + len(list(stages))
        made = segment, (start, stop), os.getcwd()
        pool = _pool(ray, segment, device, workers)
        blocks = blocks.map_batches(Group, fn_constructor_args=made, batch_size=1, **pool)
        start = stop
    context = blocks.context
    context.enable_progress_bars = context.print_on_execution_start = False
    context.max_errored_blocks = -1
    for batch in blocks.iter_batches(batch_size=None, prefetch_batches=0):  # each block as soon as it is done
        (item,) = batch["item"]
        if isinstance(item, Exception):
            raise item
        yield item


def _pool(ray: Any, segment: Segment, device: str, workers: int) -> dict[str, Any]:
    """Return the resources of a group: all GPUs, shared with the other groups that need one, or CPUs."""
    found = ray.cluster_resources()
    gpus, cpus = int(found.get("GPU", 0)), int(found.get("CPU", 1))
    sharing = sum(device == CUDA for device, _ in groupby(segment.stages, key=lambda stage: stage.device))
    if device == CUDA and not gpus:
        raise UsageError("Ray found no GPU; use --device cpu, or start Ray where there are GPUs")
    size = gpus if device == CUDA else workers or max(1, cpus - (gpus if sharing else 0))
    resources = {"num_cpus": 0, "num_gpus": 1 / sharing} if device == CUDA else {"num_cpus": 1}
    pool = ray.data.ActorPoolStrategy(
        min_size=1, max_size=size, initial_size=size, max_tasks_in_flight_per_actor=IN_FLIGHT
    )
    return {"compute": pool, **resources}
