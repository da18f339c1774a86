"""BM25 over chunk texts, which needs no model: Lucene's, with the very numbers that bm25s computes, in segments.

bm25s keeps finished scores, and every one of them changes with the number of chunks and their mean length: one changed
document would cost the whole index. So a segment keeps what does not change (how often a word occurs in a chunk, and
how long the chunk is), and a question computes the scores of its own words by bm25s' formula, in the same order and the
same precision. The tests compare them with bm25s' own, number by number.
"""

from __future__ import annotations

import math
import re
import threading
import unicodedata
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from ragkv.errors import ConfigError
from ragkv.retrievers.base import Hit, ScoreKind
from ragkv.retrievers.persistence import strings
from ragkv.retrievers.postings import Postings, best_rows, mapped_array, word_keys
from ragkv.retrievers.segment import Segment, SegmentedIndex

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ragkv.retrievers.roster import KeySet

    _Weights: TypeAlias = tuple[NDArray[np.int32], NDArray[np.float32]]
    """The rows of a segment that have a word, and what it adds to their scores."""

__all__ = ["BM25", "BM25Config", "Census", "tokenise"]

_COUNTS = ("uint8", "uint16", "uint32")
_LENGTHS = "lengths.npy"
_BLOCK = 1 << 21  # postings that are sorted at once
_FEW = 64  # where fewer than one row in so many may be found, no other is scored
_KEPT = 1 << 22  # weights that are kept for words that are asked for again (32 MiB with their rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class BM25Config:
    """Lucene's BM25: `k1` sets how soon term frequency saturates, `b` how much the length of a chunk counts.

    `stop_words` are left out of chunks and questions. There are none by default, because any list is for one language.
    """

    k1: float = 1.5
    b: float = 0.75
    stop_words: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.k1) and self.k1 >= 0):
            raise ConfigError(f"BM25's k1 must be a number from 0 up, not {self.k1}.")
        if not 0 <= self.b <= 1:
            raise ConfigError(f"BM25's b must be between 0 and 1, not {self.b}.")


# Scripts that are written without spaces, or with particles attached to words: Thai, Lao, Myanmar, Khmer, kana,
# bopomofo, CJK ideographs, Hangul syllables.
_UNSEGMENTED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3105-\u312f\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3"
    "\U00020000-\U000323af"
)


@lru_cache(maxsize=1)
def _patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Patterns for a word, and for a run of unsegmented script. `\\w` alone would cut Hindi words at vowel signs."""
    characters = map(chr, range(0x300, 0xFFFF))
    marks = "".join(char for char in characters if unicodedata.category(char) in ("Mn", "Mc"))
    return re.compile(rf"[^\W_]+(?:[{marks}]+[^\W_]*)*"), re.compile(f"[{_UNSEGMENTED}]+")


def tokenise(text: str) -> list[str]:
    """The words of a text in any language, normalised (NFKC) and case folded.

    Scripts without spaces give every character and every pair of neighbours: Lucene's CJK bigrams, and single
    characters, so that a word of one character is found.
    """
    word, run = _patterns()
    tokens: list[str] = []
    for found in word.findall(unicodedata.normalize("NFKC", text).casefold()):
        position = 0
        for piece in run.finditer(found):
            if piece.start() > position:
                tokens.append(found[position : piece.start()])
            characters = piece[0]
            tokens += characters
            tokens += (a + b for a, b in pairwise(characters))
            position = piece.end()
        if position < len(found):
            tokens.append(found[position:])
    return tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Words:
    """The words of a segment: how often each occurs in a row (the numbers of the postings), and each row's length."""

    postings: Postings
    lengths: NDArray[np.uint32]  # (rows,), in words


@dataclass(frozen=True, slots=True, kw_only=True)
class Census:
    """What BM25 needs to know of all chunks: how many, of how many words, and how many have each word of a question.

    `having` is by `word_keys`, in hexadecimal. Of indexes that are parts of one, the sums are those of the whole.
    """

    chunks: int
    words: int
    having: Mapping[str, int]

    def __add__(self, other: Census) -> Census:
        having = Counter(self.having)
        having.update(other.having)
        return Census(chunks=self.chunks + other.chunks, words=self.words + other.words, having=having)


