"""What the parsers of all formats share: their result, sections, and how a library's log is silenced.

A parser is a function from a file's bytes to `Parsed`. The same bytes always give the same result. It raises
`Unreadable` with a reason for people. `ragkv.ingest.loader` chooses the parser of a file.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ragkv.ingest.limit import Unreadable, check_sections, check_text

__all__ = [
    "HEADING_SEPARATOR",
    "LIBRARY_LOCK",
    "Parsed",
    "Section",
    "Unreadable",
    "join_rows",
    "join_sections",
    "require_tiling",
    "sections_under",
    "silenced",
]

HEADING_SEPARATOR = " > "
_LONGEST_HEADING = 300  # characters; a heading is repeated in the path of all that is below it


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Characters `[start, end)` of a text: a page (counted from 1), the text under a heading, or a row.

    `heading` is a path ("Guide > Install"). A section that is `alone` never shares a chunk with its neighbours.
    """

    start: int
    end: int
    page: int | None = None
    heading: str | None = None
    alone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """The result of a parser. `sections` cover `text` without a gap; without any, the whole text is one section.

    `left_out` names each part that could not be read, with the reason ("page 3: damaged structure").
    """

    text: str
    sections: Sequence[Section] = ()
    title: str | None = None
    left_out: Sequence[str] = ()


LIBRARY_LOCK = threading.Lock()
"""Held while a parser changes a setting of a library that belongs to the whole process."""


@contextmanager
def silenced(name: str) -> Iterator[None]:
    """Keep a library's warnings about bad input out of the log: `Unreadable` says it. One thread at a time."""
    noisy = logging.getLogger(name)
    with LIBRARY_LOCK:
        level = noisy.level
        noisy.setLevel(logging.CRITICAL + 1)
        try:
            yield
        finally:
            noisy.setLevel(level)


def sections_under(text: str, headings: Iterable[tuple[int, int, str]]) -> list[Section]:
    """Cut a text at its headings, given in order as (offset, level, words). A section's heading is its whole path."""
    sections: list[Section] = []
    path: list[tuple[int, str]] = []
    start = named = 0

    def close(end: int) -> None:
        nonlocal named
        name = HEADING_SEPARATOR.join(words for _, words in path if words) or None
        named += len(name or "")
        check_text(named)
        check_sections(len(sections) + 1)
        sections.append(Section(start=start, end=end, heading=name))

    for position, level, name in headings:
        if position > start:
            close(position)
        if len(name) > _LONGEST_HEADING:
            name = name[: _LONGEST_HEADING - 1] + "…"
        path = [(above, words) for above, words in path if above < level] + [(level, name)]
        start = position
    if start < len(text) or not sections:
        close(len(text))
    return sections


def join_rows(rows: Iterable[tuple[str, str]]) -> tuple[str, list[Section]]:
    """One text of many records, given as (place, text), with a section for each; blank records are dropped.

    Rows never share a chunk. The row is the citation, as a page is. Neighbours in a table may have nothing to do with
    each other, so a chunk of several rows is found less well for each of them. And a row on its own keeps its tokens,
    and so its stored KV, when other rows are inserted or removed.
    """
    return join_sections((text, {"heading": place, "alone": True}) for place, text in rows)


def join_sections(parts: Iterable[tuple[str, dict[str, Any]]]) -> tuple[str, list[Section]]:
    """One text of several, joined by blank lines, with a section for each; blank ones are dropped.

    `parts` are (text, the section's fields besides its place). Raises `Unreadable` as soon as they are too much.
    """
    kept: list[tuple[str, dict[str, Any]]] = []
    size = 0
    for text, fields in parts:
        if stripped := text.strip():
            kept.append((stripped, fields))
            size += len(stripped) + 2
            check_text(size)
            check_sections(len(kept))
    sections: list[Section] = []
    start = 0
    for number, (text, fields) in enumerate(kept, start=1):
        end = start + len(text) + (0 if number == len(kept) else 2)
        sections.append(Section(start=start, end=end, **fields))
        start = end
    return "\n\n".join(text for text, _ in kept), sections


def require_tiling(text: str, sections: Sequence[Section]) -> None:
    """ValueError unless the sections cover the text from its first character to its last, one after the other."""
    ends = [0, *(section.end for section in sections)]
    if ends[-1] != len(text) or [section.start for section in sections] != ends[:-1]:
        raise ValueError("its sections do not tile the text")
