"""The Slurm examples: the tasks of an array share a campaign; a job starts Ray on its nodes."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from fmwc.screening import screen
from tests.screening.test_ray import TINY

SLURM = Path(__file__).parents[2] / "examples" / "slurm"
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


# Takes the place of the programs that ray.sh calls, by its name, and notes how each was called.
PROGRAM = """#!{python} -IS
import json, os, socket, sys, time

name, args, log = os.path.basename(sys.argv[0]), sys.argv[1:], os.environ["LOG"]
with open(log, "a") as file:
    auth = [os.environ.get("RAY_AUTH_MODE"), os.environ.get("RAY_AUTH_TOKEN")]
    file.write(json.dumps(dict(name=name, args=args, pid=os.getpid(), auth=auth)) + chr(10))
if name == "scontrol":
    print("one", "two", "three", sep=chr(10))
elif name == "hostname":
    print("127.0.0.1 192.0.2.7")
elif name == "sleep":
    time.sleep(0.02)
elif name == "srun":
    first = next(i for i, word in enumerate(args) if not word.startswith("-"))
    os.execvp(args[first], args[first:])
elif name == "fmwc":
    sys.exit(3)
elif args[0] == "status":
    print(" 1 node_" + chr(10) + " 1 node_" if open(log).read().count("--block") < 6 else 3 * (" 1 node_" + chr(10)))
else:  # ray start --block
    if "--head" in args:
        port = next(int(word.partition("=")[2]) for word in args if word.startswith("--port="))
        server = socket.create_server(("127.0.0.1", port))
    time.sleep(60)
"""


def array(out: Path, task: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a task of the array job."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        ["bash", SLURM / "array.sh", *words, "--device", "cpu", "--steps", "4", "--score", "integrated"],
        env={**os.environ, "PATH": path, "SLURM_ARRAY_TASK_ID": task, **variables},
        capture_output=True,
        text=True,
    )


def test_the_tasks_of_an_array_share_a_campaign(tmp_path):
    words = ["3", "checkerboard", "-n", "100", "--batch", "16", "--out", str(tmp_path / "whole")]
    for task in ("0", "2", "1"):
        assert array(tmp_path, task, *words).returncode == 0
    screen("checkerboard", 100, out=tmp_path / "whole", **TINY)
    screen("checkerboard", 100, out=tmp_path / "here", **TINY)
    rows, expected = (pq.read_table(tmp_path / name / "results.parquet") for name in ("whole", "here"))
    assert len(rows) == 100
    assert rows.equals(expected)


def test_a_job_starts_ray_on_its_nodes_and_ends_it(tmp_path):
    for name in ("scontrol", "srun", "hostname", "ray", "fmwc", "sleep"):
        (tmp_path / name).write_text(PROGRAM.format(python=sys.executable))
        (tmp_path / name).chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = 20000 + free.getsockname()[1] % 20000
    log = tmp_path / "log"
    job = {"SLURM_JOB_ID": str(port - 20000), "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "some"}
    environment = {
        **os.environ,
        **job,
        "SLURM_CPUS_PER_TASK": "5",
        "SLURM_GPUS_ON_NODE": "2",
        "PATH": os.pathsep.join([str(tmp_path), os.environ["PATH"]]),
        "LOG": str(log),
    }
    given = ["crystals", "-n", "10", "--out", "a folder"]
    process = subprocess.run(["bash", SLURM / "ray.sh", *given], env=environment, timeout=60)
    assert process.returncode == 3  # of fmwc
    calls = [json.loads(line) for line in log.read_text().splitlines()]
    (command,) = (call for call in calls if call["name"] == "fmwc")
    assert command["args"] == ["screen", *given, "--address", f"127.0.0.1:{port}"]
    nodes = [call for call in calls if call["name"] == "ray" and call["args"][0] == "start"]
    assert all({"--block", "--num-cpus=5", "--num-gpus=2"} < {*call["args"]} for call in nodes)
    assert {"--head", "--node-ip-address=127.0.0.1", f"--port={port}"} < {*nodes[0]["args"]}
    assert [f"--address=127.0.0.1:{port}" in call["args"] for call in nodes] == [False, True, True]
    starts = [call["args"] for call in calls if call["name"] == "srun" and "ray" in call["args"]]
    assert {word for words in starts for word in words if "nodelist" in word} == {
        "--nodelist=one",
        "--nodelist=two",
        "--nodelist=three",
    }
    assert len({tuple(call["auth"]) for call in [*nodes, command]}) == 1
    mode, token = command["auth"]
    assert mode == "token"
    assert len(token) == 64
    assert not psutil.wait_procs([psutil.Process(p) for p in psutil.pids() if p in {c["pid"] for c in nodes}], 10)[1]
