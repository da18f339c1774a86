"""An index with an embedder and a reranker: ingest, questions, filters, changes, prefetch."""

import fcntl
import json
import math
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import words
from indexed import PAIR, write_texts
from package import in_child
from words import WordEmbedder, WordReranker

from ragkv import RagKV
from ragkv.config import CONFIG_FILE, MODES, load_config
from ragkv.doctor.retrieval import index_searches
from ragkv.errors import ConfigError, RetrievalError, UsageError
from ragkv.index.index import kinds_of
from ragkv.index.search import Derived, Searcher, stale_derived
from ragkv.retrievers import BM25, DenseIndex, Embedding, SparseIndex
from ragkv.retrievers.segments import SavedElsewhereError, Segmented
from ragkv.store import ChunkVectors, Store
from ragkv.types import Chunk, Document
from ragkv.util.files import dump_toml, read_toml

FILES = PAIR | {"sub/tarn.md": "# Tarn\n\nTarn lies on the river Ister. Its mayor is Ann Lee.\n"}


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    return write_texts(tmp_path / "documents", FILES)


def make(folder: Path, model_folder, **settings) -> RagKV:
    given = {"chunk_tokens": 128, "embedder": "words", "reranker": "words"} | settings
    return RagKV.create(folder, model=str(model_folder), device="cpu", **given)


@pytest.fixture
def rag(tmp_path, documents, model_folder, monkeypatch):
    words.install(monkeypatch)
    with make(tmp_path / "index", model_folder) as made:
        made.ingest(documents)
        yield made


def test_the_default_is_hybrid_then_reranked_with_every_stages_score(rag):
    assert (rag.config.retrieval, rag.config.reranker) == ("hybrid", "words")
    answer = rag.query("Who founded Halden Works?", engine="ape", top_k=2, max_new_tokens=2)
    best = answer.to_json()["sources"][0]
    assert best["document"] == "halden.md"
    assert set(best["stages"]) == {"relative", "dense", "sparse"}
    assert best["retrieval_score"] == best["stages"]["dense"]
    assert best["rerank_score"] == 1.0  # founded, halden, works
    assert 0 < best["score"] < 1
    assert answer.timing.rerank > 0
    assert (answer.kv.hits, answer.kv.misses) == (2, 0)


def test_modes_and_settings_of_one_question(rag):
    for mode, stages in {
        "dense": {"dense"},
        "sparse": {"sparse"},
        "colbert": {"dense", "colbert"},
        "bm25": {"bm25"},
    }.items():
        [best, *_] = rag.retrieve("the river Ister", retrieval=mode, rerank=False)
        assert (best.source, set(best.stages), best.rerank_score) == ("sub/tarn.md", stages, None)
    assert "relative" in rag.retrieve("the river Ister", retrieval="hybrid")[0].stages
    rag.index.encoders.reranker.judged.clear()
    assert len(rag.retrieve("Ann Lee", candidates=2, top_k=1)) == 1
    assert len(rag.index.encoders.reranker.judged) == 2
    with pytest.raises(UsageError, match="--candidates must be at least 1"):
        rag.retrieve("x", candidates=0)
    with pytest.raises(UsageError, match="one of dense"):
        rag.stream("x", retrieval="fuzzy")


@pytest.mark.parametrize(
    ("answer", "question"), [("The documents do not say.", "Who is mayor of Tarn?"), ("It is Tarn.", "How old?")]
)
def test_a_follow_up_is_searched_for_after_the_last_questions_alone_and_after_the_last_answer(rag, answer, question):
    talk = rag.conversation(history="search")
    talk.add("Who founded Halden Works in 1907? Bolt Ltd makes valves, and who founded Bolt Ltd in Varn?", answer)
    together, *_ = texts = talk.search_texts(question)

    def documents(search_for):
        found = rag.retrieve(question, search_for=search_for, retrieval="bm25", rerank=False, top_k=2)
        return [scored.source for scored in found]

    assert "sub/tarn.md" not in documents(together)
    assert "sub/tarn.md" in documents(texts)


