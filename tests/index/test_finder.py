"""An index with an embedder and a reranker: ingest, questions, filters, change, loading ahead."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import words
from words import WordEmbedder, WordReranker

from ragkv import RagKV
from ragkv.boundary.toml import dump_toml, read_toml
from ragkv.config import CONFIG_FILE, load_config
from ragkv.errors import ConfigError, CorruptStoreError, RetrievalError, UsageError
from ragkv.evaluation.contender import Settings, index_searches
from ragkv.index.recall import Ahead
from ragkv.retrievers import Embedding
from ragkv.retrievers.segment import Segmented

FILES = {
    "halden.md": "# Halden Works\n\nHalden Works was founded by Mira Oskel in 1907.\n",
    "bolt.txt": "Bolt Ltd makes valves. Bolt Ltd was founded by Ann Lee in Varn.",
    "sub/tarn.md": "# Tarn\n\nTarn lies on the river Ister. Its mayor is Ann Lee.\n",
}


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    folder = tmp_path / "documents"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def make(folder: Path, model_folder, **settings) -> RagKV:
    given = {"chunk_tokens": 128, "embedder": "words", "reranker": "words"} | settings
    return RagKV.create(folder, model=str(model_folder), device="cpu", **given)


@pytest.fixture
def rag(tmp_path, documents, model_folder, monkeypatch):
    words.install(monkeypatch)
    with make(tmp_path / "index", model_folder) as made:
        made.ingest(documents)
        yield made


def test_the_default_is_dense_then_reranked_with_every_stages_score(rag):
    assert (rag.config.retrieval, rag.config.reranker) == ("dense", "words")
    answer = rag.query("Who founded Halden Works?", engine="ape", top_k=2, max_new_tokens=2)
    best = answer.to_json()["sources"][0]
    assert best["document"] == "halden.md"
    assert set(best["stages"]) == {"dense"}
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
    rag.reranker.judged.clear()
    assert len(rag.retrieve("Ann Lee", candidates=2, top_k=1)) == 1
    assert len(rag.reranker.judged) == 2
    with pytest.raises(UsageError, match="--candidates must be at least 1"):
        rag.retrieve("x", candidates=0)
    with pytest.raises(UsageError, match="one of dense"):
        rag.stream("x", retrieval="fuzzy")


@pytest.mark.parametrize(
    ("where", "sources"),
    [
        (["source=bolt.txt"], {"bolt.txt"}),
        (["source=*.md"], {"halden.md", "sub/tarn.md"}),
        (["source=tarn.md"], {"sub/tarn.md"}),
        (["source=bolt.txt", "source=halden.md"], {"bolt.txt", "halden.md"}),
        (["source=*.md", "title=Tarn"], {"sub/tarn.md"}),
        (["media_type=text/plain"], {"bolt.txt"}),
    ],
)
@pytest.mark.parametrize("mode", ["dense", "sparse", "bm25"])
def test_where_lets_only_such_documents_through(rag, where, sources, mode):
    found = {s.source for s in rag.retrieve("Ann Lee founded Tarn Halden Works", where=where, retrieval=mode)}
    assert found == sources


def test_a_condition_that_nothing_meets_or_that_is_none(rag):
    with pytest.raises(UsageError, match="No document matches --where source=nix"):
        rag.retrieve("x", where=["source=nix"])
    with pytest.raises(UsageError, match="takes FIELD=PATTERN"):
        rag.retrieve("x", where=["nix"])


def test_indexes_follow_the_documents_and_only_new_chunks_are_added(rag, documents):
    rag.retrieve("valves", retrieval="hybrid")
    (documents / "bolt.txt").write_text("Bolt Ltd makes gears now.")
    (documents / "new.txt").write_text("Nobody knows the new zither.")
    rag.embedder.embedded = 0
    rag.ingest(documents)
    assert rag.embedder.embedded == 2
    assert rag.retrieve("gears", top_k=1)[0].source == "bolt.txt"
    assert rag.retrieve("zither", top_k=1, retrieval="sparse")[0].source == "new.txt"
    assert rag.retrieve("valves", retrieval="sparse", rerank=False) == []
    rag.delete(str((documents / "new.txt").resolve()))
    assert rag.retrieve("zither", retrieval="sparse", rerank=False) == []
    assert not (rag.index.derived / "bm25").exists() or "zither" not in str(list(rag.index.derived.rglob("*")))


def test_who_writes_leaves_the_indexes_ready_and_builds_no_others(rag, documents, monkeypatch):
    derived = rag.index.derived
    assert sorted(path.name for path in derived.iterdir()) == ["dense", "fields"]
    rag.retrieve("valves", retrieval="bm25")
    (documents / "new.txt").write_text("Nobody knows the new zither.")
    rag.ingest(documents)
    assert rag.delete_many([str(documents / "bolt.txt"), "nix"]) == [str(documents / "bolt.txt")]
    monkeypatch.setattr(Segmented, "update", lambda *_, **__: pytest.fail("a question changes an index"))
    for one in (rag, RagKV.open(rag.folder, device="cpu")):
        for mode in ("bm25", "dense"):
            assert one.retrieve("new zither", retrieval=mode, top_k=1)[0].source == "new.txt"
            assert "bolt.txt" not in {found.source for found in one.retrieve("valves", retrieval=mode)}
            assert {found.source for found in one.retrieve("valves", retrieval=mode, where=["source=new*"])} <= {
                "new.txt"
            }
        one.close()
    assert sorted(path.name for path in derived.iterdir()) == ["bm25", "dense", "fields"]


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


def test_a_second_process_reads_the_saved_indexes(rag, monkeypatch):
    wanted = [s.chunk.chunk_id for s in rag.retrieve("Ann Lee", retrieval="hybrid")]
    with RagKV.open(rag.folder, device="cpu", readonly=True) as other:
        monkeypatch.setattr(other.store, "vectors", lambda kind: pytest.fail("built again"))
        assert [s.chunk.chunk_id for s in other.retrieve("Ann Lee", retrieval="hybrid")] == wanted


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
        with pytest.raises(RetrievalError, match="another version"):  # halden.md is still the other's
            changed.retrieve("valves")
        report = changed.ingest(documents, prune=True)
        assert report.kv_encoded == 0
        [best, *_] = changed.retrieve("Bolt Ltd valves")
        assert best.source == "bolt.txt"
        assert best.stages["dense"] > 0.5


def test_an_index_without_an_embedder_says_so(tmp_path, documents, model_folder):
    with make(tmp_path / "index", model_folder, embedder="none", reranker="none") as rag:
        rag.ingest(documents)
        assert rag.config.retrieval == "bm25"
        assert rag.retrieve("valves")[0].source == "bolt.txt"
        with pytest.raises(RetrievalError, match="without an embedder"):
            rag.retrieve("valves", retrieval="dense")
        with pytest.raises(RetrievalError, match="no reranker"):
            rag.retrieve("valves", rerank=True)
    with pytest.raises(ConfigError, match="needs an embedder"):
        make(tmp_path / "other", model_folder, embedder="none", retrieval="dense")


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
    """As a sentence-transformers model."""

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
        assert set(rag.verify().derived) == {"bm25", "dense", "fields"}
        assert {*index_searches(rag, Settings(rerank=False))} == {"dense", "hybrid", "bm25"}
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
        assert {*index_searches(rag, Settings(rerank=False))} == {"dense", "hybrid", "bm25"}


def test_lost_vectors_are_made_again_by_repair(rag):
    kept = dict(rag.store.vectors("dense"))

    def damage(txn):
        for key in [bytes(key) for key, _ in txn.scan("vectors", b"d")]:
            txn.put("vectors", key, b"\x00" * 40)

    rag.store._live().write(damage)
    assert not rag.verify().ok
    rag.repair()
    assert rag.verify().ok
    again = dict(rag.store.vectors("dense"))
    assert again.keys() == kept.keys()
    assert all((again[chunk] == kept[chunk]).all() for chunk in kept)


def test_while_the_reranker_works_the_likely_winners_kv_is_loaded_and_losers_are_dropped(
    tmp_path, documents, model_folder, monkeypatch
):
    read, loaded = [], threading.Event()

    class Waiting(WordReranker):
        """Wants the KV of the likely winners to come while it judges, and then reverses the order."""

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
    assert len([ids for ids in later if ids not in likely]) >= 1  # the winner that was not likely
    assert not [ids for ids in later if ids in likely]  # the one that was is not read twice
    assert (answer.kv.hits, answer.kv.misses) == (2, 0)


def test_a_store_that_fails_ahead_leaves_the_failing_to_the_answer():
    def broken():
        raise CorruptStoreError("a page is bad")

    ahead = Ahead(broken)
    assert ahead.take([]) == {}
    ahead.drop()


def test_fifty_threads_find_what_one_finds(rag):
    questions = [f"{word} {number}" for number in range(5) for word in ("Halden", "valves", "river", "Ann", "Tarn")] * 2
    modes = ["dense", "sparse", "colbert", "hybrid", "bm25"] * 10

    def ask(each):
        return [(found.chunk.chunk_id, found.score) for found in rag.retrieve(each[0], retrieval=each[1])]

    asked = list(zip(questions, modes, strict=True))
    alone = [ask(each) for each in asked]
    shutil.rmtree(rag.index.derived)
    with RagKV.open(rag.folder, device="cpu") as fresh, ThreadPoolExecutor(50) as pool:
        together = list(
            pool.map(
                lambda each: [
                    (found.chunk.chunk_id, found.score) for found in fresh.retrieve(each[0], retrieval=each[1])
                ],
                asked,
            )
        )
    assert together == alone


def test_odd_documents_are_found_or_left_alone(tmp_path, model_folder, monkeypatch):
    words.install(monkeypatch)
    folder = tmp_path / "odd"
    folder.mkdir()
    (folder / "long.txt").write_text("filler " * 5000 + "zither")
    (folder / "mixed.md").write_text("東京は日本の首都です。 Москва 😀🎻 naïve café")
    (folder / "one.txt").write_text("\n\n".join(f"word{n}" for n in range(300)))
    (folder / "space.txt").write_text(" \n \n")
    with make(tmp_path / "index", model_folder, chunk_tokens=64) as rag:
        report = rag.ingest(folder)
        assert [skipped.path.name for skipped in report.skipped] == ["space.txt"]
        for question, source in (("zither", "long.txt"), ("москва", "mixed.md"), ("word217", "one.txt")):
            for mode in ("dense", "sparse", "bm25"):
                assert rag.retrieve(question, retrieval=mode, top_k=1)[0].source == source, (question, mode)
        assert rag.retrieve("😀", retrieval="bm25") == []
        assert len(rag.retrieve("x " * 20_000 + "zither", top_k=3)) == 3


@pytest.mark.slow
def test_stored_vectors_score_as_flagembedding_does(tmp_path, documents, model_folder):
    """Oracle: `compute_score` of the mini embedder in all three modes, through the store and the indexes."""
    from FlagEmbedding import BGEM3FlagModel

    from ragkv.mini import embedder_path

    question = "Which firm did Mira Oskel bring into being?"
    oracle = BGEM3FlagModel(str(embedder_path()), use_fp16=False, devices="cpu")
    with make(tmp_path / "index", model_folder, embedder="mini", reranker="none") as rag:
        rag.ingest(documents)
        for mode in ("dense", "sparse", "colbert"):
            found = {s.chunk.text: s.stages[mode] for s in rag.retrieve(question, retrieval=mode, rerank=False)}
            pairs = [(question, text) for text in found]
            assert list(found.values()) == pytest.approx(oracle.compute_score(pairs)[mode], abs=1e-4)
            assert len(found) == 3 or mode == "sparse"


@pytest.mark.parametrize("mode", ["dense", "hybrid", "bm25"])
def test_an_empty_index_says_what_to_do(tmp_path, model_folder, monkeypatch, mode):
    words.install(monkeypatch)
    wanted = pytest.raises(RetrievalError, match="holds no document yet; add some with: ragkv ingest PATH")
    with make(tmp_path / "index", model_folder, retrieval=mode) as rag, wanted:
        rag.query("who?", max_new_tokens=1)


def test_what_an_interrupted_ingest_left_is_searched(tmp_path, documents, model_folder, monkeypatch):
    words.install(monkeypatch)
    monkeypatch.setattr("ragkv.ingest.ingester.BATCH_TOKENS", 1)  # a document at a time
    with make(tmp_path / "index", model_folder) as rag:

        def interrupt(progress):
            if progress.done_sources == 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            rag.ingest(documents, on_progress=interrupt)
        left = {stored.document.source for stored in rag.store.documents()}
        assert 0 < len(left) < 3
        assert {found.source for found in rag.retrieve("Ann Lee founded Halden")} == left
