"""The memory budget comes from the index, the environment, or a share of the machine's memory."""

import shutil

import pytest
import torch
from indexed import indexed

from ragkv import RagKV
from ragkv.benchmarks.evaluation import families
from ragkv.config import IndexConfig, byte_count
from ragkv.engines import make_engine
from ragkv.errors import ConfigError, UnsupportedModelError
from ragkv.index.index import MEMORY_VARIABLE, memory_budget
from ragkv.model import checkpoint
from ragkv.store import Store
from ragkv.store.record import Manifest

CPU = torch.device("cpu")


def test_memory_budgets(monkeypatch):
    sizes = [byte_count("x", v) for v in (0, 4096, "4096", "512MiB", "1.5 GiB", "2GB", "1KiB", "1TiB", "1kB", "1 mib")]
    assert sizes == [0, 4096, 4096, 512 << 20, 3 << 29, 2 * 10**9, 1024, 1 << 40, 1000, 1 << 20]
    for bad in ("", "many", "-1", "1 XB", "1e9", "GiB", True, -4, "0x10", "1.5", "1.5B", "2.GB"):
        with pytest.raises(ConfigError, match="x must be a number of bytes"):
            byte_count("x", bad)
    for bad in ("9" * 400, "9" * 5000 + "GiB", "8388608TiB", str(1 << 63)):
        with pytest.raises(ConfigError, match="x is a number of bytes beyond 64 bits"):
            byte_count("x", bad)
    assert byte_count("x", str((1 << 63) - 1)) == byte_count("x", (1 << 63) - 1) == (1 << 63) - 1
    monkeypatch.delenv(MEMORY_VARIABLE, raising=False)
    assert memory_budget("1GiB", CPU) == 1 << 30
    assert memory_budget(0, CPU) == 0
    monkeypatch.setenv(MEMORY_VARIABLE, "3MiB")
    assert memory_budget("1GiB", CPU) == 3 << 20
    monkeypatch.setenv(MEMORY_VARIABLE, "lots")
    with pytest.raises(ConfigError, match=f"{MEMORY_VARIABLE} must be"):
        memory_budget("1GiB", CPU)
    assert IndexConfig.from_toml('memory_budget = "2GiB"').memory_budget == "2GiB"
    assert IndexConfig.from_toml("memory_budget = 0").memory_budget == 0
    for text, says in (('memory_budget = "much"', "number of bytes"), ("memory_budget = true", "whole number or")):
        with pytest.raises(ConfigError, match=says):
            IndexConfig.from_toml(text)


def test_auto_is_a_quarter_of_what_the_container_has_up_to_a_cap(monkeypatch, tmp_path):
    monkeypatch.delenv(MEMORY_VARIABLE, raising=False)
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(checkpoint, "_CGROUPS", (str(limit), str(tmp_path / "none")))
    limit.write_text("40000000\n")
    assert memory_budget("auto", CPU) == 10_000_000
    limit.write_text("max\n")
    assert 0 < memory_budget("auto", CPU) <= 8 << 30


# ---- typed

TEXTS = {
    "halden.md": "Halden Works was founded by Mira Oskel in 1907.\n\nIt is based in Tarn.\n",
    "bolt.txt": "Bolt Ltd makes valves. Bolt Ltd was founded by Ann Lee in Varn.",
}
QUESTION = "Who founded Halden Works?"
ENGINES = ("ape", "block", "full", "ippd", "pced")
NUMBERS = {"deepseek3": 4 * 28, "gemma3n": 4 * 2 * 32}  # per token


@pytest.fixture(scope="module", params=sorted(NUMBERS))
def made(request, make_folder, tmp_path_factory):
    """An index over a few sentences, and the numbers that it stores per token."""
    model = make_folder(request.param)
    with indexed(tmp_path_factory.mktemp("typed"), TEXTS, model=model, chunk_tokens=64) as rag:
        return rag.folder, NUMBERS[request.param]


def answers(rag):
    return {engine: rag.query(QUESTION, engine=engine, top_k=3, max_new_tokens=3) for engine in ENGINES}


def test_every_engine_answers_from_what_is_stored(made):
    with RagKV.open(made[0], device="cpu") as rag:
        first = answers(rag)
    with RagKV.open(made[0], device="cpu", readonly=True) as rag:
        again = answers(rag)
        assert {name: a.text for name, a in again.items()} == {name: a.text for name, a in first.items()}
        assert again["full"].text == again["ippd"].text
        assert [a.kv.misses for a in again.values()] == [0] * len(ENGINES)


