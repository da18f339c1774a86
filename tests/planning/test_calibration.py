"""What repeats say of a machine, on made-up times."""

import pytest

from ragkv.planning.calibration import Repeats, TimingQuality


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


def test_a_quiet_machine_is_trusted_and_others_are_not():
    quiet = {"encoding": repeats(1.0, 1.05, 1.1), "prefill": repeats(2.0, 2.0, 2.1)}
    assert TimingQuality.of(quiet).trusted
    assert TimingQuality.of(quiet).to_json() == {"trusted": True, "reasons": [], "waited": None}
    [wide] = TimingQuality.of(quiet | {"prefill": repeats(1.0, 2.0, 4.0)}).reasons
    assert wide.startswith("3 repeats of prefill lie 150% of their median apart")
    once, twice = TimingQuality.of({"encoding": repeats(1.0), "prefill": repeats(1.0, 1.0)}).reasons
    assert "encoding was timed only once" in once
    assert "prefill was timed only 2 times" in twice
