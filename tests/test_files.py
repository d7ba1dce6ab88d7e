"""Files: atomic writes, and folders that are locked by one run."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fmwc.errors import NotFiniteError, OutputError
from fmwc.files import LOCK, MANIFEST, WORK, claimed, write_bytes, write_json, write_text


def test_write_text_and_json(tmp_path):
    path = tmp_path / "deep" / "er" / "a.txt"
    assert write_text(path, "ä") == path
    assert path.read_text(encoding="utf-8") == "ä"
    assert json.loads(write_json(tmp_path / "a.json", {"α": [1, None]}).read_text(encoding="utf-8")) == {"α": [1, None]}
    assert os.stat(path).st_mode & 0o777 == 0o644
    assert os.listdir(path.parent) == ["a.txt"]


@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, where):
    path = tmp_path / "a.bin"
    write_bytes(path, b"old")

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, where, fail)
    with pytest.raises(OSError, match="disk full"):
        write_bytes(path, b"new and longer")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.bin"]


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.bin"
    write_bytes(path, b"old")

    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", stop)
    with pytest.raises(KeyboardInterrupt):
        write_bytes(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.bin"]


def test_json_that_cannot_be_written_writes_nothing(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}


@pytest.mark.skipif(os.name != "posix", reason="needs a umask")
@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_the_umask_is_respected(tmp_path, mask):
    before = os.umask(mask)
    try:
        path = write_text(tmp_path / "a.txt", "a")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask


# ---- claimed folders ------------------------------------------------------------------------------------------------


def names(folder):
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*")}


def fill(folder, *files, **options):
    with claimed(folder, options.pop("by", "draw"), **options) as found:
        for name in files:
            write_text(folder / name, name)
    return found


def interrupted(folder):
    """Leave an unfinished run of seed 1 in a folder."""

    def run():
        with claimed(folder, "draw", {"seed": 1}, resumes=True) as claim:
            write_text(claim.work / "half", "half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()


def test_claimed_folders_must_be_empty_and_list_their_files(tmp_path):
    out = tmp_path / "a" / "b"
    found = fill(out, "x.txt", "deep/y.txt")
    assert found.finished
    assert names(out) == {"x.txt", "deep", "deep/y.txt", MANIFEST}
    with pytest.raises(OutputError, match=r"is not empty .* nothing in it was changed; .*--force") as raised:
        fill(out, "z.txt")
    assert "\n" not in str(raised.value)
    assert names(out) == {"x.txt", "deep", "deep/y.txt", MANIFEST}
    with pytest.raises(OutputError, match="is a file"):
        fill(out / "x.txt", "z.txt")


def test_force_deletes_only_files_of_the_earlier_run(tmp_path):
    fill(tmp_path, *(f"cif/{i}.cif" for i in range(5)), "samples.csv")
    (tmp_path / "cif" / "mine.cif").write_text("mine")
    (tmp_path / "notes.txt").write_text("mine")
    fill(tmp_path, *(f"cif/{i}.cif" for i in range(2)), "samples.csv", force=True)
    assert names(tmp_path) == {"cif", "cif/0.cif", "cif/1.cif", "cif/mine.cif", "notes.txt", "samples.csv", MANIFEST}


def test_again_replaces_only_files_of_the_same_command(tmp_path):
    fill(tmp_path, "page.html", "old.png", again=True)
    (tmp_path / "notes.txt").write_text("mine")
    fill(tmp_path, "page.html", again=True)
    assert names(tmp_path) == {"page.html", "notes.txt", MANIFEST}
    with pytest.raises(OutputError, match=r"notes\.txt was not written by fmwc draw and was not changed"):
        fill(tmp_path, "page.html", "notes.txt", again=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(OutputError, match="holds an unfinished fmwc draw and was not changed"):
        fill(tmp_path, "page.html", by="other", again=True)


def test_folders_without_a_manifest_are_not_touched(tmp_path):
    (tmp_path / ".fmwc-demo").write_text("")
    (tmp_path / "work.txt").write_text("mine")
    with pytest.raises(OutputError, match="not empty"):
        fill(tmp_path, "page.html", again=True)
    assert names(tmp_path) == {".fmwc-demo", "work.txt"}


@pytest.mark.parametrize("name", ["../victim.txt", "/victim.txt", "a/../../victim.txt", MANIFEST, "", 3, None])
def test_forged_manifests_cannot_delete_files_elsewhere(tmp_path, name):
    out, victim = tmp_path / "out", tmp_path / "victim.txt"
    victim.write_text("mine")
    fill(out, "a.txt")
    head = json.loads((out / MANIFEST).read_text().splitlines()[0]) | {"finished": False, "before": [name]}
    (out / MANIFEST).write_text(json.dumps(head) + "\n" + json.dumps({"file": name}) + "\n" + '{"file": "a.txt"}\n')
    fill(out, "b.txt")
    assert victim.read_text() == "mine"
    assert names(out) == {"b.txt", MANIFEST}


def test_an_unfinished_run_is_resumed_with_its_identity_and_no_other(tmp_path):
    interrupted(tmp_path)
    assert (tmp_path / WORK / "half").exists()
    with pytest.raises(OutputError, match=r"unfinished fmwc draw \(seed: 1 before, 2 now\) and was not changed"):
        fill(tmp_path, identity={"seed": 2}, resumes=True)
    with claimed(tmp_path, "draw", {"seed": 1}, resumes=True) as folder:
        assert folder.resumed
        assert (folder.work / "half").read_text() == "half"
        write_text(tmp_path / "whole", "whole")
    assert names(tmp_path) == {"whole", MANIFEST}
    with claimed(tmp_path, "draw", {"seed": 1}, resumes=True) as folder:
        assert folder.finished


def test_runs_that_fail_before_writing_leave_no_files(tmp_path):
    with pytest.raises(ValueError, match="wrong"), claimed(tmp_path / "a" / "b", "draw"):
        raise ValueError("wrong")
    assert names(tmp_path) == set()


HOLD = """
import sys, time
from fmwc.files import claimed
with claimed(sys.argv[1], "draw", resumes=True):
    print("held", flush=True)
    time.sleep(60)
