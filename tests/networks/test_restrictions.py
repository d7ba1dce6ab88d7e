"""Restricted types: exact for any network, sampler and set of elements, and free of side effects."""

import itertools
import math

import pytest
import torch

import fmwc
from fmwc.checks import Echo, RowEcho
from fmwc.checks.evidence import renoised, residuals
from fmwc.errors import ShapeError, UsageError
from fmwc.estimators import Linearised
from fmwc.networks.cspnet import allowed_types, codes
from fmwc.randomness import Stream
from fmwc.sampling import Reference, SamplingConfig, Trajectory, noise, read_with
from fmwc.sampling.confidence import RESTRICTED
from fmwc.state import tree_map
from fmwc.uses.continuation import with_states
from tests.cells import TYPES, WIDTH, small, space

ATOMS = torch.tensor([3, 1, 5, 2, 4, 5])
COUNT, ELEMENTS = len(ATOMS), 1 << TYPES
USED = torch.arange(WIDTH) < ATOMS[:, None]


@pytest.fixture(scope="module")
def field():
    return fmwc.attach(small(dtype=torch.float32), space=space())


def decoded(x):
    """Return the number of each atom, from 1, and 0 for unused rows."""
    return (1 + ((x["type"] > 0) << torch.arange(TYPES)).sum(-1)) * USED


