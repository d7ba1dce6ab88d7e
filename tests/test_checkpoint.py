"""Checkpoints: saving and loading round-trip, and unreadable files raise one line."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fmwc.checkpoint
from fmwc.checkpoint import FORMAT, about, identity, load, load_network, save, save_network, update
from fmwc.errors import CheckpointError, NotFiniteError
from fmwc.field import attach
from fmwc.identity import digest_file, seal
from fmwc.networks import MLP, LeNet, UNet
from fmwc.quantise import decode, encode, round_weights
from fmwc.sampling import ReadWith, Reference, default_estimator, read_with, sample, standard_of
from tests.conftest import TinyConv, TwoChannels, awaken, conv_field, dict_field, mlp_field

MADE = ReadWith("Linearised(probes=None)", 50, "euler", (0.2, 0.8))


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


def test_a_reference_is_saved(tmp_path):
    field = mlp_field()
    field.reference = Reference("peak", MADE, torch.linspace(0, 1, 7))
    again = load(save(field, tmp_path)).reference
    assert (again.score, again.read_with) == ("peak", MADE)
    assert torch.equal(again.quantiles, field.reference.quantiles)


def digits(seed=0):
    """A field of images with a reference within y."""
    torch.manual_seed(seed)
    field = awaken(attach(UNet(base=8, stages=(1, 2), cond=8, classes=3), space=(1, 4, 4), width=8))
    y = torch.arange(30) % 3
    run = sample(field, 30, steps=4, seed=1, cond={"y": y})
    raw = run.score("integrated")
    standard = standard_of("y", raw, y)
    quantiles = standard(raw, y).quantile(torch.linspace(0, 1, 11))
    field.reference = Reference(
        "integrated", read_with(default_estimator(field.space), 4, "euler"), quantiles, standard
    )
    return field


def test_a_reference_within_a_class_gives_the_same_confidence(tmp_path):
    field = digits()
    again = load(save(field, tmp_path))
    before, after = (f.reference for f in (field, again))
    assert (after.score, after.read_with, after.standard.cond) == ("integrated", before.read_with, "y")
    assert torch.equal(after.quantiles, before.quantiles)
    assert torch.equal(after.standard.centre, before.standard.centre)
    assert torch.equal(after.standard.spread, before.standard.spread)
    y = torch.tensor([2, 0, 1, 1, 2])
    first, second = (sample(f, 5, steps=4, cond={"y": y}) for f in (field, again))
    assert first.standard is not None
    assert torch.equal(first.x, second.x)
    assert torch.equal(first.score(), second.score())
    assert torch.equal(first.confidence, second.confidence)
    assert first.confidence.unique().numel() > 1
    assert about(tmp_path)["reference"]["within"] == "y"


def test_a_reference_is_not_a_weight(tmp_path):
    field = digits()
    again = load(save(field, tmp_path))
    assert same_weights(again, field)
    field.reference = None
    assert load(save(field, tmp_path)).reference is None


def test_the_record(tmp_path):
    path = save(mlp_field(), tmp_path, recipe={"name": "mine"}, metrics={"auprc": 0.5})
    record = about(path)
    assert record["format"] == FORMAT
    assert record["recipe"] == {"name": "mine"}
    assert record["metrics"] == {"auprc": 0.5}
    assert record["network"]["kind"] == "MLP"
    assert {p.name for p in path.iterdir()} == {"model.safetensors", "recipe.json"}
    assert json.loads((path / "recipe.json").read_text()) == record


def test_a_field_without_a_space(tmp_path):
    assert load(save(attach(MLP(2, 8, 1, 4)), tmp_path)).space is None


@pytest.mark.parametrize(
    ("build", "network"), [(conv_field, TinyConv), (dict_field, TwoChannels)], ids=["conv", "product"]
)
def test_networks_that_are_not_of_fmwc(build, network, tmp_path):
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
    one_line(lambda: load(path), match=r"not a network of fmwc; pass it to load\(path, network=net\)")


def test_saving_again_replaces_a_checkpoint(tmp_path):
    save(mlp_field(seed=1), tmp_path)
    field = mlp_field(seed=2)
    save(field, tmp_path)
    assert same_weights(load(tmp_path), field)


# ---- eight bits, and parts ------------------------------------------------------------------------------------------


def rounded(**options):
    field = mlp_field(**options)
    round_weights(field)
    return field


def test_rounded_weights_are_quantised_without_loss(tmp_path):
    field = rounded()
    field.reference = Reference("peak", MADE, torch.linspace(0, 1, 7))  # numbers, not weights
    again = load(save(field, tmp_path, quantise=True))
    assert same_weights(again, field)
    assert torch.equal(again.reference.quantiles, field.reference.quantiles)
    before, after = (sample(f, 5, steps=4) for f in (field, again))
    assert torch.equal(before.x, after.x)
    assert torch.equal(before.var, after.var)
    held = load_file(tmp_path / "model.safetensors")
    for name, value in field.state_dict().items():
        assert held[name].dtype == (torch.int8 if value.ndim > 1 else value.dtype)
        assert (f"{name}:scale" in held) == (value.ndim > 1)
    assert list(about(tmp_path)["files"]) == ["model.safetensors"]
    assert not [name for name in again.state_dict() if ":" in name]


def test_quantising_rounds_weights(tmp_path):
    field = mlp_field()
    again = load(save(field, tmp_path / "a", quantise=True))
    assert not same_weights(again, field)
    for name, value in field.state_dict().items():
        assert torch.equal(again.state_dict()[name], decode(*encode(value)) if value.ndim > 1 else value)
    assert same_weights(load(save(again, tmp_path / "b", quantise=True)), again)  # permanently
    assert same_weights(mlp_field(), field)  # the original field is unchanged


@pytest.fixture
def parted(tmp_path, monkeypatch):
    monkeypatch.setattr(fmwc.checkpoint, "PART", 300)
    return save(rounded(), tmp_path / "parted", quantise=True)


def test_a_large_checkpoint_is_split_into_parts(parted):
    count = len(about(parted)["files"])
    assert count > 2
    files = [f"model-{i + 1}-of-{count}.safetensors" for i in range(count)]
    assert {p.name for p in parted.iterdir()} == {*files, "recipe.json"}
    held = [load_file(parted / name) for name in files]
    sizes = [sum(t.numel() * t.element_size() for t in part.values()) for part in held]
    assert all(size <= 300 or len(part) == 1 for size, part in zip(sizes, held, strict=True))
    assert sum(len(part) for part in held) == len({name for part in held for name in part})
    assert same_weights(load(parted), rounded())


def test_a_missing_or_truncated_part_is_named(parted):
    count = len(about(parted)["files"])
    part = parted / f"model-2-of-{count}.safetensors"
    whole = part.read_bytes()
    part.write_bytes(whole[:-1])
    one_line(
        lambda: load(parted),
        match=f"model-2-of-{count}.safetensors is (missing|not a safetensors file, or is truncated)",
    )
    part.unlink()
    one_line(
        lambda: load(parted),
        match=f"model-2-of-{count}.safetensors is (missing|not a safetensors file, or is truncated)",
    )


# ---- a network without noise ----------------------------------------------------------------------------------------

BARE = {
    "LeNet": (lambda: LeNet(4, 8), (torch.rand(3, 1, 8, 8),)),
    "MLP": (lambda: MLP(2, 8, 1, 4, outputs=3), (torch.rand(3, 2), torch.rand(3))),
    "UNet": (lambda: UNet(base=8, stages=(1, 2), cond=8, classes=0), (torch.rand(3, 1, 4, 4), torch.rand(3))),
}


@pytest.mark.parametrize("name", BARE)
def test_a_network_without_noise_is_loaded_in_evaluation_mode(name, tmp_path):
    build, inputs = BARE[name]
    network = build()
    network(*inputs)  # running statistics change in training mode, and are saved
    torch.manual_seed(7)
    again = load_network(save_network(network, tmp_path / "a", recipe={"name": "judge"}, metrics={"accuracy": 0.5}))
    assert type(again) is type(network)
    assert again.config == network.config
    assert same_weights(again, network)
    assert network.training
    assert not any(m.training for m in again.modules())
    assert torch.equal(again(*inputs), network.eval()(*inputs))
    record = about(tmp_path / "a")
    assert record["metrics"] == {"accuracy": 0.5}
    assert record["recipe"] == {"name": "judge"}


def test_only_networks_of_fmwc_are_saved_without_noise(tmp_path):
    class MLP(nn.Module):  # a class with the name of one of ours
        config = {"dim": 2}  # noqa: RUF012

    for network in (TinyConv(), MLP()):
        kind = type(network).__name__
        one_line(lambda network=network: save_network(network, tmp_path / "a"), match=f"{kind} is not one of fmwc's")
    assert not (tmp_path / "a").exists()


def test_a_network_without_noise_is_not_loaded_as_a_field(tmp_path):
    save_network(LeNet(4, 8), tmp_path)
    one_line(lambda: load(tmp_path), match=r"without noise; load it with fmwc\.checkpoint\.load_network")
    one_line(lambda: load(tmp_path, network=LeNet(4, 8)), match="load_network")


def test_a_field_is_not_loaded_as_a_network(tmp_path):
    save(mlp_field(), tmp_path)
    one_line(lambda: load_network(tmp_path), match=r"holds a field; load it with fmwc\.load")


def test_a_shipped_network_by_name(monkeypatch, tmp_path):
    judge = LeNet(4, 8)
    monkeypatch.setattr(fmwc.checkpoint, "shipped", lambda: {"judge": tmp_path})
    save_network(judge, tmp_path)
    assert same_weights(load_network("judge"), judge)
    one_line(lambda: load_network("jugde"), match="did you mean 'judge'")


RECORDS = {
    "no network": {"network": None},
    "no kind": {"network": {"config": {}}},
    "no config": {"network": {"kind": "LeNet"}},
    "an unknown kind": {"network": {"kind": "LeNett", "config": {}}},
    "a config of none": {"network": {"kind": "LeNet", "config": None}},
    "an unknown argument": {"network": {"kind": "LeNet", "config": {"sides": 8}}},
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_damaged_record_of_a_network(name, tmp_path):
    save_network(LeNet(4, 8), tmp_path)
    edit(tmp_path, **RECORDS[name])
    one_line(lambda: load_network(tmp_path), match="network")


def test_damaged_weights_of_a_network(tmp_path, monkeypatch):
    judge = LeNet(4, 8)
    weights = save_network(judge, tmp_path) / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    one_line(
        lambda: load_network(tmp_path), match="model.safetensors is (missing|not a safetensors file, or is truncated)"
    )
    weights.write_bytes(whole)
    edit(tmp_path, network={"kind": "LeNet", "config": {"classes": 5, "side": 8}})
    one_line(lambda: load_network(tmp_path), match=r"another architecture: out\.bias is \(4,\)")
    with torch.no_grad():
        judge.out.bias[0] = float("nan")
    one_line(lambda: save_network(judge, tmp_path), NotFiniteError, r"weight 'out\.bias' holds 1 NaN")


# ---- what cannot be read --------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    return save(mlp_field(), tmp_path / "saved")


def edit(path, **changes):
    record = json.loads((path / "recipe.json").read_text())
    record.update(changes)
    (path / "recipe.json").write_text(json.dumps(seal(record)))


@pytest.mark.parametrize("keep", [0, 4, 300, -1])
def test_truncated_weights(saved, keep):
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    one_line(lambda: load(saved), match="model.safetensors is (missing|not a safetensors file, or is truncated)")


def test_missing_weights(saved):
    (saved / "model.safetensors").unlink()
    one_line(lambda: load(saved), match="model.safetensors is (missing|not a safetensors file, or is truncated)")


@pytest.mark.parametrize("content", ["", "{", '{"format": ', "[]", "null", '{"format": "x"}', "{}"])
def test_a_truncated_record(saved, content):
    (saved / "recipe.json").write_text(content)
    for call in (load, about):
        one_line(lambda call=call: call(saved), match=r"recipe.json( is not JSON|: the content|: format must)")


def test_another_format(saved):
    edit(saved, format=FORMAT + 1)
    one_line(lambda: load(saved), match="format")


@pytest.mark.parametrize(
    "network", [lambda: MLP(2, 12, 2, 8), lambda: MLP(2, 16, 3, 8), TinyConv], ids=["width", "depth", "kind"]
)
def test_another_architecture(saved, network):
    one_line(lambda: load(saved, network=network()), match="another architecture")


def test_another_width_of_the_noise(saved):
    record = json.loads((saved / "recipe.json").read_text())
    edit(saved, noise={**record["noise"], "width": 16})
    one_line(lambda: load(saved), match="disagree on the width of the inference networks")


REFERENCES = {
    "empty": {},
    "no quantiles": {"score": "integrated", "within": "y"},
    "no score": {"quantiles": [0, 1]},
    "text": "integrated",
    "a list": [],
    "a number": 3,
}


@pytest.mark.parametrize("name", REFERENCES)
def test_a_damaged_reference(name, tmp_path):
    save(digits(), tmp_path)
    record = json.loads((tmp_path / "recipe.json").read_text())
    record["reference"] = REFERENCES[name]
    (tmp_path / "recipe.json").write_text(json.dumps(seal(record)))
    one_line(lambda: load(tmp_path), match="reference")


def test_a_reference_without_its_standardisation(tmp_path):
    field = mlp_field()
    field.reference = Reference("peak", MADE, torch.linspace(0, 1, 7))
    save(field, tmp_path)
    record = json.loads((tmp_path / "recipe.json").read_text())
    edit(tmp_path, reference={**record["reference"], "within": "y"})
    one_line(lambda: load(tmp_path), match=r"reference of .* cannot be used: 'centre'")


@pytest.mark.parametrize("name", ["checkerbord", "chekerboard", "Checkerboard"])
def test_the_error_for_an_unknown_name_suggests_the_nearest(name, monkeypatch, tmp_path):
    monkeypatch.setattr(fmwc.checkpoint, "shipped", lambda: {"checkerboard": tmp_path, "mnist": tmp_path})
    for call in (load, about):
        one_line(lambda call=call: call(name), match=f"unknown checkpoint '{name}'; did you mean 'checkerboard'")


def test_shipped_weights_by_name(monkeypatch, saved):
    monkeypatch.setattr(fmwc.checkpoint, "shipped", lambda: {"mine": saved})
    assert same_weights(load("mine"), mlp_field())


def test_folders_that_are_not_checkpoints(tmp_path):
    one_line(lambda: load(tmp_path), match="holds no recipe.json")
    file = tmp_path / "file"
    file.write_text("")
    one_line(lambda: save(mlp_field(), file), match="is a file; a checkpoint must be a folder")
    one_line(lambda: load(file), match="holds no recipe.json")


# ---- weights that are no numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["network.out.bias", "noise.layers.0.inference.hidden.weight"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_not_saved(part, bad, tmp_path):
    field = mlp_field()
    with torch.no_grad():
        field.get_parameter(part).flatten()[0] = bad
    one_line(lambda: save(field, tmp_path / "a"), NotFiniteError, f"weight '{part}' holds 1 NaN")
    assert not (tmp_path / "a").exists()


def test_weights_that_are_not_finite_are_not_loaded(saved, monkeypatch):
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


# ---- bound by hashes -------------------------------------------------------------------------------------------------


def rewrite(path, change):
    """Change the weights and update the hashes of the record, as an attacker would."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    edit(path, files={"model.safetensors": digest_file(path / "model.safetensors")})


