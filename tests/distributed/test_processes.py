"""Two processes of torchrun train to the weights of one process, and end together if one of them fails."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from fmwc.checkpoint import about
from fmwc.data import arrays
from fmwc.recipes import fit, override
from fmwc.registry import domain_named
from fmwc.retrofit import Retrofit, retrofit
from tests.distributed.cases import CASES, ByIndex, Labelled, flow, noise
from tests.recipes.conftest import CPU, identical

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")


def torchrun(*words, cwd=None, **environment):
    """Start two processes on one machine."""
    paths = [str(ROOT / "src"), str(ROOT), str(cwd or "")]
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", *map(str, words)],
        cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip


def finished(process):
    out, err = process.communicate(timeout=240)
    told = [line for line in err.splitlines() if line.startswith("fmwc:") and "warning:" not in line]
    return process.returncode, out, told


def process_of(run, index):
    """Return the process number of a process of torchrun, by its index."""
    for pid in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split():
        with suppress(OSError):
            if f"RANK={index}" in Path(f"/proc/{pid}/environ").read_text().split("\0"):
                return int(pid)
    return None


# ---- the weights -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The folder with the results of two processes, which also resumed what one process had begun."""
    out = tmp_path_factory.mktemp("results")
    flow(point=out / "of one", stop=8)
    code, _, _ = finished(run := torchrun("tests.distributed.cases", out))
    assert code == 0, run
    return out


def close(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_to_the_weights_of_one(name, results):
    first, second = (load_file(results / f"{name}.{index}") for index in (0, 1))
    assert identical(first, second)
    close(first, CASES[name]())


def test_one_process_resumes_what_two_began_and_the_reverse(results):
    whole = flow()
    close(load_file(results / "resumed.0"), whole)
    close(flow(point=results / "of two"), whole)
    with pytest.raises(AssertionError):  # the tolerance distinguishes other training
        close(flow(batch=15), whole)


def test_each_process_loads_its_own_samples(results):
    data = ByIndex()
    noise(lambda: DataLoader(data, 12, shuffle=True), Labelled)
    first, second = (json.loads((results / f"seen.{index}").read_text()) for index in (0, 1))
    once = len(data)  # the checks before training read some whole batches
    assert first[:once] == second[:once]
    assert abs(len(first) - len(second)) <= 12
    assert sorted(first[once:] + second[once:]) == sorted(data.seen)


# ---- the command -----------------------------------------------------------------------------------------------------

CHANGES = [
    "points=200", "hidden=8", "depth=1", "time_features=4", "iterations=1500", "batch=9", "width=4", "noise_steps=20",
    "save_every=50",
]  # fmt: skip


def test_a_killed_process_ends_the_other_and_the_command_resumes(tmp_path):
    words = ["fmwc", "train", "checkerboard", "--out", tmp_path / "two", "--device", "cpu"]
    words += [word for change in CHANGES for word in ("--set", change)]
    run, point = torchrun(*words), tmp_path / "two" / ".fmwc-work" / "flow.resume"
    while not point.exists():
        assert run.poll() is None
        time.sleep(0.02)
    os.kill(process_of(run, 1), signal.SIGKILL)
    code, _, errors = finished(run)
    assert code
    assert all("to resume" in line for line in errors)
    assert len(errors) <= 1
    assert point.exists()

    code, out, errors = finished(torchrun(*words))
    assert not code
    assert all("loss of a zero velocity" in line for line in errors)  # a network of few steps
    assert out.count("written: misplacement") == 1
    record = about(tmp_path / "two")
    assert record["provenance"]["processes"] == 2
    assert not point.parent.exists()
    recipe = override(domain_named("checkerboard").recipe("recommended", [], "", False), CHANGES)
    fit(recipe, tmp_path / "one", CPU)
    close(load_file(tmp_path / "two" / "model.safetensors"), load_file(tmp_path / "one" / "model.safetensors"))
    assert "processes" not in about(tmp_path / "one")["provenance"]


MODULE = """
import os
import torch

class Net(torch.nn.Module):
    calls = 0

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, x, t):
        Net.calls += 1
        if os.environ["RANK"] == os.environ.get("FAILING") and Net.calls > 30:
            raise ValueError("this network fails")
        return self.layer(torch.cat([x, t[:, None]], 1))

def build():
    torch.manual_seed(0)
    return Net()
"""


def test_an_error_in_one_process_ends_all_with_one_message(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(MODULE)
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(0).normal(size=(200, 2)).astype(np.float32))
    words = ["fmwc", "retrofit", "own:build", "--data", "data.npz", "--out", "model", "--device", "cpu"]
    words += ["--steps", 60, "--batch", 20, "--no-conventions"]
    code, out, errors = finished(torchrun(*words, cwd=tmp_path, FAILING="1"))
    assert (code, out) == (1, "")
    assert len(errors) == 1
    assert "unexpected ValueError: this network fails" in errors[0]

    code, out, errors = finished(torchrun(*words, cwd=tmp_path))
    assert (code, errors) == (0, [])
    assert out.count("model written: the held-out loss") == 1
    record = about(tmp_path / "model")
    assert record["provenance"]["processes"] == 2
    monkeypatch.setenv("RANK", "0")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = Retrofit(steps=60, batch=20, conventions=False)
    network = importlib.import_module("own").build()
    _, losses = retrofit(network, tmp_path / "one", arrays.load(tmp_path / "data.npz"), config)
    assert np.allclose(record["metrics"]["held_out"], losses, rtol=1e-4)
    close(load_file(tmp_path / "model" / "model.safetensors"), load_file(tmp_path / "one" / "model.safetensors"))
