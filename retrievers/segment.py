"""An index in immutable segments, so that searches need no lock, and updates only cost as much as they add.

A FAISS index must not be searched while it changes, and a mapped one must not change at all (removing from it crashes).
So an update makes a small segment of what it adds, and hides what it removes. A segment is merged into the one before
it unless that one is several times larger, and it is rebuilt when much of it is hidden. A search asks all segments and
merges their best hits. Each fourfold growth of the index moves a vector a few times, and an update of 20 chunks leaves
a large segment alone, which matters because copying 100,000 vectors of 1024 numbers takes half a second.

A question that finds the index behind the store adds what is missing, but only merges what is small: the large merges
are left to the commands that write.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

from ragkv.errors import RetrievalError
from ragkv.retrievers.base import Hit, ScoreKind, best_hits
from ragkv.retrievers.persistence import Stamp, load_index, read_json, save_index, stamp_of, strings, whole_number
from ragkv.retrievers.roster import KeySet, Roster, keys_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Segment", "Segmented", "SegmentedIndex"]

_FORMAT = 2  # of the files; raise it when they change
_NAME = re.compile(r"[0-9a-f]{16}")  # of a segment, as `secrets.token_hex(8)` makes it
_TABLE = "table.json"
_RATIO = 4  # a segment that is at least this many times larger than the next one is left alone
_HIDDEN = 0.25  # a segment of which a larger share is hidden is rebuilt
_SMALL = 1024  # rows that a question may move to merge segments

V = TypeVar("V")
"""A vector, as the caller gives it."""
Q = TypeVar("Q")
"""A query, checked and prepared for the search."""
D = TypeVar("D")
"""The vectors of one segment, which never change."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment(Generic[D]):
    """Vectors in rows from 0, their chunk ids, and which rows are hidden because their chunks were removed."""

    roster: Roster
    data: D
    hidden: NDArray[np.bool_]  # (rows,)
    living: int
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    home: Path | None = None
    """The folder with the segment's files, once it is saved."""
    files: Mapping[str, str] = field(default_factory=dict)
    """The checksums of these files, by file name."""

    def there(self, keys: NDArray[Any]) -> NDArray[np.int32]:
        """The rows of chunks with these keys that are not hidden."""
        rows = self.roster.rows(keys)
        return rows[~self.hidden[rows]]

    def without(self, removed: NDArray[Any]) -> Self:
        """The same segment with the rows of these keys hidden."""
        gone = self.there(removed)
        return self if not len(gone) else self.hiding(self.hidden, gone)

    def hiding(self, hidden: NDArray[np.bool_], rows: Any) -> Self:
        """The same segment with exactly these rows hidden: those that are in `hidden`, and `rows`."""
        import numpy as np

        hidden = hidden.copy()
        hidden[rows] = True
        return replace(self, hidden=hidden, living=len(hidden) - int(np.count_nonzero(hidden)))

    def allowed(self, among: KeySet | None) -> NDArray[np.bool_] | None:
        """(rows,): which rows may be found; None when all may."""
        if among is None:
            return None if self.living == len(self.hidden) else ~self.hidden
        return among.mask(self.roster) & ~self.hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class _State(Generic[D]):
    """What a search sees. `blank` are the chunks whose vectors nothing can find."""

    segments: tuple[Segment[D], ...] = ()
    blank: frozenset[str] = frozenset()