@pytest.mark.parametrize("place", range(0, 1000, 97))
def test_a_flipped_bit_of_the_weights_is_refused(place, saved):
    weights = saved / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[place * len(content) // 1000] ^= 0x10
    weights.write_bytes(content)
    one_line(lambda: load(saved))


@pytest.mark.parametrize("change", [{"prior_rate": 0.9}, {"recipe": {"lr": 1}}, {"metrics": {"auprc": 1.0}}])
def test_a_changed_record_is_refused(change, saved):
    record = json.loads((saved / "recipe.json").read_text())
    (saved / "recipe.json").write_text(json.dumps({**record, **change}))
    one_line(lambda: load(saved), match=r"recipe\.json was changed after it was written")


def test_weights_of_another_checkpoint_are_refused(saved, tmp_path):
    other = save(mlp_field(seed=1), tmp_path / "other")
    (saved / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    one_line(lambda: load(saved), match="its hash differs")


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_weights_of_another_type_are_refused(dtype, saved):
    rewrite(saved, lambda t: t.update({"network.out.bias": t["network.out.bias"].to(dtype)}))
    one_line(lambda: load(saved), match=r"weight 'network\.out\.bias' is torch\.")


def test_weights_in_double_precision(tmp_path):
    field = mlp_field().double()
    again = load(save(field, tmp_path))
    assert again.network.out.bias.dtype == torch.float64
    assert same_weights(again, field)


@pytest.mark.parametrize(
    "quantiles",
    [
        torch.full((7,), float("inf")),
        torch.full((7,), float("nan")),
        torch.linspace(1, 0, 7),
        torch.zeros(3, 7),
        torch.zeros(0),
    ],
    ids=["inf", "nan", "falling", "2-d", "empty"],
)
def test_an_invalid_reference_is_neither_saved_nor_loaded(quantiles, tmp_path):
    field = mlp_field()
    field.reference = Reference("peak", MADE, quantiles)
    with pytest.raises(fmwc.FmwcError):
        save(field, tmp_path / "a")
    field.reference = Reference("peak", MADE, torch.linspace(0, 1, 7))
    save(field, tmp_path / "b")
    record = json.loads((tmp_path / "b" / "recipe.json").read_text())
    edit(tmp_path / "b", reference={**record["reference"], "quantiles": quantiles.tolist()})
    one_line(lambda: load(tmp_path / "b"), match="reference")


def test_shapes_are_compared_before_memory_is_allocated(saved):
    edit(saved, network={"kind": "MLP", "config": {"dim": 2, "hidden": 60000, "depth": 900, "time_features": 8}})
    one_line(lambda: load(saved), match="another architecture|cannot be built")
    edit(saved, network={"kind": "MLP", "config": {"dim": 2, "hidden": 10**9}})
    one_line(lambda: load(saved), match="cannot be built: .*hidden must be a whole number")


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", "model.pt", ""])
def test_weights_are_read_from_the_folder_of_the_checkpoint_only(name, saved):
    edit(saved, files={name: "0" * 64})
    one_line(lambda: load(saved), match="is not the name of a weights file")


def test_a_checkpoint_stays_complete_until_the_new_one_replaces_it(saved, monkeypatch):
    before = {p.name: p.read_bytes() for p in saved.iterdir()}
    monkeypatch.setattr(fmwc.checkpoint, "write_json", None)  # the record, which is written last, cannot be written
    with pytest.raises(TypeError):
        save(mlp_field(seed=5), saved)
    assert same_weights(load(saved), mlp_field())
    assert before.items() <= {p.name: p.read_bytes() for p in saved.iterdir()}.items()
    monkeypatch.undo()
    save(mlp_field(seed=6), saved)
    assert same_weights(load(saved), mlp_field(seed=6))
    save(mlp_field(seed=7), saved)
    assert same_weights(load(saved), mlp_field(seed=7))


def test_loading_does_not_change_torchs_random_state(saved):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    load(saved)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_identity_is_that_of_the_weights_and_the_reference(saved):
    same = identity(saved)
    update(saved, provenance={"commit": "abc"})
    assert identity(saved) == same
    save(mlp_field(seed=4), saved)
    assert identity(saved) != same


def test_saving_keeps_other_files(tmp_path):
    for name in ("notes.json", "model-mine.safetensors"):
        (tmp_path / name).write_text("mine")
    for _ in range(2):
        save(mlp_field(), tmp_path)
    assert load(tmp_path).space is not None
    for name in ("notes.json", "model-mine.safetensors"):
        assert (tmp_path / name).read_text() == "mine"
