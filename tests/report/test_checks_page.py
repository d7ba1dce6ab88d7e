"""The page of checks of finished samples."""

from types import SimpleNamespace

import torch

from fmwc.report.reports import checks_page


def test_the_page_of_points_is_a_table(tmp_path):
    table = {"name": ["<a>", "b"], "score": [0.5, 1.5], "rank": [0.5, 0.0]}
    found = SimpleNamespace(evidence="echo", rival=None)
    written = checks_page(tmp_path, torch.zeros(2, 2), table, found, [{"": "samples", "value": "2"}], {"seed": "0"})
    assert [path.name for path in written] == ["checks.html"]
    page = written[0].read_text()
    assert "&lt;a&gt;" in page
    assert page.index("1.5") < page.index("&lt;a&gt;")


def test_the_page_of_images_has_a_picture_and_the_result_of_the_contest(tmp_path):
    x = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    table = {"name": ["a", "b"], "y": [3, 4], "score": [0.5, -0.1], "rival": [5, 6], "margin": [-0.5, 0.1]}
    found = SimpleNamespace(evidence="contest", rival=torch.tensor([5, 6]))
    picture, page = checks_page(tmp_path, x, table, found, [{"": "samples", "value": "2"}], {"seed": "0"})
    assert picture.name == "checks.png"
    assert "requested 3, better fit 5" in page.read_text()