def test_where_lets_only_such_documents_through(rag):
    for where, sources in (
        (["source=bolt.txt"], {"bolt.txt"}),
        (["source=*.md"], {"halden.md", "sub/tarn.md"}),
        (["source=tarn.md"], {"sub/tarn.md"}),
        (["source=bolt.txt", "source=halden.md"], {"bolt.txt", "halden.md"}),
        (["source=*.md", "title=Tarn"], {"sub/tarn.md"}),
        (["media_type=text/plain"], {"bolt.txt"}),
    ):
        for mode in ("dense", "sparse", "bm25"):
            found = rag.retrieve("Ann Lee founded Tarn Halden Works", where=where, retrieval=mode)
            assert {each.source for each in found} == sources, (where, mode)


def test_indexes_follow_the_documents_and_only_new_chunks_are_added(rag, documents):
    rag.retrieve("valves", retrieval="hybrid")
    (documents / "bolt.txt").write_text("Bolt Ltd makes gears now.")
    (documents / "new.txt").write_text("Nobody knows the new zither.")
    rag.index.encoders.embedder.embedded = 0
    rag.ingest(documents)
    assert rag.index.encoders.embedder.embedded == 2
    assert rag.retrieve("gears", top_k=1)[0].source == "bolt.txt"
    assert rag.retrieve("zither", top_k=1, retrieval="sparse")[0].source == "new.txt"
    assert rag.retrieve("valves", retrieval="sparse", rerank=False) == []
    rag.delete(str((documents / "new.txt").resolve()))
    assert rag.retrieve("zither", retrieval="sparse", rerank=False) == []


def test_who_writes_leaves_the_indexes_ready_and_builds_no_others(rag, documents, monkeypatch):
    derived = rag.index.derived
    assert sorted(path.name for path in derived.iterdir()) == ["dense", "fields", "sparse"]
    rag.retrieve("valves", retrieval="bm25")
    (documents / "new.txt").write_text("Nobody knows the new zither.")
    rag.ingest(documents)
    assert rag.delete(str(documents / "bolt.txt"), "nix") == [str(documents / "bolt.txt")]
    monkeypatch.setattr(Segmented, "update", lambda *_, **__: pytest.fail("a question changes an index"))
    for one in (rag, RagKV.open(rag.folder, device="cpu")):
        for mode in ("bm25", "dense"):
            assert one.retrieve("new zither", retrieval=mode, top_k=1)[0].source == "new.txt"
            assert "bolt.txt" not in {found.source for found in one.retrieve("valves", retrieval=mode)}
            assert {found.source for found in one.retrieve("valves", retrieval=mode, where=["source=new*"])} <= {
                "new.txt"
            }
        one.close()
    assert sorted(path.name for path in derived.iterdir()) == ["bm25", "dense", "fields", "sparse"]


def test_an_index_that_cannot_be_saved_does_not_fail_the_ingest(rag, documents, monkeypatch, caplog):
    def full(*_):
        raise RetrievalError("The dense index cannot be written: No space left on device.")

    (documents / "new.txt").write_text("Nobody knows the new zither.")
    with monkeypatch.context() as patch:
        patch.setattr(Segmented, "save", full)
        assert len(rag.ingest(documents).added) == 1
    assert "No space left" in caplog.text
    with RagKV.open(rag.folder, device="cpu") as other:
        assert other.retrieve("new zither", top_k=1)[0].source == "new.txt"


def test_another_embedder_is_refused_until_all_is_embedded_anew(rag, documents, monkeypatch):
    class Other(WordEmbedder):
        def __init__(self, *, device="cpu", max_tokens=None):
            super().__init__(salt=1)

        @staticmethod
        def fingerprint_for(max_tokens):
            return WordEmbedder.fingerprint_for(max_tokens, 1)

    rag.retrieve("valves")
    words.install(monkeypatch, embedder=Other)
    with RagKV.open(rag.folder, device="cpu") as changed:
        with pytest.raises(RetrievalError, match="another version of the embedder 'words'"):
            changed.retrieve("valves")
        assert changed.retrieve("valves", retrieval="bm25")[0].source == "bolt.txt"
        (documents / "halden.md").rename(documents.parent / "halden.md")
        changed.ingest(documents)
        with pytest.raises(RetrievalError, match="another version"):  # halden.md still has the other's vectors
            changed.retrieve("valves")
        report = changed.ingest(documents, prune=True)
        assert report.kv_encoded == 0
        [best, *_] = changed.retrieve("Bolt Ltd valves")
        assert best.source == "bolt.txt"
        assert best.stages["dense"] > 0.5


