"""Update the tables in the documents, and the summaries of results, from the committed numbers.

python -m experiments.documents          updates the files
python -m experiments.documents --check  fails if a file is out of date, without writing

A table in a document follows a line `<!-- table: NAME -->`.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from experiments.checkerboard import tables as checkerboard
from experiments.common.store import read_results
from experiments.common.tables import dig, number
from experiments.cost.tables import cost_table
from experiments.crystals import tables as crystals
from experiments.crystals.screening_tables import write_screening
from experiments.mnist import tables as mnist
from experiments.uses.report import study_text
from fmwc.report.table import Table

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
DOCUMENTS = (ROOT / "docs" / "results.md", ROOT / "docs" / "how-to" / "network.md")
SUMMARIES: dict[str, Callable[[Path], list[Path]]] = {
    "checkerboard": checkerboard.tables,
    "mnist": mnist.tables,
    "crystals": crystals.tables,
}
STUDIES = ("checkerboard", "mnist", "crystals")
RETROFITS = (("checkerboard", "Checkerboard", 1), ("mnist", "digits", 1))
RETROFIT_STEPS = (100, 300, 1000)
MARKED = re.compile(r"<!-- table: (\S+) -->\n\n(\|[^\n]*\n)+")


def _retrofits() -> Table:
    """Return the table of retrofit lifts by number of steps, from `results/retrofit`."""
    rows = []
    for name, label, digits in RETROFITS:
        numbers: dict[str, Any] = json.loads((RESULTS / "retrofit" / f"{name}.json").read_text())["numbers"]
        joint = numbers.get("joint")
        trained = f"{number(joint['lift'], digits)} ({joint['steps']:,})" if joint else "see below"
        for source in ("data", "own samples"):
            lifts = [number(dig(numbers, f"{source}, {steps}/lift"), digits) for steps in RETROFIT_STEPS]
            rows.append((f"{label}, {source}", *lifts, trained if source == "data" else ""))
    return Table.from_rows(("steps of the retrofit", *(f"{n:,}" for n in RETROFIT_STEPS), "joint training"), rows)


TABLES: dict[str, Callable[[], Table]] = {
    "checkerboard": lambda: checkerboard.headline(json.loads((RESULTS / "checkerboard" / "summary.json").read_text())),
    "mnist": lambda: mnist.headline(read_results(RESULTS / "mnist")[0]["numbers"]),
    "crystals": lambda: crystals.headline(RESULTS / "crystals"),
    "cost": lambda: cost_table(RESULTS / "bench"),
    "retrofit": _retrofits,
}


def _current() -> Iterator[tuple[Path, str]]:
    """Yield the path and the up-to-date content of each generated file."""
    for name, write in SUMMARIES.items():
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder)
            shutil.copytree(RESULTS / name / "cells", out / "cells")
            if (RESULTS / name / "cost.json").is_file():
                shutil.copy(RESULTS / name / "cost.json", out)
            for path in write(out):
                yield RESULTS / name / path.name, path.read_text()
    for numbers in sorted(RESULTS.glob("crystals/screening*/numbers.json")):
        with tempfile.TemporaryDirectory() as folder:
            for path in write_screening(Path(folder), json.loads(numbers.read_text())):
                yield numbers.with_name(path.name), path.read_text()
    for name in STUDIES:
        yield RESULTS / "uses" / name / "tables.md", study_text(RESULTS / "uses" / name)
    for document in DOCUMENTS:

        def table(match: re.Match[str]) -> str:
            return f"<!-- table: {match[1]} -->\n\n{TABLES[match[1]]().markdown()}\n"

        yield document, MARKED.sub(table, document.read_text())


def outdated() -> dict[Path, str]:
    """Return the files that are out of date, with their up-to-date content."""
    return {path: text for path, text in _current() if path.read_text() != text}


def main() -> None:
    changed = outdated()
    if "--check" in sys.argv[1:] and changed:
        names = ", ".join(str(path.relative_to(ROOT)) for path in changed)
        raise SystemExit(f"out of date: {names}; run python -m experiments.documents")
    for path, text in changed.items():
        path.write_text(text)
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
