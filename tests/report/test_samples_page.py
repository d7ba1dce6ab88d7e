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


def test_samples_that_are_not_finite_are_left_out_and_counted():
    x = np.zeros((5, 2))
    x[1, 0] = np.nan
    assert "NaN or infinity are omitted: 1" in draw_samples(x, np.ones(5)).caption
    assert draw_samples(np.full((3, 2), np.inf), np.ones(3)) is None