def test_an_index_from_before_embedders_opens_as_it_was(tmp_path, documents, model_folder):
    with make(tmp_path / "index", model_folder, embedder="none", reranker="none") as rag:
        rag.ingest(documents)
        config = rag.folder / CONFIG_FILE
        new = ("embedder", "reranker", "vectors", "candidates", "index_factory")
        table = read_toml(config)
        config.write_text(dump_toml({name: value for name, value in table.items() if name not in new}))
        assert load_config(rag.folder).embedder == "none"
    with RagKV.open(tmp_path / "index", device="cpu") as rag:
        assert rag.retrieve("valves")[0].source == "bolt.txt"
        assert rag.ingest(documents).unchanged


def test_only_the_wanted_vectors_are_stored(tmp_path, documents, model_folder, monkeypatch):
    words.install(monkeypatch)
    with make(tmp_path / "index", model_folder, vectors=("dense",)) as rag:
        rag.ingest(documents)
        assert len(list(rag.store.vectors("dense"))) == 3
        assert not list(rag.store.vectors("colbert"))
        with pytest.raises(RetrievalError, match=r"no sparse vectors.* can serve dense, hybrid and bm25"):
            rag.retrieve("valves", retrieval="sparse")


class DenseOnly(WordEmbedder):
    """Dense vectors only, like a sentence-transformers model."""

    modes = frozenset(("dense",))

    def embed_documents(self, texts):
        return Embedding(dense=super().embed_documents(texts).dense)


@pytest.mark.parametrize("load", [True, False])
def test_an_embedder_without_sparse_vectors_serves_hybrid_by_words(
    tmp_path, documents, model_folder, monkeypatch, load
):
    words.install(monkeypatch, DenseOnly)
    with make(tmp_path / "index", model_folder, retrieval="hybrid", rerank=False, load=load) as rag:
        assert rag.config.vectors == load_config(rag.folder).vectors == ("dense",)
        rag.ingest(documents)
        best = rag.retrieve("Who founded Halden Works?")[0]
        assert (best.source, set(best.stages)) == ("halden.md", {"relative", "dense", "bm25"})
        [tarn] = rag.retrieve("Who founded Halden Works?", where=["source=tarn.md"])
        assert tarn.source == "sub/tarn.md"
        assert set(rag.maintenance.verify().derived) == {"bm25", "dense", "fields"}
        assert {*index_searches(rag, rerank=False)} == {"dense", "hybrid", "bm25"}
        (documents / "new.txt").write_text("Zeppelin Works makes airships.")
        rag.ingest(documents)
        assert rag.retrieve("Zeppelin airships")[0].source == "new.txt"
    text = (
        (rag.folder / CONFIG_FILE).read_text().replace('retrieval = "hybrid"', 'retrieval = "hybrid"\nfusion = "rrf"')
    )
    (rag.folder / CONFIG_FILE).write_text(text.replace('fusion = "relative"\n', ""))
    with RagKV.open(rag.folder) as rag:
        assert "rrf" in rag.retrieve("Who founded Halden Works?")[0].stages


@pytest.mark.parametrize("load", [True, False])
def test_a_mode_that_the_embedder_cannot_serve_is_refused_before_anything_is_made(
    tmp_path, model_folder, monkeypatch, load
):
    words.install(monkeypatch, DenseOnly)
    for given in ({"retrieval": "colbert"}, {"retrieval": "sparse"}, {"vectors": ("dense", "sparse")}):
        with pytest.raises(ConfigError, match=r"'words' (has no|gives dense)"):
            make(tmp_path / "index", model_folder, load=load, **given)
    with pytest.raises(ConfigError, match="with these, retrieval can be sparse, bm25"):
        make(tmp_path / "index", model_folder, retrieval="hybrid", vectors=("sparse",))
    assert not (tmp_path / "index").exists()


