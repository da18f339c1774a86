"""Every mode, the reranker and the scores, on vectors that can be worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from words import WordEmbedder, WordReranker

from ragkv.config import MODES
from ragkv.errors import RetrievalError, UsageError
from ragkv.index.mode import kinds_of
from ragkv.index.search import Searcher
from ragkv.retrievers import BM25, DenseIndex, SparseIndex

TEXTS = {
    "a": "the mill was founded by Mira Oskel",
    "b": "Mira Oskel plays the cello",
    "c": "the mill makes valves and valves and valves",
    "d": "a town on the river",
    "e": "",
}


def searcher(*, embedder=None, reranker=None, kinds=("dense", "sparse"), rows=None, **more):
    embedder = embedder or WordEmbedder()
    said = embedder.embed_documents(list(TEXTS.values()))
    dense, sparse, words = DenseIndex(), SparseIndex(), BM25()
    dense.update(zip(TEXTS, said.dense, strict=True), (), generation=1, embedder="x")
    sparse.update(zip(TEXTS, said.sparse, strict=True), (), generation=1, embedder="x")
    words.build(TEXTS.items(), 1)
    colbert = dict(zip(TEXTS, said.colbert, strict=True)) if rows is None else rows
    return Searcher(
        embedder=embedder,
        indexes={kind: index for kind, index in (("dense", dense), ("sparse", sparse)) if kind in kinds},
        bm25=words,
        texts=lambda ids: {i: TEXTS[i] for i in ids if i in TEXTS},
        colbert=lambda ids: {i: colbert[i] for i in ids if i in colbert},
        reranker=reranker,
        **more,
    )


@pytest.mark.parametrize("mode", MODES)
def test_the_passage_with_the_questions_words_comes_first(mode):
    found = searcher().candidates("who founded the mill", mode=mode, count=3)
    assert found[0].chunk_id == "a"
    assert [f.score for f in found] == sorted((f.score for f in found), reverse=True) or mode == "hybrid"
    assert all(0 <= f.score < 1 for f in found)
    assert "e" not in {f.chunk_id for f in found}


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


def test_colbert_scores_the_candidates_of_the_dense_index_by_late_interaction():
    found = searcher().candidates("cello valves", mode="colbert", count=4)
    assert {f.chunk_id: round(f.stages["colbert"], 6) for f in found if f.stages["colbert"] > 0} == {"b": 0.5, "c": 0.5}
    assert [f.chunk_id for f in found][:2] == ["b", "c"]  # a tie, by chunk id
    assert {"dense", "colbert"} == set(found[0].stages)
    assert found[0].score == pytest.approx(0.75)


@pytest.mark.parametrize("mode", ["colbert", "hybrid"])
def test_a_chunk_that_dense_ranks_low_is_found_in_the_pool(mode):
    """ "valves" three times makes c the dense winner; river and town are as many matches of d."""
    narrow = searcher().candidates("valves town river", mode=mode, count=1, pool=1)
    wide = searcher().search("valves town river", mode=mode, top_k=1, candidates=5, rerank=False)
    assert len(narrow) == len(wide) == 1
    best = max(
        searcher().candidates("valves town river", mode=mode, count=5),
        key=lambda f: f.stages.get(mode, f.stages.get("relative")),
    )
    assert wide[0].chunk_id == best.chunk_id


def test_colbert_leaves_out_a_chunk_whose_vectors_are_gone():
    rows = {"b": WordEmbedder().embed_documents([TEXTS["b"]]).colbert[0]}
    assert [f.chunk_id for f in searcher(rows=rows).candidates("cello mill", mode="colbert", count=4)] == ["b"]


@pytest.mark.parametrize("words", ["sparse", "bm25"])
@pytest.mark.parametrize("fusion", ["relative", "rrf"])
def test_hybrid_fuses_dense_and_words_and_every_chunk_has_its_cosine(words, fusion):
    """Where there are no sparse vectors, the words are BM25's."""
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


def test_without_reranking_the_reranker_reads_nothing():
    judge = WordReranker()
    searcher(reranker=judge).search("mill", mode="bm25", top_k=2, candidates=9, rerank=False)
    assert judge.judged == []


@pytest.mark.parametrize("mode", MODES)
def test_among_finds_the_best_of_those_however_far_down(mode):
    found = searcher().candidates("the mill on the river", mode=mode, count=2, among={"b"})
    assert {f.chunk_id for f in found} <= {"b"}
    assert mode == "colbert" or found


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


def test_a_question_without_words_finds_nothing_and_breaks_nothing():
    for mode in MODES:
        assert searcher().candidates("  ", mode=mode, count=3) == []
