"""Refusals in the table of docs/networks.md."""

from benchmarks.foreign_networks import refused


def test_refused_operations_are_named_in_the_table():
    assert refused("no rule carries a variance through torch.bmm(Gaussian[1, 2]); add one") == "torch.bmm"
    assert refused("torch.Tensor.add_(Gaussian[1]) writes in place, which would") == "torch.Tensor.add_"
    assert refused("something else") == "something else"
