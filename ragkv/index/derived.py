"""The retrieval indexes of an index, and that of its documents' fields: derived from the store, and brought up to date
before they are used.

Each lies in `derived/KIND`. It is built by the first ingest or by the question that first needs it. The commands that
write bring it up to date with what they changed; a question does so when it finds that one of them was killed, or that
another process wrote. The store names the chunks that changed (`Store.changes`), so that nothing else is compared. An
index may be deleted at any time.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ragkv.boundary.plainfile import is_folder, make_folder, parse_json, read_plain
from ragkv.errors import RetrievalError
from ragkv.index.fieldindex import DocumentFields, FieldIndex
from ragkv.index.selection import all_values
from ragkv.retrievers import BM25, DenseConfig, DenseIndex, ScoreKind, SparseIndex
from ragkv.retrievers.persistence import MANIFEST, SavedElsewhereError, saved_generation
from ragkv.retrievers.roster import KEY_BYTES, KeySet, keys_of
from ragkv.retrievers.segment import Segmented, SegmentedIndex
from ragkv.store import Store
from ragkv.store.history import Version
from ragkv.types import Document

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Derived", "Tell", "derived_states", "stale_derived"]

Tell = Callable[[int, int], None]
"""`tell(done, total)`: how many chunks or documents an index has taken up. What it raises ends the work."""

KINDS: Mapping[str, type[Segmented[Any, Any]]] = {
    "bm25": BM25,
    "dense": DenseIndex,
    "fields": FieldIndex,
    "sparse": SparseIndex,
}
_BATCH = 1024  # chunks that are read from the store at once
SETTLED_SECONDS = 3600
"""A folder that no manifest names and nobody has touched for this long is not one that is being written."""

logger = logging.getLogger(__name__)
T = TypeVar("T")


def derived_states(folder: Path, needed: Collection[str], generation: int) -> dict[str, str]:
    """The state, in words, of the retrieval indexes that questions need and of any others that exist."""
    return {
        name: _state(folder / name, kind, generation)
        for name, kind in KINDS.items()
        if name in needed or os.path.lexists(folder / name)
    }


def _state(folder: Path, kind: type[Segmented[Any, Any]], generation: int) -> str:
    if not os.path.lexists(folder):
        return "not built yet: the next question builds it"
    try:
        kept = _open(kind, folder)
    except RetrievalError as error:
        return f"will be rebuilt by the next question ({error})"
    if kept.generation != generation:
        return "will be brought up to date by the next question (documents have changed since)"
    return "current"


def stale_derived(folder: Path, follows: Callable[[Version], bool]) -> Iterator[Path]:
    """Retrieval indexes that have to be built again, and what interrupted saves left; questions can do without both.

    `follows` says whether an index of a version can be brought up to date by what the store knows of its changes.
    """
    settled = time.time() - SETTLED_SECONDS
    # links are skipped: ragkv makes none, and one may lead to files that are not ragkv's
    for index in sorted(filter(is_folder, folder.iterdir())) if is_folder(folder) else []:
        manifest: dict[str, object] = {}
        with suppress(OSError, ValueError):
            found = parse_json(read_plain(index / MANIFEST))
            manifest = found if isinstance(found, dict) else {}
        generation, mark = manifest.get("generation"), manifest.get("mark")
        known = isinstance(generation, int) and isinstance(mark, str) and follows(Version(generation, mark))
        behind = bool(manifest) and not known
        if behind and index.lstat().st_mtime < settled:
            yield index
            continue
        for data in index.glob("data-*"):
            if data.name != manifest.get("data") and data.lstat().st_mtime < settled:
                yield data


class Derived:
    """The retrieval indexes over one store, for any number of threads. `keep` runs what writes to `folder`."""

    def __init__(self, store: Store, folder: Path, keep: Callable[[Callable[[], object]], None]) -> None:
        self._store = store
        self._folder = folder
        self._keep = keep
        self._lock = threading.Lock()
        self._indexes: dict[str, Segmented[Any, Any]] = {}
        self._lengths: dict[str, Mapping[Path, int]] = {}
        """The lengths of the files that an open index may have mapped, from when they were last known to be whole."""

    def bm25(self, tell: Tell | None = None) -> BM25:
        """The index over the words of all chunks, at the store's generation. One that is behind takes up changes."""
        found: BM25 = self._current("bm25", BM25, embedder="", tell=tell)
        return found

    def fields(self, tell: Tell | None = None) -> FieldIndex:
        """The index over the fields of all documents, at the store's generation."""
        found: FieldIndex = self._current("fields", FieldIndex, embedder="", tell=tell)
        return found

    def vectors(
        self, kind: ScoreKind, *, embedder: str, config: DenseConfig, tell: Tell | None = None
    ) -> SegmentedIndex[Any, Any, Any]:
        """The index over the store's vectors of a kind (dense, sparse), made by the embedder with this fingerprint.

        An index of another embedder or factory string is built again; one that is behind takes up what changed.
        """
        fresh = SparseIndex if kind == "sparse" else partial(DenseIndex, config)
        found: SegmentedIndex[Any, Any, Any] = self._current(kind, fresh, embedder=embedder, tell=tell)
        return found

    def merge(self, name: str) -> None:
        """Merge the segments of an index that is in use, and save it: for the commands that write.

        Questions go on with the segments that there are, and do not wait.
        """
        index = self._indexes.get(name)
        if index is not None and index.merge():
            self._keep(lambda: self._save(index, self._folder / name))
            self._measure(name)

    def _current(self, name: str, fresh: Callable[[], Any], *, embedder: str, tell: Tell | None) -> Any:
        """The index called `name`, at the store's generation; `fresh` makes an empty one with the settings wanted."""
        wanted = fresh()

        def fits(index: Any) -> bool:
            return bool((not len(index) or index.embedder == embedder) and index.fields() == wanted.fields())

        def ready(index: Any) -> bool:
            return fits(index) and (index.generation, index.mark, index.embedder) == (*now, embedder)

        now, folder = self._store.version, self._folder / name
        index = self._indexes.get(name)
        if index is not None and not self._is_cut(name) and ready(index):
            return index
        with self._lock:
            now, index = self._store.version, self._indexes.get(name)
            if index is None or self._is_cut(name):  # `is None`, because an empty index is false
                index = self._opened(name, None)
            elif index.generation < (saved_generation(folder) or 0) <= now.generation:
                # another process has brought the saved index up to date, and perhaps has merged its segments
                index = self._opened(name, index) or index
            if index is None or not fits(index):
                index = wanted
            if not ready(index):
                index = self._updated(index, wanted, now, embedder, tell)
                self._keep(lambda: self._save(index, folder))
                self._measure(name)
            self._indexes[name] = index
            return index

    def _updated(self, index: Any, empty: Any, now: Version, embedder: str, tell: Tell | None) -> Any:
        """The index with what has changed since its version; `empty`, filled, when that is not known any more.

        If `tell` raises, nothing has changed: an index takes up all of it, or nothing.
        """
        changes = self._store.changes(Version(index.generation, index.mark)) if len(index) else None
        if changes is None:
            if len(index):
                logger.info("the %s index is built again: it is too far behind", index.name)
            found = _told(_once(self._all(index.name)), tell, partial(self._size, index.name))
            empty.update(found, (), generation=now.generation, embedder=embedder)
            empty.mark = now.mark
            return empty
        # What the store has of these chunks may be newer than `changes`. The next update replaces it once more.
        touched = changes.documents if index.name == "fields" else changes.chunks
        added = _told(self._some(index.name, sorted(touched)), tell, lambda: len(touched))
        generation, mark = changes.version
        index.update(added, KeySet.of(touched), generation=generation, embedder=embedder, merge=False)
        index.mark = mark
        return index

    def _all(self, name: str) -> Iterator[tuple[str, Any]]:
        """Every id with what the index of this name holds of it: a chunk's text or vector, a document's fields."""
        if name == "bm25":
            return ((chunk.chunk_id, chunk.text) for chunk in self._store.chunks())
        return _all_fields(self._store) if name == "fields" else self._store.vectors(name)  # type: ignore[arg-type]

    def _size(self, name: str) -> int:
        """How many of them there are, by the store's counters."""
        stats = self._store.stats()
        return stats.documents if name == "fields" else stats.chunks

    def _some(self, name: str, names: Sequence[bytes]) -> Iterator[tuple[str, Any]]:
        """The same of the chunks or documents that `Changes` names, as far as they are in the store."""
        for start in range(0, len(names), _BATCH):
            batch = names[start : start + _BATCH]
            if name == "fields":
                for stored, chunk_ids in self._store.documents_named(batch):
                    yield _fields_of(stored.document, keys_of(chunk_ids))
                continue
            there = self._store.chunks_named(batch)
            if name == "bm25":
                yield from ((chunk.chunk_id, chunk.text) for chunk in there)
            else:
                found = self._store.vector_many(name, (chunk.chunk_id for chunk in there))  # type: ignore[arg-type]
                yield from found.items()

    def _opened(self, name: str, like: Any) -> Any:
        """What is saved; None when there is nothing that can be used."""
        found = _load(KINDS[name], self._folder / name, like)
        self._measure(name)
        return found

    def _measure(self, kind: str) -> None:
        lengths = {}
        with suppress(OSError):  # another process is just replacing it: what was in its place can no longer be cut
            for data in (self._folder / kind).glob("data-*"):
                for path in data.iterdir():
                    lengths[path] = path.stat().st_size
        self._lengths[kind] = lengths

    def _is_cut(self, kind: str) -> bool:
        """Whether a file that an open index maps was cut short: reading the lost bytes would kill us by SIGBUS.

        A file that is gone was replaced; the system keeps it for processes that have it mapped.
        """
        for path, length in self._lengths.get(kind, {}).items():
            with suppress(FileNotFoundError):
                if path.stat().st_size < length:
                    logger.warning("%s was cut short while it was open; the index is built again", path)
                    return True
        return False

    def _save(self, index: Segmented[Any, Any], folder: Path) -> None:
        """Save an index, but not through a link, which could lead outside the index."""
        try:
            make_folder(self._folder)
        except OSError as error:
            raise RetrievalError(f"The retrieval index in {folder} cannot be written: {error}.") from error
        with suppress(SavedElsewhereError):  # who is behind follows the changes
            index.save(folder)


