"""A retrieval index as a list of immutable segments, and its folder on disk.

FAISS must not be searched while it changes, and removing from a mapped index crashes. So an update adds a small segment
and hides the rows that it removes; searches need no lock, ask all segments and merge the best hits. A segment is merged
into the one before it unless that one is several times larger, and rebuilt when many of its rows are hidden. A vector
therefore moves a few times per fourfold growth. A question that finds the index behind the store adds what is missing
but leaves large merges to the commands that write.

The folder holds `manifest.json` and the data folder that it names, `data-<hex>`. Saving writes a new data folder, syncs
it and replaces the manifest by a rename, so an interrupted save leaves the old index. Old folders are deleted
afterwards; processes that have mapped their files keep them. Only one process saves at a time. An index may come from
an untrusted source: names in a manifest must have the form that `save_index` writes, and links, pipes and devices count
as damage (`ragkv.util.files`).
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import re
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeAlias, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from ragkv.errors import RetrievalError
from ragkv.retrievers.arrays import IdSet, IdTable, keys_of
from ragkv.retrievers.base import Hit, best_hits
from ragkv.util.files import (
    closing_descriptor,
    is_folder,
    make_folder,
    open_plain,
    parse_json,
    read_plain,
    remove_tree,
    require_solid,
    sync_path,
    write_plain,
)

MANIFEST = "manifest.json"
_DATA = re.compile(r"data-[0-9a-f]{16}")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_DIGEST = re.compile(r"[0-9a-f]{32}")

Stamp: TypeAlias = tuple[int, int, int, int]
"""Device, inode, size and ctime of a file: while they are unchanged, so is its content, unless it was forged."""

T = TypeVar("T")


class SavedElsewhereError(RetrievalError):
    """Another process, or another object in this one, is saving the same index."""


def save_index(
    folder: Path,
    name: str,
    fields: Mapping[str, Any],
    write: Callable[[Path], Mapping[str, str]],
) -> tuple[Path, dict[str, str]]:
    """Save the files that `write` puts into the folder that it gets; returns the folder and the files' checksums.

    `fields` go into the manifest, among them `format` and `generation`. `write` returns the known checksums of files
    that it linked from an older data folder; the others are computed. `RetrievalError` names the index by `name`.
    """
    data = folder / f"data-{secrets.token_hex(8)}"
    try:
        make_folder(folder)
        with alone(folder, name):
            return data, _written(folder, data, fields, write)
    except OSError as error:
        with suppress(OSError):
            remove_tree(data)  # on a full disk, the space is needed
        raise RetrievalError(f"The {name} index in {folder} cannot be written: {error}.") from error


@contextmanager
def alone(folder: Path, name: str) -> Iterator[None]:
    """Hold the lock for saving the index in `folder`; `SavedElsewhereError` if another holds it."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with closing_descriptor(opened) as descriptor:
        with suppress(OSError):  # without locks in the file system the last save wins
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SavedElsewhereError(f"The {name} index in {folder} is being saved by another process.") from None
        yield


def _written(
    folder: Path, data: Path, fields: Mapping[str, Any], write: Callable[[Path], Mapping[str, str]]
) -> dict[str, str]:
    """Write a data folder, switch the manifest to it and delete the others; returns its files' checksums."""
    data.mkdir()
    known = write(data)
    files = {path.name: known.get(path.name) or _digest(path) for path in sorted(data.iterdir())}
    temporary = data / MANIFEST
    manifest = {**fields, "data": data.name, "files": files}
    write_plain(temporary, json.dumps(manifest, indent=1).encode())
    for path in (*data.iterdir(), data):
        sync_path(path)
    temporary.replace(folder / MANIFEST)
    sync_path(folder)
    for old in folder.glob("data-*"):
        if old != data:
            with suppress(OSError):  # if it stays, it takes space until the next save
                remove_tree(old)
    return files


