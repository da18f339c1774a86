"""Filter chunks by conditions on their documents' names, fields and metadata.

The fields and chunks of all documents are in an index of their own, `derived/fields`, which follows the store in
segments, as the retrieval indexes do. A row is a document. A segment stores the values of all fields in order, so a
value or prefix is found by binary search in mapped files, and a condition costs only as much as it matches. Only a
pattern that begins with a wildcard is tried on all values. The result for a list of conditions is cached as the same
object until it changes, so searches can cache what they derive from it.
"""

from __future__ import annotations

import difflib
import fnmatch
import glob
import hashlib
import re
import threading
import unicodedata
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ragkv.errors import UsageError
from ragkv.retrievers.arrays import IdSet, Texts, mapped_array, packed
from ragkv.retrievers.qdrant import term
from ragkv.retrievers.segments import IndexSegment, Segmented
from ragkv.store import StoredDocument
from ragkv.types import Document

_FIELDS = ("source", "title", "media_type", "document_id")
MAX_CONDITIONS = 256
MAX_PATTERN_CHARACTERS = 1024
"""The limit for patterns and names of fields, which may come from untrusted clients."""


def match(documents: Sequence[StoredDocument], names: Sequence[str]) -> list[StoredDocument]:
    """The documents selected by names: an id, a path, a source's name or its last part, or a pattern (`*`, `?`, `[…]`).

    Patterns apply to ids and source names. UsageError for a name without a document, and for an ambiguous name that
    is no pattern.
    """
    chosen: dict[str, StoredDocument] = {}
    for name in names:
        named = _named(documents, name)
        if len(named) > 1 and not is_pattern(name):
            ids = ", ".join(stored.document.document_id for stored in named[:5])
            more = f" and {len(named) - 5} more" if len(named) > 5 else ""
            raise UsageError(f"{name!r} names {len(named)} documents; say which by id: {ids}{more}.")
        if not named:
            known = {form: stored.document.document_id for stored in documents for form in _forms(stored)}
            close = dict.fromkeys(known[form] for form in difflib.get_close_matches(composed(name), known, n=3))
            hint = f"near it are {', '.join(close)}." if close else "ragkv ls lists all."
            raise UsageError(f"No document is called {name!r}; {hint}")
        chosen.update((stored.document.document_id, stored) for stored in named)
    return list(chosen.values())


def composed(text: str) -> str:
    """NFC, in which names and values are compared: some systems and archives write é as e and an accent."""
    return unicodedata.normalize("NFC", text)


def wanted_values(conditions: Sequence[str]) -> dict[str, list[str]]:
    """The patterns of conditions `FIELD=PATTERN` by field, composed, without duplicates.

    UsageError for a malformed or too long condition, and for too many of them.
    """
    if len(conditions) > MAX_CONDITIONS:
        raise UsageError(f"--where takes at most {MAX_CONDITIONS} conditions, not {len(conditions)}.", param="where")
    wanted: dict[str, dict[str, None]] = {}
    for condition in conditions:
        name, sign, pattern = (part.strip() for part in composed(condition).partition("="))
        if not sign or not name:
            raise UsageError(
                f"--where takes FIELD=PATTERN, as in source=notes/*.md, not {_short(condition)!r}.", param="where"
            )
        _require_short(name, param="where")
        _require_short(pattern, param="where")
        wanted.setdefault(name, {})[pattern] = None
    return {name: list(patterns) for name, patterns in wanted.items()}


def exact_first(wanted: Conditions, has: Callable[[str, str], bool]) -> Conditions:
    """The same conditions, in which a pattern that is itself a value (`report[1].txt`) means that value alone.

    `has` says whether a document has this value of a field.
    """
    return {
        name: [glob.escape(text) if is_pattern(text) and has(name, text) else text for text in texts]
        for name, texts in wanted.items()
    }


def meeting(documents: Sequence[StoredDocument], conditions: Sequence[str]) -> list[StoredDocument]:
    """The documents that meet conditions `FIELD=PATTERN`: for each field, one of its conditions must hold.

    FIELD is source, title, media_type, document_id or a key of the document's metadata; PATTERN may hold `*`, `?` and
    `[…]`, unless it is the value of a document as it is. A source also matches by its last part (`source=a.md`).
    UsageError for a condition of another form.
    """
    wanted = exact_first(
        wanted_values(conditions),
        lambda name, text: any(text in values_of(stored.document, name) for stored in documents),
    )
    patterns = {name: [Pattern(text) for text in texts] for name, texts in wanted.items()}
    return [
        stored
        for stored in documents
        if all(
            any(pattern.matches(value) for value in values_of(stored.document, name) for pattern in alternatives)
            for name, alternatives in patterns.items()
        )
    ]