class BM25(SegmentedIndex[str, "Sequence[Mapping[str, _Weights]]", _Words]):
    """The `Retriever` that needs no model. Scores are those of Lucene's BM25, in float32.

    A chunk without words is never found, but counts in the number of chunks and in their mean length.
    """

    name = "bm25"
    parts = (*Postings.PARTS, _LENGTHS)
    score_kind: ScoreKind = "sparse"

    def __init__(self, config: BM25Config | None = None) -> None:
        super().__init__()
        self.config = config or BM25Config()
        self._stop_words = frozenset(token for word in self.config.stop_words for token in tokenise(word))
        self._scores = _Scores(self.config, ())

    def build(self, chunks: Iterable[tuple[str, str]], generation: int) -> None:
        """Build the index anew from (chunk id, text) pairs. Scores do not depend on their order."""
        fresh = type(self)(self.config)
        fresh.update(chunks, (), generation=generation, embedder="")
        with self._writing:
            self._state, self.generation = fresh._state, generation

    def fields(self) -> dict[str, Any]:
        return {**asdict(self.config), "unicode": unicodedata.unidata_version}

    @classmethod
    def _configured(cls, fields: dict[str, Any]) -> Self:
        # another Python may know other letters, and find other words in a question than in the chunks
        if fields["unicode"] != unicodedata.unidata_version:
            raise ValueError("its words are those of another version of Unicode")
        stop_words = tuple(strings(fields["stop_words"], unique=False))
        return cls(BM25Config(k1=fields["k1"], b=fields["b"], stop_words=stop_words))

    def _is_blank(self, chunk_id: str, vector: str) -> bool:
        return False

    def _gather(self, vectors: Iterator[str], others: Sequence[_Words]) -> _Words:
        import numpy as np

        lengths = array("I")
        blocks: list[tuple[Postings, int]] = []
        while not blocks or blocks[-1][1]:
            blocks.append(self._block(vectors, lengths))
        postings = Postings.merged([(block, np.ones(rows, dtype=np.bool_)) for block, rows in blocks])
        return _Words(postings=postings, lengths=np.frombuffer(lengths, dtype=np.uint32))

    def _block(self, texts: Iterator[str], lengths: array[int]) -> tuple[Postings, int]:
        """The postings of the next texts, and how many texts these were, 0 at the end; their lengths join `lengths`."""
        import numpy as np

        vocabulary: dict[str, int] = {}
        words, counts, sizes = array("i"), array("I"), array("i")
        for text in texts:
            tokens = self._tokens(text)
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
        import numpy as np

        return _Words(
            postings=Postings.merged([(data.postings, kept) for data, kept in parts]),
            lengths=np.concatenate([data.lengths[kept] for data, kept in parts]),
        )

    def _query(self, query: str, segments: Sequence[Segment[_Words]]) -> Sequence[Mapping[str, _Weights]] | None:
        scores = self._scores
        if scores.segments is not segments:  # the index has changed since the last question
            scores = self._scores = _Scores(self.config, segments)
        return [found for key in word_keys(self._tokens(query)) if (found := scores.of(key))] or None

    def census(self, question: str) -> Census:
        """What this index has of the words of a question."""
        return _Scores(self.config, self._state.segments).census(word_keys(self._tokens(question)))

    def search_part(
        self, question: str, k: int, whole: Census, *, among: Collection[str] | KeySet | None = None
    ) -> list[Hit]:
        """`search` in an index that is a part of a larger one: scored as the whole would score them."""
        segments = self._state.segments
        scores = _Scores(self.config, segments, whole)
        asked = [found for key in word_keys(self._tokens(question)) if (found := scores.of(key))]
        return self._best(segments, asked, k, among) if asked else []

    def _search(
        self,
        segment: Segment[_Words],
        query: Sequence[Mapping[str, _Weights]],
        k: int,
        allowed: NDArray[np.bool_] | None,
        *,
        exact: bool,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        import numpy as np

        if allowed is not None and len(few := np.flatnonzero(allowed)) * _FEW < len(allowed):
            found, best = best_rows(_scores_of(few, segment.name, query), k, None)
            return few[found], best
        scores = np.zeros(len(segment.roster), dtype=np.float32)
        for word in query:  # in the order of the question, a word as often as it asks for it: float32 sums depend on it
            if segment.name in word:
                np.add.at(scores, *word[segment.name])
        return best_rows(scores, k, allowed)

    def _write(self, data: _Words, folder: Path, name: str) -> None:
        import numpy as np

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

    def _tokens(self, text: str) -> list[str]:
        tokens = tokenise(text)
        return [token for token in tokens if token not in self._stop_words] if self._stop_words else tokens


def _scores_of(few: NDArray[np.int64], name: str, query: Sequence[Mapping[str, _Weights]]) -> NDArray[np.float32]:
    """(few,): the scores of these rows of the segment called `name`, in the same order of sums as those of all rows."""
    import numpy as np

    scores = np.zeros(len(few), dtype=np.float32)
    for word in query:
        if name in word:
            rows, weights = word[name]
            at = np.minimum(np.searchsorted(rows, few), len(rows) - 1)
            there = rows[at] == few
            scores[there] += weights[at[there]]
    return scores


class _Scores:
    """What the words of questions add to the scores of chunks, for one state of the segments.

    Words that many questions have are frequent ones, and theirs are the most postings. So their weights are kept.
    """

    def __init__(self, config: BM25Config, segments: Sequence[Segment[_Words]], whole: Census | None = None) -> None:
        import numpy as np

        self.segments = segments
        self._whole = whole
        self._lock = threading.Lock()
        self._known: dict[bytes, dict[str, _Weights]] = {}
        self._size = 0
        self._chunks = sum(segment.living for segment in segments)
        words = sum(int(segment.data.lengths.sum(where=~segment.hidden, dtype=np.uint64)) for segment in segments)
        self._words = words
        if whole is not None:
            self._chunks, words = whole.chunks, whole.words
        mean = words / self._chunks if words else 1.0
        # the same operations as bm25s', in the same order: k1 * ((1 - b) + b * length / mean)
        self._norms = [config.k1 * ((1 - config.b) + config.b * segment.data.lengths / mean) for segment in segments]

    def of(self, key: bytes) -> dict[str, _Weights]:
        """By the names of segments, the weights of the word with this key; empty if no chunk has it."""
        with self._lock:
            found = self._known.pop(key, None)
            if found is None:
                found = self._weights(key)
                self._size += _size(found)
            self._known[key] = found  # the last one asked for is the last one to go
            while self._size > _KEPT and len(self._known) > 1:
                self._size -= _size(self._known.pop(next(iter(self._known))))
            return found

    def census(self, keys: Iterable[bytes]) -> Census:
        """How many chunks have each of these words."""
        having = {key.hex(): self._places(key)[1] for key in keys}
        return Census(chunks=self._chunks, words=self._words, having=having)

    def _places(self, key: bytes) -> tuple[list[slice], int]:
        """Where the segments have the word, and how many living chunks that are."""
        import numpy as np

        asked = np.array([key], dtype="S16")
        places, count = [], 0
        for segment in self.segments:
            [at] = segment.data.postings.find(asked)
            places.append(at)
            gone = 0
            if segment.living < len(segment.hidden):
                gone = int(np.count_nonzero(segment.hidden[segment.data.postings.rows[at]]))
            count += at.stop - at.start - gone
        return places, count

    def _weights(self, key: bytes) -> dict[str, _Weights]:
        import numpy as np

        places, count = self._places(key)
        if not count:
            return {}
        if self._whole is not None:
            count = self._whole.having[key.hex()]
        rarity = np.float64(np.float32(math.log(1 + (self._chunks - count + 0.5) / (count + 0.5))))
        found = {}
        for segment, norm, at in zip(self.segments, self._norms, places, strict=True):
            if at.stop > at.start:
                rows = segment.data.postings.rows[at]
                often = segment.data.postings.numbers[at].astype(np.float64)
                found[segment.name] = rows, (rarity * (often / (norm[rows] + often))).astype(np.float32)
        return found


def _size(weights: Mapping[str, _Weights]) -> int:
    return 64 + sum(len(rows) for rows, _ in weights.values())
