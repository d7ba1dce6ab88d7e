"""Controls of the forms, and what the page is told of a model."""

from dataclasses import fields

import pytest
import torch

from fmwc.cli.verbs import Edit, Sample
from fmwc.studio.models import AT, CHEMISTRY, Model, Refused, checked, choice, text, whole

CONTROLS = [
    whole("count", "How many", 5, 1, 100, ""),
    choice("label", "Class", [("", "all", ""), ("3", "three", "")]),
    text("formula", "Composition", ""),
    AT,
]


@pytest.fixture(scope="module")
def models():
    found = {name: Model(name, name, torch.device("cpu")) for name in ("checkerboard", "mnist")}
    for model in found.values():
        model.load()
    return found


@pytest.mark.parametrize(
    ("values", "control"),
    [
        ({"count": 0}, "count"),
        ({"count": 1.5}, "count"),
        ({"label": "4"}, "label"),
        ({"formula": 7}, "formula"),
        ({"at": float("nan")}, "at"),
        ({"other": 1}, ""),
        ({"__class__": 1}, ""),
        (None, ""),
    ],
)
def test_wrong_values_name_their_control(values, control):
    with pytest.raises(Refused) as error:
        checked(CONTROLS, values)
    assert error.value.control == control
    assert len(str(error.value)) < 300


def test_controls_are_options_of_the_commands(models):
    options = {one.name for one in fields(Sample)}
    for model in models.values():
        assert {control["name"] for control in [*model.controls(), *CHEMISTRY]} <= options
        assert {control["name"] for control in [*model.edits(), AT]} <= {one.name for one in fields(Edit)}
        assert checked(model.controls(), {})["steps"] == 50


def test_a_model_that_cannot_be_loaded_says_why(tmp_path):
    model = Model("gone", str(tmp_path / "gone"), torch.device("cpu"))
    assert model.as_dict()["ready"] is False
    model.load()
    told = model.as_dict()
    assert told["ready"]
    assert "unknown checkpoint" in told["problem"]
    assert told["controls"] == []
