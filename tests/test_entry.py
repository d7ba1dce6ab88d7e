"""Networks of users, named as `module:function`: weights, spaces, and one-line errors."""

import sys

import pytest
import torch
from safetensors.torch import save_file

import fmwc
from fmwc.data.arrays import Samples
from fmwc.entry import build, call_entry, try_once
from fmwc.errors import CheckpointError, DataError, UsageError
from fmwc.networks import MLP
from fmwc.retrofit import Retrofit, retrofit

BODIES = {
    "raise SystemExit(0)": "SystemExit",
    "raise BaseException('all')": "BaseException: all",
    "def (": "SyntaxError",
    "from . import other": "ImportError",
    "1 / 0": "ZeroDivisionError",
    "import not_there_at_all": "ModuleNotFoundError",
    "x = '\\ud800'\nraise ValueError(x)": "ValueError",
    "raise ValueError('many\\nlines\\x1b[31m')": "ValueError: many lines?[31m",
    "class E(Exception):\n  def __str__(self): raise ValueError\nraise E": "E",
}
NAMES = [
    "",
    ":",
    "a",
    "a:",
    ":b",
    ".a:b",
    "a..b:c",
    "a.:b",
    "a:b.c",
    "a b:c",
    "a:b:c",
    "a\0:b",
    "a:b\n",
    "../a:b",
    "a/b:c",
]
FUNCTIONS = {
    "asks = lambda x: x": "callable without arguments",
    "def asks(): raise SystemExit": "failed: SystemExit",
    "def asks(): yield 1": "got generator",
    "async def asks(): pass": "is asynchronous",
    "async def made(): pass\nasks = lambda: made()": "is asynchronous",
    "asks = int": "got int",
    "asks = 3": "function without arguments",
    "import torch; asks = torch.nn.Linear(2, 2)": "function without arguments",
    "import torch; asks = torch.nn.Linear": "callable without arguments",
    "def asks(): return None": "got NoneType",
    "def asks(): return 'network'": "must return a torch module",
    "def asks(): return (1, 2, 3)": "got tuple",
    "import torch; asks = lambda: (torch.nn.Linear(2, 2), '')": "got tuple",
    "import torch; asks = lambda: (torch.nn.Linear(2, 2), (-1,))": "must have positive sizes",
    "import torch; asks = lambda: (torch.nn.Linear(2, 2), (10**12,))": "must have positive sizes",
    "import torch; asks = lambda: torch.nn.LazyLinear(2)": "is not initialised",
    "import torch; asks = lambda: torch.nn.Linear(2, 2, device='meta')": "is not initialised",
    "def __getattr__(name): raise KeyError(name)": "KeyError",
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


def test_interrupts_are_not_caught(module):
    module("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        call_entry("odd_module:made", "a network")


@pytest.mark.parametrize(
    "body",
    [
        "raise KeyError('k')",
        "assert False",
        "return None",
        "return x[:1]",
        "return (x, t)",
        "return {'x': x}",
        "return 1",
    ],
)
def test_a_network_that_does_not_run(body):
    class Net(torch.nn.Module):
        pass

    exec(f"def forward(self, x, t):\n    {body}", scope := {})
    Net.forward = scope["forward"]
    with pytest.raises(UsageError, match=r"the network (does not run|must return)") as raised:
        try_once(Net(), torch.zeros(3, 2), {})
    assert "\n" not in str(raised.value)


def test_a_network_in_double_precision_is_retrofitted(tmp_path):
    torch.manual_seed(0)
    network = fmwc.networks.MLP(2, 8, 1).double()
    field, _ = retrofit(
        network, tmp_path, Samples(torch.randn(40, 2), {}), Retrofit(steps=2, batch=8, sampling_steps=10)
    )
    again = fmwc.load(tmp_path, network=fmwc.networks.MLP(2, 8, 1).double())
    assert fmwc.sample(again, 5, steps=10).score().dtype == torch.float64
    assert torch.equal(fmwc.sample(again, 5, steps=10).x, fmwc.sample(field, 5, steps=10).x)


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


def test_a_function_may_import_modules_of_the_working_directory(workdir):
    (workdir / "their_sizes.py").write_text("HIDDEN = 12\n")
    (workdir / "their_late.py").write_text(
        "from fmwc.networks import MLP\n\n"
        "def made():\n    from their_sizes import HIDDEN\n    return MLP(2, HIDDEN, 2)\n"
    )
    try:
        assert build("their_late:made")[0].config["hidden"] == 12
    finally:
        for name in ("their_late", "their_sizes"):
            sys.modules.pop(name, None)
    assert str(workdir) not in sys.path


@pytest.mark.parametrize(
    ("entry", "said"),
    [("no_such_module:made", "cannot be imported"), ("their_nets:nothing", "has no function 'nothing'")],
)
def test_missing_modules_and_functions_are_refused(workdir, entry, said):
    with pytest.raises(UsageError, match=said):
        build(entry)


def test_weights_of_another_network_are_refused(workdir):
    save_file(MLP(2, 8, 2).state_dict(), workdir / "w.safetensors")
    with pytest.raises(CheckpointError, match="does not fit the network of their_nets:made"):
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


@pytest.mark.parametrize(
    ("entry", "said"),
    [("not_adapted", "adapt(net, time_first=True)"), ("asks_for_more", "'text'"), ("breaks", "KeyError: 'layers'")],
)
def test_networks_that_do_not_run_raise_one_line(late, run, entry, said):
    words = ("--own-samples", 20, "--steps", 2, "--device", "cpu", "--out", late / "field")
    code, _, err = run("retrofit", f"their_adapters:{entry}", *words)
    assert code == 2
    assert said in err
    assert not (late / "field").exists()


def test_a_file_with_more_than_weights_names_its_content(late):
    torch.save({"model": MLP(2, 16, 2).state_dict(), "epoch": 3}, late / "all.pt")
    with pytest.raises(DataError, match=r"model, epoch; save 'model' alone"):
        build("their_adapters:adapted", late / "all.pt")
