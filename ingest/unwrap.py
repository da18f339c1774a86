"""Lines that a page's width broke become paragraphs, and words hyphenated at their ends are joined."""

from __future__ import annotations

import re
from collections.abc import Iterable, Set

from ragkv.ingest.charset import clean

_GLYPHS = {0xFB00 + i: s for i, s in enumerate(("ff", "fi", "fl", "ffi", "ffl", "st", "st"))} | {0xAD: "", 0x2010: "-"}
_LIST_ITEM = re.compile(r"[•▪◦‣·*–-]\s|\(?(?:\d{1,3}|[A-Za-z])[.)]\s")
_SOFT = re.compile(r"\xad\s*$")
_WORD = re.compile(r"[^\W_]+(?:-[^\W_]+)*")
_BROKEN = re.compile(r"[^\W_]+(?:-[^\W_]+)*[-\u2010\xad]$", re.MULTILINE)
_HYPHENATED = re.compile(r"(?<![^\W_])[^\W_]+(?:-[^\W_]+)*-$")
_CONJUNCTIONS = frozenset(["and", "or", "to", "und", "oder", "bzw", "sowie", "bis", "en", "of", "og", "och", "eller"])


def words_of(texts: Iterable[str]) -> frozenset[str]:
    """The words of a document's texts in lower case, without parts of words at the ends of lines."""
    return frozenset(word.lower() for text in texts for word in _WORD.findall(_BROKEN.sub(" ", text)))


def bare_characters(text: str) -> str:
    """The letters and digits alone, in lower case."""
    return "".join(filter(str.isalnum, text.translate(_GLYPHS).lower()))


def unwrap(text: str, words: Set[str] = frozenset()) -> str:
    """Join lines broken by the page's width: a full line continues, a short one ends its paragraph.

    `words` are those of the whole document in lower case, by which hyphens at the ends of lines are kept or dropped.
    """
    lines = [" ".join(_SOFT.sub("-", line).translate(_GLYPHS).split()) for line in clean(text).split("\n")]
    lengths = sorted(len(line) for line in lines if line)
    if not lengths:
        return ""
    full = 0.75 * lengths[int(0.9 * (len(lengths) - 1))]  # the 90th percentile approximates the column's width
    parts: list[str] = []
    previous = ""
    for line in lines:
        if not line or not previous or _LIST_ITEM.match(line):
            separator = "\n" if line and previous else ""
            if not line and previous:
                separator = "\n\n"
        elif (broken := _HYPHENATED.search(previous)) and (rest := _WORD.match(line)):
            hyphen, separator = _after_hyphen(broken[0][:-1], rest[0], words)
            parts[-1] = parts[-1][:-1] + hyphen
        elif len(previous) >= full:
            separator = " "
        else:
            separator = "\n\n" if previous[-1] in ".!?:。！？" else "\n"
        parts += [separator, line]
        previous = line
    return "".join(parts).strip()


def _after_hyphen(word: str, rest: str, words: Set[str]) -> tuple[str, str]:
    """The hyphen, or none, and the space between "word-" at a line's end and "rest" on the next line."""
    start, end = word.lower(), rest.lower()
    if start + end in words:
        return "", ""
    if end in _CONJUNCTIONS:  # "Ein- und Ausbau"
        return "-", " "
    capital = rest[0].isdigit() or (rest[0].isupper() and not word.isupper()) or word[-1].isdigit()
    return ("-" if f"{start}-{end}" in words or "-" in start or capital else ""), ""
