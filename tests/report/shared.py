"""Functions shared by the tests of figures."""

from fmwc.report.page import png


def texts(figure):
    """Return the texts of a figure and its legends."""
    found = [text.get_text() for axes in figure.axes for text in axes.texts]
    return found + [text.get_text() for axes in figure.axes if (box := axes.get_legend()) for text in box.get_texts()]


def draws(figure):
    """Return whether a figure can be written as a PNG file."""
    return png(figure, dpi=40)[:4] == b"\x89PNG"
