"""Figures of images: which images are shown, in which order, and with which frames."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fmwc.report import images
from fmwc.report.images import Sheet, bands, draw_images, ends_by_class, most_doubtful
from fmwc.report.reports import contest_section
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


def test_large_runs_show_both_ends_and_an_even_choice():
    confidence = np.random.default_rng(0).permutation(5000) / 5000
    whole = bands(confidence[:200])
    assert len(whole) == 1
    assert sorted(whole[0].which) == list(range(200))
    sure, middle, doubtful = bands(confidence)
    order = np.argsort(-confidence)
    assert sure.which.tolist() == order[:40].tolist()
    assert doubtful.which.tolist() == order[-40:].tolist()
    assert len(middle.which) == 120
    steps = np.diff(middle.places)
    assert steps.max() - steps.min() <= 1  # even up to rounding


@given(confidence=levels, shown=st.integers(1, 8), seed=st.integers(0, 99))
def test_ends_by_class_are_ordered_and_do_not_overlap(confidence, shown, seed):
    level = np.array(confidence)
    classes = np.random.default_rng(seed).integers(0, 4, len(level))
    ends = ends_by_class(level, classes, shown)
    assert list(ends) == sorted(set(classes.tolist()))  # a class that does not occur has no row
    for group, (sure, doubtful) in ends.items():
        row = np.concatenate([sure, doubtful])
        members = level[classes == group]
        assert (classes[row] == group).all()
        assert len(set(row)) == len(row) == min(2 * shown, len(members))
        assert (np.diff(level[row]) <= 0).all()
        assert level[row[0]] == members.max()
        assert len(row) == 1 or level[row[-1]] == members.min()


def test_images_are_placed_in_their_cells():
    sheet = Sheet(3, 2)
    images = np.arange(1.0, 5.0)[:, None, None] * np.ones((4, 4, 6))
    shown = sheet.images(images, 0, 0, 3)
    picture = np.asarray(shown.get_array())
    assert picture.shape == (2 * 6, 3 * 8)  # a margin of one pixel on every side
    assert [picture[2, 3], picture[2, 11], picture[2, 19], picture[8, 3]] == [1, 2, 3, 4]
    assert picture[8, 11] == picture[0, 0] == 0


def test_bad_images_are_framed_with_the_requested_class():
    sheet = Sheet(4, 1)
    sheet.digits(np.zeros((4, 4, 4)), np.array([False, True, False, True]), 0, 0, 4, np.array([5, 6, 7, 8]))
    assert [round(frame.get_x()) for frame in sheet.axes.patches] == [1, 3]
    assert [text.get_text() for text in sheet.axes.texts] == ["6", "8"]


@pytest.mark.parametrize("bad", [[], [True]])
def test_empty_sheets(bad):
    sheet = Sheet(1, 1)
    sheet.digits(np.zeros((len(bad), 4, 4)), np.array(bad, dtype=bool), 0, 0, 1)
    assert len(sheet.axes.images) == len(sheet.axes.patches) == len(bad)


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


def test_extremes_by_class(run):
    x, confidence, bad, classes = run
    figure = images.extremes_by_class(x, confidence, bad, classes)
    assert draws(figure)
    assert {word for word in texts(figure) if word.isdigit()} == {str(c) for c in set(classes.tolist())}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_pixel_std(count):
    rng = np.random.default_rng(0)
    states, std = rng.normal(size=(3, count, 8, 8)), rng.random((3, count, 8, 8))
    pixels = images.Pixels(states, std, np.array([0.0, 0.5, 0.9]), np.arange(count))
    confidence, x = np.linspace(0, 1, count), rng.random((count, 1, 8, 8))
    figure = images.pixel_std(pixels, confidence, x, np.arange(count) == 0)
    assert draws(figure)
    maps = [image for image in figure.axes[0].images if image.get_cmap().name == "plasma"]
    assert len(maps) == count
    assert len({image.get_clim() for image in maps}) == 1  # one scale for all


@pytest.mark.parametrize("count", [1, 3, 100])
def test_edited_pairs(count):
    rng = np.random.default_rng(0)
    old, new = np.zeros(count, int), np.arange(count) % 2
    figure = images.edited_pairs(
        rng.random((count, 8, 8)), rng.random((count, 8, 8)), old, new, np.arange(count), np.full(count, 0.25)
    )
    words = texts(figure)
    shown = min(count, images.PAIRS)
    assert sum("t = 0.25" in word for word in words) == shown
    assert (f"{shown} of {count}" in words[0]) == (count > shown)
    assert draws(figure)


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


def test_runs_with_a_contest_have_a_section():
    run = SimpleNamespace(evidence={"echo": torch.zeros(6)}, cond={"y": torch.arange(6)}, x=X)
    assert contest_section(run) == []
    found = {"contest": torch.tensor(SCORE), "rival": torch.tensor(RIVAL), "margin": torch.tensor(MARGIN)}
    (section,) = contest_section(SimpleNamespace(evidence=found, cond={"y": torch.arange(6)}, x=X))
    assert any("requested 1,\nbetter fit 8" in text for text in texts(section.pictures[0].figure))
