"""Markdown: the text is kept as it is, and its headings name the sections."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ragkv.ingest.parser import Parsed, sections_under
from ragkv.ingest.plain import decode

__all__ = ["parse_markdown", "read_markdown"]

_FRONT_MATTER = re.compile(
    r"\A(---|\+\+\+)[ \t]*\n(?=\s*[\w-]+[ \t]*[:=])(.*?\n)(?:\1|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL
)
_TITLE = re.compile(r"^title[ \t]*[:=](.+)$", re.MULTILINE | re.IGNORECASE)
_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})(.*)")
_ATX = re.compile(r" {0,3}(#{1,6})(?:[ \t](.*))?$")
_SETEXT = re.compile(r" {0,3}(=+|-+)[ \t]*$")


def read_markdown(data: bytes) -> Parsed:
    """Decode bytes in any encoding and parse them as Markdown."""
    return parse_markdown(decode(data))


def parse_markdown(text: str) -> Parsed:
    """A section per heading, named by its path. The title is that of the front matter, else the first top heading."""
    title = None
    if front := _FRONT_MATTER.match(text):
        text = text[front.end() :]
        if found := _TITLE.search(front[2]):
            title = found[1].strip(" \t").strip("\"'") or None
    headings = list(_headings(text))
    title = title or next((name for _, level, name in headings if level == 1 and name), None)
    return Parsed(text=text, sections=sections_under(text, headings), title=title)


def _headings(text: str) -> Iterator[tuple[int, int, str]]:
    """(offset of its first line, level, words) of every heading outside fenced code."""
    fence = ""
    paragraph = 0  # lines of the current paragraph; one line with an underline below it is a heading
    position = previous = 0
    words = ""
    for line in text.splitlines(keepends=True):
        bare = line.rstrip("\n")
        if mark := _FENCE.match(bare):
            if not fence:
                fence = mark[1]
            elif mark[1].startswith(fence) and not mark[2].strip():
                fence = ""
            paragraph = 0
        elif not fence:
            if atx := _ATX.match(bare):
                yield position, len(atx[1]), _words(atx[2] or "")
                paragraph = 0
            elif paragraph == 1 and (setext := _SETEXT.match(bare)):
                yield previous, 1 if setext[1][0] == "=" else 2, words
                paragraph = 0
            elif bare.strip() and not bare.startswith(("    ", "\t", ">", "|", "- ", "* ", "+ ")):
                paragraph, previous, words = paragraph + 1, position, bare.strip()
            else:
                paragraph = 0 if not bare.strip() else 2
        position += len(line)


def _words(heading: str) -> str:
    """A heading without the closing `#`s that it may have: they are separated by a space, or stand alone."""
    heading = heading.strip()
    open_ = heading.rstrip("#")
    return open_.rstrip() if not open_ or open_[-1] in " \t" else heading
