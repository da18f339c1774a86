"""What is predicted of an ingest with mini, against the ingest: chunks and bytes, never time."""

from __future__ import annotations

from pathlib import Path

import pytest
import words

from ragkv import RagKV
from ragkv.errors import ConfigError, UsageError
from ragkv.planning.plan import plan_ingest

CORPUS = Path(__file__).parents[2] / "examples" / "corpus"
SETTINGS = {"model": "mini", "dtype": "float32", "embedder": "none", "reranker": "none", "device": "cpu"}


@pytest.fixture
def documents(tmp_path) -> Path:
    folder = tmp_path / "documents"
    folder.mkdir()
    (folder / "halden.md").write_text("# Halden Works\n\nHalden Works was founded by Mira Oskel in 1907.\n" * 4)
    (folder / "bolt.txt").write_text("Bolt Ltd makes valves. Bolt Ltd was founded by Ann Lee in Varn.")
    return folder


@pytest.fixture
def quick(monkeypatch):
    """A trial of one slice, as large on any machine: this is about counts."""
    sizes = {"MEASURE_SECONDS": 0.0, "LEAST_SLICES": 1, "SLICE_SECONDS": 1e9, "BATCH_TOKENS": 1500, "ROUNDS": 1}
    for name, value in sizes.items():
        monkeypatch.setattr(f"ragkv.planning.trial.{name}", value)


def test_chunks_and_bytes_come_true(quick, tmp_path):
    plan = plan_ingest(CORPUS, codec="int8", engines=("block",), **SETTINGS)
    with RagKV.create(tmp_path / "index", codec="int8", engines=("block",), **SETTINGS) as rag:
        report = rag.ingest(CORPUS)
        stats = rag.stats()
    assert plan.trial_tokens < stats.tokens / 2  # a part of it speaks for all of it
    census = plan.census
    assert (census.documents.value, census.chunks.value, census.tokens.value) == (
        len(report.added),
        report.chunks,
        stats.tokens,
    )
    bytes_of = {found.codec: found.kv_bytes.value for found in plan.codecs}
    assert bytes_of["raw"] == pytest.approx(stats.kv_bytes_raw, abs=1)
    assert bytes_of["int8"] == pytest.approx(stats.kv_bytes, rel=0.03)
    assert plan.disk_bytes.value == pytest.approx(stats.used_bytes, rel=0.2)
    assert bytes_of["raw"] > bytes_of["zstd"] > bytes_of["int8"] > bytes_of["int4"]


def test_both_encodings_and_vectors(quick, documents, model_folder, tmp_path, monkeypatch):
    words.install(monkeypatch)
    settings = {"model": str(model_folder), "device": "cpu", "chunk_tokens": 64, "embedder": "words", "codec": "zstd"}
    plan = plan_ingest(documents, top_k=2, **settings)
    with RagKV.create(tmp_path / "index", **settings) as rag:
        rag.ingest(documents)
        stats, vectors = rag.stats(), sum(found.vector_bytes for found in rag.document_stats())
    assert plan.encodings == ("prefixed", "standalone")
    assert plan.codecs[0].kv_bytes.value == pytest.approx(stats.kv_bytes_raw, abs=1)
    assert next(c for c in plan.codecs if c.codec == "zstd").kv_bytes.value == pytest.approx(stats.kv_bytes, rel=0.05)
    assert plan.vector_bytes == pytest.approx(vectors, rel=0.05)
    assert [found.engine for found in plan.engines] == ["ape", "block", "pced"]
    assert {found.chunks for found in plan.engines} == {2}


def test_nothing_is_written(quick, documents, tmp_path, model_folder):
    before = sorted(tmp_path.rglob("*"))
    plan_ingest(documents, folder=tmp_path, model=str(model_folder), device="cpu", engines=("block",), top_k=1)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("settings", "error", "what"),
    [
        ({"engines": ("full",)}, UsageError, "full stores no KV, so there is nothing to plan; add one of ape"),
        ({"codec": "zip"}, ConfigError, "unknown codec 'zip'"),
        ({"chunk_tokens": 1}, ConfigError, "chunk_tokens must lie between"),
        ({"folder": Path("/nowhere")}, UsageError, "No temporary folder can be made in /nowhere"),
    ],
)
def test_bad_input_says_what_to_do(documents, model_folder, settings, error, what):
    with pytest.raises(error, match=what):
        plan_ingest(documents, **({"model": str(model_folder), "device": "cpu"} | settings))
