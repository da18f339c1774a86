"""Pickled and copied parts open their index again; nothing that is open travels."""

from __future__ import annotations

import copy
import pickle
import pickletools
import subprocess
import sys

import pytest
from llama_index.core.vector_stores import MetadataFilter, MetadataFilters

from ragkv import RagKV
from ragkv.errors import ConfigError
from ragkv.integrations.llama_index import RagKVQueryEngine, RagKVRerank, RagKVRetriever

FILTERS = MetadataFilters(filters=[MetadataFilter(key="page", value=None, operator="is_empty")])


class Lengths:
    """A reranker of the user's own."""

    name = "lengths"

    def score(self, question, texts):
        return [float(len(text)) for text in texts]


def again(thing):
    return pickle.loads(pickle.dumps(thing))


@pytest.mark.parametrize("anew", [again, copy.deepcopy])
def test_a_retriever(rag, questions, anew):
    retriever = RagKVRetriever(rag, similarity_top_k=3, filters=FILTERS, search={"retrieval": "bm25"})
    wanted = [n.node_id for n in retriever.retrieve(questions[0])]
    back = anew(retriever)
    assert back.rag is not rag
    assert (back.top_k, back.filters, back.search) == (3, FILTERS, {"retrieval": "bm25"})
    assert [n.node_id for n in back.retrieve(questions[0])] == wanted
    back.rag.close()
    assert [n.node_id for n in retriever.retrieve(questions[0])] == wanted


@pytest.mark.parametrize("anew", [again, copy.deepcopy])
def test_an_engine_with_its_retriever_and_postprocessors(rag, questions, anew):
    engine = RagKVQueryEngine(
        rag,
        engine="block",
        top_k=4,
        max_new_tokens=12,
        decoding={"temperature": 0.5, "seed": 3},
        node_postprocessors=[RagKVRerank(Lengths(), top_n=2)],
    )
    wanted = engine.query(questions[0])
    back = anew(engine)
    assert back.rag is back.retriever.rag
    assert back.rag is not rag
    found = back.query(questions[0])
    assert (str(found), found.metadata["decoding"]) == (str(wanted), wanted.metadata["decoding"])
    assert [n.node_id for n in found.source_nodes] == [n.node_id for n in wanted.source_nodes]
    back.close()
    assert str(engine.query(questions[0])) == str(wanted)


def test_a_shallow_copy_shares_the_index(rag):
    engine = RagKVQueryEngine(rag)
    assert copy.copy(engine).rag is rag


def test_a_pickle_holds_settings_and_nothing_that_is_open(rag, questions):
    engine = RagKVQueryEngine(rag, engine="block")
    before = len(pickle.dumps(engine))
    engine.query(questions[0])
    data = pickle.dumps(engine)
    assert len(data) == before  # neither model nor KV came along
    held = {argument for _, argument, _ in pickletools.genops(data) if isinstance(argument, str)}
    assert str(rag.folder.absolute()) in held
    assert not any(name.startswith(("ragkv.store", "ragkv.model.language", "torch", "_thread")) for name in held)


def test_another_process_answers(rag, questions, tmp_path):
    """From another folder, although the index was named by a relative path."""
    engine = RagKVQueryEngine(rag, engine="block", top_k=3, max_new_tokens=12)
    (tmp_path / "engine").write_bytes(pickle.dumps(engine))
    code = f"import pickle; print(pickle.load(open('engine', 'rb')).query({questions[0]!r}))"
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str(engine.query(questions[0]))


def test_an_index_that_is_gone_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with RagKV.create("there", model="mini", embedder="none", reranker="none") as made:
        data = pickle.dumps(RagKVRetriever(made))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pickle.loads(data).rag as back:  # an absolute path travels
        assert back.folder == tmp_path / "there"
    (tmp_path / "there" / "ragkv.toml").unlink()
    with pytest.raises(ConfigError, match="There is no index at"):
        pickle.loads(data)


def test_a_reranker_is_loaded_again_by_its_name(monkeypatch):
    asked = []
    load = lambda name, **options: asked.append((name, options)) or Lengths()  # noqa: E731
    monkeypatch.setattr("ragkv.integrations.llama_index.rerank.load_reranker", load)
    named = RagKVRerank("some/reranker", top_n=2, score_kind="sparse", device="cpu", max_tokens=99)
    back = again(named)
    assert asked == [("some/reranker", {"device": "cpu", "max_tokens": 99})] * 2
    assert (back.model_name, back.top_n, back.score_kind) == ("lengths", 2, "sparse")
    serialised = RagKVRerank.from_dict(named.to_dict(), device="cpu")  # LlamaIndex's own way
    assert asked[-1] == ("lengths", {"device": "cpu", "max_tokens": None})
    assert (serialised.top_n, serialised.score_kind) == (2, "sparse")


def test_minis_reranker_in_a_pickle():
    from ragkv.retrievers import load_reranker

    step = again(RagKVRerank(load_reranker("mini", device="cpu", max_tokens=64), top_n=1))
    assert (step.model_name, step.top_n) == ("mini", 1)
    assert len(step._reranker.score("Who?", ["Ann Lee."])) == 1
