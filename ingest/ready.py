"""Documents that the caller has read and cut, as another framework's nodes are, on their way into the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ragkv.errors import UsageError
from ragkv.types import Chunk, Document

__all__ = ["ReadyChunk", "ReadyDocument"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyChunk:
    """A chunk with the caller's id, at `start` in its document's text. It may overlap other chunks."""

    chunk_id: str
    text: str
    start: int
    page: int | None = None
    heading: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyDocument:
    """A document with all of its chunks, in order.

    `document.content_hash` must change whenever any of this changes: a document with the same hash is not ingested
    again. Raises UsageError for chunks that are blank, share an id, or differ from the text at their place.
    """

    document: Document
    text: str
    chunks: Sequence[ReadyChunk]

    def __post_init__(self) -> None:
        name, seen = self.document.document_id, set[str]()
        for chunk in self.chunks:
            if chunk.chunk_id in seen:
                raise UsageError(f"Document {name!r} has two chunks called {chunk.chunk_id!r}; give each its own id.")
            if not chunk.text.strip():
                raise UsageError(f"Chunk {chunk.chunk_id!r} of document {name!r} is blank; leave it out.")
            if chunk.start < 0 or not self.text.startswith(chunk.text, chunk.start):
                raise UsageError(
                    f"Chunk {chunk.chunk_id!r} is not what document {name!r} holds at character {chunk.start}; "
                    "give it the place where its text is."
                )
            seen.add(chunk.chunk_id)
        if not name or not self.chunks:
            raise UsageError(f"Document {name!r} needs an id and at least one chunk.")

    def cut(self, token_ids: Sequence[tuple[int, ...]]) -> list[Chunk]:
        """The chunks as the store keeps them, given the model's token ids of each."""
        return [
            Chunk(
                chunk_id=chunk.chunk_id,
                document_id=self.document.document_id,
                ordinal=ordinal,
                text=chunk.text,
                token_ids=ids,
                start=chunk.start,
                end=chunk.start + len(chunk.text),
                page=chunk.page,
                heading=chunk.heading,
            )
            for ordinal, (chunk, ids) in enumerate(zip(self.chunks, token_ids, strict=True))
        ]
