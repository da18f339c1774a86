"""A store whose file is damaged in any one place gives the right values, or none, or an error: never a wrong one, never
a dead process; and writing to it fails, or leaves a store whose pages are sound."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "support" / "damage.py"


def damage(*options: str) -> dict[str, Any]:
    result = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    told: dict[str, Any] = json.loads(result.stdout)
    return told


@pytest.mark.slow
def test_a_sample_of_damage() -> None:
    told = damage("--sample", "120", "--seed", "1")
    assert told["wrong"] == []
    assert sum(told["counts"].values()) == told["cases"] == 120
    # The sample is no empty exercise: some of it is refused, some goes unnoticed because nothing depends on it.
    assert {outcome.split(": ")[1] for outcome in told["counts"]} >= {"refused", "read", "written"}


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--deep",)], ids=["few", "deep"])
def test_damage_that_the_times_of_the_file_do_not_tell(options: tuple[str, ...]) -> None:
    """A writer checks the pages that it comes near, and these are all that LMDB comes near."""
    told = damage("--heads", "--noted", *options, "--sample", "40", "--seed", "1")
    assert told["wrong"] == []
    assert sum(told["counts"].values()) == 40


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    "which",
    [("--heads",), (), ("--heads", "--noted"), ("--heads", "--noted", "--deep")],
    ids=["bits-of-heads", "bytes", "noted", "noted-deep"],
)
def test_all_damage(which: tuple[str, ...]) -> None:
    parts = os.cpu_count() or 1
    with ThreadPoolExecutor(parts) as pool:
        reports = list(pool.map(lambda part: damage(*which, "--part", f"{part}/{parts}"), range(parts)))
    counts = sum((Counter(told["counts"]) for told in reports), Counter[str]())
    print(json.dumps(counts, indent=1))
    assert [wrong for told in reports for wrong in told["wrong"]] == []
    assert counts.total() > 100_000 or which
