"""The plan for many machines: what is scaled, and invariants of the simulation."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from steady import steady
from typer.testing import CliRunner

from ragkv.cli.main import app
from ragkv.errors import UsageError
from ragkv.planning.cluster import plan_cluster, rendezvous, simulate
from ragkv.planning.plan import plan_ingest


@pytest.fixture(scope="module")
def plan(tmp_path_factory, model_folder):
    path = tmp_path_factory.mktemp("documents") / "halden.md"
    path.write_text("# Halden Works\n\nHalden Works was founded by Mira Oskel in 1907.\n" * 8)
    settings = {"model": str(model_folder), "device": "cpu", "engines": ("block",), "top_k": 2, "chunk_tokens": 64}
    return plan_ingest(path, **settings, now=steady(), seconds=1e6)


def test_everything_is_scaled_from_the_sample(plan):
    found = plan_cluster(plan, 1e7, 100, questions=500)
    scale = 1e7 / plan.corpus.chunks.value
    half = next(codec for codec in plan.codecs if codec.codec == "half")
    assert found.kv_bytes == pytest.approx(half.kv_bytes.value * scale)
    assert found.kv_bytes_node * 100 == pytest.approx(found.kv_bytes)
    assert found.ingest_hours * 3600 * 100 == pytest.approx((plan.seconds.total - plan.seconds.start) * scale)
    assert plan_cluster(plan, 1e7, 200, questions=500).ingest_hours == pytest.approx(found.ingest_hours / 2)
    dearer = plan_cluster(replace(plan, recompute_seconds=plan.recompute_seconds * 100), 1e7, 100, questions=500)
    for tier, slow in zip(found.tiers, dearer.tiers, strict=True):
        assert tier.load_seconds == slow.load_seconds
        assert (slow.reads_to_pay or math.inf) <= (tier.reads_to_pay or math.inf)
        assert (tier.reads_to_pay is None) == (tier.load_seconds >= found.encode_seconds)
    for chunks, nodes in ((0.5, 1), (math.nan, 1), (10, 0), (1e16, 1), (10, 10_001)):
        with pytest.raises(UsageError):
            plan_cluster(plan, chunks, nodes)


SIMULATED = {
    "nodes": 100, "chunks": 10**6, "top_k": 4, "load_seconds": (0.001, 0.002, 0.01), "answer_seconds": 0.02,
    "room": (50, 500), "zipf": 1.0, "questions": 4000, "lost": 5,
}  # fmt: skip


def test_a_lost_node_loses_no_answer_and_moves_only_its_chunks():
    found, whole = simulate(**SIMULATED), simulate(**{**SIMULATED, "lost": 0})
    assert (found.answered, whole.answered, whole.repeated) == (4000, 4000, 0)
    assert 0 < found.repeated < 200
    assert found.memory_hits < whole.memory_hits
    keys, nodes = np.arange(2000, dtype=np.uint64), np.arange(100, dtype=np.uint64)
    scores = rendezvous(keys, nodes)
    before, after = scores.argmax(1), scores[:, :-1].argmax(1)
    assert (before[before != 99] == after[before != 99]).all()
    counts = np.bincount(before, minlength=100)
    assert counts.min() > 4
    assert counts.max() < 45  # 20 on average


def test_hot_chunks_are_found_more_often_and_stay_spread():
    even, hot = simulate(**{**SIMULATED, "zipf": 0.0}), simulate(**{**SIMULATED, "zipf": 1.4})
    assert hot.memory_hits > 0.5 > 0.2 > even.memory_hits
    assert hot.median_seconds < even.median_seconds
    assert hot.p99_seconds < 0.5  # one chunk is read by a fifth of all questions, which would overload its node
    assert simulate(**{**SIMULATED, "nodes": 1, "lost": 0}).answered == 4000


def test_the_command(tmp_path, model_folder, monkeypatch):
    monkeypatch.setattr("ragkv.planning.plan.perf_counter", steady())
    (tmp_path / "halden.md").write_text("Halden Works was founded by Mira Oskel in 1907.")
    words = ["plan", str(tmp_path / "halden.md"), "--model", str(model_folder), "--device", "cpu", "--engines", "block"]
    run = CliRunner().invoke
    found = json.loads(run(app, [*words, "--chunks", "1e6", "--nodes", "8", "--json", "--seconds", "1"]).stdout)
    assert (found["cluster"]["chunks"], found["cluster"]["nodes"]) == (1e6, 8)
    assert [tier["name"] for tier in found["cluster"]["tiers"]] == ["memory", "disk", "redis", "objects"]
    shown = run(app, [*words, "--chunks", "1e6", "--seconds", "1", "--quiet"]).stdout
    assert "1,000,000 chunks" in shown
    assert "Assumed, not measured" in shown
    for more in (["--nodes", "8"], ["--chunks", "0"], ["--chunks", "nan"]):
        assert isinstance(run(app, [*words, *more]).exception, UsageError)
