"""Training data: rows in memory, or batches from a Dataset, a DataLoader or another iterable."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from fmwc.data.arrays import fingerprint
from fmwc.errors import DataError, ShapeError, UsageError, require_finite
from fmwc.processes import Processes
from fmwc.randomness import derive
from fmwc.state import State, as_conditions, batch_size, channels, tree_map

__all__ = ["Batch", "Batches", "Part", "Rows", "in_memory", "require_rows", "select_rows"]

RESIDENT = 0.25  # data is moved to a GPU at once if it takes at most this share of the free memory
HEAD_ROWS = 20_000  # :meth:`Batches.head` stops loading after this many rows, or this many numbers
HEAD_NUMBERS = 1 << 24

Batch = tuple[State, dict[str, Any]]


def in_memory(data: Any) -> bool:
    """Return whether data is in memory: a tensor, an array, a list of rows, or a dict of channels."""
    return isinstance(data, (Tensor, np.ndarray, list, tuple, dict))


def require_rows(rows: Mapping[str, State], total: int) -> None:
    """Raise unless each entry has one row per sample."""
    for name, row in rows.items():
        for value in channels(row).values():
            if len(value) != total:
                raise ShapeError(f"'{name}' needs one row per sample: got {len(value)} for {total} samples")


class Part(NamedTuple):
    """The samples of a batch that one of several processes trains.

    Attributes:
        x, cond: These samples and their conditions.
        samples: Their indices in the batch.
        total: The number of samples in the batch.
        load: Returns the whole batch.
    """

    x: State
    cond: dict[str, Any]
    samples: Tensor
    total: int
    load: Callable[[], Batch]


def select_rows(batch: Batch, rows: Tensor) -> Batch:
    """Return some samples of a batch, with their conditions."""
    return tree_map(lambda c: c[rows], batch[0]), {k: tree_map(lambda c: c[rows], v) for k, v in batch[1].items()}


def _part() -> tuple[int, int]:
    processes = Processes()
    return processes.index, processes.count


def _by_index(source: Any) -> bool:
    """Return whether a source is a DataLoader that looks up samples by index."""
    return isinstance(source, DataLoader) and not isinstance(source.dataset, IterableDataset)


def _samples(index: int, count: int, total: int) -> Tensor:
    """Return the samples of a batch that a process trains: every `count`-th, as neighbours may be alike in size."""
    if total < count:
        raise UsageError(
            f"a batch of {total} samples cannot be split among {count} processes; use a larger batch, or drop_last=True"
        )
    return torch.arange(index, total, count)


class Rows:
    """Samples in memory, from which batches are drawn with replacement.

    Arguments:
        data: The samples. They are moved to `device` at once, or batch by batch if they take much of a GPU's memory.
        cond: Their conditions.
        size: Samples per batch.
        stratified: Draw one sample from each of `size` equal, consecutive slices of the data.
        device: The device of the data.
        part: The index and the number of processes that each train some samples of every batch; those of
            torch.distributed by default.
    """

    def __init__(
        self,
        data: State,
        cond: dict[str, State],
        size: int,
        stratified: bool,
        device: torch.device,
        part: tuple[int, int] | None = None,
    ) -> None:
        self.total = batch_size(data)
        if self.total < 1:
            raise DataError("the data holds no samples; give at least one")
        for value in channels(data).values():
            require_finite(value, "the training data")
        if stratified and size > self.total:
            raise UsageError(
                f"a stratified batch of {size} needs as many samples; use --set batch={self.total} or less"
            )
        require_rows({"x1": data, **cond}, self.total)
        self.size, self.stratified, self.device = size, stratified, device
        self.resident = _fits(device, [v for row in (data, *cond.values()) for v in channels(row).values()])
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" and not self.resident else None
        move = (lambda c: c.to(device)) if self.resident else lambda c: c
        self.samples = _samples(*(part or _part()), size).to(device if self.resident else "cpu")
        self.data = tree_map(move, data)
        self.cond = {name: tree_map(move, row) for name, row in cond.items()}

    def fingerprint(self) -> str:
        """Return a hash of all samples and conditions."""
        return fingerprint(self.data, *self.cond.values())

    def skip(self, count: int) -> None:
        """Do nothing, because a resume point holds the state of the generator."""

    def draw_indices(self, generator: torch.Generator) -> Tensor:
        """Draw the row indices of a batch."""
        if not self.stratified:
            return torch.randint(self.total, (self.size,), generator=generator, device=self.device)
        position = torch.rand(self.size, generator=generator, device=self.device, dtype=torch.float64)
        position = (position + torch.arange(self.size, device=self.device)) * (self.total / self.size)
        return position.long().clamp_max(self.total - 1)

    def draw(self, generator: torch.Generator) -> Batch:
        """Return a random batch."""
        return self._at(self._draw_rows(generator))

    def draw_part(self, generator: torch.Generator) -> Part:
        """Return this process's samples of a random batch."""
        rows = self._draw_rows(generator)
        return Part(*self._at(rows[self.samples]), self.samples, self.size, lambda: self._at(rows))

    def _draw_rows(self, generator: torch.Generator) -> Tensor:
        if self.resident:
            return self.draw_indices(generator)
        with torch.cuda.stream(self.stream):  # does not wait for the steps in the GPU's queue
            return self.draw_indices(generator).cpu()

    def _at(self, rows: Tensor) -> Batch:
        return select_rows((self.data, self.cond), rows)


