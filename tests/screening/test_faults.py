"""A campaign of kills: drivers and workers die by SIGKILL at random moments; the table at the end is the same.

FMWC_KILL_SEED repeats the random choices of a failed test, though not the exact moments.
"""

from __future__ import annotations

import os
import random
import secrets
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from signal import SIGKILL
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fmwc.screening.ray_engine import ENVIRONMENT, LOOPBACK

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
ROWS, BATCH = 960, 16
KILLS = 8  # with each engine
LONGEST = 240  # seconds, for a machine that does much else; about 70 on two idle cores


def drive(out: Path, options: dict[str, Any]) -> None:
    """Run the campaign; the exit code is 3 if a block was killed too often."""
    log = out.with_suffix(".log").open("a")
    os.dup2(log.fileno(), 1), os.dup2(log.fileno(), 2)
    from fmwc.errors import FmwcError
    from fmwc.screening import screen

    try:
        screen("checkerboard", ROWS, out=out, batch=BATCH, block=BATCH, device="cpu", **options)
    except FmwcError as error:
        print(error)
        sys.exit(3 if "worker" in str(error) else 1)


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    """Return a function that starts a driver in a fork of a process that has imported everything."""
    context = get_context("forkserver")
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as temporary:
        for name, value in {**ENVIRONMENT, **LOOPBACK, "TMPDIR": temporary}.items():  # the paths of sockets are short
            patch.setenv(name, value)
        context.set_forkserver_preload(["fmwc.screening", "fmwc.checkerboard.domain", "ray.data"])

        def start(out: Path, **options: Any) -> Any:
            process = context.Process(target=drive, args=(out, options))
            process.start()
            return process

        yield start


def rows_of(out: Path) -> pa.Table:
    return pq.read_table(out / "results.parquet")


@pytest.fixture(scope="module")
def undisturbed(driver: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[pa.Table, float]:
    """Return the table of a campaign that nobody kills, and its seconds."""
    out, begun = tmp_path_factory.mktemp("faults") / "undisturbed", time.monotonic()
    process = driver(out)
    process.join()
    assert process.exitcode == 0, out.with_suffix(".log").read_text()
    assert rows_of(out)["index"].to_pylist() == [*range(ROWS)]
    return rows_of(out), time.monotonic() - begun


def workers_of(process: Any) -> list[psutil.Process]:
    try:
        return [child for child in psutil.Process(process.pid).children(recursive=True) if "MapWorker" in child.name()]
    except psutil.NoSuchProcess:
        return []


def kills(process: Any, pause: float, dice: random.Random, seen: set[psutil.Process] | None) -> Iterator[str]:
    """Kill a driver after a random time, or first its workers, which are added to `seen`; yield what was killed."""
    while process.is_alive():
        process.join(dice.uniform(0, pause))
        actors = workers_of(process) if seen is not None else []
        if seen is not None:
            seen.update(actors)
        if seen is not None and not actors:
            continue  # until the first has started
        victim = dice.choice(actors) if actors and dice.random() < 0.8 else process
        if not process.is_alive():
            return
        with suppress(psutil.NoSuchProcess):
            victim.kill()
            yield "worker" if victim in actors else "driver"


@pytest.mark.parametrize("engine", ["local", "ray"])
def test_the_table_survives_kills(engine, driver, undisturbed, tmp_path):
    if engine == "ray" and find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    expected, seconds = undisturbed
    seed = int(os.environ.get("FMWC_KILL_SEED") or secrets.randbelow(1 << 32))
    print(f"FMWC_KILL_SEED={seed}")
    dice, begun, killed = random.Random(seed), time.monotonic(), Counter()
    options: dict[str, Any] = {"workers": 2} if engine == "ray" else {}
    seen: set[psutil.Process] | None = set() if engine == "ray" else None
    for campaign in range(KILLS):
        out, code = tmp_path / f"campaign-{campaign}", None
        while code != 0:
            process = driver(out, **options)
            for what in islice(kills(process, seconds / 4, dice, seen), KILLS - killed.total()):
                killed[what] += 1
            process.join(LONGEST)
            code = process.exitcode
            assert code in (0, 3, -SIGKILL), out.with_suffix(".log").read_text()[-3000:]
            assert time.monotonic() - begun < LONGEST, killed
        print(f"{time.monotonic() - begun:.1f} s: {dict(killed)}")
        rows = rows_of(out)
        assert sorted(rows["index"].to_pylist()) == [*range(ROWS)]
        assert rows.equals(expected)
        assert not [*out.rglob(".fmwc-tmp-*")]
        if killed.total() == KILLS:
            break
    assert killed.total() == KILLS
    assert not psutil.wait_procs(seen or (), timeout=30)[1], "workers outlive their driver"
