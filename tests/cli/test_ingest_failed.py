"""A failed or mistyped `ragkv ingest` leaves everything as before, and nothing that disturbs the next one."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import words

from ragkv import RagKV
from ragkv.config import PromptConfig, load_config
from ragkv.errors import ConfigError, ModelLoadError, RetrievalError, StoreFullError
from ragkv.index.create import CreationRollback
from ragkv.model import self_check
from ragkv.model.language_model import LanguageModel
from ragkv.store import Store
from ragkv.store.environment import Database, WriterLock
from ragkv.store.maintenance.maintenance import Maintenance


class Broken(words.WordEmbedder):
    """An embedder that loads, and fails for every document."""

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


LIMITS = "[ingest]\nmax_characters = 1\n"


@pytest.mark.parametrize(
    ("how", "code", "says"),
    [
        ("mode", 2, "sparse"),
        ("first chunk", 1, "failed on a text"),
        ("limits of the user file", 1, "ingest.max_characters"),
        ("Ctrl-C", 130, "interrupted before the first document was complete; run the same command to go on.\n"),
        ("Ctrl-C while models load", 130, "interrupted"),
    ],
)
def test_a_failed_first_ingest_leaves_nothing(ingest, tmp_path, monkeypatch, how, code, says):
    words.install(monkeypatch, Broken)
    more = {"mode": ("--embedder", "words", "--retrieval", "sparse"), "first chunk": ("--embedder", "words")}
    (tmp_path / "xdg" / "ragkv").mkdir(parents=True)
    (tmp_path / "xdg" / "ragkv" / "config.toml").write_text(LIMITS if how.startswith("limits") else "")
    if how == "Ctrl-C":  # not of the model's own `encode`, which its self-check calls too
        monkeypatch.setattr("ragkv.ingest.ingester.encode_identities", interrupt)
    elif how.startswith("Ctrl-C"):
        monkeypatch.setattr(self_check, "load_model", interrupt)
    result = ingest(tmp_path / "deep" / "er" / "index", *more.get(how, ()))
    assert result.code == code
    assert says in result.err
    assert "Traceback" not in result.err
    assert not (tmp_path / "deep").exists()


def test_an_unforeseen_error_leaves_nothing(ingest, tmp_path, monkeypatch):
    def load(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(self_check, "load_model", load)
    with pytest.raises(ZeroDivisionError):
        ingest(tmp_path / "index")
    assert not (tmp_path / "index").exists()


def test_the_same_command_makes_the_index_afterwards(ingest, tmp_path, monkeypatch):
    index = tmp_path / "index"
    index.mkdir()  # it existed before, so it is kept
    with monkeypatch.context() as patched:
        patched.setattr(LanguageModel, "encode", interrupt)
        assert ingest(index).code == 130
    assert index.is_dir()
    assert not list(index.iterdir())
    assert len(json.loads(ingest(index, "--json").out)["added"]) == 2


def test_what_was_stored_stays(ingest, tmp_path, documents, monkeypatch):
    """A document in the index, or KV of an incomplete one: the next run continues from there."""
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


@pytest.mark.parametrize("calls", [(WriterLock, "_acquire"), (Database, "acquire")])
def test_a_disk_without_room_for_a_store_has_no_folder_afterwards(ingest, tmp_path, monkeypatch, calls):
    def full(*_: object, **__: object) -> None:
        raise StoreFullError("the disk is full")

    monkeypatch.setattr(*calls, full)
    assert ingest(tmp_path / "new" / "index").code == 1
    assert not (tmp_path / "new").exists()


def test_memory_is_a_setting(ingest, tmp_path, monkeypatch):
    """The store releases mapped pages beyond half of the limit; an invalid amount is refused at once."""
    refused = ingest(tmp_path / "index", "--memory", "much")
    assert (refused.code, (tmp_path / "index").exists()) == (2, False)
    assert "ingest.memory must be a number of bytes" in refused.err
    assert "at least 64MiB" in ingest(tmp_path / "index", "--memory", "1MiB").err
    payload, given = iter(range(1 << 30, 1 << 40, 40 << 20)), []
    monkeypatch.setattr("ragkv.ingest.ingester.BATCH_TOKENS", 1)
    monkeypatch.setattr("ragkv.ingest.ingester.mapped_bytes", lambda: next(payload))
    monkeypatch.setattr(Maintenance, "give_back_pages", lambda store: given.append(store))
    assert ingest(tmp_path / "index", "--memory", "128MiB").code == 0
    assert not given  # only 40 MiB more than at the start
    assert ingest(tmp_path / "other", "--memory", "64MiB").code == 0
    assert given


def test_an_index_that_somebody_else_writes_to_or_had_before_stays(tmp_path, model_folder):
    folder = tmp_path / "index"
    rollback = CreationRollback(folder)
    assert not rollback.remove()
    RagKV.create(folder, model=str(model_folder)).close()
    with WriterLock(folder / "store").hold("another's ingest"), ThreadPoolExecutor(1) as pool:
        assert not pool.submit(rollback.remove).result()  # another thread does not share this thread's lock
    assert (folder / "ragkv.toml").exists()
    CreationRollback(folder).remove()
    assert (folder / "ragkv.toml").exists()
    (folder / "mine.txt").write_text("mine")
    assert rollback.remove()
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]


def test_an_emptied_index_takes_another_model(ragkv, index, documents, model_folder, folder, tmp_path):
    (broken := tmp_path / "broken").mkdir()
    shutil.copy(model_folder / "config.json", broken)
    command, asked = ("ingest", documents, "--index", index), ("query", "Who founded Halden Works?", "--index", index)
    assert ragkv(*asked, "--max-new-tokens", 1).code == 0
    assert ragkv("delete", "*", "--yes", "--index", index).code == 0
    assert ragkv(*command, "--model", broken).code == 1
    assert load_config(index).model == str(model_folder)  # unchanged
    assert ragkv(*command, "--model", folder, "--engines", "block").code == 0
    answered = ragkv(*asked, "--max-new-tokens", 1)
    assert answered.code == 0, answered.err
    assert ragkv("verify", "--index", index).code == 0


def test_what_no_flag_can_say_survives(ragkv, documents, model_folder, tmp_path):
    prompt = PromptConfig(system="Be brief.")
    RagKV.create(tmp_path / "new", model=str(model_folder), prompt=prompt, memory_budget=0).close()
    changed = ("--model", "mini", "--embedder", "none", "--chunk-tokens", 64)
    assert ragkv("ingest", documents, "--index", tmp_path / "new", *changed).code == 0
    found = load_config(tmp_path / "new")
    assert (found.model, found.chunk_tokens, found.prompt, found.memory_budget) == ("mini", 64, prompt, 0)


def test_from_python(tmp_path, model_folder, documents):
    for settings in ({"model": str(tmp_path / "typo")}, {"model": "some/typo"}, {"model": 3}, {"top_k": "many"}):
        with pytest.raises((ModelLoadError, ConfigError)):
            RagKV.create(tmp_path / "new", **settings)
        assert not (tmp_path / "new").exists()
    with RagKV.create(tmp_path / "new", model=model_folder) as first:  # a Path is accepted
        assert first.config.model == str(model_folder)
        with pytest.raises(ConfigError, match="already"):
            RagKV.create(tmp_path / "new", model=model_folder)
        with RagKV.create(tmp_path / "new", model=model_folder, codec="zstd", replace_empty=True) as second:
            with pytest.raises(ConfigError, match="has another codec in its"):
                first.ingest(documents)
            assert len(second.ingest(documents).added) == 2
        with pytest.raises(ConfigError, match="already"):
            RagKV.create(tmp_path / "new", model=model_folder, replace_empty=True)
