"""Every reader returns, or raises an FmwcError of one line or an OSError, in bounded time and memory.

`FMWC_FUZZ_CASES` sets the total number of cases (`make fuzz`: 10,000), and `FMWC_FUZZ_SEED` selects other cases.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import sys
import time
import traceback
import warnings
from pathlib import Path

import pytest

from fmwc.errors import FmwcError
from tests.fuzz.kinds import KINDS, Kind

CASES = int(os.environ.get("FMWC_FUZZ_CASES", "2000"))
SEED = int(os.environ.get("FMWC_FUZZ_SEED", "0"))
SECONDS = 60.0  # per case, on a busy machine
MEMORY = 1 << 30  # bytes that all cases of a kind may add to the peak


def count_of(kind: Kind) -> int:
    return max(20, round(CASES * kind.share / sum(each.share for each in KINDS)))


def peak() -> int:
    """Return the peak memory of this process in bytes; 0 if the platform does not report it."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def outcome(kind: Kind, number: int, source: object, folder: Path) -> str:
    """Return the problem with how a case was read; empty if there is none."""
    begin = time.perf_counter()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            kind.case(random.Random(f"{SEED} {kind.name} {number}"), source, folder)
    except (FmwcError, OSError) as error:
        if "\n" in str(error):
            return f"an error of several lines: {error!r}"
        if "weights_only" in str(error):
            return f"advice to load unsafely: {error!r}"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {str(error)[:200]} ({frame.filename}:{frame.lineno})"
    taken = time.perf_counter() - begin
    return f"it took {taken:.0f} s" if taken > SECONDS else ""


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_reader_returns_or_raises_one_line(kind, tmp_path):
    if kind.name == "structures":
        pytest.importorskip("pymatgen.core")
        pytest.importorskip("ase")
    (tmp_path / "source").mkdir()
    source = kind.prepare(tmp_path / "source")
    before = peak()
    wrong = {}
    for number in range(count_of(kind)):
        if problem := outcome(kind, number, source, tmp_path / "case"):
            wrong[number] = problem
    shown = "\n".join(f"case {number}: {problem}" for number, problem in list(wrong.items())[:20])
    assert not wrong, f"{len(wrong)} of {count_of(kind)} cases of {kind.name}:\n{shown}"
    assert peak() - before < MEMORY
