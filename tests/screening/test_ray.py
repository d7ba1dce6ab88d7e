"""Campaigns on Ray: the same rows as in this process; poisoned blocks, killed workers and lost nodes."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib.util import find_spec
from ipaddress import ip_address
from types import SimpleNamespace

import psutil
import pyarrow.parquet as pq
import pytest

from fmwc.errors import FmwcError, UsageError
from fmwc.screening import screen
from fmwc.screening.ray_engine import connected
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
    return {outcome.block: outcome for outcome in engine(given, todo)}


def test_the_rows_are_those_of_this_process(local, tmp_path):
    for case, keep, workers, block in (("all", None, 1, 16), ("kept", 0.3, 2, 48), ("all", None, 3, 112)):
        expected, out = tmp_path / case, tmp_path / f"ray-{workers}"
        screen("checkerboard", 200, out=expected, keep=keep, **TINY)  # once per case
        # The address is not used, because this process is connected to Ray.
        screen("checkerboard", 200, out=out, keep=keep, block=block, workers=workers, address="auto", **TINY)
        rows = pq.read_table(expected / "results.parquet")
        assert len(rows) == (60 if keep else 200)
        assert pq.read_table(out / "results.parquet").equals(rows)


def test_the_other_blocks_are_computed_if_one_fails_or_kills_its_worker(local, tmp_path):
    given = segment(tmp_path, Fake("a", kills=(1,)), Fake("b", raises=(2,)))
    found = outcomes(local, given, [*range(6)])
    assert {block: outcome.problem for block, outcome in found.items() if outcome.problem} == {
        1: "its worker died",
        2: "ValueError: batch 2 is poisoned",
    }
    assert given.missing() == [1, 2]
    assert pq.read_table(given.path(4)).column_names == ["index", "a", "b"]


def test_an_error_of_a_stage_that_cannot_open_ends_the_campaign(local, tmp_path):
    with pytest.raises(UsageError, match=r"the weights are gone"):
        outcomes(local, segment(tmp_path, Fake("a", opening="raises")), [0, 1])


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


def test_a_local_ray_on_the_network_is_refused(monkeypatch):
    calls = []
    fake = SimpleNamespace(
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
