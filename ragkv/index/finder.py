"""The chunks for a question, of an index on disk, with every stage's scores."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ragkv.config import Mode
from ragkv.errors import UsageError
from ragkv.index.derived import Derived
from ragkv.index.index import Index
from ragkv.index.search import Found, Searcher, SearchSettings, kinds_of
from ragkv.index.selection import where_filter
from ragkv.retrievers import DenseConfig, ScoreKind, VectorIndex
from ragkv.types import Chunk, Document, ScoredChunk

__all__ = ["Finder"]


class Finder:
    """Searches one index on disk; threads may share one."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._store = index.store
        self._derived = Derived(index.store, index.derived, index.keeper.keep)

    def find(
        self,
        question: str,
        search: SearchSettings,
        *,
        on_candidates: Callable[[list[ScoredChunk]], None] | None = None,
    ) -> list[ScoredChunk]:
        """The best chunks, best first; `on_candidates` gets the likely winners before the reranker begins."""
        question = search.search_for or question
        mode, top_k, rerank, where = search.mode, search.top_k, search.rerank, search.where
        searcher = self.searcher(mode, rerank=rerank)
        among = self._among(where, search.only)
        if among is not None and not among:
            return []
        pool = max(top_k, search.candidates)
        found = searcher.candidates(question, mode=mode, count=pool if rerank else top_k, pool=pool, among=among)
        chunks = self._store.chunk_many(each.chunk_id for each in found)
        found = [each for each in found if each.chunk_id in chunks]  # else gone since the index was read
        if on_candidates is not None:
            on_candidates(self._scored(found[:top_k], chunks))
        if rerank and found:
            found = searcher.rerank(question, found)
        return self._scored(found[:top_k], chunks)

    def searcher(self, mode: Mode, *, rerank: bool) -> Searcher:
        """What searches now: the indexes that the mode needs, at the store's generation."""
        reranker = self._index.encoders.reranker if rerank else None
        if mode == "bm25":
            bm25 = self._derived.bm25()
            return Searcher(
                embedder=None, indexes={}, bm25=bm25, texts=self._texts, colbert=self._rows, reranker=reranker
            )
        fingerprint = self._index.encoders.require_same()
        config = DenseConfig(factory=self._index.config.index_factory)
        indexes: dict[ScoreKind, VectorIndex[Any]] = {
            kind: self._derived.vectors(kind, embedder=fingerprint, config=config)
            for kind in kinds_of(mode) - {"colbert"}
            if kind in self._index.config.vectors
        }
        return Searcher(
            embedder=self._index.encoders.embedder,
            indexes=indexes,
            bm25=None,
            texts=self._texts,
            colbert=self._rows,
            reranker=reranker,
        )

    def _texts(self, chunk_ids: Sequence[str]) -> dict[str, str]:
        return {chunk_id: chunk.text for chunk_id, chunk in self._store.chunk_many(chunk_ids).items()}

    def _rows(self, chunk_ids: Sequence[str]) -> dict[str, Any]:
        return self._store.vector_many("colbert", chunk_ids)

    def _scored(self, found: Sequence[Found], chunks: Mapping[str, Chunk]) -> list[ScoredChunk]:
        documents = {chunks[each.chunk_id].document_id for each in found}
        sources = {d: stored.document.source for d in documents if (stored := self._store.document(d))}
        return [
            ScoredChunk(
                chunk=(chunk := chunks[each.chunk_id]),
                source=sources.get(chunk.document_id, chunk.document_id),
                retrieval_score=each.retrieval_score,
                rerank_score=each.rerank_score,
                score=each.score,
                stages=each.stages,
            )
            for each in found
        ]

    def _among(self, where: Sequence[str], only: Callable[[Document, Chunk], bool] | None) -> Collection[str] | None:
        if not where and only is None:
            return None
        matches = where_filter(where)
        documents = [stored.document for stored in self._store.documents() if matches(stored.document)]
        if where and not documents:
            raise UsageError(f"No document matches --where {' '.join(where)}; ragkv stats --per-document lists them.")
        return frozenset(
            chunk.chunk_id
            for document in documents
            for chunk in self._store.chunks(document.document_id)
            if only is None or only(document, chunk)
        )
