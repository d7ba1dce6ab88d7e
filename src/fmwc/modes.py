"""Temporary changes of how a network runs, which are undone even after exceptions and interrupts.

Training mode, hooks and the compiler's stance belong to a module or to the process, so all threads share them. They are
changed when the first of several overlapping calls begins, and restored when the last one ends (:class:`Shared`). State
of one thread or task is stored in context variables (:class:`Bound`).
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
    "compiling",
    "eagerly",
    "evaluating",
    "one_thread",
    "tensor_float",
]

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Scope:
    """Context manager for a change that lasts for a `with` block or for one call (:meth:`call`).

    Subclasses define `open` and `close`. `close` must allow repeated calls, also after an interrupted `open` or
    `__init__`. This base class changes nothing.

    An asynchronous exception (Ctrl-C) can interrupt a `with` statement between its body and `__exit__`. :meth:`call`
    undoes the change even then; a `with` block undoes it when the exception's traceback is released.
    """

    def open(self) -> None:
        """Make the change."""

    def close(self) -> None:
        """Undo the change."""

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
        """Call `function(*args, **options)` inside the scope and return its result."""
        grad = torch.is_grad_enabled()
        try:
            self.open()
            return function(*args, **options)
        except BaseException:
            torch._C._set_grad_enabled(grad)  # torch's no_grad may not have restored it after an interrupt
            raise
        finally:
            try:
                self.close()
            except BaseException:  # an interrupt while closing
                self.close()
                raise


class Scopes(Scope):
    """Scope that combines several scopes, opened in order and closed in reverse."""

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
    """Scope in which a context variable holds a value, in this thread and task only.

    Arguments:
        variable: The context variable.
        value: The value. It must be a distinct object, because the scope compares identities when it closes.
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
    """Temporary change of shared objects. Overlapping calls share the change, and the last one to end undoes it.

    Arguments:
        read: `read(key)` returns the object's value before the change.
        write: `write(key)` makes the change, if it is not made already; every holder calls it.
        restore: `restore(key, before)` undoes the change.
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
        """Release the holders of other threads, which do not exist in the child of a fork."""
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
    """Return a scope in which a network is in evaluation mode, if it is a module.

    All threads share the mode of a module. It is in evaluation mode while any thread is in the scope, and its previous
    mode is restored at the end of the last scope. To train a network with dropout while another thread samples it,
    sample a copy.
    """
    return _MODES.holding(network.modules()) if isinstance(network, nn.Module) else Scope()


def tensor_float(on: bool = True) -> Scope:
    """Return a scope in which matrix products on a GPU use TensorFloat-32 in all threads, if `on`."""
    return _PRECISION.holding(["matmul"]) if on else Scope()


SMALL = 1e7  # multiply-adds per evaluation, below which a second CPU thread gains nothing
_THREADS: Shared[str] = Shared(
    lambda _: torch.get_num_threads(),
    lambda _: torch.set_num_threads(1),
    lambda _, before: torch.set_num_threads(before),
)


def one_thread(work: float = 0.0) -> Scope:
    """Return a scope in which torch uses one CPU thread, if the work is small.

    Waiting threads spin. Below :data:`SMALL`, a second thread gains nothing on an idle machine, and on a busy one two
    threads take two to five times as long as one. Samples and variances are bit for bit the same. Gradients of large
    batches depend on the number of threads.

    Use the scope in programs such as the command line, not in library functions: the setting applies to the whole
    process, and a thread whose first operation runs inside the scope uses one thread forever.

    Arguments:
        work: Multiply-adds per evaluation of the network: about its parameters times the batch size, and times the
            pixels for convolutions. If at least :data:`SMALL`, nothing is changed.
    """
    return _THREADS.holding(["threads"]) if work < SMALL else Scope()


def compiling() -> bool:
    """Return whether torch is compiling a network, which must then not read values and use its static capacity."""
    return torch.compiler.is_dynamo_compiling() or torch.compiler.is_compiling()


def eagerly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of a function that runs uncompiled, because compiled code ignores hooks added later.

    Functions that it calls also run uncompiled, and calls of it from compiled code become graph breaks. torch has one
    such setting per process, so compiled functions in other threads also run uncompiled until the call ends.
    """
    if "torch._dynamo" not in sys.modules:  # nothing was compiled; importing the compiler takes seconds
        return function

    def call(*args: Any, **options: Any) -> Any:
        return _STANCE.holding(["stance"]).call(function, *args, **options)

    return torch.compiler.disable(call)
