"""The order of requests; without torch or a model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import NIGHTLY

from ragkv.errors import UsageError
from ragkv.runtime.scheduler import LEAST_PREFILL, LOOK_AHEAD, PATIENCE, STALL_SECONDS, Pace, Scheduler, Ticket

EXAMPLES = 2000 if NIGHTLY else 60


def made(**limits):
    return Scheduler(**{"batch_tokens": 16, "max_sequences": 4, "own_tokens": 100} | limits)


def ticket(sequences=1, tokens=10, reads=()):
    return Ticket(sequences=sequences, tokens=tokens, reads=frozenset(reads))


tickets = st.builds(
    ticket, sequences=st.integers(1, 6), tokens=st.integers(1, 140), reads=st.frozensets(st.integers(0, 4), max_size=3)
)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    limits=st.fixed_dictionaries({"max_sequences": st.integers(1, 5), "own_tokens": st.integers(1, 120)}),
    events=st.lists(st.one_of(tickets, st.integers(0, 40)), max_size=60),
)
def test_limits_hold_and_everyone_has_a_turn(limits, events):
    """An event is a submitted request, or the index of a request that leaves, admitted or not."""
    scheduler, waiting, running = made(**limits), [], []

    def admit():
        for item in scheduler.admit():
            waiting.remove(item)
            running.append(item)
        assert scheduler.waiting == len(waiting)
        assert all(scheduler.runs(item) for item in running)
        assert not any(scheduler.runs(item) for item in waiting)
        if len(running) > 1:
            assert sum(item.sequences for item in running) <= limits["max_sequences"]
            assert sum(item.tokens for item in running) <= limits["own_tokens"]
        assert running or not waiting

    for event in events:
        if isinstance(event, Ticket):
            scheduler.submit(event)
            waiting.append(event)
        elif waiting or running:
            item = (running + waiting)[event % (len(waiting) + len(running))]
            (running if item in running else waiting).remove(item)
            scheduler.leave(item)
            scheduler.leave(item)  # leaving twice is harmless
        admit()
    while running:
        scheduler.leave(running.pop(0))
        admit()
    assert not waiting


@settings(max_examples=EXAMPLES, deadline=None)
@given(reads=st.lists(st.sampled_from([(1,), (2,), (1, 2), ()]), min_size=1, max_size=80))
def test_nobody_is_passed_by_more_than_a_few(reads):
    """Requests that share chunks may go first, but each request is overtaken a bounded number of times."""
    scheduler, submitted, order = made(max_sequences=1), [], []
    scheduler.submit(first := ticket(reads=(1,)))
    scheduler.admit()
    for each in reads:
        scheduler.submit(item := ticket(reads=each))
        submitted.append(item)
    current = first
    while len(order) < len(submitted):
        scheduler.leave(current)
        scheduler.submit(late := ticket(reads=current.reads))  # the request that shares most keeps coming
        submitted.append(late) if len(submitted) < 120 else scheduler.leave(late)
        [current] = scheduler.admit()
        order.append(current)
    place = {id(item): i for i, item in enumerate(order)}
    for i, item in enumerate(submitted):
        passed = sum(place[id(later)] < place[id(item)] for later in submitted[i + 1 :])
        assert passed <= PATIENCE


def test_first_come_first_served_where_nothing_is_shared():
    scheduler = made(max_sequences=2)
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
    scheduler.submit(running := ticket(sequences=3, reads=(1, 2)))
    assert scheduler.admit() == [running]
    alien, large = ticket(reads=(9,)), ticket(sequences=4, reads=(1, 2))
    for one in (alien, large):
        scheduler.submit(one)
    assert scheduler.admit() == [alien]  # the large one shares more, but does not fit, and blocks nobody yet
    scheduler.leave(alien)
    scheduler.submit(ticket(reads=(1,)))
    assert scheduler.admit() == []  # now the large one is first
    scheduler.leave(running)
    assert scheduler.admit() == [large]


def test_a_lone_request_may_be_larger_than_the_limits():
    scheduler = made()
    scheduler.submit(large := ticket(sequences=9, tokens=999))
    scheduler.submit(small := ticket())
    assert scheduler.admit() == [large]
    assert scheduler.admit() == []
    assert scheduler.admit(over=True) == [small]
    scheduler.leave(large)
    assert scheduler.admit() == []


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    batch_tokens=st.integers(1, 40),
    prefill=st.none() | st.integers(1, 40),
    wanted=st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=5), max_size=8),
)
def test_shares_lose_no_token(batch_tokens, prefill, wanted):
    """Every step takes some tokens, within the limits, single tokens first; together, all tokens are taken once."""
    scheduler = made(batch_tokens=batch_tokens)
    left = [list(wants) for wants in wanted]
    while any(map(any, left)):
        taken = scheduler.share(left, prefill)
        assert [len(takes) for takes in taken] == [len(wants) for wants in left]
        singles = sum(want == 1 for wants in left for want in wants)
        longer = sum(want for wants in left for want in wants) - singles
        total = sum(map(sum, taken))
        most = max(batch_tokens - singles, 1)
        if singles and prefill is not None:
            most = min(most, prefill)
        assert total == singles + min(longer, most)
        assert total <= max(batch_tokens, singles + (any(w > 1 for wants in left for w in wants)))
        for wants, takes in zip(left, taken, strict=True):
            for row, (want, take) in enumerate(zip(wants, takes, strict=True)):
                assert take == 1 if want == 1 else 0 <= take <= want
                wants[row] -= take
                assert wants[row] >= 0


def test_a_short_question_beside_decoding_does_not_wait_for_a_long_one_nor_the_other_way_round():
    scheduler = made(batch_tokens=4096)
    assert scheduler.share([[1, 1], [1000], [20, 20]], 64) == [[1, 1], [32], [20, 12]]
    assert scheduler.share([[1, 1], [968], [8]], 64) == [[1, 1], [56], [8]]
    assert scheduler.share([[1, 1], [968]], 63) == [[1, 1], [63]]
    assert scheduler.share([[1, 1], [968]]) == [[1, 1], [968]]
    assert scheduler.share([[0, 0], [4000], [200]], 64) == [[0, 0], [4000], [96]]  # nothing is decoding: all at once


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    decoding=st.floats(0.001, 2.0),
    token=st.floats(1e-6, 0.05),
    growth=st.floats(0.0, 1e-3),
    length=st.integers(2, 8000),
)
def test_a_prefill_beside_decoding_at_most_doubles_a_step_whatever_the_machine(decoding, token, growth, length):
    """A prefill token takes `token` seconds, and longer at later positions (`growth`)."""
    scheduler, pace, done = made(batch_tokens=4096), Pace(), 0
    pace.took(decoding, [[1]])
    allowed = max(decoding, STALL_SECONDS)
    while done < length:
        before = pace.tokens
        takes = scheduler.share([[1], [length - done]], before)
        entry = token * (1 + growth * done)
        done += takes[1][0]
        pace.took(decoding + entry * takes[1][0], takes)
        assert LEAST_PREFILL <= pace.tokens <= max(2 * before, 2 * LEAST_PREFILL)
        if takes[1][0] > 2 * LEAST_PREFILL:  # the step size was based on a measurement
            assert entry * takes[1][0] <= 2.01 * allowed
        if takes[1][0] == before and entry * before < allowed / 2:  # there was room for more
            assert pace.tokens > before


def test_the_pace_learns_from_what_says_something():
    pace = Pace()
    first = pace.tokens
    pace.took(100.0, [[500]])  # nothing was decoding
    pace.took(0.001, [[1], [2]])  # too few tokens to say how many would be quick
    assert pace.tokens == first
    pace.took(0.02, [[1, 1], [0]])
    pace.took(0.02 + STALL_SECONDS / 10, [[1], [first]])
    assert pace.tokens == 2 * first
    pace.took(0.02 + 1.25 * STALL_SECONDS, [[1], [2 * first]])
    assert pace.tokens == pytest.approx(1.6 * first, abs=1)
    pace.took(9.0, [[1]])  # with a slower decode step, a prefill beside it may take longer
    pace.took(18.0, [[1], [pace.tokens]])
    assert pace.tokens == pytest.approx(1.6 * first, abs=2)
    before = pace.tokens
    pace.took(99.0, [[1], [before]])  # once may be due to the machine
    assert pace.tokens == before // 2
    for _ in range(9):
        pace.took(99.0, [[1], [pace.tokens]])
    assert pace.tokens == LEAST_PREFILL


def test_the_borders_of_admission():
    """Requests that fill the limits exactly are admitted; one more row or token waits, and the longest waiting one is
    next.
    """
    scheduler = made(max_sequences=4, own_tokens=100)
    scheduler.submit(first := ticket(sequences=1, tokens=60))
    assert scheduler.has_room
    scheduler.submit(fits := ticket(sequences=3, tokens=40))
    assert not scheduler.has_room
    assert scheduler.admit() == [first, fits]
    scheduler.leave(fits)
    scheduler.submit(wide := ticket(sequences=4, tokens=1))
    assert scheduler.admit() == []
    scheduler.leave(wide)
    scheduler.submit(ticket(sequences=1, tokens=41))
    assert scheduler.admit() == []


def test_room_is_a_row_and_a_token():
    scheduler = made(max_sequences=4, own_tokens=100)
    scheduler.submit(ticket(sequences=3, tokens=99))
    assert scheduler.has_room
    scheduler.submit(last := ticket(sequences=1, tokens=0))
    assert not scheduler.has_room  # no row
    scheduler.leave(last)
    scheduler.submit(ticket(sequences=0, tokens=1))
    assert not scheduler.has_room  # no token


def test_what_others_prefill_counts_once():
    scheduler = made(max_sequences=9, own_tokens=100)
    many = [Ticket(sequences=1, tokens=10, shared={"text": 60}) for _ in range(5)]
    for one in many:
        scheduler.submit(one)
    assert scheduler.admit() == many[:4]  # 40 of their own, 60 shared


@pytest.mark.parametrize("passes", [PATIENCE - 1, PATIENCE])
def test_patience_ends_after_exactly_so_many(passes):
    scheduler = made(max_sequences=2)
    for one in (stays := ticket(reads=(1,)), patient := ticket(reads=(2,))):
        scheduler.submit(one)
    assert scheduler.admit() == [stays, patient]
    scheduler.leave(patient)
    scheduler.submit(running := ticket(reads=(1,)))
    assert scheduler.admit() == [running]
    scheduler.submit(patient)
    for _ in range(passes):
        scheduler.submit(sharing := ticket(reads=(1,)))
        scheduler.leave(running)
        [running] = scheduler.admit()
        assert running is sharing
    scheduler.submit(sharing := ticket(reads=(1,)))
    scheduler.leave(running)
    assert scheduler.admit() == [sharing if passes < PATIENCE else patient]


@pytest.mark.parametrize("behind", [LOOK_AHEAD - 1, LOOK_AHEAD])
def test_so_many_are_looked_at(behind):
    scheduler = made(max_sequences=2)
    scheduler.submit(ticket(reads=(1,)))
    scheduler.admit()
    waiting = [ticket(reads=(100 + i,)) for i in range(behind)] + [ticket(reads=(1,))]
    for one in waiting:
        scheduler.submit(one)
    assert scheduler.admit() == [waiting[-1] if behind < LOOK_AHEAD else waiting[0]]


@pytest.mark.parametrize(
    ("batch_tokens", "named"), [(3, "--batch-tokens is 3"), (4, "--batch-tokens is 4"), (5, "--max-sequences is 4")]
)
def test_the_option_that_is_too_small_is_named(batch_tokens, named):
    scheduler = made(batch_tokens=batch_tokens, strict=True)
    with pytest.raises(UsageError, match=named):
        scheduler.submit(ticket(sequences=5))
    scheduler.submit(ticket(sequences=min(batch_tokens, 4)))
    assert scheduler.waiting == 1
