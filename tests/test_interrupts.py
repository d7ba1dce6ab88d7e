"""An interrupt at any point of a reading restores everything, even while its traceback is alive."""

import ctypes
import sys
import threading
import time

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack

import fmwc
from fmwc import modes
from fmwc.estimators import MonteCarlo
from fmwc.field import attach
from fmwc.noise import model as noise
from tests.conftest import awaken, mlp_field
from tests.noise.test_compiling import Attends

# Python raises asynchronous exceptions when a function is entered, and when a C function returns. The tests interrupt
# functions of this library at every such point, and others at one of every `OTHERS` points.
# Python ignores an exception that is raised while it finalises an object, and warns.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
POINTS = ("call", "return", "c_return")
OWN = ("fmwc/modes.py", "fmwc/noise/model.py", "fmwc/noise/layers.py", "fmwc/field.py")
OTHERS = 101


def states(field) -> list:
    return [
        sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in field.network.modules()),
        [m.training for m in field.network.modules()],
        [p.requires_grad for p in field.network.parameters()],
        torch.is_grad_enabled(),
        len(_get_current_function_mode_stack()),
        forward_ad._current_level,
        torch.get_float32_matmul_precision(),
        field.noise.running.state.current,
        dict(field.noise.running.squares),
        field.noise.hooks_kept,
        [len(shared.entries) for shared in (modes._MODES, modes._STANCE, modes._PRECISION, noise._HOOKS)],
    ]


def interrupt(call, number: int) -> bool:
    """Call with a KeyboardInterrupt at the point with this number; return false if there are fewer points."""
    seen, fired = [0, 0], []  # points in this library, and others

    def profile(frame, event, argument):
        if event not in POINTS:
            return
        own = frame.f_code.co_filename.endswith(OWN)
        seen[not own] += 1
        if seen[0] + seen[1] // OTHERS == number and (own or seen[1] % OTHERS == 0):
            sys.setprofile(None)
            fired.append(number)
            raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return bool(fired)


def attending():
    torch.manual_seed(0)
    return awaken(attach(Attends(), space=(3, 2), width=8))


CALLS = {
    "linearised": lambda field, x, t: field.moments(x, t),
    "draw": lambda field, x, t: field.draw(x, t, seed=0),
}


@pytest.mark.parametrize(("build", "call"), [(mlp_field, "linearised"), (attending, "draw")])
def test_an_interrupt_at_every_point(build, call):
    field = build()
    field.train()
    next(field.network.children()).eval()
    x, t = torch.randn(3, *field.space.channels["x"].shape), torch.rand(3)
    field.check_rows(x, t)
    before, number, more = states(field), 0, True
    while more:
        number += 1
        try:
            more = interrupt(lambda: CALLS[call](field, x, t), number)
        except KeyboardInterrupt:  # the traceback still holds its references here
            assert states(field) == before, number
        assert states(field) == before, number
    assert number > 100
    fresh = build()
    with torch.no_grad():
        for one in (field, fresh):
            for p in one.network.parameters():
                p.mul_(3)
    assert torch.equal(field.moments(x, t).var, fresh.moments(x, t).var)


def test_interrupts_from_outside():
    """Interrupt at times chosen by another thread, like Ctrl-C."""
    torch.manual_seed(0)
    field, stop, hits = mlp_field(), threading.Event(), 0
    field.train()
    before, me = states(field), threading.get_ident()
    run = fmwc.sample(field, 4, steps=3, confidence=MonteCarlo())
    armed = threading.Event()

    def interrupts():
        generator = torch.Generator().manual_seed(0)
        while not stop.is_set():
            if armed.wait(0.1):
                time.sleep(0.02 * float(torch.rand((), generator=generator)))
                armed.clear()
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(me), ctypes.py_object(KeyboardInterrupt))

    thread = threading.Thread(target=interrupts, daemon=True)
    thread.start()
    try:
        for _ in range(200):
            try:
                armed.set()
                while armed.is_set():
                    fmwc.sample(field, 4, steps=3, confidence=MonteCarlo())
                time.sleep(0.01)  # the interrupt is raised here at the latest
            except KeyboardInterrupt:
                hits += 1
                assert states(field) == before
    finally:
        stop.set()
        thread.join()
    assert hits > 100
    assert torch.equal(fmwc.sample(field, 4, steps=3, confidence=MonteCarlo()).var, run.var)


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_error_of_a_layer(when):
    field, before = mlp_field(), None
    before = states(field)

    class Fails(nn.Module):
        def forward(self, x):
            raise RuntimeError("mine")

    place = 0 if when == "before" else 1
    before_it, field.network.acts[place] = field.network.acts[place], Fails()
    with pytest.raises(RuntimeError, match="mine"):
        fmwc.sample(field, 4, steps=2)
    field.network.acts[place] = before_it
    assert states(field) == before
