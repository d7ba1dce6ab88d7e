"""The MNIST page, end to end on a tiny UNet."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from fmwc.errors import UsageError
from fmwc.field import attach
from fmwc.mnist.page import by_stage, digits_page
from fmwc.networks import UNet
from fmwc.report import images
from fmwc.report.images import read_pixels
from fmwc.report.run import RunArrays
from fmwc.sampling import SamplingConfig, sample, standard_of
from tests.conftest import awaken

TIMES = (0.0, 0.5, 0.96)
COUNT = 54  # enough for curves of a ranking


@pytest.fixture(scope="module")
def field():
    torch.manual_seed(0)
    return awaken(attach(UNet(base=8, stages=(1, 2), cond=16), space=(1, 8, 8), width=8))


@pytest.fixture(scope="module")
def trajectory(field):
    return sample(
        field, COUNT, steps=6, transport=True, cond={"y": torch.arange(COUNT) % 3}, config=SamplingConfig(projections=3)
    )


@pytest.fixture(scope="module")
def pixels(field, trajectory):
    return read_pixels(field, trajectory, 4, TIMES, probes=2)


@pytest.fixture(scope="module")
def bad():
    return np.arange(COUNT) % 5 == 0


def test_pixels_are_of_the_surest_and_the_most_doubtful(field, trajectory, pixels):
    order = trajectory.score().argsort(stable=True).numpy()
    assert pixels.index.tolist() == [*order[:2], *order[-2:]]
    assert pixels.states.shape == pixels.std.shape == (3, 4, 8, 8)
    np.testing.assert_allclose(pixels.times, TIMES, atol=1e-6)
    np.testing.assert_array_equal(pixels.states[0], trajectory.x0[pixels.index, 0])
    chosen = trajectory.take(torch.tensor(pixels.index))
    again = sample(
        field, x0=chosen.x0, steps=50, confidence=None, cond=chosen.cond, config=SamplingConfig(keep_states=True)
    )
    torch.testing.assert_close(torch.tensor(pixels.states[1]), again.states[25][:, 0])


def test_pixels_have_the_variance_of_the_velocity(field, trajectory, monkeypatch):
    monkeypatch.setattr(images, "STEPS", 2)
    pixels = read_pixels(field, trajectory, 2, (0.5,), probes=200)
    y = trajectory.cond["y"][pixels.index]
    exact = field.moments(torch.tensor(pixels.states[0])[:, None], float(pixels.times[0]), cond={"y": y}).var[:, 0]
    # The mean of 200 squared normal numbers has a standard deviation of 10 %; that of a sum is smaller.
    np.testing.assert_allclose(np.square(pixels.std[0]).sum((1, 2)), exact.sum((1, 2)), rtol=0.1)
    assert np.corrcoef(np.square(pixels.std[0]).ravel(), exact.ravel())[0, 1] > 0.8


def test_more_pixels_than_digits_are_refused(field, trajectory):
    with pytest.raises(UsageError, match=f"between 1 and {COUNT}, the number of digits"):
        read_pixels(field, trajectory, COUNT + 1)


def test_the_page_is_complete_and_fetches_nothing(tmp_path, trajectory, bad, pixels):
    about = {"commit": "<script>alert(1)</script>", "device": "a & b"}
    numbers = [{"score": "integrated", "AUPRC": "0.5"}]
    whole = digits_page(tmp_path, trajectory, bad, pixels, numbers=numbers, provenance=about).read_text()
    assert whole.rstrip().endswith("</html>")
    page = re.sub(r"<script.*?</script>", "", whole, flags=re.DOTALL)  # without the gallery's data and scripts
    assert whole.count("gallery-data") > page.count("gallery-data") == 0
    headings = re.findall(r"<h2 [^>]*>(.*?)</h2>", page)
    assert headings == [
        "Digits by rank",
        "Share of failed samples among those kept",
        "Surest and most doubtful digits of each class",
        "Uncertainty of each pixel",
        "Uncertainty over time",
        "Endpoint variance by step and stage",
        "Numbers",
        "Limitations",
        "Provenance",
    ]
    assert page.count("<img ") == page.count('<img src="data:') == 5
    assert not re.search(r'(src|href)\s*=\s*"(?!data:)', page)
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "misplaced" not in page


@pytest.mark.parametrize("rate", [0, 1])
def test_a_run_all_good_or_all_bad_has_a_page(tmp_path, trajectory, pixels, rate):
    plain = replace(trajectory, transported=None)
    page = digits_page(tmp_path, plain, np.full(COUNT, bool(rate)), pixels, numbers=[], provenance={}).read_text()
    assert ("There are no failed digits" in page) == (rate == 0)
    assert ">Numbers<" not in page
    assert page.count("<img ") == 4


def test_two_digits_have_a_page(tmp_path, field):
    two = sample(field, 2, steps=6, cond={"y": torch.tensor([7, 2])})
    pixels = read_pixels(field, two, 2, TIMES, probes=1)
    page = digits_page(tmp_path, two, [True, False], pixels, numbers=[], provenance={}).read_text()
    assert "among those kept" not in page  # two digits give no curve


def test_page_ranks_by_the_score_of_the_run(trajectory, bad):
    raw = RunArrays.read(trajectory.ranked_by("integrated"), bad, ["integrated"])
    assert list(raw.scores) == ["uncertainty integrated over time"]
    scores = trajectory.score("integrated")
    within = replace(
        trajectory, default_score="integrated", standard=standard_of("y", scores, trajectory.cond["y"]), reference=None
    )
    run = RunArrays.read(within, bad, ["integrated"])
    assert list(run.scores) == [
        "uncertainty integrated over time, within its class",
        "uncertainty integrated over time",
    ]
    np.testing.assert_allclose(run.score, trajectory.score("integrated", within="y"), rtol=1e-5)
    np.testing.assert_allclose(run.scores["uncertainty integrated over time"], scores)


def test_the_profile_adds_up_to_the_dispersion(trajectory, bad):
    run = RunArrays.read(trajectory, bad)
    parts, stages = by_stage(run.profile, run.layers)
    assert stages == ["first", "time & class", "down", "middle", "up", "out"]
    np.testing.assert_allclose(np.sqrt(parts.sum((0, 1))), trajectory.score("dispersion"), rtol=1e-4)


def test_layers_of_another_network_keep_their_names():
    parts, names = by_stage(np.ones((2, 3, 4)), ["layers.0", "layers.1", "out"])
    assert names == ["out", "layers"]
    assert parts[0, :, 0].tolist() == [1, 2]


def test_digits_without_classes_are_refused(tmp_path, trajectory, bad, pixels):
    with pytest.raises(UsageError, match="'y': classes"):
        digits_page(tmp_path, replace(trajectory, cond={}), bad, pixels, numbers=[], provenance={})
