"""BM25 over chunk texts: Lucene's variant, in segments, with exactly the scores that bm25s computes.

bm25s stores finished scores, and each depends on the number of chunks and their mean length, so one changed document
would invalidate the whole index. A segment therefore stores term frequencies and chunk lengths, which do not change.
A query computes the scores of its own terms by bm25s' formula, in the same order and precision. Tests compare every
score with bm25s.
"""

from __future__ import annotations

import math
import re
import threading
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ragkv.retrievers.arrays import Postings, best_rows, mapped_array, term_hashes
from ragkv.retrievers.segments import IndexSegment, SegmentedIndex

_Weights: TypeAlias = tuple[NDArray[np.int32], NDArray[np.float32]]
"""The rows of a segment that have a word, and what it adds to their scores."""
_COUNTS = ("uint8", "uint16", "uint32")
_LENGTHS = "lengths.npy"
_BLOCK = 1 << 21  # postings that are sorted at once
_FEW = 64  # if fewer than one row in 64 is allowed, only the allowed rows are scored
CACHED_WEIGHTS = 1 << 22  # of words of earlier questions (32 MiB with their rows)


_K1 = 1.5
"""Term frequency saturation: smaller values saturate earlier."""
_B = 0.75
"""How strongly chunk length counts."""

# Scripts that are written without spaces, or with particles attached to words: Thai, Lao, Myanmar, Khmer, kana,
# bopomofo, CJK ideographs, Hangul syllables.
_UNSEGMENTED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3105-\u312f\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3"
    "\U00020000-\U000323af"
)


# Characters that are not seen inside a word: soft hyphen, joiners, marks of direction, variation selectors, byte order
# mark. The zero width space is not among them, because it divides words.
_INVISIBLE = re.compile(
    "[\u00ad\u034f\u061c\u180b-\u180f\u200c-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff\U000e0000-\U000e0fff]"
)


@lru_cache(maxsize=1)
def _patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Patterns for a word, and for a run of unsegmented script. `\\w` alone would cut Hindi words at vowel signs."""
    characters = map(chr, range(0x300, 0xFFFF))
    marks = "".join(char for char in characters if unicodedata.category(char) in ("Mn", "Mc"))
    return re.compile(rf"[^\W_]+(?:[{marks}]+[^\W_]*)*"), re.compile(f"[{_UNSEGMENTED}]+")


def _folded(text: str) -> str:
    """A text without invisible characters, normalised (NFKC) and case folded, with Turkish i and ı as one letter."""
    if text.isascii():
        return text.lower()
    text = unicodedata.normalize("NFKC", _INVISIBLE.sub("", text)).casefold()
    # İ folds to an i with a dot above, and I to i, also where its small letter is ı
    return unicodedata.normalize("NFKC", text.replace("i\u0307", "i").replace("ı", "i"))


def tokenise(text: str) -> list[str]:
    """The words of a text in any language; a text and a question that look alike have the same ones (`_folded`).

    Scripts without spaces give every character and every pair of neighbours: Lucene's CJK bigrams, and single
    characters, so that a word of one character is found.
    """
    word, run = _patterns()
    tokens: list[str] = []
    for part in word.findall(_folded(text)):
        position = 0
        for match in run.finditer(part):
            if match.start() > position:
                tokens.append(part[position : match.start()])
            characters = match[0]
            tokens += characters
            tokens += (a + b for a, b in pairwise(characters))
            position = match.end()
        if position < len(part):
            tokens.append(part[position:])
    return tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Words:
    """The words of a segment: how often each occurs in a row (the numbers of the postings), and each row's length."""

    postings: Postings
    lengths: NDArray[np.uint32]  # (rows,), in words