def load_index(
    folder: Path,
    name: str,
    form: int,
    read: Callable[[Path, dict[str, Any]], T],
    checked: Mapping[Stamp, str],
) -> T:
    """Check every file, then return the result of `read` on the data folder and the manifest.

    The manifest must have the format `form`. A file whose stamp is in `checked` with the manifest's checksum is not
    read again. `RetrievalError` for any damage.
    """
    try:
        manifest = _manifest(folder, form)
        while True:
            try:
                data = folder / manifest["data"]
                if not is_folder(data):
                    raise FileNotFoundError(f"{data.name} is not there")
                if {path.name for path in data.iterdir()} - manifest["files"].keys():
                    raise ValueError(f"{data.name} holds files that its manifest does not name")
                for file, digest in manifest["files"].items():
                    if checked.get(stamp_of(data / file)) != digest and _digest(data / file) != digest:
                        raise ValueError(f"{file} does not match its checksum")
                return read(data, manifest)
            except FileNotFoundError:
                # Another process may have replaced the index since the manifest was read. Then read the new one.
                if (newer := _manifest(folder, form)) == manifest:
                    raise
                manifest = newer
    except Exception as error:  # damaged files make libraries raise anything; the index can be rebuilt
        raise RetrievalError(
            f"The {name} index in {folder} is missing or damaged ({error}); rebuild it from the store."
        ) from error


def saved_generation(folder: Path) -> int | None:
    """The generation in the manifest of a saved index, without further checks; None if there is none."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        return whole_number(read_json(folder / MANIFEST)["generation"])
    return None


def stamp_of(path: Path) -> Stamp:
    """The stamp of a regular file; for anything else one that no checked file has."""
    found = path.lstat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _manifest(folder: Path, form: int) -> dict[str, Any]:
    """The manifest; all names in it have the form that `save_index` writes, so none leads out of the folder."""
    if not is_folder(folder):
        raise FileNotFoundError(f"{folder} is not a folder")
    manifest = read_json(folder / MANIFEST)
    if not isinstance(manifest, dict) or manifest["format"] != form:
        raise ValueError(f"it is not of format {form}")
    data, files = manifest["data"], manifest["files"]
    if not isinstance(data, str) or not _DATA.fullmatch(data) or not isinstance(files, dict):
        raise ValueError("its manifest does not name a folder of its own")
    for file, digest in files.items():
        if not (_FILE.fullmatch(file) and isinstance(digest, str) and _DIGEST.fullmatch(digest)):
            raise ValueError("its manifest names files that no index has")
    return manifest


def read_json(path: Path) -> Any:
    """The content of a JSON file of the index; `ValueError` or `OSError` if it cannot be read."""
    return parse_json(read_plain(path))


def strings(value: Any) -> list[str]:
    """`value` if it is a list of texts without duplicates, else `ValueError`."""
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ValueError("it has something else where a list of texts should be")
    if len(set(value)) != len(value):
        raise ValueError("a list has an entry twice")
    return value


def whole_number(value: Any) -> int:
    """`value` if it is a possible `Store.generation`, else `ValueError`."""
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise ValueError("it has something else where a number should be")
    return value


def _digest(path: Path) -> str:
    """The xxh3 of a file, read through a map, so that its pages are cached for the index that maps it next."""
    with os.fdopen(open_plain(path), "rb") as file:
        if not require_solid(path, os.fstat(file.fileno())).st_size:  # nothing to map
            return xxhash.xxh3_128(b"").hexdigest()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return xxhash.xxh3_128(content).hexdigest()


_FORMAT = 3  # of the files; raise it when they change, or the words and values in them
_NAME = re.compile(r"[0-9a-f]{16}")  # of a segment, as `secrets.token_hex(8)` makes it
_TABLE = "table.json"
_RATIO = 4  # a segment this many times larger than the next one is not merged
_HIDDEN = 0.25  # a segment with a larger share of hidden rows is rebuilt
_SMALL = 1024  # rows that a question may move to merge segments

V = TypeVar("V")
"""The caller's type of a vector."""
Q = TypeVar("Q")
"""A query, checked and prepared for the search."""
D = TypeVar("D")
"""The vectors of one segment, which never change."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IndexSegment(Generic[D]):
    """Vectors by row, their chunk ids, and which rows are hidden because their chunks were removed."""

    id_table: IdTable
    data: D
    hidden: NDArray[np.bool_]  # (rows,)
    living: int
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    home: Path | None = None
    """The folder with the segment's files, once it is saved."""
    files: Mapping[str, str] = field(default_factory=dict)
    """The checksums of these files, by file name."""

    def there(self, keys: NDArray[Any]) -> NDArray[np.int32]:
        """The visible rows with these keys."""
        rows = self.id_table.rows(keys)
        return rows[~self.hidden[rows]]

    def without(self, removed: NDArray[Any]) -> Self:
        """The same segment with the rows of these keys hidden."""
        gone = self.there(removed)
        return self if not len(gone) else self.hiding(self.hidden, gone)

    def hiding(self, hidden: NDArray[np.bool_], rows: Any) -> Self:
        """The same segment with exactly these rows hidden: those that are in `hidden`, and `rows`."""
        hidden = hidden.copy()
        hidden[rows] = True
        return replace(self, hidden=hidden, living=len(hidden) - int(np.count_nonzero(hidden)))

    def allowed(self, among: IdSet | None) -> NDArray[np.bool_] | None:
        """(rows,): which rows may be found; None for all."""
        if among is None:
            return None if self.living == len(self.hidden) else ~self.hidden
        return among.mask(self.id_table) & ~self.hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class _State(Generic[D]):
    """What a search sees. `blank` are the chunks whose vectors can never be found."""

    segments: tuple[IndexSegment[D], ...] = ()
    blank: frozenset[str] = frozenset()


