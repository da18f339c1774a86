"""What a failed first `ragkv ingest` leaves behind: nothing, and what was there before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import words

from ragkv import RagKV
from ragkv.errors import RetrievalError
from ragkv.index.create import CreationRollback
from ragkv.model.language_model import LanguageModel
from ragkv.store import Store
from ragkv.store.environment import WriterLock


class Broken(words.WordEmbedder):
    """An embedder that loads, and fails on every document."""

    modes = frozenset(("dense",))

    def embed_documents(self, texts):
        raise RetrievalError("Embedder 'words' failed on a text.")


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.fixture
def ingest(ragkv, documents, model_folder):
    def run(index: Path, *more: object):
        return ragkv("ingest", documents, "--index", index, "--model", model_folder, "--quiet", *more)

    return run


@pytest.mark.parametrize("how", ["model", "embedder", "mode", "first chunk", "Ctrl-C", "nothing to read"])
def test_a_failed_first_ingest_leaves_nothing(ingest, ragkv, tmp_path, documents, monkeypatch, how):
    words.install(monkeypatch, Broken)
    index = tmp_path / "deep" / "er" / "index"
    more: dict[str, tuple[object, ...]] = {
        "model": ("--model", tmp_path / "none"),
        "embedder": ("--embedder", tmp_path / "none"),
        "mode": ("--embedder", "words", "--retrieval", "sparse"),
        "first chunk": ("--embedder", "words"),
    }
    if how == "Ctrl-C":
        monkeypatch.setattr(LanguageModel, "encode", interrupt)
    if how == "nothing to read":
        for path in documents.iterdir():
            path.write_bytes(b"")
    result = ingest(index, *more.get(how, ()))
    assert result.code == {"Ctrl-C": 130, "mode": 2}.get(how, 1)
    assert "Traceback" not in result.err
    assert not (tmp_path / "deep").exists()


def test_the_same_command_makes_the_index_afterwards(ingest, tmp_path, monkeypatch):
    index = tmp_path / "index"
    index.mkdir()  # it was there, and stays
    with monkeypatch.context() as patched:
        patched.setattr(LanguageModel, "encode", interrupt)
        assert ingest(index).code == 130
    assert index.is_dir()
    assert not list(index.iterdir())
    assert len(json.loads(ingest(index, "--json").out)["added"]) == 2


def test_what_was_stored_stays(ingest, tmp_path, documents, monkeypatch):
    """One document is in the index, or the KV of one that is not complete: the next run goes on from there."""
    index, write = tmp_path / "index", Store.write_changes
    (documents / "long.txt").write_text("Bolt Ltd makes valves of copper. " * 40)
    monkeypatch.setattr("ragkv.ingest.ingester.BATCH_TOKENS", 16)
    monkeypatch.setattr("ragkv.ingest.ingester.HOLD_BYTES", 1)
    monkeypatch.setattr(Store, "write_changes", interrupt)
    assert ingest(index).code == 130
    assert (index / "ragkv.toml").exists()
    monkeypatch.setattr(Store, "write_changes", write)
    report = json.loads(ingest(index, "--json").out)
    assert report["kv_reused"] > 0
    monkeypatch.setattr(LanguageModel, "encode", interrupt)
    (documents / "new.txt").write_text("Corvo Mills was founded by Ida Brandt.")
    assert ingest(index).code == 130
    with Store.open(index) as store:
        assert len(list(store.documents())) == 3


def test_memory_is_a_setting(ingest, tmp_path, monkeypatch):
    """Pages of the store are given back when they take half of it; a wrong amount is refused at once."""
    refused = ingest(tmp_path / "index", "--memory", "much")
    assert (refused.code, (tmp_path / "index").exists()) == (2, False)
    assert "ingest.memory must be a number of bytes" in refused.err
    assert "at least 64MiB" in ingest(tmp_path / "index", "--memory", "1MiB").err
    payload, given = iter(range(1 << 30, 1 << 40, 40 << 20)), []
    monkeypatch.setattr("ragkv.ingest.ingester.BATCH_TOKENS", 1)
    monkeypatch.setattr("ragkv.ingest.ingester.mapped_bytes", lambda: next(payload))
    monkeypatch.setattr(Store, "give_back_pages", lambda store: given.append(store))
    assert ingest(tmp_path / "index", "--memory", "128MiB").code == 0
    assert not given  # 40 MiB more than at first
    assert ingest(tmp_path / "other", "--memory", "64MiB").code == 0
    assert given


def test_an_index_that_somebody_else_writes_to_or_had_before_stays(tmp_path, model_folder):
    folder = tmp_path / "index"
    rollback = CreationRollback.of(folder)
    assert not rollback.remove()
    RagKV.create(folder, model=str(model_folder)).close()
    with WriterLock(folder / "store").hold("another's ingest"):
        assert not rollback_in_thread(rollback)
    assert (folder / "ragkv.toml").exists()
    CreationRollback.of(folder).remove()
    assert (folder / "ragkv.toml").exists()
    (folder / "mine.txt").write_text("mine")
    assert rollback.remove()
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]


def rollback_in_thread(rollback: CreationRollback) -> bool:
    """Its result in another thread, which does not share this one's lock."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(rollback.remove).result()