def _fits(device: torch.device, tensors: list[Tensor]) -> bool:
    """Return whether tensors may be moved to a device at once."""
    if device.type != "cuda":
        return True
    moved = sum(value.nbytes for value in tensors if not value.is_cuda)
    return moved <= RESIDENT * torch.cuda.mem_get_info(device)[0]


class _OwnSamples:
    """Sampler of the samples that process `index` of `count` trains, out of the batches of another sampler."""

    def __init__(self, loader: DataLoader[Any], index: int, count: int) -> None:
        self.sampler, self.reseeded = loader.batch_sampler, loader.num_workers == 0
        self.index, self.count = index, count
        self.totals: deque[int] = deque()  # samples of the whole batches that are not loaded yet

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[list[Any]]:
        self.totals.clear()
        for batch in self.sampler:  # type: ignore[union-attr]
            self.totals.append(len(batch))
            if self.reseeded:  # for random transforms, which must differ between processes
                torch.manual_seed(derive(torch.initial_seed(), "process", self.index))
            yield [batch[i] for i in _samples(self.index, self.count, len(batch)).tolist()]


def _seeded_worker(index: int, then: Callable[[int], None] | None, worker: int) -> None:
    """Give the workers of every process other random numbers. torch has seeded those of all processes alike."""
    seed = derive(torch.initial_seed(), "process", index)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))  # noqa: NPY002  what a transform may use
    if then is not None:
        then(worker)


