"""What checks found, drawn: the most doubtful first, and the rival that the flow itself reads."""

from types import SimpleNamespace

import torch

from fmwc.report.checks import contest_plate, doubtful_sheet, write_checks

X = torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
SCORE, ASKED, RIVAL = [0.1, 0.9, -0.3, 0.2, -0.1, -0.2], [0, 1, 2, 3, 4, 5], [9, 8, 7, 6, 5, 4]
MARGIN = [-score for score in SCORE]


def words(figure):
    return [text.get_text() for text in figure.axes[0].texts]


def test_the_most_doubtful_stand_first_and_say_what_the_flow_reads():
    sheet = doubtful_sheet(X, SCORE, ASKED, RIVAL, MARGIN)
    said = words(sheet)
    assert said[1].replace("\n", " ") == "asked for 1, the flow reads 8"
    assert said[2].replace("\n", " ") == "asked for 3, the flow reads 6"
    assert said[-1].replace("\n", " ") == "asked for 2, next is 7"
    assert len(sheet.axes[0].patches) == 3  # frames around those that another class explains better
    assert "score 0.9" in words(doubtful_sheet(X, SCORE))


def test_a_run_without_a_contest_has_no_plate():
    run = SimpleNamespace(evidence={"echo": torch.zeros(6)}, cond={"y": torch.arange(6)}, x=X)
    assert contest_plate(run) == []
    found = {"contest": torch.tensor(SCORE), "rival": torch.tensor(RIVAL), "margin": torch.tensor(MARGIN)}
    (plate,) = contest_plate(SimpleNamespace(evidence=found, cond={"y": torch.arange(6)}, x=X))
    assert any("asked for 1,\nthe flow reads 8" in text for text in words(plate.figure))


def test_the_page_of_points_is_a_table(tmp_path):
    table = {"name": ["<a>", "b"], "score": [0.5, 1.5], "rank": [0.5, 0.0]}
    found = SimpleNamespace(evidence="echo", rival=None)
    written = write_checks(tmp_path, torch.zeros(2, 2), table, found, [{"": "samples", "value": "2"}], {"seed": "0"})
    assert [path.name for path in written] == ["checks.html"]
    page = written[0].read_text()
    assert "&lt;a&gt;" in page
    assert page.index("1.5") < page.index("&lt;a&gt;")
