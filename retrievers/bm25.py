"""BM25 over chunk texts, which needs no model. Scoring is by bm25s.

On the disk are bm25s' own files and the chunk ids (`ragkv.retrievers.persistence`).
"""

from __future__ import annotations

import json
import logging
import math
import re
import unicodedata
from array import array
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from ragkv.errors import ConfigError, RetrievalError
from ragkv.retrievers.base import Hit, ScoreKind, best_hits
from ragkv.retrievers.persistence import load_index, read_json, save_index, strings, whole_number
from ragkv.retrievers.postings import mapped_array, require_postings

__all__ = ["BM25", "BM25Config", "tokenise"]

_FORMAT = 1  # raise it when the files or `tokenise` change
_CHUNKS = "chunks.json"
_PARAMETERS, _VOCABULARY = "params.index.json", "vocab.index.json"
_ARRAYS = {"indptr": ("int32", "int64"), "indices": ("int32", "int64"), "data": ("float32",)}
_FILES = frozenset({_CHUNKS, _PARAMETERS, _VOCABULARY, *(f"{name}.csc.index.npy" for name in _ARRAYS)})


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Index:
    """A finished index. It never changes, so that a search that runs during a `build` goes on with the old one."""

    chunk_ids: tuple[str, ...]
    vocabulary: dict[str, int]
    scorer: Any  # bm25s.BM25 over vocabulary ids; None when no chunk has a word


class BM25:
    """The `Retriever` that needs no model. Scores are those of Lucene's BM25, in float32."""

    name = "bm25"
    score_kind: ScoreKind = "sparse"

    def __init__(self, config: BM25Config | None = None) -> None:
        self.config = config or BM25Config()
        self.generation = 0
        self._stop_words = frozenset(token for word in self.config.stop_words for token in tokenise(word))
        self._index = _Index(chunk_ids=(), vocabulary={}, scorer=None)

    def __len__(self) -> int:
        return len(self._index.chunk_ids)

    def build(self, chunks: Iterable[tuple[str, str]], generation: int) -> None:
        """Build the index anew from (chunk id, text) pairs. Scores do not depend on their order."""
        chunk_ids: list[str] = []
        vocabulary: dict[str, int] = {}
        documents: list[array[int]] = []
        for chunk_id, text in chunks:
            chunk_ids.append(chunk_id)
            tokens = self._tokens(text)
            documents.append(array("i", [vocabulary.setdefault(token, len(vocabulary)) for token in tokens]))
        if len(set(chunk_ids)) != len(chunk_ids):
            raise RetrievalError("A chunk id occurs twice among the chunks to index; re-ingest the documents.")
        scorer = None
        if vocabulary:
            # Given the tokens themselves, bm25s would number them in the order of a set, which changes with every run.
            scorer = self._scorer()
            scorer.index((documents, vocabulary), create_empty_token=False, show_progress=False)
        self._index = _Index(chunk_ids=tuple(chunk_ids), vocabulary=vocabulary, scorer=scorer)
        self.generation = generation

    def search(self, question: str, k: int, *, among: Collection[str] | None = None) -> list[Hit]:
        """The best `k` chunks (of those `among`) that share a word with the question."""
        import numpy as np

        if k < 1:
            raise ValueError(f"k must be at least 1, not {k}")
        index = self._index
        known = [index.vocabulary[token] for token in self._tokens(question) if token in index.vocabulary]
        if not known:
            return []
        # bm25s' own `retrieve` breaks ties arbitrarily, and raises when k exceeds the number of chunks.
        scores = index.scorer.get_scores_from_ids(known)  # (chunks,)
        found = np.flatnonzero(scores > 0)
        if among is not None:
            found = np.array([i for i in found.tolist() if index.chunk_ids[i] in among], dtype=np.int64)
        if len(found) > k:  # keep all that tie with the k-th, because ties are broken by id
            found = found[scores[found] >= np.partition(scores[found], -k)[-k]]
        return best_hits((Hit(chunk_id=index.chunk_ids[i], score=float(scores[i])) for i in found.tolist()), k)

    def save(self, folder: Path) -> None:
        """Write to `folder`, which is created if necessary. A crash leaves the old index or the new one."""
        index = self._index

        def write(data: Path) -> dict[str, str]:
            if index.scorer is not None:
                index.scorer.save(data, show_progress=False)
            (data / _CHUNKS).write_text(json.dumps(index.chunk_ids), encoding="utf-8")
            return {}

        fields = {"format": _FORMAT, "generation": self.generation, "config": asdict(self.config)}
        save_index(folder, "BM25", fields, write)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Open what `save` wrote. Every file is checked; scores are mapped into memory rather than read."""
        return load_index(folder, "BM25", _FORMAT, cls._open)

    @classmethod
    def _open(cls, data: Path, manifest: dict[str, Any]) -> Self:
        config = manifest["config"] | {"stop_words": tuple(strings(manifest["config"]["stop_words"], unique=False))}
        self = cls(BM25Config(**config))
        self.generation = whole_number(manifest["generation"])
        files = manifest["files"].keys()
        if not files <= _FILES:
            raise ValueError("its manifest names files that no such index has")
        chunk_ids = tuple(strings(read_json(data / _CHUNKS)))
        scorer, vocabulary = None, {}
        if len(files) > 1:
            vocabulary = _vocabulary(read_json(data / _VOCABULARY))
            # bm25s' own `load` would believe its parameter file, which somebody else may have written.
            arrays = {name: mapped_array(data / f"{name}.csc.index.npy", kinds) for name, kinds in _ARRAYS.items()}
            if read_json(data / _PARAMETERS)["num_docs"] != len(chunk_ids):
                raise ValueError("the scores are of another set of chunks")
            require_postings(*arrays.values(), tokens=len(vocabulary), chunks=len(chunk_ids))
            scorer = self._scorer()
            scorer.scores = {**arrays, "num_docs": len(chunk_ids)}
            scorer.vocab_dict, scorer.nonoccurrence_array = vocabulary, None
        self._index = _Index(chunk_ids=chunk_ids, vocabulary=vocabulary, scorer=scorer)
        return self

    def _scorer(self) -> Any:
        return _bm25s().BM25(k1=self.config.k1, b=self.config.b, method="lucene", backend="numpy")

    def _tokens(self, text: str) -> list[str]:
        tokens = tokenise(text)
        return [token for token in tokens if token not in self._stop_words] if self._stop_words else tokens


def _vocabulary(found: Any) -> dict[str, int]:
    """`found`; `ValueError` unless it maps tokens to numbers from 0."""
    numbers: list[Any] = list(found.values()) if isinstance(found, dict) else [None]
    if not all(type(number) is int for number in numbers) or sorted(numbers) != list(range(len(numbers))):
        raise ValueError("its vocabulary does not number tokens")
    return found  # type: ignore[no-any-return]


def _bm25s() -> Any:
    """bm25s, imported when first needed, without the debug messages that it logs by default."""
    import bm25s

    logging.getLogger("bm25s").setLevel(logging.WARNING)
    return bm25s
