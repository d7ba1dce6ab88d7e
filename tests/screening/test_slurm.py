"""The Slurm examples: the array job writes parts that make up the campaign; both scripts are valid."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from fmwc.screening import merge, screen
from tests.screening.test_ray import TINY

SLURM = Path(__file__).parents[2] / "examples" / "slurm"
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


def test_an_array_of_tasks_draws_the_campaign(tmp_path):
    words = [str(tmp_path), "checkerboard", "100", "--device", "cpu", "--steps", "4", "--score", "integrated"]
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "BATCH": "16",
        "SLURM_ARRAY_TASK_COUNT": "2",
        "SLURM_ARRAY_TASK_MIN": "5",
    }
    for task in ("5", "6"):
        environment["SLURM_ARRAY_TASK_ID"] = task
        subprocess.run(["bash", SLURM / "array.sh", *words], env=environment, check=True, capture_output=True)
    merge(sorted(tmp_path.glob("part-*")), out=tmp_path / "whole")
    screen("checkerboard", 100, out=tmp_path / "here", **TINY)
    rows, expected = (pq.read_table(tmp_path / name / "results.parquet") for name in ("whole", "here"))
    assert len(rows) == 100
    assert rows.equals(expected)


@pytest.mark.parametrize("script", ["array.sh", "ray.sh"])
def test_the_scripts_are_valid(script):
    subprocess.run(["bash", "-n", SLURM / script], check=True)
