"""Random numbers per sample, independent of the batch."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fmwc.randomness import BLOCK, Blocks, as_randomness, derive

METHODS = ("normal", "uniform")


def fill(seed, start, count, shape, method="normal", each=1, skip=0):
    blocks = Blocks(seed, start, count)
    for _ in range(skip):
        blocks.normal(torch.empty(count, 1))
    return getattr(blocks, method)(torch.empty(count * each, *shape))


@pytest.mark.parametrize("method", METHODS)
@given(st.integers(1, 2 * BLOCK + 50), st.data())
def test_random_numbers_do_not_depend_on_the_batch(method, total, data):
    cuts = sorted({0, total, *data.draw(st.lists(st.integers(0, total), max_size=4))})
    each = data.draw(st.sampled_from([1, 3]))
    whole = fill(5, 0, total, (2,), method, each)
    parts = [fill(5, a, b - a, (2,), method, each) for a, b in pairwise(cuts)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("method", METHODS)
def test_random_numbers_differ_between_blocks_calls_and_seeds(method):
    count = 2 * BLOCK
    numbers = {
        "seed 0": fill(0, 0, count, (2,), method),
        "seed 1": fill(1, 0, count, (2,), method),
        "second call": fill(0, 0, count, (2,), method, skip=1),
        "later": fill(0, count, count, (2,), method),
    }
    columns = {k: v.flatten() - v.mean() for k, v in numbers.items()}
    columns["other block"] = columns["seed 0"].roll(2 * BLOCK)
    names = list(columns)
    for i, a in enumerate(names):
        for b in names[:i]:
            correlation = torch.corrcoef(torch.stack([columns[a], columns[b]]))[0, 1]
            assert abs(correlation.item()) < 6 / (2 * count) ** 0.5, (a, b)


def test_the_distributions():
    count = 4 * BLOCK
    normal, uniform = fill(0, 0, count, (4,)), fill(0, 0, count, (4,), "uniform")
    n = 4 * count
    assert abs(normal.mean().item()) < 6 / n**0.5
    assert abs(normal.var().item() - 1) < 6 * (2 / n) ** 0.5
    assert abs(uniform.mean().item() - 0.5) < 6 * (1 / 12 / n) ** 0.5
    assert uniform.min() >= 0
    assert uniform.max() < 1


def test_nothing_is_drawn_from_the_global_generator():
    state = torch.get_rng_state()
    fill(0, 0, 10, (2,))
    as_randomness(3, torch.device("cpu")).normal(torch.empty(3))
    assert torch.equal(torch.get_rng_state(), state)


def test_sources():
    cpu = torch.device("cpu")
    generator = torch.Generator().manual_seed(3)
    like = torch.empty(4)
    assert torch.equal(as_randomness(3, cpu).normal(like), as_randomness(generator, cpu).normal(like))
    blocks = Blocks(0, 0, 4)
    assert as_randomness(blocks, cpu) is blocks
    torch.manual_seed(1)
    first = as_randomness(None, cpu).normal(like)
    torch.manual_seed(1)
    assert torch.equal(first, torch.randn(4))


@given(st.lists(st.integers() | st.text(max_size=5), min_size=1, max_size=4))
def test_derived_seeds_fit_64_bits_and_depend_on_every_part(parts):
    seed = derive(*parts)
    assert 0 <= seed < 2**63
    assert seed == derive(*parts)
    assert seed != derive(*parts, 0)
    assert derive("1") != derive(1)


def test_derived_seeds_are_the_same_on_every_machine():
    """Published samples and checkpoints depend on these values."""
    assert derive(0, "x0") == 4822289881594186058
    assert derive(0, "sampler") == 8022433103957144086