def test_a_mode_that_was_written_into_the_file_is_refused_by_ingest(tmp_path, documents, model_folder, monkeypatch):
    words.install(monkeypatch, DenseOnly)
    with make(tmp_path / "index", model_folder) as rag:
        rag.ingest(documents)
    config = tmp_path / "index" / CONFIG_FILE
    table = read_toml(config)
    config.write_text(dump_toml(table | {"retrieval": "sparse", "vectors": ["dense", "sparse", "colbert"]}))
    with RagKV.open(tmp_path / "index") as rag:
        with pytest.raises(ConfigError, match="can serve dense, hybrid and bm25"):
            rag.ingest(documents)
        with pytest.raises(RetrievalError, match="can serve dense, hybrid and bm25"):
            rag.retrieve("valves")
        assert {*index_searches(rag, rerank=False)} == {"dense", "hybrid", "bm25"}


def test_lost_vectors_are_made_again_by_repair(rag):
    kept = dict(rag.store.vectors("dense"))

    def damage(txn):
        for key in [bytes(key) for key, _ in txn.scan("vectors", b"d")]:
            txn.put("vectors", key, b"\x00" * 40)

    rag.store._live().write(damage)
    assert not rag.maintenance.verify().ok
    rag.maintenance.repair()
    assert rag.maintenance.verify().ok
    again = dict(rag.store.vectors("dense"))
    assert again.keys() == kept.keys()
    assert all((again[chunk] == kept[chunk]).all() for chunk in kept)


def test_while_the_reranker_works_the_likely_winners_kv_is_loaded_and_losers_are_dropped(
    tmp_path, documents, model_folder, monkeypatch
):
    read, loaded = [], threading.Event()

    class Waiting(WordReranker):
        """Waits until the likely winners' KV is loaded, and then reverses the order."""

        def score(self, question, texts):
            assert loaded.wait(600), "nothing was loaded while the reranker worked"
            return [float(place) * 3 for place in range(len(texts))]

    words.install(monkeypatch, reranker=Waiting)
    with make(tmp_path / "index", model_folder, memory_budget=0) as rag:
        rag.ingest(documents)
        _ = rag.model
        get_many = rag.store.get_many

        def watched(identities, **more):
            wanted = list(identities)
            found = get_many(wanted, **more)
            read.append([identity.chunk_ids for identity in wanted])
            loaded.set()
            return found

        monkeypatch.setattr(rag.store, "get_many", watched)
        answer = rag.query("Ann Lee in Varn", engine="block", top_k=2, max_new_tokens=2)
        assert "ragkv-prefetch" not in {thread.name for thread in threading.enumerate()}
    likely, *rest = read
    winners = {source.chunk_id for source in answer.sources}
    assert len(likely) == 2
    assert len(winners) == 2
    later = [ids for group in rest for ids in group]
    assert len([ids for ids in later if ids not in likely]) >= 1  # the unexpected winner
    assert not [ids for ids in later if ids in likely]  # the expected winner is not read twice
    assert (answer.kv.hits, answer.kv.misses) == (2, 0)


@pytest.mark.parametrize("mode", ["dense", "hybrid", "bm25"])
def test_an_empty_index_says_what_to_do(tmp_path, model_folder, monkeypatch, mode):
    words.install(monkeypatch)
    wanted = pytest.raises(RetrievalError, match="holds no document yet; add some with: ragkv ingest PATH")
    with make(tmp_path / "index", model_folder, retrieval=mode) as rag, wanted:
        rag.query("who?", max_new_tokens=1)


# ---- search

TEXTS = {
    "a": "the mill was founded by Mira Oskel",
    "b": "Mira Oskel plays the cello",
    "c": "the mill makes valves and valves and valves",
    "d": "a town on the river",
    "e": "",
}


def searcher(*, embedder=None, reranker=None, kinds=("dense", "sparse"), rows=None, **more):
    embedder = embedder or WordEmbedder()
    message = embedder.embed_documents(list(TEXTS.values()))
    dense, sparse, words = DenseIndex(), SparseIndex(), BM25()
    dense.update(zip(TEXTS, message.dense, strict=True), (), generation=1, embedder="x")
    sparse.update(zip(TEXTS, message.sparse, strict=True), (), generation=1, embedder="x")
    words.update(TEXTS.items(), (), generation=1, embedder="")
    colbert = dict(zip(TEXTS, message.colbert, strict=True)) if rows is None else rows
    return Searcher(
        embedder=embedder,
        indexes={"bm25": words} | {kind: {"dense": dense, "sparse": sparse}[kind] for kind in kinds},
        texts=lambda ids: {i: TEXTS[i] for i in ids if i in TEXTS},
        colbert=lambda ids: {i: colbert[i] for i in ids if i in colbert},
        reranker=reranker,
        **more,
    )


