"""The store: documents, their chunks and the chunks' KV, which appear and vanish together.

One LMDB environment under `<index>/store/` is the truth of an index; everything else is derived from it and
says by `Store.generation` whether it is behind. Layout: docs/formats.md.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from ragkv.errors import ConfigError, CorruptStoreError, StoreError
from ragkv.kv import ChunkKV
from ragkv.store.codec import Codec, Raw
from ragkv.store.database import Database
from ragkv.store.document import DocumentChange, drop_document, generation, holds, matching
from ragkv.store.identity import KVIdentity
from ragkv.store.record import EncodedRecord, decode_record, encode_record
from ragkv.store.row import (
    StoredDocument,
    parse_chunk,
    parse_document,
    parse_text,
)
from ragkv.store.seal import DamagedError
from ragkv.store.stats import StoreStats, survey
from ragkv.store.transaction import Transaction, digest, document_key
from ragkv.types import Chunk, Document

__all__ = ["Store"]

INITIAL_MAP_BYTES = 64 << 20
STAGE_BYTES = 64 << 20
INDEX_OWNER = digest("@index")  # refers to what the index itself needs; no chunk id has this form
T = TypeVar("T")
KVRecords = Iterable[tuple[KVIdentity, ChunkKV]]

logger = logging.getLogger(__name__)


class Store:
    """Open one with `Store.create` or `Store.open`; it is a context manager.

    Any number of threads may read while one writes, and any number of processes. Stores of one path share one
    environment within a process; after a fork the child opens its own. `codec` is for new records: each
    record knows the codec that it was written with.
    """

    def __init__(self, database: Database, *, readonly: bool, codec: Codec) -> None:
        self._database: Database | None = database
        self._readonly = readonly
        self.codec = codec
        self.directory = database.directory

    @staticmethod
    def exists(path: Path | str) -> bool:
        """Whether the index at `path` has a store."""
        return (_directory(path) / "data.mdb").is_file()

    @classmethod
    def create(cls, path: Path | str, *, codec: Codec | None = None, map_size: int = INITIAL_MAP_BYTES) -> Self:
        """A new, empty store in the index at `path`, which is made; `StoreError` when it has one."""
        directory = _directory(path)
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise StoreError(f"{path} is a file: name a directory for the index") from error
        except OSError as error:
            raise StoreError(f"{directory} cannot be made ({error})") from error
        database = Database.acquire(directory, readonly=False, create=True, map_size=map_size)
        return cls(database, readonly=False, codec=codec or Raw())

    @classmethod
    def open(cls, path: Path | str, *, readonly: bool = False, codec: Codec | None = None) -> Self:
        """The store of the index at `path`; `StoreError` says what is missing, `CorruptStoreError` what is
        broken."""
        directory = _directory(path)
        if Path(path).is_file():
            raise StoreError(f"{path} is a file: name the directory of an index")
        try:
            found = cls.exists(path)
        except OSError as error:
            raise StoreError(f"{directory} may not be read by you ({error})") from error
        if not found:
            raise StoreError(f"there is no index at {path}: make one with `ragkv ingest PATH --index {path}`")
        database = Database.acquire(directory, readonly=readonly, create=False, map_size=INITIAL_MAP_BYTES)
        return cls(database, readonly=readonly, codec=codec or Raw())

    def close(self) -> None:
        """Let go of the environment. Safe to call again."""
        if self._database is not None:
            self._database.release()
            self._database = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Documents

    def write_document(
        self,
        document: Document,
        text: str,
        chunks: Sequence[Chunk],
        *,
        recipe: str,
        records: KVRecords = (),
        references: Mapping[str, Sequence[KVIdentity]],
    ) -> None:
        """Make a document, its chunks and their KV visible at once, in place of the document's earlier
        version.

        `recipe` says how it was processed, for `is_current`. `references` names the KV that each chunk needs,
        by chunk id; a record that is in the store already need not be among `records`. KV that no chunk needs
        any more goes with the earlier version. `StoreError`, and nothing written, when a reference has no
        record.
        """
        change = DocumentChange(
            document=document,
            text=text,
            chunks=chunks,
            recipe=recipe,
            records={record.key: record for record in self._encode(records)},
            references={
                chunk_id: {identity.key(): identity for identity in identities}
                for chunk_id, identities in references.items()
            },
        )
        self._write(change.apply, need=change.size)

    def delete_document(self, document_id: str) -> bool:
        """Drop a document, its chunks, and the KV that only they needed; False when there is none."""
        return self._write(lambda txn: drop_document(txn, document_id))

    def is_current(self, document_id: str, content_hash: str, recipe: str) -> bool:
        """Whether the document is here with this content, processed in this way: then an ingest has nothing
        to do."""
        stored = self.document(document_id)
        return stored is not None and (stored.document.content_hash, stored.recipe) == (content_hash, recipe)

    def document(self, document_id: str) -> StoredDocument | None:
        with self._live().read() as txn:
            value = txn.get("documents", document_key(document_id))
            return None if value is None else parse_document(value)

    def documents(self) -> Iterator[StoredDocument]:
        """All documents in the order of their ids, read in batches: no snapshot while others write."""
        for batch in self._live().batches("documents"):
            for _, value in batch:
                yield parse_document(value)

    def text(self, document_id: str) -> str | None:
        with self._live().read() as txn:
            value = txn.get("texts", digest(document_id))
            return None if value is None else parse_text(value)

    # Chunks

    def chunks(self, document_id: str | None = None) -> Iterator[Chunk]:
        """The chunks of one document, or of all, in an order that depends on nothing but the documents there
        are.

        Read in batches: no snapshot while others write; `generation` tells whether they have.
        """
        for batch in self._live().batches("chunks", b"" if document_id is None else digest(document_id)):
            for _, value in batch:
                yield parse_chunk(value)

    def chunk(self, chunk_id: str) -> Chunk | None:
        return self.chunk_many([chunk_id]).get(chunk_id)

    def chunk_many(self, chunk_ids: Iterable[str]) -> dict[str, Chunk]:
        """The chunks by id, of one snapshot; ids that are not there are left out."""
        found = {}
        with self._live().read() as txn:
            for chunk_id in chunk_ids:
                place = txn.get("places", digest(chunk_id))
                value = None if place is None else txn.get("chunks", bytes(place))
                chunk = None if value is None else parse_chunk(value)
                if chunk is not None and chunk.chunk_id == chunk_id:  # else the place is damaged: it has no checksum
                    found[chunk_id] = chunk
        return found

    # KV

    def get_kv(self, identity: KVIdentity) -> ChunkKV | None:
        """The chunk's KV in new tensors, or None: not there, or not to be trusted (which is logged)."""
        key = identity.key()
        try:
            with self._live().read() as txn:
                value = txn.get("kv", key)
                if value is None:
                    return None
                manifest = matching(value, identity)
                return decode_record(manifest, lambda index: txn.segment(key, index))
        except (DamagedError, ConfigError, CorruptStoreError) as error:
            logger.warning("KV record %s cannot be used and counts as missing: %s", key.hex()[:16], error)
            return None

    def has_kv(self, identity: KVIdentity) -> bool:
        """Whether a record of exactly this identity is here; its segments are checked by `get_kv` alone."""
        with self._live().read() as txn:
            return holds(txn, identity.key(), identity)

    def put_kv(self, identity: KVIdentity, kv: ChunkKV, *, chunk_id: str) -> bool:
        """Keep KV that a query had to make, in place of a record that was bad; False when the chunk is gone."""
        return self._put(identity, kv, digest(chunk_id))

    def keep_kv(self, identity: KVIdentity, kv: ChunkKV) -> None:
        """Keep KV that belongs to the index and to no chunk: the prefix's own."""
        self._put(identity, kv, None)

    def _put(self, identity: KVIdentity, kv: ChunkKV, chunk: bytes | None) -> bool:
        (record,) = self._encode([(identity, kv)])

        def apply(txn: Transaction) -> bool:
            if chunk is not None and txn.get("places", chunk) is None:
                return False
            txn.put_record(record)
            txn.refer(INDEX_OWNER if chunk is None else chunk, record.key)
            return True

        return self._write(apply, need=record.stored_bytes)

    def stage_kv(self, records: KVRecords) -> int:
        """Commit records ahead of their document, 64 MiB at a time; how many.

        For documents whose KV is too much for memory, and to resume a killed ingest where it was (`has_kv`).
        They are orphans until `write_document` refers to them.
        """
        count, size, batch = 0, 0, list[EncodedRecord]()
        for record in self._encode(records):
            batch.append(record)
            count, size = count + 1, size + record.stored_bytes
            if size >= STAGE_BYTES:
                self._stage(batch, size)
                size, batch = 0, []
        self._stage(batch, size)
        return count

    def orphans(self) -> Iterator[bytes]:
        """Keys of the records that no chunk needs."""
        for batch in self._live().batches("kv"):
            with self._live().read() as txn:
                orphans = [key for key, _ in batch if txn.get("references", key) is None]
            yield from orphans

    # The whole

    @property
    def generation(self) -> int:
        """Counts the transactions that changed the set of chunks."""
        with self._live().read() as txn:
            return generation(txn)

    def get_meta(self, name: str) -> Any:
        """A fact about the index that `put_meta` kept, or None."""
        with self._live().read() as txn:
            value = txn.get("meta", b"fact/" + name.encode())
            try:
                return None if value is None else json.loads(bytes(value))
            except ValueError as error:
                raise CorruptStoreError(
                    f"the fact {name!r} in {self.directory} is damaged ({error}): restore a backup, or ingest again "
                    "into a new index"
                ) from error

    def put_meta(self, name: str, value: Any) -> None:
        """Keep a small JSON value, such as the model's fingerprint."""
        packed = json.dumps(value).encode()
        self._write(lambda txn: txn.put("meta", b"fact/" + name.encode(), packed))

    def stats(self) -> StoreStats:
        return survey(self._live(), generation=self.generation, orphans=sum(1 for _ in self.orphans()))

    def _live(self) -> Database:
        if self._database is None:
            raise StoreError(f"{self.directory} is closed: open it again")
        return self._database

    def _write(self, apply: Callable[[Transaction], T], *, need: int = 0) -> T:
        if self._readonly:
            raise StoreError(f"{self.directory} is open read-only: open it with readonly=False to change it")
        return self._live().write(apply, need=need)

    def _encode(self, records: KVRecords) -> Iterator[EncodedRecord]:
        return (encode_record(kv, identity, self.codec) for identity, kv in records)

    def _stage(self, batch: Sequence[EncodedRecord], size: int) -> None:
        def apply(txn: Transaction) -> None:
            for record in batch:
                txn.put_record(record)

        if batch:
            self._write(apply, need=size)


def _directory(path: Path | str) -> Path:
    return Path(path) / "store"
