"""Runs that are killed at a write end with the same bytes if they are repeated, and leave nothing else behind.

Each command is killed at a few of its system calls, spread evenly; FMWC_KILLS=1000 kills it at every call.
"""

import io
import json
import os
import random
import signal
import sys
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from itertools import pairwise
from pathlib import Path

import pytest
import torch._dynamo  # noqa: F401  (the optimiser's: here, so that children need not import it)

import fmwc.cli
import fmwc.cli.sample  # noqa: F401
from fmwc.__main__ import main
from fmwc.files import LOCK, RUN, TEMPORARY

TINY = ["hidden=8", "time_features=4", "iterations=8", "batch=16", "noise_steps=4", "points=200", "save_every=4"]
SETS = [part for change in TINY for part in ("--set", change)]
NETWORK = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 2))

    def forward(self, x, t):
        return self.layers(torch.cat([x, t[:, None]], 1))

def build():
    return Net(), (2,)
"""

# Commands by name, with their options except --out. Each run takes a fraction of a second.
VERBS = {
    "train": ["train", "checkerboard", "--preset", "quick", "--device", "cpu", *SETS],
    "joint": ["train", "checkerboard", "--preset", "paper", "--device", "cpu", *SETS],
    "sample": ["sample", "{model}", "-n", "20", "--steps", "4", "--every", "1", "--device", "cpu"],
}  # fmt: skip
KILLS = int(os.environ.get("FMWC_KILLS", "5"))
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
EVENTS = ("open", "replace", "fsync", "unlink", "mkdir", "rmdir")  # before and after every write


@contextmanager
def small_batches(patch):
    """Use small batches, so that even a small run has several."""
    from fmwc import retrofit as own
    from fmwc.checkerboard import recipe
    from fmwc.checkerboard.domain import CheckerboardDomain

    real = recipe.sample
    patch.setattr(recipe, "sample", lambda field, count, **options: real(field, 32, **options))
    patch.setattr(CheckerboardDomain, "batch", lambda self, device: 16)
    patch.setattr(own, "REFERENCES", 16)
    yield


def run_in_child(words, kill_at=None, signum=signal.SIGKILL):
    """Run the command in a fork that a signal ends at its n-th event; return its status, and events and output."""
    read, write = os.pipe()
    child = os.fork()
    if child:
        os.close(write)
        with os.fdopen(read) as stream:
            said = stream.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return status, said
    os.close(read)
    seen, said = 0, io.StringIO()

    def counted(real):
        def call(*args, **options):
            nonlocal seen
            seen += 1
            if seen == kill_at:
                os.kill(os.getpid(), signum)
            return real(*args, **options)

        return call

    code = 1
    try:
        patch = pytest.MonkeyPatch()
        with small_batches(patch), redirect_stdout(said), redirect_stderr(said):
            for name in EVENTS:
                patch.setattr(os, name, counted(getattr(os, name)))
            sys.argv = ["fmwc", *map(str, words)]
            main()
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        os.write(write, (f"{seen}\n" + said.getvalue()).encode())
        os._exit(code if isinstance(code, int) else 1)


def content(folder):
    """Return every file by name, without the time and process that made it."""
    found = {}
    for path in sorted(p for p in folder.rglob("*") if p.name != RUN):
        name = path.relative_to(folder).as_posix()
        found[name] = None if path.is_dir() else path.read_bytes()
        if path.name == "recipe.json":
            record = json.loads(path.read_text())
            record.pop("provenance"), record.pop("sha256")
            found[name] = record
    return found


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Return a folder with a checkpoint to sample from and a network to retrofit."""
    here = tmp_path_factory.mktemp("killed")
    (here / "killed_net.py").write_text(NETWORK)
    code, said = run_in_child([*VERBS["train"], "--out", here / "model"])
    assert code == 0, said
    return here


def words_of(verb, prepared, out):
    return [word.format(model=prepared / "model") for word in VERBS[verb]] + ["--out", str(out)]


@pytest.fixture(scope="module")
def undisturbed(prepared):
    """Return the files of each command, and its number of events, if it is not killed."""
    found = {}

    def run(verb):
        if verb not in found:
            straight = prepared / f"straight-{verb}"
            code, said = run_in_child(words_of(verb, prepared, straight))
            assert code == 0, said
            found[verb] = content(straight), int(said.splitlines()[0])
        return found[verb]

    return run


def kill_points(verb, events):
    """Return one random event of each of `KILLS` equal parts of a run; the same ones in every run of the test."""
    draw = random.Random(verb)
    edges = [round(i * events / min(KILLS, events)) for i in range(min(KILLS, events) + 1)]
    return [draw.randint(low + 1, high) for low, high in pairwise(edges)]


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "joint"])  # which writes in the same way as `train`
def test_a_killed_run_that_is_repeated_ends_with_the_same_bytes(verb, prepared, undisturbed, tmp_path, monkeypatch):
    monkeypatch.chdir(prepared)
    expected, events = undisturbed(verb)
    assert not [name for name in expected if ".fmwc" in name or "resume" in name]
    assert events > 10
    for event in kill_points(verb, events):
        out = tmp_path / f"killed-{event}"
        code, said = run_in_child(words_of(verb, prepared, out), kill_at=event)
        assert code == -signal.SIGKILL, said
        if verb == "sample" and out.exists():  # complete, or not there
            assert content(out) == expected
            continue
        code, said = run_in_child(words_of(verb, prepared, out))
        assert code == 0, f"killed at event {event}: {said}"
        assert content(out) == expected, f"killed at event {event}"
        assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(("verb", "signum"), [("train", signal.SIGINT), ("sample", signal.SIGTERM)])
def test_a_signal_ends_a_run_with_one_line_and_it_resumes(verb, signum, prepared, undisturbed, tmp_path, monkeypatch):
    monkeypatch.chdir(prepared)
    out = tmp_path / "out"
    for event in (6, 14, 22):
        code, said = run_in_child(words_of(verb, prepared, out), kill_at=event, signum=signum)
        assert code == 128 + signum, said
        assert len([line for line in said.splitlines() if line.startswith("fmwc: interrupted")]) == 1
        assert "Traceback" not in said
        assert not [p for p in out.rglob("*") if p.name.startswith((".fmwc-tmp", ".fmwc-lock"))]
    assert run_in_child(words_of(verb, prepared, out))[0] == 0
    assert content(out) == undisturbed(verb)[0]


def test_a_training_only_resumes_with_its_own_settings(prepared, tmp_path, monkeypatch):
    monkeypatch.chdir(prepared)
    words = words_of("joint", prepared, tmp_path / "out")
    assert run_in_child([*words, "--set", "prior_rate=0.3"], kill_at=40)[0] == -signal.SIGKILL
    before = sorted(p for p in Path(tmp_path / "out").rglob("*") if not p.name.startswith((LOCK, TEMPORARY)))
    code, said = run_in_child([*words, "--set", "prior_rate=0.9"])
    assert code == 2
    assert "prior_rate: 0.3 before, 0.9 now" in said
    assert sorted(Path(tmp_path / "out").rglob("*")) == before
    code, said = run_in_child([*words, "--set", "prior_rate=0.9", "--force"])
    assert code == 0, said
    assert json.loads((tmp_path / "out" / "recipe.json").read_text())["recipe"]["prior_rate"] == 0.9
