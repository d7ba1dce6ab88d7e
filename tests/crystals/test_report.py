"""The page of a run of crystals."""

import json
import re
from base64 import b64decode
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import load

from experiments.crystals.evaluate import lift_of
from fmwc.crystals import Judgement, candidates
from fmwc.crystals import figures as crystals_drawn
from fmwc.crystals.report import write_report
from fmwc.crystals.structures import Crystals, crystals_of, encode
from fmwc.errors import ShapeError, UsageError
from fmwc.report.gallery import scripts
from fmwc.sampling import Trajectory
from fmwc.sampling.trajectory import standard_of

NAN = float("nan")
COUNT = 64
CHANNELS = ("type", "coord", "lattice")
SECTIONS = [
    "Structures by rank",
    "Share of metastable structures among the surest",
    "Uncertainty over time, by channel",
    "Surest and most doubtful structures",
    "Numbers",
    "Limitations",
    "Provenance",
]


def made(count: int = COUNT, read: int = 10) -> Trajectory:
    """Salts of 2 to 4 atoms, the doubtful ones last."""
    generator = torch.Generator().manual_seed(0)
    atoms = 2 + torch.arange(count) % 3
    present = torch.arange(4) < atoms[:, None]
    numbers = torch.tensor([11, 17, 8, 26]).repeat(count, 1) * present
    coords = torch.rand(count, 4, 3, generator=generator) * present[..., None]
    lengths, angles = 3 + 3 * torch.rand(count, 3, generator=generator), torch.full((count, 3), 90.0)
    x, _ = encode(Crystals(numbers, coords, lengths, angles, tuple(map(str, range(count)))))
    grid = torch.linspace(0, 1, read + 1)[:, None].repeat(1, count)
    hill = 1.2 - (grid[:-1] - 0.4) ** 2  # (R, B)
    doubt = 1 + torch.arange(count) / count
    var = {c: (hill * doubt**k)[..., None] for k, c in enumerate(CHANNELS, 1)}
    mean = {c: torch.zeros_like(v) for c, v in var.items()}
    x0 = {c: torch.zeros_like(v) for c, v in x.items()}
    return Trajectory(
        x, x0, grid[:-1].clone(), mean, var, grid, cond={"atoms": atoms}, default_score="integrated", seed=3
    )


def judged(run: Trajectory, energy=None, problem: str = "", novel=True) -> Judgement:
    """A judgement in which the energy rises along the run."""
    structures = candidates(crystals_of(run))
    count = len(structures)
    energy = np.linspace(-0.02, 0.6, count) if energy is None else np.asarray(energy, float)
    fine = np.isfinite(energy)
    yes, known = [bool(v) for v in fine], [bool(v) for v in energy <= 0.1]
    columns = {
        "name": [c.name for c in structures],
        "formula": ["?"] * count,
        "atoms": [len(c) for c in structures],
        "energy_per_atom": energy.tolist(),
        "e_above_hull": energy.tolist(),
        **dict.fromkeys(("distances_ok", "apart_ok", "density_ok", "unique"), yes),
        "charge_ok": [bool(v) and i % 7 > 0 for i, v in enumerate(yes)],
        "valid": [bool(v) and i % 7 > 0 for i, v in enumerate(yes)],
        "novel": [novel] * count,
        "stable": [bool(v) for v in energy <= 0],
        "metastable": known,
        "sun": [None if novel is None else bool(v) for v in energy <= 0],
        "msun": [None if novel is None else v for v in known],
        "problem": ["" if ok else problem for ok in yes],
    }
    return Judgement(columns, tuple(structures))


@pytest.fixture(scope="module")
def run():
    return made()


def page_of(tmp_path, run, judgement, numbers=(), about=None):
    page = write_report(tmp_path, run, judgement, numbers=list(numbers), provenance=about or {}).read_text()
    for script in scripts(crystals=True):
        page = page.replace(f"<script>{script.text}</script>", "")
    page = re.sub(r'<script type="application/json".*?</script>', "", page)
    return re.sub(r"\s*(</?(?:table|tbody|thead|tr|td|th)\b[^>]*>)\s*", r"\1", page)


# ---- the page ----------------------------------------------------------------------------------------------------


def test_page_is_complete_and_self_contained(tmp_path, run):
    energy = np.where(np.arange(COUNT) == COUNT - 1, NAN, np.linspace(-0.02, 0.6, COUNT))
    judgement = judged(run, energy, "atoms 1 & 2 <coincide>: 0 Å")
    page = page_of(
        tmp_path, run, judgement, [{"score": "own", "AUPRC": "0.5"}], {"commit": "<script>alert(1)</script>"}
    )
    assert page.rstrip().endswith("</html>")
    assert re.findall(r"<h2 [^>]*>(.*?)</h2>", page) == SECTIONS
    assert page.count("<img ") == page.count('<img src="data:') == 2
    assert not re.search(r'(src|href)\s*=\s*"(?!data:)', page)
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "atoms 1 &amp; 2 &lt;coincide&gt;: 0 Å" in page
    assert "no: charge" in page


