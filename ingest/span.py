"""A chunk's id is a hash of where it stands, so that a span that was lost can be found by trying."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from ragkv.types import Document

__all__ = ["chunk_id", "find_chunk"]


def chunk_id(document: Document, ordinal: int, start: int, end: int) -> str:
    """The id of the chunk at `text[start:end]`: another text, or other chunks of it, never share one."""
    name = f"{document.document_id}\0{document.content_hash}\0{ordinal}\0{start}\0{end}"
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()


def find_chunk(
    document: Document, text: str, ordinal: int, low: int, high: int, known: Callable[[str], bool]
) -> tuple[str, int, int] | None:
    """Id, start and end of the chunk that begins `text[low:high]`, by whose id is `known`; None when none is.

    Chunks begin and end with a character that is no white space (`split_text`), and the first one of a stretch begins
    where the stretch does. About a microsecond per character.
    """
    start = high - len(text[low:high].lstrip())
    for end in range(start + 1, high + 1):
        if text[end - 1].isspace():
            continue
        name = chunk_id(document, ordinal, start, end)
        if known(name):
            return name, start, end
    return None
