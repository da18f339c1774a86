"""A sample is the same for the same seed, and keeps the order of what it is drawn from."""

from __future__ import annotations

from ragkv.evaluation.draw import drawn


def test_a_sample_is_drawn_by_its_seed_in_the_order_of_the_items():
    items = [str(number) for number in range(30)]
    found = drawn(items, 10, 3)
    assert len(set(found)) == 10
    assert found == drawn(items, 10, 3) != drawn(items, 10, 4)
    assert sorted(found, key=items.index) == found
    assert drawn(items, 50, 0) == items == drawn(items, None, 0)
