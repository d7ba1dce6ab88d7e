"""Samples with conditions that the reference does not have are drawn, but their confidence is withheld."""

import pytest
import torch
from torch import Tensor, nn

import fmwc
from fmwc.checks import Contest, Nearest
from fmwc.sampling import Part, Reference, SamplingConfig, Standard, read_with, stream
from fmwc.sampling.config import ScoresOnly

LEVELS = torch.linspace(0, 1, 101)
STEPS = 6


class Classes(nn.Module):
    """The velocity to one point per class, for any class; to the origin without one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor, t: Tensor, y: Tensor | None = None) -> Tensor:
        angle = torch.zeros(len(x)) if y is None else torch.as_tensor(y) * 2.0
        end = torch.stack([angle.cos(), angle.sin()], -1).to(x) * (0.0 if y is None else 1.0)
        return (end + 0.3 * x.sin() - x) / (1 - t[:, None]).clamp_min(0.05) + 0.01 * self.layer(x)


def contested(network: nn.Module) -> fmwc.Field:
    contest = Contest.planned("y", torch.arange(4), 8)
    parts = (Part("contest", 1.0, LEVELS), Part("spread@0.3-0.8", 0.3, LEVELS))
    made = read_with(None, STEPS, "euler")
    field = fmwc.attach(network, space=(2,))
    field.reference = Reference(
        "contest + 0.3 spread@0.3-0.8", made, LEVELS, None, parts, {"contest": contest}, classes={"y": (0, 1, 2, 3)}
    )
    return field


def near(network: nn.Module) -> fmwc.Field:
    y = torch.arange(80) % 4
    points = torch.stack([(2.0 * y).cos(), (2.0 * y).sin()], 1) + 0.1 * torch.randn(80, 2)
    field = fmwc.attach(network, space=(2,))
    field.reference = Reference(
        "nearest", None, LEVELS, None, (Part("nearest", 1.0, LEVELS),), {"nearest": Nearest(points, y, "y")}
    )
    return field


def standardised(network: nn.Module) -> fmwc.Field:
    """Return a field whose reference is a score of the variance, standardised within classes."""
    field = fmwc.attach(network, space=(2,))
    standard = Standard("y", torch.zeros(4), torch.ones(4))
    parts = (Part("peak", 1.0, LEVELS, standard),)
    field.reference = Reference("peak", read_with("linearised", STEPS, "euler"), LEVELS, None, parts)
    return field


FIELDS = pytest.mark.parametrize("made", [contested, near, standardised])


@FIELDS
@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, "compares samples by 'y', which is missing"),
        ({"y": None}, "compares samples by 'y', which is missing"),
        ({"y": torch.full((6,), 7)}, "holds no samples with y = 7"),
        ({"y": torch.tensor([0, 1, 2, 3, -1, 0])}, "holds no samples with y = -1"),
        ({"y": 9}, "holds no samples with y = 9"),
    ],
)
def test_unknown_conditions_withhold_confidence(made, given, reason):
    field = made(Classes())
    run = fmwc.sample(field, 6, steps=STEPS, cond=given)
    plain = fmwc.sample(field.network, 6, steps=STEPS, confidence=None, cond=given, config=SamplingConfig(space=(2,)))
    torch.testing.assert_close(run.x, plain.x)
    assert reason in run.withheld
    assert "\n" not in run.withheld
    assert run.confidence is None
    assert reason in fmwc.sample(field, 6, steps=STEPS, cond=given, config=ScoresOnly()).withheld


@FIELDS
@pytest.mark.parametrize("one", [2, torch.tensor(2), torch.tensor([2]), [2]])
def test_a_single_value_applies_to_all_samples(made, one):
    field = made(Classes())
    run = fmwc.sample(field, 6, steps=STEPS, cond={"y": one}, config=SamplingConfig(batch=4))
    each = fmwc.sample(field, 6, steps=STEPS, cond={"y": torch.full((6,), 2)}, config=SamplingConfig(batch=4))
    assert run.withheld == ""
    assert run.cond["y"].tolist() == [2] * 6
    torch.testing.assert_close(run.x, each.x)
    torch.testing.assert_close(run.confidence, each.confidence)
    streamed = (
        list(stream(field, 6, steps=STEPS, cond={"y": one}, config=SamplingConfig(batch=4)))
        if made is not standardised
        else []
    )
    assert not streamed or len(torch.cat([part.confidence for part in streamed])) == 6