class BM25(SegmentedIndex[str, Sequence[Mapping[str, _Weights]], _Words]):
    """The index that needs no model. Scores are those of Lucene's BM25, in float32.

    A chunk without words is never found, but counts in the number of chunks and in their mean length.
    """

    name = "bm25"
    parts = (*Postings.PARTS, _LENGTHS)

    def __init__(self) -> None:
        super().__init__()
        self._scores = _Scores(())

    def fields(self) -> dict[str, Any]:
        # another Unicode version may tokenise a question differently from the chunks
        return {"k1": _K1, "b": _B, "stop_words": [], "unicode": unicodedata.unidata_version}

    @classmethod
    def _configured(cls, fields: dict[str, Any]) -> Self:
        self = cls()
        if fields != self.fields():
            raise ValueError("its words are those of another version of Unicode, or its scores have other settings")
        return self

    def _gather(self, vectors: Iterator[str], others: Sequence[_Words]) -> _Words:
        lengths = array("I")
        blocks: list[tuple[Postings, int]] = []
        while not blocks or blocks[-1][1]:
            blocks.append(self._block(vectors, lengths))
        postings = Postings.merged([(block, np.ones(rows, dtype=np.bool_)) for block, rows in blocks])
        return _Words(postings=postings, lengths=np.frombuffer(lengths, dtype=np.uint32))

    def _block(self, texts: Iterator[str], lengths: array[int]) -> tuple[Postings, int]:
        """The postings of the next texts and the number of texts, 0 at the end; appends their lengths to `lengths`."""
        vocabulary: dict[str, int] = {}
        words, counts, sizes = array("i"), array("I"), array("i")
        for text in texts:
            tokens = tokenise(text)
            lengths.append(len(tokens))
            found = Counter(tokens)
            words.extend([vocabulary.setdefault(token, len(vocabulary)) for token in found])
            counts.extend(found.values())
            sizes.append(len(found))
            if len(words) >= _BLOCK:
                break
        rows = np.repeat(np.arange(len(sizes), dtype=np.int32), np.frombuffer(sizes, dtype=np.int32))
        numbers = np.frombuffer(counts, dtype=np.uint32)
        kind = next(kind for kind in _COUNTS if numbers.max(initial=0) <= np.iinfo(kind).max)
        at = np.frombuffer(words, dtype=np.int32)
        return Postings.collect(list(vocabulary), at, rows, numbers.astype(kind)), len(sizes)

    def _merge(self, parts: Sequence[tuple[_Words, NDArray[np.bool_]]]) -> _Words:
        return _Words(
            postings=Postings.merged([(data.postings, kept) for data, kept in parts]),
            lengths=np.concatenate([data.lengths[kept] for data, kept in parts]),
        )

    def _current(self, segments: Sequence[IndexSegment[_Words]]) -> _Scores:
        scores = self._scores
        if scores.segments is not segments:  # the index has changed since the last question
            scores = self._scores = _Scores(segments)
        return scores

    def _query(self, query: str, segments: Sequence[IndexSegment[_Words]]) -> Sequence[Mapping[str, _Weights]] | None:
        scores = self._current(segments)
        return [found for key in term_hashes(tokenise(query)) if (found := scores.of(key))] or None

    def rarity(self, words: Sequence[str]) -> dict[str, float]:
        """The inverse document frequency of those of these words of `tokenise` that a chunk has."""
        scores = self._current(self.segments)
        counts = [(word, scores.places(key)[1]) for word, key in zip(words, term_hashes(words), strict=True)]
        return {word: inverse_frequency(count, scores.chunks) for word, count in counts if count}

    def _search(
        self,
        segment: IndexSegment[_Words],
        query: Sequence[Mapping[str, _Weights]],
        k: int,
        allowed: NDArray[np.bool_] | None,
        *,
        exact: bool,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        if allowed is not None and len(few := np.flatnonzero(allowed)) * _FEW < len(allowed):
            found, best = best_rows(_scores_of(few, segment.name, query), k, None)
            return few[found], best
        scores = np.zeros(len(segment.id_table), dtype=np.float32)
        for word in query:  # in the question's order with repetitions, because float32 sums depend on it
            if segment.name in word:
                np.add.at(scores, *word[segment.name])
        return best_rows(scores, k, allowed)

    def _write(self, data: _Words, folder: Path, name: str) -> None:
        data.postings.write(folder, name)
        np.save(folder / f"{name}.{_LENGTHS}", data.lengths)

    def _read(self, folder: Path, name: str, rows: int) -> _Words:
        postings = Postings.read(folder, name, rows, _COUNTS)
        lengths = mapped_array(folder / f"{name}.{_LENGTHS}", ("uint32",))
        if len(lengths) != rows or postings.numbers.sum(dtype="u8") != lengths.sum(dtype="u8"):
            raise ValueError("its chunks are of other lengths than their words")
        if postings.numbers.min(initial=1) < 1:
            raise ValueError("a word occurs in a chunk, but never")
        return _Words(postings=postings, lengths=lengths)


def inverse_frequency(count: int, total: int) -> float:
    """BM25's weight of a word that `count` of `total` texts have."""
    return math.log(1 + (total - count + 0.5) / (count + 0.5))


def _scores_of(few: NDArray[np.int64], name: str, query: Sequence[Mapping[str, _Weights]]) -> NDArray[np.float32]:
    """(few,): the scores of these rows of the segment called `name`, summed in the same order as for all rows."""
    scores = np.zeros(len(few), dtype=np.float32)
    for word in query:
        if name in word:
            rows, weights = word[name]
            at = np.minimum(np.searchsorted(rows, few), len(rows) - 1)
            there = rows[at] == few
            scores[there] += weights[at[there]]
    return scores


class _Scores:
    """The weights of words for one state of the segments, cached by word.

    Words that occur in many questions are frequent in the chunks too and have the most postings, so caching pays.
    """

    def __init__(self, segments: Sequence[IndexSegment[_Words]]) -> None:
        self.segments = segments
        self._lock = threading.Lock()
        self._known: dict[bytes, dict[str, _Weights]] = {}
        self._size = 0
        self.chunks = sum(segment.living for segment in segments)
        words = sum(int(segment.data.lengths.sum(where=~segment.hidden, dtype=np.uint64)) for segment in segments)
        mean = words / self.chunks if words else 1.0
        # the same operations as bm25s', in the same order: k1 * ((1 - b) + b * length / mean)
        self._norms = [_K1 * ((1 - _B) + _B * segment.data.lengths / mean) for segment in segments]

    def of(self, key: bytes) -> dict[str, _Weights]:
        """The weights of the word with this key by segment name; empty if no chunk has it."""
        with self._lock:
            weights = self._known.pop(key, None)
            if weights is None:
                weights = self._weights(key)
                self._size += _size(weights)
            self._known[key] = weights  # least recently used first
            while self._size > CACHED_WEIGHTS and len(self._known) > 1:
                self._size -= _size(self._known.pop(next(iter(self._known))))
            return weights

    def places(self, key: bytes) -> tuple[list[slice], int]:
        """The places of the word in each segment, and the number of visible chunks that have it."""
        asked = np.array([key], dtype="S16")
        places, count = [], 0
        for segment in self.segments:
            [place] = segment.data.postings.find(asked)
            places.append(place)
            gone = 0
            if segment.living < len(segment.hidden):
                gone = int(np.count_nonzero(segment.hidden[segment.data.postings.rows[place]]))
            count += place.stop - place.start - gone
        return places, count

    def _weights(self, key: bytes) -> dict[str, _Weights]:
        places, count = self.places(key)
        if not count:
            return {}
        rarity = np.float64(np.float32(inverse_frequency(count, self.chunks)))
        weights = {}
        for segment, norm, at in zip(self.segments, self._norms, places, strict=True):
            if at.stop > at.start:
                rows = segment.data.postings.rows[at]
                often = segment.data.postings.numbers[at].astype(np.float64)
                weights[segment.name] = rows, (rarity * (often / (norm[rows] + often))).astype(np.float32)
        return weights


def _size(weights: Mapping[str, _Weights]) -> int:
    return 64 + sum(len(rows) for rows, _ in weights.values())
