"""Cut a text where a reader would cut it, so that a retrieved chunk means something on its own.

The text is cut at pages and headings first. Inside a section semchunk cuts at paragraphs, then sentences, clauses and
words. Offsets are exact: `source.text[chunk.start:chunk.end] == chunk.text`. Chunks are in order and do not overlap,
and every character that is not white space is in exactly one chunk.
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
PIECE = 1 << 17  # characters cut at a time: semchunk scans its input many times, which is too slow for a whole book
_ENDS = ("\n\n", "\n", ". ", " ")  # where a piece may end, the best place first
_GLUE = "\ufffc"  # neither white space nor punctuation, and in no tokenizer shorter than a line end


@dataclass(frozen=True, slots=True, kw_only=True)
class TextChunk:
    """A span of a text; `page` and `heading` are for its citation."""

    start: int
    end: int
    text: str
    page: int | None
    heading: str | None


def split_text(source: SourceText, *, count_tokens: TokenCounter, max_tokens: int) -> list[TextChunk]:
    """Cut a text into chunks of at most `max_tokens` tokens, as `count_tokens` counts them. No chunk is blank.

    Small sections of one page (or of a text without pages) share a chunk. Pages never share one, because the page is
    the citation; nor do rows (`join_rows` says why). A single character of more than `max_tokens` tokens stays whole.
    Raises `ConfigError` for a limit below 1.
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
    """A counter that tokenises only the start of a text that is far too long, and scales up the count.

    It returns an estimate only above `max_tokens`, where the exact number decides nothing. Without it, asking "does
    this fit?" for ever smaller parts of a long text would tokenise the text over and over.
    """
    reach = 8 * max_tokens + 64  # characters; more than a full chunk of ordinary text

    @lru_cache(maxsize=256)  # semchunk counts a span when it merges it, and `_fit` counts it again
    def count(text: str) -> int:
        if len(text) > reach and (tokens := count_tokens(text[:reach])) > max_tokens:
            return tokens * len(text) // reach
        return count_tokens(text)

    return count


def _groups(source: SourceText, count: TokenCounter, max_tokens: int) -> Iterator[list[Section]]:
    """Neighbouring sections that are cut together: as many as fit into a chunk, and a tiny one with the next.

    A tiny section is often a heading without text. Sizes are added up and not counted again, so a group may be a token
    too long; then it is cut.
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
        # semchunk recurses once for each distinct run of white space. A text with hundreds of them is not prose;
        # if the recursion gets too deep, the piece stays whole here and `_fit` cuts it at words.
        with suppress(RecursionError):
            # memoize=True would keep every piece of every document in a global cache
            _, offsets = chunk(body, max_tokens, count, memoize=False, offsets=True)
    for low, high in offsets:
        yield from _fit(text, start + low, start + high, count, max_tokens)


def _glued(body: str, section: Section) -> str:
    """The section with its heading glued to the first words below it, so that semchunk does not cut between them.

    The length stays the same, so that offsets hold. A chunk of nothing but a heading would rank high in a search and
    answer nothing.
    """
    if section.heading is None or (head := _HEAD.match(body)) is None:
        return body
    return head[1].replace("\n", _GLUE) + _GLUE * len(head[2]) + body[head.end() :]


def _fit(text: str, start: int, end: int, count: TokenCounter, max_tokens: int) -> Iterator[tuple[int, int]]:
    """Trim a span. If it is still too long, cut it at words, or inside a word that is longer than a chunk."""
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
    """Where to cut `text[start:end]` so that the first part fits: at white space, if the second half has any."""
    low, high = 1, 2 * max_tokens  # in characters; `low` fits, or is the one character that cannot be cut
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
    # The search above assumes that a longer text has more tokens. This is nearly always so; where it is not, this
    # loop makes the limit hold.
    while low > 1 and count(text[start : start + low].rstrip()) > max_tokens:
        low -= 1
    return start + low


def _common_heading(headings: list[str | None]) -> str | None:
    """The deepest heading above everything in a chunk; if there is none, the first heading in it."""
    paths = [(heading or "").split(HEADING_SEPARATOR) for heading in headings]
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return HEADING_SEPARATOR.join(shared) or next((heading for heading in headings if heading), None)
