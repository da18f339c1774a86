"""A failed or mistyped `ragkv ingest` leaves what was there before, and nothing that the next one stumbles over."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import words

from ragkv import RagKV
from ragkv.config import PromptConfig, load_config
from ragkv.errors import ConfigError, ModelLoadError, RetrievalError
from ragkv.index.create import CreationRollback
from ragkv.ingest.ingester import Ingester
from ragkv.model import self_check
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


@pytest.mark.parametrize(("how", "code"), [("mode", 2), ("first chunk", 1), ("Ctrl-C", 130)])
def test_a_failed_first_ingest_leaves_nothing(ingest, tmp_path, monkeypatch, how, code):
    words.install(monkeypatch, Broken)
    more = {"mode": ("--embedder", "words", "--retrieval", "sparse"), "first chunk": ("--embedder", "words")}
    if how == "Ctrl-C":
        monkeypatch.setattr(LanguageModel, "encode", interrupt)
    result = ingest(tmp_path / "deep" / "er" / "index", *more.get(how, ()))
    assert result.code == code
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
        assert store.stats().orphans == 0


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
    rollback = CreationRollback(folder)
    assert not rollback.remove()
    RagKV.create(folder, model=str(model_folder)).close()
    with WriterLock(folder / "store").hold("another's ingest"), ThreadPoolExecutor(1) as pool:
        assert not pool.submit(rollback.remove).result()  # a thread of its own does not share this one's lock
    assert (folder / "ragkv.toml").exists()
    CreationRollback(folder).remove()
    assert (folder / "ragkv.toml").exists()
    (folder / "mine.txt").write_text("mine")
    assert rollback.remove()
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]


@pytest.fixture
def place(tmp_path: Path, model_folder: Path, documents: Path) -> dict[str, Path]:
    """A model that does not load, and what an index is made of."""
    broken = tmp_path / "broken"
    shutil.copytree(model_folder, broken)
    (broken / "model.safetensors").write_bytes(b"\x07" * 100)
    return {"documents": documents, "model": model_folder, "broken": broken, "new": tmp_path / "new"}


@pytest.mark.parametrize("how", [KeyboardInterrupt, MemoryError])
def test_an_interrupt_while_models_load_leaves_nothing(ragkv, place, monkeypatch, how):
    def load(*_: Any, **__: Any) -> None:
        raise how

    command = ("ingest", place["documents"], "--model", place["model"], "--index", place["new"])
    with monkeypatch.context() as patch:
        patch.setattr(self_check, "load_model", load)
        if how is KeyboardInterrupt:
            assert ragkv(*command).code == 130
        else:
            with pytest.raises(how):
                ragkv(*command)
    assert not place["new"].exists()
    assert ragkv(*command).code == 0


def test_an_ingest_that_was_stopped_before_its_first_document_binds_nobody(ragkv, place, monkeypatch):
    command = ("ingest", place["documents"], "--model", place["model"], "--index", place["new"])
    with monkeypatch.context() as patch:
        patch.setattr(Ingester, "_add", interrupt)
        assert ragkv(*command).code == 130
    assert not place["new"].exists()
    again = ragkv(*command, "--chunk-tokens", 64, "--codec", "zstd", "--dry-run")
    assert (again.code, "2 to add" in again.out) == (0, True)
    again = ragkv(*command, "--chunk-tokens", 64, "--codec", "zstd")
    assert again.code == 0, again.err
    assert (load_config(place["new"]).chunk_tokens, load_config(place["new"]).codec) == (64, "zstd")
    assert ragkv("verify", "--index", place["new"]).code == 0
    refused = ragkv(*command, "--chunk-tokens", 128)
    assert (refused.code, "was made with chunk_tokens = 64, not 128" in refused.err) == (1, True)
    assert ragkv("query", "Who founded Halden Works?", "--index", place["new"], "--max-new-tokens", 1).code == 0


def test_an_emptied_index_takes_another_model(ragkv, place, tmp_path):
    command = ("ingest", place["documents"], "--index", place["new"])
    assert ragkv(*command, "--model", place["model"]).code == 0
    assert ragkv("query", "Who founded Halden Works?", "--index", place["new"], "--max-new-tokens", 1).code == 0
    assert ragkv("delete", "*", "--yes", "--index", place["new"]).code == 0
    failed = ragkv(*command, "--model", place["broken"])
    assert (failed.code, "cannot be loaded" in failed.sentence) == (1, True)
    assert load_config(place["new"]).model == str(place["model"])  # as it was
    shutil.copytree(place["model"], tmp_path / "other")
    assert ragkv(*command, "--model", tmp_path / "other", "--engines", "block").code == 0
    answered = ragkv("query", "Who founded Halden Works?", "--index", place["new"], "--max-new-tokens", 1)
    assert answered.code == 0, answered.err
    assert ragkv("verify", "--index", place["new"]).code == 0


def test_what_no_flag_can_say_survives(ragkv, place):
    prompt = PromptConfig(system="Be brief.")
    RagKV.create(place["new"], model=str(place["model"]), prompt=prompt, memory_budget=0).close()
    assert (
        ragkv("ingest", place["documents"], "--index", place["new"], "--model", "mini", "--embedder", "none").code == 0
    )
    found = load_config(place["new"])
    assert (found.model, found.prompt, found.memory_budget) == ("mini", prompt, 0)


def test_documents_beyond_the_limits_of_the_user_file_leave_nothing(ragkv, place, tmp_path):
    (tmp_path / "xdg" / "ragkv").mkdir(parents=True)
    (tmp_path / "xdg" / "ragkv" / "config.toml").write_text("[ingest]\nmax_characters = 1\n")
    found = ragkv("ingest", place["documents"], "--index", place["new"], "--model", place["model"])
    assert found.code == 1
    assert "ingest.max_characters" in found.err
    assert not place["new"].exists()


def test_from_python(tmp_path, model_folder, documents):
    for settings in ({"model": str(tmp_path / "typo")}, {"model": "some/typo"}, {"model": 3}, {"top_k": "many"}):
        with pytest.raises((ModelLoadError, ConfigError)):
            RagKV.create(tmp_path / "new", **settings)
        assert not (tmp_path / "new").exists()
    with RagKV.create(tmp_path / "new", model=model_folder) as first:  # a Path will do
        assert first.config.model == str(model_folder)
        with pytest.raises(ConfigError, match="already"):
            RagKV.create(tmp_path / "new", model=model_folder)
        with RagKV.create(tmp_path / "new", model=model_folder, codec="zstd", replace_empty=True) as second:
            with pytest.raises(ConfigError, match="has another codec in its"):
                first.ingest(documents)
            assert len(second.ingest(documents).added) == 2
        with pytest.raises(ConfigError, match="already"):
            RagKV.create(tmp_path / "new", model=model_folder, replace_empty=True)