def unmatched(conditions: Sequence[str]) -> str:
    """The message if no document meets the conditions."""
    shown = " ".join(conditions)
    return f"No document matches --where {_short(shown)}; ragkv ls lists all."


def values_of(document: Document, name: str) -> tuple[str, ...]:
    """The values of a field, composed and without duplicates; a source also has its last part."""
    if name == "source":
        source = composed(document.source)
        return tuple(dict.fromkeys((source, Path(source).name)))
    if name in _FIELDS:
        value = getattr(document, name)
        return () if value is None else (composed(value),)
    return tuple(dict.fromkeys(composed(value) for key, value in document.metadata.items() if composed(key) == name))


def all_values(document: Document) -> dict[str, tuple[str, ...]]:
    """All fields of a document with their values."""
    values = {name: values_of(document, name) for name in (*_FIELDS, *map(composed, document.metadata))}
    return {name: some for name, some in values.items() if some}


def _named(documents: Sequence[StoredDocument], name: str) -> list[StoredDocument]:
    try:
        path = str(Path(name).resolve())
    except ValueError:  # no valid path: it has a null byte or a lone surrogate
        path = name
    forms: list[tuple[Callable[[Document], str], str]] = [
        (lambda document: document.document_id, name),
        (lambda document: document.document_id, path),
        (lambda document: document.source, name),
        (lambda document: Path(document.source).name, name),
    ]
    for same in (str, composed):  # as it is written first, because two names may be equal when composed
        for form, wanted in forms:
            if chosen := [stored for stored in documents if same(form(stored.document)) == same(wanted)]:
                return chosen
    if not is_pattern(name):
        return []
    _require_short(name)
    patterns = [Pattern(composed(name)), Pattern(composed(path))]
    return [
        stored for stored in documents if any(pattern.matches(form) for form in _forms(stored) for pattern in patterns)
    ]


def _forms(stored: StoredDocument) -> tuple[str, str]:
    return composed(stored.document.document_id), composed(stored.document.source)


def is_pattern(name: str) -> bool:
    """Whether a name is a pattern that can match other names."""
    return any(sign in name for sign in "*?[")


def _require_short(pattern: str, *, param: str | None = None) -> None:
    """UsageError for a pattern or a field's name that is too long."""
    if len(pattern) > MAX_PATTERN_CHARACTERS:
        raise UsageError(
            f"A pattern has at most {MAX_PATTERN_CHARACTERS} characters, and {pattern[:40]!r}… has {len(pattern)}.",
            param=param,
        )


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}…"


class Pattern:
    """A pattern with `*`, `?` and `[…]`, as in `fnmatch.fnmatchcase`.

    Matching takes time in proportion to the text times the pattern's length, which is why that is limited
    (`MAX_PATTERN_CHARACTERS`).
    """

    def __init__(self, pattern: str) -> None:
        self._match = re.compile(fnmatch.translate(pattern)).match

    def matches(self, text: str) -> bool:
        """Whether the whole text matches."""
        return self._match(text) is not None


_FIELD_DIGITS = 16
_ARRAYS = {
    "starts": "int64",
    "rows": "int32",
    "chunks": "S16",
    "owners": "int32",
}

