"""The surest rows of many pieces are those of a sort, and choosing them takes little memory."""

import tracemalloc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fmwc.screening.keep import cut, surest

SCORES = st.lists(
    st.lists(st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([0.0, -0.0, 1.0, -1.0]), max_size=12),
    min_size=1,
    max_size=6,
).filter(lambda pieces: any(pieces))


@given(SCORES, st.floats(0, 1))
def test_the_surest_are_those_of_a_stable_sort(pieces, share):
    arrays = [np.array(piece, float) for piece in pieces]
    everything = np.concatenate(arrays)
    count = round(share * len(everything))
    chosen = np.concatenate([*surest(lambda: arrays, count)])
    expected = np.zeros(len(everything), bool)
    expected[np.argsort(everything, kind="stable")[:count]] = True
    assert (chosen == expected).all()


@given(SCORES, st.floats(0, 1))
def test_the_cut_is_the_kth_smallest(pieces, share):
    arrays = [np.array(piece, float) for piece in pieces]
    everything = np.sort(np.concatenate(arrays))
    count = max(1, round(share * len(everything)))
    value, ties = cut(lambda: arrays, count)
    assert value == everything[count - 1]
    assert (everything < value).sum() + ties == count


def test_memory_does_not_grow_with_the_number_of_scores():
    def peak(pieces):
        def scores():
            for seed in range(pieces):
                yield np.random.default_rng(seed).standard_normal(1000)

        tracemalloc.start()
        assert sum(int(mask.sum()) for mask in surest(scores, 250 * pieces)) == 250 * pieces
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    assert peak(300) < 1.2 * peak(3) + 10_000  # 300,000 scores take 2.4 MB
