"""The sentences of a passage that answer a question, and the snippet of plain text that shows them.

Words count by their rarity in the index (BM25's inverse document frequency). Once there is an answer, its own words
count more than the question's, so that the sentences are those that the answer stands on.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Literal, NamedTuple

from ragkv.retrievers.bm25 import inverse_frequency, tokenise
from ragkv.util.display import beginning

WordWeights = Callable[[Sequence[str]], Mapping[str, float]]
"""The rarity of each word; empty if no statistics are at hand."""
MAX_CHARS = 240
"""The most characters of a snippet; a longer sentence is cut into parts, a longer row of a table at twice as many."""
_MAX_READ_CHARS = 200_000  # of all passages together
_MAX_READ_SENTENCES = 10_000  # of one passage
_MAX_ANSWER_CHARS = 4_000
_MAX_SENTENCES = 3
_WRAPPED = 40  # characters of a line that may be wrapped
_LEAST = 0.2
"""A sentence is chosen if it holds this share of the words' weight."""
_MORE = 0.35
"""Another one is chosen if it adds at least this share of the best one's weight."""
_ANSWER = 2.0
"""The factor for words of the answer that are not in the question."""
_HEADING = 0.3
"""The factor for words of the heading above a sentence."""

_FENCE = re.compile(r"\s{0,3}(`{3,}|~{3,})")
_MARKER = re.compile(r"\s*(?:(?:[-*+>•]|\d{1,9}[.)]|\|)\s+)*")
_TITLE = re.compile(r"\s{0,3}#{1,6}\s")
_RULE = re.compile(r"\|?(?:\s*:?-+:?\s*\|)+(?:\s*:?-+:?\s*)?$")
_NOT_BLANK = re.compile(r"\S")
_LINE = re.compile(r"\s*(?:[-=*_~]\s*){3,}$")  # a rule, or the underline of a heading
_FIELD = re.compile(r"\s*[^\s:|][^:|\n]{0,60}: \S")  # a cell of a row with its column's name
_CELLS = re.compile(r"(?<!\\)\|")
_STOP = re.compile(r"(?<![.…])[.!?؟۔।॥።։](?![.!?…])[\"'”’»)\]*_`]*(?=\s+(?![a-z])|\s*$)|[。！？｡။។]+[」』”’]*")
_ABBREVIATED = re.compile(r"(?:^|[\s(.])(?:[A-Z]|Dr|Mr|Mrs|Ms|Prof|St|No|Nr|vs|etc|cf|ca|Fig|e\.g|i\.e|z\.B|d\.h)\.$")
_STOPS = ".!?…\"')]”’»؟۔।॥።։。！？｡」』"
_CLOSING = f"{_STOPS},;:，、；："
_CLAUSE = re.compile(r".*(?:\n|[,;:](?=\s)|[，、；：])", re.DOTALL)
_SPACE = re.compile(r".*\s", re.DOTALL)
_ENDING = re.compile(r"(?<=[^\W\d_]{3})(?:ies|ing|es|ed|en|s|e|y|n)$")
_MARKUP = (
    (re.compile(r"!?\[((?:[^\[\]\\]|\\.)*)\]\([^()\s]*(?:\s+\"[^\"]*\")?\)"), r"\1"),  # links and images
    (re.compile(r"<((?:https?://|mailto:)[^<>\s]+)>|</?[A-Za-z][^<>]{0,200}>|\[\^\w+\]"), r"\1"),
    (re.compile(r"(?<!\w)(\*{1,3}|_{1,3}|~~)(?=\S)([^\n]+?)(?<=\S)\1(?!\w)"), r"\2"),
    (re.compile(r"(`+)([^`\n]+)\1"), r"\2"),
    (re.compile(r"(?m)^[ \t]*(?:[>|][ \t]+)+|\\(?=[!-/:-@\[-`{-~])"), ""),
)