Conditions = Mapping[str, Sequence[str]]
"""Patterns by field; the field has to match one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentMetadata:
    """A document in the index: its values by field, and the keys of its chunks `(chunks,)` of type S16."""

    values: Mapping[str, Sequence[str]]
    chunks: NDArray[Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Fields:
    """A value is a hash of its field and the text, so that those of a field lie together. Value `v` is that of the
    documents in the rows `rows[starts[v] : starts[v + 1]]`. `chunks` are ascending; that of `chunks[c]` is in row
    `owners[c]`.
    """

    values: Texts  # ascending
    starts: NDArray[np.int64]  # (values + 1,)
    rows: NDArray[np.int32]  # (postings,), ascending within a value
    chunks: NDArray[Any]  # (chunks,) S16
    owners: NDArray[np.int32]  # (chunks,)

    @classmethod
    def collect(
        cls,
        values: Sequence[bytes],
        value_of: NDArray[np.int32],
        rows: NDArray[np.int32],
        chunks: NDArray[Any],
        owners: NDArray[np.int32],
    ) -> Self:
        """Build from columns: the document in `rows[i]` has the value `values[value_of[i]]`."""
        order = sorted(range(len(values)), key=values.__getitem__)
        rank = np.empty(len(values), dtype=np.int64)
        rank[order] = np.arange(len(values))
        places = rank[value_of]
        by_value = np.lexsort((rows, places))
        counts = np.bincount(places, minlength=len(values))
        ascending = np.argsort(chunks, kind="stable")
        return cls(
            values=Texts.of([values[value] for value, count in zip(order, counts.tolist(), strict=True) if count]),
            starts=np.concatenate([np.zeros(1, np.int64), np.cumsum(counts[counts > 0])]),
            rows=rows[by_value],
            chunks=chunks[ascending],
            owners=owners[ascending],
        )

    def matching(self, name: str, patterns: Sequence[str], rows: int) -> NDArray[np.bool_]:
        """(rows,): which documents have a matching value of this field."""
        matches = np.zeros(rows, dtype=np.bool_)
        for pattern in patterns:
            values = self._values(name, pattern)
            counts = self.starts[values + 1] - self.starts[values]
            places = np.repeat(self.starts[values] - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
            matches[self.rows[places]] = True
        return matches

    def values_of(self, name: str, patterns: Sequence[str]) -> Iterator[str]:
        """The values of this field that match one of the patterns."""
        for pattern in patterns:
            for at in self._values(name, pattern).tolist():
                yield _unpacked(self.values[at])

    def has(self, name: str, value: str, visible: NDArray[np.bool_]) -> bool:
        """Whether a visible document has this value of this field."""
        places = self._value(name, value)
        return len(places) > 0 and bool(visible[self.rows[self.starts[places[0]] : self.starts[places[0] + 1]]].any())

    def _value(self, name: str, text: str) -> NDArray[np.int64]:
        """The place of this value of a field, if it is there."""
        value = _field(name) + packed(text)
        at = bisect_left(self.values, value)
        return np.arange(at, at + (at < len(self.values) and self.values[at] == value))

    def _values(self, name: str, pattern: str) -> NDArray[np.int64]:
        """Which values match."""
        if not is_pattern(pattern):
            return self._value(name, pattern)
        begin = _field(name) + packed(re.split(r"[*?[]", pattern, maxsplit=1)[0])
        low = bisect_left(self.values, begin)
        high = bisect_right(self.values, begin, low, key=lambda value: value[: len(begin)])
        matches = Pattern(pattern).matches
        return low + np.flatnonzero([matches(_unpacked(value)) for value in self.values.many(low, high)])


def _field(name: str) -> bytes:
    return hashlib.blake2b(packed(name), digest_size=_FIELD_DIGITS // 2).hexdigest().encode()


def _unpacked(value: bytes) -> str:
    return str(value[_FIELD_DIGITS:], "utf-8", "surrogatepass")


class FieldIndex(Segmented[DocumentMetadata, _Fields]):
    """An index of a store's documents by their fields. Thread-safe."""

    name = "fields"
    parts = (*(f"values.{part}" for part in Texts.PARTS), *(f"{name}.npy" for name in _ARRAYS))

    def chunks(self, conditions: Conditions) -> tuple[int, NDArray[Any] | None]:
        """The number of documents that meet all conditions, and the ascending keys of their chunks; None if all do."""
        count = living = 0
        keys = [np.empty(0, dtype="S16")]
        segments = self.segments
        conditions = self._exact_first(segments, conditions)
        for segment in segments:
            living += segment.living
            met_by = self._met(segment, conditions)
            met = int(np.count_nonzero(met_by))
            count += met
            if met:
                keys.append(segment.data.chunks[met_by[segment.data.owners]])
        if count == living:
            return count, None
        return count, keys[1] if len(keys) == 2 else np.unique(np.concatenate(keys))

    def terms(self, conditions: Conditions) -> list[list[str]]:
        """For each field, the terms (`ragkv.retrievers.qdrant.term`) of the values that match one of its patterns."""
        segments = self.segments
        return [
            sorted({term(name, value) for segment in segments for value in segment.data.values_of(name, patterns)})
            for name, patterns in self._exact_first(segments, conditions).items()
        ]

    def documents(self, conditions: Conditions) -> list[str]:
        """The ids of the documents that meet all conditions."""
        segments = self.segments
        conditions = self._exact_first(segments, conditions)
        return [
            segment.id_table[row]
            for segment in segments
            for row in self._met(segment, conditions).nonzero()[0].tolist()
        ]

    def _exact_first(self, segments: Sequence[IndexSegment[_Fields]], conditions: Conditions) -> Conditions:
        return exact_first(conditions, lambda name, value: any(s.data.has(name, value, ~s.hidden) for s in segments))

    def _met(self, segment: IndexSegment[_Fields], conditions: Conditions) -> NDArray[np.bool_]:
        """(rows,): which visible documents of a segment meet all conditions."""
        met: NDArray[np.bool_] = ~segment.hidden
        for name, patterns in conditions.items():
            met &= segment.data.matching(name, patterns, len(met))
        return met

    def _gather(self, vectors: Iterator[DocumentMetadata], others: Sequence[_Fields]) -> _Fields:
        vocabulary: dict[bytes, int] = {}
        value_of, rows, sizes = array("i"), array("i"), array("i")
        keys: list[NDArray[Any]] = [np.empty(0, dtype="S16")]
        for row, document in enumerate(vectors):
            for name, values in document.values.items():
                field = _field(name)
                for value in dict.fromkeys(values):
                    value_of.append(vocabulary.setdefault(field + packed(value), len(vocabulary)))
                    rows.append(row)
            keys.append(document.chunks)
            sizes.append(len(document.chunks))
        owners = np.repeat(np.arange(len(sizes), dtype=np.int32), np.frombuffer(sizes, dtype=np.int32))
        numbers, documents = (np.frombuffer(column, dtype=np.int32) for column in (value_of, rows))
        return _Fields.collect(list(vocabulary), numbers, documents, np.concatenate(keys), owners)

    def _merge(self, parts: Sequence[tuple[_Fields, NDArray[np.bool_]]]) -> _Fields:
        vocabulary: dict[bytes, int] = {}
        columns: list[tuple[NDArray[Any], ...]] = []
        before = 0
        for data, living in parts:
            values = data.values.many(0, len(data.values))
            numbers = np.array([vocabulary.setdefault(value, len(vocabulary)) for value in values], dtype=np.int32)
            new = (np.cumsum(living) - 1 + before).astype(np.int32)
            before += int(np.count_nonzero(living))
            there, owned = living[data.rows], living[data.owners]
            at = np.repeat(numbers, np.diff(data.starts))[there]
            columns.append((at, new[data.rows[there]], data.chunks[owned], new[data.owners[owned]]))
        at, rows, chunks, owners = map(np.concatenate, zip(*columns, strict=True))
        return _Fields.collect(list(vocabulary), at, rows, chunks, owners)

    def _write(self, data: _Fields, folder: Path, name: str) -> None:
        data.values.write(folder, f"{name}.values")
        for part in _ARRAYS:
            np.save(folder / f"{name}.{part}.npy", getattr(data, part))

    def _read(self, folder: Path, name: str, rows: int) -> _Fields:
        arrays = {part: mapped_array(folder / f"{name}.{part}.npy", (kind,)) for part, kind in _ARRAYS.items()}
        data = _Fields(values=Texts.read(folder, f"{name}.values"), **arrays)
        starts, count = data.starts, len(data.rows)
        if len(starts) != len(data.values) + 1 or starts[0] != 0 or starts[-1] != count or (np.diff(starts) < 0).any():
            raise ValueError("its documents are not those of its values")
        for numbers in (data.rows, data.owners):
            if len(numbers) and not (numbers.min() >= 0 and numbers.max() < rows):
                raise ValueError("it names documents that it does not have")
        if len(data.chunks) != len(data.owners) or not (data.chunks[:-1] <= data.chunks[1:]).all():
            raise ValueError("its chunks are in no order")
        return data


