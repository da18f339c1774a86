"""Look at documents and chunks of an index, and at everything stored for them, without loading a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import numpy as np

from ragkv.errors import UsageError
from ragkv.index.selection import match, unmatched, where_filter
from ragkv.store import DocumentStats, KVRecord, Store, StoredDocument
from ragkv.store.format.vector import VECTOR_KINDS
from ragkv.store.transaction import document_key
from ragkv.types import Chunk, Document

__all__ = ["ChunkView", "DocumentPage", "DocumentView", "chunk_named", "list_documents", "look_at", "select"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkView:
    """A chunk with everything stored for it. `vectors` describes each kind; `before` and `after` are its neighbours."""

    chunk: Chunk
    document: Document
    kv: tuple[KVRecord, ...]
    vectors: dict[str, str]
    before: Chunk | None
    after: Chunk | None

    def to_json(self) -> dict[str, Any]:
        """What `ragkv show --json` prints."""
        chunk = asdict(self.chunk)
        return {
            **{key: value for key, value in chunk.items() if key not in ("token_ids", "document_id")},
            "tokens": len(self.chunk.token_ids),
            "document": {**asdict(self.document), "metadata": dict(self.document.metadata)},
            "kv": [asdict(record) for record in self.kv],
            "vectors": self.vectors,
            "before": None if self.before is None else self.before.chunk_id,
            "after": None if self.after is None else self.after.chunk_id,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentView:
    """A document with the sizes of what is stored for it."""

    document: Document
    stats: DocumentStats

    def to_json(self) -> dict[str, Any]:
        """One of what `ragkv ls --json` prints."""
        return {
            **self.stats.to_json(),
            "media_type": self.document.media_type,
            "title": self.document.title,
            "metadata": dict(self.document.metadata),
        }


def select(store: Store, names: Sequence[str] = (), where: Sequence[str] = ()) -> list[StoredDocument]:
    """The documents that `names` mean and that meet the conditions `where`; without names, all that meet them.

    Raises UsageError for a name that means no document or several (`match`), and if no document meets `where`.
    """
    holds = where_filter(where)
    found = list(store.documents())
    chosen = [one for one in (match(found, names) if names else found) if holds(one.document)]
    if where and not chosen:
        raise UsageError(unmatched(where))
    return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentPage:
    """Some of the documents, in the order of their ids. `after` is the id that the next page comes behind, None on the
    last page."""

    documents: tuple[DocumentView, ...]
    after: str | None


def list_documents(
    store: Store,
    chosen: Iterable[StoredDocument] | None = None,
    *,
    only: Callable[[Document], bool] | None = None,
    after: str = "",
    limit: int | None = None,
) -> DocumentPage:
    """Of the documents `chosen`, those for which `only` holds, with their sizes, in the order of their ids: at most
    `limit` behind the id `after`.

    None chooses all documents. Then only rows up to the last one that is returned are read.
    """
    if chosen is not None:
        ordered = sorted((one.document for one in chosen), key=_place)
        found: Iterator[Document] = iter([one for one in ordered if not after or _place(one) > document_key(after)])
    else:
        found = (stored.document for stored in store.documents(after=after))
    if only is not None:
        found = filter(only, found)
    shown = {document.document_id: document for document in islice(found, limit)}
    more = next(found, None) is not None
    views = tuple(DocumentView(document=shown[stats.document], stats=stats) for stats in store.document_stats(shown))
    return DocumentPage(documents=views, after=list(shown)[-1] if more and shown else None)


def _place(document: Document) -> bytes:
    return document_key(document.document_id)


def chunk_named(store: Store, name: str) -> Chunk:
    """The chunk with this id, with this unique beginning of an id, or at DOCUMENT:ORDINAL; UsageError if none."""
    if not name.strip():
        raise UsageError("Name a chunk: an id, the start of one, or DOCUMENT:ORDINAL as in notes.md:0.")
    if (whole := store.chunk(name)) is not None:
        return whole
    document, colon, ordinal = name.rpartition(":")
    if colon and document and ordinal.isascii() and ordinal.isdecimal():
        [stored] = _one(match(list(store.documents()), [document]), document)
        for chunk in islice(store.chunks(stored.document.document_id), int(ordinal), None):
            return chunk
        raise UsageError(f"{document} ends with chunk {stored.chunks - 1} (the first is 0); there is no {ordinal}.")
    found = list(islice((chunk for chunk in store.chunks() if chunk.chunk_id.startswith(name)), 4))
    if not found:
        raise UsageError(
            f"No chunk's id begins with {name!r}; ragkv query --json names those of an answer, and DOCUMENT:ORDINAL "
            "means one of a document that ragkv ls lists."
        )
    if len(found) > 1:
        ids = ", ".join(chunk.chunk_id for chunk in found[:3])
        raise UsageError(f"{name!r} begins several ids ({ids}{', …' if len(found) > 3 else ''}); write more of it.")
    return found[0]


def look_at(store: Store, chunk: Chunk) -> ChunkView:
    """Everything that is stored for a chunk."""
    stored = store.document(chunk.document_id)
    if stored is None:
        raise UsageError(f"The document of chunk {chunk.chunk_id} is gone: another process has deleted it.")
    start = max(0, chunk.ordinal - 1)
    around = {one.ordinal: one for one in islice(store.chunks(chunk.document_id), start, chunk.ordinal + 2)}
    vectors: dict[str, str] = {}
    for kind in VECTOR_KINDS:
        vector = store.vector_many(kind, [chunk.chunk_id]).get(chunk.chunk_id)
        if isinstance(vector, np.ndarray):
            vectors[kind] = f"{' x '.join(map(str, vector.shape))} {vector.dtype}"
        elif vector is not None:
            vectors[kind] = f"{len(vector)} weights"
    return ChunkView(
        chunk=chunk,
        document=stored.document,
        kv=tuple(store.kv_of(chunk.chunk_id)),
        vectors=vectors,
        before=around.get(chunk.ordinal - 1),
        after=around.get(chunk.ordinal + 1),
    )


def _one(found: list[StoredDocument], name: str) -> list[StoredDocument]:
    if len(found) > 1:
        raise UsageError(f"{name!r} means {len(found)} documents, and a chunk belongs to one; name one.")
    return found
