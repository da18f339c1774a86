"""Citations inside an answer: the source of each sentence.

The source is found by the words that sentence and source share, so it works in the same way for every engine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice, zip_longest
from math import log
from typing import NamedTuple

from ragkv.retrievers.bm25 import tokenise
from ragkv.types import Answer

_MOST_SOURCES = 3
_SUPPORTED = 0.5
"""A sentence is cited if its sources hold this share of its words' weight."""
_ADDED = 0.2
"""A source is cited if it holds this share that those before it do not."""
_ORDINARY = 0.25
"""The factor for words with at most three letters and for the question's own words."""
_LONGEST = 20_000  # characters of an answer; a longer one is not cited
_MOST_SENTENCES = 500
_MOST_READ = 32, 200_000  # sources, and their characters; those beyond are not looked at

_FENCE = re.compile(r"\s{0,3}(`{3,}|~{3,})")
_MARKER = re.compile(r"\s*(?:(?:[-*+>]|\d{1,9}[.)]|\|)\s+)*")
_TITLE = re.compile(r"\s{0,3}#{1,6}\s")
_RULE = re.compile(r"\|?(?:\s*:?-+:?\s*\|)+(?:\s*:?-+:?\s*)?$")
_NOT_BLANK = re.compile(r"\S")
_STOP = re.compile(r"(?<![.…])[.!?](?![.!?…])[\"'”’»)\]*_`]*(?=\s)|[。！？]+[」』”’]*")
_REFUSAL = re.compile(
    r"\b(?:documents?|sources?|context|passages?|texts?|information)\b[^.!?\n]{0,40}?\b(?:do(?:es)?|did) ?n[o'’]t"
    r" (?:say|tell|mention|contain|provide|state|specify|include|answer)\b"
    r"|\b(?:not|never) (?:said|told|mentioned|contained|provided|stated|specified|included|given|found|answered)"
    r" (?:in|by) (?:the|any of the|these) (?:documents?|sources?|context|passages?|texts?)\b"
    r"|\bI (?:do not|don['’]t) know\b",
    re.IGNORECASE,
)


class CitedSpan(NamedTuple):
    """Characters `[start, end)` of the answer, and the places of their sources, the best one first."""

    start: int
    end: int
    sources: tuple[int, ...]


def is_refusal(text: str) -> bool:
    """Whether an answer only states that the documents do not contain it (English only)."""
    spans = list(_sentences(text))
    return bool(spans) and all(_REFUSAL.search(text, start, end) for start, end in spans)


def cited(question: str, answer: Answer) -> list[CitedSpan]:
    """The sentences of an answer whose words its sources contain.

    A word that fewer sources contain weighs more. Fenced code and refusals are not cited. Neighbours on one line with
    the same sources are one citation.
    """
    found: list[CitedSpan] = []
    if len(answer.text) > _LONGEST or not answer.sources:
        return found
    weights = _WordWeights(question, [source.text for source in answer.sources])
    for start, end in islice(_sentences(answer.text), _MOST_SENTENCES):
        if _REFUSAL.search(answer.text, start, end):
            continue
        if not (places := weights.sources(answer.text[start:end])):
            continue
        if found and found[-1].sources == places and not answer.text[found[-1].end : start].strip(" \t"):
            start = found.pop().start
        found.append(CitedSpan(start, end, places))
    return found


def _sentences(text: str) -> Iterator[tuple[int, int]]:
    """The sentences of Markdown, line by line, without list markers, headings, heads of tables, and fenced code."""
    fence, at = "", 0
    for line, below in zip_longest(lines := text.splitlines(keepends=True), lines[1:], fillvalue=""):
        mark = _FENCE.match(line)
        if fence:
            fence = "" if mark and mark[1].startswith(fence) and not line[mark.end() :].strip() else fence
        elif mark:
            fence = mark[1]
        elif not _TITLE.match(line) and not _RULE.match(below.strip()):
            body = line.rstrip().rstrip("|\\").rstrip()
            opening = _MARKER.match(body)
            start = opening.end() if opening else 0
            for end in (*(stop.end() for stop in _STOP.finditer(body, start)), len(body)):
                if word := _NOT_BLANK.search(body, start, end):
                    yield at + word.start(), at + end
                    start = end
        at += len(line)


class _WordWeights:
    """The words of the sources, with their weights."""

    def __init__(self, question: str, sources: Sequence[str]) -> None:
        most, characters = _MOST_READ
        sizes = accumulate(map(len, sources[:most]))
        self._sources = [
            frozenset(tokenise(text)) for text, size in zip(sources, sizes, strict=False) if size <= characters
        ]
        self._question = frozenset(tokenise(question))

    def sources(self, sentence: str) -> tuple[int, ...]:
        """The indices of the sources that support a sentence; none if too many of its words are in no source."""
        weights = {word: self._weight(word) for word in tokenise(sentence)}
        if not weights or not self._sources:
            return ()
        total = sum(weights.values())
        chosen: list[int] = []
        left = set(weights)
        while left and len(chosen) < _MOST_SOURCES:
            added = [sum(weights[word] for word in left & words) for words in self._sources]
            best = max(range(len(added)), key=lambda at: (added[at], len(self._sources[at] & self._question), -at))
            if added[best] < _ADDED * total:
                break
            chosen.append(best)
            left -= self._sources[best]
        held = total - sum(weights[word] for word in left)
        return tuple(chosen) if chosen and held >= _SUPPORTED * total else ()

    def _weight(self, word: str) -> float:
        having = sum(word in words for words in self._sources)
        rarity = log(1 + len(self._sources) / max(having, 0.5)) ** 2
        ordinary = word in self._question or (len(word) <= 3 and word.isalpha() and word.isascii())
        return rarity * (_ORDINARY if ordinary else 1.0)
