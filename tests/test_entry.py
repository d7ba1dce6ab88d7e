"""Networks of users, named as `module:function`: weights, spaces, and one-line errors."""

import sys

import pytest
import torch
from safetensors.torch import save_file

from fmwc.entry import build, try_once
from fmwc.errors import CheckpointError, UsageError
from fmwc.networks import MLP

BODIES = {
    "raise SystemExit(0)": "SystemExit",
    "def (": "SyntaxError",
    "1 / 0": "ZeroDivisionError",
    "raise ValueError('many\\nlines\\x1b[31m')": "ValueError: many lines?[31m",
}
NAMES = ["", "a", "a:b.c", "../a:b", "a:b\n"]
FUNCTIONS = {
    "asks = lambda x: x": "callable without arguments",
    "def asks(): raise SystemExit": "failed: SystemExit",
    "asks = 3": "function without arguments",
    "def asks(): return None": "got NoneType",
    "import torch; asks = lambda: (torch.nn.Linear(2, 2), (10**12,))": "must have positive sizes",
    "import torch; asks = lambda: torch.nn.LazyLinear(2)": "is not initialised",
}


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(body):
        (tmp_path / "odd_module.py").write_text(body)

    yield write
    sys.modules.pop("odd_module", None)


def said(entry, call=build):
    with pytest.raises(UsageError) as raised:
        call(entry)
    assert "\n" not in str(raised.value)
    assert str(raised.value).isprintable()
    return str(raised.value)


@pytest.mark.parametrize("body", BODIES)
def test_a_module_that_cannot_be_imported(module, body):
    module(body)
    assert BODIES[body] in said("odd_module:made")


@pytest.mark.parametrize("name", NAMES)
def test_invalid_names_are_refused(name):
    assert "module:function" in said(name)


@pytest.mark.parametrize("body", FUNCTIONS)
def test_functions_without_a_network_are_refused(module, body):
    module(body)
    assert FUNCTIONS[body] in said("odd_module:asks")


@pytest.mark.parametrize(
    "body",
    [
        "raise KeyError('k')",
        "return None",
        "return x[:1]",
    ],
)
def test_a_network_that_does_not_run(body):
    class Net(torch.nn.Module):
        pass

    exec(f"def forward(self, x, t):\n    {body}", scope := {})
    Net.forward = scope["forward"]
    with pytest.raises(UsageError, match="network") as raised:
        try_once(Net(), torch.zeros(3, 2), {})
    assert "\n" not in str(raised.value)


# ---- networks and weights --------------------------------------------------------------------------------------------


def test_a_network_is_built_by_name_with_its_weights(workdir):
    torch.manual_seed(5)
    other = MLP(2, 16, 2)
    save_file(other.state_dict(), workdir / "w.safetensors")
    plain, space = build("their_nets:made")
    loaded, _ = build("their_nets:made", workdir / "w.safetensors")
    x, t = torch.randn(3, 2), torch.rand(3)
    assert space is None
    assert not torch.equal(plain(x, t), other(x, t))
    assert torch.equal(loaded(x, t), other(x, t))
    assert build("their_nets:with_space")[1].channels["x"].shape == (2,)
    assert str(workdir) not in sys.path


def test_weights_of_another_network_are_refused(workdir):
    save_file(MLP(2, 8, 2).state_dict(), workdir / "w.safetensors")
    with pytest.raises(CheckpointError, match="their_nets"):
        build("their_nets:made", workdir / "w.safetensors")


LATE = """
import torch
from torch import nn

import fmwc
from fmwc.networks import MLP


class TimeFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = MLP(2, 16, 2)

    def forward(self, t, x):
        return self.inner(x, t)


def adapted():
    return fmwc.adapters.adapt(TimeFirst(), time_first=True), (2,)


def not_adapted():
    return TimeFirst(), (2,)


def asks_for_more():
    class More(MLP):
        def forward(self, x, t, *, text):
            return super().forward(x, t)

    return More(2, 8, 2), (2,)


def breaks():
    raise KeyError("layers")
"""


@pytest.fixture
def late(workdir):
    (workdir / "their_adapters.py").write_text(LATE)
    yield workdir
    sys.modules.pop("their_adapters", None)


@pytest.mark.parametrize("wrapper", ["", "_orig_mod.", "module."])
def test_weights_may_be_saved_with_or_without_wrappers(late, wrapper):
    """Weights of the network inside an adapter, of a compiled network, or of a parallel one."""
    theirs = build("their_adapters:not_adapted")[0]
    save_file({f"{wrapper}{name}": value for name, value in theirs.state_dict().items()}, late / "w.safetensors")
    network, space = build("their_adapters:adapted", late / "w.safetensors")
    x, t = torch.randn(3, 2), torch.rand(3)
    assert torch.equal(network(x, t), theirs(t, x))
    assert space.channels["x"].shape == (2,)
    save_file(network.state_dict(), late / "own.safetensors")
    again, _ = build("their_adapters:adapted", late / "own.safetensors")
    assert torch.equal(again(x, t), theirs(t, x))
