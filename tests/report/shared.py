"""What the tests of figures share."""

from fmwc.report.page import png


def texts(figure):
    """The texts of a figure, and those of its legends."""
    found = [text.get_text() for axes in figure.axes for text in axes.texts]
    return found + [text.get_text() for axes in figure.axes if (box := axes.get_legend()) for text in box.get_texts()]


def draws(figure):
    """Whether a figure can be written as a PNG file."""
    return png(figure, dpi=40)[:4] == b"\x89PNG"