class Sentence(NamedTuple):
    """Characters of a text: a sentence, a heading, a line of code, or a row of a table with its `columns`' names."""

    start: int
    end: int
    kind: Literal["prose", "title", "code", "row"]
    columns: tuple[str, ...] = ()

    def plain(self, text: str) -> str:
        """The sentence on one line without the marks of Markdown."""
        words = text[self.start : self.end]
        if self.kind == "row":
            pairs = zip_longest(self.columns, _cells(words), fillvalue="")
            return "; ".join(f"{name}: {cell}" if name else cell for name, cell in pairs if cell)
        if self.kind == "code":
            return " ".join(words.split())
        return _plain("; ".join(words.splitlines()) if _FIELD.match(words) else words)


def _plain(words: str) -> str:
    for mark, plain in _MARKUP:
        words = mark.sub(plain, words)
    return " ".join(words.split())


def _cells(row: str) -> tuple[str, ...]:
    return tuple(map(_plain, _CELLS.split(row.strip().removeprefix("|").removesuffix("|"))))


def sentences(text: str) -> Iterator[Sentence]:
    """The sentences of Markdown, line by line, without list markers, headings, heads of tables, and fenced code."""
    for line in _lines(text):
        if line.kind in ("prose", "row"):
            if line.kind == "row" and (opening := _MARKER.match(text, line.start)):
                end = line.start + len(text[line.start : line.end].rstrip("|\\").rstrip())
                line = line._replace(start=opening.end(), end=end)
            yield from _split(text, line)


def passage_sentences(text: str) -> list[Sentence]:
    """Those of a passage, whose lines may be wrapped at any width; also headings, and code by line. None is longer than
    `MAX_CHARS`.
    """
    blocks: list[Sentence] = []
    for line in _lines(text):
        if blocks and line.kind == "prose" == blocks[-1].kind and _continues(text, blocks[-1], line):
            blocks[-1] = blocks[-1]._replace(end=line.end)
        else:
            blocks.append(line)
    return [part for block in blocks for each in _split(text, block) for part in _parts(text, each)]


def _continues(text: str, block: Sentence, line: Sentence) -> bool:
    """Whether the line goes on with the paragraph: its first column is the paragraph's, which was long enough to be
    wrapped, or both are cells "column: value" of one row.
    """
    between = text[block.end : line.start]
    if between.count("\n") != 1 or not between.replace(">", " ").isspace():
        return False
    if _FIELD.match(text, block.start, block.end):
        return _FIELD.match(text, line.start, line.end) is not None
    first = text.rfind("\n", 0, block.start) + 1
    column, own = block.start - first, line.start - text.rfind("\n", 0, line.start) - 1
    listed = column == own and not text[first : block.start].isspace()
    wrapped = block.end - max(block.start, text.rfind("\n", 0, block.end) + 1) >= _WRAPPED
    return (listed and own > 0) or (wrapped and own in (0, column))


def _lines(text: str) -> Iterator[Sentence]:
    """Every line that is neither blank nor a rule, the head of a table or the edge of fenced code."""
    fence, offset = "", 0
    columns: tuple[str, ...] | None = None
    for line, below in zip_longest(lines := text.splitlines(keepends=True), lines[1:], fillvalue=""):
        start, offset = offset, offset + len(line)
        body = line.rstrip()
        mark = _FENCE.match(line)
        columns = columns if columns is not None and "|" in body else None
        if fence:
            if mark and mark[1].startswith(fence) and not line[mark.end() :].strip():
                fence = ""
            elif body:
                yield Sentence(start, start + len(body), "code")
        elif mark:
            fence = mark[1]
        elif opening := _TITLE.match(body):
            yield Sentence(start + opening.end(), start + len(body), "title")
        elif _RULE.match(below.strip()):
            columns = _cells(body)
        elif columns is not None or (body.lstrip().startswith("|") and body.endswith("|")):
            if not _RULE.match(body.strip()):
                yield Sentence(start, start + len(body), "row", columns or ())
        elif not _LINE.match(body):
            body = body.rstrip("\\").rstrip()
            opening = _MARKER.match(body)
            if len(body) > (first := opening.end() if opening else 0):
                yield Sentence(start + first, start + len(body), "prose")


