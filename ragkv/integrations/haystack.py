"""ragkv in Haystack: `RagKVRetriever`, a component that returns an index's chunks as documents."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from ragkv.errors import UsageError, extra
from ragkv.integrations.sources import source_metadata
from ragkv.pipeline import RagKV
from ragkv.types import Chunk
from ragkv.types import Document as IndexedDocument

with extra("ragkv.integrations.haystack needs haystack-ai", "haystack"):
    from haystack import Document, component, default_from_dict, default_to_dict
    from haystack.utils.filters import document_matches_filter


@component
class RagKVRetriever:
    """Returns the best chunks for `query` as documents, best first, with the fused score; the meta has `source`,
    `page`, `heading`, `snippet`, and the scores of every stage.

    Pass a `RagKV`, or the folder of an index, which is opened when it is first needed. `top_k` None is the index's
    setting; `search` holds the other arguments of `RagKV.retrieve` (`where`, `retrieval`, `rerank`, `candidates`).
    `filters` are Haystack's, over `meta.source`, `meta.title`, `meta.page`, `meta.heading`, `meta.media_type` and the
    metadata of the document; they apply before the best chunks are taken. Raises the errors of `RagKV.retrieve`.
    """

    def __init__(
        self,
        rag: RagKV | None = None,
        *,
        index: str | Path | None = None,
        top_k: int | None = None,
        filters: dict[str, Any] | None = None,
        search: Mapping[str, Any] | None = None,
        device: str | None = None,
    ) -> None:
        if (rag is None) == (index is None):
            raise UsageError("RagKVRetriever takes either a RagKV or the folder of an index.")
        self.index = str(index if rag is None else rag.folder)
        self.top_k = top_k
        self.filters = filters
        self.search = dict(search or {})
        self.device = device
        self._rag = rag

    @property
    def rag(self) -> RagKV:
        if self._rag is None:
            self._rag = RagKV.open(self.index, device=self.device)
        return self._rag

    def warm_up(self) -> None:
        """Open the index; a pipeline calls this before its first run."""
        _ = self.rag

    @component.output_types(documents=list[Document])  # type: ignore[untyped-decorator]
    def run(
        self,
        query: str,
        top_k: int | None = None,
        filters: dict[str, Any] | None = None,
        where: Sequence[str] | None = None,
    ) -> dict[str, list[Document]]:
        """The documents; what is not given is as in the constructor."""
        options: dict[str, Any] = {"top_k": self.top_k if top_k is None else top_k, **self.search}
        if where is not None:
            options["where"] = tuple(where)
        if (chosen := filters or self.filters) is not None:
            options["only"] = lambda document, chunk: document_matches_filter(chosen, _filtered(document, chunk))
        chunks = self.rag.retrieve(query, **options)
        documents = [
            Document(id=each.chunk_id, content=each.text, meta=source_metadata(each), score=each.score)
            for each in self.rag.sources(query, chunks)
        ]
        return {"documents": documents}

    @component.output_types(documents=list[Document])  # type: ignore[untyped-decorator]
    async def run_async(
        self,
        query: str,
        top_k: int | None = None,
        filters: dict[str, Any] | None = None,
        where: Sequence[str] | None = None,
    ) -> dict[str, list[Document]]:
        """`run` without blocking the event loop."""
        return await asyncio.to_thread(self.run, query, top_k, filters, where)

    def to_dict(self) -> dict[str, Any]:
        """For a pipeline's YAML: the folder of the index and the settings."""
        settings = {name: getattr(self, name) for name in ("top_k", "filters", "search", "device")}
        shown: dict[str, Any] = default_to_dict(self, index=str(Path(self.index).absolute()), **settings)
        return shown

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        loaded: Self = default_from_dict(cls, data)
        return loaded


def _filtered(document: IndexedDocument, chunk: Chunk) -> Document:
    facts = {"source": document.source, "title": document.title, "media_type": document.media_type}
    return Document(meta={**document.metadata, **facts, "page": chunk.page, "heading": chunk.heading})
