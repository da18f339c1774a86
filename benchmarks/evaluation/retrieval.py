"""The modes of retrieval on a benchmark's corpus, whose passages are embedded in memory but never prefilled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache, partial
from typing import Any, cast

from ragkv.benchmarks.evaluation.metrics import bootstrap_mean, hit_at, ndcg_at
from ragkv.config import Mode
from ragkv.doctor.questions import Progress
from ragkv.doctor.retrieval import RetrievalTask, Search, measured, recall_at, reciprocal_rank, variants
from ragkv.doctor.verdicts import MetricValue
from ragkv.index.index import indexes_of, kinds_of, useful_kinds
from ragkv.index.search import Searcher
from ragkv.model.checkpoint import pick_device
from ragkv.retrievers import (
    BM25,
    DenseIndex,
    Embedder,
    Reranker,
    ScoreKind,
    SparseIndex,
    embedder_modes,
    load_embedder,
    load_reranker,
)

BATCH = 256
"""Passages that are embedded at a time."""


class MemoEmbedder:
    """An `Embedder` that embeds consecutive equal questions once."""

    def __init__(self, embedder: Embedder) -> None:
        self.name = embedder.name
        self.modes: frozenset[ScoreKind] = embedder.modes
        self.fingerprint = embedder.fingerprint
        self.embed_documents = embedder.embed_documents
        self.embed_query = lru_cache(1)(embedder.embed_query)


class MemoReranker:
    """A `Reranker` that scores each pair of question and text once.

    The last bits of a logit depend on the other texts of its batch, so they may differ from those without the memo.
    """

    def __init__(self, reranker: Reranker) -> None:
        self.name = reranker.name
        self._reranker = reranker
        self._question: str | None = None
        self._known: dict[str, float] = {}

    def score(self, question: str, texts: Sequence[str]) -> list[float]:
        if question != self._question:
            self._question, self._known = question, {}
        new = list(dict.fromkeys(text for text in texts if text not in self._known))
        self._known |= dict(zip(new, self._reranker.score(question, new), strict=True))
        return [self._known[text] for text in texts]


def build_searcher(
    texts: Mapping[str, str],
    *,
    vectors: Mapping[ScoreKind, Iterable[tuple[str, Any]]],
    colbert: Callable[[Sequence[str]], Mapping[str, Any]] | None = None,
    bm25: bool = False,
    embedder: Embedder | None = None,
    reranker: Reranker | None = None,
) -> Searcher:
    """Index `texts` in memory by id: `vectors` are pairs of (id, vector), dense or sparse.

    `colbert` returns the `(tokens, d)` arrays of some ids; `bm25` also builds a BM25 index.
    """
    indexes: dict[str, Any] = {}
    for kind, pairs in vectors.items():
        indexes[kind] = DenseIndex() if kind == "dense" else SparseIndex()
        indexes[kind].update(pairs, (), generation=1, embedder="")
    if bm25:
        indexes["bm25"] = BM25()
        indexes["bm25"].update(texts.items(), (), generation=1, embedder="")
    return Searcher(
        embedder=embedder,
        indexes=indexes,
        texts=lambda ids: {name: texts[name] for name in ids},
        colbert=colbert or (lambda ids: {}),
        reranker=reranker,
    )


MEASURES = {"recall": recall_at, "hit": hit_at, "mrr": reciprocal_rank, "ndcg": ndcg_at}


def measure(
    task: RetrievalTask,
    searches: Mapping[str, Search],
    depths: Sequence[int],
    *,
    seed: int,
    on_progress: Progress | None = None,
) -> list[MetricValue]:
    """Each measure of each search at each of `depths`, with bootstrap intervals drawn by `seed`."""
    measures = {f"{name}@{k}": partial(measure, k) for name, measure in MEASURES.items() for k in depths}
    values = measured(task, searches, measures, max(depths), on_progress=on_progress)
    return [
        MetricValue(task=task.name, engine=engine, metric=metric, seed=seed, **asdict(bootstrap_mean([scores], seed)))
        for (engine, metric), scores in values.items()
    ]


CANDIDATES = 50
"""The default number of a benchmark's passages that the reranker reads."""


def load_models(
    embedder: str | None,
    reranker: str | None,
    modes: Sequence[str] | None = None,
    *,
    rerank: bool | None = None,
    device: str | None = None,
    max_tokens: int | None = None,
) -> tuple[Embedder | None, Reranker | None]:
    """Load the models that are named. The embedder only computes the kinds of vectors that the modes need."""
    place = str(pick_device(device))
    kinds = None if modes is None else frozenset(kind for mode in modes for kind in kinds_of(cast("Mode", mode)))
    if kinds and embedder and modes is not None:
        kinds |= _kinds(modes) & (embedder_modes(embedder) or frozenset())
    return (
        load_embedder(embedder, device=place, max_tokens=max_tokens, modes=kinds)
        if embedder and kinds != frozenset()
        else None,
        load_reranker(reranker, device=place) if reranker and rerank is not False else None,
    )


def corpus_searches(
    task: RetrievalTask,
    embedder: Embedder | None = None,
    reranker: Reranker | None = None,
    modes: Sequence[str] | None = None,
    *,
    rerank: bool | None = None,
    candidates: int | None = None,
    on_progress: Progress | None = None,
) -> dict[str, Search]:
    """The searches of a benchmark's corpus, by name. `on_progress` counts embedded passages."""
    assert task.passages is not None
    texts = task.passages
    ids = list(texts)
    wanted = variants(
        modes,
        rerank,
        () if embedder is None else embedder.modes,
        "This run without --embedder" if embedder is None else f"Embedder {embedder.name!r}",
        reranker=reranker is not None,
        remedy="give --reranker",
    )
    served = {mode for _, mode, _ in wanted}
    vectors: dict[ScoreKind, dict[str, Any]] = {}
    if embedder is not None and (kinds := _kinds(served) & embedder.modes):
        vectors = {kind: {} for kind in kinds}
        for start in range(0, len(ids), BATCH):
            batch = ids[start : start + BATCH]
            embedding = embedder.embed_documents([texts[name] for name in batch])
            for kind in kinds:
                vectors[kind] |= dict(zip(batch, getattr(embedding, kind), strict=True))
            if on_progress is not None:
                on_progress(start + len(batch), len(texts), embedder.name)
    tokens = vectors.pop("colbert", {})
    searcher = build_searcher(
        texts,
        vectors={kind: pairs.items() for kind, pairs in vectors.items()},
        colbert=lambda ids: {name: tokens[name] for name in ids},
        bm25=any("bm25" in indexes_of(mode, vectors) for mode in served),
        embedder=None if embedder is None else MemoEmbedder(embedder),
        reranker=None if reranker is None else MemoReranker(reranker),
    )

    def search(mode: Mode, rerank: bool, question: str, k: int) -> list[str]:
        hits = searcher.search(question, mode=mode, top_k=k, candidates=candidates or CANDIDATES, rerank=rerank)
        return [hit.chunk_id for hit in hits]

    return {name: partial(search, mode, reranked) for name, mode, reranked in wanted}


def _kinds(modes: Iterable[str]) -> frozenset[ScoreKind]:
    return frozenset(kind for mode in modes for kind in useful_kinds(cast("Mode", mode)))
