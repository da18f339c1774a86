"""A vector index in immutable segments, so that searches need no lock, and updates only cost as much as they add.

A FAISS index must not be searched while it changes, and a mapped one must not change at all (removing from it crashes).
So an update makes a small segment of what it adds, and hides what it removes. A segment is merged into the one before
it unless that one is several times larger, and it is rebuilt when much of it is hidden. A search asks all segments and
merges their best hits. Each fourfold growth of the index moves a vector a few times, and an update of 20 chunks leaves
a large segment alone, which matters because copying 100,000 vectors of 1024 numbers takes half a second.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

from ragkv.errors import RetrievalError
from ragkv.retrievers.base import Hit, ScoreKind, best_hits
from ragkv.retrievers.persistence import load_index, read_json, save_index, strings, whole_number

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Segment", "SegmentedIndex"]

_FORMAT = 1  # of the files of dense and sparse indexes
_NAME = re.compile(r"[0-9a-f]{16}")  # of a segment, as `secrets.token_hex(8)` makes it
_TABLE = "table.json"
_IDS = "ids.json"
_RATIO = 4  # a segment that is at least this many times larger than the next one is left alone
_HIDDEN = 0.25  # a segment of which a larger share is hidden is rebuilt

V = TypeVar("V")
"""A vector, as the caller gives it."""
Q = TypeVar("Q")
"""A query, checked and prepared for the search."""
D = TypeVar("D")
"""The vectors of one segment, which never change."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment(Generic[D]):
    """Vectors in rows from 0, their chunk ids, and which rows are hidden because their chunks were removed."""

    chunk_ids: Sequence[str]
    rows: Mapping[str, int]
    data: D
    hidden: NDArray[np.bool_]  # (rows,)
    living: int
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    home: Path | None = None
    """The folder with the segment's files, once it is saved."""
    files: Mapping[str, str] = field(default_factory=dict)
    """The checksums of these files, by file name."""

    def __contains__(self, chunk_id: str) -> bool:
        row = self.rows.get(chunk_id)
        return row is not None and not self.hidden[row]

    def without(self, removed: Collection[str]) -> Self:
        """The same segment with more rows hidden."""
        gone = [self.rows[chunk_id] for chunk_id in removed if chunk_id in self]
        if not gone:
            return self
        hidden = self.hidden.copy()
        hidden[gone] = True
        return replace(self, hidden=hidden, living=self.living - len(set(gone)))

    def allowed(self, among: Collection[str] | None) -> NDArray[np.bool_] | None:
        """(rows,): which rows may be found; None when all may."""
        import numpy as np

        if among is None:
            return None if self.living == len(self.hidden) else ~self.hidden
        allowed = np.zeros(len(self.hidden), dtype=np.bool_)
        allowed[[self.rows[chunk_id] for chunk_id in among if chunk_id in self.rows]] = True
        return allowed & ~self.hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class _State(Generic[D]):
    """What a search sees. `blank` are the chunks whose vectors nothing can find."""

    segments: tuple[Segment[D], ...] = ()
    blank: frozenset[str] = frozenset()


