"""The warning that mini knows only the example documents; given once per index at an ingest and once at a question."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Literal

from ragkv.cli.console import note
from ragkv.errors import StoreError
from ragkv.mini.corpus import is_example
from ragkv.model.checkpoint import MINI

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ragkv.ingest import SourceFile
    from ragkv.pipeline import RagKV

__all__ = ["OWN_NOTE", "may_tell", "remember", "tell_question"]

OWN_NOTE = (
    'mini knows the documents in examples/ and none of yours: most answers will be "The documents do not say." '
    "For real work ingest into another --index with --model Qwen/Qwen3-4B --embedder BAAI/bge-m3 "
    "--reranker BAAI/bge-reranker-v2-m3 (or models of your choice)."
)
_TOLD = "mini note"
_When = Literal["ingest", "query"]


def may_tell(rag: RagKV, sources: Sequence[Path | SourceFile]) -> bool:
    """Whether an ingest should give the warning: the model is mini, it is the first time, and a file is no example."""
    if rag.config.model != MINI or "ingest" in _told(rag):
        return False
    from ragkv.ingest.source import find_sources

    for source in find_sources(sources)[0]:
        with suppress(OSError):  # the ingest itself will report a file that cannot be read
            if not is_example(source.digest()):
                return True
    return False


def tell_question(rag: RagKV) -> None:
    """Give the warning at the first question to an index that mini made and that holds other documents.

    An index that cannot be written could not remember it, so nothing is said; the ingest has said it before.
    """
    if rag.config.model != MINI or rag.store.readonly or "query" in _told(rag):
        return
    if any(not is_example(stored.document.content_hash) for stored in rag.store.documents()) and remember(rag, "query"):
        note(OWN_NOTE)


def remember(rag: RagKV, when: _When) -> bool:
    """Note in the index that the warning was given; False if the index cannot be written."""
    try:
        rag.store.put_meta(_TOLD, sorted({*_told(rag), when}))
    except StoreError:
        return False
    return True


def _told(rag: RagKV) -> list[str]:
    told = rag.store.get_meta(_TOLD)
    return [when for when in told if isinstance(when, str)] if isinstance(told, list) else []
