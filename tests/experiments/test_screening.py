"""Screening from files of drawn and relaxed structures to tables: known, disturbed and collapsed crystals."""

import dataclasses
import json

import numpy as np
import pytest
import torch

pytest.importorskip("chgnet", exc_type=ImportError)
pytest.importorskip("matminer")
pytest.importorskip("smact")

from experiments.crystals import screening
from experiments.crystals.relaxations import relax_in_processes
from fmwc.crystals import candidates, mp20
from fmwc.crystals.fingerprints import fingerprints
from fmwc.crystals.structures import CHANNELS, crystals_of, encode
from fmwc.sampling import Trajectory
from tests.command import call
from tests.crystals.conftest import library, prototypes  # noqa: F401

# ruff: noqa: F811 (pytest passes fixtures by name)

COUNT, RELAXED, STEPS = 16, 12, 6


def samples(prototypes):
    """Prototypes, the second half with displaced atoms and more doubt; the last but two has all atoms in one place."""
    small = ((prototypes.atoms > 1) & (prototypes.atoms < 7)).nonzero()[: COUNT // 2, 0]
    those = prototypes.take(torch.cat([small, small]))
    generator, coords = torch.Generator().manual_seed(0), those.coords.clone()
    coords[COUNT // 2 :] += 0.12 * torch.randn(coords[COUNT // 2 :].shape, generator=generator)
    coords[COUNT - 3] = 0
    present = (those.numbers > 0)[..., None]
    x, atoms = encode(dataclasses.replace(those, coords=coords % 1 * present))
    order = torch.randperm(COUNT, generator=generator)  # of the draws, which says nothing about confidence
    x, atoms, doubt = {c: value[order] for c, value in x.items()}, atoms[order], torch.arange(1.0, COUNT + 1)[order]
    grid = torch.linspace(0, 1, 11)[:, None].repeat(1, COUNT)
    var = {c: (k * doubt.square()).expand(10, COUNT)[..., None] for k, c in enumerate(CHANNELS, 1)}
    mean, x0 = ({c: torch.zeros_like(v) for c, v in s.items()} for s in (var, x))
    options = {"cond": {"atoms": atoms}, "default_score": "type/integrated", "seed": 3}
    return Trajectory(x, x0, grid[:-1].clone(), mean, var, grid, **options)


@pytest.fixture(scope="module")
def folder(prototypes, tmp_path_factory):
    out = tmp_path_factory.mktemp("screening")
    run = samples(prototypes)
    run.save(out / "samples.safetensors")
    drawn = candidates(crystals_of(run))
    relax_in_processes(drawn[:RELAXED], out / "relaxed.npz", steps=STEPS, say=lambda line: None)
    sets = {"drawn": drawn, "test": mp20.load("prototypes", "test")}
    sets["relaxed"] = [one.candidate for one in screening.read_relaxed(out / "relaxed.npz").rows]
    for kind, given in sets.items():
        fingerprints(given, kept=out / f"fingerprints-{kind}.npz")
    return out


def screen(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fmwc.metrics.ranking.RESAMPLES", 30)
        call("experiments", "screen", folder, "--data", "prototypes")
    return json.loads((folder / "numbers.json").read_text())


@pytest.fixture(scope="module")
def numbers(folder):
    return screen(folder)


def test_sets_and_counts(numbers):
    sets = numbers["sets"]
    assert [sets[kind]["structures"] for kind in ("drawn", "same, drawn", "relaxed")] == [COUNT, RELAXED, RELAXED]
    assert sets["drawn"]["problems"] >= 1  # atoms coincide
    assert sets["drawn"]["structurally_valid"] == 1 - sets["drawn"]["problems"] / COUNT
    assert 0 < sets["drawn"]["coverage_precision"] < 1
    assert 0 < sets["drawn"]["coverage_recall"] < 1
    assert sets["test"]["structurally_valid"] == 1
    assert numbers["relaxation"] == {"limit": STEPS, "structures": RELAXED}
    assert sets["relaxed"]["e_above_hull"] < sets["same, drawn"]["e_above_hull"]


def test_known_structures_are_not_novel_and_surest(folder, numbers):
    tables = screening.tables_of_structures(folder)
    doubt, novel = (np.array(tables["drawn"][name]) for name in ("doubt", "novel"))
    sure = doubt <= screening.drawn_run(folder).score().median().item()
    assert not novel[sure].any()
    found = numbers["confidence"]["relaxed"]["confidence"]
    assert found["correlations"]["energy_drop"]["spearman"][0] < -0.5  # the surest drop least
    assert found["selections"]["rmsd"]["means"][0] < found["selections"]["rmsd"]["means"][-1]
    assert found["selections"]["novel_drawn"]["means"][0] == 0
