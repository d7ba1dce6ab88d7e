"""Samples whose conditions the reference cannot compare are drawn all the same, and say why they have no confidence."""

import pytest
import torch
from torch import Tensor, nn

import fmwc
from fmwc.checks import Contest, Nearest
from fmwc.confidence.best import best_of
from fmwc.errors import UsageError
from fmwc.field import Part, Reference
from fmwc.sampling import Standard, read_with, stream

LEVELS = torch.linspace(0, 1, 101)
STEPS = 6


class Classes(nn.Module):
    """The velocity to a point per class; to the middle of all where no class is asked for. Any class will do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor, t: Tensor, y: Tensor | None = None) -> Tensor:
        angle = torch.zeros(len(x)) if y is None else torch.as_tensor(y) * 2.0
        end = torch.stack([angle.cos(), angle.sin()], -1).to(x) * (0.0 if y is None else 1.0)
        return (end + 0.3 * x.sin() - x) / (1 - t[:, None]).clamp_min(0.05) + 0.01 * self.layer(x)


class Strict(Classes):
    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        if bool((y > 3).any()):
            raise IndexError("there are 4 classes")
        return super().forward(x, t, y)


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
    """A reference of the variance, compared within classes."""
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
        ({}, "compares samples by 'y', which this run was not given"),
        ({"y": None}, "compares samples by 'y', which this run was not given"),
        ({"y": torch.full((6,), 7)}, "holds no samples with y = 7"),
        ({"y": torch.tensor([0, 1, 2, 3, -1, 0])}, "holds no samples with y = -1"),
        ({"y": 9}, "holds no samples with y = 9"),
    ],
)
def test_samples_come_without_confidence_and_with_a_reason(made, given, reason):
    field = made(Classes())
    run = fmwc.sample(field, 6, steps=STEPS, **given)
    plain = fmwc.sample(field.network, 6, space=(2,), steps=STEPS, confidence=False, **given)
    torch.testing.assert_close(run.x, plain.x)
    assert reason in run.withheld
    assert "\n" not in run.withheld
    with pytest.raises(UsageError, match="withheld"):
        _ = run.confidence
    assert reason in fmwc.sample(field, 6, steps=STEPS, record="score", **given).withheld


@FIELDS
@pytest.mark.parametrize("one", [2, torch.tensor(2), torch.tensor([2]), [2]])
def test_one_value_is_that_of_all_samples(made, one):
    field = made(Classes())
    run = fmwc.sample(field, 6, steps=STEPS, batch=4, y=one)
    each = fmwc.sample(field, 6, steps=STEPS, batch=4, y=torch.full((6,), 2))
    assert run.withheld == ""
    assert run.cond["y"].tolist() == [2] * 6
    torch.testing.assert_close(run.x, each.x)
    torch.testing.assert_close(run.confidence, each.confidence)
    streamed = list(stream(field, 6, batch=4, steps=STEPS, y=one)) if made is not standardised else []
    assert not streamed or len(torch.cat([part.confidence for part in streamed])) == 6


def test_one_value_is_taken_by_a_check_of_ones_own_and_by_best_of():
    field = contested(Classes())
    run = fmwc.sample(field, 5, steps=STEPS, check=Contest.planned("y", torch.arange(3), 6), y=1)
    assert run.evidence["contest"].shape == (5,)
    best = best_of(field, 5, 2, steps=STEPS, y=torch.tensor([1]))
    assert best.evaluations == 5 * 2 * (STEPS + field.reference.checks["contest"].evaluations)


@FIELDS
def test_errors_of_the_network_are_raised(made):
    field = made(Strict())
    with pytest.raises(IndexError, match="there are 4 classes"):
        fmwc.sample(field, 6, steps=STEPS, y=torch.full((6,), 7))
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        fmwc.sample(field, 6, steps=STEPS)


def test_a_reason_promises_a_rank_only_where_there_is_one():
    withheld = fmwc.sample(contested(Classes()), 6, steps=STEPS)
    assert "rank" not in withheld.withheld
    with pytest.raises(UsageError, match="compares samples by 'y', which this run was not given"):
        _ = withheld.rank
    with pytest.raises(UsageError, match="compares samples by 'y', which this run was not given"):
        best_of(contested(Classes()), 6, 2, steps=STEPS)
    ranked = fmwc.sample(standardised(Classes()), 6, steps=STEPS)
    assert ranked.withheld.endswith("rank orders the samples of this run")
    assert ranked.rank.shape == (6,)


def test_a_check_without_its_condition_says_so():
    field = contested(Classes())
    x = torch.zeros(3, 2)
    with pytest.raises(UsageError, match="compares samples by 'y'"):
        fmwc.check(field, x, evidence=field.reference.checks["contest"], conventions=False)
    with pytest.raises(UsageError, match="compares samples by 'y'"):
        fmwc.check(field, x, evidence=near(Classes()).reference.checks["nearest"], conventions=False)
    found = fmwc.check(field, x, evaluations=8, conventions=False)
    assert found.evidence == "echo"
    assert "compares samples by 'y', which these have not" in found.withheld