class Segmented(ABC, Generic[V, D]):
    """The base of all segmented indexes. A subclass gathers, merges and writes vectors of its kind.

    `ragkv.index.filters` indexes documents instead of chunks, and fields instead of vectors.
    """

    name: ClassVar[str]
    parts: ClassVar[tuple[str, ...]]
    """The suffixes of the files `name.<part>` that `_write` writes."""

    def __init__(self) -> None:
        self.generation = 0
        """That of the store at the last update."""
        self.embedder = ""
        """The fingerprint of the model that made the vectors."""
        self.mark = ""
        """An opaque value of the caller, saved and loaded with the index."""
        self._writing = threading.Lock()  # one update or save at a time; searches do not take it
        self._state: _State[D] = _State()
        self._checked: dict[Stamp, str] = {}
        """The checksums of the saved files by their stamps."""

    def __len__(self) -> int:
        state = self._state
        return sum(segment.living for segment in state.segments) + len(state.blank)

    def chunk_ids(self) -> frozenset[str]:
        """The ids of all chunks in the index, including blank ones."""
        state = self._state
        return state.blank.union(
            segment.id_table[row] for segment in state.segments for row in (~segment.hidden).nonzero()[0].tolist()
        )

    def update(
        self,
        added: Iterable[tuple[str, V]],
        removed: Collection[str] | IdSet,
        *,
        generation: int,
        embedder: str,
        merge: bool = True,
    ) -> None:
        """Remove, then add. On `RetrievalError` nothing has changed.

        Removing an unknown id is no error, adding a known one or one twice is. Vectors of another embedder can only be
        added if all old vectors are removed. With `merge` False, a question that updates the index only merges small
        segments, so that it pays only for the new chunks. Searches that run meanwhile see the old index.
        """
        with self._writing:
            gone = removed if isinstance(removed, IdSet) else IdSet.of(removed)
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
        """Do the merges that updates with `merge` False left; whether there were any."""
        with self._writing:
            before = self._state
            segments = tuple(self._tidy(before.segments))
            self._state = replace(before, segments=segments)
            return [segment.name for segment in segments] != [segment.name for segment in before.segments]

    def _segment(
        self, added: Iterable[tuple[str, V]], segments: Sequence[IndexSegment[D]], blank: Collection[str]
    ) -> tuple[IndexSegment[D] | None, set[str]]:
        """A segment of the added vectors, None if there are none; and the ids of blank vectors."""
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
        new = IdTable.of([*ids, *empty])
        twice = new.repeated() or next((chunk_id for chunk_id in (*ids, *empty) if chunk_id in blank), None)
        for segment in segments if twice is None else ():
            rows = segment.there(new.keys)
            twice = segment.id_table[int(rows[0])] if len(rows) else twice
        if twice is not None:
            raise RetrievalError(f"Chunk {twice!r} is in the {self.name} index already; remove it first.")
        if not ids:
            return None, set(empty)
        id_table = IdTable.of(ids) if empty else new
        return IndexSegment(id_table=id_table, data=data, hidden=np.zeros(len(ids), np.bool_), living=len(ids)), set(
            empty
        )

    def _tidy(self, segments: Sequence[IndexSegment[D]], limit: int | None = None) -> list[IndexSegment[D]]:
        """Merge and rebuild until no segment is empty or mostly hidden, and each is much larger than the next.

        With a `limit`, merges that move more rows are left for later.
        """
        tidy: list[IndexSegment[D]] = []
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

    def _join(self, segments: Sequence[IndexSegment[D]]) -> IndexSegment[D]:
        living = sum(segment.living for segment in segments)
        return IndexSegment(
            id_table=IdTable.joined([(segment.id_table, ~segment.hidden) for segment in segments]),
            data=self._merge([(segment.data, ~segment.hidden) for segment in segments]),
            hidden=np.zeros(living, dtype=np.bool_),
            living=living,
        )

    def save(self, folder: Path) -> None:
        """Write to `folder`. A crash leaves the old index or the new one.

        Segments are immutable, so the files of those that were saved before are linked instead of written.
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
        """Remember which files have the manifest's checksum, for the next `load`."""
        self._checked = {}
        for file, digest in files.items():
            with suppress(OSError):  # another process has replaced the index
                self._checked[stamp_of(home / file)] = digest

    def _place(self, segment: IndexSegment[D], data: Path) -> Mapping[str, str]:
        """Write or link a segment's files into `data`; returns the checksums of linked ones."""
        if segment.home is not None:
            try:
                for file in segment.files:
                    os.link(segment.home / file, data / file)
            except OSError:  # another process has replaced the folder, or the file system has no links
                for file in segment.files:
                    (data / file).unlink(missing_ok=True)
            else:
                return segment.files
        segment.id_table.write(data, segment.name)
        self._write(segment.data, data, segment.name)
        return {}

    @classmethod
    def load(cls, folder: Path, *, like: Self | None = None) -> Self:
        """Open what `save` wrote. Every file is checked; vectors are memory-mapped.

        `like` is an index that was loaded from or saved to the folder before: common segments are shared with it, and
        their files are not checked again.
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
        segments: list[IndexSegment[D]] = []
        for name in names:
            segment = known.get(name)
            if segment is None or segment.files != _own(name, manifest["files"]):
                segment = self._opened(data, name)
            rows = len(segment.id_table)
            segment = segment.hiding(*_hidden(table["hidden"][name], rows))
            if any(
                len(other.there(segment.id_table.keys[~segment.hidden[segment.id_table.order]])) for other in segments
            ):
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

    def _opened(self, data: Path, name: str) -> IndexSegment[D]:
        id_table = IdTable.read(data, name)
        rows = len(id_table)
        return IndexSegment(
            id_table=id_table,
            data=self._read(data, name, rows),
            hidden=np.zeros(rows, dtype=np.bool_),
            living=rows,
            name=name,
        )

    @classmethod
    def _require_own(cls, files: Mapping[str, str], names: Sequence[str]) -> None:
        """`ValueError` for a file that `save` would not write, because all are opened and linked."""
        if not all(_NAME.fullmatch(name) for name in names):
            raise ValueError("its manifest names segments that no index has")
        for file in files:
            name, _, part = file.partition(".")
            if file != _TABLE and not (name in names and part in (*IdTable.PARTS, *cls.parts)):
                raise ValueError(f"{file} does not belong to such an index")

    def _agree(self, data: Sequence[D]) -> bool:
        """Whether one query can search all of these segments."""
        return True

    # What a subclass may define.

    def fields(self) -> dict[str, Any]:
        """The configuration in the manifest. Indexes with different fields cannot replace each other."""
        return {}

    @classmethod
    def _configured(cls, fields: dict[str, Any]) -> Self:
        """An empty index with the configuration of `fields`."""
        return cls(**fields)

    def _is_blank(self, chunk_id: str, vector: V) -> bool:
        """Whether the vector can never be found; `RetrievalError` if it is invalid."""
        return False

    # What a subclass defines.

    @abstractmethod
    def _gather(self, vectors: Iterator[V], others: Sequence[D]) -> D:
        """A segment's data from all of `vectors`; `RetrievalError` if they do not match the segments `others`."""

    @abstractmethod
    def _merge(self, parts: Sequence[tuple[D, NDArray[np.bool_]]]) -> D:
        """Merge the data of several segments, with the rows that each mask keeps."""

    @abstractmethod
    def _write(self, data: D, folder: Path, name: str) -> None:
        """Write the files `name.<part>`; `OSError` if that fails."""

    @abstractmethod
    def _read(self, folder: Path, name: str, rows: int) -> D:
        """Map what `_write` wrote; `ValueError` unless it has this number of rows."""