class Segmented(ABC, Generic[V, D]):
    """What all indexes in segments share. A subclass gathers, merges and writes vectors of its kind.

    `ragkv.index.fieldindex` keeps documents instead of chunks, and their fields instead of vectors.
    """

    name: ClassVar[str]
    parts: ClassVar[tuple[str, ...]]
    """The names of the files that `_write` writes, behind the segment's name and a dot."""

    def __init__(self) -> None:
        self.generation = 0
        self.embedder = ""
        self.mark = ""
        """What the caller wants to know again of the state that the index is of. It is saved and loaded with it."""
        self._writing = threading.Lock()  # one update or save at a time; searches do not ask for it
        self._state: _State[D] = _State()
        self._checked: dict[Stamp, str] = {}
        """The checksums of the saved files, by what tells that a file has not changed since."""

    def __len__(self) -> int:
        state = self._state
        return sum(segment.living for segment in state.segments) + len(state.blank)

    def chunk_ids(self) -> frozenset[str]:
        """The ids of all chunks in the index, including those that nothing can find."""
        state = self._state
        return state.blank.union(
            segment.roster[row] for segment in state.segments for row in (~segment.hidden).nonzero()[0].tolist()
        )

    def update(
        self,
        added: Iterable[tuple[str, V]],
        removed: Collection[str] | KeySet,
        *,
        generation: int,
        embedder: str,
        merge: bool = True,
    ) -> None:
        """Remove, then add. `RetrievalError`, with nothing changed, when something is wrong.

        It is no error to remove an id that is not there, but it is one to add an id that is there, or twice. Vectors of
        another embedder can only be added when all vectors of the old one are removed. With `merge` False, segments are
        only merged as far as that moves few rows: for a question, which should pay for nothing but what is new.
        """
        with self._writing:
            gone = removed if isinstance(removed, KeySet) else KeySet.of(removed)
            segments = [segment.without(gone.keys) for segment in self._state.segments]
            blank = {chunk_id for chunk_id in self._state.blank if chunk_id not in gone}
            if self.embedder not in ("", embedder) and (blank or any(segment.living for segment in segments)):
                raise RetrievalError(
                    f"The {self.name} index has vectors of another embedder; remove them all, or start a new index."
                )
            fresh, empty = self._segment(added, segments, blank)
            fresh_rows = 0 if fresh is None else fresh.living
            limit = None if merge else max(_SMALL, _RATIO * fresh_rows)
            segments = self._tidy([*segments, *([fresh] if fresh else ())], limit)
            self._state = _State(segments=tuple(segments), blank=frozenset(blank | empty))
            self.generation, self.embedder = generation, embedder

    def merge(self) -> bool:
        """Merge segments where that is due, after updates that left it for later; whether there were any."""
        with self._writing:
            before = self._state
            segments = tuple(self._tidy(before.segments))
            self._state = replace(before, segments=segments)
            return [segment.name for segment in segments] != [segment.name for segment in before.segments]

    def _segment(
        self, added: Iterable[tuple[str, V]], segments: Sequence[Segment[D]], blank: Collection[str]
    ) -> tuple[Segment[D] | None, set[str]]:
        """A segment of what is added, None when there is no vector in it; and the ids of blank vectors."""
        import numpy as np

        ids: list[str] = []
        empty: list[str] = []

        def vectors() -> Iterator[V]:
            for chunk_id, vector in added:
                if self._is_blank(chunk_id, vector):
                    empty.append(chunk_id)
                else:
                    ids.append(chunk_id)
                    yield vector

        data = self._gather(vectors(), [segment.data for segment in segments])
        new = Roster.of([*ids, *empty])
        twice = new.repeated() or next((chunk_id for chunk_id in (*ids, *empty) if chunk_id in blank), None)
        for segment in segments if twice is None else ():
            rows = segment.there(new.keys)
            twice = segment.roster[int(rows[0])] if len(rows) else twice
        if twice is not None:
            raise RetrievalError(f"Chunk {twice!r} is in the {self.name} index already; remove it first.")
        if not ids:
            return None, set(empty)
        roster = Roster.of(ids) if empty else new
        return Segment(roster=roster, data=data, hidden=np.zeros(len(ids), np.bool_), living=len(ids)), set(empty)

    def _tidy(self, segments: Sequence[Segment[D]], limit: int | None = None) -> list[Segment[D]]:
        """Merge and rebuild, so that none is empty or has many hidden rows, and each is much larger than the next.

        With a `limit`, what would move more rows than that is left for another time.
        """
        tidy: list[Segment[D]] = []
        for segment in segments:
            group = [segment] if segment.living else []
            size = segment.living
            while tidy and group and tidy[-1].living < _RATIO * size and not _beyond(limit, size + tidy[-1].living):
                group.insert(0, tidy.pop())
                size += group[0].living
            full = len(group) == 1 and size >= (1 - _HIDDEN) * len(group[0].hidden)
            if group and not full and not _beyond(limit, size):
                group = [self._join(group)]
            tidy += group
        return tidy

    def _join(self, segments: Sequence[Segment[D]]) -> Segment[D]:
        import numpy as np

        living = sum(segment.living for segment in segments)
        return Segment(
            roster=Roster.joined([(segment.roster, ~segment.hidden) for segment in segments]),
            data=self._merge([(segment.data, ~segment.hidden) for segment in segments]),
            hidden=np.zeros(living, dtype=np.bool_),
            living=living,
        )

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
                    "mark": self.mark,
                    "embedder": self.embedder,
                    "config": self.fields(),
                    "segments": [segment.name for segment in state.segments],
                },
                write,
            )
            self._state = replace(state, segments=tuple(_at_home(segment, home, files) for segment in state.segments))
            self._note_checked(home, files)

    def _note_checked(self, home: Path, files: Mapping[str, str]) -> None:
        """Remember which files have the checksum that the manifest says, for the next `load`."""
        self._checked = {}
        for file, digest in files.items():
            with suppress(OSError):  # another process has replaced the index
                self._checked[stamp_of(home / file)] = digest

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
        segment.roster.write(data, segment.name)
        self._write(segment.data, data, segment.name)
        return {}

    @classmethod
    def load(cls, folder: Path, *, like: Self | None = None) -> Self:
        """Open what `save` wrote. Every file is checked; vectors are mapped into memory rather than read.

        `like` is an index that was loaded from the folder or saved to it before: the segments that both have are shared
        with it, and their files are not checked again.
        """
        checked = {} if like is None else like._checked
        return load_index(folder, cls.name, _FORMAT, lambda data, manifest: cls._open(data, manifest, like), checked)

    @classmethod
    def _open(cls, data: Path, manifest: dict[str, Any], like: Self | None) -> Self:
        if manifest["kind"] != cls.name or not all(isinstance(manifest[each], str) for each in ("embedder", "mark")):
            raise ValueError(f"it is not a {cls.name} index")
        self = cls._configured(manifest["config"])
        self.generation, self.embedder = whole_number(manifest["generation"]), manifest["embedder"]
        self.mark = manifest["mark"]
        names = strings(manifest["segments"])
        cls._require_own(manifest["files"], names)
        table = read_json(data / _TABLE)
        blank = frozenset(strings(table["blank"]))
        known = {} if like is None else {segment.name: segment for segment in like._state.segments}
        segments: list[Segment[D]] = []
        for name in names:
            segment = known.get(name)
            if segment is None or segment.files != _own(name, manifest["files"]):
                segment = self._opened(data, name)
            rows = len(segment.roster)
            segment = segment.hiding(*_hidden(table["hidden"][name], rows))
            if any(len(other.there(segment.roster.keys[~segment.hidden[segment.roster.order]])) for other in segments):
                raise ValueError("a chunk is in it twice")
            segments.append(_at_home(segment, data, manifest["files"]))
        nothing = keys_of(blank)
        if any(len(segment.there(nothing)) for segment in segments):
            raise ValueError("a chunk is in it twice")
        if not self._agree([segment.data for segment in segments]):
            raise ValueError("its segments are of different vectors")
        self._state = _State(segments=tuple(segments), blank=blank)
        self._note_checked(data, manifest["files"])
        return self

    def _opened(self, data: Path, name: str) -> Segment[D]:
        import numpy as np

        roster = Roster.read(data, name)
        rows = len(roster)
        return Segment(
            roster=roster,
            data=self._read(data, name, rows),
            hidden=np.zeros(rows, dtype=np.bool_),
            living=rows,
            name=name,
        )

    @classmethod
    def _require_own(cls, files: Mapping[str, str], names: Sequence[str]) -> None:
        """`ValueError` unless `save` would write all of these files: they are going to be opened and linked."""
        if not all(_NAME.fullmatch(name) for name in names):
            raise ValueError("its manifest names segments that no index has")
        for file in files:
            name, _, part = file.partition(".")
            if file != _TABLE and not (name in names and part in (*Roster.PARTS, *cls.parts)):
                raise ValueError(f"{file} does not belong to such an index")

    def _agree(self, data: Sequence[D]) -> bool:
        """Whether one query can search all of these segments."""
        return True

    # What a subclass defines.

    @abstractmethod
    def fields(self) -> dict[str, Any]:
        """The configuration, as it stands in the manifest. Indexes with other fields cannot take each other's place."""

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
    def _merge(self, parts: Sequence[tuple[D, NDArray[np.bool_]]]) -> D:
        """One segment's data from several, with the rows of each that its mask keeps."""

    @abstractmethod
    def _write(self, data: D, folder: Path, name: str) -> None:
        """Write the files `name.<part>`; `OSError` when they cannot be written."""

    @abstractmethod
    def _read(self, folder: Path, name: str, rows: int) -> D:
        """Map what `_write` wrote; `ValueError` when it does not have this number of rows."""


