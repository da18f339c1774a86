"""The modes of retrieval on a benchmark's corpus, whose passages are embedded in memory but never prefilled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, cast

from ragkv.config import Mode
from ragkv.doctor.io import Progress
from ragkv.doctor.metrics import RetrievalTask, Search
from ragkv.doctor.retrieval import Settings, modes_of, rerank_variants, search_name
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


CANDIDATES = 50
"""The default number of a benchmark's passages that the reranker reads."""


def load_models(
    settings: Settings,
    embedder: str | None,
    reranker: str | None,
    *,
    device: str | None = None,
    max_tokens: int | None = None,
) -> tuple[Embedder | None, Reranker | None]:
    """Load the models that are named. The embedder only computes the kinds of vectors that the modes need."""
    place = str(pick_device(device))
    kinds = None if settings.modes is None else _needed(settings.modes)
    if kinds and embedder and settings.modes is not None:
        kinds |= _kinds(settings.modes) & (embedder_modes(embedder) or frozenset())
    return (
        load_embedder(embedder, device=place, max_tokens=max_tokens, modes=kinds)
        if embedder and kinds != frozenset()
        else None,
        load_reranker(reranker, device=place) if reranker and settings.rerank is not False else None,
    )


def corpus_searches(
    task: RetrievalTask,
    settings: Settings,
    embedder: Embedder | None = None,
    reranker: Reranker | None = None,
    *,
    on_progress: Progress | None = None,
) -> dict[str, Search]:
    """The searches of a benchmark's corpus, by name. `on_progress` counts embedded passages."""
    assert task.passages is not None
    what = "this run without --embedder" if embedder is None else f"embedder {embedder.name!r}"
    modes = modes_of(settings.modes, () if embedder is None else embedder.modes, what)
    variants = rerank_variants(settings.rerank, reranker is not None, "give --reranker")
    texts = {passage.passage_id: passage.text for passage in task.passages}
    vectors: dict[ScoreKind, dict[str, Any]] = {}
    if embedder is not None and (kinds := _kinds(modes) & embedder.modes):
        vectors = {kind: {} for kind in kinds}
        for start in range(0, len(task.passages), BATCH):
            batch = task.passages[start : start + BATCH]
            embedding = embedder.embed_documents([passage.text for passage in batch])
            for kind in kinds:
                ids = [passage.passage_id for passage in batch]
                vectors[kind] |= dict(zip(ids, getattr(embedding, kind), strict=True))
            if on_progress is not None:
                on_progress(start + len(batch), len(texts), embedder.name)
    tokens = vectors.pop("colbert", {})
    searcher = build_searcher(
        texts,
        vectors={kind: pairs.items() for kind, pairs in vectors.items()},
        colbert=lambda ids: {name: tokens[name] for name in ids},
        bm25=any("bm25" in indexes_of(mode, vectors) for mode in modes),
        embedder=None if embedder is None else MemoEmbedder(embedder),
        reranker=None if reranker is None else MemoReranker(reranker),
    )
    candidates = settings.candidates or CANDIDATES

    def search(mode: Mode, rerank: bool, question: str, k: int) -> list[str]:
        hits = searcher.search(question, mode=mode, top_k=k, candidates=candidates, rerank=rerank)
        return [hit.chunk_id for hit in hits]

    return {search_name(mode, rerank): partial(search, mode, rerank) for mode in modes for rerank in variants}


def _needed(modes: Iterable[str]) -> frozenset[ScoreKind]:
    return frozenset(kind for mode in modes for kind in kinds_of(cast("Mode", mode)))


def _kinds(modes: Iterable[str]) -> frozenset[ScoreKind]:
    return frozenset(kind for mode in modes for kind in useful_kinds(cast("Mode", mode)))
