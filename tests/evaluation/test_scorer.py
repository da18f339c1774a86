"""Chunks at hand are scored as an index would score them."""

from __future__ import annotations

import pytest
import words
from words import WordEmbedder, WordReranker

from ragkv import RagKV
from ragkv.config import MODES
from ragkv.errors import UsageError
from ragkv.evaluation.scorer import Scorer

TEXTS = (
    "Bolt Ltd makes valves for ships in Varn.",
    "Corvo Mills was founded by Ida Brandt.",
    "Halden Works was founded by Mira Oskel in 1907.",
    "Ulm lies far away.",
)
QUESTION = "Who founded Halden Works in Varn?"


@pytest.mark.parametrize("rerank", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_scores_are_those_of_an_index(tmp_path, model_folder, monkeypatch, mode, rerank):
    words.install(monkeypatch)
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.txt").write_text(text)
    settings = {"model": str(model_folder), "embedder": "words", "reranker": "words", "chunk_tokens": 128}
    with RagKV.create(tmp_path / "index", device="cpu", **settings) as rag:
        rag.ingest(*(tmp_path / f"{number}.txt" for number in range(len(TEXTS))))
        found = rag.retrieve(QUESTION, top_k=len(TEXTS), retrieval=mode, rerank=rerank)
    scorer = Scorer(embedder="words", reranker="words", device="cpu")
    ranked = scorer.rank(QUESTION, TEXTS, mode, rerank=rerank)
    assert sorted(index for index, _ in ranked) == [0, 1, 2, 3]
    assert ranked[-1][0] == 2
    by_text = {TEXTS[index]: score for index, score in ranked}
    assert {each.chunk.text: each.score for each in found} == {
        text: score for text, score in by_text.items() if score or text in {each.chunk.text for each in found}
    }
    missed = [by_text[text] for text in TEXTS if text not in {each.chunk.text for each in found}]
    assert missed == [0.0] * len(missed)
    assert ranked == sorted(ranked, key=lambda pair: pair[1]) or mode == "hybrid"  # whose order is that of ranks


def test_given_chunks_are_equal_and_keep_their_order():
    assert Scorer().rank(QUESTION, TEXTS, "given", rerank=False) == [(i, 1 - 1e-8) for i in range(4)]


def test_what_a_mode_needs_is_asked_for_before_anything_is_loaded():
    for mode, rerank, said in (("dense", False, "--embedder"), ("bm25", True, "--reranker")):
        with pytest.raises(UsageError, match=said):
            Scorer().check(mode, rerank=rerank)
    Scorer().check("bm25", rerank=False)


def test_a_context_is_embedded_once_for_all_modes_and_questions(monkeypatch):
    calls = []

    class Counting(WordEmbedder):
        def embed_documents(self, texts):
            calls.append(("embed", len(texts)))
            return super().embed_documents(texts)

    class Judge(WordReranker):
        def score(self, question, texts):
            calls.append(("judge", len(texts)))
            return super().score(question, texts)

    words.install(monkeypatch, embedder=Counting, reranker=Judge)
    scorer = Scorer(embedder="words", reranker="words", device="cpu")
    for mode in ("dense", "sparse", "colbert"):
        for question in (QUESTION, "What does Bolt Ltd make?"):
            for _ in range(2):
                scorer.rank(question, TEXTS, mode, rerank=False)
    assert [call for call in calls if call == ("embed", 4)] == [("embed", 4)]
    assert not any(kind == "judge" for kind, _ in calls)
