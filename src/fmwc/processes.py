"""Processes that train together, one per GPU or CPU core, as started by torchrun.

If torch.distributed is initialised, :func:`fmwc.training.train` splits every batch over the processes, and all of them
must call it. The first process reports and writes files; the others read them, so all need the same file system.
"""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fmwc.errors import MismatchError, StoppedError, UsageError
from fmwc.files import Folder, resumed
from fmwc.identity import digest
from fmwc.provenance import pick_device

__all__ = ["Processes", "first_before_others", "joined", "reports_errors", "resumed_by_first"]

ENVIRONMENT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # set by torchrun
# The other processes wait while the first one draws samples and fits the reference. If a process ends, connections
# close, or torchrun ends the others; so the time limit need not be short.
TIMEOUT = timedelta(days=1)


class Processes:
    """The processes of this run, which is one process unless torch.distributed is initialised.

    Attributes:
        index: The number of this process, from 0.
        count: The number of processes.
    """

    def __init__(self) -> None:
        self.joined = dist.is_available() and dist.is_initialized()
        self.index, self.count = (dist.get_rank(), dist.get_world_size()) if self.joined else (0, 1)

    @property
    def first(self) -> bool:
        """Whether this is the process that reports and writes."""
        return self.index == 0

    @cached_property
    def nccl(self) -> bool:
        """Whether GPUs communicate directly, which a CUDA graph can capture."""
        return "cuda:nccl" in self._backends

    @cached_property
    def _backends(self) -> str:
        return str(dist.get_backend_config()) if self.joined else ""  # such as cpu:gloo,cuda:nccl

    def sum(self, value: Tensor) -> Tensor:
        """Replace a tensor by its sum over the processes."""
        if self.joined:
            self._call(dist.all_reduce, value)
        return value

    @torch.no_grad()
    def copy_from_first(self, values: Iterable[Tensor]) -> None:
        """Replace tensors by those of the first process."""
        for value in values if self.joined else ():
            same = value.contiguous()
            self._call(dist.broadcast, same, 0)
            value.copy_(same)

    def first_says(self, flag: bool) -> bool:
        """Return the flag of the first process."""
        return bool(self._of_all([flag])[0, 0]) if self.joined else flag

    def wait(self) -> None:
        """Wait until every process is here."""
        self._of_all([0])

    def agree(self, values: Mapping[str, Any], remedy: str) -> None:
        """Raise unless these values are the same in every process."""
        if not self.joined:
            return
        for told in ({"names of the settings": list(values)}, values):
            everywhere = self._of_all([int(digest(value)[:15], 16) for value in told.values()])
            if other := [name for name, column in zip(told, everywhere.T, strict=True) if len(column.unique()) > 1]:
                raise MismatchError(f"the {self.count} processes differ in: {', '.join(other)}; {remedy}")

    def _of_all(self, numbers: list[int]) -> Tensor:  # -> (processes, numbers)
        device = "cuda" if self._backends and "cpu:" not in self._backends else "cpu"
        table = torch.zeros(self.count, len(numbers), dtype=torch.int64, device=device)
        table[self.index] = torch.tensor(numbers, device=device)
        return self.sum(table).cpu()

    def _call(self, function: Any, *args: Any) -> None:
        try:
            function(*args)
        except RuntimeError as error:  # of gloo or NCCL
            raise StoppedError(
                f"process {self.index} of {self.count} lost contact with the others, of which one has ended; run the "
                "same command again to resume"
            ) from error


@contextmanager
def joined(name: str) -> Iterator[torch.device]:
    """Join the other processes if torchrun started this one; yield the device of this process.

    Arguments:
        name: `cpu`; `auto` or `cuda`, so that each process has its own GPU; or one GPU for all, such as `cuda:0`.
    """
    device = pick_device(name)
    if not all(variable in os.environ for variable in ENVIRONMENT):
        yield device
        return
    local, here = int(os.environ["LOCAL_RANK"]), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    shared = device.index is not None and here > 1  # NCCL needs one GPU per process
    if device.type == "cuda" and device.index is None:
        if here > (present := torch.cuda.device_count()):
            raise UsageError(
                f"{here} processes need {here} GPUs, but this machine has {present}; use --nproc-per-node={present}, "
                "or --device cuda:0 to share one GPU, or --device cpu"
            )
        device = torch.device("cuda", local)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" and not shared else "gloo", timeout=TIMEOUT)
    with warnings.catch_warnings():
        if not Processes().first:  # it says nothing, and leaves nothing to clean up
            warnings.simplefilter("ignore")
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        yield device
    dist.destroy_process_group()  # not after an error: this process must report it before the others lose contact


@contextmanager
def resumed_by_first(path: Path, identity: Mapping[str, Any], *, force: bool) -> Iterator[Folder]:
    """Own a folder that resumes (:func:`fmwc.files.resumed`) in the first process.

    The other processes get a folder that they only read. At the end, they wait until the first one has finished it.
    """
    processes = Processes()
    processes.agree(identity, "start them with the same command, files and versions")
    if processes.first:
        with resumed(path, identity, force=force) as folder:  # after an error, the others lose contact
            processes.first_says(folder.finished)
            yield folder
    else:
        yield Folder(path, processes.first_says(False))
    processes.wait()


@contextmanager
def first_before_others() -> Iterator[None]:
    """Run a block in the first process, and then in the others, which read the files that it wrote."""
    processes = Processes()
    if not processes.first:
        processes.wait()
    yield
    if processes.first:
        processes.wait()


def reports_errors() -> bool:
    """Return whether this process prints its error: in a run of several processes, only the first that has one."""
    if int(os.environ.get("WORLD_SIZE") or 1) < 2 or not all(variable in os.environ for variable in ENVIRONMENT):
        return True
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=5), wait_for_workers=False)
        return store.add(f"fmwc/errors/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", 1) == 1
    except (RuntimeError, ValueError):
        return True