def _split(text: str, block: Sentence) -> Iterator[Sentence]:
    start = block.start
    stops = _STOP.finditer(text, start, block.end) if block.kind == "prose" else ()
    ends = [stop.end() for stop in stops if not _ABBREVIATED.search(text, max(start, stop.end() - 9), stop.end())]
    for end in (*ends, block.end):
        if word := _NOT_BLANK.search(text, start, end):
            yield block._replace(start=word.start(), end=end)
            start = end


def _parts(text: str, sentence: Sentence) -> Iterator[Sentence]:
    """A sentence that is too long in parts, each up to the last clause, else the last space, that fits."""
    end = sentence.start
    while word := _NOT_BLANK.search(text, end, sentence.end):
        start, end = word.start(), sentence.end
        if end - start > MAX_CHARS and sentence.kind != "row":
            least, end = start + MAX_CHARS // 2, start + MAX_CHARS
            if edge := _CLAUSE.match(text, least, end) or _SPACE.match(text, least, end):
                end = edge.end()
        yield sentence._replace(start=start, end=start + len(text[start:end].rstrip()))


_REFUSAL = re.compile(
    r"\b(?:documents?|sources?|context|passages?|texts?|information)\b[^.!?\n]{0,40}?\b(?:do(?:es)?|did) ?n[o'’]t"
    r" (?:say|tell|mention|contain|provide|state|specify|include|answer)\b"
    r"|\b(?:not|never) (?:said|told|mentioned|contained|provided|stated|specified|included|given|found|answered)"
    r" (?:in|by) (?:the|any of the|these) (?:documents?|sources?|context|passages?|texts?)\b"
    r"|\bI (?:do not|don['’]t) know\b",
    re.IGNORECASE,
)


def refuses(text: str, start: int = 0, end: int | None = None) -> bool:
    """Whether a sentence states that the documents do not contain an answer (English only)."""
    return _REFUSAL.search(text, start, len(text) if end is None else end) is not None


def is_refusal(text: str) -> bool:
    """Whether an answer only states that the documents do not contain it (English only)."""
    spans = list(sentences(text))
    return bool(spans) and all(refuses(text, each.start, each.end) for each in spans)


class Snippet(NamedTuple):
    """The best sentences of a passage: as one line of plain text, and as spans of the passage's characters."""

    text: str
    highlights: tuple[tuple[int, int], ...]


class _Words(NamedTuple):
    """A sentence as plain text, and its words."""

    sentence: Sentence
    plain: str
    words: frozenset[str]


def snippets(passages: Sequence[str], question: str, answer: str, weights: WordWeights) -> list[Snippet]:
    """The best sentences of each passage for a question and, if there is one, its answer.

    Without a matching word a snippet is the passage's beginning, and nothing is highlighted. Without statistics of an
    index, a word's rarity is that among the sentences of these passages.
    """
    read, left = list[list[_Words]](), _MAX_READ_CHARS
    for passage in passages:
        text, left = passage[: max(left, MAX_CHARS)], left - len(passage)
        plain = [(sentence, sentence.plain(text)) for sentence in passage_sentences(text)[:_MAX_READ_SENTENCES]]
        read.append([_Words(this, words, frozenset(map(_stem, tokenise(words)))) for this, words in plain if words])
    factors = dict.fromkeys(_words(question), 1.0)
    if not is_refusal(answer := answer[:_MAX_ANSWER_CHARS]):
        factors = dict.fromkeys(_words(answer), _ANSWER) | factors
    rarity = weights(list(factors))
    if not rarity:
        having = Counter(word for passage in read for unit in passage for word in unit.words)
        total = sum(map(len, read))
        rarity = {word: inverse_frequency(count, total) for word in factors if (count := having[_stem(word)])}
    rarest = max(rarity.values(), default=1.0)
    wanted = {_stem(word): rarity.get(word, rarest) * factor for word, factor in factors.items()}
    known = frozenset(map(_stem, rarity)).union(*(each.words for passage in read for each in passage))
    least = _LEAST * sum(weight for word, weight in wanted.items() if word in known)
    return [_snippet(text, units, wanted, least) for text, units in zip(passages, read, strict=True)]


