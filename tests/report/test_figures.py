"""Figures build for the smallest and the most one-sided of runs."""

import numpy as np
import pytest

from fmwc.metrics.ranking import retention
from fmwc.report import board, figures, images
from fmwc.report.checkerboard import WORDS
from fmwc.report.images import Sweep
from fmwc.report.plates import history
from fmwc.report.run import Run

CASES = {"two digits": (2, None), "all good": (30, False), "all bad": (30, True), "many": (260, None)}


@pytest.fixture(params=CASES)
def run(request):
    """Images, confidence, bad, classes; class 3 is never asked for."""
    count, bad = CASES[request.param]
    rng = np.random.default_rng(0)
    wrong = rng.random(count) < 0.3 if bad is None else np.full(count, bad)
    return rng.random((count, 1, 8, 8)), rng.random(count), wrong, rng.choice([0, 1, 2, 4, 9], count)


def words(figure):
    found = [text.get_text() for axes in figure.axes for text in axes.texts]
    return found + [text.get_text() for axes in figure.axes if (box := axes.get_legend()) for text in box.get_texts()]


def drawn(figure):
    return figures.png(figure, dpi=40)[:4] == b"\x89PNG"


def test_sorted_grid(run):
    x, confidence, bad, classes = run
    figure = images.sorted_grid(x, confidence, bad, classes)
    assert drawn(figure)
    assert f"the judge reads another digit ({bad.mean():.1%})" in words(figure)
    assert drawn(images.sorted_grid(x[:, 0], confidence, bad, columns=3))


def test_extremes_by_class(run):
    x, confidence, bad, classes = run
    figure = images.extremes_by_class(x, confidence, bad, classes)
    assert drawn(figure)
    assert {word for word in words(figure) if word.isdigit()} == {str(c) for c in set(classes.tolist())}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_pixel_std(count):
    rng = np.random.default_rng(0)
    states, std = rng.normal(size=(3, count, 8, 8)), rng.random((3, count, 8, 8))
    confidence, x = np.linspace(0, 1, count), rng.random((count, 1, 8, 8))
    figure = images.pixel_std(states, std, [0.0, 0.5, 0.9], confidence, x, np.arange(count) == 0)
    assert drawn(figure)
    maps = [image for image in figure.axes[0].images if image.get_cmap().name == "plasma"]
    assert len(maps) == count
    assert len({image.get_clim() for image in maps}) == 1  # one scale for all


def test_quality_against_steps():
    one = {"all": {50: 2.0, 5: 3.0}}
    figure = images.quality_against_steps(Sweep(one, {"all": {5: 0.03, 50: 0.01}}))
    assert drawn(figure)
    fid = figure.axes[0]
    assert fid.lines[0].get_xdata().tolist() == [5, 50]
    assert fid.get_yscale() == "linear"
    wide = {"all": {"5": 100.0, "50": 2.0}, "surest": {"50": 1.5}}  # keys that have been through JSON
    figure = images.quality_against_steps(Sweep(wide, {}))
    assert figure.axes[0].get_yscale() == "log"
    assert drawn(figure)


@pytest.mark.parametrize("word", ["misplaced", "failed"])
def test_shared_figures_say_what_is_bad(run, word):
    _, confidence, bad, _ = run
    curves = {"a score": retention(-confidence, bad)}
    figure = figures.retention_curve(curves, float(bad.mean()), word)
    assert figure.axes[0].get_ylabel() == f"{word} among the kept"
    std = np.random.default_rng(1).random((5, len(bad)))
    figure = figures.variance_trajectories(np.linspace(0, 0.9, 5), std, confidence, (0.01, 0.25), word)
    assert words(figure) == [
        f"most doubtful 10% of samples (25.0% {word})",
        f"surest 10% of samples (1.0% {word})",
    ]
    assert drawn(figure)


def test_curves_of_some_samples_have_the_shares_of_all():
    def made(score, bad):
        steps = np.linspace(0, 0.9, 5)[:, None].repeat(len(score), 1)
        return Run(score[:, None], {"a score": score}, -score, bad, steps, np.ones_like(steps), steps, None, ())

    score = np.arange(200.0)
    every = made(score, score >= 190)  # half of the most doubtful tenth
    some = made(score[::40], np.ones(5, bool))
    (plate,) = history(every, WORDS, some)
    assert words(plate.figure) == [
        "most doubtful 10% of samples (50.0% misplaced)",
        "surest 10% of samples (0.0% misplaced)",
    ]
    assert "5 of the 200 samples" in plate.caption


@pytest.mark.parametrize("count", [1, 3, 100])
def test_edited_pairs(count):
    rng = np.random.default_rng(0)
    old, new = np.zeros(count, int), np.arange(count) % 2
    figure = images.edited_pairs(
        rng.random((count, 8, 8)), rng.random((count, 8, 8)), old, new, np.arange(count), np.full(count, 0.25)
    )
    words = [text.get_text() for text in figure.axes[0].texts]
    shown = min(count, images.PAIRS)
    assert sum("t = 0.25" in word for word in words) == shown
    assert (f"{shown} of {count}" in words[0]) == (count > shown)
    assert figures.png(figure)[:4] == b"\x89PNG"


@pytest.mark.parametrize("count", [1, 100])
def test_ways_turned(count):
    rng = np.random.default_rng(0)
    before = rng.normal(size=(6, count, 2))
    after, grid = before + 0.1, np.linspace(0, 1, 6)[:, None].repeat(count, 1)
    turned = np.arange(count) % 2 == 0
    figure = board.ways_turned(before, after, grid, np.full(count, 0.4), turned)
    ways = [line for line in figure.axes[0].lines if len(line.get_xdata()) == 4]  # from t = 0.4 on, old and new
    assert len(ways) == 2 * min(count, board.WAYS)
    assert f"({turned.mean():.0%} of {count})" in figure.axes[0].get_legend().get_texts()[-1].get_text()
