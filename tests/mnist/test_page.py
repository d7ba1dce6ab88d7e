"""The MNIST page, end to end on a tiny UNet."""

import re

import numpy as np
import pytest
import torch

from fmwc.field import attach
from fmwc.mnist.page import by_stage, digits_page
from fmwc.networks import UNet
from fmwc.report import images
from fmwc.report.images import read_pixels
from fmwc.report.run import RunArrays
from fmwc.sampling import SamplingConfig, sample
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


def test_pixels_have_the_variance_of_the_velocity(field, trajectory, monkeypatch):
    monkeypatch.setattr(images, "STEPS", 2)
    pixels = read_pixels(field, trajectory, 2, (0.5,), probes=100)
    y = trajectory.cond["y"][pixels.index]
    exact = field.moments(torch.tensor(pixels.states[0])[:, None], float(pixels.times[0]), cond={"y": y}).var[:, 0]
    # The mean of 100 squared normal numbers has a standard deviation of 14 %; that of a sum is smaller.
    np.testing.assert_allclose(np.square(pixels.std[0]).sum((1, 2)), exact.sum((1, 2)), rtol=0.15)
    assert np.corrcoef(np.square(pixels.std[0]).ravel(), exact.ravel())[0, 1] > 0.8


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


def test_the_profile_adds_up_to_the_dispersion(trajectory, bad):
    run = RunArrays.read(trajectory, bad)
    parts, stages = by_stage(run.profile, run.layers)
    assert stages == ["first", "time & class", "down", "middle", "up", "out"]
    np.testing.assert_allclose(np.sqrt(parts.sum((0, 1))), trajectory.score("dispersion"), rtol=1e-4)
