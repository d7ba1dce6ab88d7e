"""Checks: invalid arguments raise one-line errors; rivals, texts and references work as documented."""

import pytest
import torch
from torch import nn

import fmwc
from fmwc.checks import Nearest, check
from fmwc.errors import UsageError

X = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
Y = torch.arange(40) % 3
WORDS = ["a", "b", "c"]


class Net(nn.Module):
    """A network that takes a class or a text, and counts its evaluations."""

    def __init__(self, output=lambda v: v):
        super().__init__()
        self.layer, self.embedding = nn.Linear(3, 2), nn.Embedding(3, 2)
        self.output, self.evaluated = output, 0

    def forward(self, x, t, y):
        self.evaluated += len(x)
        y = torch.tensor([WORDS.index(word) for word in y]) if isinstance(y, list) else y
        return self.output(self.layer(torch.cat([x, t[:, None]], 1)) + self.embedding(y))


pytestmark = pytest.mark.filterwarnings("ignore:the network's loss")


@pytest.mark.parametrize(
    ("net", "x", "cond", "options"),
    [
        (Net(lambda v: {"velocity": v}), X, {"y": Y}, {}),
        (Net(lambda v: (v, None)), X, {"y": Y}, {}),
        (Net(lambda v: v[:, :1]), X, {"y": Y}, {}),
        (Net(), X, {}, {}),
        (Net(), X, {"y": Y.float()}, {}),
        (Net(), X, {"y": Y + 7}, {}),
        (Net(), X[:, 0], {"y": Y}, {}),
        (Net(), X, Y, {}),
        (5, X, {}, {}),
        ("mnist", X, {}, {}),
        (Net(), X, {}, {"evidence": Nearest(X, Y, "y")}),
        (Net(), X, {"y": Y}, {"evidence": "nearest"}),
        (Net(), X, {"y": Y}, {"rivals": {"y": [1]}}),
        (Net(), X, {"y": Y}, {"rivals": {"y": 1}}),
        (Net(), X, {"y": Y}, {"rivals": {"y": 0}}),
        (Net(), X, {"y": Y}, {"rivals": {"y": -3}}),
        (Net(), X, {"y": Y}, {"rivals": {"y": ["a", "b"]}}),
        (Net(), X, {"y": Y}, {"rivals": [0, 1]}),
        (Net(), X, {"y": Y}, {"rivals": {"y": []}}),
        (Net(), X, {"y": Y}, {"rivals": {"y": [0.5, 1.5]}}),
        (Net(), X, {"y": Y}, {"rivals": {"y": [0, float("nan")]}}),
        (Net(), X, {"y": ["a"] * 40}, {"evidence": "contest"}),
        (Net(), X, {"y": ["a"] * 5}, {}),
    ],
)
def test_errors_are_one_line(net, x, cond, options):
    with pytest.raises(UsageError) as error:
        check(net, x, cond, **options)
    assert "\n" not in str(error.value)


def test_text_conditions_match_class_conditions():
    net = Net()
    text = check(net, X, {"y": [WORDS[i] for i in Y]}, rivals={"y": WORDS}, batch=7)
    number = check(net, X, {"y": Y}, rivals={"y": 3}, batch=7)
    torch.testing.assert_close(text.score, number.score)
    assert text.rival == [WORDS[i] for i in number.rival]


def test_default_check_is_that_of_the_reference():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x, t):
            return -x / (1.01 - t[:, None]) + 0 * self.layer(x)

    field = fmwc.attach(Plain(), space=2)
    data = 0.05 * torch.randn(2000, 2, generator=torch.Generator().manual_seed(1))
    reference = fmwc.fit_confidence(field, data, pilot=50, conventions=False)
    own = next(iter(reference.checks))
    if not reference.withheld:
        assert check(field, X).confidence is not None
        assert "leave out evaluations" in check(field, X, evaluations=7).withheld
    assert check(field, X).evidence == own
    assert check(field, X, evidence=own).evidence == own
