"""A campaign gives the same table whatever blocks, parts and interruptions it had, and says what it did."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

import fmwc
from fmwc.errors import FmwcError, MismatchError, OutputError, UsageError
from fmwc.files import claimed
from fmwc.identity import seal
from fmwc.screening import merge, parts, screen, status
from fmwc.screening.blocks import run_local, set_aside
from fmwc.screening.campaign import CAMPAIGN
from fmwc.screening.stages import Check, Judge
from tests.conftest import mlp_field
from tests.screening.fakes import Fake, segment
from tests.test_documents import ROOT

SMALL = {"batch": 16, "budget": 10}


def points(out, count=100, **options):
    return screen("checkerboard", count, out=out, **{**SMALL, **options})


def table(folder):
    return pq.read_table(Path(folder) / "results.parquet")


def same(one, other):
    assert table(one).equals(table(other))
    assert (Path(one) / "ranked.csv").read_bytes() == (Path(other) / "ranked.csv").read_bytes()


def in_children(*words):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("in_children.py")), *map(str, words)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """All of 100 points; and the surest fifth of them."""
    folder = tmp_path_factory.mktemp("whole")
    points(folder / "all", block=16)
    points(folder / "fifth", keep=0.2, block=16)
    return folder


# ---- the same table --------------------------------------------------------------------------------------------------


def test_rows_are_the_samples_of_fmwc_sample(whole):
    domain, field = fmwc.registry.open_checkpoint("checkerboard", "cpu")
    run = domain.draw(field, 100, 0, None, config=fmwc.SamplingConfig(batch=16))
    rows = table(whole / "all")
    assert rows["index"].to_pylist() == [*range(100)]
    assert np.allclose(np.stack(rows["x"].to_pylist()), run.x.numpy(), atol=1e-5)
    assert np.allclose(rows["score"].to_numpy(), run.score().numpy(), atol=1e-3)
    assert rows["good"].to_pylist() == (~domain.judge(run)).tolist()


@pytest.mark.parametrize(("name", "keep"), [("all", None), ("fifth", 0.2)])
def test_blocks_and_parts_do_not_change_the_table(whole, tmp_path, name, keep):
    points(tmp_path / "blocks", keep=keep, block=48)
    same(whole / name, tmp_path / "blocks")
    points(tmp_path / "a", 64, first=0, keep=keep, block=32)
    points(tmp_path / "b", 36, first=64, keep=keep)
    merge([tmp_path / "b", tmp_path / "a"], out=tmp_path / "merged", budget=10)
    if keep:
        points(tmp_path / "merged", keep=keep)
    same(whole / name, tmp_path / "merged")


def test_more_samples_keep_the_rows_of_fewer(whole, tmp_path):
    points(tmp_path / "fewer", 40)
    assert table(tmp_path / "fewer").equals(table(whole / "all").slice(0, 40))


def test_a_share_keeps_the_lowest_scores_of_all(whole):
    scores, kept = table(whole / "all")["score"].to_numpy(), table(whole / "fifth")
    assert kept["index"].to_pylist() == sorted(np.argsort(scores, kind="stable")[:20].tolist())
    places = pd.read_csv(whole / "fifth" / "ranked.csv", dtype={"name": str})
    assert places["place"].tolist() == [*range(1, 11)]
    assert places["good"].is_monotonic_decreasing
    stages = {row["stage"]: (row["rows_in"], row["rows_out"]) for row in funnel(whole / "fifth")}
    good = sum(kept["good"].to_pylist())
    assert stages == {"draw": (100, 100), "check": (100, 100), "keep": (100, 20), "judge": (20, 20), "good": (20, good)}


def funnel(folder):
    return json.loads((folder / "funnel.json").read_text())["stages"]


QUICK = {"steps": 5, "score": "integrated", "budget": 3, "batch": 2}


def test_digits_have_the_same_table_in_other_blocks(tmp_path):
    for block in (2, 4):
        screen("mnist", 5, out=tmp_path / str(block), block=block, **QUICK)
    same(tmp_path / "2", tmp_path / "4")
    rows = table(tmp_path / "2")
    assert rows["y"].to_pylist() == [0, 1, 2, 3, 4]
    assert rows["x"].type.list_size == 28 * 28
    best = np.load(tmp_path / "2" / "best.npz")
    assert best["x"].shape == (3, 1, 28, 28)
    assert (tmp_path / "2" / "best.png").exists()


def test_crystals_have_the_same_table_in_other_blocks_and_are_written_as_cif(tmp_path):
    pytest.importorskip("chgnet")
    options = {**QUICK, "steps": 10, "keep": 3, "relax": 1}
    for block in (2, 4):
        screen("crystals", 4, out=tmp_path / str(block), block=block, **options)
    same(tmp_path / "2", tmp_path / "4")
    rows = table(tmp_path / "2")
    assert {"formula", "e_above_hull", "metastable", "relaxed_cell", "converged"} <= {*rows.column_names}
    assert [len(numbers) for numbers in rows["numbers"].to_pylist()] == rows["atoms"].to_pylist()
    drawn = pq.read_table(tmp_path / "2" / "blocks" / "draw-00000.parquet")
    judge = Judge("crystals", "crystals", "", {}, relax=1).open()
    assert judge(drawn.slice(0, 0)).schema.equals(rows.schema)  # blocks without a row have the same columns
    ranked = pd.read_csv(tmp_path / "2" / "ranked.csv", dtype={"name": str})
    assert ranked["e_above_hull"].dropna().is_monotonic_increasing
    assert {path.stem for path in (tmp_path / "2" / "cif").iterdir()} == {*ranked["name"]}


def test_a_network_whose_code_was_edited_is_refused(workdir):
    fmwc.save(fmwc.attach(fmwc.entry.build("their_nets:made")[0], space=(2,)), "net")
    options = {"out": "out", "network": "their_nets:made", "score": "spread", **SMALL}
    screen("net", 40, **options)
    screen(str(Path("net").absolute()), 40, **options)  # the same folder
    with Path("their_nets.py").open("a") as file:
        file.write("\n# edited\n")
    with pytest.raises(MismatchError, match=r"network_source: [0-9a-f]{12} before, [0-9a-f]{12} now"):
        screen("net", 40, **options)


def test_the_settings_of_a_judge_name_the_content_of_its_data(tmp_path):
    def settings(data):
        return Judge("crystals", "crystals", "", {}, data=str(data)).settings()

    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train.csv").write_text("material_id,cif\n")
    before = settings(folder)
    assert before["judge"] == "chgnet"
    assert settings(os.path.relpath(folder)) == before
    (folder / "train.csv").write_text("material_id,cif\na,b\n")
    assert settings(folder)["data"] != before["data"]
    with pytest.raises(FmwcError, match="nowhere does not exist"):
        settings(tmp_path / "nowhere")


def test_an_own_network(workdir):
    fmwc.save(fmwc.attach(fmwc.entry.build("their_nets:made")[0], space=(2,)), "net")
    for block in (16, 32):
        screen("net", 40, out=f"out-{block}", block=block, network="their_nets:made", score="spread", **SMALL)
    same("out-16", "out-32")
    assert "good" not in table("out-16").column_names
    assert table("out-16")["score"].to_numpy().std() > 0
    with pytest.raises(UsageError, match=r"confidence is withheld.*--score"):
        screen("net", 40, out="other", network="their_nets:made")
    assert not Path("other").exists()


# ---- interruptions and failures --------------------------------------------------------------------------------------


def test_a_killed_driver_repeats_only_unfinished_blocks(tmp_path):
    assert in_children("kills", tmp_path / "killed", 3) >= 1
    same(tmp_path / "killed", tmp_path / "killed-undisturbed")
    assert not [*(tmp_path / "killed" / "blocks").glob("*.attempt-*")]


def test_a_block_that_ends_its_process_is_set_aside(tmp_path):
    assert in_children("poison", tmp_path) == 2  # runs of the driver, of which the first was ended
    given = segment(tmp_path, Fake("a"))
    assert [given.about(block) is not None for block in range(6)] == [True, True, False, True, True, True]
    assert set_aside(given) == {2: "its worker was killed"}


def test_a_block_that_fails_three_times_is_set_aside_and_the_others_finish(whole, tmp_path, monkeypatch):
    check, tries = Check._check, []

    def failing(self, rows):
        if 40 in rows["index"].to_pylist():
            tries.append(1)
            raise RuntimeError("no luck\nat all")
        return check(self, rows)

    with monkeypatch.context() as patch:
        patch.setattr(Check, "_check", failing)
        summary = points(tmp_path, block=16)
    assert len(tries) == 3
    assert summary.set_aside == {"draw-00002": "RuntimeError: no luck at all"}
    left = [i for i in range(100) if i // 16 != 2]
    assert table(tmp_path)["index"].to_pylist() == left
    assert points(tmp_path).set_aside  # not tried again unless asked
    with pytest.raises(
        FmwcError, match=r"1 of 7 blocks are missing or damaged, .* draw-00002.parquet \(1 set aside; add --retry"
    ):
        merge([tmp_path], out=tmp_path / "merged")
    state = status(tmp_path)[1]
    assert state[0].startswith("finished, 1 set aside; add --retry")
    assert state[1] == "draw block 2 was set aside: RuntimeError: no luck at all"
    assert not points(tmp_path, retry=True).set_aside
    same(tmp_path, whole / "all")


def test_failed_attempts_of_another_campaign_do_not_count(whole, tmp_path, monkeypatch):
    def failing(self, rows):
        raise RuntimeError(f"no luck from {rows['index'][0]}")

    with monkeypatch.context() as patch:
        patch.setattr(Check, "_check", failing)
        assert len(points(tmp_path, seed=1, block=16).set_aside) == 7
    assert not points(tmp_path, block=16, force=True).set_aside
    same(tmp_path, whole / "all")
    assert not [*tmp_path.rglob("*.attempt-*")]


def test_a_reason_that_every_block_has_ends_the_campaign(whole, tmp_path, monkeypatch):
    def failing(self, rows):
        tries.append(rows["index"][0].as_py())
        raise RuntimeError("wrong settings")

    tries: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(Check, "_check", failing)
        for _ in range(4):
            with pytest.raises(
                OutputError, match=r"the first 3 blocks of .* failed for the same reason: RuntimeError: w"
            ):
                points(tmp_path, block=16)
    assert tries == [0, 16, 32] * 4
    assert not points(tmp_path, block=16).set_aside
    same(tmp_path, whole / "all")


def test_after_a_retry_rows_are_kept_among_all(whole, tmp_path, monkeypatch):
    check = Check._check

    def failing(self, rows):
        if rows["index"][0].as_py() == 16:
            raise RuntimeError("not yet")
        return check(self, rows)

    with monkeypatch.context() as patch:
        patch.setattr(Check, "_check", failing)
        points(tmp_path, keep=0.2, block=16)
    assert len(table(tmp_path)) == 17  # a fifth of 84
    points(tmp_path, keep=0.2, retry=True)
    same(tmp_path, whole / "fifth")


def test_a_damaged_block_is_computed_again(whole, tmp_path):
    points(tmp_path, block=16)
    damage(tmp_path / "blocks" / "draw-00003.parquet")
    (tmp_path / "blocks" / "draw-00005.parquet").unlink()
    points(tmp_path)
    same(tmp_path, whole / "all")


def test_rows_to_keep_are_chosen_again_if_their_file_is_gone_or_damaged(whole, tmp_path):
    points(tmp_path, keep=0.2)
    blocks = tmp_path / "blocks"
    kept, chosen = blocks / "kept-00000.parquet", json.loads((blocks / "kept.json").read_text())
    for harm in (
        kept.unlink,
        lambda: damage(kept),
        lambda: kept.write_bytes(kept.read_bytes()[:-9]),
        lambda: (blocks / "kept.json").write_text(json.dumps({**chosen, "rows": 10**15})),
        lambda: (blocks / "kept.json").write_text(json.dumps({**chosen, "rows": 10**15, "step": 10**15})),
    ):
        harm()
        (blocks / "judge-00000.parquet").unlink()
        assert not points(tmp_path, keep=0.2).set_aside
        same(tmp_path, whole / "fifth")


def test_rows_that_cannot_be_read_are_no_death_of_a_worker(tmp_path):
    given = replace(segment(tmp_path, Fake("a"), blocks=1), source="kept")
    (outcome,) = run_local(given, [0], "driver")
    assert "kept-00000.parquet cannot be read" in outcome.problem
    assert [one["reason"] for one in given.attempts(0)] == [outcome.problem]


def test_a_second_driver_is_refused_and_status_is_not(whole):
    with claimed(whole / "all", "screen", adds=(CAMPAIGN,)):
        with pytest.raises(OutputError, match="in use by process"):
            points(whole / "all")
        rows, remarks = status(whole / "all")
    assert (rows[0][""], rows[0]["blocks"], rows[0]["rows"]) == ("draw", "7 of 7", "100 of 100")
    assert remarks == ["complete"]


def test_the_state_of_a_part_and_of_a_campaign_without_blocks(tmp_path):
    points(tmp_path, 32, first=0, keep=5)
    assert status(tmp_path)[1] == ["complete; put all parts together with fmwc merge"]
    shutil.rmtree(tmp_path / "blocks")
    assert status(tmp_path)[1][0].startswith("blocks/ was deleted, so the command would start over")


def test_other_options_in_the_same_folder_are_refused(whole):
    for options, difference in (
        ({"count": 101}, "count: 100 before, 101 now"),
        ({"seed": 1}, "seed: 0 before, 1 now"),
        ({"keep": 5}, "keep: none before, 5 now"),
        ({"batch": 8}, "batch: 16 before, 8 now"),
        ({"judge": "none"}, "judge: default before, none now"),
    ):
        with pytest.raises(MismatchError, match="holds another campaign") as error:
            points(whole / "all", **options)
        assert difference in str(error.value)
    with pytest.raises(MismatchError, match="has blocks of 16 rows"):
        points(whole / "all", block=32)


def test_merge_refuses_overlaps_holes_and_strangers(tmp_path):
    for name, first, count, options in (
        ("a", 0, 32, {}),
        ("b", 16, 32, {}),
        ("c", 48, 16, {}),
        ("seed", 32, 16, {"seed": 1}),
        ("keep", 32, 16, {"keep": 3}),
    ):
        points(tmp_path / name, count, first=first, **options)
    for names, words in (
        ("ab", "both hold the rows from 16 on"),
        ("ac", "rows from 32 to 47 are missing"),
        ("bc", "rows from 0 to 15 are missing"),
        (("a", "seed"), r"do not belong together \(seed: 0 before, 1 now\)"),
        (("a", "keep"), r"do not belong together \(keep: none before, 3 now\)"),
    ):
        with pytest.raises(FmwcError, match=words):
            merge([tmp_path / name for name in names], out=tmp_path / "merged")
    with pytest.raises(FmwcError, match="holds no campaign"):
        merge([tmp_path], out=tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def damage(path):
    content = bytearray(path.read_bytes())
    content[60] ^= 255  # in the data, not in the footer
    path.write_bytes(content)


def test_parts_can_be_merged_again(whole, tmp_path, monkeypatch):
    points(tmp_path / "a", 64, first=0, block=32)
    points(tmp_path / "b", 36, first=64)
    for force in (False, False, True, True):
        merge([tmp_path / "a", tmp_path / "b"], out=tmp_path / "merged", budget=10, force=force)
        same(whole / "all", tmp_path / "merged")
        assert len([*(tmp_path / "merged" / "blocks").glob("draw-*.parquet")]) == 5
    with monkeypatch.context() as patch:
        patch.setattr(parts, "MOST_BLOCKS", 4)
        with pytest.raises(FmwcError, match="the parts have 5 blocks, more than 4"):
            merge([tmp_path / "a", tmp_path / "b"], out=tmp_path / "other")
    damage(tmp_path / "b" / "blocks" / "draw-00001.parquet")
    with pytest.raises(FmwcError, match=r"b is not complete: 1 of 3 blocks .* draw-00001.parquet \(run its command"):
        merge([tmp_path / "a", tmp_path / "b"], out=tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_memory_does_not_grow_with_the_number_of_samples(tmp_path):
    module = "from fmwc.networks import MLP\nfrom fmwc.flow import euclidean\n\ndef made():\n"
    (tmp_path / "wide_nets.py").write_text(f"{module}    return MLP(256, 8, 1, 8), euclidean((256,))\n")
    fmwc.save(mlp_field(8, 1, 256), tmp_path / "net-net")
    fmwc.save(mlp_field(8, 1, 256), tmp_path / "more-net")
    few, many = in_children("memory", tmp_path / "net", 4_096), in_children("memory", tmp_path / "more", 65_536)
    assert many - few < 24_000  # kB; the samples take 67 MB


# ---- promises --------------------------------------------------------------------------------------------------------


def test_a_promise_keeps_what_it_guarantees_and_refuses_other_samples(whole, tmp_path, run):
    assert run("sample", "checkerboard", "-n", 400, "--seed", 7, "--out", tmp_path / "s")[0] == 0
    labels = ("--labels", tmp_path / "s" / "samples.csv", "--bad", "confidence < 0.5")
    words = ("--max-risk", 0.3, *labels, "--out", tmp_path / "f")
    assert run("filter", tmp_path / "s", *words)[0] == 0
    promise = tmp_path / "f" / "promise.json"
    threshold = json.loads(promise.read_text())["threshold"]
    points(tmp_path / "kept", promise=promise, block=32)
    everything = table(whole / "all")
    expected = everything.filter(np.array(everything["score"].to_numpy() <= threshold))
    assert 0 < len(expected) < 100
    assert table(tmp_path / "kept").equals(expected)
    content = json.loads(promise.read_text())
    lower = seal({**content, "threshold": -1e6})  # keeps nothing
    (tmp_path / "lower.json").write_text(json.dumps(lower))
    assert points(tmp_path / "nothing", promise=tmp_path / "lower.json").funnel[-1]["rows_in"] == 0
    assert table(tmp_path / "nothing").schema.equals(everything.schema)
    with pytest.raises(MismatchError, match=r"was made for other samples.*steps"):
        points(tmp_path / "other", promise=promise, steps=20, score="spread")
    with pytest.raises(UsageError, match="contradict each other"):
        points(tmp_path / "other", promise=promise, keep=0.1)
    assert not (tmp_path / "other").exists()


# ---- commands --------------------------------------------------------------------------------------------------------


def test_commands_print_the_funnel_and_the_state(tmp_path, run):
    out = tmp_path / "c"
    words = ("checkerboard", "-n", 40, "--batch", 16, "--keep", 5, "--budget", 3, "--out", out)
    code, said, err = run("screen", *words)
    assert code == 0
    assert "funnel" in said
    assert str(out / "report.html") in said.replace("\n", "")
    assert "in this process" in err
    assert len(pd.read_csv(out / "ranked.csv")) == 3
    code, said, _ = run("screen", "--status", out)
    assert code == 0
    assert "40 of 40" in said
    assert "complete" in said
    assert run("screen", "--status", tmp_path)[0] == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "name a checkpoint and a folder"),
        *(
            (("checkerboard", "--out", "x", "--keep", keep), "--keep must be a share below 1, such as 0.1, or a whole")
            for keep in ("2.5", "1.0", "inf", "nan", "0", "-3")
        ),
        (("checkerboard", "--out", "x", "--first", 100), "--first must be a multiple of the batch size, 2048"),
        (("checkerboard", "--out", "x", "--block", 100), "--block must be a multiple of the batch size, 2048"),
        (("checkerboard", "--out", "x", "--relax", 5), "only crystals can be relaxed"),
        (("mnist", "--out", "x", "--steps", 20), "add --score NAME"),
        (("crystals", "--out", "x", "--steps", 2, "--score", "integrated", "--cut", -1), "the cut must be an energy"),
        (("crystals", "--out", "x", "--steps", 2, "--score", "integrated", "--data", "no"), "no does not exist"),
        (("checkerboard", "--out", "x", "--promise", "nothing.json"), "cannot be read"),
    ],
)
def test_wrong_options_are_one_line(words, message, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = run("screen", *words)
    assert code == 2
    assert message in err
    assert not any(tmp_path.iterdir())


def test_an_unknown_option_in_python(tmp_path):
    with pytest.raises(UsageError, match="screen has no option 'color'"):
        screen("checkerboard", 10, out=tmp_path / "x", color=1)
