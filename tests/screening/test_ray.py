"""Campaigns on Ray: the same rows as in this process; poisoned blocks, killed workers and lost nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace

import psutil
import pyarrow.parquet as pq
import pytest

from fmwc.errors import FmwcError, UsageError
from fmwc.screening import screen
from fmwc.screening.blocks import MOST
from fmwc.screening.ray_engine import CLUSTERS, Group, connected
from tests.screening.fakes import Fake, segment

if find_spec("ray") is None:
    pytest.skip("Ray is not installed", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings(r"ignore::DeprecationWarning:ray\.", r"ignore::FutureWarning:ray\.")
TINY = {"device": "cpu", "steps": 4, "score": "integrated", "batch": 16}


@pytest.fixture(scope="module")
def local():
    """Return the engine of a Ray on this machine with three workers."""
    with connected(3, "") as engine:
        yield engine


def outcomes(engine, given, todo):
    return {outcome.block: outcome for outcome in engine(given, todo, "driver")}


def test_the_rows_are_those_of_this_process(local, tmp_path):
    for case, keep, workers, block in (("all", None, 1, 16), ("kept", 0.3, 2, 48), ("all", None, 3, 112)):
        expected, out = tmp_path / case, tmp_path / f"ray-{workers}"
        screen("checkerboard", 200, out=expected, keep=keep, **TINY)  # once per case
        # The address is not used, because this process is connected to Ray.
        screen("checkerboard", 200, out=out, keep=keep, block=block, workers=workers, address="auto", **TINY)
        rows = pq.read_table(expected / "results.parquet")
        assert len(rows) == (60 if keep else 200)
        assert pq.read_table(out / "results.parquet").equals(rows)


def test_bad_blocks_are_tried_three_times(local, tmp_path):
    given = segment(tmp_path, Fake("a", kills=(1,)), Fake("b", raises=(2,)))
    for number in range(MOST):
        given.note(3, number, "earlier", "spent")
    found = outcomes(local, given, [*range(6)])
    assert {block: outcome.problem for block, outcome in found.items() if outcome.problem} == {
        1: "failed 3 times; the last time: its worker was killed",  # Ray itself runs it again
        2: "ValueError: batch 2 is poisoned",
        3: "failed 3 times; the last time: spent",
    }
    assert [len(given.attempts(block)) for block in range(6)] == [0, MOST, 1, MOST, 0, 0]
    assert [given.about(block) is not None for block in range(6)] == [True, False, False, False, True, True]
    assert pq.read_table(given.path(4)).column_names == ["index", "a", "b"]


def test_an_error_of_a_stage_that_cannot_open_ends_the_campaign(local, tmp_path):
    given = segment(tmp_path, Fake("a", opening="raises"))
    with pytest.raises(UsageError, match=r"the weights are gone; restore them"):
        outcomes(local, given, [0, 1])
    assert given.attempts(0) == given.attempts(1) == []  # no fault of the block


def test_weights_that_kill_the_worker_do_not_loop_forever(tmp_path):
    given = segment(tmp_path, Fake("a", opening="ends"))
    for _ in range(MOST):
        with pytest.raises(SystemExit):  # as a kill: nothing catches it
            Group(given, (0, 1), "driver", str(tmp_path.cwd())).advanced(0)
    found = Group(given, (0, 1), "driver", str(tmp_path.cwd())).advanced(0)
    assert found.problem == "failed 3 times; the last time: its worker was killed"


def test_a_stage_that_needs_a_gpu_says_so(local, tmp_path):
    with pytest.raises(UsageError, match=r"Ray found no GPU; use --device cpu"):
        outcomes(local, segment(tmp_path, Fake("a", device="cuda")), [0])


def listening():
    """Return the addresses on which this process and those that it started listen."""
    found = []
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # it has ended since
            every = process.net_connections(kind="inet")
            found += [ip_address(one.laddr.ip) for one in every if one.status == psutil.CONN_LISTEN]
    return [getattr(address, "ipv4_mapped", None) or address for address in found]


def test_ray_listens_on_loopback_only(local):
    found = listening()
    assert len(found) > 3
    assert all(address.is_loopback for address in found)


def test_ray_listens_on_loopback_only_in_a_program_that_imported_it():
    program = """
import os, ray, ray.data
from fmwc.screening.ray_engine import CLUSTERS, connected
from tests.screening.test_ray import listening

with connected(1, ""):
    found = listening()
    print(len(found) > 3, all(address.is_loopback for address in found), os.environ[CLUSTERS])
"""
    environment = {**os.environ, CLUSTERS: "1"}  # where Ray forms clusters: it takes the address of the network
    process = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.split() == ["True", "True", "1"]


def test_a_local_ray_on_the_network_is_refused(monkeypatch):
    calls = []
    fake = SimpleNamespace(
        _private=SimpleNamespace(ray_constants=SimpleNamespace(ENABLE_RAY_CLUSTER=True)),
        data=None,
        exceptions=SimpleNamespace(RayError=RuntimeError),
        init=lambda **_: calls.append("init"),
        is_initialized=lambda: False,
        shutdown=lambda: calls.append("shutdown"),
        util=SimpleNamespace(get_node_ip_address=lambda: "192.0.2.7"),
    )
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setitem(sys.modules, "ray.data", fake)
    with pytest.raises(FmwcError, match=r"Ray listens on 192\.0\.2\.7, .* use one worker"), connected(2, ""):
        pass
    assert calls == ["init", "shutdown"]


def test_without_ray_the_error_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"pip install 'fmwc\[scale\]'"), connected(2, ""):
        pass
