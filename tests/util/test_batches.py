"""Batches contain every item once, in order, and respect their limits."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from ragkv.util import batches

SIZE, COUNT = 100, 4


@given(st.lists(st.integers(0, 2 * SIZE) | st.integers(0, 3) | st.just(SIZE // 2), max_size=60))
def test_batches_are_as_long_as_their_limits_allow(sizes):
    found = list(batches(range(len(sizes)), lambda at: sizes[at], SIZE, count=COUNT))
    assert [at for batch in found for at in batch] == list(range(len(sizes)))
    for batch in found:
        assert 1 <= len(batch) <= COUNT
        assert len(batch) == 1 or sum(sizes[at] for at in batch) <= SIZE
    for before, after in itertools.pairwise(found):
        assert len(before) == COUNT or sum(sizes[at] for at in [*before, after[0]]) > SIZE


def test_without_a_count_only_the_sizes_end_a_batch():
    assert list(batches([1] * 5, int, 3)) == [[1, 1, 1], [1, 1]]
