"""A writer that is killed at any moment loses no acknowledged write and leaves no partial write."""

import json
import os

import pytest
from clichild import run_script


def crashtest(**options: int) -> dict[str, int]:
    """The harness's counts; it fails with a traceback if a store is not as expected."""
    count: dict[str, int] = json.loads(run_script("crashtest", *(f"--{name}={n}" for name, n in options.items())))
    return count


@pytest.mark.slow
def test_killed_writers():
    count = crashtest(random=4, fresh=2, rounds=1)
    assert count["kills"] == 24
    assert count["acknowledged"] > 100
    assert count["in an operation"] > 10


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_writers_many_times():
    count = crashtest(seed=int.from_bytes(os.urandom(2), "big"), random=150, fresh=30, rounds=6)
    assert count["kills"] + count.get("ended before the point", 0) == 150 + 30 + 6 * 18
    assert count["kills"] >= 200
