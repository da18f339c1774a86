"""What repeats and waiting say of a machine, on made-up times."""

from __future__ import annotations

import pytest

from ragkv.planning.stopwatch import Reading, Repeats, Stopwatch, waiting_share, weigh


def repeats(*seconds: float) -> Repeats:
    return Repeats(seconds=seconds)


def test_repeats_have_a_median_and_both_ends():
    found = repeats(1.0, 1.1, 9.0)
    assert (found.value, found.low, found.high) == (1.1, 1.0, 9.0)
    assert found.to_json(1e-3) == {"value": 1100, "low": 1000, "high": 9000, "repeats": 3}


@pytest.mark.parametrize(
    ("seconds", "spread"),
    [
        ((2.0,), 0),
        ((1.0, 2.0, 1.5), 1 / 1.5),
        ((1.0, 1.0, 1.0, 1.1, 7.0), 0.1),  # one of five may stray
        ((1.0, 1.0, 1.0, 2.0, 2.0), 1.0),
        ((0.0, 0.0, 0.0), 0),
    ],
)
def test_how_far_they_lie_apart(seconds, spread):
    assert repeats(*seconds).spread == pytest.approx(spread)


@pytest.mark.parametrize(
    ("passed", "share"),
    [
        (Reading(wall=10, processor=10, waited=0.0), 0),
        (Reading(wall=10, processor=5, waited=5.0), 0.5),
        (Reading(wall=10, processor=18, waited=2.0), 0.1),  # two threads
        (Reading(wall=10, processor=4, waited=None), 0.6),  # not counted: what the clock has more
        (Reading(wall=10, processor=20, waited=None), 0),
        (Reading(wall=0, processor=0, waited=None), 0),
        (Reading(wall=0, processor=0, waited=0.0), 0),
    ],
)
def test_the_share_of_waiting(passed, share):
    assert waiting_share(passed) == pytest.approx(share)


def test_a_quiet_machine_is_trusted_and_others_are_not():
    quiet = {"encoding": repeats(1.0, 1.05, 1.1), "prefill": repeats(2.0, 2.0, 2.1)}
    assert weigh(quiet, 0.02).trusted
    assert weigh(quiet, None).to_json() == {"trusted": True, "reasons": [], "waited": None}
    [busy] = weigh(quiet, 0.4).reasons
    assert "waited for a core for 40%" in busy
    [wide] = weigh(quiet | {"prefill": repeats(1.0, 2.0, 4.0)}, 0.0).reasons
    assert wide.startswith("3 repeats of prefill lie 150% of their median apart")
    once, twice = weigh({"encoding": repeats(1.0), "prefill": repeats(1.0, 1.0)}, 0.0).reasons
    assert "encoding was timed only once" in once
    assert "prefill was timed only 2 times" in twice


def test_what_has_passed():
    early, late = Reading(wall=1, processor=1, waited=2.0), Reading(wall=4, processor=3, waited=1.5)
    assert late.since(early) == Reading(wall=3, processor=2, waited=0.0)  # a thread that waited has ended
    assert late.since(Reading(wall=1, processor=1, waited=None)).waited is None


def test_the_clocks_of_this_machine_go_on():
    watch = Stopwatch()
    first, second = watch.read(), watch.read()
    passed = second.since(first)
    assert passed.wall >= 0
    assert passed.processor >= 0
    assert passed.waited is None or passed.waited >= 0
