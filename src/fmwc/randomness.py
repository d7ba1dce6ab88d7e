"""Random numbers that do not depend on how a run is split into batches.

Sample i gets the same random numbers in any batch. Numbers are drawn for fixed blocks of samples, with a separate seed
for each block and call, and a batch uses its rows of the blocks.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable
from typing import Any, Protocol, SupportsIndex

import torch
from torch import Tensor

from fmwc.errors import ShapeError

__all__ = [
    "BLOCK",
    "Blocks",
    "Randomness",
    "Same",
    "Share",
    "Stream",
    "as_randomness",
    "derive",
    "normal_rows",
    "signs",
]

# Samples that share one seed. Larger blocks waste more at the borders of a batch; smaller ones are seeded more often.
# If a sample needs many numbers (the noise of an image layer), fewer samples share a seed. GPUs prefer larger blocks.
BLOCK = 1024
NUMBERS = {"cpu": 2**19, "cuda": 2**22}


def derive(*parts: int | str) -> int:
    """Return a 63-bit seed derived from parts, the same on every machine.

    >>> derive(0, "x0") == derive(0, "x0"), derive(0, "x0") == derive(1, "x0")
    (True, False)
    """
    plain = tuple(p if isinstance(p, str) else operator.index(p) for p in parts)  # numpy's integers too
    digest = hashlib.sha256(repr(plain).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class Randomness(Protocol):
    """Interface of sources of random numbers."""

    def normal(self, like: Tensor) -> Tensor:
        """Return standard normal numbers of the shape, type and device of `like`."""

    def uniform(self, like: Tensor) -> Tensor:
        """Return numbers uniform in [0, 1) of the shape, type and device of `like`."""


class Stream:
    """Random numbers from one generator, in the order of the calls (for training).

    Arguments:
        generator: A generator on the device of the tensors; torch's global one if `None`.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator

    def normal(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self.generator, dtype=like.dtype, device=like.device)

    def uniform(self, like: Tensor) -> Tensor:
        return torch.rand(like.shape, generator=self.generator, dtype=like.dtype, device=like.device)


