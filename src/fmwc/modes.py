"""Temporary changes of how a network runs, which are undone whatever happens.

Training mode, hooks and the compiler's stance belong to a module or to the process, so all threads share them. They are
changed when the first of several overlapping calls begins, and restored when the last one ends (:class:`Shared`). State
of one thread or task lives in context variables (:class:`Bound`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Hashable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import RLock, get_ident
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import torch
from torch import nn

__all__ = [
    "SMALL",
    "Bound",
    "Scope",
    "Scopes",
    "Shared",
    "as_compiled",
    "compiling",
    "eagerly",
    "evaluating",
    "one_thread",
    "tensor_float",
]

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Scope:
    """A change that lasts for a `with` block, or for one call (:meth:`call`).

    Subclasses define `open` and `close`. `close` may be called more than once, after an `open` that was interrupted
    anywhere, and on an object whose `__init__` was interrupted. This class changes nothing.

    An asynchronous exception (Ctrl-C) can interrupt a `with` statement between its body and the first line of
    `__exit__`. :meth:`call` closes even then; after a `with` block, the change is undone when the exception's traceback
    is released.
    """

    def open(self) -> None:
        """Make the change."""

    def close(self) -> None:
        """Undo it."""

    def __enter__(self) -> None:
        try:
            self.open()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def call(self, function: Callable[..., T], /, *args: Any, **options: Any) -> T:
        """Return `function(*args, **options)`, called inside the scope."""
        grad = torch.is_grad_enabled()
        try:
            self.open()
            return function(*args, **options)
        except BaseException:
            torch._C._set_grad_enabled(grad)  # an interrupt may have prevented torch's no_grad from restoring it
            raise
        finally:
            try:
                self.close()
            except BaseException:  # an interrupt while closing
                self.close()
                raise


class Scopes(Scope):
    """Several scopes as one, opened in order and closed in reverse."""

    parts: tuple[Scope, ...] = ()

    def __init__(self, *parts: Scope) -> None:
        self.parts = parts

    def open(self) -> None:
        for part in self.parts:
            part.open()

    def close(self) -> None:
        for part in reversed(self.parts):
            part.close()


class Bound(Scope):
    """A scope in which a context variable holds a value, for this thread and task alone.

    Arguments:
        variable: The variable.
        value: A distinct object, by whose identity the scope recognises that the variable still holds its value.
    """

    opened = False

    def __init__(self, variable: ContextVar[Any], value: Any) -> None:
        self.variable, self.value = variable, value

    def open(self) -> None:
        self.before, self.opened = self.variable.get(), True
        self.variable.set(self.value)

    def close(self) -> None:
        if self.opened and self.variable.get() is self.value:
            self.variable.set(self.before)


@dataclass
class _Entry:
    before: Any
    holders: dict[int, int] = field(default_factory=dict)  # the thread of each holder


class Shared(Generic[K]):
    """A temporary change of shared objects. Overlapping calls share the change, and the last one to end restores it.

    Arguments:
        read: `read(key)`: the object's value before the change.
        write: `write(key)`: make the change, or do nothing if it is made already; every holder calls it.
        restore: `restore(key, before)`: undo the change.
    """

    def __init__(self, read: Callable[[K], Any], write: Callable[[K], None], restore: Callable[[K, Any], None]) -> None:
        self.read, self.write, self.restore = read, write, restore
        self.entries: dict[K, _Entry] = {}
        self.lock = RLock()
        _ALL.add(self)

    def holding(self, keys: Iterable[K]) -> Scope:
        """Return a scope in which these objects are changed."""
        return _Hold(self, list(keys))

    def hold(self, holder: int, keys: list[K]) -> None:
        """Make the change for a holder."""
        with self.lock:
            for key in keys:
                if key not in self.entries:
                    self.entries[key] = _Entry(self.read(key))  # read before the change
                self.entries[key].holders[holder] = get_ident()
                self.write(key)

    def release(self, holder: int, keys: list[K]) -> None:
        """End the change for a holder, and restore objects that no other holder needs."""
        with self.lock:
            for key in keys:
                if (entry := self.entries.get(key)) is None:
                    continue
                entry.holders.pop(holder, None)
                if not entry.holders:
                    self.restore(key, entry.before)
                    self.entries.pop(key, None)

    def forked(self) -> None:
        """Release what other threads held, in the child of a fork, where only the calling thread exists."""
        self.lock = RLock()  # another thread may have held the old one
        for key, entry in list(self.entries.items()):
            for holder in [holder for holder, thread in entry.holders.items() if thread != get_ident()]:
                self.release(holder, [key])


_ALL: WeakSet[Shared[Any]] = WeakSet()


def _forked() -> None:
    for shared in list(_ALL):
        shared.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


class _Hold(Scope, Generic[K]):
    held = False

    def __init__(self, shared: Shared[K], keys: list[K]) -> None:
        self.shared, self.keys = shared, keys

    def open(self) -> None:
        self.held = True
        self.shared.hold(id(self), self.keys)

    def close(self) -> None:
        if self.held:
            self.shared.release(id(self), self.keys)
            self.held = False


def _set_training(module: nn.Module, training: bool) -> None:
    if module.training != training:
        module.training = training


_MODES: Shared[nn.Module] = Shared(lambda m: m.training, lambda m: _set_training(m, False), _set_training)
_PRECISION: Shared[str] = Shared(
    lambda _: torch.get_float32_matmul_precision(),
    lambda _: torch.set_float32_matmul_precision("high"),
    lambda _, before: torch.set_float32_matmul_precision(before),
)
_STANCE: Shared[str] = Shared(
    lambda _: sys.modules["torch._dynamo.eval_frame"]._stance,
    lambda _: torch.compiler.set_stance("force_eager") and None,
    lambda _, before: sys.modules["torch._dynamo.eval_frame"]._set_stance(before) and None,
)


def evaluating(network: Any) -> Scope:
    """Return a scope in which a module, if it is one, is in evaluation mode.

    All threads share the mode of a module: it is in evaluation mode while any thread is in the scope, and its own mode
    is restored when the last one ends. To train a network with dropout while another thread samples it, give the
    sampler a copy.
    """
    return _MODES.holding(network.modules()) if isinstance(network, nn.Module) else Scope()


def tensor_float(on: bool = True) -> Scope:
    """Return a scope in which matrix products on a GPU use TensorFloat-32, if `on`; it applies to all threads."""
    return _PRECISION.holding(["matmul"]) if on else Scope()


SMALL = 1e7  # multiply-adds per evaluation, below which a second CPU thread gains nothing
_THREADS: Shared[str] = Shared(
    lambda _: torch.get_num_threads(),
    lambda _: torch.set_num_threads(1),
    lambda _, before: torch.set_num_threads(before),
)


def one_thread(work: float = 0.0) -> Scope:
    """Return a scope in which torch uses one CPU thread, if the work is small.

    Waiting threads spin: below :data:`SMALL` a second thread gains nothing on an idle machine, and on a busy one two
    threads take two to five times as long as one. Samples and variances are the same bit for bit. Gradients are sums
    over the batch, which depend on the number of threads for larger batches.

    Use the scope in programs such as the command line, not in library functions: the number of threads belongs to the
    process, and a thread whose first operation runs inside the scope always uses one thread.

    Arguments:
        work: Multiply-adds per evaluation of the network: about its parameters times the batch, and times the pixels
            for convolutions. From :data:`SMALL` on, nothing is changed.
    """
    return _THREADS.holding(["threads"]) if work < SMALL else Scope()


_COMPILING: ContextVar[Any] = ContextVar("compiling", default=None)
_FLAG: Shared[str] = Shared(
    lambda _: torch.compiler._is_compiling_flag,
    lambda _: setattr(torch.compiler, "_is_compiling_flag", True),
    lambda _, before: setattr(torch.compiler, "_is_compiling_flag", before),
)


def as_compiled() -> Scope:
    """Return a scope in which :func:`compiling` is true in this thread and task.

    `torch.compiler.is_compiling()` is true in all threads, so that other libraries' networks skip checks of values.
    """
    return Scopes(Bound(_COMPILING, object()), _FLAG.holding(["compiling"]))


def compiling() -> bool:
    """Return whether this thread compiles the network, with torch or with :class:`fmwc.compiled.Compiled`.

    The network must then not read values, and must use its static capacity.
    """
    if torch.compiler.is_dynamo_compiling():  # dynamo cannot trace a context variable
        return True
    return _COMPILING.get() is not None or (torch.compiler.is_compiling() and not _FLAG.entries)


def eagerly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs without compiled code, which would ignore hooks that were added after compilation.

    This includes functions that it calls, and calls of it from compiled code with graph breaks. torch has one such
    setting per process: compiled functions also run uncompiled in other threads until the call ends.
    """
    if "torch._dynamo" not in sys.modules:  # nothing was compiled; importing the compiler takes seconds
        return function

    def call(*args: Any, **options: Any) -> Any:
        return _STANCE.holding(["stance"]).call(function, *args, **options)

    return torch.compiler.disable(call)
