"""A chunk's id is a hash of its place in the document, so that a lost place can be found again by trying."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from ragkv.types import Document

__all__ = ["chunk_id", "find_chunk"]


def chunk_id(document: Document, ordinal: int, start: int, end: int) -> str:
    """The id of the chunk at `text[start:end]`. Chunks of other texts, or other chunks of this one, never share it."""
    name = f"{document.document_id}\0{document.content_hash}\0{ordinal}\0{start}\0{end}"
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()


def find_chunk(
    document: Document, text: str, ordinal: int, low: int, high: int, known: Callable[[str], bool]
) -> tuple[str, int, int] | None:
    """Id, start and end of the first chunk in `text[low:high]`, found by trying which id is `known`; None if none is.

    A chunk begins and ends with a character that is not white space (`split_text`), and the first chunk begins with
    the first such character. Takes about a microsecond per character.
    """
    start = high - len(text[low:high].lstrip())
    for end in range(start + 1, high + 1):
        if text[end - 1].isspace():
            continue
        name = chunk_id(document, ordinal, start, end)
        if known(name):
            return name, start, end
    return None
