"""Hostile input to the command line: exit code 2 and one line, without exhausting memory."""

import json
import subprocess
import sys

import pytest

from tests.command import one_line
from tests.fuzz.blowups import BLOWUPS

LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit})); "
MORE = 200.0  # MiB that a file may add to the peak; a reader that trusted it would take 500 or more


def test_memory_bombs_are_refused(tmp_path):
    pytest.importorskip("resource")
    pytest.importorskip("pymatgen.core")
    code = LIMIT.format(limit=8 << 30) + "import sys; from tests.fuzz.blowups import main; from pathlib import Path; "
    code += "main(Path(sys.argv[1]), [])"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=300)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["name"] for row in rows] == list(BLOWUPS), done.stderr[-2000:]
    for row in rows:
        assert row["said"].startswith("refused: "), row
        assert row["more"] < MORE, row


def test_hostile_input_exits_with_one_line(run, tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "recipe.json").write_text("[" * 100_000)
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / "0.json").write_text('{"setting": null, "numbers": {"a": [1, {}]}, "decay": 3}')
    (tmp_path / "samples.safetensors").write_bytes(b"\xff" * 100)
    (tmp_path / "x.pt").write_bytes(b"\x80\x02cposix\nsystem\n.")
    out = tmp_path / "out"
    for words in (
        ("sample", tmp_path / "deep", "-n", 2, "--out", out),
        ("report", tmp_path),
        ("filter", tmp_path, "--keep", 0.5, "--out", out),
        ("filter", tmp_path, "--keep", "nan", "--out", out),
        ("edit", tmp_path, "--out", out),
        ("retrofit", "..odd:made", "--out", out),
        ("retrofit", "sys:exit", "--out", out),
        ("retrofit", "fmwc.networks:MLP", "--data", tmp_path / "x.pt", "--out", out),
        ("train", "checkerboard", "--set", "lr=nan", "--out", out),
        ("train", "checkerboard", "--set", "iterations=" + "9" * 40, "--out", out),
    ):
        code, _, err = run(*words)
        assert code == 2, (words, err)
        assert "weights_only" not in one_line(err)
