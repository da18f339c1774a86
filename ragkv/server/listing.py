"""Indexes and documents as the server lists them."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from ragkv.config import NONE
from ragkv.engines import able_engines
from ragkv.errors import RagkvError
from ragkv.index.inspection import DocumentView, list_documents
from ragkv.index.mode import served
from ragkv.index.selection import is_pattern, values_of

if TYPE_CHECKING:
    from ragkv.pipeline import RagKV
    from ragkv.types import Document

__all__ = ["all_facts", "document_facts", "document_page"]

logger = logging.getLogger(__name__)


def index_facts(name: str, rag: RagKV) -> dict[str, Any]:
    """One index (`reply.IndexFacts`)."""
    config, stats = rag.config, rag.stats()
    return {
        "name": name,
        "documents": stats.documents,
        "chunks": stats.chunks,
        "model": config.model,
        "engines": able_engines(rag.model),
        "default_engine": config.default_engine,
        "top_k": config.top_k,
        "retrieval": list(served(() if config.embedder == NONE else config.vectors)),
        "default_retrieval": config.retrieval,
        "rerank": config.rerank and config.reranker != NONE,
        "reranker": config.reranker != NONE,
        "embedder": config.embedder != NONE,
        "writable": not rag.store.readonly,
    }


def all_facts(served: Iterable[tuple[str, RagKV]]) -> list[dict[str, Any]]:
    """The indexes that can be read: one that somebody has deleted does not hide the others. Its error if there is no
    other."""
    found: list[dict[str, Any]] = []
    failed: RagkvError | None = None
    for name, rag in served:
        try:
            found.append(index_facts(name, rag))
        except RagkvError as error:
            logger.warning("index %s is not listed: %s", name, error)
            failed = error
    if failed is not None and not found:
        raise failed
    return found


def document_page(rag: RagKV, name: str, *, after: str, limit: int) -> dict[str, Any]:
    """Documents whose source has `name` in it, or matches it as a pattern (`reply.DocumentListing`)."""
    pattern = (name if is_pattern(name) else f"*{name}*").casefold()

    def holds(document: Document) -> bool:
        return any(fnmatch.fnmatchcase(value.casefold(), pattern) for value in values_of(document, "source"))

    page = list_documents(rag.store, only=holds if name else None, after=after, limit=limit)
    return {"documents": [_facts(view) for view in page.documents], "next": page.after}


def document_facts(rag: RagKV, document_id: str) -> dict[str, Any] | None:
    """One document with its text's length (`reply.DocumentText`); None when there is none."""
    stored, text = rag.store.document(document_id), rag.store.text(document_id)
    stats = next(rag.store.document_stats([document_id]), None)
    if stored is None or stats is None:
        return None
    return {**_facts(DocumentView(document=stored.document, stats=stats)), "characters": len(text or "")}


def _facts(view: DocumentView) -> dict[str, Any]:
    document, stats = view.document, view.stats
    return {
        "document_id": document.document_id,
        "name": PurePosixPath(document.source).name or document.source,
        "source": document.source,
        "title": document.title,
        "media_type": document.media_type,
        "metadata": dict(document.metadata),
        "chunks": stats.chunks,
        "tokens": stats.tokens,
        "text_bytes": stats.text_bytes,
        "kv_bytes": stats.kv_bytes,
        "ingested_at": stats.ingested_at,
    }
