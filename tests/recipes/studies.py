"""Small studies to test with: few samples, few rows, few steps."""

import json

import fmwc.recipes.uses.drawing as drawing
import fmwc.recipes.uses.reading as reading
from fmwc.recipes.uses.study import NUMBERS
from fmwc.recipes.uses.subject import Sizes

SIZES = Sizes(samples=60, edited=4, replicates=2, swept=8, rewound=12, guided=4)
SEEDS = (200, 201)


def quiet(text):
    pass


def shorten(patch):
    """The same experiments with fewer rows, and promises from few labels."""
    patch.setattr(drawing, "SWEEP", (2, 4))
    patch.setattr(drawing, "EXTRA", (2, 5))
    patch.setattr(drawing, "FIXED", (0.0, 0.4))
    patch.setattr(reading, "LABELLED", (30,))
    patch.setattr(reading, "SPLITS", 10)


def hasty(kind):
    """A subject that takes few steps; experiments that choose their own do not ask it."""

    class Hasty(kind):
        def draw(self, count, seed, **options):
            return super().draw(count, seed, **{"steps": 5, **options})

    return Hasty


def numbers_in(out):
    return json.loads((out / NUMBERS).read_text())["numbers"]
