"""Files: whole or not at all, and never over somebody's work."""

import json
import os

import pytest

from fmwc.errors import OutputError
from fmwc.files import new_folder, write_bytes, write_json, write_text


def test_write(tmp_path):
    path = tmp_path / "deep" / "er" / "a.txt"
    assert write_text(path, "ä") == path
    assert path.read_text(encoding="utf-8") == "ä"
    assert json.loads(write_json(tmp_path / "a.json", {"α": [1, None]}).read_text(encoding="utf-8")) == {"α": [1, None]}
    assert os.stat(path).st_mode & 0o777 == 0o644
    assert os.listdir(path.parent) == ["a.txt"]


@pytest.mark.parametrize("where", ["fsync", "replace", "chmod"])
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


def test_so_does_one_that_is_interrupted(tmp_path, monkeypatch):
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


def test_a_new_folder_is_new_or_empty(tmp_path):
    assert new_folder(tmp_path / "a" / "b").is_dir()
    assert new_folder(tmp_path / "a" / "b").is_dir()
    (tmp_path / "a" / "b" / "work.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"not empty.*--force") as raised:
        new_folder(tmp_path / "a" / "b")
    assert "\n" not in str(raised.value)
    assert new_folder(tmp_path / "a" / "b", force=True).is_dir()
    assert (tmp_path / "a" / "b" / "work.txt").read_text() == "mine"
    for force in (False, True):
        with pytest.raises(OutputError, match="is a file"):
            new_folder(tmp_path / "a" / "b" / "work.txt", force=force)
