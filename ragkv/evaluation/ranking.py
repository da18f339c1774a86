"""Retrieval measures: recall, hit rate, reciprocal rank and nDCG per question, and their means with intervals.

A ranking is a sequence of distinct ids, best first. Relevance maps ids to grades; an id without a grade above 0 is not
relevant. Every measure lies in [0, 1]. Without a relevant id no measure is defined, so they raise ValueError instead of
returning 0 or 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from ragkv.evaluation.io import Progress
from ragkv.evaluation.statistics import bootstrap_mean, draw_sample

Relevance = Mapping[str, float]


def recall_at(ranked: Sequence[str], relevance: Relevance, k: int) -> float:
    """The share of all relevant ids among the first `k`. If R > k ids are relevant, it is at most k / R (trec_eval)."""
    return _found(ranked, relevance, k) / len(_relevant(relevance))


def hit_at(ranked: Sequence[str], relevance: Relevance, k: int) -> float:
    """1.0 if a relevant id is among the first `k`, else 0.0."""
    return float(_found(ranked, relevance, k) > 0)


def reciprocal_rank(ranked: Sequence[str], relevance: Relevance, k: int | None = None) -> float:
    """1 / rank of the first relevant id, or 0.0 if none is among the first `k` (None: among all)."""
    relevant = _relevant(relevance)
    for rank, found in enumerate(_head(ranked, k), start=1):
        if found in relevant:
            return 1 / rank
    return 0.0


def ndcg_at(ranked: Sequence[str], relevance: Relevance, k: int) -> float:
    """The DCG of the first `k`, divided by the DCG of the best possible ranking.

    This is trec_eval's `ndcg_cut`, which BEIR reports: DCG = Σ grade / log2(rank + 1), with the grade itself and not
    2^grade - 1.
    """
    relevant = _relevant(relevance)
    gains = [relevant.get(found, 0.0) for found in _head(ranked, k)]
    return _dcg(gains) / _dcg(sorted(relevant.values(), reverse=True)[:k])


def _found(ranked: Sequence[str], relevance: Relevance, k: int) -> int:
    relevant = _relevant(relevance)
    return sum(found in relevant for found in _head(ranked, k))


def _head(ranked: Sequence[str], k: int | None) -> Sequence[str]:
    if k is not None and k < 1:
        raise ValueError(f"k must be at least 1, not {k}")
    head = ranked[:k]
    if len(set(head)) != len(head):  # it would be counted twice
        raise ValueError("a ranking holds an id twice")
    return head


def _relevant(relevance: Relevance) -> dict[str, float]:
    relevant = {name: grade for name, grade in relevance.items() if grade > 0}
    if not relevant:
        raise ValueError("no id is relevant")
    return relevant


def _dcg(gains: Sequence[float]) -> float:
    return math.fsum(gain / math.log2(rank + 1) for rank, gain in enumerate(gains, start=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A text that can be retrieved: a benchmark's document, which is in no index."""

    passage_id: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalQuestion:
    """A question, and the ids of the passages or chunks that are relevant to it, with grades above 0.

    `excluded` is a passage that is removed from every ranking: the question itself, if the corpus contains it.
    """

    question_id: str
    question: str
    relevant: Mapping[str, float]
    excluded: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalTask:
    """A set of questions with known relevant ids.

    `unjudged` are the ids of questions without a relevant passage, for which no measure is defined. `passages` is the
    corpus, or None if it is the user's index. `notes` are sentences that a reader of the figures must know.
    """

    name: str
    judgements: Sequence[RetrievalQuestion]
    unjudged: Sequence[str] = ()
    passages: Sequence[Passage] | None = None
    notes: Sequence[str] = ()

    def sample(self, limit: int | None, seed: int) -> Self:
        """A copy with at most `limit` judged questions, drawn by `seed`, in their order. The corpus stays complete."""
        if limit is None or len(self.judgements) <= limit:
            return self
        note = f"{limit} of {len(self.judgements)} judged questions, drawn by seed {seed}"
        return replace(self, judgements=draw_sample(self.judgements, limit, seed), notes=[*self.notes, note])


Search = Callable[[str, int], Sequence[str]]
"""A function from (question, k) to at most `k` distinct ids, best first."""

MEASURES = {"recall": recall_at, "hit": hit_at, "mrr": reciprocal_rank, "ndcg": ndcg_at}


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricValue:
    """One measured mean over the `n` judged questions, with its 95 % bootstrap interval (docs/design.md)."""

    task: str
    engine: str
    metric: str
    value: float
    n: int
    ci95: tuple[float, float]
    seed: int

    def to_json(self) -> dict[str, Any]:
        """A row in the form that `ragkv eval … --json` prints."""
        return asdict(self)


def measure(
    task: RetrievalTask,
    searches: Mapping[str, Search],
    ks: Sequence[int],
    *,
    seed: int,
    on_progress: Progress | None = None,
) -> list[MetricValue]:
    """Ask every search every question and return, for each search, each measure at each of `ks`.

    Questions are the outer loop, so that searches that share an embedder embed each question once. A ranking may be
    shorter than k, if the search found nothing more.
    """
    depth = max(ks)
    values: dict[tuple[str, str], list[float]] = {
        (engine, f"{name}@{k}"): [] for engine in searches for name in MEASURES for k in ks
    }
    for done, judgement in enumerate(task.judgements):
        for engine, search in searches.items():
            if on_progress is not None:
                on_progress(done, len(task.judgements), engine)
            ranked = _ranking(search, judgement, depth)
            for name, at in MEASURES.items():
                for k in ks:
                    values[engine, f"{name}@{k}"].append(at(ranked, judgement.relevant, k))
    if on_progress is not None:
        on_progress(len(task.judgements), len(task.judgements), "")
    return [
        MetricValue(task=task.name, engine=engine, metric=metric, seed=seed, **asdict(bootstrap_mean([found], seed)))
        for (engine, metric), found in values.items()
    ]


def _ranking(search: Search, judgement: RetrievalQuestion, depth: int) -> list[str]:
    if judgement.excluded is None:
        return list(search(judgement.question, depth))
    ranked = search(judgement.question, depth + 1)
    return [found for found in ranked if found != judgement.excluded][:depth]
