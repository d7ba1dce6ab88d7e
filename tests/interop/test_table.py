"""The table of docs/interop.md is made from the numbers, and says what is claimed."""

import json
from collections import Counter

import pytest
from benchmarks.foreign_networks import ALPHAS, BEGIN, DOCS, DRAWS, END, NETWORKS, RESULTS, put, refused, table

FOUND = json.loads(RESULTS.read_text())


def test_the_page_holds_the_table_of_the_numbers():
    page = DOCS.read_text()
    assert Counter(page.split("\n"))[BEGIN] == 1
    assert page.split(BEGIN)[1].split(END)[0].strip() == table(FOUND["networks"])
    assert put(table(FOUND["networks"]), page) == page


@pytest.mark.parametrize("name", NETWORKS)
def test_the_linearised_variance_is_within_a_tenth_of_the_draws(name):
    entry = FOUND["networks"][name]["alpha"]
    assert list(entry) == [f"{a:.2g}" for a in ALPHAS]
    small = entry[f"{ALPHAS[0]:.2g}"]
    assert 0.9 <= small["ratio"] <= 1.1
    assert 0.9 <= small["median"] <= 1.1
    assert small["spearman"] >= small["spearman of draws with other draws"] - 0.01


def test_the_numbers_say_where_they_are_from():
    assert FOUND["provenance"]["draws"] == DRAWS
    assert FOUND["provenance"]["commit"] != "unknown"


def test_refusals_are_named_by_their_operation():
    assert refused("no rule carries a variance through torch.bmm(Gaussian[1, 2]); add one") == "torch.bmm"
    assert refused("torch.Tensor.add_(Gaussian[1]) writes in place, which would") == "torch.Tensor.add_"
    assert refused("something else") == "something else"
