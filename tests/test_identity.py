"""Content hashes: equal for equal content, different after any change; differences are named."""

import json

import numpy as np
import pytest
import torch

from fmwc.identity import (
    digest,
    digest_tensors,
    plain,
    seal,
    sealed,
)


def test_values_that_are_equal_in_json_have_one_hash():
    one = {"b": (1, 2), "a": np.float32(0.5), "c": None}
    other = {"c": None, "a": 0.5, "b": [1, 2]}
    assert digest(one) == digest(other) == digest(json.loads(json.dumps(plain(one))))
    assert digest(1) != digest(True)
    assert digest("1") != digest(1)
    assert digest(float("inf")) != digest(float("nan"))


CHANGES = {
    "value": lambda t: t["a"].add_(1e-7),
    "sign of zero": lambda t: t["z"].neg_(),
    "shape": lambda t: t.update(a=t["a"].reshape(3, 2)),
    "type": lambda t: t.update(a=t["a"].double()),
    "name": lambda t: t.update(c=t.pop("a")),
    "more": lambda t: t.update(c=torch.zeros(0)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_any_change_of_tensors_changes_their_hash(name):
    def made():
        return {"a": torch.arange(6.0).reshape(2, 3), "z": torch.zeros(1)}

    before, after = made(), made()
    assert digest_tensors(before) == digest_tensors(after) == digest_tensors(dict(reversed(before.items())))
    CHANGES[name](after)
    assert digest_tensors(before) != digest_tensors(after)
    assert digest_tensors(before, {"steps": 5}) != digest_tensors(before, {"steps": 50})


def test_sealed_record_round_trip():
    record = seal({"a": 1, "b": [1.5, None]})
    assert sealed(record)
    assert sealed(json.loads(json.dumps(record)))
    assert sealed(seal(record))
    assert not sealed({**record, "a": 2})
    assert not sealed({**record, "c": 0})
    assert not sealed({"a": 1})
