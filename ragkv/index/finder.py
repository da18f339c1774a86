"""Find the chunks of an index on disk for a question, with the scores of every stage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ragkv.config import Mode
from ragkv.errors import RetrievalError
from ragkv.index.derived import Derived
from ragkv.index.index import Index
from ragkv.index.inspection import select
from ragkv.index.mode import indexes_of, refusal
from ragkv.index.search import Found, Searcher, SearchSettings
from ragkv.retrievers import DenseConfig, ScoreKind, VectorIndex
from ragkv.store.format.vector import VECTOR_KINDS
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
        mode, top_k, rerank = search.mode, search.top_k, search.rerank
        searcher = self.searcher(mode, rerank=rerank)
        among = self._among(search.where, search.only)
        if among is not None and not among:
            return []
        pool = max(top_k, search.candidates)
        found = searcher.candidates(question, mode=mode, count=pool if rerank else top_k, pool=pool, among=among)
        chunks = self._store.chunk_many(each.chunk_id for each in found)
        # another process may have deleted a chunk after the retrieval index was read
        found = [each for each in found if each.chunk_id in chunks]
        if on_candidates is not None:
            on_candidates(self._scored(found[:top_k], chunks))
        if rerank and found:
            found = searcher.rerank(question, found)
        return self._scored(found[:top_k], chunks)

    def searcher(self, mode: Mode, *, rerank: bool) -> Searcher:
        """A searcher over the retrieval indexes that the mode needs, at the store's generation."""
        encoders, config = self._index.encoders, self._index.config
        indexes: dict[ScoreKind, VectorIndex[Any]] = {}
        searched: tuple[str, ...] = ("bm25",)
        if mode != "bm25":
            fingerprint = encoders.require_same()
            dense = DenseConfig(factory=config.index_factory)
            kinds = encoders.kinds
            if why := refusal(mode, kinds, "This index"):
                raise RetrievalError(why)
            searched = indexes_of(mode, kinds)
            for kind in VECTOR_KINDS:
                if kind in searched:
                    indexes[kind] = self._derived.vectors(kind, embedder=fingerprint, config=dense)
        return Searcher(
            embedder=None if mode == "bm25" else encoders.embedder,
            indexes=indexes,
            bm25=self._derived.bm25() if "bm25" in searched else None,
            texts=self._texts,
            colbert=self._rows,
            reranker=encoders.reranker if rerank else None,
            fusion=config.fusion,
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
        """The ids of the chunks that may be found, or None for all. UsageError if no document meets `where`."""
        if not where and only is None:
            return None
        return frozenset(
            chunk.chunk_id
            for stored in select(self._store, where=where)
            for chunk in self._store.chunks(stored.document.document_id)
            if only is None or only(stored.document, chunk)
        )