class Share:
    """Random numbers of some samples of a batch, which are trained in this process: those of the whole batch, selected.

    Processes that have equal streams and train different samples of a batch use the same numbers as one process with
    the whole batch. In a tensor, each sample has the same number of consecutive rows, or rows according to an owner
    (:func:`normal_rows`).

    Arguments:
        stream: The source of the numbers of the whole batch.
        samples: The indices of this process's samples in the batch, `(n,)`.
        total: The number of samples in the batch.
        load: Returns the whole batch and its conditions.
    """

    def __init__(self, stream: Randomness, samples: Tensor, total: int, load: Callable[[], Any]) -> None:
        self.stream, self.samples, self.total, self.load = stream, samples, total, load
        self.count = samples.shape[0]
        self.part = self.count / total  # of the batch
        self.loaded: Any = None
        # By pattern of layer names: the number of rows in the whole batch, the indices of these rows, and
        # `part` times the number of used rows in the whole batch (at least 1).
        self.owned: dict[str, tuple[int, Tensor, Tensor]] = {}

    def batch(self) -> Any:
        """Return the whole batch and its conditions."""
        if self.loaded is None:
            self.loaded = self.load()
        return self.loaded

    def normal(self, like: Tensor) -> Tensor:
        return self._of_samples(self.stream.normal, like)

    def uniform(self, like: Tensor) -> Tensor:
        return self._of_samples(self.stream.uniform, like)

    def normal_rows(self, like: Tensor, pattern: str) -> Tensor:
        """Return standard normal numbers for rows whose owners are known (`owned`)."""
        total, rows, _ = self.owned[pattern]
        return self.stream.normal(like.new_empty(()).expand(total, *like.shape[1:]))[rows]

    def _of_samples(self, draw: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
        if not like.ndim or like.shape[0] % self.count:
            raise ShapeError(
                f"random numbers of shape {tuple(like.shape)} do not have one row, or equally many rows, for each of "
                f"{self.count} samples; train with one process"
            )
        each = like.shape[0] // self.count
        whole = draw(like.new_empty(()).expand(self.total * each, *like.shape[1:]))
        return whole.unflatten(0, (self.total, each))[self.samples].flatten(0, 1)


def normal_rows(randomness: Randomness, like: Tensor, pattern: str) -> Tensor:
    """Return standard normal numbers for a layer's rows.

    Arguments:
        randomness: Their source.
        like: A tensor of the same shape, type and device.
        pattern: The pattern of the layers whose rows the network declares; empty if rows are ordered by sample, and
            each has equally many.
    """
    if pattern and isinstance(randomness, Share):
        return randomness.normal_rows(like, pattern)
    return randomness.normal(like)


class Blocks:
    """Random numbers for the samples `start … start + count − 1` of a run (for sampling).

    A tensor whose number of rows is a multiple of the number of samples is filled sample by sample. Any other tensor is
    filled from one seed per batch, which is reproducible only with the same batches.
    """

    def __init__(self, seed: int, start: int, count: int) -> None:
        self.seed, self.start, self.count, self.calls = seed, start, count, 0

    def normal(self, like: Tensor) -> Tensor:
        return self._fill(like, "normal_")

    def uniform(self, like: Tensor) -> Tensor:
        return self._fill(like, "uniform_")

    def _fill(self, like: Tensor, method: str) -> Tensor:
        self.calls += 1
        generator = torch.Generator(device=like.device)
        rows = like.shape[0] if like.ndim else 0
        if rows == 0 or rows % self.count:
            generator.manual_seed(derive(self.seed, self.calls, "whole", self.start))
            return getattr(torch.empty_like(like), method)(generator=generator)
        each = rows // self.count
        size = _block(each * like[0].numel(), like.device.type)
        pieces = []
        stop = self.start + self.count
        for block in range(self.start // size, (stop - 1) // size + 1):
            generator.manual_seed(derive(self.seed, self.calls, block))
            full = torch.empty((size, each, *like.shape[1:]), dtype=like.dtype, device=like.device)
            getattr(full, method)(generator=generator)
            first = block * size
            pieces.append(full[max(self.start - first, 0) : min(stop - first, size)])
        return torch.cat(pieces).reshape(like.shape)


class Same:
    """Random numbers that are the same for each of `count` samples."""

    def __init__(self, seed: int, count: int) -> None:
        self.one, self.count = Blocks(seed, 0, 1), count

    def normal(self, like: Tensor) -> Tensor:
        return self.one.normal(self._row(like)).expand_as(like).clone()

    def uniform(self, like: Tensor) -> Tensor:
        return self.one.uniform(self._row(like)).expand_as(like).clone()

    def _row(self, like: Tensor) -> Tensor:
        if not like.ndim or like.shape[0] != self.count:
            raise ShapeError(f"random numbers of shape {tuple(like.shape)} do not have one row for each sample")
        return like[:1]


def signs(randomness: Randomness, like: Tensor) -> Tensor:
    """Return ±1 with equal probability, of the shape, type and device of `like`: probes w with E[wwᵀ] = 1.

    >>> signs(as_randomness(0, torch.device("cpu")), torch.empty(4)).square()
    tensor([1., 1., 1., 1.])
    """
    return (randomness.uniform(like) < 0.5).to(like.dtype) * 2 - 1


def _block(numbers: int, device: str = "cpu") -> int:
    """Return how many samples share a seed if each needs `numbers` numbers: a power of two, at most `BLOCK`.

    >>> _block(2), _block(32 * 28 * 28)
    (1024, 16)
    """
    fitting = NUMBERS.get(device, NUMBERS["cpu"]) // max(numbers, 1)
    return min(BLOCK, 1 << max(0, fitting.bit_length() - 1))


def as_randomness(source: Randomness | torch.Generator | int | None, device: torch.device) -> Randomness:
    """Return a source of randomness for a source, a generator, a seed, or `None` (torch's global generator)."""
    if source is None or isinstance(source, torch.Generator):
        return Stream(source)
    if isinstance(source, SupportsIndex):
        return Stream(torch.Generator(device=device).manual_seed(operator.index(source)))
    return source
