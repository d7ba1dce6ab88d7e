"""A campaign gives the same table whatever blocks, shares and interruptions it had, and says what it did."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from filelock import FileLock

import fmwc
from fmwc.errors import FmwcError, MismatchError, OutputError, UsageError
from fmwc.identity import seal
from fmwc.screening import screen, status
from fmwc.screening.campaign import LOCK, surest
from fmwc.screening.stages import Check, Judge
from tests.conftest import mlp_field
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
def test_blocks_and_shares_do_not_change_the_table(whole, tmp_path, name, keep):
    points(tmp_path / "blocks", keep=keep, block=48)
    same(whole / name, tmp_path / "blocks")
    shares = tmp_path / "shares"
    assert "other tasks still draw" in points(shares, keep=keep, share="2/2").note
    assert not (shares / "results.parquet").exists()
    assert "this share is done" in points(shares, keep=keep, share="1/2").note
    points(shares, keep=keep)
    same(whole / name, shares)


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


def test_blocks_that_fail_are_named_and_computed_again_by_the_same_command(whole, tmp_path, monkeypatch):
    check = Check._check

    def failing(self, rows):
        if 40 in rows["index"].to_pylist():
            raise RuntimeError("no luck\nat all")
        return check(self, rows)

    with monkeypatch.context() as patch:
        patch.setattr(Check, "_check", failing)
        with pytest.raises(OutputError, match=r"1 of 7 blocks .* draw-00002: RuntimeError: no luck at all"):
            points(tmp_path, keep=0.2, block=16)
    assert not (tmp_path / "results.parquet").exists()  # the surest of all are not known
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "blocks").iterdir()}
    assert len(before) == 6
    points(tmp_path, keep=0.2)
    assert before.items() <= {path.name: path.stat().st_mtime_ns for path in (tmp_path / "blocks").iterdir()}.items()
    same(tmp_path, whole / "fifth")


def test_blocks_that_are_missing_or_of_another_campaign_are_computed_again(whole, tmp_path):
    points(tmp_path, block=16)
    blocks = tmp_path / "blocks"
    (blocks / "draw-00005.parquet").unlink()
    (blocks / "draw-00001.parquet").write_bytes((blocks / "draw-00002.parquet").read_bytes())
    torn = (blocks / "draw-00003.parquet").read_bytes()
    (blocks / "draw-00003.parquet").write_bytes(torn[: len(torn) // 2])
    points(tmp_path)
    same(tmp_path, whole / "all")


def test_a_damaged_block_is_named(tmp_path):
    points(tmp_path, block=16)
    damage(tmp_path / "blocks" / "draw-00003.parquet")
    with pytest.raises(FmwcError, match=r"draw-00003\.parquet.* delete it"):
        points(tmp_path)


def test_rows_to_keep_are_chosen_again_if_their_file_is_gone_or_changed(whole, tmp_path):
    points(tmp_path, keep=0.2)
    blocks = tmp_path / "blocks"
    kept, chosen = blocks / "kept-00000.parquet", json.loads((blocks / "kept.json").read_text())
    for harm in (
        kept.unlink,
        lambda: kept.write_bytes(kept.read_bytes()[:-9]),
        lambda: (blocks / "kept.json").write_text(json.dumps({**chosen, "rows": 10**15})),
        lambda: (blocks / "kept.json").unlink(),
    ):
        harm()
        (blocks / "judge-00000.parquet").unlink()
        points(tmp_path, keep=0.2)
        same(tmp_path, whole / "fifth")


def test_a_second_driver_is_refused_and_status_is_not(whole):
    with FileLock(whole / "all" / LOCK):
        with pytest.raises(OutputError, match="in use"):
            points(whole / "all")
        (row,) = status(whole / "all")
    assert (row[""], row["blocks"], row["rows"]) == ("draw", "7 of 7", "100 of 100")


def test_a_folder_with_other_files_or_behind_a_link_is_refused(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    for name in ("mine", "link"):
        with pytest.raises(OutputError):
            points(tmp_path / name)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
    points(tmp_path / "mine", force=True)
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "x"


def test_force_replaces_another_campaign(whole, tmp_path):
    points(tmp_path, seed=1, block=16)
    with FileLock(tmp_path / LOCK), pytest.raises(OutputError, match="in use"):
        points(tmp_path, block=16, force=True)
    assert len([*(tmp_path / "blocks").iterdir()]) == 7
    points(tmp_path, block=16, force=True)
    same(tmp_path, whole / "all")


@pytest.mark.parametrize("count", [0, 1, 40, 100])
def test_the_surest_are_the_smallest_and_the_first_of_equal_scores(count):
    scores = np.random.default_rng(0).integers(-5, 5, 100) / 7
    assert surest(scores, count).nonzero()[0].tolist() == sorted(np.argsort(scores, kind="stable")[:count].tolist())


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


def damage(path):
    content = bytearray(path.read_bytes())
    content[60] ^= 255  # in the data, not in the footer
    path.write_bytes(content)


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
    assert run("screen", "--status", tmp_path)[0] == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "name a checkpoint and a folder"),
        *(
            (("checkerboard", "--out", "x", "--keep", keep), "--keep must be a share below 1, such as 0.1, or a whole")
            for keep in ("2.5", "1.0", "inf", "nan", "0", "-3")
        ),
        (("checkerboard", "--out", "x", "--share", "3/2"), "--share must be a task and the number of tasks"),
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
