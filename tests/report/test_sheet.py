"""Which digits are shown, and in which order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fmwc.report.sheet import Sheet, bands, ends_by_class

levels = st.lists(st.floats(0, 1), min_size=1, max_size=60)


@given(confidence=levels, columns=st.integers(1, 5))
def test_bands_run_from_sure_to_doubtful_and_show_nothing_twice(confidence, columns):
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


def test_a_run_of_two_hundred_is_shown_whole_and_a_larger_one_by_both_ends_and_a_choice():
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
    assert steps.max() - steps.min() <= 1  # even, but for rounding


@given(confidence=levels, shown=st.integers(1, 8), seed=st.integers(0, 99))
def test_ends_are_of_their_class_in_order_and_apart(confidence, shown, seed):
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


def test_images_lie_in_their_cells():
    sheet = Sheet(3, 2)
    images = np.arange(1.0, 5.0)[:, None, None] * np.ones((4, 4, 6))
    shown = sheet.images(images, 0, 0, 3)
    picture = np.asarray(shown.get_array())
    assert picture.shape == (2 * 6, 3 * 8)  # a margin of one on every side
    assert [picture[2, 3], picture[2, 11], picture[2, 19], picture[8, 3]] == [1, 2, 3, 4]
    assert picture[8, 11] == picture[0, 0] == 0


def test_only_the_bad_are_framed_with_what_was_asked_for():
    sheet = Sheet(4, 1)
    sheet.digits(np.zeros((4, 4, 4)), np.array([False, True, False, True]), 0, 0, 4, np.array([5, 6, 7, 8]))
    assert [round(frame.get_x()) for frame in sheet.axes.patches] == [1, 3]
    assert [text.get_text() for text in sheet.axes.texts] == ["6", "8"]


@pytest.mark.parametrize("bad", [[], [True]])
def test_no_digits_no_picture(bad):
    sheet = Sheet(1, 1)
    sheet.digits(np.zeros((len(bad), 4, 4)), np.array(bad, dtype=bool), 0, 0, 1)
    assert len(sheet.axes.images) == len(sheet.axes.patches) == len(bad)
