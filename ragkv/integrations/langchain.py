"""ragkv in LangChain: `RagKVRetriever`, for every chain, agent and tool that takes a retriever."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from ragkv.errors import extra
from ragkv.integrations.sources import source_metadata
from ragkv.pipeline import RagKV

with extra("ragkv.integrations.langchain needs langchain-core", "langchain"):
    from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
    from langchain_core.documents import Document
    from langchain_core.retrievers import BaseRetriever
from pydantic import ConfigDict


class RagKVRetriever(BaseRetriever):  # type: ignore[misc]
    """Returns the best chunks as documents, best first; the metadata has `source`, `page`, `heading`, `snippet`, and
    the scores of every stage.

    `top_k` None is the index's setting; `search` holds the other arguments of `RagKV.retrieve` (`where`, `retrieval`,
    `rerank`, `candidates`). Both may also be given with a call: `retriever.invoke(question, where=("source=*.md",))`.
    Raises the errors of `RagKV.retrieve`; if nothing matches, the list is empty.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")
    rag: RagKV
    top_k: int | None = None
    search: Mapping[str, Any] = {}

    @classmethod
    def from_index(cls, index: str | Path, *, device: str | None = None, **options: Any) -> Self:
        """Open the index at a folder, with the fields of the class; `retriever.rag.close()` closes it."""
        rag = RagKV.open(index, device=device)
        try:
            return cls(rag=rag, **options)
        except BaseException:
            rag.close()
            raise

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **options: Any
    ) -> list[Document]:
        return self._documents(query, options)

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **options: Any
    ) -> list[Document]:
        return await asyncio.to_thread(self._documents, query, options)

    def _documents(self, query: str, options: Mapping[str, Any]) -> list[Document]:
        chunks = self.rag.retrieve(query, **{"top_k": self.top_k, **self.search, **options})
        return [
            Document(id=each.chunk_id, page_content=each.text, metadata=source_metadata(each))
            for each in self.rag.sources(query, chunks)
        ]
