"""How a network runs during a reading, and as its user had it afterwards.

Training mode, hooks and the compiler's stance belong to a module or to the process, so all threads share them: they are
changed when the first of several overlapping calls begins and restored when the last one ends (:class:`Shared`). What
is running belongs to one thread or task and lives in context variables (:class:`Bound`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Hashable, Iterable
from contextvars import ContextVar
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

    Subclasses define `open` and `close`; `close` may be called more than once, and after an `open` that was interrupted
    anywhere. This class changes nothing.

    An asynchronous exception (Ctrl-C) can reach a `with` statement after its body and before the first line of
    `__exit__`. :meth:`call` closes all the same; after a `with` block, the change is undone when the exception's
    traceback is released. (So `close` must also work on an object whose `__init__` was interrupted.)
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

    def call(self, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """Return `function(*args, **options)`, called inside the scope."""
        grad = torch.is_grad_enabled()
        try:
            self.open()
            return function(*args, **options)
        except BaseException:
            torch._C._set_grad_enabled(grad)  # an interrupt may have come before torch's own no_grad could restore it
            raise
        finally:
            try:
                self.close()
            except BaseException:  # an interrupt while closing
                self.close()
                raise


class Scopes(Scope):
    """Several scopes as one: opened in order, closed in reverse."""

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
    """A context variable set to a value, for this thread and task alone.

    Arguments:
        variable: The variable.
        value: An object of its own, by whose identity the scope recognises that the variable is still its to restore.
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


class _Entry:
    def __init__(self, before: Any) -> None:
        self.before = before
        self.holders: dict[int, int] = {}  # with the thread of each


class Shared(Generic[K]):
    """A change of shared objects that overlapping calls make together: the last one to end restores them.

    Arguments:
        read: `read(key)`: the object's value before the change.
        write: `write(key)`: make the change. Called by every holder, so it must do nothing where it is made already.
        restore: `restore(key, before)`: undo the change.
    """

    def __init__(self, read: Callable[[K], Any], write: Callable[[K], None], restore: Callable[[K, Any], None]) -> None:
        self.read, self.write, self.restore = read, write, restore
        self.entries: dict[K, _Entry] = {}
        self.lock = RLock()
        _ALL.add(self)

    def holding(self, keys: Iterable[K]) -> Scope:
        """A scope inside which these objects are changed."""
        return _Hold(self, list(keys))

    def hold(self, holder: int, keys: list[K]) -> None:
        with self.lock:
            for key in keys:
                if key not in self.entries:
                    self.entries[key] = _Entry(self.read(key))  # noted before it is changed
                self.entries[key].holders[holder] = get_ident()
                self.write(key)

    def release(self, holder: int, keys: list[K]) -> None:
        with self.lock:
            for key in keys:
                if (entry := self.entries.get(key)) is None:
                    continue
                entry.holders.pop(holder, None)
                if not entry.holders:
                    self.restore(key, entry.before)
                    self.entries.pop(key, None)

    def forked(self) -> None:
        """Go on in the child of a fork, where the calling thread is the only one: what others held is released."""
        self.lock = RLock()  # another thread may have had the old one
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
    """A scope with dropout off and batch norms fixed. What is not a module has no modes.

    A module has one mode for all threads: while any thread reads, the module is in evaluation mode for all of them, and
    its own mode is restored when the last one ends. Do not train a network with dropout in one thread while another
    samples it; give the sampler a copy.
    """
    return _MODES.holding(network.modules()) if isinstance(network, nn.Module) else Scope()


def tensor_float(on: bool = True) -> Scope:
    """A scope in which a GPU's matrix products use TensorFloat-32 (ten bits of each factor), where `on`.

    torch has one precision per process, so it holds for all threads.
    """
    return _PRECISION.holding(["matmul"]) if on else Scope()


SMALL = 1e7  # multiply-adds per evaluation, below which a second CPU thread gains nothing
_THREADS: Shared[str] = Shared(
    lambda _: torch.get_num_threads(),
    lambda _: torch.set_num_threads(1),
    lambda _, before: torch.set_num_threads(before),
)


def one_thread(work: float = 0.0) -> Scope:
    """A scope in which torch computes on one CPU thread, where the work is small.

    Two threads that wait for each other spin: on two idle cores they gain nothing below :data:`SMALL`, and beside other
    work they take two to five times as long as one. Samples and variances are the same to the bit. Gradients of weights
    are sums over the batch, which for larger batches depend on the number of threads.

    For programs, such as the command line, and not for the library's own functions: torch has one number of threads per
    process, and a thread whose first operation falls inside the scope keeps to one thread afterwards.

    Arguments:
        work: Multiply-adds per evaluation of the network, about its parameters times the batch (for convolutions, times
            the pixels too); from :data:`SMALL` on, nothing is changed.
    """
    return _THREADS.holding(["threads"]) if work < SMALL else Scope()


_COMPILING: ContextVar[Any] = ContextVar("compiling", default=None)
_FLAG: Shared[str] = Shared(
    lambda _: torch.compiler._is_compiling_flag,
    lambda _: setattr(torch.compiler, "_is_compiling_flag", True),
    lambda _, before: setattr(torch.compiler, "_is_compiling_flag", before),
)


def as_compiled() -> Scope:
    """A scope in which :func:`compiling` is true, in this thread and task alone. `torch.compiler.is_compiling()`, by
    which networks of others leave out their looks at values, is true in all threads."""
    return Scopes(Bound(_COMPILING, object()), _FLAG.holding(["compiling"]))


def compiling() -> bool:
    """Whether the network is being compiled here, by torch or by :class:`fmwc.sampling.Compiled`: it must not look at
    values, and keeps to the rows it reserved."""
    if torch.compiler.is_dynamo_compiling():  # which cannot trace a context variable
        return True
    return _COMPILING.get() is not None or (torch.compiler.is_compiling() and not _FLAG.entries)


def eagerly(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose calls run as they were written: code that torch compiled does not see hooks that came after it.

    So does what it calls, and so it is where a compiled function calls it that torch could not keep in one piece. torch
    has one such setting per process: until the call ends, compiled functions run uncompiled in other threads too.
    """
    if "torch._dynamo" not in sys.modules:  # nothing was compiled; asking torch would load its compiler, for seconds
        return function

    def call(*args: Any, **options: Any) -> Any:
        return _STANCE.holding(["stance"]).call(function, *args, **options)

    return torch.compiler.disable(call)
