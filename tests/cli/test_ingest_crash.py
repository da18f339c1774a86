"""`ragkv ingest`, killed and interrupted at any moment, finally gives the same index."""

import json
import os

import pytest
from clichild import run_script


def ingestcrash(**options: int) -> dict[str, int]:
    """The harness's counts; it fails with a traceback if anything was lost or left incomplete."""
    count: dict[str, int] = json.loads(run_script("ingestcrash", *(f"--{name}={n}" for name, n in options.items())))
    return count


@pytest.mark.slow
def test_a_killed_ingest_is_finished_by_the_next() -> None:
    count = ingestcrash(kills=2, documents=8)
    assert (count["ended by -9"], count["ended by 130"]) == (2, 1)
    assert (count["answered"], count["comparisons"]) == (1, 1)
    assert count["documents left"] > 0


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_many_times_killed_ingest_is_finished_by_the_next() -> None:
    count = ingestcrash(seed=int.from_bytes(os.urandom(2), "big"), kills=20, documents=10)
    assert (count["ended by -9"], count["ended by 130"]) == (20, 1)
    assert count["answered"] > 0
