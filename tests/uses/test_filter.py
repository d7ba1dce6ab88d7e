"""`choose` keeps the samples of lowest score, in the order of the run."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fmwc.errors import UsageError
from fmwc.uses.filter import choose, ranks

scores = st.lists(st.integers(0, 9).map(float), min_size=1, max_size=40).map(torch.tensor)


@given(scores, st.floats(0.01, 1))
def test_share_keeps_the_lowest_scores_in_order(score, keep):
    assume(len(score.unique()) > 1)  # equal scores choose nothing
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
    "two options": ({"keep": 0.5, "budget": 2}, "budget"),
    "share of zero": ({"keep": 0.0}, "0.0"),
    "budget above the number of samples": ({"budget": 5}, "5"),
}


@pytest.mark.parametrize("case", BAD)
def test_invalid_options(case):
    options, expected = BAD[case]
    with pytest.raises(UsageError, match=expected):
        choose(torch.arange(4.0), **options)
