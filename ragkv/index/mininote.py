"""The warning that mini knows only the example documents; given once per index at an ingest and once at a question."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from ragkv.config import IndexConfig
from ragkv.errors import StoreError
from ragkv.ingest.source import SourceFile, find_sources
from ragkv.mini.corpus import is_example
from ragkv.model.checkpoint import MINI
from ragkv.store import Store

__all__ = ["OWN_NOTE", "ingest_note", "question_note", "remember"]

OWN_NOTE = (
    'mini knows the documents in examples/ and none of yours: most answers will be "The documents do not say." '
    "For real work ingest into another --index with --model Qwen/Qwen3-4B --embedder BAAI/bge-m3 "
    "--reranker BAAI/bge-reranker-v2-m3 (or models of your choice)."
)
_TOLD = "mini note"
_When = Literal["ingest", "query"]


def ingest_note(config: IndexConfig, store: Store, sources: Sequence[Path | SourceFile]) -> str | None:
    """The warning of an ingest, if it is due: the model is mini, it is the first time, and a file is no example."""
    if config.model != MINI or "ingest" in _told(store):
        return None
    for source in find_sources(sources)[0]:
        with suppress(OSError):  # the ingest itself will report a file that cannot be read
            if not is_example(source.digest()):
                return OWN_NOTE
    return None


def question_note(config: IndexConfig, store: Store) -> str | None:
    """The warning of the first question to an index that mini made and that holds other documents; None otherwise.

    An index that cannot be written could not remember it, so nothing is said; the ingest has said it before.
    """
    if config.model != MINI or store.readonly or "query" in _told(store):
        return None
    foreign = any(not is_example(stored.document.content_hash) for stored in store.documents())
    return OWN_NOTE if foreign and remember(store, "query") else None


def remember(store: Store, when: _When) -> bool:
    """Note in the index that the warning was given; False if the index cannot be written."""
    try:
        store.put_meta(_TOLD, sorted({*_told(store), when}))
    except StoreError:
        return False
    return True


def _told(store: Store) -> list[str]:
    told = store.get_meta(_TOLD)
    return [when for when in told if isinstance(when, str)] if isinstance(told, list) else []
