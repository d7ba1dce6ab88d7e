"""Drawings of single crystals, of any quality, and figures of many: order, captions and curves."""

import io

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text

from fmwc.crystals import figures as crystals_drawn
from fmwc.crystals.drawing import draw_crystal, formula
from fmwc.crystals.structures import Crystals, symbol
from fmwc.errors import ShapeError, UsageError
from fmwc.report.page import png

NAN, INF = float("nan"), float("inf")
SALT = ((11, 17), ((0, 0, 0), (0.5, 0.5, 0.5)))
PAIR = ((26, 8), ((0.3, 0.3, 0.1), (0.5, 0.5, 0.7)))


def crystal(numbers, coords, lengths=(4, 4, 4), angles=(90, 90, 90)):
    tensors = (torch.tensor([row], dtype=torch.float) for row in (coords, lengths, angles))
    return Crystals(torch.tensor([numbers]), *tensors, ("one",))


RANDOM = np.random.default_rng(0).random((20, 3)).tolist()
UGLY = {
    "atoms at one place": crystal((11, 17, 17), [[0.5] * 3] * 3),
    "needle": crystal(*PAIR, (1, 1, 60)),
    "sheet": crystal(*PAIR, (5, 5, 1e-3)),
    "collapsed": crystal(tuple(range(1, 21)), RANDOM, (0.01, 0.01, 0.01)),
    "huge": crystal((6,) * 20, RANDOM, (500, 300, 9000)),
    "no element": crystal((119, 128, 8), RANDOM[:3]),
    "many elements": crystal(tuple(range(99, 119)), RANDOM),
    "coordinates missing": crystal((26, 8), ((NAN, 0.3, 0.1), (0.5, 0.5, 0.7))),
    "all coordinates missing": crystal((26,), ((NAN, NAN, INF),)),
    "no atoms": crystal((0, 0), ((0, 0, 0), (0, 0, 0))),
}
NO_LATTICE = {
    "NaN length": crystal(*PAIR, (NAN, 4, 4)),
    "endless": crystal(*PAIR, (INF, 4, 4)),
    "negative": crystal(*PAIR, (-1, 4, 4)),
    "NaN angle": crystal(*PAIR, angles=(NAN, 90, 90)),
    "angle of 180°": crystal(*PAIR, angles=(180, 90, 90)),
    "flat angles": crystal(*PAIR, angles=(60, 60, 120)),
    "angles of no cell": crystal(*PAIR, angles=(60, 60, 175)),
}


def drawn(crystals, caption="", **style):
    figure = Figure(figsize=(2, 2))
    draw_crystal(figure.add_subplot(), crystals, 0, caption, **style)
    return figure


def words(figure):
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def pixels(figure):
    return imread(io.BytesIO(png(figure, dpi=60)))


def together(*some):
    """Crystals of one set, the smaller ones padded."""
    width = max(c.numbers.shape[1] for c in some)
    numbers, coords = (torch.zeros(len(some), width, *rest) for rest in ((), (3,)))
    for i, c in enumerate(some):
        numbers[i, : c.numbers.shape[1]], coords[i, : c.numbers.shape[1]] = c.numbers[0], c.coords[0]
    lengths, angles = (torch.cat([getattr(c, name) for c in some]) for name in ("lengths", "angles"))
    return Crystals(numbers.long(), coords, lengths, angles, tuple(str(i) for i in range(len(some))))


# ---- one crystal -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", UGLY)
def test_impossible_structures_are_drawn(name):
    figure = drawn(UGLY[name])
    assert (pixels(figure) < 1).any()
    assert "invalid lattice" not in words(figure)


@pytest.mark.parametrize("name", NO_LATTICE)
def test_impossible_lattices_are_labelled(name):
    figure = drawn(NO_LATTICE[name])
    assert {"invalid lattice", "FeO"} <= set(words(figure))
    pixels(figure)


