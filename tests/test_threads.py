"""Threads and tasks that share a field get the same results, bit for bit, as alone."""

import copy
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import fmwc
from fmwc.estimators import Linearised, MonteCarlo
from fmwc.field import attach
from fmwc.modes import _MODES, evaluating, one_thread
from fmwc.noise import Pass
from tests.conftest import awaken, conv_field, dict_field, mlp_field
from tests.options import arguments

ROUNDS = 8


@pytest.fixture(autouse=True)
def _often():
    """Switch threads after every few instructions, so that race conditions occur."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def hooks(network: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in network.modules())


def together(*calls, rounds=ROUNDS):
    """Run each call repeatedly while the others run; return a list of results per call."""
    ready = threading.Barrier(len(calls))

    def repeat(call):
        ready.wait()
        return [call() for _ in range(rounds)]

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(repeat, call) for call in calls]]


def same(a, b) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return all(same(a[name], b[name]) for name in a)
    return all(map(same, a, b))


def sampled(field, **options):
    run = fmwc.sample(field, 16, **arguments(steps=4, **options))
    return run.x, run.var, run.score() if len(run.times) else run.x


def check(*calls, rounds=ROUNDS):
    alone = [call() for call in calls]
    for expected, found in zip(alone, together(*calls, rounds=rounds), strict=True):
        assert all(same(one, expected) for one in found)


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(3, 16), nn.Dropout(0.5), nn.Linear(16, 2)

    def forward(self, x, t):
        return self.last(self.drop(torch.tanh(self.first(torch.cat([x, t.expand(len(x))[:, None]], -1)))))


class Encoding(nn.Module):
    """A layer for which torch has a fused kernel without hooks."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x, t):
        return self.encoder(x + t.expand(len(x))[:, None, None])


def dropping_field():
    torch.manual_seed(0)
    return awaken(attach(Dropping(), space=(2,), width=8))


def encoding_field():
    torch.manual_seed(0)
    return awaken(attach(Encoding().eval(), space=(3, 8), width=8))


BUILDS = {"mlp": mlp_field, "conv": conv_field, "channels": dict_field, "dropout": dropping_field}
BUILDS["encoder"] = encoding_field


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_threads_that_sample_one_field(build):
    field = build()
    check(
        lambda: sampled(field),
        lambda: sampled(field, seed=1, confidence="diagonal" if build is not encoding_field else True),
        lambda: sampled(field, seed=2, confidence=MonteCarlo(4)),
        lambda: sampled(field, seed=3, confidence=False),
        rounds=4,
    )
    assert hooks(field.network) == 0


@pytest.mark.parametrize("confidence", ["linearised", "tangent", "diagonal", "monte_carlo"])
def test_each_estimator_in_two_threads(confidence, mlp):
    x, t = torch.randn(8, 2), torch.rand(8)
    check(*[lambda s=s: mlp.moments(x, t, confidence, seed=s) for s in (0, 1)])


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_plain_calls_of_the_network_during_draws(build):
    field = build()
    field.network.eval()
    x = fmwc.sample(field, 8, steps=2, confidence=None).x
    t = torch.rand(8)
    with torch.no_grad():
        expected = field.network(x, t)
    over = threading.Event()

    def draws():
        for seed in range(30):
            field.draw(x, t, seed=seed)
        over.set()

    def calls():
        with torch.no_grad():
            while not over.is_set():
                assert same(field.network(x, t), expected)

    together(draws, calls, rounds=1)


def test_modes_in_threads():
    field = dropping_field()
    field.network.train()
    field.network.first.eval()
    modes = [m.training for m in field.network.modules()]
    x, t = torch.randn(8, 2), torch.rand(8)
    check(*[lambda: field.moments(x, t).mean] * 3, rounds=30)
    assert [m.training for m in field.network.modules()] == modes


class Stops(Pass):
    """A pass that waits at the first layer until it is released."""

    def __init__(self):
        self.inside, self.go_on = threading.Event(), threading.Event()

    def after(self, noisy, layer, h, y):
        self.inside.set()
        assert self.go_on.wait(30)
        return y + 1


@pytest.mark.parametrize("build", [mlp_field, encoding_field])
def test_a_pass_acts_only_in_its_thread(build):
    """Stop a pass at a fixed point while another thread uses the network."""
    field = build()
    x, t = torch.randn(4, *field.space.channels["x"].shape), torch.rand(4)
    with torch.no_grad():
        plain, var = field.network(x, t), field.moments(x, t).var
        stop = Stops()
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(field.run, stop, x, t)
            assert stop.inside.wait(30)
            try:
                assert torch.equal(field.network(x, t), plain)
                assert torch.equal(field.moments(x, t).var, var)
                twin = copy.deepcopy(field)
            finally:
                stop.go_on.set()
            assert not torch.equal(running.result(), plain)
        assert hooks(field.network) == 0
        assert torch.equal(twin.network(x, t), plain)
        assert torch.equal(twin.moments(x, t).var, var)
        assert hooks(twin.network) == 0  # a copy made during the pass


@pytest.mark.parametrize(("build", "count"), [(mlp_field, 2048), (conv_field, 256), (dict_field, 512)])
def test_samples_do_not_depend_on_the_number_of_threads(build, count):
    field, before = build(), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        two = fmwc.sample(field, count, steps=1, confidence=Linearised(1))
        with one_thread():
            one = fmwc.sample(field, count, steps=1, confidence=Linearised(1))
    finally:
        torch.set_num_threads(before)
    assert same(one.x, two.x)
    assert same(one.var, two.var)


@pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="this platform does not fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_while_another_thread_reads():
    """A forked child has no locks or changes of the threads that it lacks, and keeps those of its own thread."""
    network, own = Dropping(), Dropping()
    held, over = threading.Event(), threading.Event()

    def reads():
        with evaluating(network), _MODES.lock:
            held.set()
            over.wait()

    reader = threading.Thread(target=reads)
    ours = evaluating(own)
    ours.open()
    reader.start()
    held.wait()
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)  # ends a child that is waiting for a lock
        found = [network.training, not own.training]
        with evaluating(network):
            found.append(not network.drop.training)
        ours.close()
        os._exit(0 if all([*found, network.drop.training, own.drop.training]) else 1)
    status = os.waitpid(child, 0)[1]
    parent = network.training, own.training
    over.set()
    reader.join()
    ours.close()
    assert status == 0
    assert parent == (False, False)
    assert network.training
    assert own.training
