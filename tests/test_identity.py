"""Content hashes: equal for equal content, different after any change; differences are named."""

import json

import numpy as np
import pytest
import torch

from fmwc.errors import MismatchError
from fmwc.identity import (
    difference,
    digest,
    digest_bytes,
    digest_file,
    digest_tensors,
    plain,
    require_same,
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


def test_a_file_has_the_hash_of_its_bytes(tmp_path):
    content = bytes(range(256)) * 5000
    (tmp_path / "a").write_bytes(content)
    assert digest_file(tmp_path / "a") == digest_bytes(content)


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


def test_strides_do_not_matter():
    value = torch.arange(6.0).reshape(2, 3)
    assert digest_tensors({"a": value.T}) == digest_tensors({"a": value.T.contiguous()})


def test_sealed_record_round_trip():
    record = seal({"a": 1, "b": [1.5, None]})
    assert sealed(record)
    assert sealed(json.loads(json.dumps(record)))
    assert sealed(seal(record))
    assert not sealed({**record, "a": 2})
    assert not sealed({**record, "c": 0})
    assert not sealed({"a": 1})


def test_differences_are_named():
    there = {"steps": 50, "network": {"hidden": 512}, "label": None, "window": [0, 1]}
    assert difference(there, there) == ""
    assert difference(there, {**there, "window": (0.0, 1.0)}) == ""  # compared as values, not as text
    assert difference(there, {**there, "steps": 5}) == "steps: 50 before, 5 now"
    assert difference(there, {**there, "network": {"hidden": 8}}) == "network.hidden: 512 before, 8 now"
    assert difference(there, {**there, "label": 3}) == "label: none before, 3 now"
    assert difference({"a": 1}, {"a": True}) == "a: 1 before, true now"
    many = difference(dict.fromkeys("abcde", 0), dict.fromkeys("abcde", 1))
    assert many.endswith("and 2 more")
    require_same(there, dict(there), "it was made for others")
    with pytest.raises(MismatchError, match=r"it was made for others \(steps: 50 before, 5 now\)"):
        require_same(there, {**there, "steps": 5}, "it was made for others")
