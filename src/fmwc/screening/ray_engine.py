"""Run the blocks of a campaign on Ray Data, on this machine or on a cluster.

Consecutive stages that need the same device are a pool of actors, which load their weights once. Ray runs the block of
a killed actor again; the attempts on disk end this after three. Results are files, so only blocks on their way from one
pool to the next pass through Ray, and nothing is lost with it.
"""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from ipaddress import ip_address
from itertools import groupby
from socket import create_connection
from typing import Any

import numpy as np

from fmwc.entry import one_line
from fmwc.errors import FmwcError, UsageError
from fmwc.modes import one_thread
from fmwc.readers import shown
from fmwc.screening.blocks import Outcome, Segment, SetAsideError, Work, advance, begin, failed, finish
from fmwc.screening.stages import Compute, Stage

__all__ = ["connected"]

STORE = 200 << 20  # bytes of shared memory of a local Ray
IN_FLIGHT = 2  # blocks per actor: one that runs and one that waits
CUDA = "cuda"
ENVIRONMENT = {  # Ray reads these when it is imported, and passes them on to its processes
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",  # 15 by default, which starves on a busy machine
    "RAY_task_actor_unavailable_retry_max_delay_ms": "2000",  # a minute by default
}
CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
LOOPBACK = {CLUSTERS: "0"}  # for a local Ray: it listens on 127.0.0.1 only


class RayError(FmwcError):
    """Ray could not run the blocks."""


# ---- actors ----------------------------------------------------------------------------------------------------------


class Group:
    """Actor that takes blocks through consecutive stages.

    Arguments:
        segment: The segment of the campaign.
        stages: The first of its stages and the one after the last, as numbers.
        driver: The name of this run of the driver.
        folder: The working directory of the driver, which relative paths refer to.
    """

    def __init__(self, segment: Segment, stages: tuple[int, int], driver: str, folder: str) -> None:
        self.segment, self.stages = segment, segment.stages[slice(*stages)]
        self.last = stages[1] == len(segment.stages)
        self.driver, self.folder = driver, folder
        self.opened: list[tuple[Stage, Compute]] = []

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        item = batch["item"][0]
        if not isinstance(item, (Outcome, Exception)):
            try:
                with one_thread():
                    item = self.advanced(item)
            except Exception as error:  # no fault of the block: the driver raises it
                passes = isinstance(error, (FmwcError, OSError, ImportError))  # others may not unpickle there
                item = error if passes else RayError(one_line(error, 500))
        column = np.empty(1, object)
        column[0] = item
        return {"item": column}

    def advanced(self, item: Work | int) -> Work | Outcome:
        """Take a block through the stages; return its outcome if it is finished or has failed.

        The start of each group is an attempt, because Ray runs it again if the actor dies.
        """
        segment, block = self.segment, int(item.block if isinstance(item, Work) else item)
        os.chdir(self.folder)
        if segment.about(block) is not None:  # its outcome was lost
            return Outcome(block)
        try:
            work = begin(segment, block, self.driver)
        except SetAsideError as error:
            return failed(segment, block, self.driver, error)
        try:
            self.opened = self.opened or [(stage, stage.open()) for stage in self.stages]
        except Exception:
            segment.forget(block, len(segment.attempts(block)) - 1)
            raise
        try:
            work = advance(item if isinstance(item, Work) else work, self.opened)
        except Exception as error:
            return failed(segment, block, self.driver, error)
        if self.last:
            return finish(segment, work, self.driver)
        segment.forget(block, len(segment.attempts(block)) - 1)
        return work


# ---- driver ----------------------------------------------------------------------------------------------------------


@contextmanager
def connected(workers: int, address: str) -> Iterator[Callable[[Segment, list[int], str], Iterator[Outcome]]]:
    """Connect to Ray, or start it on this machine, and yield the engine. A connection that exists is used.

    Arguments:
        workers: The number of actors on CPUs; 0 for one per CPU of the cluster.
        address: The address of a running Ray; empty or `local` to start one.
    """
    address = "" if address == "local" else address
    for name, value in ENVIRONMENT.items():
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
    with tempfile.TemporaryDirectory(prefix="fmwc-ray-", ignore_cleanup_errors=True) as folder:
        try:
            _start(ray, workers, address, folder)
            yield partial(_run, ray, workers)
        finally:
            ray.shutdown()


def _start(ray: Any, workers: int, address: str, folder: str) -> None:
    """Connect to Ray, or start it, without its messages."""
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    if address:
        options |= {"address": address}
    else:
        cpus = workers or os.cpu_count() or 1
        options |= {"address": "local", "num_cpus": cpus, "object_store_memory": STORE, "_temp_dir": folder}
    try:
        host, _, port = address.rpartition(":")
        if host:  # Ray itself would try for minutes
            create_connection((host.strip("[]"), int(port)), timeout=10).close()
        with _undisturbed(), nullcontext() if address else _loopback(ray._private.ray_constants):
            ray.init(include_dashboard=None if address else False, **options)
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        where = (
            f"there is no Ray at {shown(address)}; start it with: ray start --head" if address else "Ray did not start"
        )
        raise RayError(f"{where} ({one_line(error)})") from error
    listens = ray.util.get_node_ip_address()
    if not address and not ip_address(listens).is_loopback:
        raise RayError(
            f"Ray listens on {listens}, where other machines may reach it, and not on 127.0.0.1 only; use one worker, "
            "or start Ray yourself and give its address"
        )
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    with suppress(AttributeError):  # deaths of actors are printed, and no option prevents it
        ray._private.worker.print_to_stdstream = lambda *_, **__: None


@contextmanager
def _loopback(constants: Any) -> Iterator[None]:
    """Let a Ray that starts listen on 127.0.0.1 only. Its constant is older than this if a program imported Ray."""
    enabled, before = constants.ENABLE_RAY_CLUSTER, os.environ.get(CLUSTERS)
    try:
        constants.ENABLE_RAY_CLUSTER = False
        os.environ.update(LOOPBACK)  # for the processes that Ray starts
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = enabled
        os.environ.pop(CLUSTERS, None)
        os.environ.update({} if before is None else {CLUSTERS: before})


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Discard what this process and those that it starts write to stderr, and keep the handler of SIGTERM."""
    handler, saved, null = signal.getsignal(signal.SIGTERM), os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _run(ray: Any, workers: int, segment: Segment, todo: list[int], driver: str) -> Iterator[Outcome]:
    """Compute blocks; yield the outcome of each as it comes. A block without one belongs to the next call."""
    blocks = ray.data.from_items(list(todo), override_num_blocks=len(todo))
    start = 0
    for device, stages in groupby(segment.stages, key=lambda stage: stage.device):
        stop = start + len(list(stages))
        made = segment, (start, stop), driver, os.getcwd()
        pool = _pool(ray, segment, device, workers)
        blocks = blocks.map_batches(Group, fn_constructor_args=made, batch_size=1, **pool)
        start = stop
    context = blocks.context
    context.enable_progress_bars = context.print_on_execution_start = False
    context.max_errored_blocks = -1
    count = 0
    try:
        for batch in blocks.iter_batches(batch_size=None, prefetch_batches=0):  # each block as soon as it is done
            (item,), count = batch["item"], count + 1
            if isinstance(item, Exception):
                raise item
            yield item
    except ray.exceptions.RayError as error:
        if not count:  # else the next call goes on
            raise RayError(f"Ray ended without a result ({one_line(error, 500)})") from error


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
