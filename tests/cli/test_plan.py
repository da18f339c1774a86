"""`ragkv plan` as a user types it."""

from __future__ import annotations

import inspect
import json

import pytest

from ragkv.cli.plan import plan as plan_command
from ragkv.config import byte_count
from ragkv.planning import trial
from ragkv.planning.plan import SAMPLE_BYTES


@pytest.fixture
def plan(ragkv, documents, model_folder, monkeypatch):
    for name, value in {"MEASURE_SECONDS": 0.0, "LEAST_SLICES": 1, "SLICE_SECONDS": 1e9, "ROUNDS": 1}.items():
        monkeypatch.setattr(trial, name, value)
    given = ("--model", model_folder, "--device", "cpu", "--engines", "block")
    return lambda *arguments: ragkv("plan", documents, *given, *arguments)


def test_the_default_sample_is_the_plans():
    default = inspect.signature(plan_command).parameters["sample"].default
    assert byte_count("--sample", default) == SAMPLE_BYTES


def test_text_and_json_say_the_same(plan):
    told = plan()
    assert told.code == 0
    found = json.loads(plan("--json").out)
    assert (found["documents"]["value"], found["sample"]["whole"], found["encodings"]) == (2, True, ["standalone"])
    assert f"2 documents, {found['chunks']['value']:,.0f} chunks" in told.out
    assert [codec["codec"] for codec in found["codecs"]] == ["raw", "zstd", "int8", "int4"]
    parts = [value for name, value in found["seconds"].items() if name != "total"]
    assert sum(parts) == pytest.approx(found["seconds"]["total"], abs=0.01)
    # random Llama of the tests: 9 layers, 2 KV heads of 16, float32
    assert found["codecs"][0]["bytes_per_million_tokens"] == 2 * 9 * 2 * 16 * 4 * 1_000_000


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--sample", "much"], "--sample must be a number of bytes"),
        (["--folder", "/nowhere"], "/nowhere is not a folder"),
        (["--codec", "zip"], "unknown codec 'zip'"),
        (["--engines", "full"], "stores no KV, so there is nothing to plan"),
    ],
)
def test_wrong_usage(plan, arguments, what):
    done = plan(*arguments)
    assert done.code == 2
    assert what in done.err
