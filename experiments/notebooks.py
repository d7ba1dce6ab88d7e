"""Execute the notebooks of the documentation and store their outputs.

python -m experiments.notebooks          executes every notebook of docs/notebooks
python -m experiments.notebooks doubt    only those with `doubt` in their name

Stored notebooks hold no timings and no details of the machine, so that differences between two versions are small. A
hash of the code shows whether the outputs belong to it.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from fmwc.files import write_text

FOLDER = Path(__file__).parent.parent / "docs" / "notebooks"
CELL_SECONDS = 600  # limit of one cell
LANGUAGE = {"name": "python", "file_extension": ".py", "mimetype": "text/x-python", "pygments_lexer": "ipython3"}


def notebooks(part: str = "") -> list[Path]:
    """Return the notebooks whose name contains a text, in reading order."""
    return sorted(path for path in FOLDER.glob("*.ipynb") if part in path.stem)


def code_of(notebook: Any) -> list[Any]:
    """Return the code cells of a notebook."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def digest(notebook: Any) -> str:
    """Return a hash of the code of a notebook."""
    code = "\0".join(cell.source for cell in code_of(notebook))
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def execute(path: Path, folder: Path) -> Any:
    """Execute a notebook in a folder with this interpreter; return it with its outputs. Raise if a cell fails."""
    notebook = nbformat.read(path, nbformat.NO_CONVERT)
    client = NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        coalesce_streams=True,
        record_timing=False,
        extra_arguments=["--log-level=ERROR"],  # no warning about its port, which is local
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()
    for cell in code_of(notebook):
        for output in cell.outputs:
            output.get("metadata", {}).clear()
    notebook.metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": LANGUAGE,
        "fmwc": {"code": digest(notebook)},
    }
    return notebook


def main(part: str = "") -> None:
    """Execute notebooks and store them."""
    for path in notebooks(part):
        print(f"executing {path.name}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            notebook = execute(path, Path(folder))
        write_text(path, nbformat.writes(notebook) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:2])
