"""Cut a text where a reader would, so that a chunk means something on its own when it is retrieved.

Headings and pages come first, then (inside a section, by semchunk) paragraphs, sentences, clauses, words.
Offsets are exact: `source.text[chunk.start:chunk.end] == chunk.text`, in order, without overlap, and every
character that is not white space is in one chunk.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter

from ragkv.errors import ConfigError
from ragkv.ingest.reader import HEADING_SEPARATOR, Section, SourceText

__all__ = ["TextChunk", "split_text"]

TokenCounter = Callable[[str], int]

_HEAD = re.compile(r"([^\n]*(?:\n[ \t]*(?:=+|-+)(?=[ \t]*\n))?)(\s+)")
"""(a heading's line, with its underline if it has one) (the blanks below it)"""
PIECE = 1 << 17  # characters that are cut as one: what looks at a text again and again looks at so much of it
_ENDS = ("\n\n", "\n", ". ", " ")  # where a piece ends, the best first
_GLUE = "\ufffc"  # no white space, no punctuation, and no tokenizer finds it shorter than a line end


@dataclass(frozen=True, slots=True, kw_only=True)
class TextChunk:
    """A span of a text; `page` and `heading` are what a citation of it can say."""

    start: int
    end: int
    text: str
    page: int | None
    heading: str | None


def split_text(source: SourceText, *, count_tokens: TokenCounter, max_tokens: int) -> list[TextChunk]:
    """Chunks of at most `max_tokens` by `count_tokens`, never blank.

    A single character that is more than `max_tokens` on its own stays whole, as nothing can cut it.
    Sections of one page (or of a text without pages) that are small share a chunk; pages never do, because
    the page is the citation, nor do rows (`join_rows` says why). Raises `ConfigError` for a limit below 1.
    """
    if max_tokens < 1:
        raise ConfigError(f"A chunk must hold at least 1 token, not {max_tokens}; raise the chunk size.")
    count = _bounded(count_tokens, max_tokens)
    chunks = []
    for group in _groups(source, count, max_tokens):
        first = 0
        for start, end in _spans(source.text, group, count, max_tokens):
            while group[first].end <= start:
                first += 1
            last = bisect_left(group, end, lo=first, key=attrgetter("start"))
            touched = [section.heading for section in group[first:last]]
            chunks.append(
                TextChunk(
                    start=start,
                    end=end,
                    text=source.text[start:end],
                    page=group[0].page,
                    heading=_common_heading(touched),
                )
            )
    return chunks


def _bounded(count_tokens: TokenCounter, max_tokens: int) -> TokenCounter:
    """A counter that tokenises no more than it must: of a far too long text it counts the start and scales.

    The estimate is only ever returned above `max_tokens`, where the exact number decides nothing; without it,
    asking "does this fit?" of ever smaller parts of a long text would tokenise it over and over.
    """
    reach = 8 * max_tokens + 64  # characters; more than a full chunk of ordinary text

    @lru_cache(maxsize=256)  # a span is counted when it is merged and again when it is checked
    def count(text: str) -> int:
        if len(text) > reach and (tokens := count_tokens(text[:reach])) > max_tokens:
            return tokens * len(text) // reach
        return count_tokens(text)

    return count


def _groups(source: SourceText, count: TokenCounter, max_tokens: int) -> Iterator[list[Section]]:
    """Neighbouring sections that are cut as one: as many as fit, a tiny one (a bare heading) with the next.

    Sizes are added up rather than counted anew, so a group may come out a token too long; then it is cut.
    """
    group: list[Section] = []
    size = 0
    for section in source.sections:
        whole = section.end - section.start <= PIECE
        tokens = count(source.text[section.start : section.end]) if whole else max_tokens + 1
        joins = size + tokens <= max_tokens or 8 * size < max_tokens
        if group and not (joins and section.page == group[-1].page and not (section.alone or group[-1].alone)):
            yield group
            group, size = [], 0
        group.append(section)
        size += tokens
    if group:
        yield group


def _spans(text: str, group: list[Section], count: TokenCounter, max_tokens: int) -> Iterator[tuple[int, int]]:
    start, end = group[0].start, group[-1].end
    if end - start <= PIECE and count(text[start:end].strip()) <= max_tokens:
        yield from _fit(text, start, end, count, max_tokens)
        return
    body = "".join(_glued(text[section.start : section.end], section) for section in group)
    for low, high in _pieces(body):
        yield from _piece(text, body[low:high], start + low, count, max_tokens)


def _pieces(body: str) -> Iterator[tuple[int, int]]:
    """Spans of at most `PIECE` characters, each ending at the best place in its last half."""
    start = 0
    while len(body) - start > PIECE:
        middle, end = start + PIECE // 2, start + PIECE
        found = ((body.rfind(mark, middle, end), len(mark)) for mark in _ENDS)
        end = next((at + size for at, size in found if at >= 0), end)
        yield start, end
        start = end
    yield start, len(body)


def _piece(text: str, body: str, start: int, count: TokenCounter, max_tokens: int) -> Iterator[tuple[int, int]]:
    """Spans of the text where a piece of its body lies, from `start` on."""
    from semchunk import chunk

    offsets = [(0, len(body))]
    if body.strip():
        # semchunk recurses once per distinct run of white space. Text with hundreds of them is no prose: it
        # stays whole here and is cut at words by `_fit`.
        with suppress(RecursionError):
            # memoize=True would keep every piece of every document in a global cache.
            _, offsets = chunk(body, max_tokens, count, memoize=False, offsets=True)
    for low, high in offsets:
        yield from _fit(text, start + low, start + high, count, max_tokens)


def _glued(body: str, section: Section) -> str:
    """The section, equally long, with nothing to cut at between its heading and the first words below.

    A heading that stood alone before a paragraph of several chunks would say nothing, yet rank high.
    """
    if section.heading is None or (head := _HEAD.match(body)) is None:
        return body
    return head[1].replace("\n", _GLUE) + _GLUE * len(head[2]) + body[head.end() :]


def _fit(text: str, start: int, end: int, count: TokenCounter, max_tokens: int) -> Iterator[tuple[int, int]]:
    """Trim a span and, if it is still too long, cut it at words, or inside a word longer than a chunk."""
    while True:
        start, end = _trim(text, start, end)
        if start == end:
            return
        if end - start == 1 or count(text[start:end]) <= max_tokens:
            yield start, end
            return
        cut = _longest_prefix(text, start, end, count, max_tokens)
        yield _trim(text, start, cut)
        start = cut


def _trim(text: str, start: int, end: int) -> tuple[int, int]:
    piece = text[start:end].rstrip()
    return start + len(piece) - len(piece.lstrip()), start + len(piece)


def _longest_prefix(text: str, start: int, end: int, count: TokenCounter, max_tokens: int) -> int:
    """Where to cut `text[start:end]` so that the first part fits: at white space if it has any late."""
    low, high = 1, 2 * max_tokens  # in characters; `low` always fits or cannot be helped
    while start + high < end and count(text[start : start + high]) <= max_tokens:
        low, high = high, 2 * high
    high = min(high, end - start)
    while high - low > 1:
        middle = (low + high) // 2
        if count(text[start : start + middle]) <= max_tokens:
            low = middle
        else:
            high = middle
    if not text[start + low].isspace():
        for size in range(low, low // 2, -1):
            if text[start + size - 1].isspace():
                low = size
                break
    # Counters are nearly monotone in the length; this makes the limit hold where one is not.
    while low > 1 and count(text[start : start + low].rstrip()) > max_tokens:
        low -= 1
    return start + low


def _common_heading(headings: list[str | None]) -> str | None:
    """The deepest heading above all that a chunk touches; if they share none, where the chunk begins."""
    paths = [(heading or "").split(HEADING_SEPARATOR) for heading in headings]
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return HEADING_SEPARATOR.join(shared) or next((heading for heading in headings if heading), None)
