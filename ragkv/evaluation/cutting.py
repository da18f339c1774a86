"""Cut a benchmark's long text into chunks: at its own marks if it has any, else like an ingested file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["Cutter", "estimated_tokens"]


def estimated_tokens(text: str) -> int:
    """Four bytes of UTF-8 per token, which is good enough to cut English, code and Chinese without a tokenizer."""
    return -(-len(text.encode("utf-8", "replace")) // 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutter:
    """Cuts texts into chunks of about `chunk_tokens`, counted by `count_tokens`."""

    chunk_tokens: int
    count_tokens: Callable[[str], int] = estimated_tokens

    def prose(self, text: str) -> tuple[str, ...]:
        """Chunks of at most `chunk_tokens`, cut at paragraphs, lines, sentences and words, in that order."""
        from ragkv.ingest.chunker import split_text
        from ragkv.ingest.reader import Section, SourceText

        if not text.strip():
            return ()
        whole = Section(start=0, end=len(text))
        source = SourceText(text=text, content_hash="", title=None, sections=(whole,))
        chunks = split_text(source, count_tokens=self.count_tokens, max_tokens=self.chunk_tokens)
        return tuple(chunk.text for chunk in chunks)

    def code(self, text: str) -> tuple[str, ...]:
        """Chunks of whole lines up to `chunk_tokens`, which join to the text with its indentation."""
        return tuple(chunk for chunk in self._packed(text.splitlines(keepends=True)) if chunk.strip())

    def passages(self, text: str, mark: re.Pattern[str]) -> tuple[str, ...]:
        """A chunk of any size from each `mark` to the next; cut as prose if the text has no mark."""
        parts = _marked(text, mark)
        return tuple(part.strip() for part in parts) if parts else self.prose(text)

    def examples(self, text: str, mark: re.Pattern[str]) -> tuple[str, ...]:
        """Like `passages` for a prompt's worked examples, but short ones share a chunk."""
        parts = _marked(text, mark)
        return tuple(chunk.strip() for chunk in self._packed(parts)) if parts else self.prose(text)

    def _packed(self, units: Iterable[str]) -> Iterator[str]:
        """Join neighbours up to `chunk_tokens`. A longer unit stays whole."""
        held: list[str] = []
        size = 0
        for unit in units:
            tokens = self.count_tokens(unit)
            if held and size + tokens > self.chunk_tokens:
                yield "".join(held)
                held, size = [], 0
            held.append(unit)
            size += tokens
        if held:
            yield "".join(held)


def _marked(text: str, mark: re.Pattern[str]) -> list[str]:
    """The text cut before each mark, without blank parts; [] if there is no mark."""
    starts = [found.start() for found in mark.finditer(text)]
    if not starts:
        return []
    edges = [0, *starts, len(text)]
    parts = [text[start:end] for start, end in pairwise(edges)]
    return [part for part in parts if part.strip()]