def test_formula_and_caption():
    assert words(drawn(crystal((56, 22, 8, 8, 8), RANDOM[:5]), "a caption")) == ["BaTiO₃", "a caption"]
    assert words(drawn(UGLY["no element"]))[0].startswith("?")
    assert "1 of 2 atoms without finite coordinates" in words(drawn(UGLY["coordinates missing"]))


def test_different_structures_give_different_pixels():
    variants = [
        crystal(*SALT),
        crystal((11, 35), SALT[1]),  # another element
        crystal(SALT[0], ((0, 0, 0), (0.5, 0.5, 0.3))),  # another place
        crystal(*SALT, (4, 4, 6)),  # another cell
        crystal(*SALT, angles=(90, 90, 70)),
    ]
    pictures = [pixels(drawn(c))[20:] for c in variants]  # without the formula
    assert np.array_equal(pictures[0], pixels(drawn(variants[0]))[20:])
    for i, one in enumerate(pictures):
        assert all(np.abs(one - other).mean() > 1e-3 for other in pictures[:i])


def test_formulas_agree_with_pymatgen():
    core = pytest.importorskip("pymatgen.core")
    plain = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
    for numbers in ([8, 8, 22, 56, 8], [3, 28, 8, 8], [13, 69, *[28] * 4], [31, 33, 31, 33]):
        expected = core.Composition({core.Element.from_Z(z): numbers.count(z) for z in set(numbers)}).reduced_formula
        assert formula(numbers).translate(plain) == expected


# ---- many --------------------------------------------------------------------------------------------------------


def ranked(level, energy=None, valid=None, score=None, **style):
    """Crystals of one element each, beginning with helium, so that the symbol identifies the crystal."""
    count = len(level)
    some = together(*(crystal((2 + i,), ((0.5, 0.5, 0.5),)) for i in range(count)))
    energy = np.zeros(count) if energy is None else energy
    valid = np.ones(count, bool) if valid is None else valid
    score = np.zeros(count) if score is None else score
    figure = crystals_drawn.sorted_by_confidence(some, level, energy, valid, score, **style)
    symbols = {symbol(2 + i): i for i in range(count)}
    return figure, [symbols[word] for axes in figure.axes for word in words(axes) if word in symbols]


def test_structures_are_sorted():
    level = np.array([0.2, 0.9, NAN, 0.5, 0.7])
    assert ranked(level)[1] == [1, 4, 3, 0, 2]  # a crystal without confidence is last
    assert ranked(np.arange(101) / 101, rows=1, columns=3)[1] == [100, 50, 0]
    assert ranked(np.ones(3), score=[0.3, 0.1, 0.2])[1] == [1, 2, 0]


def test_captions():
    energy = np.array([0.034, -0.012, NAN, 12.3, 0.05])
    figure, order = ranked(np.array([0.9, 0.8, 0.7, 0.6, 0.5]), energy, np.array([True, True, True, True, False]))
    assert order == [0, 1, 2, 3, 4]
    captions = [word.replace(r"$E_\mathrm{hull}$ ", "") for word in words(figure) if "confidence" in word]
    values = ["0.03", "−0.01", "–", "12", "0.05"]
    levels = ["0.90", "0.80", "0.70", "0.60", "0.50"]
    assert captions == [f"{e} eV/atom\nconfidence {c}" for e, c in zip(values, levels, strict=True)]
    shares = ["hull (40.0%)", "higher (20.0%)", "invalid, or no energy (40.0%)"]
    assert all(any(word.endswith(share) for word in words(figure)) for share in shares)
    assert any(word.startswith("all from the surest") for word in words(figure))
    assert any(word.startswith("3 of 5, at even steps") for word in words(ranked(np.ones(5), rows=1, columns=3)[0]))


