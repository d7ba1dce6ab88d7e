"""Samples with different numbers of rows (atoms and pairs of crystals): the variance belongs to the right sample."""

import pytest
import torch
from torch import nn

from fmwc.estimators import ESTIMATORS, Diagonal, Linearised, MonteCarlo, Tangent, Transport
from fmwc.field import attach
from fmwc.moments import CLOSURES
from fmwc.networks.cspnet import layout_of
from fmwc.noise import Draw, Pass, divergence_from_prior
from fmwc.sampling import Sampler, SamplingConfig, Uniform
from tests.cells import WIDTH, alone, batch, field, present
from tests.reference import assert_within, jacobian_var, statistics

SIZES = (3, 1, 4)
MIXES = {"mixed": SIZES, "one": (1,), "only ones": (1, 1), "as many pairs as crystals": (2, 1), "pairs": (2, 2)}
CHANNELS = ("type", "coord", "lattice")


def totals(var):  # -> (B, channels)
    return torch.stack([var[name].flatten(1).sum(1) for name in CHANNELS], 1)


def flat(v):
    return torch.cat([v[name].flatten(1) for name in CHANNELS], 1)


def constant(log_alpha=-6.0, **options):
    """Make α constant, so that it does not grow large for some input."""
    return field(size=0.0, initial_log_alpha=log_alpha, **options)


# ---- the exact estimator --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MIXES)
def test_exact_variance_equals_the_whole_jacobian(name):
    made, (x, t, atoms) = field(), batch(*MIXES[name])
    var, calls = jacobian_var(lambda given: flat(made.run(given, x, t, cond={"atoms": atoms})))
    found = made.moments(x, t, Linearised(), cond={"atoms": atoms})
    torch.testing.assert_close(flat(found.var), var, rtol=1e-8, atol=1e-14)
    assert len(calls) == len(made.noise.names)
    several = atoms > 1
    assert bool((calls[:, several] > 0).all())  # the noise of every layer reaches the velocity


@pytest.mark.parametrize("name", MIXES)
def test_variance_does_not_depend_on_the_batch(name):
    made, (x, t, atoms) = field(), batch(*MIXES[name])
    whole = made.moments(x, t, Linearised(), cond={"atoms": atoms}).var
    for i in range(len(atoms)):
        x1, t1, n1 = alone(x, t, atoms, i)
        single = made.moments(x1, t1, Linearised(), cond={"atoms": n1}).var
        for channel in CHANNELS:
            torch.testing.assert_close(whole[channel][i : i + 1], single[channel], rtol=1e-8, atol=1e-14)


def test_unused_rows_have_zero_variance():
    made, (x, t, atoms) = field(), batch(*SIZES)
    there = present(atoms)
    for estimator in (Linearised(), Tangent(2), MonteCarlo(4), Diagonal()):
        var = made.moments(x, t, estimator, seed=0, cond={"atoms": atoms}).var
        for channel in ("type", "coord"):
            assert not var[channel][~there].any(), (estimator, channel)
        assert bool((var["type"][there] > 0).all())
        assert bool((var["lattice"] > 0).all())
    var = made.moments(x, t, Linearised(), cond={"atoms": atoms}).var
    assert not var["coord"][atoms == 1].any()  # a single atom does not move, for any weights
    assert bool((var["coord"][there & (atoms > 1)[:, None]] > 0).all())


