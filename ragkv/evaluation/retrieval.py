"""Measure how well each way of retrieving finds relevant chunks: the figures of `ragkv eval retrieval`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ragkv.evaluation.judgement import Judgement, Task
from ragkv.evaluation.progress import Progress
from ragkv.evaluation.ranking import hit_at, mean, ndcg_at, recall_at, reciprocal_rank

__all__ = ["Figure", "Search", "measure"]

Search = Callable[[str, int], Sequence[str]]
"""A function from (question, k) to at most `k` distinct ids, best first."""

MEASURES = {"recall": recall_at, "hit": hit_at, "mrr": reciprocal_rank, "ndcg": ndcg_at}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
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
    task: Task, searches: Mapping[str, Search], ks: Sequence[int], *, seed: int, on_progress: Progress | None = None
) -> list[Figure]:
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
        Figure(task=task.name, engine=engine, metric=metric, seed=seed, **asdict(mean(found, seed)))
        for (engine, metric), found in values.items()
    ]


def _ranking(search: Search, judgement: Judgement, depth: int) -> list[str]:
    if judgement.excluded is None:
        return list(search(judgement.question, depth))
    ranked = search(judgement.question, depth + 1)
    return [found for found in ranked if found != judgement.excluded][:depth]
