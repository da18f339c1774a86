"""A retrieval index as a list of immutable segments, and its folder on disk.

FAISS must not be searched while it changes, and removing from a mapped index crashes. So an update adds a small segment
and hides the rows that it removes; searches need no lock, ask all segments and merge the best hits. A segment is merged
into the one before it unless that one is several times larger, and rebuilt when many of its rows are hidden. A vector
therefore moves a few times per fourfold growth. A question that finds the index behind the store adds what is missing
but leaves large merges to the commands that write.

The folder holds `manifest.json` and the data folder that it names, `data-<hex>`. Saving writes a new data folder, syncs
it and replaces the manifest by a rename, so an interrupted save leaves the old index. Old folders are deleted
afterwards; processes that have mapped their files keep them. Only one process saves at a time. An index may come from
an untrusted source: names in a manifest must have the form that `save` writes, and links, pipes and devices count as
damage (`ragkv.util.files`).
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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from ragkv.errors import RetrievalError
from ragkv.retrievers.arrays import IdSet, IdTable, mapped_array
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
_FORMAT = 4  # of the files; raise it when they change, or the words and values in them
_DATA = re.compile(r"data-[0-9a-f]{16}")
_NAME = re.compile(r"[0-9a-f]{16}")  # of a segment, as `secrets.token_hex(8)` makes it
_HIDDEN_ROWS = "hidden.npy"
_RATIO = 4  # a segment this many times larger than the next one is not merged
_HIDDEN_SHARE = 0.25  # a segment with a larger share of hidden rows is rebuilt
_SMALL = 1024  # rows that a question may move to merge segments

V = TypeVar("V")
"""The caller's type of a vector."""
Q = TypeVar("Q")
"""A query, checked and prepared for the search."""
D = TypeVar("D")
"""The vectors of one segment, which never change."""


class SavedElsewhereError(RetrievalError):
    """Another process, or another object in this one, is saving the same index."""


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


def saved_generation(folder: Path) -> int | None:
    """The generation in the manifest of a saved index, without further checks; None if there is none."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        return _generation(parse_json(read_plain(folder / MANIFEST)))
    return None


def _generation(manifest: Mapping[str, Any]) -> int:
    value = manifest["generation"]
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise ValueError("it has something else where a number should be")
    return value


def _manifest(folder: Path) -> dict[str, Any]:
    """The manifest, which names a data folder of the index's own."""
    if not is_folder(folder):
        raise FileNotFoundError(f"{folder} is not a folder")
    manifest = parse_json(read_plain(folder / MANIFEST))
    if not isinstance(manifest, dict) or manifest["format"] != _FORMAT:
        raise ValueError(f"it is not of format {_FORMAT}")
    if not isinstance(manifest["data"], str) or not _DATA.fullmatch(manifest["data"]):
        raise ValueError("its manifest does not name a folder of its own")
    return manifest


def _digest(path: Path) -> str:
    """The xxh3 of a file, read through a map, so that its pages are cached for the index that maps it next."""
    with os.fdopen(open_plain(path), "rb") as file:
        if not require_solid(path, os.fstat(file.fileno())).st_size:  # nothing to map
            return xxhash.xxh3_128(b"").hexdigest()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return xxhash.xxh3_128(content).hexdigest()


