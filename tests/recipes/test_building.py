"""Networks that `module:function` builds, with weights from a file."""

import sys

import pytest
import torch
from safetensors.torch import save_file

from fmwc.entry import build
from fmwc.errors import CheckpointError, DataError, UsageError
from fmwc.networks import MLP


def test_a_network_is_built_by_name_with_its_weights(here):
    torch.manual_seed(5)
    other = MLP(2, 16, 2)
    save_file(other.state_dict(), here / "w.safetensors")
    plain, space = build("their_nets:made")
    loaded, _ = build("their_nets:made", here / "w.safetensors")
    x, t = torch.randn(3, 2), torch.rand(3)
    assert space is None
    assert not torch.equal(plain(x, t), other(x, t))
    assert torch.equal(loaded(x, t), other(x, t))
    assert build("their_nets:with_space")[1].channels["x"].shape == (2,)
    assert str(here) not in sys.path


def test_a_function_may_import_modules_of_the_working_directory(here):
    (here / "their_sizes.py").write_text("HIDDEN = 12\n")
    (here / "their_late.py").write_text(
        "from fmwc.networks import MLP\n\n"
        "def made():\n    from their_sizes import HIDDEN\n    return MLP(2, HIDDEN, 2)\n"
    )
    try:
        assert build("their_late:made")[0].config["hidden"] == 12
    finally:
        for name in ("their_late", "their_sizes"):
            sys.modules.pop(name, None)
    assert str(here) not in sys.path


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("their_nets", "module:function"),
        ("no_such_module:made", "cannot be imported"),
        ("their_nets:nothing", "has no 'nothing'"),
        ("their_nets:number", "function without arguments"),
        ("their_nets:asks", "called without arguments"),
        ("their_nets:returns_a_word", "must return a torch module"),
    ],
)
def test_functions_that_build_no_network_are_refused(here, entry, said):
    with pytest.raises(UsageError, match=said):
        build(entry)


def test_weights_of_another_network_are_refused(here):
    save_file(MLP(2, 8, 2).state_dict(), here / "w.safetensors")
    with pytest.raises(CheckpointError, match="does not fit the network of their_nets:made"):
        build("their_nets:made", here / "w.safetensors")


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
def late(here):
    (here / "their_adapters.py").write_text(LATE)
    yield here
    sys.modules.pop("their_adapters", None)


@pytest.mark.parametrize("wrapper", ["", "_orig_mod.", "module."])
def test_weights_may_be_saved_with_or_without_wrappers(late, wrapper):
    """Of the network below an adapter; compiled, or trained in parallel."""
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
