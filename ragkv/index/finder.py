"""Find the chunks of an index on disk for a question, with the scores of every stage."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ragkv.config import Mode
from ragkv.errors import ConfigError, ModelLoadError, RetrievalError, StoreError
from ragkv.index.derived import KINDS, Derived, Tell
from ragkv.index.index import Index
from ragkv.index.inspection import select
from ragkv.index.inventory import Inventory
from ragkv.index.mode import indexes_of, refusal
from ragkv.index.search import Found, Searcher, SearchSettings
from ragkv.index.selection import where_filter
from ragkv.retrievers import DenseConfig, ScoreKind, VectorIndex
from ragkv.retrievers.roster import KeySet
from ragkv.retrievers.segment import SegmentedIndex
from ragkv.store import StoredDocument
from ragkv.store.format.vector import VECTOR_KINDS
from ragkv.store.transaction import document_key
from ragkv.types import Chunk, Document, ScoredChunk

__all__ = ["Finder"]

logger = logging.getLogger(__name__)


class Finder:
    """Searches one index on disk; threads may share one."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._store = index.store
        self._derived = Derived(index.store, index.derived, index.keeper.keep)
        self._inventory = Inventory(self._derived.fields)

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

    def documents(self, where: Sequence[str]) -> list[StoredDocument]:
        """The documents that meet `where`, in the order of their ids. UsageError if there is none.

        Where the index has none of their fields (`ragkv.index.fieldindex`), all documents are read.
        """
        if not where or not os.path.lexists(self._index.derived / "fields"):
            return select(self._store, where=where)
        holds = where_filter(where)
        ids = sorted(self._inventory.documents(where), key=document_key)
        there = filter(None, map(self._store.document, ids))  # another process may have changed or deleted some
        return [stored for stored in there if holds(stored.document)]

    def catch_up(self, *, build: bool = True, tell: Callable[[str, int, int], None] | None = None) -> None:
        """Bring the retrieval indexes that there are up to date, so that no question has to.

        `build`: also make those that the index's own mode and `--where` need. A failure is logged: questions do it.
        `tell(name, done, total)` is told how far each is; what it raises leaves the rest to the next ingest.
        """
        if not self._store.generation:
            return
        config = self._index.config
        kinds = self._store.vector_kinds() & set(config.vectors)  # as the embedder would say, which is not loaded
        known = [name for name in ("bm25", "fields", *kinds) if name in KINDS]
        wanted = {name for name in known if os.path.lexists(self._index.derived / name)}
        if build:
            wanted.update(indexes_of(config.retrieval, kinds), ("fields",))
        for name in sorted(wanted):
            try:
                self._follow(name, None if tell is None else partial(tell, name))
                self._derived.merge(name)
            except (RetrievalError, StoreError, ConfigError, ModelLoadError) as error:
                logger.info("the %s index is left to the next question: %s", name, error)

    def _follow(self, name: str, tell: Tell | None) -> None:
        """Bring the index called `name` to the store's generation."""
        if name == "fields":
            self._derived.fields(tell)
        elif name == "bm25":
            self._derived.bm25(tell)
        else:
            self._vectors(name, tell)

    def _vectors(self, name: str, tell: Tell | None = None) -> SegmentedIndex[Any, Any, Any]:
        """The index over the vectors of a kind, at the store's generation."""
        dense = DenseConfig(factory=self._index.config.index_factory)
        made_by = self._index.encoders.require_same()
        return self._derived.vectors(name, embedder=made_by, config=dense, tell=tell)  # type: ignore[arg-type]

    def searcher(self, mode: Mode, *, rerank: bool) -> Searcher:
        """A searcher over the retrieval indexes that the mode needs, at the store's generation."""
        return Searcher(**self._parts(mode, rerank=rerank))

    def _parts(self, mode: Mode, *, rerank: bool) -> dict[str, Any]:
        """What such a searcher is made of."""
        encoders, config = self._index.encoders, self._index.config
        indexes: dict[ScoreKind, VectorIndex[Any]] = {}
        searched: tuple[str, ...] = ("bm25",)
        if mode != "bm25":
            encoders.require_same()
            kinds = encoders.kinds
            if why := refusal(mode, kinds, "This index"):
                raise RetrievalError(why)
            searched = indexes_of(mode, kinds)
            for kind in VECTOR_KINDS:
                if kind in searched:
                    indexes[kind] = self._vectors(kind)
        return {
            "embedder": None if mode == "bm25" else encoders.embedder,
            "indexes": indexes,
            "bm25": self._derived.bm25() if "bm25" in searched else None,
            "texts": self._texts,
            "colbert": self._rows,
            "reranker": encoders.reranker if rerank else None,
            "fusion": config.fusion,
        }

    def _texts(self, chunk_ids: Sequence[str]) -> dict[str, str]:
        return {chunk_id: chunk.text for chunk_id, chunk in self._store.chunk_many(chunk_ids).items()}

    def _rows(self, chunk_ids: Sequence[str]) -> dict[str, Any]:
        return self._store.vector_many("colbert", chunk_ids)

    def _scored(self, found: Sequence[Found], chunks: Mapping[str, Chunk]) -> list[ScoredChunk]:
        documents = {chunks[each.chunk_id].document_id for each in found}
        sources = {d: stored.document.source for d in documents if (stored := self._store.document(d))}
        return [
            each.scored(chunk := chunks[each.chunk_id], sources.get(chunk.document_id, chunk.document_id))
            for each in found
        ]

    def _among(self, where: Sequence[str], only: Callable[[Document, Chunk], bool] | None) -> KeySet | None:
        """The chunks that may be found, or None for all. UsageError if no document meets `where`.

        `only` has to see every chunk of the documents that meet it, so that these are all read.
        """
        if only is None:
            return self._inventory.among(where) if where else None
        return KeySet.of(
            [
                chunk.chunk_id
                for stored in self.documents(where)
                for chunk in self._store.chunks(stored.document.document_id)
                if only(stored.document, chunk)
            ]
        )
