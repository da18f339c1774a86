"""From a file's bytes to text with sections, or to a reason why it cannot be read.

The same bytes always give the same text. It keeps what a chunk needs to be found, prefilled and cited: headings and
tables stay in the text, and every character belongs to a section that knows its page or heading. Navigation and line
wraps are dropped.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from ragkv.errors import IngestError
from ragkv.ingest.limit import Limits, Unreadable, limited, limits
from ragkv.ingest.loader import media_type_of, parse
from ragkv.ingest.parser import HEADING_SEPARATOR, Section, require_tiling
from ragkv.ingest.plain import BINARY
from ragkv.ingest.source import SourceFile, os_reason, unsupported

__all__ = ["HEADING_SEPARATOR", "Section", "SourceText", "UnreadableSource", "read_source"]

_LONGEST_TITLE = 1000  # characters


class UnreadableSource(IngestError):  # noqa: N818 - a state, as `Skipped` is
    """A file that gives no text; `reason` is a phrase for people, as in `Skipped`."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"Cannot read {name}: {reason}.")
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceText:
    """The text of a file. `sections` cover `text` without a gap; `content_hash` is the blake2b of the file's bytes.

    `left_out` names each part that could not be read, with the reason.
    """

    text: str
    content_hash: str
    title: str | None
    sections: tuple[Section, ...]
    left_out: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_tiling(self.text, self.sections)


def read_source(source: SourceFile, to: Limits | None = None) -> SourceText:
    """Read one file in this process. Whatever is wrong with the file, the error is an `UnreadableSource`.

    A hostile file may still take much memory and time; `ragkv.ingest.isolated` reads files in a process of its own.
    """
    with limited(to or limits()):
        return _read(source)


def _read(source: SourceFile) -> SourceText:
    try:
        limits().check_file(source.size)
        data = source.read(limits().file + 1)
        limits().check_file(len(data))
    except Unreadable as error:
        raise UnreadableSource(source.name, str(error)) from None
    except MemoryError:
        raise UnreadableSource(source.name, limits().too_much_memory()) from None
    except OSError as error:
        raise UnreadableSource(source.name, os_reason(error)) from error
    if not data:
        raise UnreadableSource(source.name, "empty file" if source.data is None else "nothing came in")
    try:
        parsed = parse(source.media_type, data)
    except Unreadable as error:
        raise UnreadableSource(source.name, _reason(source, str(error))) from error.__cause__
    if not parsed.text.strip():
        raise UnreadableSource(source.name, "no text found")
    return SourceText(
        text=parsed.text,
        content_hash=hashlib.blake2b(data).hexdigest(),
        title=parsed.title and parsed.title[:_LONGEST_TITLE],
        sections=tuple(parsed.sections) or (Section(start=0, end=len(parsed.text)),),
        left_out=tuple(parsed.left_out),
    )


def _reason(source: SourceFile, reason: str) -> str:
    """A file of an unsupported type is tried as text if it was named explicitly; if it is binary, say the type."""
    if reason != BINARY or media_type_of(source.path.suffix or "."):
        return reason
    return unsupported(source.path) if source.data is None else f"{BINARY}; say of what kind with --type"
