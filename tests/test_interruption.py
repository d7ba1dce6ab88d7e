"""Runs that are killed at any write, and called again: they end with the same bytes, and leave nothing else behind."""

import io
import json
import os
import signal
import sys
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch._dynamo  # noqa: F401  (the optimiser's: here, so that children need not import it)

import fmwc.cli
import fmwc.settings.drawing  # noqa: F401
from fmwc.__main__ import main
from fmwc.files import LOCK, MANIFEST

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

# Verbs by name, with what they take beside --out. Small enough that a run is a fraction of a second.
VERBS = {
    "train": ["train", "checkerboard", "--preset", "quick", "--device", "cpu", *SETS],
    "joint": ["train", "checkerboard", "--preset", "paper", "--device", "cpu", *SETS],
    "sample": ["sample", "{model}", "-n", "20", "--steps", "4", "--every", "1", "--device", "cpu"],
    "stream": ["sample", "{model}", "-n", "20", "--device", "cpu"],
    "retrofit": ["retrofit", "killed_net:build", "--own-samples", "20", "--steps", "8", "--batch", "16"],
}
EVENTS = ("open", "replace", "fsync", "unlink", "mkdir", "rmdir")  # around every write


@contextmanager
def small_batches(patch):
    """Several batches per run, and streams of few samples, without more work."""
    from fmwc.recipes import own
    from fmwc.recipes.checkerboard import recipe
    from fmwc.settings.checkerboard import CheckerboardSetting

    real = recipe.sample
    patch.setattr(recipe, "sample", lambda field, count, **options: real(field, 32, **options))
    patch.setattr(CheckerboardSetting, "batch", lambda self, device: 16)
    patch.setattr(own, "REFERENCES", 16)
    yield


def run_in_child(words, kill_at=None, large=None, signum=signal.SIGKILL):
    """Run the command in a forked process that a signal ends at its n-th event; return its exit status and events."""
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
            if large is not None:
                from fmwc.settings.checkerboard import CheckerboardSetting

                patch.setattr(CheckerboardSetting, "large", large)
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
    """Every file by name, less what tells when and by whom it was made."""
    found = {}
    for path in sorted(p for p in folder.rglob("*") if p.name != MANIFEST):
        name = path.relative_to(folder).as_posix()
        found[name] = None if path.is_dir() else path.read_bytes()
        if path.name == "recipe.json":
            record = json.loads(path.read_text())
            record.pop("provenance"), record.pop("sha256")
            found[name] = record
    return found


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A checkpoint to sample from, and a network to retrofit."""
    here = tmp_path_factory.mktemp("killed")
    (here / "killed_net.py").write_text(NETWORK)
    code, said = run_in_child([*VERBS["train"], "--out", here / "model"])
    assert code == 0, said
    return here


def words_of(verb, prepared, out):
    return [word.format(model=prepared / "model") for word in VERBS[verb]] + ["--out", str(out)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "joint"])  # whose writes are those of train
def test_killed_anywhere_and_called_again_a_run_ends_with_the_same_bytes(verb, prepared, tmp_path, monkeypatch):
    monkeypatch.chdir(prepared)
    large = 8 if verb == "stream" else None
    straight = tmp_path / "straight"
    code, said = run_in_child(words_of(verb, prepared, straight), large=large)
    assert code == 0, said
    expected, events = content(straight), int(said.splitlines()[0])
    assert not [name for name in expected if ".fmwc" in name or "resume" in name]
    killed = 0
    for event in range(1, events + 1):
        out = tmp_path / f"killed-{event}"
        code, said = run_in_child(words_of(verb, prepared, out), kill_at=event, large=large)
        assert code == -signal.SIGKILL, said
        killed += 1
        code, said = run_in_child(words_of(verb, prepared, out), large=large)
        assert code == 0, f"killed at event {event}: {said}"
        assert content(out) == expected, f"killed at event {event}"
    assert killed == events > 10


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("verb", ["train", "sample"])
def test_killed_again_and_again_a_run_still_ends(verb, prepared, tmp_path, monkeypatch):
    monkeypatch.chdir(prepared)
    straight, out = tmp_path / "straight", tmp_path / "out"
    assert run_in_child(words_of(verb, prepared, straight))[0] == 0
    for event in (5, 11, 17, 23, 29, 12, 18):
        assert run_in_child(words_of(verb, prepared, out), kill_at=event)[0] in (-signal.SIGKILL, 0)
    code, said = run_in_child(words_of(verb, prepared, out))
    assert code == 0, said
    assert content(out) == content(straight)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda s: s.name)
@pytest.mark.parametrize("verb", ["train", "sample"])
def test_signals_end_a_run_in_one_line_and_it_resumes(verb, signum, prepared, tmp_path, monkeypatch):
    monkeypatch.chdir(prepared)
    straight, out = tmp_path / "straight", tmp_path / "out"
    assert run_in_child(words_of(verb, prepared, straight))[0] == 0
    for event in (6, 22, 38):
        code, said = run_in_child(words_of(verb, prepared, out), kill_at=event, signum=signum)
        assert code == 128 + signum, said
        assert len([line for line in said.splitlines() if line.startswith("fmwc: interrupted")]) == 1
        assert "Traceback" not in said
        assert not [p for p in out.rglob("*") if p.name.startswith((".fmwc-tmp", ".fmwc-lock"))]
    assert run_in_child(words_of(verb, prepared, out))[0] == 0
    assert content(out) == content(straight)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_training_is_only_resumed_with_the_settings_it_was_begun_with(prepared, tmp_path, monkeypatch):
    monkeypatch.chdir(prepared)
    words = words_of("joint", prepared, tmp_path / "out")
    assert run_in_child([*words, "--set", "prior_rate=0.3"], kill_at=40)[0] == -signal.SIGKILL
    before = sorted(p for p in Path(tmp_path / "out").rglob("*") if p.name != LOCK)  # which a killed run leaves
    code, said = run_in_child([*words, "--set", "prior_rate=0.9"])
    assert code == 2
    assert "prior_rate: 0.3 before, 0.9 now" in said
    assert sorted(Path(tmp_path / "out").rglob("*")) == before
    code, said = run_in_child([*words, "--set", "prior_rate=0.9", "--force"])
    assert code == 0, said
    assert json.loads((tmp_path / "out" / "recipe.json").read_text())["recipe"]["prior_rate"] == 0.9
