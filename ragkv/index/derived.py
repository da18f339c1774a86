"""The retrieval indexes of an index. They are derived from the store and brought up to date before they are used.

Each lies in `derived/KIND`. It is built when a question first needs it, then updated with the chunks that were added
and removed since. It may be deleted at any time.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ragkv.boundary.plainfile import is_folder, make_folder, parse_json, read_plain
from ragkv.errors import RetrievalError
from ragkv.retrievers import BM25, DenseConfig, DenseIndex, ScoreKind, SparseIndex, VectorIndex
from ragkv.retrievers.persistence import MANIFEST
from ragkv.store import Store

__all__ = ["Derived", "derived_states", "stale_derived"]

KINDS: Mapping[str, type[BM25 | DenseIndex | SparseIndex]] = {"bm25": BM25, "dense": DenseIndex, "sparse": SparseIndex}
SETTLED_SECONDS = 3600
"""A folder that no manifest names and nobody has touched for this long is not one that is being written."""

logger = logging.getLogger(__name__)


def derived_states(folder: Path, needed: Collection[str], generation: int) -> dict[str, str]:
    """The state, in words, of the retrieval indexes that questions need and of any others that exist."""
    return {
        name: _state(folder / name, kind, generation)
        for name, kind in KINDS.items()
        if name in needed or os.path.lexists(folder / name)
    }


def _state(folder: Path, kind: type[BM25 | DenseIndex | SparseIndex], generation: int) -> str:
    if not os.path.lexists(folder):
        return "not built yet: the next question builds it"
    try:
        kept = _open(kind, folder)
    except RetrievalError as error:
        return f"will be rebuilt by the next question ({error})"
    if kept.generation != generation:
        return "will be brought up to date by the next question (documents have changed since)"
    return "current"


def stale_derived(folder: Path, generation: int) -> Iterator[Path]:
    """Retrieval indexes that are out of date, and what interrupted saves left; questions can do without both."""
    settled = time.time() - SETTLED_SECONDS
    # links are skipped: ragkv makes none, and one may lead to files that are not ragkv's
    for index in sorted(filter(is_folder, folder.iterdir())) if is_folder(folder) else []:
        manifest: dict[str, object] = {}
        with suppress(OSError, ValueError):
            found = parse_json(read_plain(index / MANIFEST))
            manifest = found if isinstance(found, dict) else {}
        if manifest and manifest.get("generation") != generation and index.lstat().st_mtime < settled:
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
        self._bm25: BM25 | None = None
        self._indexes: dict[ScoreKind, VectorIndex[Any]] = {}
        self._lengths: dict[str, Mapping[Path, int]] = {}
        """The lengths of the files that an open index may have mapped, from when they were last known to be whole."""

    def bm25(self) -> BM25:
        """The index over the words of all chunks, at the store's generation."""
        with self._lock:
            generation, folder = self._store.generation, self._folder / "bm25"
            if self._bm25 is None or self._is_cut("bm25"):
                self._bm25 = _load(BM25, folder)
                self._measure("bm25")
            if self._bm25 is None or self._bm25.generation != generation:
                fresh = BM25()
                fresh.build(((chunk.chunk_id, chunk.text) for chunk in self._store.chunks()), generation)
                self._keep(lambda: self._save(fresh, folder))
                self._bm25 = fresh
                self._measure("bm25")
            return self._bm25

    def vectors(self, kind: ScoreKind, *, embedder: str, config: DenseConfig) -> VectorIndex[Any]:
        """The index over the store's vectors of a kind (dense, sparse), made by the embedder with this fingerprint.

        An index of another embedder or factory string is built again; one that is out of date is updated.
        """
        with self._lock:
            generation, folder = self._store.generation, self._folder / kind
            index = self._indexes.get(kind)
            if index is None or self._is_cut(kind):  # `is None`, because an empty index is false
                index = _load(SparseIndex if kind == "sparse" else DenseIndex, folder)
                self._measure(kind)
            if (
                index is None
                or (len(index) and index.embedder != embedder)
                or (isinstance(index, DenseIndex) and index.config != config)
            ):
                index = SparseIndex() if kind == "sparse" else DenseIndex(config)
            if index.generation != generation or index.embedder != embedder:
                self._update(index, kind, generation, embedder)
                self._keep(lambda: self._save(index, folder))
                self._measure(kind)
            self._indexes[kind] = index
            return index

    def _measure(self, kind: str) -> None:
        lengths = {}
        for path in (self._folder / kind).glob("data-*/*"):
            with suppress(FileNotFoundError):  # another process has just replaced it
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

    def _save(self, index: BM25 | VectorIndex[Any], folder: Path) -> None:
        """Save an index, but not through a link, which could lead outside the index."""
        try:
            make_folder(self._folder)
        except OSError as error:
            raise RetrievalError(f"The retrieval index in {folder} cannot be written: {error}.") from error
        index.save(folder)

    def _update(self, index: VectorIndex[Any], kind: ScoreKind, generation: int, embedder: str) -> None:
        held = index.chunk_ids()
        if not held:
            index.update(self._store.vectors(kind), (), generation=generation, embedder=embedder)
            return
        current = {chunk.chunk_id for chunk in self._store.chunks()}
        added = self._store.vector_many(kind, sorted(current - held)).items()
        index.update(added, held - current, generation=generation, embedder=embedder)


def _open(kind: type[Any], folder: Path) -> Any:
    """Open a retrieval index; `RetrievalError` if it cannot be read or lies behind a link."""
    if os.path.lexists(folder.parent) and not is_folder(folder.parent):
        raise RetrievalError(f"{folder.parent} is not a folder of the index; it is made again from the store.")
    return kind.load(folder)


def _load(kind: type[Any], folder: Path) -> Any:
    try:
        return _open(kind, folder)
    except RetrievalError as error:
        logger.info("a retrieval index is built again: %s", error)
        return None