def _all_fields(store: Store) -> Iterator[tuple[str, DocumentFields]]:
    """The fields of every document. What is written meanwhile is named by the changes since."""
    import numpy as np

    names, owners = bytearray(), bytearray()
    for name, owner in store.places():  # the keys of chunks, so that no chunk is read
        names += name[:KEY_BYTES]
        owners += owner[:KEY_BYTES]
    order = np.argsort(np.frombuffer(owners, dtype="S16"), kind="stable")
    chunks, owned = (np.frombuffer(column, dtype="S16")[order] for column in (names, owners))
    for stored in store.documents():
        [key] = keys_of([stored.document.document_id])
        low, high = np.searchsorted(owned, key), np.searchsorted(owned, key, side="right")
        yield _fields_of(stored.document, chunks[low:high])


def _fields_of(document: Document, chunks: NDArray[Any]) -> tuple[str, DocumentFields]:
    return document.document_id, DocumentFields(values=all_values(document), chunks=chunks)


def _told(pairs: Iterable[T], tell: Tell | None, total: Callable[[], int]) -> Iterable[T]:
    """The same pairs; `tell` is told at the beginning, after every batch and at the end."""
    if tell is None:
        return pairs

    def counted() -> Iterator[T]:
        most, done = total(), 0
        for done, pair in enumerate(pairs):
            if not done % _BATCH:
                tell(done, most)
            yield pair
        tell(most, most)

    return counted()


def _once(pairs: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Pairs without those of an id that was there before: a document may be written while all are read."""
    seen: set[str] = set()
    for chunk_id, content in pairs:
        if chunk_id not in seen:
            seen.add(chunk_id)
            yield chunk_id, content


def _open(kind: type[Any], folder: Path, like: Any = None) -> Any:
    """Open a retrieval index; `RetrievalError` if it cannot be read or lies behind a link."""
    if os.path.lexists(folder.parent) and not is_folder(folder.parent):
        raise RetrievalError(f"{folder.parent} is not a folder of the index; it is made again from the store.")
    return kind.load(folder, like=like)


def _load(kind: type[Any], folder: Path, like: Any) -> Any:
    try:
        return _open(kind, folder, like)
    except RetrievalError as error:
        logger.info("a retrieval index is built again: %s", error)
        return None
