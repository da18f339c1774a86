"""The fields of all documents, and which chunks are theirs, in segments that follow the store as retrieval indexes do.

It lies in `derived/fields`. A row is a document. A segment keeps the values of each field in order, so that a value,
and the beginning of a pattern, are found by binary search in files that are mapped: what a condition costs is what it
matches. Only a pattern that begins with a wildcard is tried on all values of its field.
"""

from __future__ import annotations

import fnmatch
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self
from weakref import WeakKeyDictionary

from ragkv.index.selection import is_pattern
from ragkv.retrievers.postings import mapped_array
from ragkv.retrievers.roster import require_texts
from ragkv.retrievers.segment import Segment, Segmented

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Conditions", "DocumentFields", "FieldIndex"]

_KEPT = 64  # conditions on one field whose documents are kept for each segment
_ARRAYS = {
    "fields.text": "uint8",
    "fields.cuts": "int64",
    "spans": "int64",
    "values.text": "uint8",
    "values.cuts": "int64",
    "starts": "int64",
    "rows": "int32",
    "chunks": "S16",
    "owners": "int32",
}

Conditions = Mapping[str, Sequence[str]]
"""Patterns by the field that has to match one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentFields:
    """What the index holds of a document: its values by field, and the keys of its chunks `(chunks,)` of type S16."""

    values: Mapping[str, Sequence[str]]
    chunks: NDArray[Any]


@dataclass(frozen=True, slots=True)
class _Texts(Sequence[bytes]):
    """Texts in UTF-8, one after another: text `at` is `text[cuts[at] : cuts[at + 1]]`."""

    text: NDArray[np.uint8]
    cuts: NDArray[np.int64]

    @classmethod
    def of(cls, texts: Sequence[bytes]) -> Self:
        import numpy as np

        cuts = np.zeros(len(texts) + 1, dtype=np.int64)
        np.cumsum([len(each) for each in texts], out=cuts[1:])
        return cls(np.frombuffer(b"".join(texts), dtype=np.uint8), cuts)

    def __len__(self) -> int:
        return len(self.cuts) - 1

    def __getitem__(self, at: Any) -> Any:
        return self.text[self.cuts[at] : self.cuts[at + 1]].tobytes()

    def many(self, low: int, high: int) -> list[bytes]:
        """The texts from `low` up to `high`."""
        cuts = self.cuts[low : high + 1].tolist()
        whole = self.text[cuts[0] : cuts[-1]].tobytes()
        return [whole[start - cuts[0] : end - cuts[0]] for start, end in pairwise(cuts)]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Fields:
    """Field `f` has the values `values[spans[f] : spans[f + 1]]`, ascending; value `v` is that of the documents in the
    rows `rows[starts[v] : starts[v + 1]]`. `chunks` are ascending; that of `chunks[c]` is in row `owners[c]`.
    """

    fields: _Texts  # ascending
    spans: NDArray[np.int64]  # (fields + 1,)
    values: _Texts
    starts: NDArray[np.int64]  # (values + 1,)
    rows: NDArray[np.int32]  # (postings,), ascending within a value
    chunks: NDArray[Any]  # (chunks,) S16
    owners: NDArray[np.int32]  # (chunks,)

    PARTS: ClassVar = tuple(f"{name}.npy" for name in _ARRAYS)

    @classmethod
    def collect(
        cls,
        words: Sequence[tuple[bytes, bytes]],
        at: NDArray[np.int32],
        rows: NDArray[np.int32],
        chunks: NDArray[Any],
        owners: NDArray[np.int32],
    ) -> Self:
        """The fields of columns: the field and value `words[at[i]]` are those of the document in `rows[i]`."""
        import numpy as np

        order = sorted(range(len(words)), key=words.__getitem__)
        rank = np.empty(len(words), dtype=np.int64)
        rank[order] = np.arange(len(words))
        places = rank[at]
        by_value = np.lexsort((rows, places))
        counts = np.bincount(places, minlength=len(words))
        there = [words[word] for word, count in zip(order, counts.tolist(), strict=True) if count]
        names = sorted({name for name, _ in there})
        sizes = dict.fromkeys(names, 0)
        for name, _ in there:
            sizes[name] += 1
        ascending = np.argsort(chunks, kind="stable")
        return cls(
            fields=_Texts.of(names),
            spans=np.cumsum([0, *sizes.values()], dtype=np.int64),
            values=_Texts.of([value for _, value in there]),
            starts=np.concatenate([np.zeros(1, np.int64), np.cumsum(counts[counts > 0])]),
            rows=rows[by_value],
            chunks=chunks[ascending],
            owners=owners[ascending],
        )

    def words(self) -> list[tuple[bytes, bytes]]:
        """Every field with each of its values."""
        found: list[tuple[bytes, bytes]] = []
        for at, name in enumerate(self.fields.many(0, len(self.fields))):
            found += ((name, value) for value in self.values.many(int(self.spans[at]), int(self.spans[at + 1])))
        return found

    def matching(self, name: str, patterns: Sequence[str], rows: int) -> NDArray[np.bool_]:
        """(rows,): which documents have a value of this field that matches one of the patterns."""
        import numpy as np

        found = np.zeros(rows, dtype=np.bool_)
        field = _packed(name)
        at = bisect_left(self.fields, field)
        if at == len(self.fields) or self.fields[at] != field:
            return found
        for pattern in patterns:
            values = self._values(pattern, int(self.spans[at]), int(self.spans[at + 1]))
            counts = self.starts[values + 1] - self.starts[values]
            places = np.repeat(self.starts[values] - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
            found[self.rows[places]] = True
        return found

    def _values(self, pattern: str, low: int, high: int) -> NDArray[np.int64]:
        """Which of the values from `low` to `high` match."""
        import numpy as np

        if not is_pattern(pattern):
            value = _packed(pattern)
            at = bisect_left(self.values, value, low, high)
            return np.arange(at, at + (at < high and self.values[at] == value))
        begin = _packed(re.split(r"[*?[]", pattern, maxsplit=1)[0])
        low = bisect_left(self.values, begin, low, high)
        high = bisect_right(self.values, begin, low, high, key=lambda value: value[: len(begin)])
        match = re.compile(fnmatch.translate(pattern)).match
        texts = [str(value, "utf-8", "surrogatepass") for value in self.values.many(low, high)]
        return low + np.flatnonzero([match(text) is not None for text in texts])

    def arrays(self) -> list[NDArray[Any]]:
        """In the order of the files."""
        texts = (self.fields.text, self.fields.cuts, self.spans, self.values.text, self.values.cuts)
        return [*texts, self.starts, self.rows, self.chunks, self.owners]


class FieldIndex(Segmented[DocumentFields, _Fields]):
    """The documents of a store by their fields. One thread at a time may ask it."""

    name = "fields"
    parts = _Fields.PARTS

    def __init__(self) -> None:
        super().__init__()
        self._known: WeakKeyDictionary[_Fields, dict[tuple[str, ...], NDArray[np.bool_]]] = WeakKeyDictionary()

    def chunks(self, conditions: Conditions) -> tuple[int, NDArray[Any] | None]:
        """How many documents meet all conditions, and the keys of their chunks, ascending; None when all do."""
        import numpy as np

        count = living = 0
        keys = [np.empty(0, dtype="S16")]
        for segment in self._state.segments:
            living += segment.living
            found = self._met(segment, conditions)
            met = int(np.count_nonzero(found))
            count += met
            if met:
                keys.append(segment.data.chunks[found[segment.data.owners]])
        if count == living:
            return count, None
        return count, keys[1] if len(keys) == 2 else np.unique(np.concatenate(keys))

    def documents(self, conditions: Conditions) -> list[str]:
        """The ids of the documents that meet all conditions."""
        segments = self._state.segments
        return [
            segment.roster[row] for segment in segments for row in self._met(segment, conditions).nonzero()[0].tolist()
        ]

    def _met(self, segment: Segment[_Fields], conditions: Conditions) -> NDArray[np.bool_]:
        """(rows,): which documents of a segment are there and meet all conditions."""
        found = ~segment.hidden
        for name, patterns in conditions.items():
            found &= self._matching(segment, name, patterns)
        return found

    def _matching(self, segment: Segment[_Fields], name: str, patterns: Sequence[str]) -> NDArray[np.bool_]:
        known = self._known.setdefault(segment.data, {})
        found = known.pop((name, *patterns), None)
        if found is None:
            found = segment.data.matching(name, patterns, len(segment.hidden))
        known[name, *patterns] = found  # the last one asked for is the last one to go
        if len(known) > _KEPT:
            del known[next(iter(known))]
        return found

    def fields(self) -> dict[str, Any]:
        return {}

    @classmethod
    def _configured(cls, fields: dict[str, Any]) -> Self:
        return cls(**fields)

    def _is_blank(self, chunk_id: str, vector: DocumentFields) -> bool:
        return False

    def _gather(self, vectors: Iterator[DocumentFields], others: Sequence[_Fields]) -> _Fields:
        import numpy as np

        vocabulary: dict[tuple[bytes, bytes], int] = {}
        at, rows, sizes = array("i"), array("i"), array("i")
        keys: list[NDArray[Any]] = [np.empty(0, dtype="S16")]
        for row, document in enumerate(vectors):
            for name, values in document.values.items():
                for value in dict.fromkeys(values):
                    word = _packed(name), _packed(value)
                    at.append(vocabulary.setdefault(word, len(vocabulary)))
                    rows.append(row)
            keys.append(document.chunks)
            sizes.append(len(document.chunks))
        owners = np.repeat(np.arange(len(sizes), dtype=np.int32), np.frombuffer(sizes, dtype=np.int32))
        words, documents = (np.frombuffer(column, dtype=np.int32) for column in (at, rows))
        return _Fields.collect(list(vocabulary), words, documents, np.concatenate(keys), owners)

    def _merge(self, parts: Sequence[tuple[_Fields, NDArray[np.bool_]]]) -> _Fields:
        import numpy as np

        vocabulary: dict[tuple[bytes, bytes], int] = {}
        columns: list[tuple[NDArray[Any], ...]] = []
        before = 0
        for data, kept in parts:
            numbers = np.array([vocabulary.setdefault(word, len(vocabulary)) for word in data.words()], dtype=np.int32)
            new = (np.cumsum(kept) - 1 + before).astype(np.int32)
            before += int(np.count_nonzero(kept))
            there, owned = kept[data.rows], kept[data.owners]
            at = np.repeat(numbers, np.diff(data.starts))[there]
            columns.append((at, new[data.rows[there]], data.chunks[owned], new[data.owners[owned]]))
        at, rows, chunks, owners = map(np.concatenate, zip(*columns, strict=True))
        return _Fields.collect(list(vocabulary), at, rows, chunks, owners)

    def _write(self, data: _Fields, folder: Path, name: str) -> None:
        import numpy as np

        for part, numbers in zip(_ARRAYS, data.arrays(), strict=True):
            np.save(folder / f"{name}.{part}.npy", numbers)

    def _read(self, folder: Path, name: str, rows: int) -> _Fields:
        found = [mapped_array(folder / f"{name}.{part}.npy", (kind,)) for part, kind in _ARRAYS.items()]
        fields, values = _Texts(*found[0:2]), _Texts(*found[3:5])
        spans, starts, postings, chunks, owners = found[2], *found[5:]
        require_texts(fields.text, fields.cuts)
        require_texts(values.text, values.cuts)
        _require_spans(spans, len(fields), len(values))
        _require_spans(starts, len(values), len(postings))
        for numbers in (postings, owners):
            if len(numbers) and not (numbers.min() >= 0 and numbers.max() < rows):
                raise ValueError("it names documents that it does not have")
        if len(chunks) != len(owners) or not (chunks[:-1] <= chunks[1:]).all():
            raise ValueError("its chunks are in no order")
        return _Fields(
            fields=fields, spans=spans, values=values, starts=starts, rows=postings, chunks=chunks, owners=owners
        )


def _require_spans(spans: NDArray[np.int64], count: int, size: int) -> None:
    """`ValueError` unless `spans` divides `size` things among `count`."""
    if len(spans) != count + 1 or spans[0] != 0 or spans[-1] != size or (spans[1:] < spans[:-1]).any():
        raise ValueError("its values are not those of its fields")


def _packed(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
