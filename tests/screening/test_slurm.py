"""The Slurm examples: an array of tasks draws the parts of a campaign; a job starts Ray on its nodes."""

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

from fmwc.screening import merge, screen
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
        env={**os.environ, "PATH": path, "BATCH": "16", "SLURM_ARRAY_TASK_ID": task, **variables},
        capture_output=True,
        text=True,
    )


def test_an_array_of_tasks_draws_the_campaign_and_a_task_alone_its_part(tmp_path):
    words, part = ["3", str(tmp_path), "checkerboard", "100"], tmp_path / "part-0001"
    assert array(tmp_path, "0", *words).returncode == 0
    assert array(tmp_path, "2", *words).returncode == 0
    # sbatch --array=1, after the others
    alone = {"SLURM_ARRAY_TASK_COUNT": "1", "SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_MAX": "1"}
    assert array(tmp_path, "1", *words, **alone).returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["part-0000", "part-0001", "part-0002"]
    assert pq.read_table(part / "results.parquet")["index"].to_pylist() == [*range(48, 96)]
    merge(sorted(tmp_path.glob("part-*")), out=tmp_path / "whole")
    screen("checkerboard", 100, out=tmp_path / "here", **TINY)
    rows, expected = (pq.read_table(tmp_path / name / "results.parquet") for name in ("whole", "here"))
    assert len(rows) == 100
    assert rows.equals(expected)


@pytest.mark.parametrize(
    ("task", "words", "message"),
    [
        ("3", ["3", "out", "checkerboard", "100"], "task 3 is not one of the 3 parts; use --array=0-2"),
        ("0", ["out", "checkerboard", "100"], "expected a positive number, got 'out'"),
        ("", ["3", "out", "checkerboard", "100"], "submit the script as an array"),
    ],
)
def test_a_task_that_does_not_exist_is_refused(tmp_path, task, words, message):
    process = array(tmp_path, task, *words)
    assert process.returncode
    assert message in process.stderr
    assert len(process.stderr.splitlines()) == 1


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