def test_the_store_knows_what_its_records_are(made):
    folder, numbers = made
    with RagKV.open(folder, device="cpu") as rag:
        with rag.store._live().read() as txn:
            manifests = [Manifest.parse(value) for _, value in txn.scan("kv")]
        assert manifests
        assert {manifest.shape for manifest in manifests} == {rag.index.shape}
        tokens = sum(manifest.tokens for manifest in manifests)
        assert rag.store.stats().kv_bytes_raw == tokens * numbers * 4 == tokens * rag.index.shape.token_bytes
        assert rag.maintenance.verify().ok


# ---- stateful index

quiet = pytest.mark.filterwarnings("ignore")  # from transformers, about its default configurations


@pytest.fixture(scope="module")
def folder(tmp_path_factory, make_model):
    """A hybrid checkpoint, a document, and an index of it."""
    home = tmp_path_factory.mktemp("stateful")
    tokenizer = make_model("llama").tokens._tokenizer
    model = families.small_model("falcon_h1", layers=3, max_position_embeddings=2048)
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(home / "model")
    tokenizer.save_pretrained(home / "model")
    with indexed(home, TEXTS, model=home / "model", chunk_tokens=64, codec="zstd"):
        return home


@pytest.fixture(scope="module")
def rag(folder):
    """The opened index; tests must not write to it."""
    with RagKV.open(folder / "index", device="cpu") as opened:
        opened.model.eos_ids = frozenset()  # random weights: prevent an early end of an answer
        yield opened


def ask(rag: RagKV, **options):
    return rag.query(QUESTION, max_new_tokens=6, top_k=3, **options)


@quiet
def test_a_new_index_has_the_engines_that_its_model_can_run(rag):
    assert rag.config.engines == ("pced",)
    assert rag.config.default_engine == "pced"
    assert ask(rag).engine == "pced"


@quiet
def test_an_engine_that_merges_is_refused_before_anything_is_made_for_it(rag):
    rag.maintenance.settle()
    before = rag.store.stats()
    for engine in ("ape", "block"):
        with pytest.raises(UnsupportedModelError, match=r"recurrent layers .* use engine 'pced'"):
            ask(rag, engine=engine)
    assert rag.store.stats() == before


@quiet
def test_what_is_stored_is_what_is_computed(rag):
    stored = ask(rag)
    assert (stored.kv.misses, stored.kv.hits) == (0, 2)
    scored = rag.retrieve(QUESTION, top_k=3)
    ids = [each.chunk.token_ids for each in scored]
    prefix_ids = rag.index.prefix_ids
    [prefix] = rag.model.encode([prefix_ids])
    made = rag.model.encode(ids, prefix=prefix)
    request, _ = rag.request(make_engine("pced", {}), QUESTION, scored[::-1])
    for mine, chunk in zip(made[::-1], request.chunks, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine.tensors, chunk.kv.tensors, strict=True))


@quiet
def test_every_engine_that_runs_answers(rag):
    full = ask(rag, engine="full")
    assert ask(rag, engine="ippd").text == full.text
    assert ask(rag, engine="single").finish_reason == "length"


@quiet
def test_questions_at_once_are_answered_as_one_by_one(rag):
    questions = [QUESTION, "What does Bolt Ltd make?", "Who founded Bolt Ltd?"]
    alone = [rag.query(each, max_new_tokens=6, top_k=3).text for each in questions]
    assert [each.text for each in rag.query_many(questions, max_new_tokens=6, top_k=3)] == alone


@quiet
def test_damaged_states_are_made_again(rag, folder, tmp_path):
    before = ask(rag)
    rag.maintenance.settle()
    shutil.copytree(folder / "index", tmp_path / "index")

    def flip(txn) -> None:
        for key, found in list(txn.scan("segments", b"")):
            value = bytearray(bytes(found))
            value[-1] ^= 1
            txn.put("segments", key, bytes(value))

    with Store.open(tmp_path / "index") as store:
        store._live().write(flip)
    with RagKV.open(tmp_path / "index", device="cpu") as again:
        again.model.eos_ids = frozenset()
        after, healed = ask(again), ask(again)
    assert after.text == before.text
    assert (after.kv.misses, healed.kv.misses) == (2, 0)
