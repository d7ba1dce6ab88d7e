"""Retrofitting noise to networks of users that a function builds."""

import re
from dataclasses import replace

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
from fmwc.flow import Channel, Space
from fmwc.networks import MLP
from fmwc.retrofit import Retrofit, _class, advice, held_out_elbo, retrofit
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
    with pytest.raises(UsageError, match="shape of a sample is not known"):
        retrofit(build("their_nets:made")[0], workdir / "other", None, config)
    with pytest.raises(UsageError, match="--own-samples"):
        retrofit(build("their_nets:made")[0], workdir / "other", None, SMALL)


def test_pairs_are_recorded_and_used(workdir, samples):
    small = Retrofit(steps=8, batch=32, sampling_steps=5)
    runs = {}
    for pairs in ("independent", "ot"):
        network, _ = build("their_nets:made")
        _, runs[pairs] = retrofit(network, workdir / pairs, samples, replace(small, pairs=pairs))
        assert fmwc.checkpoint.about(workdir / pairs)["recipe"].get("pairs") == (
            None if pairs == "independent" else "ot"
        )
    assert runs["ot"][0][1] < runs["independent"][0][1]  # shorter paths have the smaller loss
    with pytest.raises(UsageError, match="did you mean 'ot'"):
        retrofit(build("their_nets:made")[0], workdir / "other", samples, replace(small, pairs="to"))
    np.savez(workdir / "points.npz", x=samples.x.numpy())
    made = ["retrofit", "their_nets:made", "-o", str(workdir / "cli"), "--data", str(workdir / "points.npz")]
    result = CliRunner().invoke(app, [*made, "--steps", "8", "--batch", "32", "--pairs", "ot", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert fmwc.checkpoint.about(workdir / "cli")["recipe"]["pairs"] == "ot"


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
    with pytest.raises(UsageError, match="withheld: the reference holds no samples with y = 1"):
        _ = fmwc.sample(again, 3, steps=5, cond={"y": torch.tensor([0, 1, 2])}).confidence


def test_a_rare_class(workdir):
    """A rare class has too few training points for a distance, so distances use all points."""
    torch.manual_seed(0)
    data = arrays.Samples(checkerboard.sample(200, 0), {"y": (torch.arange(200) >= 190).int() * 2})
    config = Retrofit(steps=8, batch=32, sampling_steps=5)
    field, _ = retrofit(build("their_nets:conditional")[0], workdir / "field", data, config)
    assert "nearest" in {row["score"] for row in field.reference.candidates}
    again = fmwc.load(workdir / "field", network=build("their_nets:conditional")[0])
    assert again.reference.classes == field.reference.classes == {"y": (0, 2)}
    run = fmwc.sample(again, 20, steps=5, cond={"y": torch.tensor([0, 2]).repeat(10)})
    assert bool(run.score().isfinite().all())


@pytest.mark.parametrize(
    "cond",
    [
        {"y": torch.zeros(90)},  # not integers
        {"y": torch.zeros(90, 2, dtype=torch.long)},  # more than one number per sample
        {"y": torch.arange(90) % 3, "z": torch.arange(90) % 2},  # ambiguous
        {"y": torch.arange(90) * 100},  # too many values
        {"n": torch.arange(90) % 3},  # the number of rows of a sample
    ],
)
def test_conditions_that_are_not_classes(cond, monkeypatch):
    monkeypatch.setattr("fmwc.retrofit.CLASSES", 50)
    space = Space({"x": Channel((3, 2), rows="n")})
    assert _class(cond, space, 90) == ""
    assert _class({"y": torch.arange(90) % 3, "n": torch.ones(90, dtype=torch.long)}, space, 90) == "y"


def test_held_out_losses_are_comparable():
    field = fmwc.attach(MLP(2, 16, 2), space=(2,))
    x = checkerboard.sample(64, 0)
    assert held_out_elbo(field, x, {}, 1e-3) == held_out_elbo(field, x, {}, 1e-3)
    assert held_out_elbo(field, x, {}, 1e-3) < held_out_elbo(field, x, {}, 1.0)  # the KL is in it


def test_advice():
    assert "with 50.0 % of the decrease in the last quarter" in advice(
        [(0, 1.0), (10, 0.6), (75, 0.5), (90, 0.1), (100, 0.0)]
    )
    assert "more steps may help" in advice([(0, 1.0), (1, 0.8), (2, 0.6), (3, 0.4)])
    assert "enough steps" in advice([(0, 1.0), (1, 0.401), (2, 0.4005), (3, 0.4)])
    assert "did not fall" in advice([(0, 1.0), (1, 15.0)])
    assert "did not fall" in advice([(0, 1.0), (1, float("nan"))])
    assert "rose in the last quarter" in advice([(0, 1.0), (1, 0.2), (2, 0.3), (3, 0.5)])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"steps": -5}, "steps must lie between 1"),
        ({"batch": 0}, "batch must lie between 1"),
        ({"lr": -1.0}, "lr must be positive"),
        ({"score": "nonsense"}, "unknown score 'nonsense'"),
        ({"score": "dispersion"}, "unknown score 'dispersion'"),
    ],
)
def test_options_are_checked_before_anything_is_computed(workdir, samples, change, said, monkeypatch):
    monkeypatch.setattr("fmwc.retrofit.fit_noise", lambda *a, **k: pytest.fail("trained"))
    with pytest.raises(UsageError, match=said):
        retrofit(build("their_nets:made")[0], workdir / "field", samples, replace(SMALL, **change))
    assert not (workdir / "field").exists()