def test_scores_are_the_raw_ones_and_eqs_4_to_7():
    [best, *_] = searcher().candidates("mill valves", mode="dense", count=2)
    cosine = (1 + 3) / (math.sqrt(2) * math.sqrt(1 + 1 + 1 + 9 + 4))  # the mill makes valves*3 and*2
    assert best.chunk_id == "c"
    assert best.stages == {"dense": pytest.approx(cosine, abs=1e-6)}
    assert best.retrieval_score == best.stages["dense"]
    assert best.score == pytest.approx((cosine + 1) / 2, abs=1e-6)
    [best, *_] = searcher().candidates("mill valves", mode="sparse", count=2)
    assert best.stages == {"sparse": 4.0}
    assert best.score == pytest.approx(2 / math.pi * math.atan(4))


def test_colbert_scores_dense_candidates_by_late_interaction():
    found = searcher().candidates("cello valves", mode="colbert", count=4)
    assert {f.chunk_id: round(f.stages["colbert"], 6) for f in found if f.stages["colbert"] > 0} == {"b": 0.5, "c": 0.5}
    assert [f.chunk_id for f in found][:2] == ["b", "c"]  # a tie, by chunk id
    assert {"dense", "colbert"} == set(found[0].stages)
    assert found[0].score == pytest.approx(0.75)
    rows = {"b": WordEmbedder().embed_documents([TEXTS["b"]]).colbert[0]}
    assert [f.chunk_id for f in searcher(rows=rows).candidates("cello mill", mode="colbert", count=4)] == ["b"]


@pytest.mark.parametrize("mode", ["colbert", "hybrid"])
def test_a_chunk_that_dense_ranks_low_is_found_in_the_pool(mode):
    """ "valves" three times makes c the dense winner; d matches river and town."""
    narrow = searcher().candidates("valves town river", mode=mode, count=1, pool=1)
    wide = searcher().search("valves town river", mode=mode, top_k=1, candidates=5, rerank=False)
    assert len(narrow) == len(wide) == 1
    best = max(
        searcher().candidates("valves town river", mode=mode, count=5),
        key=lambda f: f.stages.get(mode, f.stages.get("relative")),
    )
    assert wide[0].chunk_id == best.chunk_id


@pytest.mark.parametrize("words", ["sparse", "bm25"])
@pytest.mark.parametrize("fusion", ["relative", "rrf"])
def test_hybrid_fuses_dense_and_words_and_every_chunk_has_its_cosine(words, fusion):
    """Without sparse vectors, the lexical scores are BM25's."""
    search = searcher(kinds=("dense", "sparse") if words == "sparse" else ("dense",), fusion=fusion)
    lists = [search.candidates("valves river", mode=mode, count=2) for mode in ("dense", words)]
    found = search.candidates("valves river", mode="hybrid", count=2)
    for each in found:
        wanted = 0.0
        for ranked in lists:
            scores = [one.retrieval_score for one in ranked]
            if each.chunk_id in (ids := [one.chunk_id for one in ranked]):
                at = ids.index(each.chunk_id)
                span = max(scores) - min(scores)
                relative = (scores[at] - min(scores)) / span if span else 1.0
                wanted += relative if fusion == "relative" else 1 / (60 + at + 1)
        assert each.stages[fusion] == pytest.approx(wanted)
        assert set(each.stages) <= {fusion, "dense", words}
        query, text = (WordEmbedder().embed_documents([t]).dense[0] for t in ("valves river", TEXTS[each.chunk_id]))
        assert each.retrieval_score == pytest.approx(float(np.dot(query, text)), abs=1e-6)
        assert each.score_kind == "dense"