def masks(seed):
    """Draw sets of allowed elements, at least one per crystal."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(COUNT, ELEMENTS, generator=generator) < 0.3
    chosen[torch.arange(COUNT), torch.randint(ELEMENTS, (COUNT,), generator=generator)] = True
    return chosen.long()


# ---- the projection --------------------------------------------------------------------------------------------------


def test_expected_types_are_those_of_independent_bits_among_the_allowed_elements():
    x1 = torch.rand(2, 3, TYPES, dtype=torch.float64) * 1.8 - 0.9
    allowed = torch.rand(2, 3, ELEMENTS) < 0.5
    allowed[..., 2] = True
    found = allowed_types(x1, torch.full((2,), 0.4), allowed, codes(TYPES).double())
    for i, j in itertools.product(range(2), range(3)):
        chance = {}
        for z in range(ELEMENTS):
            bits = [1.0 if z >> b & 1 else -1.0 for b in range(TYPES)]
            if allowed[i, j, z]:
                chance[z] = math.prod((1 + s * float(x1[i, j, b])) / 2 for b, s in enumerate(bits)), bits
        total = sum(p for p, _ in chance.values())
        expected = [sum(p * bits[b] for p, bits in chance.values()) / total for b in range(TYPES)]
        assert found[i, j].tolist() == pytest.approx(expected, abs=1e-9)


# ---- samples ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_no_forbidden_element_ever_comes_out(field, seed):
    elements, types = masks(seed), torch.zeros(COUNT, WIDTH, dtype=torch.long)
    if seed % 2:  # some atoms are given, also with elements that are not in the set
        types = torch.randint(0, ELEMENTS + 1, (COUNT, WIDTH), generator=torch.Generator().manual_seed(seed))
    stepper = ("euler", "heun", "midpoint")[seed % 3]
    config = SamplingConfig(stepper=stepper, batch=4, anneal={"type": 3.0} if seed > 8 else None)
    cond = {"atoms": ATOMS, "elements": elements, "types": types}
    run = fmwc.sample(field, COUNT, steps=1 + seed, seed=seed, cond=cond, config=config, confidence=None)
    for numbers, allowed, given in zip(decoded(run.x), elements, types, strict=True):
        for z, fixed in zip(numbers.tolist(), given.tolist(), strict=True):
            assert z == 0 or z == fixed or (fixed == 0 and allowed[z - 1])
    assert run.x["type"].abs()[USED].unique().tolist() == [1.0]  # exactly the bits of elements
    assert not run.x["type"][~USED].any()


def test_given_types_are_reached_on_their_own_path(field):
    types = torch.randint(1, ELEMENTS + 1, (COUNT, WIDTH))
    config = SamplingConfig(keep_states=True)
    run = fmwc.sample(field, COUNT, steps=8, cond={"atoms": ATOMS, "types": types}, config=config, confidence=None)
    ends = codes(TYPES)[types - 1] * USED[..., None]
    for state, t in zip(run.states, run.grid, strict=True):
        torch.testing.assert_close(state["type"], (1 - t)[:, None, None] * run.x0["type"] + t[:, None, None] * ends)
    assert torch.equal(decoded(run.x), types * USED)


# ---- confidence, files and other uses --------------------------------------------------------------------------------


def test_confidence_is_withheld_and_the_rank_remains(field):
    made = read_with(Linearised(1), 6, "euler")
    field.reference = Reference("integrated", made, torch.linspace(0, 100, 11))
    run = fmwc.sample(field, COUNT, steps=6, cond={"atoms": ATOMS, "elements": masks(1)})
    assert RESTRICTED in run.withheld
    assert len(run.rank.unique()) == COUNT
    assert not fmwc.sample(field, COUNT, steps=6, cond={"atoms": ATOMS}).withheld
    field.reference = None


def test_a_saved_run_is_recomputed_with_its_restrictions(field, tmp_path):
    cond = {"atoms": ATOMS, "elements": masks(3)}
    run = fmwc.sample(field, COUNT, steps=6, cond=cond)
    run.save(tmp_path / "samples.safetensors")
    loaded = Trajectory.load(tmp_path / "samples.safetensors")
    assert torch.equal(loaded.cond["elements"], cond["elements"])
    again, _ = with_states(field, loaded)
    assert torch.equal(again.states[-1]["type"], run.x["type"])


@pytest.mark.parametrize(
    ("cond", "error", "words"),
    [
        ({"elements": torch.zeros(COUNT, ELEMENTS, dtype=torch.long)}, UsageError, "element"),
        ({"types": torch.ones(COUNT, WIDTH + 1, dtype=torch.long)}, ShapeError, "types"),
    ],
)
def test_wrong_restrictions_are_refused_in_one_line(field, cond, error, words):
    with pytest.raises(error, match=words):
        fmwc.sample(field, COUNT, steps=2, cond={"atoms": ATOMS, **cond}, confidence=None)


# ---- networks that are told the types --------------------------------------------------------------------------------


def test_a_network_that_is_told_types_starts_as_the_plain_one_and_predicts_them_exactly():
    plain, told = small(), small(given=0.5)
    told.load_state_dict(plain.state_dict(), strict=False)
    x = {name: torch.randn(COUNT, *c.shape, dtype=torch.float64) for name, c in space().channels.items()}
    x["lattice"][:, :3] = x["lattice"][:, :3].abs() + 3
    x["type"], x["coord"] = x["type"] * USED[..., None], x["coord"] * USED[..., None]
    t, types = torch.rand(COUNT, dtype=torch.float64), torch.randint(1, ELEMENTS + 1, (COUNT, WIDTH)) * USED
    free, v = plain(x, t, atoms=ATOMS), told(x, t, atoms=ATOMS)
    assert all(torch.equal(v[name], free[name]) for name in v)
    v = told(x, t, atoms=ATOMS, types=types)
    known = codes(TYPES).double()[(types - 1).clamp_min(0)] * USED[..., None]
    torch.testing.assert_close(v["type"], (known - x["type"]) / (1 - t)[:, None, None])
    clean = plain({**x, "type": known}, t, atoms=ATOMS)  # `told` starts at zero
    torch.testing.assert_close(v["coord"], clean["coord"])
    partly = types.clone()
    partly[ATOMS > 1, 0] = 0  # not all types of these crystals are given
    v = told(x, t, atoms=ATOMS, types=partly)
    assert torch.equal(v["type"][ATOMS > 1], free["type"][ATOMS > 1])


def test_given_types_add_nothing_to_the_loss():
    told = small(given=0.5)
    ends = codes(TYPES).double()
    types = torch.randint(1, ELEMENTS + 1, (COUNT, WIDTH)) * USED
    x1 = {"type": ends[(types - 1).clamp_min(0)] * USED[..., None]}
    x1 |= {"coord": torch.rand(COUNT, WIDTH, 3, dtype=torch.float64) * USED[..., None]}
    x1["lattice"] = torch.rand(COUNT, 6, dtype=torch.float64) + 3
    given = space().given({"atoms": ATOMS})
    t, x0 = torch.rand(COUNT, dtype=torch.float64), given.noise(COUNT, Stream(), "cpu")
    x0 = {name: value.double() for name, value in x0.items()}
    x_t, u = given.path(x0, x1, t)
    v = told(x_t, t, atoms=ATOMS, types=types)
    torch.testing.assert_close(v["type"], u["type"])


@pytest.mark.parametrize("given", [0.5, 1.0])
def test_the_evidence_of_given_types_does_not_depend_on_rounding(given):
    """Types that are known add only rounding errors, whose logarithm differs by tens between precisions."""
    types = torch.randint(1, ELEMENTS + 1, (COUNT, WIDTH)) * USED
    cond, found = {"atoms": ATOMS, "types": types}, {}
    for dtype in (torch.float32, torch.float64):
        field = fmwc.attach(small(dtype=dtype, given=given), space=space())
        x0 = tree_map(lambda c: c.to(dtype), noise(space(), COUNT, 0, cond=cond))  # noqa: B023
        run = fmwc.sample(field, x0=x0, steps=20, cond=cond, confidence=None, check=Echo((0.5, 0.9)))
        rows = RowEcho((0.5, 0.9))(field, space(), run.x, cond, 0, 0).score[USED & (ATOMS > 1)[:, None]]
        found[dtype] = {"echo": run.score("echo"), "spread": run.score("spread").log(), "rows": rows.log()}
        assert all(value.isfinite().all() and (value.abs() < 12).all() for value in found[dtype].values())
    for name, value in found[torch.float64].items():
        torch.testing.assert_close(found[torch.float32][name].double(), value.double(), rtol=0, atol=0.01)
    several = ATOMS > 1  # the position of a single atom does not count either
    check = Echo((0.5,))
    r = residuals(field, space().given(cond), *renoised(space().given(cond), run.x, 0.5, 0, 0, 0), cond)
    score = check(field, space(), run.x, cond, 0, 0).score
    torch.testing.assert_close(score[several], r[1:, several].log().mean(0))
    torch.testing.assert_close(score[~several], r[2, ~several].log())
