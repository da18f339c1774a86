"""Cut a text into chunks at pages and headings first, so that each chunk can be understood alone.

Inside a section semchunk cuts at paragraphs, then sentences, clauses and words. Offsets are exact:
`source.text[chunk.start:chunk.end] == chunk.text`. Chunks are in order and do not overlap, and every character that is
not white space is in exactly one chunk. A chunk's id is a hash of its span in the document, so `repair` can find a lost
span by trying.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from operator import attrgetter

from ragkv.errors import ConfigError
from ragkv.ingest.parser import HEADING_SEPARATOR, Section
from ragkv.ingest.sandbox import SourceText
from ragkv.types import Chunk, Document

TokenCounter = Callable[[str], int]

_HEAD = re.compile(r"([^\n]*(?:\n[ \t]*(?:=+|-+)(?=[ \t]*\n))?)(\s+)")
"""Groups: a heading's line with an optional underline; the white space below it."""
WINDOW = 1 << 17  # characters cut at a time: semchunk scans its input many times, which is too slow for a whole book
_ENDS = ("\n\n", "\n", ". ", " ")  # where a window may end, the best place first
_GLUE = "\ufffc"  # neither white space nor punctuation, and in no tokenizer shorter than a line end


@dataclass(frozen=True, slots=True, kw_only=True)
class TextChunk:
    """A part of a text, from the character `start` on; `page` and `heading` are for its citation."""

    text: str
    start: int
    page: int | None = None
    heading: str | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.text)

    def of(self, document: Document, ordinal: int, name: str, token_ids: tuple[int, ...]) -> Chunk:
        """The chunk as the store holds it, with the id `name`."""
        return Chunk(
            chunk_id=name,
            document_id=document.document_id,
            ordinal=ordinal,
            text=self.text,
            token_ids=token_ids,
            start=self.start,
            end=self.end,
            page=self.page,
            heading=self.heading,
        )


def split_text(source: SourceText, *, count_tokens: TokenCounter, max_tokens: int) -> list[TextChunk]:
    """Cut a text into chunks of at most `max_tokens` tokens, as `count_tokens` counts them. No chunk is blank.

    Small sections of one page (or of a text without pages) share a chunk. Pages never do, because the page is the
    citation; nor do rows (see `join_rows`). A single character of more than `max_tokens` tokens stays whole.
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
                    text=source.text[start:end],
                    start=start,
                    page=group[0].page,
                    heading=_common_heading(touched),
                )
            )
    return chunks


def _bounded(count_tokens: TokenCounter, max_tokens: int) -> TokenCounter:
    """A counter that estimates the tokens of a text that is far too long from its start.

    Estimates are only returned above `max_tokens`, where the exact number does not matter. Otherwise, testing ever
    smaller parts of a long text would tokenise it over and over.
    """
    reach = 8 * max_tokens + 64  # characters; more than a full chunk of ordinary text

    @lru_cache(maxsize=256)  # semchunk counts a span when it merges it, and `_fit` counts it again
    def count(text: str) -> int:
        if len(text) > reach and (tokens := count_tokens(text[:reach])) > max_tokens:
            return tokens * len(text) // reach
        return count_tokens(text)

    return count


def _groups(source: SourceText, count: TokenCounter, max_tokens: int) -> Iterator[list[Section]]:
    """Group neighbouring sections: as many as fit into a chunk, and a tiny one with the next.

    A tiny section is often a heading without text. Sizes are added, not counted again, so a group may be a token too
    long; then it is cut.
    """
    group: list[Section] = []
    size = 0
    for section in source.sections:
        whole = section.end - section.start <= WINDOW
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
    if end - start <= WINDOW and count(text[start:end].strip()) <= max_tokens:
        yield from _fit(text, start, end, count, max_tokens)
        return
    body = "".join(_glued(text[section.start : section.end], section) for section in group)
    for low, high in _windows(body):
        yield from _cut_window(text, body[low:high], start + low, count, max_tokens)


def _windows(body: str) -> Iterator[tuple[int, int]]:
    """Spans of at most `WINDOW` characters, each ending at the best place in its last half."""
    start = 0
    while len(body) - start > WINDOW:
        middle, end = start + WINDOW // 2, start + WINDOW
        found = ((body.rfind(mark, middle, end), len(mark)) for mark in _ENDS)
        end = next((at + size for at, size in found if at >= 0), end)
        yield start, end
        start = end
    yield start, len(body)


def _cut_window(text: str, body: str, start: int, count: TokenCounter, max_tokens: int) -> Iterator[tuple[int, int]]:
    """Spans of the text for one window of its body, which begins at `start`."""
    from semchunk import chunk

    offsets = [(0, len(body))]
    if body.strip():
        # semchunk recurses for each distinct run of white space. A text with hundreds of them is not prose;
        # if the recursion gets too deep, the window stays whole here and `_fit` cuts it at words.
        with suppress(RecursionError):
            # memoize=True would keep every part of every document in a global cache
            _, offsets = chunk(body, max_tokens, count, memoize=False, offsets=True)
    for low, high in offsets:
        yield from _fit(text, start + low, start + high, count, max_tokens)


def _glued(body: str, section: Section) -> str:
    """Glue a section's heading to the first words below it, so that semchunk does not cut between them.

    The length is unchanged, so offsets hold. A chunk of only a heading would rank high and answer nothing.
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
    trimmed = text[start:end].rstrip()
    return start + len(trimmed) - len(trimmed.lstrip()), start + len(trimmed)


def _longest_prefix(text: str, start: int, end: int, count: TokenCounter, max_tokens: int) -> int:
    """Where to cut `text[start:end]` so that the first part fits: at white space, if the second half has any."""
    low, high = 1, 2 * max_tokens  # in characters; `low` fits or is a single character
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
    # The search assumes that a longer text has more tokens. Where that is wrong, this loop enforces the limit.
    while low > 1 and count(text[start : start + low].rstrip()) > max_tokens:
        low -= 1
    return start + low


def _common_heading(headings: list[str | None]) -> str | None:
    """The deepest heading common to a whole chunk, else the first heading in it."""
    paths = [(heading or "").split(HEADING_SEPARATOR) for heading in headings]
    shared = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))]
    return HEADING_SEPARATOR.join(shared) or next((heading for heading in headings if heading), None)


def chunk_id(document: Document, ordinal: int, start: int, end: int) -> str:
    """The id of the chunk at `text[start:end]`, unique over all texts and chunks."""
    name = f"{document.document_id}\0{document.content_hash}\0{ordinal}\0{start}\0{end}"
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()
