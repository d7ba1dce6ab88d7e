"""The report of a study: tables, figures and page from made-up numbers."""

import json
from itertools import product

import numpy as np
import pytest
import torch

from experiments.crystals.experiment import CrystalExperiment
from experiments.uses import figures
from experiments.uses.drawing import Drawn
from experiments.uses.figures import edited_samples
from experiments.uses.folder import NUMBERS, drawn_at, judged_at, read_study, save_drawn, save_outcomes, time_label
from experiments.uses.report import USES, entry_text, write_study
from fmwc.errors import CheckpointError
from fmwc.report.table import MISSING as NONE

COUNT = 6  # samples that are edited
WHENS = ("random", "variance", "transported", "0.2 before variance", "0.2 before transported", "t = 0.0", "t = 0.4")
SUCCESS = (0.2, 0.1, 0.3, 0.4, 0.35, 0.15, 0.5)


def metric(mean, spread=1.0):
    return {"mean": mean, "std": spread, "each": [mean], "interval": [mean - spread, mean + spread]}


def rows_of(mean, **info):
    return {
        "evaluations": 50,
        "seconds": 2.0,
        "samples": 10,
        "bad_share": metric(mean),
        "kl": {"mean": 1.0, "std": None},
        **info,
    }


def scored(value, difference=None):
    entry = {"value": value, "interval": [value - 0.1, value + 0.1]}
    if difference is not None:
        entry |= {"difference": difference, "difference_interval": [difference - 0.05, difference + 0.05]}
    names = ("auprc", "lift", "precision_1%", "precision_5%", "precision_10%")
    names += ("retention_10%", "retention_50%", "retention_80%", "retention_90%")
    return {name: dict(entry) for name in names}