class SegmentedIndex(Segmented[V, D], Generic[V, Q, D]):
    """An index in segments that searches them, and merges their best hits."""

    score_kind: ScoreKind

    def search(self, query: V, k: int, *, among: Collection[str] | KeySet | None = None) -> list[Hit]:
        """At most `k` hits, best first, ties by chunk id (`Retriever.search`)."""
        if k < 1:
            raise ValueError(f"k must be at least 1, not {k}")
        segments = self._state.segments
        asked = self._query(query, segments)
        return [] if asked is None else self._best(segments, asked, k, among)

    def _best(
        self, segments: Sequence[Segment[D]], asked: Q, k: int, among: Collection[str] | KeySet | None
    ) -> list[Hit]:
        some = among if among is None or isinstance(among, KeySet) else KeySet.of(among)
        hits: list[Hit] = []
        for segment in segments:
            allowed = segment.allowed(some)
            if allowed is not None and not allowed.any():
                continue
            rows, scores = self._search(segment, asked, k, allowed, exact=among is not None)
            hits += (
                Hit(chunk_id=segment.roster[row], score=score)
                for row, score in zip(rows.tolist(), scores.tolist(), strict=True)
            )
        return best_hits(hits, k)

    @abstractmethod
    def _query(self, query: V, segments: Sequence[Segment[D]]) -> Q | None:
        """The query, checked and prepared for all segments; None when it can find nothing."""

    @abstractmethod
    def _search(
        self, segment: Segment[D], query: Q, k: int, allowed: NDArray[np.bool_] | None, *, exact: bool
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Rows and scores in any order: at least the best `k`, and all that tie with the last of them.

        `exact`: do not use an approximate index.
        """


def _hidden(rows: Any, count: int) -> tuple[NDArray[np.bool_], list[int]]:
    """No row of `count`, and the rows that a table hides; `ValueError` when it names rows that are not there."""
    import numpy as np

    if not isinstance(rows, list) or not all(type(row) is int and 0 <= row < count for row in rows):
        raise ValueError("it hides rows that it does not have")
    return np.zeros(count, dtype=np.bool_), rows


def _beyond(limit: int | None, rows: int) -> bool:
    return limit is not None and rows > limit


def _own(name: str, files: Mapping[str, str]) -> dict[str, str]:
    """The files of a segment among all of an index."""
    return {file: digest for file, digest in files.items() if file.startswith(f"{name}.")}


def _at_home(segment: Segment[D], home: Path, files: Mapping[str, str]) -> Segment[D]:
    return replace(segment, home=home, files=_own(segment.name, files))
