"""A benchmark's one long text as chunks: at its own marks where it has some, else as an ingested file is cut."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["Cutter", "estimated_tokens"]


def estimated_tokens(text: str) -> int:
    """Four bytes of UTF-8 a token: near enough to cut English, code and Chinese where no tokenizer is at hand."""
    return -(-len(text.encode("utf-8", "replace")) // 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutter:
    """Chunks of about `chunk_tokens`, counted by `count_tokens`."""

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
        """Whole lines up to `chunk_tokens`; joined they are the text, indentation and all."""
        return tuple(chunk for chunk in self._packed(text.splitlines(keepends=True)) if chunk.strip())

    def passages(self, text: str, mark: re.Pattern[str]) -> tuple[str, ...]:
        """What begins with each `mark`, whole whatever its size; as prose where the text has none."""
        parts = _marked(text, mark)
        return tuple(part.strip() for part in parts) if parts else self.prose(text)

    def examples(self, text: str, mark: re.Pattern[str]) -> tuple[str, ...]:
        """As `passages`, but short ones share a chunk: a prompt's worked examples."""
        parts = _marked(text, mark)
        return tuple(chunk.strip() for chunk in self._packed(parts)) if parts else self.prose(text)

    def _packed(self, units: Iterable[str]) -> Iterator[str]:
        """Neighbours together while their counts add up to `chunk_tokens`; a longer unit stays whole."""
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
    """The text cut before each mark, none blank; what stands before the first mark is a part too. Empty without one."""
    starts = [found.start() for found in mark.finditer(text)]
    if not starts:
        return []
    edges = [0, *starts, len(text)]
    parts = [text[start:end] for start, end in pairwise(edges)]
    return [part for part in parts if part.strip()]
