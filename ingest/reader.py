"""From a file's bytes to text with sections, the same text for the same bytes, or a plain reason why not.

What is kept is what a chunk needs to be found, prefilled and cited: headings and tables stay in the text, and
every character belongs to a section that knows its page or heading. Navigation and line wraps go.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from ragkv.errors import IngestError
from ragkv.ingest.html import read_html
from ragkv.ingest.markdown import read_markdown
from ragkv.ingest.parser import HEADING_SEPARATOR, Section, Unreadable
from ragkv.ingest.pdf import read_pdf
from ragkv.ingest.plain import BINARY, decode
from ragkv.ingest.source import MEDIA_TYPES, SourceFile, unsupported

__all__ = ["HEADING_SEPARATOR", "Section", "SourceText", "UnreadableSource", "read_source"]


class UnreadableSource(IngestError):  # noqa: N818 - a state, as `Skipped` is
    """A file yields no text; `reason` is a phrase for people, as in `Skipped`."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"Cannot read {name}: {reason}.")
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceText:
    """A read file. `sections` tile `text` without a gap; `content_hash` is the blake2b of the file's bytes."""

    text: str
    content_hash: str
    title: str | None
    sections: tuple[Section, ...]

    def __post_init__(self) -> None:
        ends = [0, *(section.end for section in self.sections)]
        if ends[-1] != len(self.text) or [section.start for section in self.sections] != ends[:-1]:
            raise ValueError("The sections of a text must tile it from its first character to its last.")


def read_source(source: SourceFile) -> SourceText:
    """Read one file. Raises `UnreadableSource`, and nothing else, for whatever is wrong with it."""
    try:
        data = source.path.read_bytes()
    except PermissionError:
        raise UnreadableSource(source.name, "permission denied") from None
    except OSError as error:
        raise UnreadableSource(source.name, (error.strerror or str(error)).lower()) from error
    if not data:
        raise UnreadableSource(source.name, "empty file")
    try:
        if source.media_type == "application/pdf":
            title, text, sections = read_pdf(data)
        elif source.media_type == "text/html":
            title, text, sections = read_html(data)
        elif source.media_type == "text/markdown":
            title, text, sections = read_markdown(decode(data))
        else:
            title, text = None, decode(data)
            sections = [Section(start=0, end=len(text))]
    except Unreadable as error:
        known = source.path.suffix.lower() in MEDIA_TYPES
        reason = str(error) if known or str(error) != BINARY else unsupported(source.path)
        raise UnreadableSource(source.name, reason) from error.__cause__
    if not text.strip():
        raise UnreadableSource(source.name, "no text found")
    content_hash = hashlib.blake2b(data).hexdigest()
    return SourceText(text=text, content_hash=content_hash, title=title, sections=tuple(sections))
