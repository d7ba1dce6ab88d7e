"""`fmwc sample` with controllers, guidance and schedules, and with contradicting options."""

import pytest
import torch

import fmwc
from fmwc.cli.sample import CONTROLLERS, RunRecord
from fmwc.randomness import derive
from fmwc.registry import domain_named
from fmwc.sampling import (
    Damped,
    Ema,
    Extrapolated,
    SamplingConfig,
    Trajectory,
    Uniform,
    fit_grid,
)
from fmwc.uses.guidance import Guidance
from tests.command import rows
from tests.options import arguments

PILOT = 50


@pytest.fixture(autouse=True)
def _small_pilot(monkeypatch):
    monkeypatch.setattr(type(domain_named("checkerboard")), "pilot", lambda self, device: PILOT)


def fitted(field):
    return fit_grid(field, 6, pilot=PILOT, seed=derive(0, "pilot"), config=SamplingConfig(batch=2048))


LIBRARY = {
    "uniform": lambda field: {"steps": 6},
    "ema": lambda field: {"controller": Ema(6)},
    "damped": lambda field: {"controller": Damped(6)},
    "grid": lambda field: {"controller": fitted(field)},
    "extrapolated": lambda field: {"controller": Extrapolated(Uniform(6))},
}


@pytest.mark.parametrize("name", LIBRARY)
def test_a_controller_by_name_equals_the_library_class(name, run, tmp_path):
    words = ("-n", 20, "--steps", 6, "--controller", name, "--device", "cpu", "--out", tmp_path)
    code, _, err = run("sample", "checkerboard", *words)
    assert code == 0, err
    field = fmwc.load("checkerboard")
    made = Trajectory.load(tmp_path)
    torch.testing.assert_close(made.x, fmwc.sample(field, 20, **arguments(seed=0, **LIBRARY[name](field))).x)
    assert made.made["controller"] == name
    assert ("pilot run" in err) == (CONTROLLERS[name].make is None)


def test_guidance_equals_the_library_class(run, tmp_path):
    words = ("-n", 20, "--steps", 6, "--guide", 0.2, "--guide-window", "0.5-0.9", "--device", "cpu")
    code, _, err = run("sample", "checkerboard", *words, "--out", tmp_path)
    assert code == 0, err
    guided = fmwc.sample(
        fmwc.load("checkerboard"), 20, steps=6, seed=0, config=SamplingConfig(decoder=Guidance(0.2, 0.5, 0.9))
    )
    torch.testing.assert_close(Trajectory.load(tmp_path).x, guided.x)
    assert RunRecord.read(Trajectory.load(tmp_path).made).window == (0.5, 0.9)


def test_equal_steps_use_the_reference_of_the_checkpoint(run, tmp_path):
    words = ("-n", 3, "--controller", "uniform", "--every", 1, "--device", "cpu", "--out", tmp_path)
    assert run("sample", "checkerboard", *words)[0] == 0
    torch.testing.assert_close(Trajectory.load(tmp_path).reference, fmwc.load("checkerboard").reference.quantiles)


@pytest.mark.parametrize("words", [(), ("--propagation", "none")], ids=str)
def test_streamed_samples_equal_samples_held_in_memory(words, run, tmp_path, monkeypatch):
    board = type(domain_named("checkerboard"))
    monkeypatch.setattr(board, "batch", lambda self, device: 8)
    for name, large in (("held", 100), ("streamed", 20)):
        monkeypatch.setattr(board, "large", large)
        code, _, err = run("sample", "checkerboard", "-n", 21, *words, "--device", "cpu", "--out", tmp_path / name)
        assert code == 0, err
        assert sorted(p.name for p in (tmp_path / name).iterdir()) == ["samples.csv", "samples.safetensors"]
    held, streamed = (Trajectory.load(tmp_path / name) for name in ("held", "streamed"))
    tables = [rows(tmp_path / name / "samples.csv") for name in ("held", "streamed")]
    assert "none" in words or all("rank" in row for row in tables[0])
    assert [{k: v for k, v in row.items() if k != "rank"} for row in tables[0]] == tables[
        1
    ]  # the rank needs all samples
    assert torch.equal(streamed.x, held.x)
    assert torch.equal(streamed.x0, held.x0)
    assert streamed.made == held.made
    assert len(streamed.times) == 0
    if "none" in words:
        return
    torch.testing.assert_close(streamed.confidence, held.confidence)
    code, _, err = run("filter", tmp_path / "streamed", "--budget", 5, "--out", tmp_path / "kept")
    assert code == 0, err
    assert torch.equal(Trajectory.load(tmp_path / "kept").x, held.surest(5 / 21).x)
    code, _, err = run("edit", tmp_path / "streamed", "--device", "cpu", "--out", tmp_path / "edited")
    assert code == 2
    assert "no trajectories" in err


BAD = {
    "name": (("--controller", "unifrom"), "uniform"),
    "no variance": (("--controller", "ema", "--propagation", "none"), "--propagation"),
    "stepper": (("--controller", "damped", "--stepper", "heun"), "--stepper"),
    "a window alone": (("--guide-window", "0.1-0.5"), "--guide"),
    "a window beyond": (("--guide", 0.2, "--guide-window", "0.5-1.5"), "[0, 1]"),
}


@pytest.mark.parametrize("case", BAD)
def test_contradicting_options_are_one_line_and_write_nothing(case, run, tmp_path):
    words, expected = BAD[case]
    code, _, err = run("sample", "checkerboard", "--device", "cpu", "--out", tmp_path / "out", *words)
    assert code == 2
    lines = [line for line in err.splitlines() if line.startswith("fmwc:")]
    assert len(lines) == 1
    assert expected in lines[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("-n", 10**12),
        ("--steps", 10**9),
        ("--seed", 10**25),
    ],
    ids=str,
)
def test_numbers_out_of_range_are_rejected_before_anything_is_written(words, run, tmp_path):
    code, _, err = run("sample", "checkerboard", *words, "--device", "cpu", "--out", tmp_path / "out")
    assert code == 2
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()
