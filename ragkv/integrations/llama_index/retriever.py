"""`RagKVRetriever`: the chunks of an index, for any part of LlamaIndex that takes a retriever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import llama_index.core.instrumentation as instrument
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.callbacks.base import CallbackManager
from llama_index.core.instrumentation.events.rerank import ReRankEndEvent, ReRankStartEvent
from llama_index.core.schema import IndexNode, NodeWithScore, QueryBundle
from llama_index.core.vector_stores.types import MetadataFilters

from ragkv.errors import UsageError
from ragkv.index.search import Retrieval
from ragkv.integrations.llama_index.argument import chunk_count, refuse_unknown
from ragkv.integrations.llama_index.filter import chunk_filter, metadata_filter
from ragkv.integrations.llama_index.node import RERANK, RETRIEVAL, to_nodes
from ragkv.pipeline import RagKV
from ragkv.types import Chunk, Document

__all__ = ["RagKVRetriever"]

dispatcher = instrument.get_dispatcher(__name__)


class RagKVRetriever(BaseRetriever):
    """Returns the best chunks as nodes, best first. A node has the chunk's id, the fused score, and all raw scores.

    `top_k` (LlamaIndex calls it `similarity_top_k`) None is the index's setting. `filters` are LlamaIndex's
    `MetadataFilters`, with all operators and nesting; they apply before the best chunks are taken. `search` holds the
    other arguments of `RagKV.retrieve` (retrieval, rerank, candidates, where, only).

    Async retrieval runs in a thread. A pickle or a deep copy opens the index again. Raises what `RagKV.retrieve`
    raises, and UsageError for an invalid filter and for arguments that ragkv does not have.
    """

    def __init__(
        self,
        rag: RagKV,
        *,
        top_k: int | None = None,
        similarity_top_k: int | None = None,
        filters: MetadataFilters | None = None,
        search: Retrieval | None = None,
        callback_manager: CallbackManager | None = None,
        object_map: dict[str, Any] | None = None,
        objects: list[IndexNode] | None = None,
        verbose: bool = False,
        **unknown: Any,
    ) -> None:
        refuse_unknown(type(self), unknown)
        self.rag = rag
        self.top_k = chunk_count(top_k, similarity_top_k)
        self.filters = filters
        self.search = search or Retrieval()
        super().__init__(callback_manager=callback_manager, object_map=object_map, objects=objects, verbose=verbose)

    @classmethod
    def from_index(
        cls, index: str | Path, *, top_k: int | None = None, device: str | None = None, **options: Any
    ) -> Self:
        """Open the index at a folder; `retriever.rag.close()` closes it."""
        rag = RagKV.open(index, device=device)
        try:
            return cls(rag, top_k=top_k, **options)
        except BaseException:
            rag.close()
            raise

    @property
    def similarity_top_k(self) -> int | None:
        """LlamaIndex's name for `top_k`."""
        return self.top_k

    @similarity_top_k.setter
    def similarity_top_k(self, count: int | None) -> None:
        self.top_k = chunk_count(None, count)

    @property
    def filters(self) -> MetadataFilters | None:
        """Filters on the metadata of chunks; None for no filter."""
        return self._filters

    @filters.setter
    def filters(self, filters: MetadataFilters | None) -> None:
        if filters is not None:
            metadata_filter(filters)
        self._filters = filters

    @property
    def search(self) -> Retrieval:
        """The other arguments of `RagKV.retrieve`."""
        return self._search

    @search.setter
    def search(self, search: Retrieval) -> None:
        if unknown := [*(search.keys() - Retrieval.__annotations__.keys())]:
            raise UsageError(f"search does not take {unknown[0]!r}; it takes {', '.join(Retrieval.__annotations__)}.")
        self._search = search

    def __getstate__(self) -> dict[str, Any]:
        """Without the callback manager, whose handlers belong to this process."""
        return {key: value for key, value in self.__dict__.items() if key != "callback_manager"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.callback_manager = CallbackManager()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        search = self.search
        if self.filters is not None:
            search = Retrieval(**{**search, "only": _both(chunk_filter(self.filters), search.get("only"))})
        nodes = to_nodes(self.rag, self.rag.retrieve(query_bundle.query_str, top_k=self.top_k, **search))
        if any(node.metadata[RERANK] is not None for node in nodes):
            self._tell_reranked(query_bundle, nodes)
        return nodes

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await asyncio.to_thread(self._retrieve, query_bundle)

    def _tell_reranked(self, query_bundle: QueryBundle, nodes: list[NodeWithScore]) -> None:
        """Send the events of the index's own reranker. It runs inside `RagKV.retrieve`, so they come late."""
        before = sorted(nodes, key=lambda node: -float(node.metadata[RETRIEVAL]))
        name = self.rag.config.reranker
        dispatcher.event(ReRankStartEvent(query=query_bundle, nodes=before, top_n=len(nodes), model_name=name))
        dispatcher.event(ReRankEndEvent(nodes=nodes))


def _both(
    first: Callable[[Document, Chunk], bool], second: Callable[[Document, Chunk], bool] | None
) -> Callable[[Document, Chunk], bool]:
    if second is None:
        return first
    return lambda document, chunk: first(document, chunk) and second(document, chunk)
