"""The page of any network draws its samples as points, images or signals, by the shape of a state."""

import re

import numpy as np
import pytest
import torch

import fmwc
from fmwc.report.reports import draw_samples, samples_page
from tests.conftest import awaken, conv_field, dict_field, mlp_field


class Wave(torch.nn.Module):
    """A velocity network for signals of 32 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(33, 32)

    def forward(self, x, t):
        return self.layer(torch.cat([x, t[:, None]], 1))


class Tokens(torch.nn.Module):
    """A velocity network for five tokens of three numbers, which have no picture."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x, t):
        return self.layer(x)


def wave_field():
    return awaken(fmwc.attach(Wave(), space=(32,), width=8))


FIELDS = {
    "points": (mlp_field, "Scatter plots"),
    "images": (conv_field, "Two grids of generated images"),
    "curves": (wave_field, "Curves: "),
    "points of a channel": (dict_field, "Scatter plots"),
}


@pytest.mark.parametrize("kind", FIELDS)
def test_a_page_shows_samples(kind, tmp_path):
    make, alt = FIELDS[kind]
    run = fmwc.sample(make(), 40, steps=5)
    page = samples_page(tmp_path, run, numbers=[{"": "a", "value": "b"}], provenance={"seed": "0"}).read_text()
    headings = re.findall(r"<h2[^>]*>(.*?)</h2>", page)
    assert len([a for a in re.findall(r'alt="([^"]*)"', page) if a.startswith(alt)]) == 1
    assert headings[0] == ("Samples: place" if kind == "points of a channel" else "Samples")


def test_a_state_of_ambiguous_shape_is_listed_as_numbers(tmp_path):
    run = fmwc.sample(fmwc.attach(Tokens(), space=(5, 3), width=8), 40, steps=5)
    page = samples_page(tmp_path, run, numbers=[], provenance={}).read_text()
    assert ">Samples<" not in page
    assert "x[7]</th>" in page
    assert "x[8]</th>" not in page
    assert "The first 8 of the 15 coordinates of each sample are listed." in page
    first = run.x[run.score().argsort(stable=True)[0]]
    assert f">{float(first.flatten()[0]):.4g}</td>" in page


@pytest.mark.parametrize("shape", [(2,), (1, 8, 8), (3, 6, 4), (9, 12), (16,), (3, 16)])
@pytest.mark.parametrize("count", [1, 2, 3, 90])
def test_few_and_many_samples_are_drawn(shape, count):
    x = np.random.default_rng(0).normal(size=(count, *shape))
    section = draw_samples(x, np.linspace(0, 1, count))
    assert section is not None
    section.pictures[0].figure.canvas.draw()


def test_samples_that_are_not_finite_are_left_out_and_counted():
    x = np.zeros((5, 2))
    x[1, 0] = np.nan
    assert "NaN or infinity are omitted: 1" in draw_samples(x, np.ones(5)).caption
    assert draw_samples(np.full((3, 2), np.inf), np.ones(3)) is None
