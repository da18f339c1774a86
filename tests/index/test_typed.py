"""Indexes of models whose layers keep something else than keys and values each: latents, or another layer's."""

from __future__ import annotations

import shutil

import pytest

from ragkv import RagKV
from ragkv.store.format.record import Manifest

QUESTION = "Who founded Halden Works?"
ENGINES = ("ape", "block", "full", "ippd-stacked", "pced")
NUMBERS = {"deepseek3": 9 * 28, "gemma3n": 4 * 2 * 32}  # per token


@pytest.fixture(scope="module", params=sorted(NUMBERS))
def made(request, make_folder, tmp_path_factory):
    """An index over a few sentences, and how many numbers it keeps of a token."""
    folder = tmp_path_factory.mktemp("typed")
    (folder / "halden.md").write_text("Halden Works was founded by Mira Oskel in 1907.\n\nIt is based in Tarn.\n")
    (folder / "bolt.txt").write_text("Bolt Ltd makes valves. Bolt Ltd was founded by Ann Lee in Varn.")
    model = str(make_folder(request.param))
    with RagKV.create(folder / "index", model=model, device="cpu", chunk_tokens=64) as rag:
        rag.ingest(folder / "halden.md", folder / "bolt.txt")
    return folder / "index", NUMBERS[request.param]


def answers(rag):
    return {engine: rag.query(QUESTION, engine=engine, top_k=3, max_new_tokens=6) for engine in ENGINES}


def test_every_engine_answers_from_what_is_stored(made):
    with RagKV.open(made[0], device="cpu") as rag:
        first = answers(rag)
    with RagKV.open(made[0], device="cpu", readonly=True) as rag:
        again = answers(rag)
        assert {name: a.text for name, a in again.items()} == {name: a.text for name, a in first.items()}
        assert again["full"].text == again["ippd-stacked"].text
        assert [a.kv.misses for a in again.values()] == [0] * len(ENGINES)


def test_the_store_knows_what_its_records_are(made):
    folder, numbers = made
    with RagKV.open(folder, device="cpu") as rag:
        answers(rag)
        with rag.store._live().read() as txn:
            manifests = [Manifest.parse(value) for _, value in txn.scan("kv")]
        assert manifests
        assert {manifest.version for manifest in manifests} == {2}
        assert {manifest.shape for manifest in manifests} == {rag.index.shape}
        tokens = sum(manifest.tokens for manifest in manifests)
        assert rag.store.stats().kv_bytes_raw == tokens * numbers * 4 == tokens * rag.index.shape.token_bytes
        assert rag.verify().ok


def test_a_lossy_codec_stores_less(made, make_folder, tmp_path):
    with RagKV.open(made[0], device="cpu") as rag:
        model = rag.model.checkpoint.name
    shutil.copytree(made[0].parent, tmp_path / "documents", ignore=shutil.ignore_patterns("index"))
    with RagKV.create(tmp_path / "index", model=model, device="cpu", chunk_tokens=64, codec="int8") as rag:
        rag.ingest(tmp_path / "documents")
        assert rag.query(QUESTION, engine="block", top_k=3, max_new_tokens=3).kv.misses == 0
        assert rag.verify().ok
        stats = rag.store.stats()
    assert stats.kv_bytes < 0.4 * stats.kv_bytes_raw
