"""Training data that comes in batches: from a Dataset, a DataLoader, or another iterable."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fmwc.errors import DataError, ShapeError, UsageError, require_finite
from fmwc.randomness import derive
from fmwc.state import State, as_conditions, batch_size, channels, tree_map

__all__ = ["Batch", "Batches", "in_memory", "require_rows"]

HEAD_ROWS = 20_000  # what :meth:`Batches.head` holds in memory, at most, unless one batch is more
HEAD_NUMBERS = 1 << 24

Batch = tuple[State, dict[str, Any]]


def in_memory(data: Any) -> bool:
    """Whether data is rows in memory: a tensor, an array, a list of rows, or a dict of channels."""
    return isinstance(data, (Tensor, np.ndarray, list, tuple, dict))


def require_rows(rows: Mapping[str, State], total: int) -> None:
    """Raise unless every one of these has a row per sample."""
    for name, row in rows.items():
        for value in channels(row).values():
            if len(value) != total:
                raise ShapeError(f"'{name}' needs one row per sample: got {len(value)} for {total} samples")


class Batches:
    """Batches in a sequence that depends on the source and the seed only, so that a training can resume within it.

    Arguments:
        source: A DataLoader or another iterable of batches; a Dataset, which is shuffled (unless it is an
            IterableDataset). A batch is a state, or a pair `(x, cond)` of a state and a mapping of conditions. Passes
            over the source follow one another.
        size: Samples per batch, for a Dataset.
        seed: Seeds torch's global generator while a batch is loaded; it is restored afterwards.
        convert: Applied to every state.
    """

    def __init__(self, source: Any, size: int, seed: int, convert: Callable[[Any], State] = lambda x: x) -> None:
        if isinstance(source, Dataset):
            listed = not isinstance(source, IterableDataset)
            drop = listed and len(source) > size  # type: ignore[arg-type]
            source = DataLoader(source, size, shuffle=listed, drop_last=drop)
        if not isinstance(source, Iterable):
            raise UsageError(
                "the data is a tensor with a row per sample, a dict of channels, a Dataset, a DataLoader or an "
                f"iterable of batches; got {type(source).__name__}"
            )
        self.source, self.seed, self.convert = source, seed, convert
        self.loaded = 0
        self.ahead: deque[Batch] = deque()  # loaded by :meth:`head`, not yet taken
        self.pass_: Any = None

    def take(self) -> Batch:
        """Return the next batch."""
        if self.ahead:
            return self.ahead.popleft()
        found = self._load() or self._load()
        if found is None:
            raise DataError(
                f"the data ended after {self.loaded} batches; give an iterable that starts again, such as a DataLoader"
            )
        return found

    def skip(self, count: int) -> None:
        """Move to where `count` batches have been taken since the start."""
        if isinstance(self.source, DataLoader) and not isinstance(self.source.dataset, IterableDataset):
            length = len(self.source)
            self.loaded, self.pass_ = count // length * length, None
            self.ahead.clear()
            count %= length
        for _ in range(count):
            self.take()

    def head(self) -> Batch:
        """Return the first batches of the first pass as one, without taking them."""
        rows = numbers = 0
        while rows < HEAD_ROWS and numbers < HEAD_NUMBERS and (batch := self._load()):
            self.ahead.append(batch)
            rows += batch_size(batch[0])
            numbers += sum(value.numel() for value in channels(batch[0]).values())
        if not self.ahead:
            raise DataError("the data holds no batch")
        states, conds = zip(*self.ahead, strict=True)
        names = list(conds[0])
        return tree_map(lambda *c: torch.cat(c), *states), {
            name: tree_map(lambda *c: torch.cat(c), *(cond[name] for cond in conds)) for name in names
        }

    def _load(self) -> Batch | None:
        """Return the next batch of this pass over the source; `None` at its end."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(self.seed, "batch", self.loaded))
            self.pass_ = iter(self.source) if self.pass_ is None else self.pass_
            try:
                item = next(self.pass_)
            except StopIteration:
                self.pass_ = None
                return None
        self.loaded += 1
        return self._split(item)

    def _split(self, item: Any) -> Batch:
        parts = tuple(item) if isinstance(item, (list, tuple)) else (item,)
        if len(parts) > 2 or (len(parts) == 2 and not isinstance(parts[1], Mapping)):
            raise UsageError(
                f"a batch is x, or a pair (x, cond) with conditions by name, such as (x, {{'y': y}}); got {len(parts)} "
                f"parts: {', '.join(type(part).__name__ for part in parts)}"
            )
        x = self.convert(parts[0])
        cond = {
            k: tree_map(torch.as_tensor, v) for k, v in as_conditions(parts[1] if len(parts) == 2 else None).items()
        }
        require_rows({"x1": x, **cond}, batch_size(x))
        for value in channels(x).values():
            require_finite(value, "the training data")
        return x, cond