"""


def test_two_runs_cannot_write_to_one_folder_and_the_owner_is_named(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path / "out"], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout.readline() == b"held\n"
            with pytest.raises(OutputError, match=rf"is in use by process {other.pid} on .*; wait for it, or choose"):
                fill(tmp_path / "out", "a.txt")
        finally:
            other.send_signal(signal.SIGKILL)
    fill(tmp_path / "out", "a.txt")  # a killed run holds no lock
    assert names(tmp_path / "out") == {"a.txt", MANIFEST}


def test_a_claim_within_a_claim_is_listed_in_both(tmp_path):
    def run(force):
        with claimed(tmp_path, "demo", again=True):
            fill(tmp_path / "model", "weights", by="train", force=force)
            write_text(tmp_path / "page.html", "page")

    run(force=False)
    assert names(tmp_path) == {"model", "model/weights", f"model/{MANIFEST}", "page.html", MANIFEST}
    run(force=True)
    assert names(tmp_path) == {"model", "model/weights", f"model/{MANIFEST}", "page.html", MANIFEST}
    with claimed(tmp_path, "demo", again=True):
        write_text(tmp_path / "page.html", "page")
    assert names(tmp_path) == {"page.html", MANIFEST}


def test_results_are_added_to_and_nothing_is_deleted(tmp_path):
    adds = {"by": "study", "adds": ("pieces/*.json",)}
    fill(tmp_path, "pieces/1.json", **adds)
    fill(tmp_path, "pieces/2.json", **adds)
    assert names(tmp_path) == {"pieces", "pieces/1.json", "pieces/2.json", MANIFEST}
    copied = tmp_path / "copied"
    (copied / "pieces").mkdir(parents=True)
    (copied / "pieces" / "1.json").write_text("1")
    fill(copied, "pieces/2.json", **adds)  # by its name, if the manifest was not copied
    assert names(copied) == {"pieces", "pieces/1.json", "pieces/2.json", MANIFEST}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("mine")
    with pytest.raises(OutputError, match="not empty"):
        fill(tmp_path / "other", "pieces/2.json", **adds)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to_is_refused_before_any_work(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="cannot be"), claimed(tmp_path / "out", "draw"):
        pytest.fail("work began")


@pytest.mark.parametrize("path", ["/proc/none/out", "/dev/null/out", "a\0b"])
def test_a_folder_that_cannot_be_made_is_refused_before_any_work(path):
    with pytest.raises(OutputError, match=r"cannot be|is a file") as raised, claimed(Path(path), "draw"):
        pytest.fail("work began")
    assert "\n" not in str(raised.value)


def test_temporary_files_of_killed_runs_are_cleared_and_others_stay(tmp_path):
    fill(tmp_path, "cif/a.cif")
    for name in (".fmwc-tmp-0123456789ab", "cif/.fmwc-tmp-0123456789ab", ".fmwc-tmp-mine"):
        (tmp_path / name).write_text("half")
    fill(tmp_path, "cif/a.cif", force=True)
    assert names(tmp_path) == {"cif", "cif/a.cif", ".fmwc-tmp-mine", MANIFEST}
    assert not (tmp_path / LOCK).exists()


@pytest.mark.skipif(os.name != "posix", reason="needs links")
@pytest.mark.parametrize("where", ["stale", "before", "file"])
def test_nothing_is_deleted_through_a_link(tmp_path, where):
    out, victim = tmp_path / "out", tmp_path / "victim"
    victim.mkdir()
    (victim / "thesis.tex").write_text("mine")
    (victim / ".fmwc-tmp-0123456789ab").write_text("mine")
    out.mkdir()
    (out / "d").symlink_to(victim)
    head = {"by": "draw", "identity": None, "finished": where == "stale", where: ["d/thesis.tex"]}
    files = '{"file": "d/thesis.tex"}\n' if where == "file" else ""
    (out / MANIFEST).write_text(json.dumps(head) + "\n" + files)
    for options in ({}, {"again": True}, {"force": True}):
        try:
            fill(out, "a.txt", **options)
        except OutputError:
            continue
    assert {p.name for p in victim.iterdir()} == {"thesis.tex", ".fmwc-tmp-0123456789ab"}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a fifo")
def test_a_manifest_that_is_not_a_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / MANIFEST)
    with pytest.raises(OutputError, match="device, pipe or socket, not a file"):
        fill(tmp_path, "a.txt")
    assert names(tmp_path) == {MANIFEST}


def test_an_interrupted_run_is_resumed_beside_files_of_others(tmp_path):
    interrupted(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    with claimed(tmp_path, "draw", {"seed": 1}, resumes=True) as folder:
        assert folder.resumed
    assert names(tmp_path) == {"notes.txt", MANIFEST}


def test_a_run_that_diverged_leaves_nothing_to_resume(tmp_path):
    def diverges():
        with claimed(tmp_path / "out", "train", {"lr": 9}, resumes=True) as folder:
            write_text(folder.work / "half", "half")
            raise NotFiniteError("the loss is NaN")

    with pytest.raises(NotFiniteError):
        diverges()
    assert names(tmp_path) == set()


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*a\.bin"):
        write_bytes(tmp_path / "a.bin", b"much")
