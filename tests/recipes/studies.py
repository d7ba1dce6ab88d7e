"""Small studies: few samples, few rows, few steps."""

import json

import experiments.uses.drawing as drawing
import experiments.uses.evaluate as evaluate
from experiments.checkerboard.experiment import CheckerboardExperiment
from experiments.common.experiment import Sizes
from experiments.uses.folder import NUMBERS
from fmwc.registry import domain_named
from tests.options import arguments

SIZES = Sizes(samples=60, edited=4, replicates=2, swept=8, rewound=12, guided=4)
SEEDS = (200, 201)


def quiet(text):
    pass


def shorten(patch):
    """Study fewer rows, and certify from few labels."""
    patch.setattr(drawing, "SWEEP", (2, 4))
    patch.setattr(drawing, "EXTRA", (2, 5))
    patch.setattr(drawing, "FIXED", (0.0, 0.4))
    patch.setattr(evaluate, "LABELLED", (30,))
    patch.setattr(evaluate, "SPLITS", 10)


def hasty(kind):
    """Return a class of experiment that takes 5 steps unless the study asks for another number."""

    class Hasty(kind):
        def draw(self, count, seed, **options):
            return super().draw(count, seed, **arguments(**{"steps": 5, **options}))

    return Hasty


def numbers_in(out):
    return json.loads((out / NUMBERS).read_text())["numbers"]


def points(field, sizes=SIZES, kind=CheckerboardExperiment):
    """Return the Checkerboard experiment with a field and sizes."""
    return kind(domain_named("checkerboard"), field, sizes)
