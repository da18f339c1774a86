"""Batches contain every item once, in order, and respect their limits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragkv.util import batches

SIZE, COUNT = 100, 4


@given(st.lists(st.integers(0, 2 * SIZE) | st.integers(0, 3), max_size=60))
def test_batches_hold_every_item_once_within_their_limits(sizes):
    found = list(batches(range(len(sizes)), lambda at: sizes[at], SIZE, count=COUNT))
    assert [at for batch in found for at in batch] == list(range(len(sizes)))
    for batch in found:
        assert 1 <= len(batch) <= COUNT
        assert len(batch) == 1 or sum(sizes[at] for at in batch) <= SIZE


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([1] * COUNT, [COUNT]),
        ([1] * (COUNT + 1), [COUNT, 1]),
        ([SIZE // 2] * 2, [2]),
        ([SIZE // 2 + 1, SIZE // 2], [1, 1]),
        ([SIZE * 9, 1], [1, 1]),
        ([0, SIZE], [2]),
    ],
)
def test_a_batch_ends_at_its_limits(sizes, expected):
    assert [len(batch) for batch in batches(sizes, int, SIZE, count=COUNT)] == expected


def test_without_a_count_only_the_sizes_end_a_batch():
    assert list(batches([1] * 5, int, 3)) == [[1, 1, 1], [1, 1]]