def _require_digests(data: Path, files: Mapping[str, str]) -> None:
    for file, digest in files.items():
        if _digest(data / file) != digest:
            raise ValueError(f"{file} does not match its checksum")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IndexSegment(Generic[D]):
    """Vectors by row, their chunk ids, and which rows are hidden because their chunks were removed."""

    id_table: IdTable
    data: D
    hidden: NDArray[np.bool_]  # (rows,)
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    home: Path | None = None
    """The folder with the segment's files, once it is saved."""
    files: Mapping[str, str] = field(default_factory=dict)
    """The checksums of these files, by file name, except for that of the hidden rows."""
    living: int = field(init=False)
    """The number of visible rows."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "living", len(self.hidden) - int(np.count_nonzero(self.hidden)))

    @classmethod
    def of(cls, id_table: IdTable, data: D, **more: Any) -> Self:
        """A segment without hidden rows."""
        return cls(id_table=id_table, data=data, hidden=np.zeros(len(id_table), dtype=np.bool_), **more)

    def there(self, keys: NDArray[Any]) -> NDArray[np.int32]:
        """The visible rows with these keys."""
        rows = self.id_table.rows(keys)
        return rows[~self.hidden[rows]]

    def without(self, removed: NDArray[Any]) -> Self:
        """The same segment with the rows of these keys hidden."""
        gone = self.there(removed)
        if not len(gone):
            return self
        hidden = self.hidden.copy()
        hidden[gone] = True
        return replace(self, hidden=hidden)

    def allowed(self, among: IdSet | None) -> NDArray[np.bool_] | None:
        """(rows,): which rows may be found; None for all."""
        if among is None:
            return None if self.living == len(self.hidden) else ~self.hidden
        return among.mask(self.id_table) & ~self.hidden


class Segmented(ABC, Generic[V, D]):
    """The base of all segmented indexes. A subclass gathers, merges and writes vectors of its kind.

    `ragkv.index.filters` indexes documents instead of chunks, and fields instead of vectors. Chunks whose vectors can
    never be found are left out.
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
        self.segments: tuple[IndexSegment[D], ...] = ()
        self._writing = threading.Lock()  # one update or save at a time; searches do not take it

    def __len__(self) -> int:
        return sum(segment.living for segment in self.segments)

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
            segments = [segment.without(gone.keys) for segment in self.segments]
            if self.embedder not in ("", embedder) and any(segment.living for segment in segments):
                raise RetrievalError(
                    f"The {self.name} index has vectors of another embedder; remove them all, or start a new index."
                )
            fresh = self._segment(added, segments)
            limit = None if merge else max(_SMALL, _RATIO * (fresh.living if fresh else 0))
            self.segments = self._tidy([*segments, *([fresh] if fresh else ())], limit)
            self.generation, self.embedder = generation, embedder

    def merge(self) -> bool:
        """Do the merges that updates with `merge` False left; whether there were any."""
        with self._writing:
            before, self.segments = self.segments, self._tidy(self.segments)
            return [segment.name for segment in before] != [segment.name for segment in self.segments]

    def _segment(self, added: Iterable[tuple[str, V]], segments: Sequence[IndexSegment[D]]) -> IndexSegment[D] | None:
        """A segment of the added vectors, None if there are none."""
        ids: list[str] = []

        def vectors() -> Iterator[V]:
            for chunk_id, vector in added:
                if not self._is_blank(chunk_id, vector):
                    ids.append(chunk_id)
                    yield vector

        data = self._gather(vectors(), [segment.data for segment in segments])
        new = IdTable.of(ids)
        twice = new.repeated()
        for segment in segments if twice is None else ():
            rows = segment.there(new.keys)
            twice = segment.id_table[int(rows[0])] if len(rows) else twice
        if twice is not None:
            raise RetrievalError(f"Chunk {twice!r} is in the {self.name} index already; remove it first.")
        return IndexSegment.of(new, data) if ids else None

    def _tidy(self, segments: Sequence[IndexSegment[D]], limit: int | None = None) -> tuple[IndexSegment[D], ...]:
        """Merge and rebuild until no segment is empty or mostly hidden, and each is much larger than the next.

        With a `limit`, merges that move more rows are left for later.
        """
        tidy: list[IndexSegment[D]] = []
        most = sum(segment.living for segment in segments) if limit is None else limit
        for segment in segments:
            group = [segment] if segment.living else []
            size = segment.living
            while tidy and group and tidy[-1].living < _RATIO * size and size + tidy[-1].living <= most:
                group.insert(0, tidy.pop())
                size += group[0].living
            full = len(group) == 1 and size >= (1 - _HIDDEN_SHARE) * len(group[0].hidden)
            if group and not full and size <= most:
                group = [self._join(group)]
            tidy += group
        return tuple(tidy)

    def _join(self, segments: Sequence[IndexSegment[D]]) -> IndexSegment[D]:
        return IndexSegment.of(
            IdTable.joined([(segment.id_table, ~segment.hidden) for segment in segments]),
            self._merge([(segment.data, ~segment.hidden) for segment in segments]),
        )

    def save(self, folder: Path) -> None:
        """Write to `folder`. A crash leaves the old index or the new one.

        Segments are immutable, so the files of those that were saved before are linked instead of written.
        """
        with self._writing:
            data = folder / f"data-{secrets.token_hex(8)}"
            try:
                make_folder(folder)
                with alone(folder, self.name):
                    self.segments = self._save(folder, data)
            except OSError as error:
                with suppress(OSError):
                    remove_tree(data)  # on a full disk, the space is needed
                raise RetrievalError(f"The {self.name} index in {folder} cannot be written: {error}.") from error

    def _save(self, folder: Path, data: Path) -> tuple[IndexSegment[D], ...]:
        """Write a data folder, switch the manifest to it and delete the others; returns the segments in it."""
        data.mkdir()
        segments = tuple(self._place(segment, data) for segment in self.segments)
        files = {file: digest for segment in segments for file, digest in segment.files.items()}
        for segment in segments:
            hidden = f"{segment.name}.{_HIDDEN_ROWS}"
            np.save(data / hidden, segment.hidden.nonzero()[0].astype(np.int32))
            files[hidden] = _digest(data / hidden)
        manifest = {
            "format": _FORMAT,
            "kind": self.name,
            "generation": self.generation,
            "mark": self.mark,
            "embedder": self.embedder,
            "config": self.fields(),
            "segments": [segment.name for segment in segments],
            "data": data.name,
            "files": files,
        }
        temporary = data / MANIFEST
        write_plain(temporary, json.dumps(manifest, indent=1).encode())
        for path in (*data.iterdir(), data):
            sync_path(path)
        temporary.replace(folder / MANIFEST)
        sync_path(folder)
        for old in folder.glob("data-*"):
            if old != data:
                with suppress(OSError):  # if it stays, it takes space until the next save
                    remove_tree(old)
        return segments

    def _place(self, segment: IndexSegment[D], data: Path) -> IndexSegment[D]:
        """The segment, with its files linked or written into `data`."""
        if segment.home is not None:
            try:
                for file in segment.files:
                    os.link(segment.home / file, data / file)
            except OSError:  # another process has replaced the folder, or the file system has no links
                for file in segment.files:
                    (data / file).unlink(missing_ok=True)
            else:
                return replace(segment, home=data)
        segment.id_table.write(data, segment.name)
        self._write(segment.data, data, segment.name)
        paths = sorted(data.glob(f"{segment.name}.*"))
        return replace(segment, home=data, files={path.name: _digest(path) for path in paths})

    @classmethod
    def load(cls, folder: Path, *, like: Self | None = None) -> Self:
        """Open what `save` wrote. Every file is checked; vectors are memory-mapped. `RetrievalError` for any damage.

        `like` is an index that was loaded from or saved to the folder before: common segments are shared with it, and
        their files are not read again.
        """
        try:
            manifest = _manifest(folder)
            while True:
                try:
                    return cls._open(folder / manifest["data"], manifest, like)
                except FileNotFoundError:
                    # Another process may have replaced the index since the manifest was read. Then read the new one.
                    if (newer := _manifest(folder)) == manifest:
                        raise
                    manifest = newer
        except Exception as error:  # damaged files make libraries raise anything; the index can be rebuilt
            raise RetrievalError(
                f"The {cls.name} index in {folder} is missing or damaged ({error}); rebuild it from the store."
            ) from error

    @classmethod
    def _open(cls, data: Path, manifest: dict[str, Any], like: Self | None) -> Self:
        if manifest["kind"] != cls.name or not all(isinstance(manifest[key], str) for key in ("embedder", "mark")):
            raise ValueError(f"it is not a {cls.name} index")
        self = cls._configured(manifest["config"])
        self.generation, self.embedder, self.mark = _generation(manifest), manifest["embedder"], manifest["mark"]
        files = cls._own_files(manifest["segments"], manifest["files"])
        if not is_folder(data):
            raise FileNotFoundError(f"{data.name} is not there")
        if {path.name for path in data.iterdir()} - manifest["files"].keys():
            raise ValueError(f"{data.name} holds files that its manifest does not name")
        known = {} if like is None else {segment.name: segment for segment in like.segments}
        segments: list[IndexSegment[D]] = []
        for name, own in files.items():
            hidden = f"{name}.{_HIDDEN_ROWS}"
            _require_digests(data, {hidden: own.pop(hidden)})
            segment = known.get(name)
            if segment is None or segment.files != own:
                _require_digests(data, own)
                id_table = IdTable.read(data, name)
                segment = IndexSegment.of(id_table, self._read(data, name, len(id_table)), name=name, files=own)
            rows, gone = mapped_array(data / hidden, ("int32",)), np.zeros(len(segment.hidden), dtype=np.bool_)
            if len(rows) and (rows.min() < 0 or rows.max() >= len(gone)):
                raise ValueError("it hides rows that it does not have")
            gone[rows] = True
            segment = replace(segment, hidden=gone, home=data)
            visible = segment.id_table.keys[~gone[segment.id_table.order]]
            if any(len(other.there(visible)) for other in segments):
                raise ValueError("a chunk is in it twice")
            segments.append(segment)
        if not self._agree([segment.data for segment in segments]):
            raise ValueError("its segments are of different vectors")
        self.segments = tuple(segments)
        return self

    @classmethod
    def _own_files(cls, names: Any, files: Any) -> dict[str, dict[str, str]]:
        """The checksums of each segment's files; `ValueError` for a name that `save` does not write."""
        if not isinstance(names, list) or not all(isinstance(name, str) and _NAME.fullmatch(name) for name in names):
            raise ValueError("its manifest names segments that no index has")
        own: dict[str, dict[str, str]] = {name: {} for name in names}
        for file, digest in files.items():
            name, _, part = file.partition(".")
            if name not in own or part not in (*IdTable.PARTS, _HIDDEN_ROWS, *cls.parts):
                raise ValueError(f"{file} does not belong to such an index")
            own[name][file] = digest
        return own

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
        segments = self.segments
        if (asked := self._query(query, segments)) is None:
            return []
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
