"""Runs: drawing, looking at samples, edits, exports, guarantees, and what survives a restart."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import zipfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch

import fmwc
from fmwc.networks import MLP
from fmwc.sampling import Trajectory
from fmwc.studio import runs as module
from tests.command import call, rows
from tests.studio.shared import Client, serving


@pytest.fixture(scope="module")
def points(studio):
    return studio.draw(count=60, seed=5)


def folder(studio, run):
    return studio.served.studio.runs[run["id"]].samples


def samples(studio, run):
    return Trajectory.load(folder(studio, run) / "samples.safetensors")


# ---- drawing ---------------------------------------------------------------------------------------------------------


def test_a_run_is_what_the_command_writes(studio, points, tmp_path):
    call("sample", "checkerboard", "-n", 60, "--steps", 5, "--seed", 5, "--out", tmp_path / "same", "--device", "cpu")
    assert (tmp_path / "same/samples.csv").read_bytes() == (folder(studio, points) / "samples.csv").read_bytes()
    ours, theirs = samples(studio, points), Trajectory.load(tmp_path / "same/samples.safetensors")
    torch.testing.assert_close(ours.x, theirs.x, rtol=0, atol=0)
    torch.testing.assert_close(ours.score(), theirs.score(), rtol=0, atol=0)


def test_the_gallery_shows_the_run(studio, points):
    run, found = samples(studio, points), studio.tensors(f"runs/{points['id']}/samples")
    np.testing.assert_array_equal(found["x"], run.x)
    np.testing.assert_array_equal(found["order"], run.score().argsort(stable=True))
    np.testing.assert_allclose(found["level"], run.confidence, rtol=1e-6)
    np.testing.assert_array_equal(
        found["failed"], [row["misplaced"] == "1" for row in rows(folder(studio, points) / "samples.csv")]
    )
    assert points["order"] == {"name": "confidence", "note": ""}
    assert (points["state"], points["judged"], points["count"], points["kind"]) == ("done", True, 60, "points")
    table = studio.get(f"runs/{points['id']}/table")
    assert table["columns"]["name"] == run.names


def test_a_digit_and_a_crystal_can_be_drawn_traced_and_edited(studio):
    digit, crystal = (
        studio.draw("mnist", count=2, label="7", steps=4),
        studio.draw("crystals", count=2, steps=3, atoms="4"),
    )
    assert samples(studio, digit).cond["y"].tolist() == [7, 7]
    assert samples(studio, crystal).cond["atoms"].tolist() == [4, 4]
    images = studio.tensors(f"runs/{digit['id']}/samples")["x"]
    assert (images.shape, images.dtype) == ((2, 28, 28), np.uint8)
    cells = studio.tensors(f"runs/{crystal['id']}/samples")
    assert cells["first"].tolist() == [0, 4, 8]
    assert cells["lattice"].shape == (2, 3, 3)
    trace = studio.trace(digit, 1)
    assert trace["states"].shape == (5, 28, 28)
    assert trace["doubt"].shape == trace["guess"].shape == (4, 28, 28)
    np.testing.assert_array_equal(trace["states"][-1], images[1])
    trace = studio.trace(crystal, 0)
    assert trace["species"].shape == (4, 4)
    assert trace["doubt"].shape == (3, 4)
    np.testing.assert_array_equal(trace["species"][-1], cells["species"][:4])
    np.testing.assert_allclose(trace["coord"][-1], cells["coord"][:4], atol=1e-6)
    np.testing.assert_allclose(trace["std"] ** 2 > 0, True)
    other = studio.edit(digit, 0, label="1", at=0.0)
    assert samples(studio, other).cond["y"].tolist() == [1]
    moved = studio.edit(crystal, 1, channel="coord", at=0.5)
    table = rows(folder(studio, moved) / "samples.csv")
    assert (len(table), table[0]["atoms"]) == (1, "4")
    assert studio.get(f"runs/{moved['id']}/samples/0")["verdict"] == moved["pair"]["after"]["verdict"] != ""


@pytest.mark.parametrize(
    ("options", "control"),
    [
        ({"count": 100_001}, "count"),
        ({"steps": 0}, "steps"),
        ({"seed": -1}, "seed"),
        ({"propagation": "guess"}, "propagation"),
        ({"nothing": 1}, ""),
    ],
)
def test_wrong_options_are_refused_before_anything_is_written(studio, options, control):
    before = studio.state()["runs"]
    answer = studio.ask("POST", "runs", {"field": "checkerboard", "options": options})
    assert (answer.status, answer.json["control"]) == (400, control)
    assert studio.state()["runs"] == before


# ---- progress and cancelling -----------------------------------------------------------------------------------------


@pytest.fixture
def slowly(monkeypatch):
    """Let drawing wait after every step until it is allowed to go on."""
    steps, watch = threading.Semaphore(0), module.Studio._watch

    def watched(self, *given):
        on_step = watch(self, *given)

        def act(first, t, x):
            on_step(first, t, x)
            steps.acquire(timeout=60)

        return act

    monkeypatch.setattr(module.Studio, "_watch", watched)
    yield steps
    steps.release(10_000)


def test_a_cancelled_run_can_be_drawn_again_and_is_the_same(studio, slowly):
    studio.ready("checkerboard")
    made = studio.post("runs", {"field": "checkerboard", "options": {"count": 40, "steps": 4, "seed": 9}})
    run = made["run"]["id"]
    studio.until(lambda: studio.working(made["job"]))
    assert "has not ended" in studio.ask("POST", f"runs/{run}/again", {}).error
    assert "cancel it first" in studio.ask("DELETE", f"runs/{run}").error
    studio.post(f"jobs/{made['job']['id']}/cancel")
    slowly.release(10_000)
    studio.finished(made["job"], "cancelled")
    assert studio.get(f"runs/{run}")["state"] == "cancelled"
    studio.finished(studio.post(f"runs/{run}/again")["job"])
    other = studio.draw(count=40, steps=4, seed=9)
    np.testing.assert_array_equal(
        studio.tensors(f"runs/{run}/samples")["x"], studio.tensors(f"runs/{other['id']}/samples")["x"]
    )


# ---- one sample ------------------------------------------------------------------------------------------------------


def test_a_path_ends_at_its_sample_and_its_variance_is_that_of_the_field(studio, points):
    run, trace = samples(studio, points), studio.trace(points, 7)
    field = fmwc.load("checkerboard")
    np.testing.assert_allclose(trace["states"][0], run.x0[7], rtol=1e-6)
    np.testing.assert_array_equal(trace["states"][-1], run.x[7])
    np.testing.assert_allclose(trace["grid"], np.linspace(0, 1, 6), atol=1e-6)
    x, t = torch.from_numpy(trace["states"][:-1]), torch.from_numpy(trace["times"])
    moments = field.moments(x, t)
    np.testing.assert_allclose(trace["doubt"], moments.var.sqrt(), rtol=1e-4)
    np.testing.assert_allclose(trace["std"], moments.var.sum(1).sqrt(), rtol=1e-4)
    np.testing.assert_allclose(trace["guess"], x + (1 - t)[:, None] * moments.mean, rtol=1e-4, atol=1e-5)


# ---- edits -----------------------------------------------------------------------------------------------------------


def test_an_edit_is_judged_beside_its_original(studio, points):
    made = studio.edit(points, 3, scale=0.8, at=0.2, seed=4)
    new, old = samples(studio, made), samples(studio, points)
    assert not torch.equal(new.x[0], old.x[3])
    assert made["parent"] == {"run": points["id"], "sample": 3}
    after, before = made["pair"]["after"], made["pair"]["before"]
    found = fmwc.check(fmwc.load("checkerboard"), torch.stack([old.x[3], new.x[0]]), conventions=False)
    assert [before["confidence"], after["confidence"]] == pytest.approx(found.confidence.tolist(), abs=1e-6)
    assert after["failed"] == bool(fmwc.checkerboard.data.misplaced(new.x)[0])
    told = studio.get(f"runs/{points['id']}/samples/3")
    assert made["id"] in [edit["run"] for edit in told["edits"]]
    trace = studio.trace(made, 0)
    original = studio.trace(points, 3)
    np.testing.assert_array_equal(trace["states"][0], original["states"][0])
    assert not np.allclose(trace["states"][1], original["states"][1])  # t = 0.2 is the start of the second step
    np.testing.assert_allclose(trace["states"][-1], new.x[0], atol=1e-5)


# ---- export and guarantees -------------------------------------------------------------------------------------------


def test_an_export_is_what_the_command_writes(studio, points, tmp_path):
    job = studio.finished(studio.post(f"runs/{points['id']}/export", {"kept": 20})["job"])
    out = Path(job["result"]["folder"])
    call("filter", folder(studio, points), "--budget", 20, "--out", tmp_path / "kept")
    assert (out / "samples.csv").read_bytes() == (tmp_path / "kept/samples.csv").read_bytes()
    order = studio.tensors(f"runs/{points['id']}/samples")["order"][:20]
    assert sorted(row["name"] for row in rows(out / "samples.csv")) == sorted(f"{n:05d}" for n in order)
    archive = zipfile.ZipFile(BytesIO(studio.ask("GET", f"exports/{job['result']['export']}").content))
    assert sorted(archive.namelist()) == [f"samples/{name}" for name in sorted(job["result"]["files"])]
    assert archive.read("samples/samples.csv") == (out / "samples.csv").read_bytes()
    again = studio.finished(studio.post(f"runs/{points['id']}/export", {"kept": 20})["job"])
    assert again["result"] == job["result"]


def test_a_guarantee_is_that_of_the_command(studio, tmp_path):
    run = studio.draw(count=800, steps=20)
    found = studio.get(f"runs/{run['id']}/promise?max_risk=0.2&probability=0.9")
    given = ("--max-risk", 0.2, "--probability", 0.9, "--labels", "misplaced")
    call("filter", folder(studio, run), *given, "--out", tmp_path / "kept")
    assert found["kept"] == len(rows(tmp_path / "kept/samples.csv")) > 0
    assert found["share"] == found["kept"] / 800
    certificate = json.loads((tmp_path / "kept/promise.json").read_text())
    assert f"bound {certificate['bound']:.4f}" in found["sentence"]


# ---- restart ---------------------------------------------------------------------------------------------------------


def start(out, *more):
    command = [
        sys.executable,
        "-m",
        "fmwc",
        "studio",
        *more,
        "--out",
        str(out),
        "--port",
        "0",
        "--no-browser",
        "--device",
        "cpu",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert process.stdout is not None
    return process, Client(re.search(r"http://\S+", process.stdout.readline())[0])


def test_a_killed_server_finds_its_runs_again_and_finishes_what_it_was_doing(tmp_path):
    process, client = start(tmp_path / "studio", "checkerboard")
    try:
        done = client.draw(count=20, steps=3)
        edit = client.edit(done, 2)
        slow = client.post("runs", {"field": "checkerboard", "options": {"count": 6_000, "steps": 1_000}})
        client.until(lambda: client.working(slow["job"]))
    finally:
        process.kill()
        process.communicate()
    samples = Trajectory.load(tmp_path / "studio/runs" / done["id"] / "samples/samples.safetensors")
    process, client = start(tmp_path / "studio", "checkerboard")
    try:
        known = {run["id"]: run for run in client.state()["runs"]}
        assert known[done["id"]]["state"] == known[edit["id"]]["state"] == "done"
        assert known[slow["run"]["id"]]["state"] == "interrupted"
        assert client.state()["start"] == "checkerboard"
        client.ready("checkerboard")
        np.testing.assert_array_equal(client.tensors(f"runs/{done['id']}/samples")["x"], samples.x)
        assert client.get(f"runs/{edit['id']}")["pair"] == edit["pair"]
        client.trace(edit, 0)
        job = client.post(f"runs/{slow['run']['id']}/again")["job"]
        client.until(lambda: client.working(job))
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()
    assert not (tmp_path / "studio/.fmwc-lock").exists()


# ---- samples of one's own --------------------------------------------------------------------------------------------


def test_a_folder_of_samples_opens_with_its_model(tmp_path):
    call("sample", "checkerboard", "-n", 12, "--steps", 4, "--out", tmp_path / "mine", "--device", "cpu")
    with serving(tmp_path / "studio", str(tmp_path / "mine")) as client:
        client.ready("checkerboard")
        state = client.state()
        (run,) = state["runs"]
        assert (run["source"], run["count"], run["field"], state["start"]) == ("opened", 12, "checkerboard", run["id"])
        trace = client.trace(run, 2)
        x = Trajectory.load(tmp_path / "mine/samples.safetensors").x
        np.testing.assert_array_equal(trace["states"][-1], x[2])
        edit = client.edit(run, 2, scale=0)
        np.testing.assert_allclose(client.tensors(f"runs/{edit['id']}/samples")["x"][0], x[2], atol=1e-5)
        assert "delete it outside" in client.ask("DELETE", f"runs/{run['id']}").error
        assert "only runs that were drawn here" in client.ask("POST", f"runs/{run['id']}/again", {}).error
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == [
        "samples.csv",
        "samples.safetensors",
    ]


def test_a_checkpoint_of_ones_own_is_drawn_traced_and_edited(tmp_path):
    field = fmwc.attach(MLP(dim=2, hidden=16, depth=1), space=(2,))
    data = torch.randn(200, 2)
    fmwc.fit_noise(field, data, steps=3)
    fmwc.fit_confidence(field, data, pilot=50)
    fmwc.save(field, tmp_path / "my-field")
    with serving(tmp_path / "studio", str(tmp_path / "my-field")) as client:
        model = client.ready("my-field")
        assert (model["problem"], model["judge"], client.state()["start"]) == ("", None, "my-field")
        run = client.draw("my-field", count=15, steps=5)
        assert (run["kind"], run["judged"]) == ("points", False)
        client.trace(run, 1)
        edit = client.edit(run, 1, scale=0.5)
        assert edit["pair"]["after"]["failed"] is None
    with serving(tmp_path / "studio", "checkerboard") as client:  # its model is not open now
        known = {one["id"]: one for one in client.state()["runs"]}
        assert known[run["id"]]["edits"] == []
        assert client.tensors(f"runs/{run['id']}/samples")["x"].shape == (15, 2)
        assert "my-field, which is not open" in client.get(f"runs/{run['id']}/samples/0")["problem"]
