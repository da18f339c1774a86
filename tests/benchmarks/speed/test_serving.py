"""`ragkv bench serve` on a tiny model, with its server in a thread."""

import asyncio
import os
from contextlib import contextmanager

import pytest
from live import live
from steady import stopwatches

from ragkv import RagKV
from ragkv.benchmarks.speed import serving
from ragkv.benchmarks.speed.report import Corpus
from ragkv.benchmarks.speed.serving import KnownAnswer, LoadClient, Server, _indexes, measure_serve, run_mixed

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """The mixed load ends after a number of clock readings, however long they take."""
    stopwatches(monkeypatch, serving)


@contextmanager
def in_thread(indexes, device):
    with live({name: RagKV.open(folder, device=device) for name, folder in indexes.items()}) as server:
        yield Server(server.root, os.getpid())


def test_every_figure_stands_beside_its_baseline():
    report = measure_serve(4, rounds=1, minutes=0.01, documents=2, shape={}, device="cpu", serve=in_thread).to_json()
    rows = {row["name"].partition(": ")[2]: row for row in report["rows"] if "mixed" not in row["name"]}
    assert list(rows) == [
        "tokens per second", "processor time", "first token, p95", "errors", "answers unlike those alone",
    ]  # fmt: skip
    speed = rows["tokens per second"]
    assert speed["ratio"] == pytest.approx(speed["value"] / speed["baseline_value"], rel=0.02, abs=0.01)
    assert (rows["errors"]["value"], rows["errors"]["baseline_value"]) == (0, 4)
    assert rows["answers unlike those alone"]["value"] == 0
    mixed = [row for row in report["rows"] if "mixed" in row["name"]]
    assert [row["value"] for row in mixed[1:]] == [0, 0]
    assert mixed[1]["baseline_value"] > 0


def test_what_goes_wrong_is_counted(tmp_path):
    indexes = _indexes(tmp_path, Corpus(16), {}, "cpu")
    asked = {"question": Corpus(16).question(0), "engine": "block", "max_new_tokens": 4}
    known = [
        KnownAnswer(index="fixed", asked=asked, text="something else"),
        KnownAnswer(index="none", asked=asked, text=""),
    ]

    async def run(url):
        return await run_mixed(
            LoadClient(url), known, seconds=0.5, seed=1, text=lambda number: f"text {number}", memory=lambda: 1
        )

    with in_thread(indexes, "cpu") as server:
        outcome = asyncio.run(run(server.url))
    assert any("something else" in line for line in outcome.different)
    assert any("404" in line for line in outcome.errors)
    assert outcome.memory
