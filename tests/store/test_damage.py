"""A store whose file is damaged in one place returns the right values, nothing, or an error: never a wrong value or a
crash. A write to it fails, or leaves a store with sound pages.
"""

import json
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from clichild import run_script


def damage(*options: str) -> dict[str, Any]:
    payload: dict[str, Any] = json.loads(run_script("damage", *options))
    return payload


@pytest.mark.slow
def test_a_sample_of_damage():
    payload = damage("--sample", "80", "--seed", "1")
    assert payload["wrong"] == []
    assert sum(payload["counts"].values()) == payload["cases"] == 80
    # The sample is meaningful: some damage is refused, and some is harmless because nothing depends on it.
    assert {outcome.split(": ")[1] for outcome in payload["counts"]} >= {"refused", "read", "written"}


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    "which",
    [("--heads",), (), ("--heads", "--deep")],
    ids=["bits-of-heads", "bytes", "deep"],
)
def test_all_damage(which):
    parts = os.cpu_count() or 1
    with ThreadPoolExecutor(parts) as pool:
        reports = list(pool.map(lambda part: damage(*which, "--part", f"{part}/{parts}"), range(parts)))
    counts = sum((Counter(payload["counts"]) for payload in reports), Counter[str]())
    print(json.dumps(counts, indent=1))
    assert [wrong for payload in reports for wrong in payload["wrong"]] == []
    assert counts.total() > 100_000 or which
