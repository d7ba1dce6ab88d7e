"""Checkpoints: what goes in comes out, and what cannot be read says why in one line."""

import json

import pytest
import torch
from torch import nn

import fmwc.checkpoint
from fmwc.checkpoint import FORMAT, about, load, save
from fmwc.errors import CheckpointError, NotFiniteError
from fmwc.field import Reference, attach
from fmwc.nets import MLP
from fmwc.sampling import sample
from tests.conftest import TinyConv, TwoChannels, conv_field, dict_field, mlp_field


def one_line(call, error=CheckpointError, match=None):
    with pytest.raises(error, match=match) as raised:
        call()
    assert "\n" not in str(raised.value)
    return str(raised.value)


def same_weights(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# ---- round trips ----------------------------------------------------------------------------------------------------

OPTIONS = {"all": {}, "output": {"include": ["out"]}, "exclude": {"exclude": ["out"]}, "prior": {"prior_rate": 0.1}}


@pytest.mark.parametrize("name", OPTIONS)
def test_round_trip(name, tmp_path):
    field = mlp_field(**OPTIONS[name])
    again = load(save(field, tmp_path / "a"))
    assert same_weights(again, field)
    assert again.noise.names == field.noise.names
    assert again.prior_rate == field.prior_rate
    assert again.space.describe() == field.space.describe()
    assert again.reference is None
    before, after = (sample(f, 5, steps=4, transport=True) for f in (field, again))
    assert torch.equal(before.x, after.x)
    assert torch.equal(before.var, after.var)
    assert torch.equal(before.transported.var, after.transported.var)


def test_the_reference_travels(tmp_path):
    field = mlp_field()
    field.reference = Reference("peak", "some setting", torch.linspace(0, 1, 7))
    again = load(save(field, tmp_path)).reference
    assert (again.score, again.setting) == ("peak", "some setting")
    assert torch.equal(again.quantiles, field.reference.quantiles)


def test_what_is_recorded(tmp_path):
    path = save(mlp_field(), tmp_path, recipe={"name": "mine"}, metrics={"auprc": 0.5})
    record = about(path)
    assert record["format"] == FORMAT
    assert record["recipe"] == {"name": "mine"}
    assert record["metrics"] == {"auprc": 0.5}
    assert record["network"]["kind"] == "MLP"
    assert {p.name for p in path.iterdir()} == {"model.safetensors", "recipe.json"}
    assert json.loads((path / "recipe.json").read_text()) == record


def test_a_field_without_a_space_yet(tmp_path):
    assert load(save(attach(MLP(2, 8, 1, 4)), tmp_path)).space is None


@pytest.mark.parametrize(
    ("build", "network"), [(conv_field, TinyConv), (dict_field, TwoChannels)], ids=["conv", "product"]
)
def test_a_network_of_ones_own(build, network, tmp_path):
    field = build()
    path = save(field, tmp_path)
    torch.manual_seed(77)
    own = network()
    again = load(path, network=own)
    assert again.network is own
    assert same_weights(again, field)
    before, after = sample(field, 3, steps=3), sample(again, 3, steps=3)
    assert str(before.x) == str(after.x)
    assert str(before.var) == str(after.var)
    one_line(lambda: load(path), match=r"not one of ours; give it: load\(path, network=net\)")


def test_saving_again_replaces(tmp_path):
    save(mlp_field(seed=1), tmp_path)
    field = mlp_field(seed=2)
    save(field, tmp_path)
    assert same_weights(load(tmp_path), field)


# ---- what cannot be read --------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    return save(mlp_field(), tmp_path / "saved")


def edit(path, **changes):
    record = json.loads((path / "recipe.json").read_text())
    record.update(changes)
    (path / "recipe.json").write_text(json.dumps(record))


@pytest.mark.parametrize("keep", [0, 4, 300, -1])
def test_weights_that_are_cut_off(saved, keep):
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    one_line(lambda: load(saved), match="model.safetensors is missing or cut off")


def test_weights_that_are_missing(saved):
    (saved / "model.safetensors").unlink()
    one_line(lambda: load(saved), match="model.safetensors is missing or cut off")


@pytest.mark.parametrize("content", ["", "{", '{"format": ', "[]", "null", '{"format": "x"}', "{}"])
def test_a_record_that_is_cut_off(saved, content):
    (saved / "recipe.json").write_text(content)
    for call in (load, about):
        one_line(lambda call=call: call(saved), match=r"recipe.json cannot be read")


def test_a_newer_format(saved):
    edit(saved, format=FORMAT + 1)
    one_line(lambda: load(saved), match=f"format {FORMAT + 1} .* reads up to {FORMAT}; upgrade")


@pytest.mark.parametrize(
    "network", [lambda: MLP(2, 12, 2, 8), lambda: MLP(2, 16, 3, 8), TinyConv], ids=["width", "depth", "kind"]
)
def test_another_architecture(saved, network):
    one_line(lambda: load(saved, network=network()), match="another architecture")


def test_another_width_of_the_noise(saved):
    record = json.loads((saved / "recipe.json").read_text())
    edit(saved, noise={**record["noise"], "width": 16})
    one_line(lambda: load(saved), match="another architecture: noise.layers")


@pytest.mark.parametrize("name", ["checkerbord", "chekerboard", "Checkerboard"])
def test_an_unknown_name_names_the_nearest(name, monkeypatch, tmp_path):
    monkeypatch.setattr(fmwc.checkpoint, "shipped", lambda: {"checkerboard": tmp_path, "mnist": tmp_path})
    for call in (load, about):
        one_line(lambda call=call: call(name), match=f"unknown checkpoint '{name}'; did you mean 'checkerboard'")


def test_shipped_weights_by_name(monkeypatch, saved):
    monkeypatch.setattr(fmwc.checkpoint, "shipped", lambda: {"mine": saved})
    assert same_weights(load("mine"), mlp_field())


def test_folders_that_are_none(tmp_path):
    one_line(lambda: load(tmp_path), match="holds no recipe.json")
    file = tmp_path / "file"
    file.write_text("")
    one_line(lambda: save(mlp_field(), file), match="is a file; a checkpoint is a folder")
    one_line(lambda: load(file), match="holds no recipe.json")


# ---- weights that are no numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["network.out.bias", "noise.layers.0.inference.hidden.weight"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_weight_is_not_saved(part, bad, tmp_path):
    field = mlp_field()
    with torch.no_grad():
        field.get_parameter(part).flatten()[0] = bad
    one_line(lambda: save(field, tmp_path / "a"), NotFiniteError, f"weight '{part}' holds 1 NaN")
    assert not (tmp_path / "a").exists()


def test_a_broken_weight_is_not_loaded(saved, monkeypatch):
    field = mlp_field()
    with torch.no_grad():
        field.network.out.bias[0] = float("nan")
    monkeypatch.setattr(fmwc.checkpoint, "require_finite", lambda tensor, what: None)
    save(field, saved)
    monkeypatch.undo()
    one_line(lambda: load(saved), NotFiniteError, r"weight 'network\.out\.bias' holds 1 NaN")


def test_tied_weights(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
            self.b.weight = self.a.weight

        def forward(self, x, t):
            return self.b(self.a(x))

    save(attach(Tied(), space=(2,)), tmp_path)
    network = Tied()
    load(tmp_path, network)
    assert network.a.weight is network.b.weight
