"""Files: atomic writes, and folders that are locked by one run."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fmwc.errors import NotFiniteError, OutputError
from fmwc.files import KEPT, LOCK, RUN, WORK, fresh, locked, moved, resumed, write_bytes, write_json, write_text


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


# ---- folders that appear at the end ----------------------------------------------------------------------------------


def names(folder):
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*")}


def fill(path, *files, **options):
    with fresh(path, **options) as folder:
        for name in files:
            write_text(folder / name, name)


def fails(path, error, **options):
    def run():
        with fresh(path, **options) as folder:
            write_text(folder / "half", "half")
            raise error

    with pytest.raises(type(error)):
        run()


def test_a_folder_appears_when_it_is_complete(tmp_path):
    out = tmp_path / "a" / "b"
    with fresh(out) as folder:
        written = write_text(folder / "deep" / "x.txt", "x")
        assert not out.exists()
    assert moved([written], folder, out) == [out / "deep" / "x.txt"]
    assert names(tmp_path) == {"a", "a/b", "a/b/deep", "a/b/deep/x.txt"}


@pytest.mark.parametrize("error", [ValueError(), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_nothing_is_left_after_an_error(tmp_path, error):
    fails(tmp_path / "a" / "b", error)
    assert names(tmp_path) == set()
    fill(tmp_path / "out", "x.txt")
    fails(tmp_path / "out", error, force=True)
    assert names(tmp_path) == {"out", "out/x.txt"}


def test_a_folder_that_is_not_empty_is_only_replaced_with_force(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    fill(out, "x.txt")  # an empty folder is replaced
    with pytest.raises(OutputError, match="not empty"):
        fill(out, "y.txt")
    assert names(tmp_path) == {"out", "out/x.txt"}
    fill(out, "y.txt", force=True)
    assert names(tmp_path) == {"out", "out/y.txt"}
    with pytest.raises(OutputError, match="file"):
        fill(out / "y.txt", "z.txt", force=True)


@pytest.mark.parametrize("name", KEPT)
def test_checkpoints_campaigns_and_repositories_are_never_replaced(tmp_path, name):
    write_text(tmp_path / "out" / name, "mine")
    with pytest.raises(OutputError, match=re.escape(name)):
        fill(tmp_path / "out", "x.txt", force=True)
    assert names(tmp_path) == {"out", f"out/{name}"}


def test_the_current_folder_is_never_replaced(tmp_path, monkeypatch):
    (tmp_path / "mine" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "mine" / "here")
    for out in ("..", tmp_path / "mine"):
        with pytest.raises(OutputError, match="cannot be replaced"):
            fill(Path(out), "x.txt", force=True)
    assert names(tmp_path) == {"mine", "mine/here"}


@pytest.mark.skipif(os.name != "posix", reason="needs links")
def test_links_are_not_followed(tmp_path):
    victim, out = tmp_path / "victim", tmp_path / "out"
    write_text(victim / "thesis.tex", "mine")
    for name in (".out.fmwc-tmp", ".out.fmwc-old"):
        (tmp_path / name).symlink_to(victim)
    fill(out, "x.txt")
    (out / "link").symlink_to(victim)
    fill(out, "x.txt", force=True)
    (tmp_path / "other").symlink_to(victim)
    for call in (lambda: fill(tmp_path / "other", "x.txt", force=True), lambda: locked(tmp_path / "other").__enter__()):
        with pytest.raises(OutputError, match="link"):
            call()
    assert names(tmp_path) == {"victim", "victim/thesis.tex", "out", "out/x.txt", "other"}


HOLD = """
import sys, time
from fmwc.files import fresh
with fresh(sys.argv[1]) as folder:
    (folder / "half").write_text("half")
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_killed_run_leaves_a_temporary_folder_which_the_next_run_deletes(tmp_path):
    out = tmp_path / "out"
    with subprocess.Popen([sys.executable, "-c", HOLD, out], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout.readline() == b"held\n"
            with pytest.raises(OutputError, match="in use"):
                fill(out, "a.txt")
        finally:
            other.send_signal(signal.SIGKILL)
    assert not out.exists()
    assert ".out.fmwc-tmp/half" in names(tmp_path)
    fill(out, "a.txt")
    assert names(tmp_path) == {"out", "out/a.txt"}


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to_is_refused_before_any_work(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="cannot be"), fresh(tmp_path / "out"):
        pytest.fail("work began")


@pytest.mark.parametrize("path", ["/proc/none/out", "/dev/null/out", "a\0b"])
@pytest.mark.parametrize("claim", [fresh, locked])
def test_a_folder_that_cannot_be_made_is_refused_before_any_work(claim, path):
    with pytest.raises(OutputError) as raised, claim(Path(path)):
        pytest.fail("work began")
    assert "\n" not in str(raised.value)


# ---- folders that resume ---------------------------------------------------------------------------------------------


def interrupted(path, error=KeyboardInterrupt):
    """Leave an unfinished run of seed 1 in a folder."""

    def run():
        with resumed(path, {"seed": 1}) as folder:
            write_text(folder.work / "half", "half")
            raise error

    with pytest.raises(error):
        run()


def test_an_interrupted_run_is_resumed_with_its_identity_and_no_other(tmp_path):
    interrupted(tmp_path)
    with pytest.raises(OutputError, match="seed"), resumed(tmp_path, {"seed": 2}):
        pytest.fail("work began")
    with resumed(tmp_path, {"seed": 1}) as folder:
        assert not folder.finished
        assert (folder.work / "half").read_text() == "half"
        write_text(tmp_path / "whole", "whole")
    assert names(tmp_path) == {"whole", RUN}
    with resumed(tmp_path, {"seed": 1}) as folder:
        assert folder.finished
    with resumed(tmp_path, {"seed": 2}, force=True) as folder:
        assert not folder.finished
        assert names(tmp_path) == {RUN, LOCK}


def test_a_run_that_resumes_does_not_write_between_other_files(tmp_path):
    write_text(tmp_path / "notes.txt", "mine")
    with pytest.raises(OutputError, match="not empty"), resumed(tmp_path, {"seed": 1}):
        pytest.fail("work began")
    assert names(tmp_path) == {"notes.txt"}


def test_a_run_that_fails_at_once_or_diverges_leaves_nothing(tmp_path):
    interrupted(tmp_path / "a" / "b", NotFiniteError)
    with pytest.raises(ValueError, match="wrong"), resumed(tmp_path / "c", {"seed": 1}):
        raise ValueError("wrong")
    assert names(tmp_path) == set()


def test_two_runs_cannot_fill_one_folder(tmp_path):
    with locked(tmp_path), pytest.raises(OutputError, match="in use"), resumed(tmp_path, {"seed": 1}):
        pytest.fail("work began")
    assert names(tmp_path) == set()


@pytest.mark.skipif(os.name != "posix", reason="needs links")
@pytest.mark.parametrize("name", [RUN, WORK])
def test_planted_links_are_refused(tmp_path, name):
    (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OutputError, match="link"), resumed(tmp_path, {"seed": 1}, force=True):
        pytest.fail("work began")


def test_temporary_files_of_killed_runs_are_deleted_and_others_stay(tmp_path):
    for name in (".fmwc-tmp-0123456789ab", "cif/.fmwc-tmp-0123456789ab", ".fmwc-tmp-mine"):
        write_text(tmp_path / name, "half")
    with locked(tmp_path):
        pass
    assert names(tmp_path) == {"cif", ".fmwc-tmp-mine"}


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*a\.bin"):
        write_bytes(tmp_path / "a.bin", b"much")


def test_a_folder_that_fills_during_the_run_is_not_replaced(tmp_path):
    def run():
        with fresh(tmp_path / "out") as folder:
            write_text(folder / "a.txt", "mine")
            write_text(tmp_path / "out" / "b.txt", "theirs")

    with pytest.raises(OutputError, match="filled"):
        run()
    assert (tmp_path / "out" / "b.txt").read_text() == "theirs"


def test_a_folder_between_two_renames_comes_back(tmp_path):
    write_text(tmp_path / ".out.fmwc-old" / "a.txt", "before")  # as a kill leaves it
    with pytest.raises(ZeroDivisionError), fresh(tmp_path / "out", force=True):
        raise ZeroDivisionError
    assert (tmp_path / "out" / "a.txt").read_text() == "before"


@pytest.mark.parametrize("name", [".git", "campaign.json"])
def test_force_does_not_delete_repositories_and_campaigns(tmp_path, name):
    write_text(tmp_path / "out" / name, "x")
    with pytest.raises(OutputError, match="holds"), resumed(tmp_path / "out", {}, force=True):
        pass
    assert (tmp_path / "out" / name).exists()
