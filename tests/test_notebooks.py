"""The notebooks of the documentation run, and their stored outputs belong to their code."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from experiments.notebooks import code_of, digest, execute, notebooks

NOTEBOOKS = notebooks()
LARGEST, LARGEST_PICTURE = 1_000_000, 150_000  # bytes
PRIVATE = re.compile(r"(/home/|/root/|/tmp/|/work/|/Users/|[A-Z]:\\)|Warning|Traceback")
EACH = pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])


def stored(path: Path) -> Any:
    notebook = nbformat.read(path, nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    return notebook


def kinds(cell: Any) -> list[tuple[str, ...]]:
    """Return what a cell put out: streams by name, and the formats of results and pictures."""
    return [(o.output_type, *([o.name] if o.output_type == "stream" else sorted(o.data))) for o in cell.outputs]


def faults(notebook: Any) -> list[str]:
    """Return what is wrong with the stored outputs of a notebook."""
    code, found = code_of(notebook), []
    if notebook.metadata.get("fmwc", {}).get("code") != digest(notebook):
        found.append("the code was changed after it was executed; call make notebooks")
    for i, cell in enumerate(code, start=1):
        if cell.execution_count != i:
            found.append(f"code cell {i} was not executed in order")
        for output in cell.outputs:
            if output.output_type == "error" or output.get("name") == "stderr":
                found.append(f"code cell {i} stores an error or a warning")
                continue
            data = {"text/plain": output.text} if output.output_type == "stream" else output.data
            text = "".join(data.get("text/plain", ""))
            if match := PRIVATE.search(text):
                found.append(f"code cell {i} stores {match[0]!r}")
            if len(base64.b64decode(data.get("image/png", ""))) > LARGEST_PICTURE:
                found.append(f"code cell {i} stores a picture of more than {LARGEST_PICTURE} bytes")
    if not any(kinds(cell) for cell in code):
        found.append("no outputs are stored")
    return found


@EACH
def test_stored_outputs_belong_to_the_code(path):
    assert path.stat().st_size <= LARGEST
    assert faults(stored(path)) == []


@EACH
def test_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    again = execute(path, tmp_path)
    assert faults(again) == []
    for i, (new, old) in enumerate(zip(code_of(again), code_of(stored(path)), strict=True), start=1):
        assert kinds(new) == kinds(old), f"code cell {i} puts out something else than is stored"
