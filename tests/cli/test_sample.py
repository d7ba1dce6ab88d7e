"""`fmwc sample` with controllers, guidance and schedules, and with contradicting options."""

import pytest
import torch

import fmwc
from fmwc.cli.sample import CONTROLLERS, RunRecord
from fmwc.estimators import Linearised
from fmwc.files import MANIFEST
from fmwc.randomness import derive
from fmwc.registry import domain_named
from fmwc.sampling import (
    Damped,
    Ema,
    Extrapolated,
    Grid,
    Reference,
    SamplingConfig,
    Trajectory,
    Uniform,
    fit_grid,
    read_with,
)
from fmwc.sampling.config import follows, needs_moments
from fmwc.uses.guidance import Guidance
from tests.command import rows
from tests.options import arguments

PILOT = 50


@pytest.fixture(autouse=True)
def _small_pilot(monkeypatch):
    monkeypatch.setattr(type(domain_named("checkerboard")), "pilot", lambda self, device: PILOT)


@pytest.fixture(scope="module")
def by_variance(tmp_path_factory):
    """The shipped checkpoint with confidence from the variance at every step."""
    field = fmwc.load("checkerboard")
    run = fmwc.sample(field, 200, seed=1, confidence=Linearised(), check=False)
    quantiles = run.score("temporal_ratio").quantile(torch.linspace(0, 1, 101))
    field.reference = Reference("temporal_ratio", read_with("linearised", 50, "euler"), quantiles)
    folder = tmp_path_factory.mktemp("by-variance") / "model"
    fmwc.save(field, folder, recipe=fmwc.checkpoint.about("checkerboard")["recipe"])
    return folder


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


def test_the_table_describes_the_controllers():
    assert LIBRARY.keys() == CONTROLLERS.keys()
    for name, kind in CONTROLLERS.items():
        made = kind.make(4) if kind.make else Grid((0.0, 0.25, 0.5, 0.75, 1.0))
        assert (kind.reads_variance, kind.changes_velocity) == (needs_moments(made), follows(made)), name
        assert made.steps == 4


def test_guidance_equals_the_library_class(run, tmp_path):
    words = ("-n", 20, "--steps", 6, "--guide", 0.2, "--guide-window", "0.5-0.9", "--device", "cpu")
    code, _, err = run("sample", "checkerboard", *words, "--out", tmp_path)
    assert code == 0, err
    guided = fmwc.sample(
        fmwc.load("checkerboard"), 20, steps=6, seed=0, config=SamplingConfig(decoder=Guidance(0.2, 0.5, 0.9))
    )
    torch.testing.assert_close(Trajectory.load(tmp_path).x, guided.x)
    assert RunRecord.read(Trajectory.load(tmp_path).made).window == (0.5, 0.9)


def test_images_are_guided_with_random_probes():
    decoder = RunRecord("mnist", guide=0.2).decoder(fmwc.load("mnist"))
    assert isinstance(decoder, Guidance)
    assert decoder.probes is not None
    assert decoder.probes < 10


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
        assert sorted(p.name for p in (tmp_path / name).iterdir()) == [MANIFEST, "samples.csv", "samples.safetensors"]
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


def test_streamed_digits_are_judged(run, tmp_path, monkeypatch):
    digits = type(domain_named("mnist"))
    monkeypatch.setattr(digits, "batch", lambda self, device: 3)
    for name, large in (("held", 100), ("streamed", 2)):
        monkeypatch.setattr(digits, "large", large)
        words = ("-n", 5, "--steps", 2, "--propagation", "none", "--device", "cpu", "--out", tmp_path / name)
        code, _, err = run("sample", "mnist", *words)
        assert code == 0, err
    held, streamed = ((tmp_path / name / "samples.csv").read_text() for name in ("held", "streamed"))
    assert held == streamed
    assert held.splitlines()[0] == "name,y,predicted,correct"
    assert [row.split(",")[1] for row in held.splitlines()[1:]] == ["0", "1", "2", "3", "4"]


def test_runs_ranked_within_the_run_are_not_streamed(run, by_variance, tmp_path, monkeypatch):
    monkeypatch.setattr(type(domain_named("checkerboard")), "large", 5)
    for i, words in enumerate([("--steps", 8), ("--keep", 0.5), ("--score", "peak")]):
        code, _, err = run("sample", by_variance, "-n", 8, *words, "--device", "cpu", "--out", tmp_path / str(i))
        assert code == 0, err
        assert len(Trajectory.load(tmp_path / str(i)).times)


BAD = {
    "name": (("--controller", "unifrom"), "did you mean 'uniform'"),
    "no variance": (("--controller", "ema", "--propagation", "none"), "leave out --propagation none"),
    "some of it": (("--controller", "ema", "--every", 5), "leave out --every"),
    "stepper": (("--controller", "damped", "--stepper", "heun"), "leave out --stepper heun"),
    "transport": (("--controller", "extrapolated", "--transport"), "leave out --transport"),
    "guided transport": (("--guide", 0.2, "--transport"), "leave out --transport"),
    "strength": (("--guide", "inf"), "finite strength"),
    "towards doubt": (("--guide", -0.2), "at least 0; got -0.2"),
    "a score without time": (("--score", "geometric@0.6-0.6"), "a time window must have early < late, got 0.6 to 0.6"),
    "a window alone": (("--guide-window", "0.1-0.5"), "add --guide"),
    "no window": (("--guide", 0.2, "--guide-window", "late"), "as in 0.5-0.9"),
    "a window that falls": (("--guide", 0.2, "--guide-window", "0.9-0.5"), "two rising times"),
    "a window beyond": (("--guide", 0.2, "--guide-window", "0.5-1.5"), "in [0, 1]"),
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
    [("-n", 10**12), ("-n", 10**20), ("--steps", 10**9), ("--every", 10**9), ("--seed", 10**25), ("-n", 0)],
    ids=str,
)
def test_numbers_out_of_range_are_rejected_before_anything_is_written(words, run, tmp_path):
    code, _, err = run("sample", "checkerboard", *words, "--device", "cpu", "--out", tmp_path / "out")
    assert code == 2
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()
