"""What KV is worth keeping: hit rates beside the best fixed set of hindsight, over draws with a seed."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragkv.store.worth import HALF_LIFE, NEVER, elapsed, simulate, used, worth

CHUNKS, QUESTIONS, ROOM = 5000, 10_000, 1000


def zipf(exponent, *, seed, drift=0.0, every=1000):
    """Draws of chunks; after `every`, a share `drift` of the chunks trade places."""
    draw = np.random.default_rng(seed)
    shares = np.arange(1, CHUNKS + 1) ** -float(exponent)
    places = draw.permutation(CHUNKS)
    asked = []
    for _ in range(0, QUESTIONS, every):
        asked += places[draw.choice(CHUNKS, every, p=shares / shares.sum())].tolist()
        moved = draw.choice(CHUNKS, int(CHUNKS * drift), replace=False)
        places[moved] = places[draw.permutation(moved)]
    return asked


def best_fixed(asked):
    """Hits of the best set of hindsight, each of whose chunks has to be made at its first use, as ours has."""
    return sum(count - 1 for _, count in Counter(asked).most_common(ROOM))


@pytest.mark.parametrize("drift", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("exponent", [1.0, 1.2])
def test_within_five_points_of_the_best_fixed_set(exponent, drift):
    for seed in range(3):
        asked = zipf(exponent, seed=seed, drift=drift)
        found = simulate(asked, ROOM * 100, dict.fromkeys(asked, (10, 100)))
        assert found.hits + found.misses == QUESTIONS
        assert found.hits >= best_fixed(asked) - 0.05 * QUESTIONS


def test_a_change_of_interest_is_followed():
    """What was asked for ten thousand times gives way to what is asked for now."""
    old, new = zipf(1.0, seed=1), [CHUNKS + chunk for chunk in zipf(1.0, seed=2)]
    sizes = dict.fromkeys([*old, *new], (10, 100))
    both = simulate([*old, *new], ROOM * 100, sizes)
    apart = simulate(old, ROOM * 100, sizes).hits + simulate(new, ROOM * 100, sizes).hits
    assert both.hits >= apart - 0.04 * QUESTIONS


def test_what_is_asked_once_pushes_nothing_out():
    """A pass over all chunks, between questions about a few: the few stay."""
    few = [1, 2, 3, 4] * 30
    found = simulate([*few, *range(10, 30), *few], 400, dict.fromkeys([*few, *range(10, 30)], (10, 100)))
    assert found.hits == len(few) * 2 - 4
    assert found.evictions == 0


def test_of_two_that_are_used_as_often_the_smaller_stays():
    assert worth(3.0, 100, 1000) > worth(3.0, 100, 2000)
    assert worth(3.0, 200, 1000) > worth(3.0, 100, 1000)


def test_what_is_larger_than_the_room_is_never_held():
    found = simulate(["large", "small"] * 5, 100, {"large": (10, 101), "small": (10, 100)})
    assert (found.hits, found.misses, found.evictions) == (4, 6, 0)


times = st.lists(st.floats(0, 50), min_size=1, max_size=20)


@given(times)
def test_a_weight_is_the_logarithm_of_all_uses_each_at_its_time(clocks):
    weight = NEVER
    for clock in sorted(clocks):
        weight = used(weight, clock)
    assert weight == pytest.approx(math.log2(sum(2.0**clock for clock in clocks)))


@given(times, times, st.floats(0, 1000))
def test_two_weights_keep_their_order_as_time_goes_by(one, other, later):
    """Moving all uses back in time changes no comparison: so weights are never brought up to date."""

    def weight(clocks, by=0.0):
        found = NEVER
        for clock in sorted(clocks):
            found = used(found, clock + by)
        return found

    assert weight(one, later) - weight(other, later) == pytest.approx(weight(one) - weight(other), abs=1e-6)


@given(st.floats(1, 1e12), st.floats(0, 1e12))
def test_the_clock_moves_by_a_half_life_when_so_many_rooms_were_read(nbytes, room):
    step = elapsed(nbytes, room)
    assert 0 < step <= 1 / HALF_LIFE
    if room >= nbytes:
        assert step * HALF_LIFE == pytest.approx(nbytes / room)
    assert used(5.0, 6.0, 2) == pytest.approx(math.log2(2**5 + 2 * 2**6))
