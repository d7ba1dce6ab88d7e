"""`choose` keeps the samples of lowest score, in the order of the run."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fmwc.errors import NotFiniteError, ShapeError, UsageError
from fmwc.uses.filter import choose, ranks

scores = st.lists(st.integers(0, 9).map(float), min_size=1, max_size=40).map(torch.tensor)


@given(scores, st.floats(0.01, 1))
def test_share_keeps_the_lowest_scores_in_order(score, keep):
    index = choose(score, keep=keep)
    assert len(index) == max(1, round(keep * len(score)))
    assert index.tolist() == sorted(index.tolist())
    left = torch.ones(len(score), dtype=torch.bool)
    left[index] = False
    assert not left.any() or score[index].max() <= score[left].min()


@given(scores)
def test_budget_threshold_and_ranks_agree(score):
    order = score.argsort(stable=True)
    place = ranks(score)
    assert place[order].tolist() == list(range(1, len(score) + 1))
    for budget in range(1, len(score) + 1):
        index = choose(score, budget=budget)
        assert torch.equal(index, (place <= budget).nonzero()[:, 0])
        assert set(index.tolist()) <= set(choose(score, threshold=float(score[index].max())).tolist())
    assert torch.equal(choose(score, keep=1.0), torch.arange(len(score)))


def test_choose_examples():
    score = torch.tensor([3.0, 1.0, 2.0, 0.0])
    assert choose(score, keep=0.5).tolist() == [1, 3]
    assert choose(score, threshold=2.0).tolist() == [1, 2, 3]
    assert choose(score, threshold=-1.0).tolist() == []


def test_threshold_is_compared_in_double_precision():
    score = torch.tensor([0.1], dtype=torch.float32)  # 0.1000000015
    assert choose(score, threshold=0.1).tolist() == []
    assert choose(score, threshold=float(score[0])).tolist() == [0]


BAD = {
    "no option": ({}, r"got none"),
    "two options": ({"keep": 0.5, "budget": 2}, r"got keep and budget"),
    "share of zero": ({"keep": 0.0}, r"\(0, 1\], got 0.0"),
    "share above one": ({"keep": 1.5}, r"\(0, 1\], got 1.5"),
    "NaN share": ({"keep": float("nan")}, r"\(0, 1\]"),
    "budget of zero": ({"budget": 0}, r"between 1 and .* samples, 4, got 0"),
    "budget above the number of samples": ({"budget": 5}, r"between 1 and the number of samples, 4, got 5"),
}


@pytest.mark.parametrize("case", BAD)
def test_invalid_options(case):
    options, expected = BAD[case]
    with pytest.raises(UsageError, match=expected):
        choose(torch.arange(4.0), **options)


def test_invalid_scores():
    with pytest.raises(NotFiniteError, match="the score holds 1 NaN"):
        choose(torch.tensor([1.0, float("nan")]), keep=0.5)
    with pytest.raises(ShapeError, match=r"shape \(B,\)"):
        choose(torch.zeros(3, 2), keep=0.5)
    with pytest.raises(ShapeError, match="at least one sample"):
        ranks(torch.zeros(0))
