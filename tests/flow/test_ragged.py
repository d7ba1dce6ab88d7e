"""Channels with different numbers of rows per sample, without drift, and with weights."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fmwc.errors import ShapeError, UsageError
from fmwc.flow import Channel, Euclidean, FlatTorus, Lattice, Space, flow_matching_loss, path_sample
from fmwc.randomness import Stream
from fmwc.sampling import SamplingConfig, noise, sample
from tests.cells import WIDTH, batch, present, space

SIZES = (3, 1, 5, 2)
TORUS = FlatTorus()


def stream(seed=0):
    return Stream(torch.Generator().manual_seed(seed))


def two(seed=0):
    """Return two batches with the same numbers of atoms."""
    x0, t, atoms = batch(*SIZES, seed=2 * seed)
    return x0, batch(*SIZES, seed=2 * seed + 1)[0], t, atoms


def absent(state, atoms):
    return torch.cat([state[name][~present(atoms)].flatten() for name in ("type", "coord")])


def rubbish(state, atoms, value=7.25):
    gone = ~present(atoms)[..., None]
    return {k: v.masked_fill(gone, value) if k != "lattice" else v for k, v in state.items()}


# ---- which rows there are -------------------------------------------------------------------------------------------


def test_space_with_rows_needs_their_number():
    with pytest.raises(
        UsageError, match=r"channel 'type' takes its number of rows from 'atoms'; give cond=\{'atoms': \.\.\.\}"
    ):
        space().given({"atom": torch.tensor([1])})
    with pytest.raises(UsageError, match="give cond="):
        flow_matching_loss(lambda x, t: x, space(), two()[1], seed=0)


def test_space_without_rows_is_unchanged():
    plain = Space({"x": Channel((3,))})
    assert plain.given({"atoms": torch.tensor([1])}) is plain
    ragged = space()
    given_one, given_two = (ragged.given({"atoms": torch.tensor(n)}) for n in ([1, 2], [5]))
    assert not ragged.present  # the original space is not changed
    assert [given_one.present["coord"].shape, given_two.present["type"].shape] == [(2, WIDTH, 1), (1, WIDTH, 1)]


def test_numbers_of_rows_may_be_a_list_and_may_differ_between_channels():
    made = Space({"a": Channel((4,), rows="n"), "b": Channel((2, 3, 2), rows="m"), "c": Channel((2,))})
    here = made.given({"n": [4, 0, 2], "m": [1, 2, 0], "c": None})
    drawn = here.noise(3, stream())
    assert (drawn["a"] != 0).sum(1).tolist() == [4, 0, 2]
    assert (drawn["b"] != 0).flatten(1).sum(1).tolist() == [6, 12, 0]
    assert bool((drawn["c"] != 0).all())
    assert not drawn["a"][2, 2:].any()  # the first rows are the used ones


def test_noise_is_zero_in_unused_rows():
    atoms = torch.tensor(SIZES)
    drawn, whole = noise(space(), 4, 3, cond={"atoms": atoms}), space().noise(4, stream())
    assert not absent(drawn, atoms).any()
    assert bool((drawn["type"][present(atoms)] != 0).all())
    assert bool((whole["type"] != 0).all())
    longer = noise(space(), 6, 3, cond={"atoms": torch.tensor([*SIZES, 4, 4])})
    assert all(torch.equal(longer[k][:4], drawn[k]) for k in drawn)
    other = noise(space(), 4, 3, cond={"atoms": torch.tensor([5, 5, 5, 5])})
    assert torch.equal(other["coord"][present(atoms)], drawn["coord"][present(atoms)])


# ---- velocities -----------------------------------------------------------------------------------------------------


@given(st.integers(0, 50))
def test_centred_channels_do_not_drift_and_unused_rows_do_not_move(seed):
    x, v, _, atoms = two(seed)
    here = space().given({"atoms": atoms})
    found = here.tangent(x, rubbish(v, atoms))
    assert not absent(found, atoms).any()
    torch.testing.assert_close(found["coord"].sum(1), torch.zeros(4, 3, dtype=torch.float64))
    for i, n in enumerate(SIZES):  # by hand
        torch.testing.assert_close(found["coord"][i, :n], v["coord"][i, :n] - v["coord"][i, :n].mean(0))
        assert torch.equal(found["type"][i, :n], v["type"][i, :n])
    assert torch.equal(found["lattice"], v["lattice"])
    again = here.tangent(x, found)
    torch.testing.assert_close(again["coord"], found["coord"])


def test_centred_channel_without_unused_rows():
    made = Space({"x": Channel((4, 3), centred=True)})
    v = torch.randn(2, 4, 3, dtype=torch.float64)
    torch.testing.assert_close(made.tangent(torch.zeros(2, 4, 3), v), v - v.mean(1, keepdim=True))
    assert not torch.equal(v, made.tangent(v, v))


def test_single_row_does_not_move():
    x, v, _, _ = two()
    atoms = torch.ones(4, dtype=torch.long)
    assert not space().given({"atoms": atoms}).tangent(x, v)["coord"].any()


@pytest.mark.parametrize("garbage", [False, True])
def test_unused_rows_stay_zero(garbage):
    x, v, t, atoms = two()
    here = space().given({"atoms": atoms})
    v = rubbish(v, atoms, 3.7) if garbage else v
    for _ in range(3):
        x = here.advance(x, v, t)
        assert not absent(x, atoms).any()
    assert bool(((x["coord"] >= 0) & (x["coord"] < 1)).all())
    clean = batch(*SIZES, seed=0)[0]
    assert not absent(here.advance(rubbish(clean, atoms), v, t), atoms).any()  # unused rows are set to zero


# ---- paths ----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 50))
def test_velocity_is_the_derivative_of_the_path_with_rows(seed):
    x0, x1, t, atoms = two(seed)
    here, h = space().given({"atoms": atoms}), 1e-6
    x_t, u = here.path(x0, x1, t)
    ahead, behind = here.path(x0, x1, t + h)[0], here.path(x0, x1, t - h)[0]
    slope = {k: c.manifold.logmap(behind[k], ahead[k]) / (2 * h) for k, c in here.channels.items()}
    for name in u:
        torch.testing.assert_close(slope[name], u[name], rtol=1e-6, atol=1e-6)
    assert not absent(x_t, atoms).any()
    assert not absent(u, atoms).any()


@given(st.integers(0, 50))
def test_centred_torus_ends_at_the_data_up_to_one_shift_per_sample(seed):
    x0, x1, _, atoms = two(seed)
    here = space().given({"atoms": atoms})
    end, u = here.path(x0, x1, torch.ones(4, dtype=torch.float64))
    for i, n in enumerate(SIZES):
        shift = TORUS.logmap(end["coord"][i, :n], x1["coord"][i, :n])
        spread = TORUS.logmap(shift[:1].expand(n, 3), shift)
        torch.testing.assert_close(spread, torch.zeros(n, 3, dtype=torch.float64), atol=1e-9, rtol=0)
        # the shift is the drift that was removed
        drift = TORUS.logmap(x0["coord"][i, :n], x1["coord"][i, :n]).mean(0)
        torch.testing.assert_close(TORUS.logmap(shift[0], drift), torch.zeros(3).double(), atol=1e-9, rtol=0)
        torch.testing.assert_close(u["coord"][i, :n].mean(0), torch.zeros(3).double(), atol=1e-12, rtol=0)
    torch.testing.assert_close(end["type"], x1["type"])
    torch.testing.assert_close(end["lattice"], x1["lattice"])


@given(st.integers(0, 50))
def test_paths_do_not_depend_on_periodic_images(seed):
    x0, x1, t, atoms = two(seed)
    here = space().given({"atoms": atoms})
    periods = torch.randint(-3, 4, (2, 4, WIDTH, 3), generator=torch.Generator().manual_seed(seed))
    periods = periods * present(atoms)[..., None]
    plain, u = here.path(x0, x1, t)
    shifted = [{**x, "coord": x["coord"] + p} for x, p in zip((x0, x1), periods, strict=True)]
    found, v = here.path(*shifted, t)
    zero = torch.zeros_like(u["coord"])
    torch.testing.assert_close(TORUS.logmap(found["coord"], plain["coord"]), zero, atol=1e-9, rtol=0)
    torch.testing.assert_close(v["coord"], u["coord"], atol=1e-9, rtol=0)


def test_path_samples_belong_to_the_space():
    _, x1, _, atoms = two()
    x1 = {k: v.float() for k, v in x1.items()}
    t, x_t, u_t = path_sample(space().given({"atoms": atoms}), x1, stream())
    assert t.shape == (4,)
    assert not absent(x_t, atoms).any()
    assert not absent(u_t, atoms).any()
    assert float(u_t["coord"].sum(1).abs().max()) < 1e-6


# ---- any manifold ---------------------------------------------------------------------------------------------------


class Sphere:
    """The unit sphere: four methods and a noise distribution."""

    def expmap(self, x, u):
        size = u.norm(dim=-1, keepdim=True)
        return x * size.cos() + u * torch.sinc(size / math.pi)

    def logmap(self, x, y):
        cos = (x * y).sum(-1, keepdim=True)
        u = y - cos * x
        size = u.norm(dim=-1, keepdim=True)
        return torch.atan2(size, cos) * u / size.clamp_min(1e-12)

    def projx(self, x):
        return x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12)

    def proju(self, x, u):
        return u - (x * u).sum(-1, keepdim=True) * x

    def noise(self, randomness, like):
        return self.projx(randomness.normal(like))


ARROWS = Space({"arrow": Channel((4, 3), Sphere(), "own", rows="arrows"), "x": Channel((2,))})
HOW_MANY = torch.tensor([4, 1, 3])
THERE = torch.arange(4) < HOW_MANY[:, None]


@given(st.integers(0, 50))
def test_custom_manifold_with_rows_and_noise(seed):
    here = ARROWS.given({"arrows": HOW_MANY})
    x0, x1 = ({k: v.double() for k, v in here.noise(3, stream(seed + k)).items()} for k in (0, 1000))
    x0["arrow"], x1["arrow"] = (Sphere().projx(x["arrow"]) for x in (x0, x1))
    assert torch.equal(x0["arrow"].norm(dim=-1) > 0.5, THERE)
    t = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    x_t, u = here.path(x0, x1, t)
    torch.testing.assert_close(x_t["arrow"].norm(dim=-1), THERE.double())
    end, _ = here.path(x0, x1, torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(end["arrow"], x1["arrow"])
    # constant speed: the remaining distance is (1 − t) of the whole
    left = Sphere().logmap(x_t["arrow"], x1["arrow"]).norm(dim=-1)
    torch.testing.assert_close(left, u["arrow"].norm(dim=-1) * (1 - t[:, None]))
    ahead, behind = (here.path(x0, x1, t + h)[0]["arrow"] for h in (1e-5, -1e-5))
    torch.testing.assert_close(((ahead - behind) / 2e-5).norm(dim=-1), u["arrow"].norm(dim=-1))


def test_runs_stay_on_custom_manifolds():
    axis = torch.tensor([0.0, 0.0, 1.0])

    def turning(x, t, arrows):  # the component away from the sphere is ignored
        around = torch.linalg.cross(axis.expand_as(x["arrow"]), x["arrow"])
        return {"arrow": around + 2 * x["arrow"] + 5 * (x["arrow"] == 0), "x": 0 * x["x"]}

    run = sample(turning, 3, steps=200, confidence=None, cond={"arrows": HOW_MANY}, config=SamplingConfig(space=ARROWS))
    torch.testing.assert_close(run.x["arrow"].norm(dim=-1), THERE.float())
    c, s = math.cos(1.0), math.sin(1.0)
    turned = run.x0["arrow"] @ torch.tensor([[c, s, 0.0], [-s, c, 0.0], [0.0, 0.0, 1.0]])
    torch.testing.assert_close(run.x["arrow"], turned, atol=1e-2, rtol=0)
    assert torch.equal(run.x["x"], run.x0["x"])


# ---- the loss -------------------------------------------------------------------------------------------------------


def by_hand(made, v, u, sizes):
    """Σ w_c · (Σ squares of the numbers there are) / (how many there are) / Σ w_c, one number after the other."""
    total = 0.0
    for name, channel in made.channels.items():
        squares = []
        for i, n in enumerate(sizes):
            rows = zip(v[name][i].tolist(), u[name][i].tolist(), strict=True)
            for row, (a, b) in enumerate(rows):
                if channel.rows and row >= n:
                    continue
                a, b = (a, b) if isinstance(a, list) else ([a], [b])
                squares += [(p - q) ** 2 for p, q in zip(a, b, strict=True)]
        total += channel.weight * sum(squares) / len(squares)
    return total / sum(c.weight for c in made.channels.values())


@given(st.integers(0, 50), st.lists(st.integers(1, WIDTH), min_size=1, max_size=4))
def test_squared_error_by_hand(seed, sizes):
    (v, _, atoms), (u, _, _) = batch(*sizes, seed=seed), batch(*sizes, seed=seed + 1000)
    here = space().given({"atoms": atoms})
    expected = by_hand(space(), v, u, sizes)
    assert here.squared_error(v, u).item() == pytest.approx(expected, rel=1e-9)
    # values in unused rows do not matter
    assert here.squared_error(rubbish(v, atoms), u).item() == pytest.approx(expected, rel=1e-9)


def test_channel_weights_are_normalised():
    channels = {"a": Channel((2,), weight=3.0), "b": Channel((3,), weight=1.0)}
    v = {"a": torch.ones(4, 2), "b": torch.full((4, 3), 2.0)}
    u = {k: torch.zeros_like(c) for k, c in v.items()}
    assert Space(channels).squared_error(v, u).item() == pytest.approx((3 * 1 + 1 * 4) / 4)
    equal = {k: Channel(c.shape, weight=7.0) for k, c in channels.items()}
    assert Space(equal).squared_error(v, u).item() == pytest.approx(2.5)
    alone = Space({"x": Channel((2,), weight=9.0)})
    assert alone.squared_error(v["a"], u["a"]).item() == pytest.approx(1.0)


def test_errors_of_other_shapes_are_refused():
    v, u, _, atoms = two()
    here = space().given({"atoms": atoms})
    with pytest.raises(ShapeError, match="the network's velocity has shape"):
        here.squared_error({**v, "coord": v["coord"][:, :, :2]}, u)


def test_loss_of_the_exact_velocity_is_zero():
    """At x_t = t·x1 + (1 − t)·x0 with x1 = 0 in flat channels, u = −x0 = −x_t/(1 − t). Unused rows are ignored."""
    made = Space({"a": Channel((4, 2), rows="n"), "b": Channel((2,))})
    n = torch.tensor([1, 4, 2])
    x1 = {"a": torch.zeros(3, 4, 2), "b": torch.zeros(3, 2)}

    def right(x, t, n):
        return {k: -v / (1 - t)[(..., *[None] * (v.ndim - 1))] for k, v in x.items()}

    def wrong(x, t, n):  # wrong only in unused rows
        there = (torch.arange(4) < n[:, None])[..., None]
        return {**(v := right(x, t, n)), "a": torch.where(there, v["a"], 100.0)}

    for velocity in (right, wrong):
        assert flow_matching_loss(velocity, made, x1, seed=1, cond={"n": n}).item() < 1e-8
    assert flow_matching_loss(lambda x, t, n: x, made, x1, seed=1, cond={"n": n}).item() > 0.1


# ---- what channels refuse, and their description --------------------------------------------------------------------


REFUSED = {
    "no weight": ({"shape": (2,), "weight": 0.0}, "weight must be positive, got 0.0"),
    "a negative weight": ({"shape": (2,), "weight": -1.0}, "weight must be positive, got -1.0"),
    "a weight that is no number": ({"shape": (2,), "weight": math.nan}, "weight must be positive, got nan"),
    "own noise of flat space": ({"shape": (2,), "noise": "own"}, "no method noise; use noise='normal' or 'uniform'"),
    "own noise of a torus": ({"shape": (2,), "manifold": FlatTorus(), "noise": "own"}, "no method noise"),
    "rows of a number": ({"shape": (), "rows": "atoms"}, "a shape with at least one dimension"),
    "a centred number": ({"shape": (), "centred": True}, "a shape with at least one dimension"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_channels(name):
    options, message = REFUSED[name]
    with pytest.raises(UsageError, match=message) as raised:
        Channel(**options)
    assert "\n" not in str(raised.value)


def test_descriptions_survive_json():
    made = Space(
        {
            "type": Channel((WIDTH, 7), rows="atoms", weight=40.0),
            "coord": Channel((WIDTH, 3), FlatTorus(), "uniform", rows="atoms", centred=True, weight=400.0),
            "lattice": Channel((6,), Lattice((1.0, 2.0, 3.0), (0.1, 0.2, 0.3), shortest=0.7), "own"),
            "plain": Channel((2,), Euclidean()),
        }
    )
    text = json.dumps(made.describe())
    again = Space.from_description(json.loads(text))
    assert json.dumps(again.describe()) == text
    assert list(again.channels) == list(made.channels)
    for name, channel in made.channels.items():
        for key in ("shape", "noise", "rows", "centred", "weight"):
            assert getattr(again.channels[name], key) == getattr(channel, key), (name, key)
        assert type(again.channels[name].manifold) is type(channel.manifold)
    atoms = torch.tensor([2, 5])
    cond = {"atoms": atoms}
    before, after = (s.given(cond).noise(2, stream()) for s in (made, again))
    assert all(torch.equal(before[k], after[k]) for k in before)
    low = {k: torch.zeros_like(v) for k, v in before.items()}
    assert again.advance(low, low, torch.ones(2))["lattice"][0, :3].tolist() == pytest.approx([0.7] * 3)
    assert "options" not in made.describe()["plain"]
    assert set(made.describe()["plain"]) == {"shape", "manifold", "noise"}  # as in older files
