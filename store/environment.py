"""The store: documents, their chunks and the chunks' KV, which appear and disappear together.

One LMDB environment under `<index>/store/` is the truth of an index. Everything else is derived from it, and compares
`Store.generation` to find out whether it is behind. Layout: docs/formats.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Self

from ragkv.attention.shape import KVShape
from ragkv.boundary.plainfile import parse_json
from ragkv.errors import CorruptStoreError, StoreError, StoreExistsError
from ragkv.store.codec import Codec, Raw
from ragkv.store.database import LMDB_FILES, Database
from ragkv.store.documentstore import DocumentStore
from ragkv.store.format.record import Manifest, pack_shape
from ragkv.store.history import Changes, Version, changes_since, generation, version
from ragkv.store.kvstore import KVStore
from ragkv.store.lock import LOCK_FILE, WriterLock
from ragkv.store.pages.file import discard_stub, refuse_links
from ragkv.store.pages.note import NOTE_FILE
from ragkv.store.pages.resident import give_back
from ragkv.store.transaction import shape_key
from ragkv.store.upkeep.backup import copy_store
from ragkv.store.upkeep.collection import Collection, collect
from ragkv.store.upkeep.mending import Mender
from ragkv.store.upkeep.progress import Notify
from ragkv.store.upkeep.repair import Repair, repair
from ragkv.store.upkeep.stats import (
    DocumentStats,
    StoreStats,
    needed_models,
    survey,
    survey_documents,
)
from ragkv.store.upkeep.usage import forget_gone
from ragkv.store.upkeep.verification import Verification, verify

__all__ = ["STORE_FILES", "Store"]

STORE_FILES = frozenset({*LMDB_FILES, LOCK_FILE, NOTE_FILE})
"""All that a store's directory holds."""
INITIAL_MAP_BYTES = 64 << 20
MAKING_SECONDS = 10.0  # making a store takes less: who holds the lock for longer does other work
FEW_CHUNKS = 8192  # whose pages are checked in a quarter of a second


