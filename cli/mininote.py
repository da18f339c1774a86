"""What the bundled mini model is not made for, said once per index at an ingest and once at a question."""

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
    """Whether an ingest of `sources` should say it: mini, not said before, and a file that is no example."""
    if rag.config.model != MINI or "ingest" in _told(rag):
        return False
    from ragkv.ingest.source import find_sources

    for source in find_sources(sources)[0]:
        with suppress(OSError):  # the ingest will say that it cannot be read
            if not is_example(source.digest()):
                return True
    return False


def tell_question(rag: RagKV) -> None:
    """Say it at the first question to an index of mini that holds other documents than the examples.

    An index that cannot be written cannot remember, so nothing is said: the ingest has said it.
    """
    if rag.config.model != MINI or rag.store.readonly or "query" in _told(rag):
        return
    if any(not is_example(stored.document.content_hash) for stored in rag.store.documents()) and remember(rag, "query"):
        note(OWN_NOTE)


def remember(rag: RagKV, when: _When) -> bool:
    """Keep in the index that it was said; False where that is not possible."""
    try:
        rag.store.put_meta(_TOLD, sorted({*_told(rag), when}))
    except StoreError:
        return False
    return True


def _told(rag: RagKV) -> list[str]:
    told = rag.store.get_meta(_TOLD)
    return [when for when in told if isinstance(when, str)] if isinstance(told, list) else []
