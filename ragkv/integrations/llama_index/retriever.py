"""`RagKVRetriever`: an index's chunks for any part of LlamaIndex that takes a retriever."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Self

import llama_index.core.instrumentation as instrument
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.callbacks.base import CallbackManager
from llama_index.core.instrumentation.events.rerank import ReRankEndEvent, ReRankStartEvent
from llama_index.core.schema import NodeWithScore, QueryBundle

from ragkv.index.search import Retrieval
from ragkv.integrations.llama_index.node import RERANK, RETRIEVAL, to_nodes
from ragkv.pipeline import RagKV

__all__ = ["RagKVRetriever"]

dispatcher = instrument.get_dispatcher(__name__)


class RagKVRetriever(BaseRetriever):
    """The best chunks as nodes, best first: ids are chunk ids, `score` is the fused one, metadata has every stage's.

    `top_k` None: the index's; `search` holds the other arguments of `RagKV.retrieve` (retrieval, rerank, candidates,
    where). Async retrieval runs in a thread. Raises what `RagKV.retrieve` raises.
    """

    def __init__(
        self,
        rag: RagKV,
        *,
        top_k: int | None = None,
        search: Retrieval | None = None,
        callback_manager: CallbackManager | None = None,
        **options: Any,
    ) -> None:
        self.rag = rag
        self.top_k = top_k
        self.search = search or Retrieval()
        super().__init__(callback_manager=callback_manager, **options)

    @classmethod
    def from_index(
        cls, index: str | Path, *, top_k: int | None = None, device: str | None = None, **options: Any
    ) -> Self:
        """Open the index at a folder; `rag.close()` closes it."""
        return cls(RagKV.open(index, device=device), top_k=top_k, **options)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        nodes = to_nodes(self.rag, self.rag.retrieve(query_bundle.query_str, top_k=self.top_k, **self.search))
        if any(node.metadata[RERANK] is not None for node in nodes):
            self._tell_reranked(query_bundle, nodes)
        return nodes

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await asyncio.to_thread(self._retrieve, query_bundle)

    def _tell_reranked(self, query_bundle: QueryBundle, nodes: list[NodeWithScore]) -> None:
        """The index's own reranker works inside `RagKV.retrieve`, so its events come after the fact."""
        before = sorted(nodes, key=lambda node: -float(node.metadata[RETRIEVAL]))
        name = self.rag.config.reranker
        dispatcher.event(ReRankStartEvent(query=query_bundle, nodes=before, top_n=len(nodes), model_name=name))
        dispatcher.event(ReRankEndEvent(nodes=nodes))
