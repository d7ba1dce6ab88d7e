"""The crystal network: invariances (order, origin, period, padding, other crystals), and its parts."""

import fnmatch
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fmwc.checkpoint import load, save
from fmwc.networks.cspnet import Messages, layout_of, metric
from tests.cells import WIDTH, alone, batch, field, present, small

SIZES = (3, 1, 5, 2)
MIXES = {"mixed": SIZES, "one of one": (1,), "only ones": (1, 1, 1), "one of five": (5,), "pairs": (2, 2, 1)}


def assert_close(found, expected, tolerance=1e-9):
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            found[name], expected[name], rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def differs(a, b, names=("type", "coord", "lattice")):
    return all(float((a[n] - b[n]).detach().abs().max()) > 1e-4 for n in names)


# ---- symmetries -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_equivariant_to_permutations(seed):
    net, (x, t, atoms) = small(), batch(*SIZES, seed=seed)
    plain = net(x, t, atoms=atoms)
    generator = torch.Generator().manual_seed(seed)
    order = torch.stack(
        [torch.cat([torch.randperm(n, generator=generator), torch.arange(n, WIDTH)]) for n in SIZES]
    )  # (B, A)
    assert not torch.equal(order, torch.arange(WIDTH).expand(4, WIDTH))

    def reorder(value):
        return value.gather(1, order[..., None].expand_as(value)) if value.ndim == 3 else value

    found = net({k: reorder(v) for k, v in x.items()}, t, atoms=atoms)
    assert_close(found, {k: reorder(v) for k, v in plain.items()})
    assert differs({"type": found["type"]}, {"type": plain["type"]}, ["type"])


def test_output_is_invariant_to_shifts_of_all_atoms():
    net, (x, t, atoms) = small(), batch(*SIZES)
    plain = net(x, t, atoms=atoms)
    shift = torch.randn(4, 1, 3, dtype=torch.float64)
    assert_close(net({**x, "coord": x["coord"] + shift}, t, atoms=atoms), plain)
    assert_close(net({**x, "coord": (x["coord"] + shift) % 1}, t, atoms=atoms), plain)
    one = x["coord"].clone()
    one[:, 0] += 0.1  # a shift of one atom does change it
    moved = net({**x, "coord": one}, t, atoms=atoms)
    for i, n in enumerate(SIZES):
        assert (float((moved["coord"][i] - plain["coord"][i]).detach().abs().max()) > 1e-6) == (n > 1)


# ---- batches and padding --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MIXES)
def test_a_crystal_is_the_same_in_any_batch(name):
    net, (x, t, atoms) = small(), batch(*MIXES[name])
    whole = net(x, t, atoms=atoms)
    for i in range(len(atoms)):
        x1, t1, n1 = alone(x, t, atoms, i)
        assert_close(net(x1, t1, atoms=n1), {k: v[i : i + 1] for k, v in whole.items()})


@pytest.mark.parametrize("value", [7.25, -1e3])
def test_unused_rows_do_not_matter(value):
    net, (x, t, atoms) = small(), batch(*SIZES)
    gone = ~present(atoms)[..., None]
    dirty = {k: v if k == "lattice" else v.masked_fill(gone, value) for k, v in x.items()}
    found = net(dirty, t, atoms=atoms)
    assert_close(found, net(x, t, atoms=atoms), 0)
    dirty = {k: v.clone().requires_grad_() for k, v in dirty.items()}
    total = sum(v.square().sum() for v in net(dirty, t, atoms=atoms).values())
    gradients = torch.autograd.grad(total, [dirty["type"], dirty["coord"]])
    for gradient in gradients:
        assert not gradient[~present(atoms)].any()
        assert gradient[0, :3].any()