def test_the_reranker_judges_candidates_and_the_fused_score_decides():
    judge = WordReranker()
    found = searcher(reranker=judge).search(
        "mira oskel founded the mill", mode="dense", top_k=2, candidates=3, rerank=True
    )
    assert len(judge.judged) == 3
    assert len(found) == 2
    best = found[0]
    assert (best.chunk_id, best.rerank_score) == ("a", 3.0)
    retrieval, rerank = (best.retrieval_score + 1) / 2, 1 / (1 + math.exp(-3.0))
    assert best.score == pytest.approx(2 * retrieval * rerank / (retrieval + rerank), rel=1e-6)
    assert found[0].score >= found[1].score
    judge = WordReranker()
    searcher(reranker=judge).search("mill", mode="bm25", top_k=2, candidates=9, rerank=False)
    assert judge.judged == []


def test_what_a_mode_needs_and_is_not_there_is_said():
    class DenseOnly(WordEmbedder):
        modes = frozenset(("dense",))

    with pytest.raises(RetrievalError, match='"sparse" needs; it can serve dense, hybrid and bm25'):
        searcher(embedder=DenseOnly()).candidates("x", mode="sparse", count=1)
    with pytest.raises(RetrievalError, match="no index of dense vectors"):
        searcher(kinds=("sparse",)).candidates("x", mode="hybrid", count=1)
    with pytest.raises(RetrievalError, match="no reranker"):
        searcher().search("x", mode="dense", top_k=1, candidates=1, rerank=True)
    with pytest.raises(UsageError, match="one of dense, sparse, colbert, hybrid, bm25"):
        searcher().candidates("x", mode="fuzzy", count=1)
    assert kinds_of("colbert") == {"dense", "colbert"}
    for mode in MODES:
        assert searcher().candidates("  ", mode=mode, count=3) == []


# ---- derived