class Store(DocumentStore, KVStore):
    """Documents, chunks, vectors and KV. Get one from `Store.create` or `Store.open`; it is a context manager.

    Any number of threads and processes may read while one writes. Within a process, all stores of one path share one
    environment; after a fork, the child has to open its own. `codec` is for new records: each record says with which
    codec it was written.
    """

    @staticmethod
    def exists(path: Path | str) -> bool:
        """Whether the index at `path` has a store."""
        return (_directory(path) / "data.mdb").is_file()

    @classmethod
    def create(
        cls,
        path: Path | str,
        *,
        codec: Codec | None = None,
        map_size: int = INITIAL_MAP_BYTES,
        exist_ok: bool = False,
    ) -> Self:
        """A new, empty store in the index at `path`; folders are made. `StoreExistsError` when there is a store.

        A creation that was killed is completed. `exist_ok` opens a finished store instead of refusing it.
        """
        directory = _directory(path)
        try:
            refuse_links(directory, STORE_FILES)
            directory.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise StoreError(f"{path} is a file: name a directory for the index") from error
        except OSError as error:
            raise StoreError(f"{directory} cannot be made ({error})") from error
        with WriterLock(directory).hold("making the store", timeout=MAKING_SECONDS):
            discard_stub(directory / "data.mdb")
            try:
                database = Database.acquire(directory, readonly=False, create=True, map_size=map_size)
            except StoreExistsError:
                if not exist_ok:
                    raise
                database = Database.acquire(directory, readonly=False, create=False, map_size=map_size)
        return cls(database, readonly=False, codec=codec or Raw())

    @classmethod
    def open(cls, path: Path | str, *, readonly: bool | None = False, codec: Codec | None = None) -> Self:
        """The store of the index at `path`. `StoreError` when it cannot be used, `CorruptStoreError` when damaged.

        `readonly` None: read-write where the system permits it, else read-only (`Store.readonly` says which). Where
        `lock.mdb` may not be written, reads are checked instead of locked: docs/operations.md.
        """
        directory = _directory(path)
        if Path(path).is_file():
            raise StoreError(f"{path} is a file: name the directory of an index")
        try:
            refuse_links(directory, STORE_FILES)
            found = cls.exists(path)
        except OSError as error:
            raise StoreError(f"{directory} may not be read by you ({error})") from error
        if not found:
            raise StoreError(f"there is no index at {path}: make one with `ragkv ingest PATH --index {path}`")
        database = Database.acquire(directory, readonly=readonly, create=False, map_size=INITIAL_MAP_BYTES)
        return cls(database, readonly=readonly, codec=codec or Raw())

    @property
    def writes_cheaply(self) -> bool:
        """Whether a small write costs next to nothing: the first of a process may have to check every page."""
        if self._live().trusted:
            return True
        with self._live().read() as txn:
            return txn.count("chunks") <= FEW_CHUNKS

    @property
    def generation(self) -> int:
        """How many transactions have changed documents, chunks or their vectors."""
        with self._live().read() as txn:
            return generation(txn)

    @property
    def version(self) -> Version:
        """The generation, with a mark that tells the state from one of another copy of this store."""
        with self._live().read() as txn:
            return version(txn)

    def changes(self, since: Version) -> Changes | None:
        """What has changed since a version; None if the store does not know it any more, or never had it."""
        with self._live().read() as txn:
            return changes_since(txn, since)

    def get_meta(self, name: str) -> Any:
        """A fact about the index that `put_meta` stored, or None."""
        with self._live().read() as txn:
            value = txn.get("meta", b"fact/" + name.encode())
            try:
                return None if value is None else parse_json(bytes(value))
            except ValueError as error:
                raise CorruptStoreError(
                    f"the fact {name!r} in {self.directory} is damaged ({error}): run `ragkv repair`"
                ) from error

    def put_meta(self, name: str, value: Any) -> None:
        """Store a small JSON value, such as the model's fingerprint."""
        packed = json.dumps(value).encode()
        self._write(lambda txn: txn.put("meta", b"fact/" + name.encode(), packed))

    def drop_meta(self, name: str) -> bool:
        """Delete a fact; whether there was one."""
        return self._write(lambda txn: txn.delete("meta", b"fact/" + name.encode()))

    def keep_shape(self, model: str, shape: KVShape) -> None:
        """Store the shape of a model's KV, by its fingerprint. From now on a record of another shape is damage."""
        key, packed = shape_key(model), pack_shape(shape)
        with self._live().read() as txn:
            known = bytes(txn.get("meta", key) or b"") == packed
        if not known:
            self._write(lambda txn: txn.put("meta", key, packed))

    def stats(self) -> StoreStats:
        return survey(self._live())

    def document_stats(self, document_ids: Iterable[str] | None = None) -> Iterator[DocumentStats]:
        """Each document's share of the store, in the order of their ids; read in batches, as `documents` is.

        `document_ids`: only of these, in their order; one that is not there is left out.
        """
        return survey_documents(self._live(), document_ids)

    def give_back_pages(self) -> int:
        """Give back the memory of the store's pages that this process has read; they are mapped again at need."""
        return give_back(self._live().directory / "data.mdb")

    def sizes(self) -> tuple[int, int]:
        """The bytes that the store's file takes on the disk, and the bytes of the map."""
        return self._live().sizes()

    def models(self) -> set[str]:
        """Fingerprints of the models that made the KV that chunks need."""
        return needed_models(self._live())

    # Upkeep (docs/operations.md)

    def verify(self, *, quick: bool = False, on_progress: Notify | None = None) -> Verification:
        """Check every row, checksum and reference, while others read and write; `quick` leaves out what takes long
        (`Verification.unchecked`)."""
        return verify(self._live(), quick=quick, on_progress=on_progress)

    def repair(
        self, mender: Mender, *, encode: bool = True, dry_run: bool = False, on_progress: Notify | None = None
    ) -> Repair:
        """Repair what `verify` finds; with `encode=False`, bad KV is dropped, and computed when it is asked for."""
        if not dry_run:
            self._refuse_readonly()
        return repair(self._live(), mender, self.codec, encode=encode, dry_run=dry_run, on_progress=on_progress)

    def collect(
        self, *, in_use: Callable[[Manifest], bool], dry_run: bool = False, on_progress: Notify | None = None
    ) -> Collection:
        """Drop KV that nothing needs, and the index's own KV that is not `in_use`; no ingest may run meanwhile."""
        if not dry_run:
            self._refuse_readonly()
        found = collect(self._live(), in_use=in_use, dry_run=dry_run, on_progress=on_progress)
        found.uses = forget_gone(self._live(), dry_run=dry_run)
        return found

    def copy(self, path: Path | str, *, compact: bool = False, on_progress: Notify | None = None) -> int:
        """Copy one snapshot to a new store in the index at `path`, which must have none; returns its bytes."""
        directory = _directory(path)
        try:
            directory.mkdir(parents=True)
        except FileExistsError as error:
            raise StoreError(f"{path} has a store already: name a folder that has none") from error
        except OSError as error:
            raise StoreError(f"{directory} cannot be made ({error.strerror})") from error
        return copy_store(self._live(), directory, compact=compact, on_progress=on_progress)


def _directory(path: Path | str) -> Path:
    return Path(path) / "store"
