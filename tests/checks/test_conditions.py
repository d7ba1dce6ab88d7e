"""Samples with conditions that the reference does not have are drawn, but their confidence is withheld."""

import pytest
import torch
from torch import Tensor, nn

import fmwc
from fmwc.checks import Contest, Nearest
from fmwc.errors import UsageError
from fmwc.sampling import Grid, Part, Reference, SamplingConfig, Standard, read_with, stream
from fmwc.sampling.config import ScoresOnly
from fmwc.uses.best_of import best_of

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


def test_a_single_value_with_a_given_check_and_best_of():
    field = contested(Classes())
    run = fmwc.sample(field, 5, steps=STEPS, check=Contest.planned("y", torch.arange(3), 6), cond={"y": 1})
    assert run.evidence["contest"].shape == (5,)
    best = best_of(field, 5, 2, steps=STEPS, cond={"y": torch.tensor([1])})
    assert best.evaluations == 5 * 2 * (STEPS + field.reference.checks["contest"].evaluations)


@FIELDS
def test_errors_of_the_network_are_not_hidden(made):
    field = made(Strict())
    with pytest.raises(IndexError, match="there are 4 classes"):
        fmwc.sample(field, 6, steps=STEPS, cond={"y": torch.full((6,), 7)})
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        fmwc.sample(field, 6, steps=STEPS)


def test_reason_mentions_rank_only_if_there_is_one():
    withheld = fmwc.sample(contested(Classes()), 6, steps=STEPS)
    assert "rank" not in withheld.withheld
    with pytest.raises(UsageError, match="compares samples by 'y', which is missing"):
        _ = withheld.rank
    with pytest.raises(UsageError, match="compares samples by 'y', which is missing"):
        best_of(contested(Classes()), 6, 2, steps=STEPS)
    ranked = fmwc.sample(standardised(Classes()), 6, steps=STEPS)
    assert ranked.withheld.endswith("rank orders the samples of this run")
    assert ranked.rank.shape == (6,)


def test_check_without_its_condition():
    field = contested(Classes())
    x = torch.zeros(3, 2)
    with pytest.raises(UsageError, match="compares samples by 'y'"):
        fmwc.check(field, x, evidence=field.reference.checks["contest"], conventions=False)
    with pytest.raises(UsageError, match="compares samples by 'y'"):
        fmwc.check(field, x, evidence=near(Classes()).reference.checks["nearest"], conventions=False)
    found = fmwc.check(field, x, evaluations=8, conventions=False)
    assert found.evidence == "echo"
    assert "compares samples by 'y', which is missing" in found.withheld


def test_equal_steps_given_as_times_match_the_reference():
    field, cond = contested(Classes()), {"y": torch.arange(2)}
    times = [i / STEPS for i in range(STEPS + 1)]
    expected = fmwc.sample(field, 2, steps=STEPS, cond=cond).confidence
    for given in (times, torch.tensor(times)):
        torch.testing.assert_close(
            fmwc.sample(field, 2, cond=cond, config=SamplingConfig(controller=Grid(given))).confidence, expected
        )
    assert (
        "equal steps"
        in fmwc.sample(field, 2, cond=cond, config=SamplingConfig(controller=Grid(torch.tensor(times) ** 2))).withheld
    )
