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


@EACH
def test_begins_with_its_title(path):
    first, *others = [cell.source for cell in stored(path).cells if cell.cell_type == "markdown"]
    assert re.match(r"# \S", first)
    assert not any(re.search(r"^# ", text, re.M) for text in others)


def test_faults_are_found():
    notebook = stored(NOTEBOOKS[0])
    code_of(notebook)[0].source += "\nx = 1"
    code_of(notebook)[1].execution_count = None
    for i, text in ((2, "see /home/me/x.png"), (3, "fine")):
        code_of(notebook)[i].outputs = [nbformat.v4.new_output("stream", name="stdout", text=text)]
    code_of(notebook)[4].outputs = [nbformat.v4.new_output("stream", name="stderr", text="oh")]
    found = faults(notebook)
    assert [text.partition("cell ")[2][:2].strip() for text in found] == ["", "2", "3", "5"]


def test_a_failing_cell_is_an_error(tmp_path):
    cells = [nbformat.v4.new_code_cell("assert 1 > 2")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "it.ipynb")
    with pytest.raises(Exception, match="AssertionError"):
        execute(tmp_path / "it.ipynb", tmp_path)


def test_progress_bars_are_plain_text_in_a_notebook(tmp_path):
    code = "from fmwc.progress import stages_bar\nwith stages_bar() as show:\n    show('drawing', 1, 2)"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)]), tmp_path / "it.ipynb")
    (cell,) = code_of(execute(tmp_path / "it.ipynb", tmp_path))
    assert kinds(cell) == [("stream", "stderr")]
    assert "drawing" in cell.outputs[0].text
    assert "Warning" not in cell.outputs[0].text
