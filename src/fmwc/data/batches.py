"""Training data: rows in memory, or batches from a Dataset, a DataLoader or another iterable."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fmwc.data.arrays import fingerprint
from fmwc.errors import DataError, ShapeError, UsageError, require_finite
from fmwc.randomness import derive
from fmwc.state import State, as_conditions, batch_size, channels, tree_map

__all__ = ["Batch", "Batches", "Rows", "in_memory", "require_rows"]

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


class Rows:
    """Samples in memory, from which batches are drawn with replacement.

    Arguments:
        data: The samples, moved to `device` at once.
        cond: Their conditions.
        size: Samples per batch.
        stratified: Draw one sample from each of `size` equal, consecutive slices of the data.
        device: The device of the data.
    """

    def __init__(self, data: State, cond: dict[str, State], size: int, stratified: bool, device: torch.device) -> None:
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
        self.data = tree_map(lambda c: c.to(device), data)
        self.cond = {name: tree_map(lambda c: c.to(device), row) for name, row in cond.items()}

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
        index = self.draw_indices(generator)
        cond = {name: tree_map(lambda c: c[index], row) for name, row in self.cond.items()}
        return tree_map(lambda c: c[index], self.data), cond


class Batches:
    """A sequence of batches that depends on the source and the seed only, so that training can resume within it.

    Arguments:
        source: A DataLoader or another iterable of batches, or a Dataset, which is shuffled (unless it is an
            IterableDataset). A batch is a state, or a pair `(x, cond)` of a state and a mapping of conditions. When the
            source is exhausted, it is iterated again.
        size: Samples per batch, for a Dataset.
        seed: The seed of torch's global generator while a batch is loaded; the generator is restored afterwards.
        convert: A function that is applied to every state.
    """

    def __init__(self, source: Any, size: int, seed: int, convert: Callable[[Any], State] = lambda x: x) -> None:
        if isinstance(source, Dataset):
            listed = not isinstance(source, IterableDataset)
            drop = listed and len(source) > size  # type: ignore[arg-type]
            source = DataLoader(source, size, shuffle=listed, drop_last=drop)
        if not isinstance(source, Iterable):
            raise UsageError(
                "the data must be a tensor with one row per sample, a dict of channels, a Dataset, a DataLoader or "
                f"an iterable of batches; got {type(source).__name__}"
            )
        self.source, self.seed, self.convert = source, seed, convert
        self.loaded = 0
        self.ahead: deque[Batch] = deque()  # loaded by :meth:`head`, but not drawn yet
        self.iterator: Any = None

    def fingerprint(self) -> str:
        """Return a hash of the first batches."""
        x, cond = self.head()
        return fingerprint(x, *cond.values())

    def draw(self, generator: torch.Generator | None = None) -> Batch:
        """Return the next batch. `generator` is ignored."""
        if self.ahead:
            return self.ahead.popleft()
        batch = self._load() or self._load()
        if batch is None:
            raise DataError(
                f"the data ended after {self.loaded} batches; give an iterable that starts again, such as a DataLoader"
            )
        return batch

    def skip(self, count: int) -> None:
        """Advance to the state after `count` draws."""
        if isinstance(self.source, DataLoader) and not isinstance(self.source.dataset, IterableDataset):
            length = len(self.source)
            self.loaded, self.iterator = count // length * length, None
            self.ahead.clear()
            count %= length
        for _ in range(count):
            self.draw()

    def head(self) -> Batch:
        """Return the first batches, concatenated. They can still be drawn."""
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
            self.iterator = iter(self.source) if self.iterator is None else self.iterator
            try:
                item = next(self.iterator)
            except StopIteration:
                self.iterator = None
                return None
        self.loaded += 1
        return self._split(item)

    def _split(self, item: Any) -> Batch:
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