@pytest.mark.parametrize("name", MIXES)
def test_absent_rows_of_the_velocity_are_zero_and_nothing_drifts(name):
    net, (x, t, atoms) = small(), batch(*MIXES[name])
    v = net(x, t, atoms=atoms)
    assert {k: c.shape for k, c in v.items()} == {k: c.shape for k, c in x.items()}
    for channel in ("type", "coord"):
        assert not v[channel][~present(atoms)].any()
    assert bool((v["type"][present(atoms)] != 0).all())
    torch.testing.assert_close(v["coord"].sum(1), torch.zeros(len(atoms), 3, dtype=torch.float64))
    assert not v["coord"][atoms == 1].any()  # a single atom does not move
    assert bool((v["coord"].flatten(1).abs().amax(1)[atoms > 1] > 1e-3).all())


@pytest.mark.parametrize("sizes", [SIZES, (1,), (1, 1), (2,), (2, 2, 1), (3,), (2, 1), (3, 1, 1, 1, 1, 1)], ids=str)
def test_rows_give_the_crystal_of_each_row(sizes):
    net, (x, t, atoms) = small(), batch(*sizes)
    owners = net.rows(x, t, atoms=atoms)
    for name, counts in (("*", atoms), ("layers.*.edge", atoms * (atoms - 1))):
        found = torch.bincount(owners[name], minlength=len(sizes) + 1)
        assert found[:-1].tolist() == counts.tolist()
        assert int(found[-1]) == len(owners[name]) - int(counts.sum())
    seen = {}
    layers = {name: layer for name, layer in net.named_modules() if isinstance(layer, nn.Linear)}
    for name, layer in layers.items():
        layer.register_forward_hook(lambda m, a, y, name=name: seen.update({name: len(a[0])}))
    net(x, t, atoms=atoms)
    for name in layers:  # the first pattern that matches a layer counts
        owner = next(owner for pattern, owner in owners.items() if fnmatch.fnmatchcase(name, pattern))
        assert seen[name] == (owner * len(sizes) if isinstance(owner, int) else len(owner)), name


# ---- where atoms meet -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("period", [0.0, 1.0])
def test_coinciding_atoms_have_finite_velocities_and_gradients(dtype, period):
    net, (x, t, atoms) = small(dtype=dtype), batch(*SIZES, dtype=dtype)
    x["coord"][2, 1] = x["coord"][2, 0] + period
    x["coord"][3, :2] = 0.0
    x = {k: v.requires_grad_() for k, v in x.items()}
    v = net(x, t, atoms=atoms)
    assert all(torch.isfinite(c).all() for c in v.values())
    total = sum(c.square().sum() for c in v.values())
    for gradient in torch.autograd.grad(total, [*x.values(), *net.parameters()], allow_unused=True):
        assert gradient is None or torch.isfinite(gradient).all()


# ---- its parts ------------------------------------------------------------------------------------------------------


def test_the_split_edge_layer_is_the_layer_of_the_concatenation():
    hidden, offset, cell = 6, 8, 9
    layer = Messages(hidden, offset, cell).double()
    joined = nn.Linear(2 * hidden + cell + offset, hidden).double()
    parts = (layer.from_receiver, layer.from_sender, layer.from_cell, layer.from_offset)
    with torch.no_grad():
        joined.weight.copy_(torch.cat([p.weight for p in parts], 1))
        joined.bias.copy_(layer.from_cell.bias)
        layer.norm.weight.normal_()
        layer.norm.bias.normal_()
    atoms = torch.tensor([3, 1, 2])
    at = layout_of(atoms, 4)
    h = torch.randn(6, hidden, dtype=torch.float64)
    cells = torch.randn(3, cell, dtype=torch.float64)
    offsets = torch.randn(8, offset, dtype=torch.float64)
    neighbours = (atoms - 1).clamp_min(1)[at.crystal][:, None].double()

    expected, pair, first = [], 0, 0
    for c, n in enumerate(atoms.tolist()):
        normed = layer.norm(h[first : first + n])
        for i in range(n):
            heard = torch.zeros(hidden, dtype=torch.float64)
            for j in range(n):
                if i != j:
                    message = joined(torch.cat([normed[i], normed[j], cells[c], offsets[pair]]))
                    heard = heard + F.silu(layer.edge(F.silu(message))) / (n - 1)
                    pair += 1
            update = layer.update(F.silu(layer.gather(torch.cat([normed[i], heard]))))
            expected.append(h[first + i] + F.silu(update))
        first += n
    assert pair == len(offsets)
    torch.testing.assert_close(layer(h, offsets, cells, neighbours, at), torch.stack(expected))