@pytest.mark.parametrize("more", [(1, 2), (20, 50)], ids=str)
@pytest.mark.parametrize("name", MIXES)
def test_rows_of_padding_contribute_nothing(name, more, monkeypatch):
    made, (x, t, atoms) = field(), batch(*MIXES[name])
    plain = made.moments(x, t, Linearised(), cond={"atoms": atoms})
    drawn, divergence = made.draw_with_kl(x, t, seed=Silent(), cond={"atoms": atoms})
    room = int(atoms.sum()) + more[0], int((atoms * (atoms - 1)).sum()) + 40 + more[1]
    monkeypatch.setattr(made.network, "_layout", lambda n: layout_of(n, WIDTH, room))
    padded = made.moments(x, t, Linearised(), cond={"atoms": atoms})
    drawn_again, again = made.draw_with_kl(x, t, seed=Silent(), cond={"atoms": atoms})
    for channel in CHANNELS:
        torch.testing.assert_close(padded.var[channel], plain.var[channel], rtol=1e-9, atol=1e-14)
        torch.testing.assert_close(padded.mean[channel], plain.mean[channel], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(drawn_again[channel], drawn[channel], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(again, divergence)


class Silent:
    """Randomness that draws zeros, so that a draw equals the plain network."""

    def normal(self, like):
        return torch.zeros_like(like)

    def uniform(self, like):
        return torch.zeros_like(like)


def test_values_in_absent_rows_do_not_matter():
    made, (x, t, atoms) = field(), batch(*SIZES)
    gone = ~present(atoms)[..., None]
    dirty = {k: v if k == "lattice" else v.masked_fill(gone, 50.0) for k, v in x.items()}
    clean, found = (made.moments(s, t, Linearised(), cond={"atoms": atoms}).var for s in (x, dirty))
    assert all(torch.equal(clean[k], found[k]) for k in CHANNELS)


# ---- the others against it ------------------------------------------------------------------------------------------


def test_draws_agree_with_linearised_for_small_alpha():
    made, (x, t, atoms), draws = constant(), batch(*SIZES), 6000
    found = made.moments(x, t, MonteCarlo(draws, 300), seed=0, cond={"atoms": atoms})
    exact = made.moments(x, t, Linearised(), cond={"atoms": atoms})
    measured, expected = totals(found.var), totals(exact.var)
    moving = expected > 0
    assert (~moving).tolist() == [[False] * 3, [False, True, False], [False] * 3]
    assert not measured[~moving].any()
    ratio = measured[moving] / expected[moving]
    assert float((ratio - 1).abs().max()) < 0.1, ratio
    each, precise = flat(found.var), flat(exact.var)
    inside = precise > 0
    # The sample variance of a Gaussian has relative error √(2/k); the rest is of second order in α.
    assert float((each[inside] / precise[inside] - 1).abs().max()) < 6 * (2 / draws) ** 0.5 + 0.08
    assert_within(flat(found.mean), flat(exact.mean), (precise / draws).sqrt() + 0.05 * precise.sqrt())


def test_tangents_agree_on_average():
    made, (x, t, atoms) = field(), batch(*SIZES)
    exact = made.moments(x, t, Linearised(), cond={"atoms": atoms}).var
    many = 500
    wide = {k: v.repeat(many, *[1] * (v.ndim - 1)) for k, v in x.items()}
    single = made.moments(wide, t.repeat(many), Tangent(1), seed=0, cond={"atoms": atoms.repeat(many)}).var
    mean, _, error, _ = statistics(flat(single).unflatten(0, (many, 3)))
    assert_within(mean, flat(exact), error)
    inside = flat(exact) > 0
    assert float((error / flat(exact))[inside].max()) < 0.15  # tight enough to detect a wrong factor
    together = made.moments(x, t, Tangent(40), seed=1, cond={"atoms": atoms}).var
    torch.testing.assert_close(totals(together), totals(exact), rtol=0.5, atol=1e-12)


@pytest.mark.parametrize("probes", [1, 3])
def test_random_signs_are_unbiased_for_each_channels_total(probes):
    made, (x, t, atoms) = field(), batch(*SIZES)
    exact = made.moments(x, t, Linearised(), cond={"atoms": atoms}).var
    many = 600
    wide = {k: v.repeat(many, *[1] * (v.ndim - 1)) for k, v in x.items()}
    found = made.moments(wide, t.repeat(many), Linearised(probes), seed=0, cond={"atoms": atoms.repeat(many)}).var
    assert {k: v.shape[1:] for k, v in found.items()} == {"type": (1, 1), "coord": (1, 1), "lattice": (1,)}
    estimates = torch.stack([found[k].reshape(many, 3) * x[k][0].numel() for k in CHANNELS], 2)
    mean, _, error, _ = statistics(estimates)
    assert_within(mean, totals(exact), error)
    assert float((error / mean.clamp_min(1e-12)).max()) < 0.1


@pytest.mark.parametrize("estimator", [Linearised(), Linearised(2), Tangent(2)], ids=str)
@pytest.mark.parametrize("name", MIXES)
def test_the_mean_is_the_plain_network_bit_for_bit(name, estimator):
    made = field(torch.float32)
    x, t, atoms = batch(*MIXES[name], dtype=torch.float32)
    found, plain = made.moments(x, t, estimator, seed=0, cond={"atoms": atoms}).mean, made(x, t, atoms=atoms)
    assert all(torch.equal(found[k], plain[k]) for k in CHANNELS)


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_estimator_runs_on_every_mix(estimator, name):
    made = field(torch.float32)
    x, t, atoms = batch(*MIXES[name], dtype=torch.float32)
    mean, var = made.moments(x, t, estimator, seed=0, cond={"atoms": atoms})
    assert all(torch.isfinite(var[k]).all() and torch.isfinite(mean[k]).all() for k in CHANNELS)
    assert all(mean[k].shape == x[k].shape == var[k].shape for k in CHANNELS)
    assert bool((var["lattice"] > 0).all())


# ---- the diagonal estimator -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("closure", CLOSURES)
def test_diagonal_of_the_last_layers_is_exact(closure):
    """Use only noise that no nonlinearity and no shared weight follows, so that the formula is exact."""
    made, (x, t, atoms) = field(include=["to_type", "to_lattice"]), batch(*SIZES)
    found, exact = (made.moments(x, t, e, cond={"atoms": atoms}) for e in (Diagonal(closure), Linearised()))
    for channel in CHANNELS:
        torch.testing.assert_close(found.var[channel], exact.var[channel])
        torch.testing.assert_close(found.mean[channel], exact.mean[channel])
    assert bool((found.var["lattice"] > 0).all())


def test_diagonal_of_the_messages_to_atoms_by_hand():
    """Messages are averaged over neighbours: variances add, divided by the square of their number."""

    class Hear(nn.Module):
        def __init__(self):
            super().__init__()
            self.say = nn.Linear(2, 2)

        def rows(self, x, t, *, atoms):
            return {"say": layout_of(atoms, 4).pair}

        def forward(self, x, t, *, atoms):
            at = layout_of(atoms, 4)
            h = x.flatten(0, 1)[at.slot]
            heard = h.new_zeros(len(h), 2).index_add(0, at.receiver, self.say(h[at.sender]))
            heard = heard / (atoms - 1)[at.crystal][:, None]
            return x.new_zeros(x.shape).flatten(0, 1).index_add(0, at.slot, heard).unflatten(0, x.shape[:2])

    made = attach(Hear(), width=8, initial_log_alpha=-2.0).double()
    atoms, x = torch.tensor([3, 4]), torch.randn(2, 4, 2, dtype=torch.float64)
    found = made.moments(x, 0.5, "diagonal", cond={"atoms": atoms})
    noise = torch.exp(torch.tensor(-2.0)) * x.square() @ made.network.say.weight.detach().square().T
    for i, n in enumerate(atoms.tolist()):
        for a in range(n):
            others = [b for b in range(n) if b != a]
            torch.testing.assert_close(found.var[i, a], noise[i, others].sum(0) / (n - 1) ** 2)
    torch.testing.assert_close(found.var, made.moments(x, 0.5, cond={"atoms": atoms}).var)
    torch.testing.assert_close(found.mean, made(x, 0.5, atoms=atoms).detach())


def test_diagonal_is_of_the_size_of_the_draws():
    made, (x, t, atoms) = constant(-4.0), batch(*SIZES)
    found = totals(made.moments(x, t, "diagonal", cond={"atoms": atoms}).var)
    measured = totals(made.moments(x, t, MonteCarlo(600, 100), seed=0, cond={"atoms": atoms}).var)
    ratio = (found / measured)[:, [0, 2]]
    assert 0.2 < float(ratio.min()) < float(ratio.max()) < 5


# ---- whose rows -----------------------------------------------------------------------------------------------------


class Peek(Pass):
    def __init__(self):
        self.seen = {}

    def after(self, noisy, layer, h, y):
        self.seen[noisy.name] = (noisy.owner(h), noisy.log_alpha(h), h)
        return y


def test_rows_have_the_time_of_their_crystal():
    """log α of each row is the same as if its crystal were alone."""
    made, (x, t, atoms) = field(), batch(*SIZES)
    whole = Peek()
    made.run(whole, x, t, cond={"atoms": atoms})
    parts = []
    for i in range(3):
        parts.append(Peek())
        x1, t1, n1 = alone(x, t, atoms, i)
        made.run(parts[-1], x1, t1, cond={"atoms": n1})
    for name, (owner, log_alpha, h) in whole.seen.items():
        for i, part in enumerate(parts):
            mine = torch.arange(3) == i if owner is None else owner == i
            _, single, _ = part.seen[name]
            torch.testing.assert_close(log_alpha[mine], single[: int(mine.sum())], rtol=1e-8, atol=1e-8)
        assert len(h) == (3 if owner is None else len(owner))
    kinds = {name: 3 if owner is None else len(owner) for name, (owner, _, _) in whole.seen.items()}
    assert kinds["to_lattice"] == kinds["time"] == kinds["layers.0.from_cell"] == 3
    assert kinds["to_coord"] == kinds["layers.1.gather"] == sum(SIZES)
    assert kinds["layers.0.edge"] == kinds["layers.1.from_offset"] == sum(n * (n - 1) for n in SIZES)


def test_nested_passes_have_separate_rows():
    noise, (_, t, _) = field().noise, batch(*SIZES)
    one, two = torch.tensor([0, 1, 1, 2]), torch.tensor([0, 0])

    def lengths():
        return {len(rows.owner) for rows in noise.running.state.rows.values()}

    with noise.during(Pass(), t, {"*": one}):
        with noise.during(Pass(), t, {"*": two}):
            assert lengths() == {2}
        assert lengths() == {4}
    assert noise.running.state.rows == {}


# ---- draws and their divergence -------------------------------------------------------------------------------------


def test_kl_is_the_mean_over_used_rows():
    made, (x, t, atoms) = field(prior_rate=0.2), batch(*SIZES)
    peek = Peek()
    made.run(peek, x, t, cond={"atoms": atoms})
    expected = sum(divergence_from_prior(log_alpha, 0.2).mean() for _, log_alpha, _ in peek.seen.values())
    _, found = made.draw_with_kl(x, t, seed=Silent(), cond={"atoms": atoms})
    torch.testing.assert_close(found, expected)


def test_crystals_of_one_atom_have_no_kl_of_pairs():
    made, (x, t, atoms) = field(), batch(1, 1, 1)
    peek, draw = Peek(), Draw(Silent())
    made.run(peek, x, t, cond={"atoms": atoms})
    made.run(draw, x, t, cond={"atoms": atoms})
    seen = {n: a for n, (_, a, _) in peek.seen.items() if not n.endswith((".edge", ".from_offset"))}
    assert len(seen) == len(peek.seen) - 4
    _, found = made.draw_with_kl(x, t, seed=Silent(), cond={"atoms": atoms})
    torch.testing.assert_close(found, sum(divergence_from_prior(a, 0.3).mean() for a in seen.values()))
    assert len(draw.owners) == len(draw.log_alphas) == len(peek.seen)


def test_draws_have_gradients_for_all_noise():
    made, (x, t, atoms) = field(), batch(*SIZES)
    v, divergence = made.draw_with_kl(x, t, seed=0, cond={"atoms": atoms})
    (sum(c.square().mean() for c in v.values()) + divergence).backward()
    for name, parameter in made.noise.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all()
    for channel in ("type", "coord"):
        assert not v[channel][~present(atoms)].any()


# ---- transport ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("anneal", [{}, {"coord": 2.0}], ids=["plain", "annealed"])
def test_transported_variance_is_the_whole_jacobian_of_the_run(anneal):
    made, (x0, _, atoms) = field(), batch(3, 1)
    cond = {"atoms": atoms}
    config = SamplingConfig(controller=Uniform(2), anneal=anneal)
    sampler = Sampler(made, config, transport=Transport())
    run = sampler(x0, cond=cond)

    def rollout(given):
        x, here, dt = x0, made.space.given(cond), torch.full((2,), 0.5, dtype=torch.float64)
        for t in (0.0, 0.5):
            v = made.run(given, x, torch.full((2,), t, dtype=torch.float64), cond=cond)
            most = (1 - t) / 0.5  # no step goes beyond the predicted end
            x = here.advance(x, {k: c * min(1 + anneal.get(k, 0) * t, most) for k, c in v.items()}, dt)
        return flat({k: c * made.space.channels[k].weight ** 0.5 for k, c in x.items()})  # as scores add them up

    var, calls = jacobian_var(rollout)
    torch.testing.assert_close(run.transported.var, var, rtol=1e-8, atol=1e-14)
    torch.testing.assert_close(run.transported.profile.flatten(0, 1), calls, rtol=1e-8, atol=1e-14)
    alone_run = sampler({k: v[:1] for k, v in x0.items()}, cond={"atoms": atoms[:1]})
    torch.testing.assert_close(run.transported.var[:1], alone_run.transported.var, rtol=1e-8, atol=1e-14)
