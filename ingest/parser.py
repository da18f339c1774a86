"""What the parsers of the formats share: sections, a plain reason for failing, quiet libraries.

A parser is a function from a file's bytes to `Parsed`; it raises `Unreadable` with a reason for people, and is the
same for the same bytes. `ragkv.ingest.loader` says which one a file gets.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ragkv.ingest.limit import Unreadable, check_sections, check_text

__all__ = [
    "HEADING_SEPARATOR",
    "LIBRARY_LOCK",
    "Parsed",
    "Section",
    "Unreadable",
    "join_rows",
    "sections_under",
    "silenced",
]

HEADING_SEPARATOR = " > "
_LONGEST_HEADING = 300  # characters; a heading is repeated in the path of all that is below it


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Characters `[start, end)` of a text: a page (from 1), what is under a heading ("Guide > Install"), or a row.

    A section that is `alone` never shares a chunk with its neighbours.
    """

    start: int
    end: int
    page: int | None = None
    heading: str | None = None
    alone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """What a parser found. `sections` tile `text` without a gap (none: the whole text is one).

    `left_out` names each part that could not be read, with why ("page 3: damaged structure"); the rest is good.
    """

    text: str
    sections: Sequence[Section] = ()
    title: str | None = None
    left_out: Sequence[str] = ()


LIBRARY_LOCK = threading.Lock()


@contextmanager
def silenced(name: str) -> Iterator[None]:
    """Keep a parser's remarks on bad input out of the log; our reasons say it. One thread at a time."""
    noisy = logging.getLogger(name)
    with LIBRARY_LOCK:
        level = noisy.level
        noisy.setLevel(logging.CRITICAL + 1)
        try:
            yield
        finally:
            noisy.setLevel(level)


def sections_under(text: str, headings: Iterable[tuple[int, int, str]]) -> list[Section]:
    """Cut a text at its headings, given as (offset, level, words) in order; a section is named by its path."""
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
    """One text of many records, given as (place, text), each a section of its own; blank ones are dropped.

    Rows never share a chunk, for the reasons that pages do not (the row is the citation) and two more: neighbours in
    a table need have nothing to do with each other, so that a chunk of several is found less well for each; and a
    row's chunk has the same tokens, so the same stored KV, wherever rows are inserted or dropped around it.
    """
    kept: list[tuple[str, str]] = []
    size = 0
    for place, text in rows:
        if stripped := text.strip():
            kept.append((place, stripped))
            size += len(stripped) + 2
            check_text(size)
            check_sections(len(kept))
    sections, position = [], 0
    for number, (place, text) in enumerate(kept, start=1):
        end = position + len(text) + (0 if number == len(kept) else 2)
        sections.append(Section(start=position, end=end, heading=place, alone=True))
        position = end
    return "\n\n".join(text for _, text in kept), sections
