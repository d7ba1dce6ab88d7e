"""Small fields for tests, and the settings of every test."""

from __future__ import annotations

import signal
import sys

import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn

from fmwc.__main__ import main
from fmwc.field import Field, attach
from fmwc.flow import Channel, FlatTorus, Space
from fmwc.networks import MLP
from tests.command import runner

torch.set_num_threads(1)
settings.register_profile("fmwc", max_examples=25, deadline=None, derandomize=True, database=None)
settings.load_profile("fmwc")


# A shell in the background, or nohup, makes the tests ignore these signals, and child processes inherit this.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (getattr(signal, "SIGHUP", None), signal.SIG_DFL)):
    if number is not None and signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


def pytest_configure(config: pytest.Config) -> None:
    # On first use, torch's forward mode compiles its decompositions with torch.jit.script, and warns.
    config.addinivalue_line("filterwarnings", "ignore:`torch.jit.script` is deprecated:DeprecationWarning")


class TinyConv(nn.Module):
    """A velocity network for 1×4×4 images: down by a strided convolution, up by a transposed one."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 4, 3, stride=2, padding=1)
        self.act = nn.ReLU(inplace=True) if inplace else nn.SiLU()
        self.time = nn.Linear(1, 4)
        self.up = nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.out = nn.Conv2d(4, 1, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:  # (B, 1, 4, 4), (B,)
        h = self.act(self.down(x))  # overwrites the output of the noisy layer, if in place
        h = h + self.time(t.to(x.dtype)[:, None])[:, :, None, None]
        return self.out(torch.tanh(self.up(h)))


class TwoChannels(nn.Module):
    """A velocity network for states {place, shape}: place on a torus, shape in flat space."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(2 + 3 + 1, 12)
        self.place = nn.Linear(12, 2)
        self.shape = nn.Linear(12, 3)

    def forward(self, x: dict[str, Tensor], t: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.hidden(torch.cat([x["place"], x["shape"], t.to(x["shape"].dtype)[:, None]], -1)))
        return {"place": self.place(h), "shape": self.shape(h)}


PRODUCT = Space({"place": Channel((2,), FlatTorus(), "uniform"), "shape": Channel((3,))})


def awaken(field: Field, size: float = 0.5, seed: int = 0) -> Field:
    """Make α depend on the input, as after training. Before training, every α is the same."""
    generator = torch.Generator().manual_seed(seed)
    for layer in field.noise.layers:
        weight = layer.inference.out.weight
        with torch.no_grad():
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=weight.dtype) * size)
    return field


def mlp_field(hidden: int = 16, depth: int = 2, dim: int = 2, seed: int = 0, **options: object) -> Field:
    torch.manual_seed(seed)
    return awaken(attach(MLP(dim, hidden, depth, 8), space=(dim,), width=8, **options))


def conv_field(seed: int = 0, inplace: bool = False, **options: object) -> Field:
    torch.manual_seed(seed)
    return awaken(attach(TinyConv(inplace), space=(1, 4, 4), width=8, **options))


def dict_field(seed: int = 0, **options: object) -> Field:
    torch.manual_seed(seed)
    return awaken(attach(TwoChannels(), space=PRODUCT, width=8, **options))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def mlp() -> Field:
    return mlp_field()


@pytest.fixture
def conv() -> Field:
    return conv_field()


@pytest.fixture
def product() -> Field:
    return dict_field()


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs the command and returns (exit code, stdout, stderr)."""

    def call(*words):
        argv, command = runner(words)
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as stop:
            main(*command)
        out, err = capsys.readouterr()
        code = stop.value.code
        return (0 if code is None else code), out, err

    return call


# ---- networks of users -----------------------------------------------------------------------------------------------

THEIRS = """
import torch
from fmwc.flow import euclidean
from fmwc.networks import MLP

class Conditional(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.table = MLP(2, 16, 2), torch.nn.Embedding(3, 2)
    def forward(self, x, t, *, y):
        return self.net(x + self.table(y), t)

def made():
    torch.manual_seed(0)
    return MLP(2, 16, 2)

class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = MLP(2, 16, 2)
    def forward(self, x, t):
        return self.net(x, t)

def plain():
    return Plain()

def with_space():
    return made(), euclidean((2,))

def conditional():
    return Conditional()
"""


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    """A working directory with a module of networks."""
    (tmp_path / "their_nets.py").write_text(THEIRS)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("their_nets", None)
