"""A chunk and where it stands, as every protocol shows it."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel

from ragkv.types import Chunk

__all__ = ["ShownChunk"]


class ShownChunk(BaseModel):
    """A chunk and where it stands: `start` and `end` are characters of the document's text."""

    chunk_id: str
    document_id: str
    ordinal: int
    text: str
    start: int
    end: int
    page: int | None
    heading: str | None

    @classmethod
    def of(cls, chunk: Chunk) -> Self:
        # not validated: a text of the store may hold half of a surrogate pair
        return cls.model_construct(**{name: getattr(chunk, name) for name in cls.model_fields})