def edits(intent):
    found = {}
    for when, success in zip(WHENS, SUCCESS, strict=True):
        gain = success - SUCCESS[0]
        found[f"{intent}, {when}"] = {
            "success": success, "interval": [success - 0.05, success + 0.05],
            "gain": gain, "gain_interval": [gain - 0.15, gain + 0.15],
            "time": float(when[4:]) if when.startswith("t = ") else 0.6, "scale": 0.2, "samples": COUNT,
            "replicates": 2, "shown": [True, False] * (COUNT // 2),
        }  # fmt: skip
    return found


def numbers(intents):
    kept = [share / 100 for share in range(1, 101)]
    steps = {
        f"{name}, {n}": rows_of(mean / n, grid=np.linspace(0, 1, n + 1).tolist(), grid_std=[0.01] * (n + 1))
        for name, mean in (("uniform", 50), ("Ema (paper)", 45), ("uniform, extrapolated", 20))
        for n in (5, 10)
    }
    methods = enumerate(("rewind", "more steps"))
    rewind = {f"{m}, +{n}": rows_of(4 - i, evaluations=50 + n) for n, (i, m) in product((2, 5), methods)}
    certificate = {"risk": 0.02, "labelled": 300, "splits": 100, "given": 90, "broken": 4, "allowed": 0.1, "kept": 0.8}
    certificate |= {"achieved": 0.01, "achieved_range": [0.0, 0.02]}
    not_issued = {**certificate, "risk": 0.01, "given": 0, "broken": 0}
    not_issued |= {"kept": None, "achieved": None, "achieved_range": None}
    bins = {"confidence": [0.1, 0.9], "success": [0.5, 1.0], "low": [0.4, 0.9], "high": [0.6, 1.0], "size": [50, 50]}
    compared = {"ratio (own)": scored(0.5), "spread": scored(0.6, 0.1), "peak": scored(0.5, 0.0)}
    return {
        "filter": {
            "samples": 100, "bad": 0.2, "finds": "bad", "compared": compared, "kept": kept,
            "retention": {name: [0.2 * share for share in kept] for name in compared},
        },
        "trust": {"samples": 100, "bad": 0.2, "promises": [certificate, not_issued], "reliability": bins},
        "edit": {label: row for intent in intents for label, row in edits(intent).items()},
        "steps": steps,
        "rewind": {"plain": rows_of(5), **rewind, "best of two, +50": rows_of(1, evaluations=100)},
        "guide": {"none": rows_of(5), "0.2 in 0.5–0.9": rows_of(2, seconds=8.0)},
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """Make the folder of a study with made-up numbers."""

    def make(setting="checkerboard", intents=("turn",), **changes):
        sizes = {"samples": 50, "edited": COUNT, "replicates": 2, "swept": 10, "rewound": 10, "guided": 10}
        piece = {"commit": "abc", "device": "CPU", "torch": "2", "seconds": 3.0, "seeds": [200], "sizes": sizes}
        drawn = ("samples", "edit", "steps", "rewind", "guide")
        words = {"bad_share": "failed, %", "kl": "KL"}
        found = {
            "setting": setting,
            "bad": "failed",
            "good": "fine",
            "metrics": {name: {"words": w, "higher": False, "digits": 1} for name, w in words.items()},
            "intents": {name: {"words": "it does"} for name in intents},
            "provenance": {"seeds": [200], "wide": False, "pieces": {f"{name}-200": piece for name in drawn}},
            "numbers": {**numbers(intents), **changes},
        }
        (tmp_path / NUMBERS).write_text(json.dumps(found))
        return tmp_path

    return make


def table(folder, use, number=0):
    return USES[use].tables(read_study(folder))[number].rows


# ---- tables ---------------------------------------------------------------------------------------------------------


def test_filter_tables(folder):
    found, left, apart = USES["filter"].tables(read_study(folder()))
    assert found.rows[0]["score"] == "ratio (own)"
    assert found.rows[1]["AUPRC"] == "0.600 [0.500, 0.700]"
    assert found.rows[0]["most doubtful 5 %"] == "50.0 [40.0, 60.0]"
    assert left.rows[0]["surest 80 %"] == "50.00 [40.00, 60.00]"
    assert [row["score"] for row in apart.rows] == ["spread", "peak"]
    assert apart.rows[0]["AUPRC"] == "+0.100 [+0.050, +0.150]"
    assert apart.rows[1]["surest 90 %"] == "0.00 [−5.00, +5.00]"


def test_filter_tables_of_a_score_that_finds_good_samples(folder):
    use = {**numbers(("turn",))["filter"], "finds": "good"}
    found, left, _ = USES["filter"].tables(read_study(folder(filter=use)))
    assert "surest 5 %" in found.rows[0]
    assert "most doubtful 80 %" in left.rows[0]
    assert "fine" in found.title


def test_certificates_issued_and_not_issued(folder):
    first, second = table(folder(), "trust")
    assert first["issued"] == "90 of 100"
    assert first["violated, of those issued"] == "4 of 90"
    assert first["violated, % of all splits"] == "4.0"
    assert first["failed among the kept, %"] == "1.00 [0.00, 2.00]"
    assert (second["kept, %"], second["failed among the kept, %"]) == (NONE, NONE)


def test_edit_table_compares_with_random_times_and_the_paper(folder):
    plain, peak, *_ = table(folder(), "edit")
    assert plain["gain over random, points"] == NONE
    assert peak["success, %"] == "10.0 [5.0, 15.0]"
    assert peak["gain over random, points"] == "−10.0 [−25.0, +5.0]"
    assert "paper, points" not in peak
    assert table(folder("crystals", ("chem-swap",)), "edit")[1]["paper, points"] == "+6 to +17"
    assert set(CrystalExperiment.intents) == {
        "chem-swap",
        "polymorph",
        "all-channels",
    }  # the paper gives a range over these


def test_steps_tables(folder):
    quality, _, times = USES["steps"].tables(read_study(folder()))
    assert quality.rows[0] == {"steps": "uniform", "5": "10.0 [9.0, 11.0]", "10": "5.0 [4.0, 6.0]"}
    assert times.rows[2] == {"steps": "uniform, extrapolated", "5": "1.0×", "10": "1.0×"}


def test_rewind_and_guide_tables(folder):
    rows = table(folder(), "rewind")
    assert [row["extra evaluations, requested"] for row in rows] == [NONE, "+2", "+2", "+5", "+5", "+50"]
    assert rows[0]["method"] == "plain"
    assert rows[-1]["evaluations per sample"] == "100.0"
    assert table(folder(), "guide")[1]["time ÷ none"] == "4.0×"


def test_entries():
    assert entry_text({"mean": 1.0, "std": 0.25}, 2) == "1.00 ± 0.25"
    assert entry_text({"mean": 1.0, "std": None}, 2) == "1.00"  # from one seed
    assert entry_text({"mean": float("nan"), "std": None}, 2) == entry_text(None, 2) == NONE
    assert time_label("transported") == "at the peak of the transported variance"
    assert time_label("0.4 before transported") == "0.4 before the transported peak"


# ---- figures --------------------------------------------------------------------------------------------------------


def test_figures_show_the_numbers(folder):
    study = read_study(folder())
    quality = figures.step_quality(study)
    assert len(quality.axes) == 2
    lines = {line.get_label(): line for line in quality.axes[0].get_legend_handles_labels()[0]}
    assert len(lines) == 3
    spent = figures.rewound(study)
    names = spent.axes[0].get_legend_handles_labels()[1]
    assert names == ["rewind", "more steps", "best of two"]
    curves = figures.filter_curves(study).axes[0]
    assert len(curves.lines) == 3  # random, perfect, and one score: the other scores have the same order
    grids = figures.step_grids(study)
    assert [label.get_text() for label in grids.axes[0].get_yticklabels()] == ["uniform", "Ema (paper)"]
    assert [axes.get_title(loc="left") for axes in grids.axes] == ["5 steps", "10 steps"]
    two = figures.edit_times(read_study(folder("mnist", ("style", "class"))))
    assert two.axes[0].get_ylim()[1] == pytest.approx(1.05 * 0.55)  # the highest value of both panels
    times = two.axes[0]
    assert sorted(times.lines[0].get_xdata()) == [0.0, 0.4]


def write_samples(out, kept, outcomes):
    drawn_at(out, "edit", 200).parent.mkdir()
    judged_at(out, "edit", 200).parent.mkdir()
    save_drawn(drawn_at(out, "edit", 200), {label: Drawn(value, {}) for label, value in kept.items()})
    save_outcomes(judged_at(out, "edit", 200), outcomes, "")


def labels(intent):
    return [f"{intent}, {when}" for when in WHENS]


def test_edited_points_are_drawn_with_their_trajectories(folder):
    out = folder()
    kept = {"seeds": {"ways": torch.rand(COUNT, 11, 2)}}
    kept |= {n: {"ways": torch.rand(COUNT, 11, 2), "time": torch.full((2 * COUNT,), 0.5)} for n in labels("turn")}
    write_samples(out, kept, {n: {"bad": np.zeros(1, bool)} for n in kept})
    (figure,) = edited_samples(read_study(out)).values()
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "at random times\n20% succeed",
        "at t*, the peak of the variance\n10% succeed",
        "0.2 before the transported peak\n35% succeed",
    ]


def test_older_drawings_have_no_picture(folder):
    out = folder()
    write_samples(out, {"seeds": {"ways": torch.rand(COUNT, 11, 2)}}, {"seeds": {"bad": np.zeros(1, bool)}})
    assert edited_samples(read_study(out)) == {}


def test_edited_digits_are_drawn_in_one_row_per_time(folder):
    out = folder("mnist", ("style", "class"))
    pictures = torch.zeros(COUNT, 1, 8, 8, dtype=torch.uint8)
    times = torch.full((2 * COUNT,), 0.5)
    kept = {n: {"images": pictures, "time": times} for n in ["seeds", *labels("style"), *labels("class")]}
    write_samples(out, kept, {n: {"bad": np.zeros(1, bool)} for n in kept})
    found = edited_samples(read_study(out))
    assert list(found) == ["style", "class"]
    axes = found["style"].axes[0]
    assert len(axes.images) == 1 + len(WHENS)
    assert len(axes.patches) == len(WHENS) * COUNT // 2  # a frame around each success


def test_edited_crystals_are_drawn_in_pairs(folder):
    out = folder("crystals", ("chem-swap",))
    atoms = torch.zeros(2 * COUNT, 4, dtype=torch.uint8)
    atoms[:, :2] = torch.tensor([11, 17])
    cell = torch.tensor([[4.0, 4, 4, 90, 90, 90]]).repeat(2 * COUNT, 1)
    each = {"numbers": atoms, "coords": torch.rand(2 * COUNT, 4, 3), "cell": cell, "above": torch.zeros(2 * COUNT)}
    each |= {"bad": torch.zeros(2 * COUNT, dtype=torch.bool)}
    outcomes = {"seeds": {k: v[:COUNT].clone() for k, v in each.items()}}
    outcomes |= {
        n: {**{k: v.clone() for k, v in each.items()}, "time": torch.full((2 * COUNT,), 0.3)}
        for n in labels("chem-swap")
    }
    write_samples(out, {n: {"time": torch.full((2 * COUNT,), 0.3)} for n in outcomes}, outcomes)
    (figure,) = edited_samples(read_study(out)).values()
    assert "3 of 6" in " ".join(text.get_text() for text in figure.axes[0].texts)


# ---- the page -------------------------------------------------------------------------------------------------------


def test_report_is_written_from_the_folder_alone(folder):
    out = folder()
    assert all(path.exists() for path in write_study(out))
    names = {path.stem for path in (out / "figures").iterdir()}
    assert names == {"retention", "scores", "reliability", "certificates", "edits", "grids", "steps", "rewind", "guide"}
    text = (out / "tables.md").read_text()
    assert text.count("commit abc; CPU; torch 2; sampled in 3 s.") == 6
    assert f"{COUNT} samples × 2 edits per seed, seeds 200" in text
    page = (out / "report.html").read_text()
    assert page.count("<section") == 7
    assert page.count("<img") == len(names)
    assert 'src="http' not in page


def test_report_of_one_use(folder):
    out = folder()
    found = json.loads((out / NUMBERS).read_text())
    found["numbers"] = {"guide": found["numbers"]["guide"]}
    (out / NUMBERS).write_text(json.dumps(found))
    write_study(out)
    assert [path.stem for path in (out / "figures").iterdir()] == ["guide"]
    assert (out / "tables.md").read_text().count("\n## ") == 1


def test_folders_without_a_valid_study(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no uses\.json; run python -m experiments study first"):
        read_study(tmp_path)
    (tmp_path / NUMBERS).write_text('{"setting": "mnist"}')
    with pytest.raises(CheckpointError, match=r"lacks .provenance.; delete it"):
        read_study(tmp_path)
    (tmp_path / NUMBERS).write_text('{"setting"')
    with pytest.raises(CheckpointError, match="is not JSON"):
        read_study(tmp_path)


def test_uses_without_results_have_no_table(folder):
    found = numbers(("turn",))
    study = read_study(folder(filter={**found["filter"], "compared": {}}, guide={"none": rows_of(5)}))
    assert USES["filter"].tables(study) == USES["guide"].tables(study) == []
    assert [table.title for table in USES["trust"].tables(study)] == ["Risk certificates", "Success by confidence"]