def test_data_of_another_shape_is_refused(workdir, samples):
    network, _ = build("their_nets:made")
    with pytest.raises(UsageError, match=r"does not run as network\(x, t\) on samples of x \(3,\)"):
        retrofit(network, workdir / "field", arrays.Samples(torch.randn(50, 3), {}), SMALL)
    with pytest.raises(UsageError, match="and conditions y"):
        retrofit(network, workdir / "field", samples._replace(cond={"y": torch.zeros(500)}), SMALL)
    broken = samples.x.clone()
    broken[7] = torch.nan
    with pytest.raises(UsageError, match="the data holds 2 NaN"):
        retrofit(network, workdir / "field", arrays.Samples(broken, {}), SMALL)
    assert not (workdir / "field").exists()


def test_a_fit_that_diverges_writes_nothing(workdir, samples, monkeypatch):
    def ruined(field, *args, progress, **options):
        with torch.no_grad():
            field.noise.layers[0].inference.out.bias.fill_(torch.nan)
        progress(1, 1.0)

    monkeypatch.setattr("fmwc.retrofit.fit_noise", ruined)
    with pytest.raises(UsageError, match="no checkpoint was written; lower --lr"):
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


@pytest.mark.parametrize("count", ["6", "40"])
def test_a_retrofitted_field_has_a_page(workdir, count):
    fitted(workdir, "their_nets:plain")
    words = ["--network", "their_nets:plain", "-n", count, "--device", "cpu", "--out", "page"]
    done = CliRunner().invoke(app, ["report", "field", *words])
    assert done.exit_code == 0, done.output
    page = (workdir / "page" / "report.html").read_text()
    assert "They were not judged" in page
    assert ("All samples, surest first" in page) == (count == "6")
    assert "misplaced" not in page
    assert "the checkpoint&#39;s reference" in page
    assert (workdir / "page" / "samples.csv").is_file()


def test_classes_are_drawn_in_turn_unless_a_label_is_given(workdir):
    fitted(workdir, "their_nets:conditional", y=torch.arange(300) % 2 * 2)
    words = ["sample", "field", "--network", "their_nets:conditional", "-n", "4", "--steps", "3", "--device", "cpu"]
    run = CliRunner().invoke
    assert run(app, [*words, "--out", "turns"]).exit_code == 0
    assert fmwc.Trajectory.load(workdir / "turns").cond["y"].tolist() == [0, 2, 0, 2]
    assert run(app, [*words, "--label", "2", "--out", "twos"]).exit_code == 0
    assert fmwc.Trajectory.load(workdir / "twos").cond["y"].tolist() == [2] * 4
    refused = run(app, [*words, "--label", "1", "--out", "ones"])
    assert str(refused.exception) == "--label must be one of the classes 0, 2; got 1"
    assert not (workdir / "ones").exists()


def test_networks_of_fmwc_need_no_function(workdir):
    fitted(workdir)
    done = CliRunner().invoke(app, ["sample", "field", "-n", "4", "--steps", "3", "--device", "cpu", "--out", "drawn"])
    assert done.exit_code == 0, done.output


def test_networks_that_cannot_be_sampled_are_refused_before_a_folder_is_made(workdir):
    fitted(workdir, "their_nets:plain")
    asking = fmwc.attach(build("their_nets:conditional")[0], space=(2,))
    fmwc.save(asking, workdir / "asking")
    for words, said in (
        (("field",), r"add --network module:function \(it was trained with their_nets:plain\)"),
        (("field", "--network", "their_nets:plain", "--judge", "chgnet"), "leave out --judge"),
        (("field", "--network", "their_nets:plain", "--label", "3"), "this network has no classes"),
        (("field", "--network", "their_nets:conditional"), "of another architecture"),
        (("checkerboard", "--network", "their_nets:plain"), "leave out --network"),
        (("asking", "--network", "their_nets:conditional"), r"'y'.*use Python"),
    ):
        refused = CliRunner().invoke(app, ["sample", *words, "--device", "cpu", "--out", "out"])
        assert isinstance(refused.exception, fmwc.errors.FmwcError), words
        assert re.search(said, str(refused.exception)), refused.exception
        assert not (workdir / "out").exists()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_network_in_double_precision_is_retrofitted_from_the_command_line(workdir, samples, dtype):
    (workdir / "wide_nets.py").write_text(
        "import torch\nfrom their_nets import made\ndef build():\n    return made().double(), (2,)\n"
    )
    np.savez(workdir / "d.npz", x=samples.x.numpy().astype(dtype))
    words = ["retrofit", "wide_nets:build", "--data", "d.npz", "--steps", "8", "--batch", "32", "--out", "wide"]
    done = CliRunner().invoke(app, [*words, "--device", "cpu"])
    assert done.exit_code == 0, done.output
    words = ["sample", "wide", "--network", "wide_nets:build", "-n", "4", "--steps", "4", "--every", "1", "--out", "s"]
    done = CliRunner().invoke(app, [*words, "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert fmwc.Trajectory.load(workdir / "s").x.dtype == torch.float64


@pytest.mark.parametrize("count", [1, 9, 10**12])
def test_invalid_numbers_of_own_samples_are_refused(workdir, count):
    words = ["retrofit", "their_nets:made", "--own-samples", str(count), "--out", "field"]
    refused = CliRunner().invoke(app, words)
    assert isinstance(refused.exception, UsageError)
    assert not (workdir / "field").exists()


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
