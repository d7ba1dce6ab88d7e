"""Figures of images: which images are shown, in which order, and with which frames."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fmwc.report import images
from fmwc.report.images import bands, draw_images, most_doubtful
from tests.report.shared import draws, texts

levels = st.lists(st.floats(0, 1), min_size=1, max_size=60)


@given(confidence=levels, columns=st.integers(1, 5))
def test_bands_are_ordered_by_confidence_without_repetition(confidence, columns):
    shown = bands(confidence, columns)
    which = np.concatenate([band.which for band in shown])
    places = np.concatenate([band.places for band in shown])
    level = np.array(confidence)
    assert (np.diff(level[which]) <= 0).all()
    assert len(set(which)) == len(which)
    assert (np.diff(places) > 0).all()
    assert (np.sort(level)[::-1][places] == level[which]).all()
    assert sum(band.total for band in shown) == len(confidence)
    assert level[which[0]] == max(confidence)
    assert level[which[-1]] == min(confidence)


# ---- figures of runs ---------------------------------------------------------------------------------------------

CASES = {"two digits": (2, None), "all good": (30, False), "all bad": (30, True), "many": (260, None)}


@pytest.fixture(params=CASES)
def run(request):
    """Return images, confidence, failures and classes; class 3 is never requested."""
    count, bad = CASES[request.param]
    rng = np.random.default_rng(0)
    wrong = rng.random(count) < 0.3 if bad is None else np.full(count, bad)
    return rng.random((count, 1, 8, 8)), rng.random(count), wrong, rng.choice([0, 1, 2, 4, 9], count)


def test_sorted_grid(run):
    x, confidence, bad, classes = run
    figure = images.sorted_grid(x, confidence, bad, classes)
    assert draws(figure)
    assert f"classified as another digit ({bad.mean():.1%})" in texts(figure)
    assert draws(images.sorted_grid(x[:, 0], confidence, bad, classes, columns=3))


def test_the_surest_images_are_on_the_left():
    x = np.repeat(np.arange(4.0), 16).reshape(4, 1, 4, 4)
    figure = draw_images(x, np.array([0.1, 0.9, 0.8, 0.2]), "confidence")
    shown = [(image.get_extent()[0], float(np.asarray(image.get_array()).mean())) for image in figure.axes[0].images]
    assert np.argsort([value for _, value in sorted(shown)]).tolist() == [3, 0, 1, 2]  # samples 1, 2 | 3, 0


X = torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
SCORE, ASKED, RIVAL = [0.1, 0.9, -0.3, 0.2, -0.1, -0.2], [0, 1, 2, 3, 4, 5], [9, 8, 7, 6, 5, 4]
MARGIN = [-score for score in SCORE]


def test_the_most_doubtful_images_come_first_with_the_result_of_the_contest():
    figure = most_doubtful(X, SCORE, ASKED, RIVAL, MARGIN)
    said = [text.replace("\n", " ") for text in texts(figure)]
    assert said[1:3] == ["requested 1, better fit 8", "requested 3, better fit 6"]
    assert said[-1] == "requested 2, second best 7"
    assert len(figure.axes[0].patches) == 3  # frames around digits that another class explains better
    assert "score 0.9" in texts(most_doubtful(X, SCORE))
