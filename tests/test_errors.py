"""Errors: one base class, one line each, and suggestions for misspelt names."""

import inspect

import pytest

from fmwc import errors
from fmwc.errors import FmwcError, UsageError

KINDS = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, Exception)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda c: c.__name__)
def test_every_error_is_public_and_derives_from_fmwc_error(kind):
    assert issubclass(kind, FmwcError)
    assert kind.__name__ in errors.__all__


def test_usage_errors_are_value_errors():
    assert issubclass(UsageError, ValueError)
    assert not issubclass(errors.NoRuleError, TypeError)


def test_a_message_is_one_line_even_with_line_breaks_in_names():
    assert str(UsageError("the file 'a\nb' is\n  not ours")) == "the file 'a b' is not ours"