class SegmentedIndex(Segmented[V, D], Generic[V, Q, D]):
    """A segmented index that searches all segments and merges their best hits."""

    def search(self, query: V, k: int, *, among: Collection[str] | IdSet | None = None) -> list[Hit]:
        """At most `k` hits, best first, ties by chunk id (`VectorSearch.search`)."""
        if k < 1:
            raise ValueError(f"k must be at least 1, not {k}")
        segments = self._state.segments
        asked = self._query(query, segments)
        return [] if asked is None else self._best(segments, asked, k, among)

    def _best(
        self, segments: Sequence[IndexSegment[D]], asked: Q, k: int, among: Collection[str] | IdSet | None
    ) -> list[Hit]:
        some = among if among is None or isinstance(among, IdSet) else IdSet.of(among)
        hits: list[Hit] = []
        for segment in segments:
            allowed = segment.allowed(some)
            if allowed is not None and not allowed.any():
                continue
            rows, scores = self._search(segment, asked, k, allowed, exact=among is not None)
            hits += (
                Hit(chunk_id=segment.id_table[row], score=score)
                for row, score in zip(rows.tolist(), scores.tolist(), strict=True)
            )
        return best_hits(hits, k)

    @abstractmethod
    def _query(self, query: V, segments: Sequence[IndexSegment[D]]) -> Q | None:
        """The query, checked and prepared for all segments; None if it cannot find anything."""

    @abstractmethod
    def _search(
        self, segment: IndexSegment[D], query: Q, k: int, allowed: NDArray[np.bool_] | None, *, exact: bool
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Rows and scores in any order: at least the best `k` and all ties with the last of them.

        `exact`: do not use an approximate index.
        """


def _hidden(rows: Any, count: int) -> tuple[NDArray[np.bool_], list[int]]:
    """No row of `count`, and the rows that a table hides; `ValueError` when it names rows that are not there."""
    if not isinstance(rows, list) or not all(type(row) is int and 0 <= row < count for row in rows):
        raise ValueError("it hides rows that it does not have")
    return np.zeros(count, dtype=np.bool_), rows


def _beyond(limit: int | None, rows: int) -> bool:
    return limit is not None and rows > limit


def _own(name: str, files: Mapping[str, str]) -> dict[str, str]:
    """A segment's files among those of an index."""
    return {file: digest for file, digest in files.items() if file.startswith(f"{name}.")}


def _at_home(segment: IndexSegment[D], home: Path, files: Mapping[str, str]) -> IndexSegment[D]:
    return replace(segment, home=home, files=_own(segment.name, files))
