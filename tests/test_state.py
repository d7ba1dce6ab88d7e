"""States: functions work on a tensor and on a dict of channels."""

import pytest
import torch

from fmwc.errors import ShapeError
from fmwc.state import batch_size, channels, per_sample, tree_map


def test_channels():
    x = torch.zeros(3, 2)
    assert channels(x) == {"x": x}
    state = {"a": x, "b": x}
    assert channels(state) is state
    assert batch_size(x) == batch_size(state) == 3


def test_each():
    a, b = torch.ones(2), torch.full((2,), 3.0)
    assert tree_map(torch.add, a, b).tolist() == [4, 4]
    assert tree_map(torch.add, {"p": a, "q": b}, {"p": b, "q": b})["q"].tolist() == [6, 6]
    shared = tree_map(torch.add, {"p": a, "q": b}, a)
    assert (shared["p"].tolist(), shared["q"].tolist()) == ([2, 2], [4, 4])
    assert tree_map(torch.add, a, {"p": b})["p"].tolist() == [4, 4]


def test_per_sample():
    value = torch.arange(12.0).reshape(6, 2)
    assert per_sample(value, 6).tolist() == value.sum(1).tolist()
    assert per_sample(value, 3).tolist() == [6, 22, 38]
    with pytest.raises(ShapeError, match="exclude that layer"):
        per_sample(value, 4)


def test_per_sample_by_owner():
    value = torch.arange(12.0).reshape(6, 2)  # rows sum to 1, 5, 9, 13, 17, 21
    owner = torch.tensor([2, 0, 0, 3, 2, 3])
    assert per_sample(value, 3, owner).tolist() == [14, 0, 18]  # owner 3 is outside of three samples
    assert per_sample(value, 4, owner).tolist() == [14, 0, 18, 34]
    assert per_sample(value.reshape(6, 1, 2, 1), 3, owner).tolist() == [14, 0, 18]
    assert per_sample(value, 3, torch.full((6,), 3)).tolist() == [0, 0, 0]
    in_order = torch.arange(6) // 2
    assert per_sample(value, 3, in_order).tolist() == per_sample(value, 3).tolist()
    assert per_sample(value.double(), 3, owner).dtype == torch.float64