def test_gallery_holds_all_structures(tmp_path, run):
    judgement = judged(run, np.where(np.arange(COUNT) == 0, NAN, 0.05), "no energy")
    page = write_report(tmp_path, run, judgement, numbers=[], provenance={}).read_text()
    data = json.loads(re.search(r'class="gallery-data">(.*?)</script>', page)[1])
    tensors = load(b64decode(data["tensors"]))
    np.testing.assert_array_equal(tensors["first"], np.cumsum([0, *run.cond["atoms"].tolist()]))
    np.testing.assert_array_equal(tensors["order"], run.score().argsort(stable=True))
    assert tensors["failed"].sum() == 1
    assert data["table"]["columns"]["formula"][0] == "NaCl"
    assert data["table"]["columns"]["problem"][:2] == ["no energy", ""]
    assert {f"curve.{channel}" for channel in CHANNELS} <= {*tensors}


def test_main_numbers(tmp_path, run):
    judgement = judged(run)
    page = page_of(tmp_path, run, judgement)
    found = lift_of(run.score(), np.array(judgement["metastable"]))
    tiles = re.findall(r"<dt>([^<]*)</dt><dd class=\"[a-z]*\">([^<]*)</dd>", page)
    assert [value for _, value in tiles] == [
        f"{found['prevalence']:.1%}",
        "100.0%",
        f"{found['lift']:.2f}",
        f"{np.mean(judgement['e_above_hull']):.2f}",
    ]
    assert found["precision_10%"] == 1


def test_both_ends_are_listed(tmp_path, run):
    page = page_of(tmp_path, run, judged(run))
    sure, doubtful = re.findall(r"<tbody>(.*?)</tbody>", page)
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", sure + doubtful)]
    assert [row[0] for row in rows] == [str(i) for i in (*range(1, 21), *range(COUNT - 9, COUNT + 1))]
    assert [row[1] for row in rows[:2]] == ["00000", "00001"]
    assert rows[0][2:6] == ["NaCl", "2", f"{run.rank[0]:.3f}", "−0.020"]
    assert '<th scope="col">problem</th>' not in page  # there was no training set


@pytest.mark.parametrize("count", [1, 2, 30])
def test_few_structures_are_all_listed(tmp_path, count):
    few = made(count)
    page = page_of(tmp_path, few, judged(few))
    assert "All structures, surest first" in page
    assert len(re.findall("<tr>", page)) == count + 1
    assert "Share of metastable structures among the surest" not in page  # too few for a curve


def test_page_without_judgements(tmp_path, run):
    page = page_of(tmp_path, run, judged(run, np.full(COUNT, NAN), "the model does not support Cf"))
    assert "None of them could be judged" in page
    assert page.count("the model does not support Cf") == 30
    assert page.count("<img ") == 2


def test_page_without_good_structures(tmp_path, run):
    page = page_of(tmp_path, run, judged(run, np.full(COUNT, 0.7), novel=None))
    assert "None of them is within 0.1 eV/atom" in page
    assert 'class="">0.70</dd>' in page
    assert "100.0%" in page_of(tmp_path, run, judged(run, np.zeros(COUNT)))


def test_errors(tmp_path, run):
    empty = {c: v[:0] for c, v in run.var.items()}
    bare = replace(run, times=run.times[:0], mean=empty, var=empty)
    with pytest.raises(UsageError, match=r"kept no variance; sample with confidence=Linearised\(\)"):
        page_of(tmp_path, bare, judged(run))
    with pytest.raises(UsageError, match="'atoms': counts"):
        page_of(tmp_path, replace(run, cond={}), judged(run))
    with pytest.raises(ShapeError, match="64 structures and 30 judgements"):
        page_of(tmp_path, run, judged(made(30)))
    assert not list(tmp_path.iterdir())


def test_order_within_sizes(tmp_path, run):
    within = replace(run, standard=standard_of("atoms", run.score("integrated"), run.cond["atoms"]))
    page = page_of(tmp_path, within, judged(run))
    first = re.findall(r"<tbody><tr><td[^>]*>1</td><td[^>]*>(.*?)</td>", page)[0]
    assert int(first) == int(within.score().argmin())


@pytest.mark.parametrize("score", ["type/integrated", "integrated@0.6-0.9", "coord/peak", "endpoint"])
def test_scores_of_channels_are_compared(tmp_path, run, monkeypatch, score):
    seen = {}
    drawn = crystals_drawn.precision_curve
    monkeypatch.setattr(crystals_drawn, "precision_curve", lambda s, g: seen.update(s) or drawn(s, g))
    ranked = run.ranked_by(score)
    page = page_of(tmp_path, ranked, judged(run))
    assert ("of the atom types; other scores" in page) == score.startswith("type")
    assert ("ranked by uncertainty from t = 0.6 to 0.9; other scores" in page) == ("@" in score)
    first, *others = seen
    np.testing.assert_array_equal(seen[first], ranked.score())
    words = ["atom types", "coordinates", "lattice"]
    channel, _, kind = score.rpartition("/")
    if channel:
        words.pop(CHANNELS.index(channel))
        np.testing.assert_array_equal(seen["all channels"], run.score(kind))
        words.append("all channels")
    assert others == words
    np.testing.assert_array_equal(seen["lattice"], run.score(kind, channel="lattice"))
