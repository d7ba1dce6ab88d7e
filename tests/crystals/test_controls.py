"""Controls of chemistry: what may be drawn, what contradicts itself, and crystals that obey."""

import warnings

import pytest
import torch

pytest.importorskip("ase")

import fmwc
from fmwc.crystals import Controls
from fmwc.crystals.controls import UNITS
from fmwc.crystals.structures import crystals_of
from fmwc.errors import UsageError
from fmwc.networks import CSPNet

SIZES = [0, 1, 9, 9, 9, 0, 5, 2, 8, 1, 3, 1, 4, 1, 2, 0, 4, 1, 2, 1, 4]


@pytest.fixture(scope="module")
def network():
    net = CSPNet(8, 1, 2, 4)
    net.sizes.copy_(torch.tensor(SIZES))
    return net


@pytest.fixture(scope="module")
def field(network):
    from fmwc.crystals.recipe import Mp20

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("FMWC_DATA", raising=False)
        return fmwc.attach(network, space=Mp20(data="prototypes").space())


def numbers_of(run):
    return [set(row[row > 0].tolist()) for row in crystals_of(run).numbers]


# ---- crystals that are drawn -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_only_listed_elements_are_drawn(field, seed):
    drawn = numbers_of(draw(field, Controls(elements="Li,Fe,P,O"), seed))
    assert set().union(*drawn) <= {3, 26, 15, 8}


@pytest.mark.parametrize("seed", range(3))
def test_excluded_elements_are_not_drawn(field, seed):
    symbols = {z: s for s, z in Controls(elements="Sc,Ti,V,Cr,Mn,Fe,Co,Ni").named.items()}
    left_out = [*symbols.values(), *("H", "He", "Li", "Be")]
    drawn = set().union(*numbers_of(draw(field, Controls(exclude=",".join(left_out)), seed)))
    assert not drawn & {*symbols, 1, 2, 3, 4}
    assert max(drawn) <= 118


@pytest.mark.parametrize("seed", range(3))
def test_a_system_has_all_of_its_elements_and_no_others(field, seed):
    run = draw(field, Controls(system="Li-Fe-P-O"), seed)
    assert all(drawn == {3, 26, 15, 8} for drawn in numbers_of(run))
    assert run.cond["atoms"].min() >= 4


@pytest.mark.parametrize("formula", ["NaCl", "LiFePO4", "Mg(OH)2", "H", "Na4Cl4"])
def test_a_formula_is_met_exactly(field, formula):
    run, counts = draw(field, Controls(formula=formula), 1), Controls(formula=formula).counts
    for row in crystals_of(run).numbers:
        found = {int(z): int((row == z).sum()) for z in row.unique() if z}
        units = sum(found.values()) // sum(counts.values())
        assert found == {z: units * count for z, count in counts.items()}


def test_how_a_formula_takes_effect_depends_on_the_network(network):
    told = Controls(formula="NaCl")
    assert "restricted to NaCl" in told.effect(network)[0]
    assert "NaCl are given to the network" in told.effect(CSPNet(8, 1, 2, 4, given=0.5))[0]
    assert Controls(atoms="4").effect(network) == []


def test_conditions_depend_on_the_seed_only_and_hold_for_a_longer_run(network):
    controls = Controls(formula="Fe2O3", atoms="5-15")
    few, many = controls.conditions(network, 5, 3), controls.conditions(network, 9, 3)
    assert all(torch.equal(value, many[name][:5]) for name, value in few.items())
    assert not torch.equal(controls.conditions(network, 9, 4)["atoms"], many["atoms"])


def draw(field, controls, seed):
    return fmwc.sample(field, 12, steps=3, seed=seed, cond=controls.conditions(field, 12, seed), confidence=None)


# ---- numbers of atoms ------------------------------------------------------------------------------------------------


def test_without_controls_sizes_are_those_of_the_network(network):
    from fmwc.randomness import derive

    cond = Controls().conditions(network, 50, 7)
    assert cond.keys() == {"atoms"}
    assert torch.equal(cond["atoms"], network.draw_sizes(50, derive(7, "atoms")))


def test_sizes_within_a_range_keep_their_frequencies(network):
    atoms = Controls(atoms="8-12").conditions(network, 4_000, 0)["atoms"]
    share = torch.bincount(atoms, minlength=21) / 4_000
    expected = torch.tensor(SIZES).double() * torch.tensor([8 <= n <= 12 for n in range(21)])
    torch.testing.assert_close(share.double(), expected / expected.sum(), atol=0.03, rtol=0)


def test_sizes_that_the_data_never_held_can_be_asked_for(network):
    assert Controls(atoms="5").conditions(network, 3)["atoms"].tolist() == [5, 5, 5]
    assert Controls(formula="NaCl", atoms="14").conditions(network, 3)["atoms"].tolist() == [14] * 3


def test_formula_units_are_as_frequent_as_in_mp20(network):
    atoms = Controls(formula="Fe2O3").conditions(network, 4_000, 0)["atoms"]
    share = [float((atoms == 5 * units).double().mean()) for units in (1, 2, 3, 4)]
    assert share == pytest.approx(UNITS[4], abs=0.03)
    assert all(sum(row) == pytest.approx(1, abs=0.03) for row in UNITS)
    assert all(len(row) <= 20 // unit for unit, row in enumerate(UNITS, 1))


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"elements": "Xx"}, "'Xx' is not the symbol"),
        ({"elements": "Li;Fe"}, "separate symbols by ','"),
        ({"exclude": "li"}, "'li' is not the symbol"),
        ({"system": "Li,Fe"}, "separate symbols by '-'"),
        ({"elements": "Li,Li"}, "twice"),
        ({"elements": "Li,Fe", "exclude": "Fe"}, "both in elements and in exclude"),
        ({"system": "Li-Fe", "elements": "Li"}, "system already fixes the elements; leave out elements"),
        ({"formula": "LiFe", "exclude": "O"}, "formula already fixes the elements; leave out exclude"),
        ({"formula": "LiFe", "system": "Li-Fe"}, "leave out system"),
        ({"system": "Li-Fe-P-O", "atoms": "2-3"}, "at least 4 atoms"),
        ({"formula": "Li0.5CoO2"}, "not a formula of elements and whole numbers"),
        ({"formula": "X2O"}, "not a formula"),
        ({"formula": "??"}, "not a formula"),
        ({"atoms": "0"}, "rising range"),
        ({"atoms": "9-8"}, "rising range"),
        ({"atoms": "many"}, "rising range"),
        ({"atoms": "21"}, "at most 20"),
        ({"formula": "LiFePO4", "atoms": "28"}, "at most 20"),
        ({"formula": "LiFePO4", "atoms": "8-13"}, "a cell of LiFePO4 has 7 or 14 atoms, not 8-13"),
        ({"formula": "Na12Cl12"}, "24 atoms, but cells of this network hold at most 20"),
    ],
)
def test_wrong_controls_are_refused_in_one_line(network, options, words):
    with pytest.raises(UsageError) as error:
        Controls(**options).conditions(network, 2)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_elements_that_no_training_crystal_contains_give_a_warning():
    with pytest.warns(UserWarning, match="no training crystal of MP-20 contains Rn"):
        Controls(elements="Rn,O")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Controls(exclude="Rn,Pm")


def test_controls_describe_themselves():
    controls = Controls(atoms="14", formula="LiFePO4")
    assert str(controls) == "atoms=14, formula=LiFePO4"
    assert controls
    assert not Controls()
