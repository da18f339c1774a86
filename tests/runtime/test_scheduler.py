"""Who runs next: no torch, no model, only numbers."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.errors import UsageError
from ragkv.runtime.scheduler import LOOK_AHEAD, PATIENCE, Scheduler, Ticket

EXAMPLES = 2000 if os.environ.get("RAGKV_NIGHTLY") == "1" else 60


def made(**limits):
    return Scheduler(**{"batch_tokens": 16, "max_rows": 4, "own_tokens": 100} | limits)


def ticket(rows=1, tokens=10, reads=()):
    return Ticket(rows=rows, tokens=tokens, reads=frozenset(reads))


tickets = st.builds(
    ticket,
    rows=st.integers(1, 6),
    tokens=st.integers(1, 140),
    reads=st.frozensets(st.integers(0, 4), max_size=3),
)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    limits=st.fixed_dictionaries({"max_rows": st.integers(1, 5), "own_tokens": st.integers(1, 120)}),
    events=st.lists(st.one_of(tickets, st.integers(0, 40)), max_size=60),
)
def test_limits_hold_and_everyone_has_a_turn(limits, events):
    """An event is a request that comes, or the number of one that leaves, in or not."""
    scheduler, waiting, running = made(**limits), [], []

    def admit():
        for one in scheduler.admit():
            waiting.remove(one)
            running.append(one)
        assert scheduler.waiting == len(waiting)
        assert all(scheduler.runs(one) for one in running)
        assert not any(scheduler.runs(one) for one in waiting)
        if len(running) > 1:
            assert sum(one.rows for one in running) <= limits["max_rows"]
            assert sum(one.tokens for one in running) <= limits["own_tokens"]
        assert running or not waiting

    for event in events:
        if isinstance(event, Ticket):
            scheduler.submit(event)
            waiting.append(event)
        elif waiting or running:
            one = (running + waiting)[event % (len(waiting) + len(running))]
            (running if one in running else waiting).remove(one)
            scheduler.leave(one)
            scheduler.leave(one)  # twice is once
        admit()
    while running:
        scheduler.leave(running.pop(0))
        admit()
    assert not waiting


@settings(max_examples=EXAMPLES, deadline=None)
@given(reads=st.lists(st.sampled_from([(1,), (2,), (1, 2), ()]), min_size=1, max_size=80))
def test_nobody_is_passed_by_more_than_a_few(reads):
    """Requests that share chunks may go first, but every one of them is passed a bounded number of times."""
    scheduler, submitted, order = made(max_rows=1), [], []
    scheduler.submit(first := ticket(reads=(1,)))
    scheduler.admit()
    for each in reads:
        scheduler.submit(one := ticket(reads=each))
        submitted.append(one)
    current = first
    while len(order) < len(submitted):
        scheduler.leave(current)
        scheduler.submit(late := ticket(reads=current.reads))  # whoever shares most keeps coming
        submitted.append(late) if len(submitted) < 120 else scheduler.leave(late)
        [current] = scheduler.admit()
        order.append(current)
    place = {id(one): i for i, one in enumerate(order)}
    for i, one in enumerate(submitted):
        passed = sum(place[id(later)] < place[id(one)] for later in submitted[i + 1 :])
        assert passed <= PATIENCE


def test_first_come_first_served_where_nothing_is_shared():
    scheduler = made(max_rows=2)
    asked = [ticket(reads=(i,)) for i in range(7)]
    for one in asked:
        scheduler.submit(one)
    order = scheduler.admit()
    while len(order) < len(asked):
        scheduler.leave(order[len(order) - 1])
        order += scheduler.admit()
    assert order == asked


def test_whoever_shares_chunks_with_what_runs_goes_first_unless_there_is_no_room():
    scheduler = made()
    scheduler.submit(running := ticket(rows=3, reads=(1, 2)))
    assert scheduler.admit() == [running]
    alien, large, shares = ticket(reads=(9,)), ticket(rows=4, reads=(1, 2)), ticket(reads=(1,))
    for one in (alien, large):
        scheduler.submit(one)
    assert scheduler.admit() == [alien]  # the large one shares more, but does not fit: nobody waits for it meanwhile
    scheduler.leave(alien)
    scheduler.submit(shares)
    assert scheduler.admit() == []  # the large one is first now
    scheduler.leave(running)
    assert scheduler.admit() == [large]
    far = [ticket(reads=(100 + i,)) for i in range(LOOK_AHEAD)]
    for one in [*far, ticket(reads=(1, 2))]:
        scheduler.submit(one)
    scheduler.leave(large)
    assert scheduler.admit()[0] is shares


def test_a_lone_request_may_be_larger_than_the_limits():
    scheduler = made()
    scheduler.submit(large := ticket(rows=9, tokens=999))
    scheduler.submit(small := ticket())
    assert scheduler.admit() == [large]
    assert scheduler.admit() == []
    assert scheduler.admit(over=True) == [small]
    scheduler.leave(large)
    assert scheduler.admit() == []


def test_what_can_never_run_is_refused_with_the_number_that_it_needs():
    scheduler = made(strict=True)
    with pytest.raises(UsageError, match=r"needs 9 rows .* --max-rows is 4; raise it to 9"):
        scheduler.submit(ticket(rows=9))
    assert scheduler.waiting == 0
    scheduler.submit(ticket(rows=4))
    assert len(scheduler.admit()) == 1


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    batch_tokens=st.integers(1, 40),
    wanted=st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=5), max_size=8),
)
def test_shares_lose_no_token(batch_tokens, wanted):
    """Every step takes some tokens, within the limit, single ones first; together they are all that was wanted."""
    scheduler = made(batch_tokens=batch_tokens)
    left = [list(wants) for wants in wanted]
    while any(map(any, left)):
        taken = scheduler.share(left)
        assert [len(takes) for takes in taken] == [len(wants) for wants in left]
        singles = sum(want == 1 for wants in left for want in wants)
        total = sum(map(sum, taken))
        assert total >= 1
        assert total <= max(batch_tokens, singles + (any(w > 1 for wants in left for w in wants)))
        for wants, takes in zip(left, taken, strict=True):
            for row, (want, take) in enumerate(zip(wants, takes, strict=True)):
                assert take == 1 if want == 1 else 0 <= take <= want
                wants[row] -= take
                assert wants[row] >= 0
