"""Seeds that do not depend on how a run is split into batches.

Sample number i gets the same random numbers whichever batch it falls in: numbers are drawn for fixed blocks of
samples, each block and each call from a seed of its own, and a batch takes its rows of them.
"""

from __future__ import annotations

import hashlib
import operator
from typing import Protocol, SupportsIndex

import torch
from torch import Tensor

__all__ = ["BLOCK", "Blocks", "Given", "Noting", "Randomness", "Stream", "as_randomness", "derive", "signs"]

# Samples that share one seed: larger wastes more at the borders of a batch, smaller seeds more often. Where one sample
# takes many numbers (the noise of an image's layer), fewer share a seed; a GPU is better off with larger fills.
BLOCK = 1024
NUMBERS = {"cpu": 2**19, "cuda": 2**22}


def derive(*parts: int | str) -> int:
    """A 63-bit seed from parts, the same on every machine.

    >>> derive(0, "x0") == derive(0, "x0"), derive(0, "x0") == derive(1, "x0")
    (True, False)
    """
    plain = tuple(p if isinstance(p, str) else operator.index(p) for p in parts)  # numpy's integers too
    digest = hashlib.sha256(repr(plain).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class Randomness(Protocol):
    """Where a pass takes its random numbers from."""

    def normal(self, like: Tensor) -> Tensor:
        """Standard normal numbers of the shape, type and device of `like`."""

    def uniform(self, like: Tensor) -> Tensor:
        """Numbers uniform in [0, 1), likewise."""


class Stream:
    """Random numbers from one generator, in the order they are asked for. Training uses it.

    Arguments:
        generator: A generator on the device of the tensors; `None` is torch's own.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator

    def normal(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self.generator, dtype=like.dtype, device=like.device)

    def uniform(self, like: Tensor) -> Tensor:
        return torch.rand(like.shape, generator=self.generator, dtype=like.dtype, device=like.device)


class Blocks:
    """Random numbers for the samples `start … start + count − 1` of a run. Sampling uses it.

    A tensor whose rows are a whole number per sample is filled sample by sample. Any other tensor is filled from one
    seed for the whole batch: reproducible, but only with the same split.
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


class Noting:
    """Creates randomness that notes what is asked of another, and what it gave."""

    def __init__(self, source: Randomness) -> None:
        self.source = source
        self.asked: list[tuple[str, Tensor]] = []
        self.drawn: list[Tensor] = []

    def _note(self, method: str, like: Tensor) -> Tensor:
        self.asked.append((method, like.detach().new_empty(()).expand(like.shape)))  # its shape, without its memory
        self.drawn.append(getattr(self.source, method)(like))
        return self.drawn[-1]

    def normal(self, like: Tensor) -> Tensor:
        return self._note("normal", like)

    def uniform(self, like: Tensor) -> Tensor:
        return self._note("uniform", like)


class Given:
    """Creates randomness that gives what was drawn before, in order."""

    def __init__(self, drawn: list[Tensor]) -> None:
        self.rest = iter(drawn)

    def normal(self, like: Tensor) -> Tensor:
        return next(self.rest)

    def uniform(self, like: Tensor) -> Tensor:
        return next(self.rest)


def signs(randomness: Randomness, like: Tensor) -> Tensor:
    """±1 with equal chance, of the shape, type and device of `like`: probes w with E[wwᵀ] = 1.

    >>> signs(as_randomness(0, torch.device("cpu")), torch.empty(4)).square()
    tensor([1., 1., 1., 1.])
    """
    return (randomness.uniform(like) < 0.5).to(like.dtype) * 2 - 1


def _block(numbers: int, device: str = "cpu") -> int:
    """How many samples share a seed, if each takes so many numbers: a power of two, at most `BLOCK`.

    >>> _block(2), _block(32 * 28 * 28)
    (1024, 16)
    """
    fitting = NUMBERS.get(device, NUMBERS["cpu"]) // max(numbers, 1)
    return min(BLOCK, 1 << max(0, fitting.bit_length() - 1))


def as_randomness(source: Randomness | torch.Generator | int | None, device: torch.device) -> Randomness:
    """A seed, a generator, a source already, or nothing (torch's own generator)."""
    if source is None or isinstance(source, torch.Generator):
        return Stream(source)
    if isinstance(source, SupportsIndex):
        return Stream(torch.Generator(device=device).manual_seed(operator.index(source)))
    return source
