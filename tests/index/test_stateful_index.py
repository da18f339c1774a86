"""An index of a model whose rows resume one state: states are stored, checked, repaired and answered from like KV."""

from __future__ import annotations

import shutil

import pytest
import torch

from ragkv import RagKV
from ragkv.errors import UnsupportedModelError
from ragkv.model import small
from ragkv.store import Store

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own about its default configurations

QUESTION = "Who founded Halden Works?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory, make_model):
    """A hybrid checkpoint, a document, and an index of it."""
    home = tmp_path_factory.mktemp("stateful")
    tokenizer = make_model("llama").tokens._tokenizer
    model = small.small_model("falcon_h1", layers=3, max_position_embeddings=2048)
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(home / "model")
    tokenizer.save_pretrained(home / "model")
    (home / "halden.md").write_text("Halden Works was founded by Mira Oskel in 1907. " * 4)
    (home / "bolt.txt").write_text("Bolt Ltd makes valves. Bolt Ltd was founded by Ann Lee in Varn.")
    with RagKV.create(home / "index", model=home / "model", device="cpu", chunk_tokens=64, codec="zstd") as rag:
        rag.ingest(home / "halden.md", home / "bolt.txt")
    return home


@pytest.fixture
def rag(folder, tmp_path):
    shutil.copytree(folder / "index", tmp_path / "index")
    with RagKV.open(tmp_path / "index", device="cpu") as opened:
        opened.model.eos_ids = frozenset()  # random weights: no answer ends by chance
        yield opened


def ask(rag: RagKV, **options):
    return rag.query(QUESTION, max_new_tokens=6, top_k=3, **options)


def test_a_new_index_has_the_engines_that_its_model_can_run(rag):
    assert rag.config.engines == ("pced",)
    assert rag.config.default_engine == "pced"
    assert ask(rag).engine == "pced"


def test_an_engine_that_merges_is_refused_before_anything_is_made_for_it(rag):
    before = rag.store.stats()
    for engine in ("ape", "block", "ippd-stacked"):
        with pytest.raises(UnsupportedModelError, match=r"recurrent layers .* use engine 'pced'"):
            ask(rag, engine=engine)
    assert rag.store.stats() == before


def test_what_is_stored_is_what_is_computed(rag):
    stored = ask(rag)
    assert (stored.kv.misses, stored.kv.hits) == (0, 3)
    scored = rag.retrieve(QUESTION, top_k=3)
    ids = [each.chunk.token_ids for each in scored]
    prefix_ids = rag.index.prefix_ids
    [prefix] = rag.model.encode([prefix_ids])
    made = rag.model.encode(ids, prefix=prefix)
    request, _ = rag.request(_engine("pced"), QUESTION, scored[::-1])
    for mine, chunk in zip(made[::-1], request.chunks, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine.tensors, chunk.kv.tensors, strict=True))


def test_every_engine_that_runs_answers(rag):
    full = ask(rag, engine="full")
    assert ask(rag, engine="ippd").text == full.text
    for engine in ("single", "mapreduce"):
        assert ask(rag, engine=engine).finish_reason == "length"


def test_questions_at_once_are_answered_as_one_by_one(rag):
    questions = [QUESTION, "What does Bolt Ltd make?", "Who founded Bolt Ltd?"]
    alone = [rag.query(each, max_new_tokens=6, top_k=3).text for each in questions]
    assert [each.text for each in rag.query_many(questions, max_new_tokens=6, top_k=3)] == alone


def test_damaged_states_are_made_again(rag, tmp_path):
    before = ask(rag)
    rag.close()

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
    assert (after.kv.misses, healed.kv.misses) == (3, 0)


def _engine(name: str):
    from ragkv.engines import make_engine

    return make_engine(name, {})
