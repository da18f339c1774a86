"""Measuring searches on judged questions."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from benchmarkfolder import CountingEmbedder

from ragkv.evaluation.judgement import Judgement, Task
from ragkv.evaluation.memo import MemoEmbedder, MemoReranker
from ragkv.evaluation.retrieval import measure

TASK = Task(
    name="mine",
    judgements=[
        Judgement(question_id="1", question="one", relevant={"a": 1}),
        Judgement(question_id="2", question="two", relevant={"b": 1, "c": 1}),
    ],
)


def test_every_search_is_measured_on_every_question_at_every_k():
    rankings = {"one": ["x", "a", "b"], "two": ["b", "x", "c"]}
    asked: list[tuple[str, int]] = []

    def search(question: str, k: int) -> list[str]:
        asked.append((question, k))
        return rankings[question][:k]

    figures = measure(TASK, {"good": search, "nothing": lambda question, k: []}, [1, 2], seed=4)
    found = {(figure.engine, figure.metric): figure for figure in figures}
    assert asked == [("one", 2), ("two", 2)]
    assert len(figures) == len(found) == 2 * 4 * 2
    values = {metric: figure.value for (engine, metric), figure in found.items() if engine == "good"}
    assert values["recall@1"] == pytest.approx((0 + 1 / 2) / 2)
    assert values["recall@2"] == pytest.approx((1 + 1 / 2) / 2)
    assert values["hit@1"] == pytest.approx(1 / 2)
    assert values["mrr@2"] == pytest.approx((1 / 2 + 1) / 2)
    # ndcg@2: "one" 1/log2(3); "two" 1 / (1 + 1/log2(3))
    assert values["ndcg@2"] == pytest.approx((0.6309297535714575 + 1 / 1.6309297535714575) / 2)
    assert all(figure.value == 0 for (engine, _), figure in found.items() if engine == "nothing")
    row = found["good", "recall@1"].to_json()
    assert list(row) == ["task", "engine", "metric", "value", "n", "ci95", "seed"]
    assert (row["task"], row["n"], row["seed"], row["ci95"]) == ("mine", 2, 4, (0.0, 0.5))


def test_a_question_s_own_passage_is_taken_out_and_what_follows_moves_up():
    task = Task(
        name="t", judgements=[Judgement(question_id="q", question="q", relevant={"a": 1, "b": 1}, excluded="q")]
    )

    def search(question: str, k: int) -> list[str]:
        return ["q", "a", "b"][:k]

    found = {figure.metric: figure.value for figure in measure(task, {"s": search}, [2], seed=0)}
    assert found == {"recall@2": 1, "hit@2": 1, "mrr@2": 1, "ndcg@2": 1}


def test_progress_is_told():
    told: list[tuple[int, int, str]] = []
    measure(TASK, {"s": lambda question, k: []}, [1], seed=0, on_progress=lambda *step: told.append(step))
    assert told == [(0, 2, "s"), (1, 2, "s"), (2, 2, "")]


def test_a_question_is_embedded_once_for_all_modes():
    inner = CountingEmbedder()
    embedder = MemoEmbedder(inner)
    first = embedder.embed_query("one")
    assert embedder.embed_query("one") is first
    embedder.embed_query("two")
    embedder.embed_query("one")
    assert inner.asked == ["one", "two", "one"]
    assert (embedder.name, embedder.modes, embedder.fingerprint) == (inner.name, inner.modes, inner.fingerprint)
    assert len(embedder.embed_documents(["a", "b"]).dense) == 2


def test_a_text_is_judged_once_per_question():
    class Counting:
        name = "counting"

        def __init__(self) -> None:
            self.judged: list[tuple[str, str]] = []

        def score(self, question: str, texts: Sequence[str]) -> list[float]:
            self.judged += [(question, text) for text in texts]
            return [float(len(question) * 10 + len(text)) for text in texts]

    inner = Counting()
    reranker = MemoReranker(inner)
    assert reranker.score("q", ["a", "bb"]) == [11, 12]
    assert reranker.score("q", ["bb", "ccc", "bb", "a"]) == [12, 13, 12, 11]
    assert reranker.score("qq", ["a"]) == [21]
    assert reranker.score("qq", []) == []
    assert inner.judged == [("q", "a"), ("q", "bb"), ("q", "ccc"), ("qq", "a")]
