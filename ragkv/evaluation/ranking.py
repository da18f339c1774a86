"""Measures of a ranking: recall, hit rate, reciprocal rank and nDCG of one question, and their means with an interval.

A ranking is a sequence of distinct ids, best first. Relevance maps ids to grades; an id without a grade above 0 is not
relevant. Every measure lies in [0, 1]. Without a relevant id no measure is defined, so they raise ValueError instead of
returning 0 or 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Mean", "Relevance", "hit_at", "mean", "ndcg_at", "recall_at", "reciprocal_rank"]

Relevance = Mapping[str, float]

_RESAMPLES = 2000
_BLOCK = 1 << 20  # indices drawn at a time


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """A mean over `n` questions; `ci95` is (low, high)."""

    value: float
    n: int
    ci95: tuple[float, float]


def mean(values: Sequence[float], seed: int) -> Mean:
    """The mean with a 95 % percentile bootstrap interval over questions, reproducible by `seed`.

    If all questions have the same value, the interval has no width, however many there are.
    """
    import numpy as np

    if not values:
        raise ValueError("a mean needs at least one value")
    sample = np.asarray(values, dtype=np.float64)  # (n,)
    value = math.fsum(values) / len(values)
    if sample.min() == sample.max():
        return Mean(value=value, n=len(sample), ci95=(value, value))
    rng = np.random.default_rng(seed)
    rows = max(1, _BLOCK // len(sample))
    means = [
        sample[rng.integers(len(sample), size=(min(rows, _RESAMPLES - start), len(sample)))].mean(axis=1)
        for start in range(0, _RESAMPLES, rows)
    ]
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    return Mean(value=value, n=len(sample), ci95=(float(low), float(high)))


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