KINDS: dict[str, Callable[..., Any]] = {
    "bm25": partial(Derived.index, name="bm25"),
    "dense": partial(Derived.index, name="dense", embedder="e"),
    "sparse": partial(Derived.index, name="sparse", embedder="e"),
    "fields": partial(Derived.index, name="fields"),
}
QUESTIONS: dict[str, list[Any]] = {
    "bm25": ["common", "w3 w5 w3", "w1 common w7", "nothing"],
    "dense": [np.eye(8, dtype=np.float32)[at] for at in range(3)],
    "sparse": [{"common": 1.0}, {"w3": 0.5, "w5": 2.0}],
    "fields": [{"source": ["d3"]}, {"source": ["d1*", "d?1"], "document_id": ["*1"]}, {"source": ["*"]}, {"no": ["*"]}],
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.create(tmp_path / "index") as made:
        yield made


def derived(store: Store, *, readonly: bool = False) -> Derived:
    return Derived(
        store, store.directory.parent / "derived", (lambda write: None) if readonly else lambda write: write()
    )


def write(store: Store, name: str, texts: list[str], *, salt: int = 0) -> None:
    chunks = [
        Chunk(chunk_id=f"{name}/{n}", document_id=name, ordinal=n, text=text, token_ids=(n,), start=n, end=n + 1)
        for n, text in enumerate(texts)
    ]
    rng = np.random.default_rng([len(name), *map(ord, "".join(texts)), salt])
    vectors = {}
    for chunk in chunks:
        vector = rng.standard_normal(8).astype(np.float32)
        words = chunk.text.split()
        vectors[chunk.chunk_id] = ChunkVectors(
            dense=vector / np.linalg.norm(vector), sparse={word: words.count(word) / 4 for word in words}
        )
    document = Document(document_id=name, source=name, content_hash=f"{salt}")
    references: dict[str, list[Any]] = {chunk.chunk_id: [] for chunk in chunks}
    store.write_document(document, "x" * len(texts), chunks, recipe="r", references=references, vectors=vectors)


def fill(store: Store, documents: int, chunks: int = 10) -> None:
    for number in range(documents):
        write(store, f"d{number}", [f"common w{number} w{n}" for n in range(chunks)])


def answers(kind: str, index: Any) -> list[Any]:
    if kind == "fields":
        found = map(index.chunks, QUESTIONS[kind])
        return [(documents, keys if keys is None else keys.tolist()) for documents, keys in found]
    return [index.search(question, 50) for question in QUESTIONS[kind]]


def fresh(kind: str, store: Store, tmp_path: Path) -> list[Any]:
    """The answers of an index that is built now from all chunks."""
    return answers(
        kind, KINDS[kind](Derived(store, tmp_path / "elsewhere" / str(store.generation), lambda write: None))
    )


def no_rebuild(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    """From now on, reading all chunks or vectors fails the test."""
    for name in ("vectors", "chunks", "places"):
        monkeypatch.setattr(store, name, lambda *_, name=name: pytest.fail(f"all {name} are read"))


def test_mapped_files_that_are_cut(store, tmp_path):
    """In a child process, which access to a missing page would kill."""
    fill(store, 20)
    expected = {kind: fresh(kind, store, tmp_path) for kind in KINDS}

    def require(asked: Derived) -> None:
        assert {kind: answers(kind, KINDS[kind](asked)) for kind in KINDS} == expected

    def cut() -> None:
        with Store.open(store.directory.parent) as own:
            require(derived(own))
            asked = derived(own)  # maps the saved files
            for length in (0, 4096, 1):
                require(asked)
                for path in (tmp_path / "index" / "derived").glob("*/data-*/*"):
                    os.truncate(path, min(length, path.stat().st_size))
            require(asked)
            require(derived(own, readonly=True))

    assert in_child(cut) == 0


@every_kind
def test_any_changes_by_any_process_are_followed_and_equal_a_fresh_build(kind, store, tmp_path):
    """Two processes search now and then, one of which cannot save; the writer is killed before the indexes follow."""
    rng = random.Random(5)
    fill(store, 12)
    one, other = derived(store), derived(store, readonly=True)
    for step in range(30):
        name = f"d{rng.randrange(14)}"
        if rng.random() < 0.3:
            store.delete_document(name)
        else:
            texts = [
                f"common {' '.join(f'w{rng.randrange(12)}' for _ in range(4))}" for _ in range(rng.randrange(1, 12))
            ]
            write(store, name, texts, salt=step)
        if rng.random() < 0.5:
            expected = fresh(kind, store, tmp_path)
            for process in (one, other, derived(store)):
                if rng.random() < 0.7:
                    assert answers(kind, KINDS[kind](process)) == expected
            if rng.random() < 0.3:
                one.merge(kind)
                assert answers(kind, KINDS[kind](one)) == expected


@every_kind
def test_how_far_it_is_is_told_and_who_is_told_may_end_it(kind, store, tmp_path, monkeypatch):
    """If the callback raises during a build or an update, the index is as before."""
    monkeypatch.setattr("ragkv.index.search._BATCH", 4)
    asked, result = derived(store), list[tuple[int, int]]()

    def end(done: int, total: int) -> None:
        result.append((done, total))
        if done:
            raise InterruptedError

    fill(store, 9, chunks=2)
    for _ in range(2):  # first a build, then an update
        with pytest.raises(InterruptedError):
            KINDS[kind](asked, notify=end)
        size = result[0][1]
        assert result == [(0, size), (4, size)]
        result.clear()
        KINDS[kind](asked, notify=lambda done, total: result.append((done, total)))
        assert result == [*((done, size) for done in range(0, size, 4)), (size, size)]
        assert answers(kind, KINDS[kind](asked)) == fresh(kind, store, tmp_path)
        result.clear()
        KINDS[kind](asked, notify=end)  # no changes, so no progress
        assert result == []
        for number in range(5):
            write(store, f"d{number}", [f"common w{number} again", "w1"], salt=1)


@every_kind
def test_a_change_reads_only_the_chunks_that_changed(kind, store, tmp_path, monkeypatch):
    fill(store, 40)
    asked = derived(store)
    KINDS[kind](asked)
    write(store, "d7", [f"common w{n} again" for n in range(10)], salt=1)
    write(store, "d8", [f"common w8 w{n}" for n in range(9)])  # unchanged except for one chunk, including its vectors
    store.delete_document("d9")
    expected = fresh(kind, store, tmp_path)
    no_rebuild(monkeypatch, store)
    read: list[bytes] = []
    reader = "documents_named" if kind == "fields" else "chunks_named"
    named = getattr(store, reader)
    monkeypatch.setattr(store, reader, lambda names: read.extend(names) or named(names))
    assert answers(kind, KINDS[kind](asked)) == expected
    assert len(read) == (3 if kind == "fields" else 10 + 10 + 10)
    read.clear()
    assert answers(kind, KINDS[kind](asked)) == expected
    assert answers(kind, KINDS[kind](derived(store))) == expected
    assert read == []


@every_kind
def test_another_process_takes_what_was_saved_and_only_opens_what_is_new(kind, store, tmp_path, monkeypatch):
    fill(store, 40)
    one, other = derived(store), derived(store)
    large = KINDS[kind](other).segments[0]
    KINDS[kind](one)
    write(store, "d7", ["common w5"], salt=1)
    KINDS[kind](one)
    expected = fresh(kind, store, tmp_path)
    monkeypatch.setattr(store, "changes", lambda since: pytest.fail("it follows the changes itself"))
    followed = KINDS[kind](other)
    assert followed.segments[0].data is large.data
    assert answers(kind, followed) == expected


@every_kind
def test_an_index_that_is_too_far_behind_or_ahead_is_built_again(kind, store, tmp_path, monkeypatch):
    fill(store, 5)
    asked = derived(store)
    KINDS[kind](asked)
    write(store, "d1", ["common w5"], salt=1)
    store._live().write(lambda txn: [txn.delete("changes", key) for key in list(txn.keys("changes"))])
    assert answers(kind, KINDS[kind](asked)) == fresh(kind, store, tmp_path)
    store._live().write(
        lambda txn: txn.put("meta", b"generation", (2).to_bytes(8, "big"))
    )  # as if an older copy had been restored
    write(store, "d1", ["common w7"], salt=2)
    assert answers(kind, KINDS[kind](asked)) == fresh(kind, store, tmp_path)
    assert answers(kind, KINDS[kind](derived(store))) == fresh(kind, store, tmp_path)


@every_kind
def test_an_index_that_is_being_saved_is_not_saved_by_another(kind, store, tmp_path):
    """Each would delete the other's files. The process that cannot save keeps working, and the next one saves."""
    fill(store, 3)
    folder = store.directory.parent / "derived" / kind
    KINDS[kind](derived(store))
    saved = (folder / "manifest.json").read_text()
    write(store, "d1", ["common w5"], salt=1)
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    expected = fresh(kind, store, tmp_path)
    asked = derived(store)
    assert answers(kind, KINDS[kind](asked)) == expected
    with pytest.raises(SavedElsewhereError):
        KINDS[kind](asked).save(folder)
    assert (folder / "manifest.json").read_text() == saved
    assert len(list(folder.glob("data-*"))) == 1
    os.close(descriptor)
    assert answers(kind, KINDS[kind](derived(store))) == expected
    assert (folder / "manifest.json").read_text() != saved


@every_kind
def test_files_of_the_format_before_are_replaced(kind, store):
    fill(store, 3)
    expected = answers(kind, KINDS[kind](derived(store)))
    manifest = store.directory.parent / "derived" / kind / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 2}))
    assert answers(kind, KINDS[kind](derived(store))) == expected
    assert json.loads(manifest.read_text())["format"] == 4