def _of_own_samples(loader: DataLoader[Any], samples: _OwnSamples) -> DataLoader[Any]:
    return DataLoader(
        loader.dataset,
        batch_sampler=samples,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=partial(_seeded_worker, samples.index, loader.worker_init_fn),
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


def _not_loaded() -> Batch:
    raise UsageError(
        "samples with different numbers of rows, and pairs within a batch, need the whole batch in every process; give "
        "the data as tensors, or as an iterable of batches"
    )


class Batches:
    """A sequence of batches that depends on the source and the seed only, so that training can resume within it.

    Several processes must be given the same source, and each trains some samples of every batch. If the source is a
    DataLoader that looks up samples by index, each process loads only its own; otherwise it loads the whole batch.

    Arguments:
        source: A DataLoader or another iterable of batches, or a Dataset, which is shuffled (unless it is an
            IterableDataset). A batch is a state, or a pair `(x, cond)` of a state and a mapping of conditions. When the
            source is exhausted, it is iterated again.
        size: Samples per batch, for a Dataset.
        seed: The seed of torch's global generator while a batch is loaded; the generator is restored afterwards.
        convert: A function that is applied to every state.
        whole: Whether to load the whole batch in every process, for losses that couple the samples of a batch.
        part: The index and the number of processes; those of torch.distributed by default.
    """

    def __init__(
        self,
        source: Any,
        size: int,
        seed: int,
        convert: Callable[[Any], State] = lambda x: x,
        *,
        whole: bool = False,
        part: tuple[int, int] | None = None,
    ) -> None:
        if isinstance(source, Dataset):
            listed = not isinstance(source, IterableDataset)
            drop = listed and len(source) > size  # type: ignore[arg-type]
            source = DataLoader(source, size, shuffle=listed, drop_last=drop)
        if not isinstance(source, Iterable):
            raise UsageError(
                "the data must be a tensor with one row per sample, a dict of channels, a Dataset, a DataLoader or "
                f"an iterable of batches; got {type(source).__name__}"
            )
        loader: Any = source
        self.source, self.seed, self.convert = loader, seed, convert
        self.part = index, count = part or _part()
        if count > 1 and isinstance(getattr(source, "sampler", None), DistributedSampler):
            raise UsageError("the DataLoader has a DistributedSampler; leave it out, because every batch is split here")
        by_index = _by_index(source) and loader.batch_sampler is not None
        self.own = _OwnSamples(loader, index, count) if count > 1 and by_index and not whole else None
        self.loader = loader if self.own is None else _of_own_samples(loader, self.own)
        self.loaded = 0
        self.total = 0  # samples of the batch drawn last, in all processes
        self.first: Batch | None = None  # the result of :meth:`head`
        self.ahead: deque[Batch] = deque()  # loaded by :meth:`head`, but not drawn yet
        self.iterator: Any = None

    def fingerprint(self) -> str:
        """Return a hash of the first batches."""
        x, cond = self.head()
        return fingerprint(x, *cond.values())

    def draw(self, generator: torch.Generator | None = None) -> Batch:
        """Return the next batch, or this process's samples of it. `generator` is ignored."""
        if self.ahead:
            return self.ahead.popleft()
        batch = self._load() or self._load()
        if batch is None:
            raise DataError(
                f"the data ended after {self.loaded} batches; give an iterable that starts again, such as a DataLoader"
            )
        return batch

    def draw_part(self, generator: torch.Generator | None = None) -> Part:
        """Return this process's samples of the next batch. `generator` is ignored."""
        batch = self.draw()
        if self.own is not None:
            return Part(*batch, _samples(*self.part, self.total), self.total, _not_loaded)
        total = batch_size(batch[0])
        samples = _samples(*self.part, total)
        return Part(*select_rows(batch, samples), samples, total, lambda: batch)

    def skip(self, count: int) -> None:
        """Advance to the state after `count` draws."""
        if _by_index(self.source):
            length = len(self.source)
            self.loaded, self.iterator = count // length * length, None
            self.ahead.clear()
            count %= length
        for _ in range(count):
            self.draw()

    def head(self) -> Batch:
        """Return the first batches, concatenated. They can still be drawn."""
        if self.first is None:
            self.first = self._head() if self.own is None else self._peek()
        return self.first

    def _peek(self) -> Batch:
        """Return the first whole batches from a separate pass over the source."""
        generator = self.source.generator
        state = None if generator is None else generator.get_state()
        first = Batches(self.source, 0, self.seed, self.convert, part=(0, 1))._head()
        if generator is not None:
            generator.set_state(state)
        return first

    def _head(self) -> Batch:
        rows = numbers = 0
        while rows < HEAD_ROWS and numbers < HEAD_NUMBERS and (batch := self._load()):
            self.ahead.append(batch)
            rows += batch_size(batch[0])
            numbers += sum(value.numel() for value in channels(batch[0]).values())
        if not self.ahead:
            raise DataError("the data holds no batches; give at least one")
        states, conds = zip(*self.ahead, strict=True)
        names = list(conds[0])
        return tree_map(lambda *c: torch.cat(c), *states), {
            name: tree_map(lambda *c: torch.cat(c), *(cond[name] for cond in conds)) for name in names
        }

    def _load(self) -> Batch | None:
        """Return the next batch, or `None` at the end of the source."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(self.seed, "batch", self.loaded))
            self.iterator = iter(self.loader) if self.iterator is None else self.iterator
            try:
                item = next(self.iterator)
            except StopIteration:
                self.iterator = None
                return None
        self.loaded += 1
        if self.own is not None:
            self.total = self.own.totals.popleft()
        return self._split(item)

    def _split(self, item: Any) -> Batch:
        """Return the state and the conditions of a batch."""
        parts = tuple(item) if isinstance(item, (list, tuple)) else (item,)
        if len(parts) > 2 or (len(parts) == 2 and not isinstance(parts[1], Mapping)):
            raise UsageError(
                f"a batch must be x, or a pair (x, cond) with conditions by name, such as (x, {{'y': y}}); got "
                f"{len(parts)} parts: {', '.join(type(part).__name__ for part in parts)}"
            )
        x = self.convert(parts[0])
        cond = {
            k: tree_map(torch.as_tensor, v) for k, v in as_conditions(parts[1] if len(parts) == 2 else None).items()
        }
        require_rows({"x1": x, **cond}, batch_size(x))
        for value in channels(x).values():
            require_finite(value, "the training data")
        return x, cond