@pytest.mark.parametrize(
    ("energy", "valid", "count"), [(NAN, True, 7), (5.0, True, 1), (-0.3, True, 7), (0.0, False, 7)]
)
def test_runs_of_one_class_are_drawn(energy, valid, count):
    figure, _ = ranked(np.linspace(0, 1, count), np.full(count, energy), np.full(count, valid), rows=1, columns=2)
    assert (pixels(figure) < 1).any()


def test_impossible_structures_are_drawn_together():
    some = together(*UGLY.values(), *NO_LATTICE.values())
    energy = np.where(np.arange(len(some)) % 3 == 0, NAN, np.linspace(0, 3, len(some)))
    figure = crystals_drawn.sorted_by_confidence(
        some, np.linspace(1, 0, len(some)), energy, np.isfinite(energy), energy
    )
    assert (pixels(figure) < 1).any()
    assert words(figure).count("invalid lattice") == len(NO_LATTICE)
    with pytest.raises(ShapeError, match="17 crystals, 3 confidences"):
        crystals_drawn.sorted_by_confidence(some, np.ones(3), energy, np.isfinite(energy), energy)


# ---- curves ------------------------------------------------------------------------------------------------------


def test_channel_variances():
    times, level = np.linspace(0, 0.9, 10), np.linspace(0, 1, 50)
    hill = 1 - (times - 0.4) ** 2
    std = dict.fromkeys(("type", "coord", "lattice"), hill[:, None] * (2 - level))
    figure = crystals_drawn.channel_variances(times, std, level)
    assert [axes.get_title("left") for axes in figure.axes] == [
        f"{name}: highest at t = 0.40" for name in ("atom types", "coordinates", "lattice")
    ]
    _, sure, doubtful, _ = figure.axes[0].lines
    assert (doubtful.get_ydata() > sure.get_ydata()).all()
    assert (pixels(figure) < 1).any()
    own = np.stack([times, times**1.1], 1)  # each sample has different times
    pixels(crystals_drawn.channel_variances(own, {"type": np.ones((10, 2))}, [0.1, 0.2]))
    with pytest.raises(UsageError, match="no channels"):
        crystals_drawn.channel_variances(times, {}, level)


def test_precision_curve():
    good = np.arange(200) < 50
    perfect, reverse = np.arange(200), -np.arange(200)
    figure = crystals_drawn.precision_curve({"perfect": perfect, "reverse": reverse}, good)
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert labels[0] == "perfect  (100% at 5%, 100% at 10%)"
    assert labels[1] == "reverse  (0% at 5%, 0% at 10%)"
    assert labels[2] == "random order  (25%)"
    curve = figure.axes[0].lines[0]
    assert curve.get_xdata()[[0, -1]].tolist() == [0.01, 1.0]
    assert curve.get_ydata()[-1] == 0.25
    for flags in ([True], [False, False], [True, False, True]):
        pixels(crystals_drawn.precision_curve({"any": np.zeros(len(flags))}, flags))


# ---- edits -------------------------------------------------------------------------------------------------------


def test_edited_pairs(monkeypatch):
    drawn = []
    monkeypatch.setattr(
        crystals_drawn, "draw_crystal", lambda ax, crystals, i, caption, **_: drawn.append((crystals, i, caption))
    )
    count = 30
    before, after = object(), object()
    high, low = np.full(count, 0.5), np.full(count, 0.05)
    marks = np.arange(count) == 0
    figure = crystals_drawn.edited_pairs(before, after, high, low, np.arange(count) + 7, np.full(count, 0.25), marks)
    assert [crystals is before for crystals, _, _ in drawn] == [True, False] * 18
    assert [i for _, i, _ in drawn[:2]] == [0, 0]
    assert "0.50 eV/atom\nsample 7" in drawn[0][2]
    assert "0.05 eV/atom\nt = 0.25" in drawn[1][2]
    words = [text.get_text() for text in figure.axes[0].texts]
    assert "18 of 30 edits" in words[0]
    assert words.count("✓") == 1