CACHED_CONDITIONS = 32  # lists of conditions whose results are cached


class DocumentFilter:
    """Filters chunks and documents of one index by conditions, with a cache. Thread-safe.

    `fields` returns the current `FieldIndex`.
    """

    def __init__(self, fields: Callable[[], FieldIndex]) -> None:
        self._fields = fields
        self._lock = threading.Lock()  # guards the cache, not matching: a slow condition must not block others
        self._cache: dict[tuple[str, ...], tuple[tuple[int, str], int, IdSet | None]] = {}
        """By conditions: a version of the store, the number of documents then, and their chunks."""

    def among(self, where: Sequence[str]) -> IdSet | None:
        """The chunks of the documents that meet `where`; None for all. The same object as long as it is unchanged.

        UsageError for a malformed condition, or if no document meets them.
        """
        conditions, name = wanted_values(where), tuple(where)
        index = self._fields()
        version = index.generation, index.mark  # read first, so that the result is at least as new
        with self._lock:
            known, documents, chunks = self._cache.get(name, (None, 0, None))
        if known != version:
            documents, keys = index.chunks(conditions)
            if keys is None:
                chunks = None
            elif chunks is None or not np.array_equal(keys, chunks.keys):
                chunks = IdSet(keys)
            if chunks is not None:
                chunks.terms = cache(partial(index.terms, conditions))
        with self._lock:
            self._cache.pop(name, None)
            self._cache[name] = version, documents, chunks  # least recently used first
            while len(self._cache) > CACHED_CONDITIONS:
                del self._cache[next(iter(self._cache))]
        if not documents:
            raise UsageError(unmatched(where), param="where")
        return chunks

    def documents(self, where: Sequence[str]) -> list[str]:
        """The ids of the documents that meet `where`, some of which may be deleted meanwhile; UsageError as in
        `among`."""
        ids = self._fields().documents(wanted_values(where))
        if not ids:
            raise UsageError(unmatched(where), param="where")
        return ids