def _words(text: str) -> list[str]:
    """The words of `tokenise`, of scripts without spaces only the pairs of characters if there are any."""
    words = tokenise(text)
    return [word for word in words if len(word) > 1 or word.isascii()] or words


def _stem(word: str) -> str:
    return _ENDING.sub("", word)


def _snippet(text: str, read: Sequence[_Words], wanted: Mapping[str, float], least: float) -> Snippet:
    """The sentences that add most of the weight of the `wanted` words; highlighted if the best has at least `least`."""
    body = [n for n, unit in enumerate(read) if unit.sentence.kind != "title"] or list(range(len(read)))
    heading = frozenset[str]()
    weights: list[dict[str, float]] = []
    for sentence, _, words in read:
        heading = words if sentence.kind == "title" else heading
        weights.append(
            {w: weight if w in words else weight * _HEADING for w, weight in wanted.items() if w in words | heading}
        )
    chosen: list[int] = []
    covered: dict[str, float] = {}
    first, more = 0.0, 1e-9
    while len(chosen) < _MAX_SENTENCES:
        gains = {
            n: sum(max(0.0, weight - covered.get(word, 0.0)) for word, weight in weights[n].items())
            for n in body
            if n not in chosen and (not chosen or _length(read, [*chosen, n]) <= MAX_CHARS)
        }
        best = max(gains, key=lambda n: gains[n], default=-1)  # the first of equals
        if best < 0 or gains[best] < more:
            break
        first = first or gains[best]
        more = _MORE * first
        chosen.append(best)
        covered |= {word: max(weight, covered.get(word, 0.0)) for word, weight in weights[best].items()}
    shown, room = sorted(chosen) or body[:1], MAX_CHARS // 3 if chosen else MAX_CHARS
    while shown and (after := shown[-1] + 1) in body and _length(read, [*shown, after]) <= room:
        this, following = read[shown[-1]], read[after].sentence
        apart = chosen and "\n\n" in text[this.sentence.end : following.start] and this.plain[-1] != "?"
        if apart or "row" in (this.sentence.kind, following.kind):
            break
        shown.append(after)  # a short sentence, perhaps a question, with those after it
    marked = [read[n].sentence for n in sorted(chosen)] if first >= least else []
    return Snippet(_line(text, read, shown), tuple((sentence.start, sentence.end) for sentence in marked))


def _length(read: Sequence[_Words], places: Sequence[int]) -> int:
    return sum(len(read[n].plain) + 3 for n in places)


def _line(text: str, read: Sequence[_Words], shown: Sequence[int]) -> str:
    """These sentences on one line, with an ellipsis where others, or parts of these, are left out."""
    line = ""
    for n in shown:
        divided = n > 0 and _divided(text, *read[n - 1 : n + 1])
        if n - 1 not in shown or read[n].sentence.kind == "row":
            line += " … " if line else "… " if divided else ""
        elif line[-1] not in _CLOSING:
            line += " " if divided else "; "
        elif line[-1].isascii():
            line += " "
        line += beginning(read[n].plain, 2 * MAX_CHARS)
    return f"{line} …" if shown and _divided(text, *read[shown[-1] : shown[-1] + 2]) else line


def _divided(text: str, before: _Words, *after: _Words) -> bool:
    """Whether these are parts of one sentence that was too long."""
    last = before.plain[-1:]
    return any("\n" not in text[before.sentence.end : each.sentence.start] and last not in _STOPS for each in after)
