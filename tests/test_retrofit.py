"""Retrofitting noise to networks of users that a function builds."""

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fmwc
from fmwc import checkerboard
from fmwc.cli import app
from fmwc.data import arrays
from fmwc.entry import build
from fmwc.errors import OutputError, UsageError
from fmwc.retrofit import Retrofit, retrofit
from tests.command import rows

SMALL = Retrofit(steps=160, batch=64, sampling_steps=10)


@pytest.fixture
def samples():
    return arrays.Samples(checkerboard.sample(500, 0), {})


def test_the_network_does_not_change_and_the_field_loads(workdir, samples):
    network, _ = build("their_nets:made")
    before = {name: value.clone() for name, value in network.state_dict().items()}
    field, losses = retrofit(network, workdir / "field", samples, SMALL, entry="their_nets:made")
    assert all(torch.equal(before[name], value) for name, value in field.network.state_dict().items())
    assert [step for step, _ in losses] == [*range(0, 161, 20)]  # after each eighth
    assert losses[-1][1] < losses[0][1]
    again = fmwc.load(workdir / "field", network=build("their_nets:made")[0])
    ours, theirs = (fmwc.sample(f, 20, steps=10, seed=3) for f in (field, again))
    assert torch.equal(ours.x, theirs.x)
    assert torch.equal(ours.confidence, theirs.confidence)
    assert ours.reference is not None


def test_noise_is_fitted_to_own_samples(workdir):
    network, space = build("their_nets:with_space")
    config = Retrofit(steps=20, batch=32, sampling_steps=5, own_samples=100)
    field, _ = retrofit(network, workdir / "field", None, config, space=space)
    assert field.reference is not None
    with pytest.raises(UsageError, match="shape"):
        retrofit(build("their_nets:made")[0], workdir / "other", None, config)
    with pytest.raises(UsageError, match="--own-samples"):
        retrofit(build("their_nets:made")[0], workdir / "other", None, SMALL)


def test_conditions_reach_the_network(workdir):
    network, _ = build("their_nets:conditional")
    data = arrays.Samples(checkerboard.sample(90, 0), {"y": torch.arange(90) % 3})
    config = Retrofit(steps=20, batch=32, sampling_steps=5)
    field, _ = retrofit(network, workdir / "field", data, config)
    assert len(fmwc.sample(field, 6, steps=5, cond={"y": torch.arange(6) % 3})) == 6


def test_confidence_is_relative_to_the_class(workdir):
    """Also within a rare class, which may be missing in the held-out data."""
    torch.manual_seed(0)
    network, _ = build("their_nets:conditional")
    y = (torch.arange(200) >= 190).int() * 2
    data = arrays.Samples(checkerboard.sample(200, 0), {"y": y})
    retrofit(network, workdir / "field", data, Retrofit(steps=8, batch=32, sampling_steps=5, score="integrated"))
    again = fmwc.load(workdir / "field", network=build("their_nets:conditional")[0])
    assert again.reference.standard.cond == "y"
    asked = torch.tensor([0, 2]).repeat(100)
    run = fmwc.sample(again, 200, steps=5, seed=7, cond={"y": asked})
    assert run.reference is not None
    for label in (0, 2):
        assert abs(float(run.confidence[asked == label].mean()) - 0.5) < 0.15
    assert fmwc.sample(again, 3, steps=5, cond={"y": torch.tensor([0, 1, 2])}).confidence is None


def test_a_fit_that_diverges_writes_nothing(workdir, samples, monkeypatch):
    def ruined(field, *args, progress, **options):
        with torch.no_grad():
            field.noise.layers[0].inference.out.bias.fill_(torch.nan)
        progress(1, 1.0)

    monkeypatch.setattr("fmwc.retrofit.fit_noise", ruined)
    with pytest.raises(UsageError, match="--lr"):
        retrofit(build("their_nets:made")[0], workdir / "field", samples, SMALL)
    assert not (workdir / "field").exists()


def fitted(workdir, entry="their_nets:made", **cond):
    data = arrays.Samples(checkerboard.sample(300, 0), cond)
    network, space = build(entry)
    return retrofit(network, workdir / "field", data, Retrofit(steps=8, batch=64), space=space, entry=entry)[0]


def test_a_retrofitted_field_is_sampled_from_the_command_line(workdir):
    field = fitted(workdir, "their_nets:plain")
    words = ["field", "--network", "their_nets:plain", "-n", "30", "--seed", "4", "--device", "cpu", "--out", "drawn"]
    done = CliRunner().invoke(app, ["sample", *words])
    assert done.exit_code == 0, done.output
    expected = fmwc.sample(field, 30, seed=4)
    run = fmwc.Trajectory.load(workdir / "drawn")
    assert torch.equal(run.x, expected.x)
    assert torch.equal(run.confidence, expected.confidence)
    assert torch.equal(run.reference, field.reference.quantiles)
    table = rows(workdir / "drawn" / "samples.csv")
    assert list(table[0]) == ["name", "x_0", "x_1", "score", "rank", "confidence"]
    assert [float(row["confidence"]) for row in table] == pytest.approx(run.confidence.tolist(), abs=1e-5)
    parquet = pytest.importorskip("pyarrow.parquet").read_table(workdir / "drawn" / "samples.parquet").to_pydict()
    assert parquet["score"] == pytest.approx(run.score().tolist())
    kept = CliRunner().invoke(app, ["filter", "drawn", "--budget", "5", "--out", "kept"])
    assert kept.exit_code == 0, kept.output


def test_retrofit_from_the_command_line(workdir, samples):
    np.savez(workdir / "d.npz", x=samples.x.numpy())
    run = CliRunner().invoke
    words = ["retrofit", "their_nets:made", "--data", "d.npz", "--steps", "20", "--batch", "32", "--out", "field"]
    done = run(app, [*words, "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert "fmwc.load('field', network=their_nets.made())" in done.output
    assert "fmwc sample field --network their_nets:made" in done.output
    assert (workdir / "field" / "recipe.json").exists()
    again = run(app, [*words, "--device", "cpu"])
    assert again.exit_code == 0  # it exists already
    assert "field is already finished: the held-out loss" in again.output
    other = run(app, [*words, "--device", "cpu", "--seed", "1"])
    assert isinstance(other.exception, OutputError)
    assert "seed: 0 before, 1 now" in str(other.exception)
    refused = run(app, ["retrofit", "their_nets:made", "--exclude", "nothing*", "--data", "d.npz", "--out", "other"])
    assert isinstance(refused.exception, UsageError)
    assert not (workdir / "other").exists()
