"""`fmwc rules`: the table of rules."""

import json

from fmwc.moments import RULES, rule_rows


def test_the_table_is_printed(run):
    code, out, err = run("rules")
    assert (code, err) == (0, "")
    for row in rule_rows():
        assert row["operation"].split()[0] in out
    assert "layer_norm" in out


def test_json_has_every_spelling(run):
    code, out, _ = run("rules", "--json")
    rows = json.loads(out)
    assert code == 0
    assert rows == rule_rows()
    assert sum(len(row["spellings"]) for row in rows) == len(RULES)
    by_name = {name: row["exactness"] for row in rows for name in row["spellings"]}
    assert by_name["F.scaled_dot_product_attention"] == "first order"
    assert by_name["Tensor.add_"] == by_name["torch.add"] == "exact for independent inputs"
    assert by_name["Tensor.shape"] == "exact"


def test_every_rule_is_explained():
    for row in rule_rows():
        assert row["rule"], row["operation"]
