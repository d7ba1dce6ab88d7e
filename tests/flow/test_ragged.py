"""Channels with different numbers of rows per sample, without drift, and with weights."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fmwc.flow import Channel, FlatTorus, Space, flow_matching_loss
from fmwc.randomness import Stream
from fmwc.sampling import noise
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