def test_gc_leaves_an_index_that_can_be_brought_up_to_date(store, monkeypatch):
    fill(store, 3)
    derived(store).index("bm25")
    folder = store.directory.parent / "derived"
    monkeypatch.setattr("ragkv.index.search.SETTLED_SECONDS", -(10**9))
    write(store, "d1", ["common w5"], salt=1)
    assert list(stale_derived(folder, lambda since: store.changes(since) is not None)) == []
    store._live().write(lambda txn: txn.delete("changes", store.generation.to_bytes(8, "big")))
    assert list(stale_derived(folder, lambda since: store.changes(since) is not None)) == [folder / "bm25"]
    manifest = folder / "bm25" / "manifest.json"
    for odd in (-1, 10**400, None, "1", 1.5, True):
        manifest.write_text(json.dumps({"generation": odd, "mark": ""}))
        assert list(stale_derived(folder, lambda since: store.changes(since) is not None)) in ([folder / "bm25"], [])


def test_an_index_that_another_process_deletes_meanwhile_is_no_garbage(store, monkeypatch):
    fill(store, 3)
    derived(store).index("bm25")
    folder = store.directory.parent / "derived"
    monkeypatch.setattr("ragkv.index.search.SETTLED_SECONDS", -(10**9))
    assert list(stale_derived(folder, lambda _: shutil.rmtree(folder / "bm25"))) == []
