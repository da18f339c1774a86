"""The chunks for a question: a retrieval index that is never behind the store, scores raw and fused."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from ragkv.errors import RetrievalError
from ragkv.retrievers import BM25, Retriever, fuse, normalise_retrieval
from ragkv.store import Store
from ragkv.types import ScoredChunk

__all__ = ["Finder"]

logger = logging.getLogger(__name__)


class Finder:
    """Searches one index; threads may share one. `folder` is where the retrieval index is kept, which `keep` does."""

    def __init__(self, store: Store, folder: Path, keep: Callable[[Callable[[], object]], None]) -> None:
        self._store = store
        self._folder = folder
        self._keep = keep
        self._lock = threading.Lock()
        self._retriever: Retriever | None = None

    def find(self, question: str, top_k: int) -> list[ScoredChunk]:
        """The best chunks, best first, with raw and fused scores (PCED Eqs. 4-7)."""
        retriever = self.ready()
        hits = retriever.search(question, top_k)
        chunks = self._store.chunk_many(hit.chunk_id for hit in hits)
        documents = {chunk.document_id for chunk in chunks.values()}
        sources = {d: found.document.source for d in documents if (found := self._store.document(d))}
        return [
            ScoredChunk(
                chunk=chunk,
                source=sources.get(chunk.document_id, chunk.document_id),
                retrieval_score=hit.score,
                rerank_score=None,
                score=fuse(normalise_retrieval(hit.score, retriever.score_kind), None),
            )
            for hit in hits
            if (chunk := chunks.get(hit.chunk_id)) is not None  # gone since the retriever was built
        ]

    def ready(self) -> Retriever:
        """The retrieval index at the store's generation: the one at hand, read from disk, or built again."""
        with self._lock:
            generation = self._store.generation
            if self._retriever is not None and self._retriever.generation == generation:
                return self._retriever
            try:
                found: Retriever = BM25.load(self._folder)
            except RetrievalError as error:
                logger.info("retrieval index is built again: %s", error)
                found = BM25()
            if found.generation != generation:
                found = BM25()
                found.build(((chunk.chunk_id, chunk.text) for chunk in self._store.chunks()), generation)
                self._keep(lambda: found.save(self._folder))
            self._retriever = found
            return found