class SegmentedIndex(ABC, Generic[V, Q, D]):
    """What dense and sparse indexes share. A subclass gathers, merges, searches and writes vectors of its kind."""

    name: ClassVar[str]
    parts: ClassVar[tuple[str, ...]]
    """The names of the files that `_write` writes, behind the segment's name and a dot."""
    score_kind: ScoreKind

    def __init__(self) -> None:
        self.generation = 0
        self.embedder = ""
        self._writing = threading.Lock()  # one update or save at a time; searches do not ask for it
        self._state: _State[D] = _State()

    def __len__(self) -> int:
        state = self._state
        return sum(segment.living for segment in state.segments) + len(state.blank)

    def chunk_ids(self) -> frozenset[str]:
        """The ids of all chunks in the index, including those that nothing can find."""
        state = self._state
        return state.blank.union(
            chunk_id
            for segment in state.segments
            for chunk_id, hidden in zip(segment.chunk_ids, segment.hidden.tolist(), strict=True)
            if not hidden
        )

    def update(
        self, added: Iterable[tuple[str, V]], removed: Collection[str], *, generation: int, embedder: str
    ) -> None:
        """Remove, then add. `RetrievalError`, with nothing changed, when something is wrong.

        It is no error to remove an id that is not there, but it is one to add an id that is there, or twice. Vectors of
        another embedder can only be added when all vectors of the old one are removed.
        """
        with self._writing:
            removed = set(removed)
            segments = tuple(segment.without(removed) for segment in self._state.segments)
            blank = set(self._state.blank - removed)
            if self.embedder not in ("", embedder) and (blank or any(segment.living for segment in segments)):
                raise RetrievalError(
                    f"The {self.name} index has vectors of another embedder; remove them all, or start a new index."
                )
            fresh, empty = self._segment(added, segments, blank)
            segments = tuple(self._tidy([*segments, *([fresh] if fresh else ())]))
            self._state = _State(segments=segments, blank=frozenset(blank | empty))
            self.generation, self.embedder = generation, embedder

    def _segment(
        self, added: Iterable[tuple[str, V]], segments: Sequence[Segment[D]], blank: Collection[str]
    ) -> tuple[Segment[D] | None, set[str]]:
        """A segment of what is added, None when there is no vector in it; and the ids of blank vectors."""
        import numpy as np

        rows: dict[str, int] = {}
        empty: set[str] = set()

        def vectors() -> Iterator[V]:
            for chunk_id, vector in added:
                there = chunk_id in rows or chunk_id in empty or chunk_id in blank
                if there or any(chunk_id in segment for segment in segments):
                    raise RetrievalError(f"Chunk {chunk_id!r} is in the {self.name} index already; remove it first.")
                if self._is_blank(chunk_id, vector):
                    empty.add(chunk_id)
                else:
                    rows[chunk_id] = len(rows)
                    yield vector

        data = self._gather(vectors(), [segment.data for segment in segments])
        if not rows:
            return None, empty
        hidden = np.zeros(len(rows), dtype=np.bool_)
        return Segment(chunk_ids=tuple(rows), rows=rows, data=data, hidden=hidden, living=len(rows)), empty

    def _tidy(self, segments: list[Segment[D]]) -> list[Segment[D]]:
        """Merge and rebuild, so that none is empty or has many hidden rows, and each is much larger than the next."""
        tidy: list[Segment[D]] = []
        for segment in segments:
            group = [segment] if segment.living else []
            size = segment.living
            while tidy and group and tidy[-1].living < _RATIO * size:
                group.insert(0, tidy.pop())
                size += group[0].living
            if len(group) > 1 or (group and size < (1 - _HIDDEN) * len(group[0].hidden)):
                group = [self._join(group)]
            tidy += group
        return tidy

    def _join(self, segments: Sequence[Segment[D]]) -> Segment[D]:
        import numpy as np

        chunk_ids = tuple(
            segment.chunk_ids[row] for segment in segments for row in np.flatnonzero(~segment.hidden).tolist()
        )
        return Segment(
            chunk_ids=chunk_ids,
            rows={chunk_id: row for row, chunk_id in enumerate(chunk_ids)},
            data=self._merge([(segment.data, segment.allowed(None)) for segment in segments]),
            hidden=np.zeros(len(chunk_ids), dtype=np.bool_),
            living=len(chunk_ids),
        )

    def search(self, query: V, k: int, *, among: Collection[str] | None = None) -> list[Hit]:
        """At most `k` hits, best first, ties by chunk id (`Retriever.search`)."""
        if k < 1:
            raise ValueError(f"k must be at least 1, not {k}")
        segments = self._state.segments
        asked = self._query(query, [segment.data for segment in segments])
        if asked is None:
            return []
        hits: list[Hit] = []
        for segment in segments:
            allowed = segment.allowed(among)
            if allowed is not None and not allowed.any():
                continue
            rows, scores = self._search(segment.data, asked, k, allowed, exact=among is not None)
            hits += (
                Hit(chunk_id=segment.chunk_ids[row], score=score)
                for row, score in zip(rows.tolist(), scores.tolist(), strict=True)
            )
        return best_hits(hits, k)

    def save(self, folder: Path) -> None:
        """Write to `folder`. A crash leaves the old index or the new one.

        Segments never change, so that the files of those that were saved before are linked instead of written.
        """
        with self._writing:
            state = self._state

            def write(data: Path) -> dict[str, str]:
                known: dict[str, str] = {}
                for segment in state.segments:
                    known |= self._place(segment, data)
                hidden = {segment.name: segment.hidden.nonzero()[0].tolist() for segment in state.segments}
                table = {"blank": sorted(state.blank), "hidden": hidden}
                (data / _TABLE).write_text(json.dumps(table), encoding="utf-8")
                return known

            home, files = save_index(
                folder,
                self.name,
                {
                    "format": _FORMAT,
                    "kind": self.name,
                    "generation": self.generation,
                    "embedder": self.embedder,
                    "config": self._fields(),
                    "segments": [segment.name for segment in state.segments],
                },
                write,
            )
            self._state = replace(state, segments=tuple(_at_home(segment, home, files) for segment in state.segments))

    def _place(self, segment: Segment[D], data: Path) -> Mapping[str, str]:
        """Put a segment's files into `data`; returns the checksums of those that were linked."""
        if segment.home is not None:
            try:
                for file in segment.files:
                    os.link(segment.home / file, data / file)
            except OSError:  # another process has replaced the folder, or the file system has no links
                for file in segment.files:
                    (data / file).unlink(missing_ok=True)
            else:
                return segment.files
        (data / f"{segment.name}.{_IDS}").write_text(json.dumps(segment.chunk_ids), encoding="utf-8")
        self._write(segment.data, data, segment.name)
        return {}

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Open what `save` wrote. Every file is checked; vectors are mapped into memory rather than read."""
        return load_index(folder, cls.name, _FORMAT, cls._open)

    @classmethod
    def _open(cls, data: Path, manifest: dict[str, Any]) -> Self:
        if manifest["kind"] != cls.name or not isinstance(manifest["embedder"], str):
            raise ValueError(f"it is not a {cls.name} index")
        self = cls._configured(manifest["config"])
        self.generation, self.embedder = whole_number(manifest["generation"]), manifest["embedder"]
        names = strings(manifest["segments"])
        cls._require_own(manifest["files"], names)
        table = read_json(data / _TABLE)
        blank = frozenset(strings(table["blank"]))
        known = set(blank)
        segments = []
        for name in names:
            chunk_ids = strings(read_json(data / f"{name}.{_IDS}"))
            hidden = _hidden(table["hidden"][name], len(chunk_ids))
            there = {chunk_id for chunk_id, gone in zip(chunk_ids, hidden.tolist(), strict=True) if not gone}
            if known & there:
                raise ValueError("a chunk is in it twice")
            known |= there
            segment = Segment(
                chunk_ids=chunk_ids,
                rows={chunk_id: row for row, chunk_id in enumerate(chunk_ids)},
                data=self._read(data, name, len(chunk_ids)),
                hidden=hidden,
                living=len(chunk_ids) - int(hidden.sum()),
                name=name,
            )
            segments.append(_at_home(segment, data, manifest["files"]))
        if not self._agree([segment.data for segment in segments]):
            raise ValueError("its segments are of different vectors")
        self._state = _State(segments=tuple(segments), blank=blank)
        return self

    @classmethod
    def _require_own(cls, files: Mapping[str, str], names: Sequence[str]) -> None:
        """`ValueError` unless `save` would write all of these files: they are going to be opened and linked."""
        if not all(_NAME.fullmatch(name) for name in names):
            raise ValueError("its manifest names segments that no index has")
        for file in files:
            name, _, part = file.partition(".")
            if file != _TABLE and not (name in names and part in (_IDS, *cls.parts)):
                raise ValueError(f"{file} does not belong to such an index")

    def _agree(self, data: Sequence[D]) -> bool:
        """Whether one query can search all of these segments."""
        return True

    # What a subclass defines.

    @abstractmethod
    def _fields(self) -> dict[str, Any]:
        """The configuration, for the manifest."""

    @classmethod
    @abstractmethod
    def _configured(cls, fields: dict[str, Any]) -> Self:
        """An empty index with the configuration that `_fields` gave."""

    @abstractmethod
    def _is_blank(self, chunk_id: str, vector: V) -> bool:
        """Whether nothing can find this vector; `RetrievalError` when it is no valid vector."""

    @abstractmethod
    def _gather(self, vectors: Iterator[V], others: Sequence[D]) -> D:
        """A segment's data from all of `vectors`; `RetrievalError` when they do not fit to the segments `others`."""

    @abstractmethod
    def _merge(self, parts: Sequence[tuple[D, NDArray[np.bool_] | None]]) -> D:
        """One segment's data from several, with the rows of each that its mask keeps (None: all)."""

    @abstractmethod
    def _query(self, query: V, data: Sequence[D]) -> Q | None:
        """The query, checked and prepared for all segments; None when it can find nothing."""

    @abstractmethod
    def _search(
        self, data: D, query: Q, k: int, allowed: NDArray[np.bool_] | None, *, exact: bool
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Rows and scores in any order: at least the best `k`, and all that tie with the last of them.

        `exact`: do not use an approximate index.
        """

    @abstractmethod
    def _write(self, data: D, folder: Path, name: str) -> None:
        """Write the files `name.<part>`; `OSError` when they cannot be written."""

    @abstractmethod
    def _read(self, folder: Path, name: str, rows: int) -> D:
        """Map what `_write` wrote; `ValueError` when it does not have this number of rows."""


def _hidden(rows: Any, count: int) -> NDArray[np.bool_]:
    """(count,): which rows a table says are hidden; `ValueError` when it names rows that are not there."""
    import numpy as np

    if not isinstance(rows, list) or not all(type(row) is int and 0 <= row < count for row in rows):
        raise ValueError("it hides rows that it does not have")
    hidden = np.zeros(count, dtype=np.bool_)
    hidden[rows] = True
    return hidden


def _at_home(segment: Segment[D], home: Path, files: Mapping[str, str]) -> Segment[D]:
    own = {file: digest for file, digest in files.items() if file.startswith(f"{segment.name}.")}
    return replace(segment, home=home, files=own)
