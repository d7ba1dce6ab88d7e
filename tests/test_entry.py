"""Functions named as `module:function`: every failure is one line."""

import sys

import pytest
import torch

import fmwc
from fmwc.data.arrays import Samples
from fmwc.entry import build, call_entry, try_once
from fmwc.errors import UsageError
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
    "asks = lambda x: x": "called without arguments",
    "def asks(): raise SystemExit": "failed: SystemExit",
    "def asks(): yield 1": "got generator",
    "async def asks(): pass": "is asynchronous",
    "asks = int": "got int",
    "asks = 3": "function without arguments",
    "import torch; asks = torch.nn.Linear(2, 2)": "function without arguments",
    "import torch; asks = torch.nn.Linear": "called without arguments",
    "def asks(): return None": "got NoneType",
    "def asks(): return (1, 2, 3)": "got tuple",
    "import torch; asks = lambda: (torch.nn.Linear(2, 2), '')": "got tuple",
    "import torch; asks = lambda: (torch.nn.Linear(2, 2), (-1,))": "which no sample can have",
    "import torch; asks = lambda: (torch.nn.Linear(2, 2), (10**12,))": "which no sample can have",
    "import torch; asks = lambda: torch.nn.LazyLinear(2)": "has no values yet",
    "import torch; asks = lambda: torch.nn.Linear(2, 2, device='meta')": "has no values yet",
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


def test_an_interrupt_passes_through(module):
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
