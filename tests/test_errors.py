"""Errors: one base class, one line each, and suggestions for misspelt names."""

import inspect

import pytest
import torch

from fmwc import errors
from fmwc.errors import FmwcError, NotFiniteError, UnknownNameError, UsageError, nearest, pick, require_finite

KINDS = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, Exception)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda c: c.__name__)
def test_every_error_is_public_and_derives_from_fmwc_error(kind):
    assert issubclass(kind, FmwcError)
    assert kind.__name__ in errors.__all__


def test_usage_errors_are_value_errors():
    assert issubclass(UsageError, ValueError)
    assert not issubclass(errors.NoRuleError, TypeError)


def test_pick_suggests_similar_names():
    table = {"peak": 1, "endpoint": 2}
    assert pick(table, "peak", "score") == 1
    with pytest.raises(UnknownNameError, match=r"unknown score 'peek'; did you mean 'peak'\? Known: endpoint, peak"):
        pick(table, "peek", "score")
    with pytest.raises(UnknownNameError, match=r"unknown score 'zzz'\. Known: endpoint, peak"):
        pick(table, "zzz", "score")


def test_nearest_without_names():
    assert nearest("a", [], "thing").startswith("unknown thing 'a'")


def test_require_finite():
    require_finite(torch.ones(3), "x")
    require_finite(torch.ones(3, dtype=torch.long), "x")
    for bad in (float("nan"), float("inf"), -float("inf")):
        with pytest.raises(NotFiniteError, match="the thing holds 2 NaN or infinite values of 3"):
            require_finite(torch.tensor([bad, 1.0, bad]), "the thing")


def test_a_message_is_one_line_even_with_line_breaks_in_names():
    assert str(UsageError("the file 'a\nb' is\n  not ours")) == "the file 'a b' is not ours"
