"""Campaigns on a simulated cluster: a node is taken away in the middle; a pool on a GPU feeds a pool on CPUs."""

from __future__ import annotations

import re
import threading
import time
from importlib.util import find_spec

import psutil
import pyarrow.parquet as pq
import pytest

from fmwc.errors import FmwcError
from fmwc.screening import screen
from fmwc.screening.ray_engine import ENVIRONMENT, LOOPBACK, connected
from tests.screening.fakes import Fake, segment
from tests.screening.test_ray import TINY, outcomes

if find_spec("ray") is None:
    pytest.skip("Ray is not installed", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings(r"ignore::DeprecationWarning:ray\.", r"ignore::FutureWarning:ray\.")
NODE = {"object_store_memory": 80 << 20, "include_dashboard": False}


@pytest.fixture(scope="module")
def cluster():
    """Return a cluster on this machine: a head without CPUs, and a node with a CPU and a pretended GPU."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**ENVIRONMENT, **LOOPBACK}.items():
            patch.setenv(name, value)
        from ray.cluster_utils import Cluster

        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **NODE})
        try:
            made.add_node(num_cpus=1, num_gpus=1, **NODE)
            yield made
        finally:
            made.shutdown()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "nonsense"])
def test_an_address_without_ray_is_one_line(address):
    message = f"there is no Ray at {address}; start it with: ray start --head"
    with pytest.raises(FmwcError, match=re.escape(message)), connected(1, address):
        pass


def test_two_pools_pass_blocks_on(cluster, tmp_path):
    draw = Fake("a", device="cuda", raises=(4,))
    given = segment(tmp_path, draw, Fake("b", raises=(2,)), Fake("c"), blocks=8)
    with connected(1, cluster.address) as engine:
        found = outcomes(engine, given, [*range(8)])
    assert {block: outcome.problem for block, outcome in found.items() if outcome.problem} == {
        2: "ValueError: batch 2 is poisoned",
        4: "ValueError: batch 4 is poisoned",
    }
    rows = pq.read_table(given.path(7))
    assert rows.column_names == ["index", "a", "b", "c"]
    assert rows["c"].to_pylist() == [56, 58, 60, 62]


def test_a_node_that_is_taken_away_changes_nothing(cluster, tmp_path):
    screen("checkerboard", 480, out=tmp_path / "here", **TINY)
    node, out, removed = cluster.add_node(num_cpus=1, **NODE), tmp_path / "cluster", []

    def remove() -> None:
        while len([*out.glob("blocks/draw-*.parquet")]) < 8:
            time.sleep(0.01)
        cluster.remove_node(node, allow_graceful=False)  # kill -9
        removed.append(len([*out.glob("blocks/draw-*.parquet")]))

    thread = threading.Thread(target=remove, daemon=True)
    thread.start()
    screen("checkerboard", 480, out=out, address=cluster.address, block=16, **TINY)
    thread.join(30)
    assert 8 <= removed[0] < 30
    assert pq.read_table(out / "results.parquet").equals(pq.read_table(tmp_path / "here" / "results.parquet"))


def test_no_workers_are_left_behind(cluster):
    left = [child for child in psutil.Process().children(recursive=True) if "ray::Map" in child.name()]
    assert not psutil.wait_procs(left, timeout=30)[1]