def written_out(net, x, t, n):
    """The velocity of one crystal of n atoms, computed message by message."""
    kind, coord, lattice = x["type"][0, :n], x["coord"][0, :n], x["lattice"][0]
    cell = torch.cat([(lattice - net.lattice_mean) / net.lattice_std, net.size.weight[n]])
    when = net.time.weight[:, 0] * t
    h = torch.stack([net.start(torch.cat([net.kind(k), when])) for k in kind])
    k = torch.arange(1, net.frequencies + 1, dtype=torch.float64)
    for layer in net.layers:
        normed, after = layer.norm(h), []
        for i in range(n):
            messages = []
            for j in (j for j in range(n) if j != i):
                delta = coord[j] - coord[i]
                waves = (2 * math.pi * delta[:, None] * k).flatten()
                direction = metric(lattice[None])[0] @ (delta - delta.round())
                seen = torch.cat([waves.sin(), waves.cos(), direction / direction.norm(), torch.zeros(net.padding)])
                message = layer.from_receiver(normed[i]) + layer.from_sender(normed[j])
                message = message + layer.from_cell(cell) + layer.from_offset(seen)
                messages.append(F.silu(layer.edge(F.silu(message))))
            heard = torch.stack(messages).mean(0) if messages else torch.zeros_like(normed[i])
            after.append(h[i] + F.silu(layer.update(F.silu(layer.gather(torch.cat([normed[i], heard]))))))
        h = torch.stack(after)
    h = net.norm(h)
    moved = net.to_coord(h)
    return {
        "type": net.to_type(h),
        "coord": (moved - moved.mean(0)) * net.coord_std,
        "lattice": net.to_lattice(torch.cat([h.mean(0), h.sum(0)])) * net.velocity_std + net.velocity_mean,
    }


def test_forward_equals_the_written_out_network():
    net, (x, t, atoms) = small(), batch(*SIZES)
    found = net(x, t, atoms=atoms)
    for i, n in enumerate(SIZES):
        expected = written_out(net, alone(x, t, atoms, i)[0], t[i], n)
        mine = {k: v[i] if k == "lattice" else v[i, :n] for k, v in found.items()}
        assert_close(mine, expected, 1e-10)


def test_metric_agrees_with_pymatgen():
    core = pytest.importorskip("pymatgen.core")
    lattice = batch(*SIZES, seed=3)[0]["lattice"]
    found = metric(lattice)
    for row, expected in zip(lattice, found, strict=True):
        angles = 59.9 + (120.1 - 59.9) * row[3:].sigmoid()
        matrix = torch.as_tensor(core.Lattice.from_parameters(*row[:3].tolist(), *angles.tolist()).matrix.copy())
        torch.testing.assert_close(matrix @ matrix.T, expected)


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_its_field(tmp_path):
    made = field(torch.float32)
    again = load(save(made, tmp_path / "a"))
    x, t, atoms = batch(3, 1, dtype=torch.float32)
    before, after = (f.moments(x, t, seed=0, cond={"atoms": atoms}).var for f in (made, again))
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert {n: (c.rows, c.centred, c.weight) for n, c in again.space.channels.items()} == {
        "type": ("atoms", False, 40.0), "coord": ("atoms", True, 400.0), "lattice": ("", False, 1.0)
    }  # fmt: skip
