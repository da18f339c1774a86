"""The store: documents, their chunks and the chunks' KV, which appear and disappear together.

One LMDB environment under `<index>/store/` is an index's source of truth. Everything else is derived from it, and
compares `Store.generation` to detect that it is behind. Layout: docs/formats.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar, cast

from ragkv.errors import CorruptStoreError, StoreAccessError, StoreError, StoreExistsError
from ragkv.store.cache import MemoryTier
from ragkv.store.codecs import Codec, DamagedError, Raw
from ragkv.store.counters import NAME_BYTES, Changes, Version, changes_since, generation, version
from ragkv.store.data_file import discard_stub, refuse_links
from ragkv.store.documents import DocumentChange, chunk_by_id, drop_document, holds, vector_of
from ragkv.store.environment import LMDB_FILES, LOCK_FILE, Database, Holder, WriterLock
from ragkv.store.maintenance.eviction import (
    BUDGET,
    Arrival,
    Evictor,
    Use,
    UseTotals,
    kv_bytes,
    read_budget,
    read_totals,
    read_use,
    record_uses,
)
from ragkv.store.maintenance.maintenance import Maintenance
from ragkv.store.maintenance.space import (
    DocumentStats,
    KVRecord,
    StoreStats,
    records_of,
    survey,
    survey_documents,
)
from ragkv.store.maintenance.verify import chunk_named
from ragkv.store.reader import intact_manifest, read_many, warn_unusable
from ragkv.store.record import EncodedRecord, KVIdentity, Manifest, encode_record, pack_shape, round_trip
from ragkv.store.tables import (
    INDEX_OWNER,
    PLACE_BYTES,
    TOMBSTONE,
    VECTOR_KINDS,
    ChunkVectors,
    StoredDocument,
    Transaction,
    UseRow,
    Vector,
    VectorKind,
    chunk_key,
    digest,
    document_digest,
    document_key,
    for_each,
    parse_chunk,
    parse_document,
    parse_text,
    shape_key,
    vector_prefix,
)
from ragkv.types import Chunk, Document, KVShape
from ragkv.util import batches
from ragkv.util.files import parse_json, refusal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ragkv.attention.kv import ChunkKV, Place

T = TypeVar("T")
KVRecords: TypeAlias = "Iterable[tuple[KVIdentity, ChunkKV | EncodedRecord]]"
"""KV by its identity; from a tier, it is encoded already."""

STORE_FILES = frozenset({*LMDB_FILES, LOCK_FILE})
"""All files in a store's directory."""
STAGE_BYTES = 64 << 20
_LARGE_READ_BYTES = 32 << 20
INITIAL_MAP_BYTES = 64 << 20
MAKING_SECONDS = 10.0  # creating a store takes less: a process that holds the lock for longer does other work


class Store:
    """Documents, chunks, vectors and KV. Get one from `Store.create` or `Store.open`; it is a context manager.

    Any number of threads and processes may read while one writes. Within a process, all stores of one path share one
    environment; after a fork, the child has to open its own. `codec` is for new records: each record names the codec
    that it was written with.
    """

    def __init__(self, database: Database, *, readonly: bool | None, codec: Codec) -> None:
        self._database: Database | None = database
        self._forced = readonly is None
        self._lock = WriterLock(database.directory)
        self._evictor = Evictor(database)
        self.readonly = database.readonly if readonly is None else readonly
        self.codec = codec
        self.directory = database.directory
        self._state_bytes = 0
        """Read since pages were given back."""

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
            # of a folder whose parents are there or made, "no such file" means that the file system has none of ours
            why = "its file system takes no folders" if isinstance(error, FileNotFoundError) else refusal(error)
            raise StoreError(f"{directory} cannot be made ({why}): name another folder for the index.") from error
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
        """The store of the index at `path`. `StoreError` if it cannot be used, `CorruptStoreError` if it is damaged.

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
            raise StoreError(f"{directory} may not be read by you ({refusal(error)})") from error
        if not found:
            raise StoreError(f"there is no index at {path}: make one with `ragkv ingest PATH --index {path}`")
        database = Database.acquire(directory, readonly=readonly, create=False, map_size=INITIAL_MAP_BYTES)
        return cls(database, readonly=readonly, codec=codec or Raw())

    def close(self) -> None:
        """Release the environment; further calls do nothing."""
        if self._database is not None:
            self._database.release()
            self._database = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def writing(
        self, command: str, *, timeout: float | None = None, on_wait: Callable[[Holder], None] | None = None
    ) -> Iterator[None]:
        """Hold the writer's lock, which one long job at a time can have, across threads and processes.

        Hold it for work that takes more than one transaction, from the first read of the store to the last commit:
        `with store.writing("ragkv gc", timeout=0): ...`. A thread may nest it. `command` names the job to those who
        wait; for the other parameters see `WriterLock.hold`. A single transaction neither needs the lock nor waits for
        it.
        """
        self._refuse_readonly()
        with self._lock.hold(command, timeout=timeout, on_wait=on_wait), self._live().long_job():
            yield

    def writer(self) -> Holder | None:
        """The process that holds the writer's lock now."""
        return self._lock.holder()

    @property
    def in_place(self) -> bool:
        """Whether it is open and its file was not deleted, moved or replaced."""
        try:
            return self._live().in_place
        except StoreError:
            return False

    @property
    def generation(self) -> int:
        """The number of transactions that have changed documents, chunks or their vectors."""
        with self._live().read() as txn:
            return generation(txn)

    @property
    def version(self) -> Version:
        """The generation, with a mark that differs between copies of the store that diverged."""
        with self._live().read() as txn:
            return version(txn)

    def changes(self, since: Version) -> Changes | None:
        """The changes since a version; None if the store no longer knows it, or never had it."""
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
        """Delete a fact; returns whether there was one."""
        return self._write(lambda txn: txn.delete("meta", b"fact/" + name.encode()))

    def keep_shape(self, model: str, shape: KVShape) -> None:
        """Store the shape of a model's KV, by its fingerprint. From now on a record of another shape is damage."""
        if not self.keeps_shape(model, shape):
            self._write(lambda txn: txn.put("meta", shape_key(model), pack_shape(shape)))

    def keeps_shape(self, model: str, shape: KVShape) -> bool:
        """Whether this shape is stored."""
        with self._live().read() as txn:
            return bytes(txn.get("meta", shape_key(model)) or b"") == pack_shape(shape)

    def stats(self) -> StoreStats:
        return survey(self._live())

    def document_stats(self, document_ids: Iterable[str] | None = None) -> Iterator[DocumentStats]:
        """Each document's share of the store, in the order of their ids; read in batches, as `documents` is.

        `document_ids`: only of these, in their order; one that is not there is left out.
        """
        return survey_documents(self._live(), document_ids)

    def sizes(self) -> tuple[int, int]:
        """The bytes that the store's file takes on the disk, and the bytes of the map."""
        return self._live().sizes()

    # Documents

    def write_document(self, document: Document, text: str, chunks: Sequence[Chunk], **parts: Any) -> None:
        """`change` one document, and write it at once."""
        self.write_changes([self.change(document, text, chunks, **parts)])

    def change(
        self,
        document: Document,
        text: str,
        chunks: Sequence[Chunk],
        *,
        recipe: str,
        records: KVRecords = (),
        references: Mapping[str, Sequence[KVIdentity]],
        vectors: Mapping[str, ChunkVectors] | None = None,
        lenient: bool = False,
    ) -> DocumentChange:
        """A document's new version, checked and encoded, for `write_changes`; nothing is written yet.

        `recipe` identifies how the document was processed, for `is_current`. `references` names the KV that each chunk
        needs, by chunk id; records that are in the store already need not be among `records`. KV that no chunk needs
        any more is then deleted. If a reference has no record, `write_changes` fails; `lenient` skips the reference,
        because another process may have evicted the record. `StoreError` for parts that do not belong together.
        """
        return DocumentChange(
            document=document,
            text=text,
            chunks=chunks,
            recipe=recipe,
            records={record.key: record for record in self._encode(records)},
            references={
                chunk_id: {identity.key(): identity for identity in identities}
                for chunk_id, identities in references.items()
            },
            vectors=vectors or {},
            lenient=lenient,
        )

    def write_changes(self, changes: Sequence[DocumentChange], *, keep: Set[bytes] = frozenset()) -> None:
        """Make documents visible in one transaction, in this order: all of them or, after an error, none.

        A transaction waits for the disk, so several small documents should be written together. `keep`: keys of KV that
        later changes need, and that stays although no chunk may need it until then. `StoreError` if a reference has no
        record, or a chunk belongs to another document.
        """

        def apply(txn: Transaction) -> None:
            released = {key for change in changes for key in change.apply(txn)}
            txn.collect(released - keep)  # at the end, because a document may take over the KV of one before it

        if changes:
            self._write(apply, need=sum(change.size for change in changes))

    def delete_document(self, document_id: str) -> bool:
        """Delete a document, its chunks, their vectors, and the KV that only they needed; False when there is none."""
        return self.delete_documents([document_id]) == 1

    def delete_documents(self, document_ids: Sequence[str]) -> int:
        """Delete several as `delete_document` does, in one transaction; returns how many there were."""
        return self._write(lambda txn: sum(drop_document(txn, document_id) for document_id in document_ids))

    def is_current(self, document_id: str, content_hash: str, recipe: str) -> bool:
        """Whether the document is stored with this content and processed in this way, so that ingest can skip it."""
        stored = self.document(document_id)
        return stored is not None and (stored.document.content_hash, stored.recipe) == (content_hash, recipe)

    def document(self, document_id: str) -> StoredDocument | None:
        with self._live().read() as txn:
            value = txn.get("documents", document_key(document_id))
            return None if value is None else parse_document(value)

    @property
    def empty(self) -> bool:
        """Whether the store holds no document."""
        return next(self.documents(), None) is None

    def documents(self, *, after: str = "") -> Iterator[StoredDocument]:
        """The documents in the order of their ids, all or those behind the id `after`, which need not be there.

        They are read in batches, each from a snapshot of its own.
        """
        for batch in self._live().batches("documents", after=document_key(after) if after else None):
            for _, value in batch:
                yield parse_document(value)

    def text(self, document_id: str) -> str | None:
        with self._live().read() as txn:
            value = txn.get("texts", digest(document_id))
            return None if value is None else parse_text(value)

    # Chunks

    def chunks(self, document_id: str | None = None) -> Iterator[Chunk]:
        """The chunks of one document, or of all, in an order that only depends on the documents in the store.

        They are read in batches, each from a snapshot of its own; compare `generation` to see whether others wrote.
        """
        for batch in self._live().batches("chunks", b"" if document_id is None else digest(document_id)):
            for _, value in batch:
                yield parse_chunk(value)

    def chunk(self, chunk_id: str) -> Chunk | None:
        return self.chunk_many([chunk_id]).get(chunk_id)

    def chunk_many(self, chunk_ids: Iterable[str]) -> dict[str, Chunk]:
        """The chunks by id, from one snapshot; ids that are not in the store are left out."""
        with self._live().read() as txn:
            return {chunk_id: chunk for chunk_id in chunk_ids if (chunk := chunk_by_id(txn, chunk_id)) is not None}

    def with_preceding(
        self, chunk_ids: Iterable[str], visit: Callable[[Document, Chunk, Iterator[Chunk]], T]
    ) -> list[T]:
        """`visit` of each of these chunks that is in the store: its document, the chunk, and the preceding chunks of
        the document, nearest first, which are read lazily; all from one snapshot."""

        def before(chunk: Chunk) -> Iterator[Chunk]:
            for ordinal in range(chunk.ordinal - 1, -1, -1):
                value = txn.get("chunks", chunk_key(digest(chunk.document_id), ordinal))
                if value is None:
                    return
                yield parse_chunk(value)

        results = []
        with self._live().read() as txn:
            for chunk_id in chunk_ids:
                chunk = chunk_by_id(txn, chunk_id)
                row = None if chunk is None else txn.get("documents", document_key(chunk.document_id))
                if chunk is not None and row is not None:
                    results.append(visit(parse_document(row).document, chunk, before(chunk)))
        return results

    def chunks_named(self, names: Iterable[bytes]) -> list[Chunk]:
        """The chunks that `Changes` names, from one snapshot, without those that are not in the store."""
        with self._live().read() as txn:
            places = [(key, bytes(place)) for name in names for key, place in txn.scan("places", name)]
            rows = [(key, txn.get("chunks", place)) for key, place in places]
            found = [(key, parse_chunk(row)) for key, row in rows if row is not None]
        return [chunk for key, chunk in found if digest(chunk.chunk_id) == key]

    def documents_named(self, names: Iterable[bytes]) -> list[tuple[StoredDocument, list[str]]]:
        """The documents that `Changes` names, with the ids of their chunks, from one snapshot, without those that are
        not in the store."""
        documents: list[tuple[StoredDocument, list[str]]] = []
        bare: set[bytes] = set()
        with self._live().read() as txn:
            for name in names:
                chunks = [parse_chunk(row) for _, row in txn.scan("chunks", name)]
                row = txn.get("documents", document_key(chunks[0].document_id)) if chunks else None
                if row is not None:
                    documents.append((parse_document(row), [chunk.chunk_id for chunk in chunks]))
                elif not chunks and any(txn.scan("texts", name, limit=1)):
                    bare.add(name)
            if bare:  # the id of a document without chunks is in no chunk
                keys = [key for key in txn.keys("documents") if document_digest(key)[:NAME_BYTES] in bare]
                rows = (txn.get("documents", key) for key in keys)
                documents += [(parse_document(row), []) for row in rows if row is not None]
        return documents

    def vectors(self, kind: VectorKind) -> Iterator[tuple[str, Vector]]:
        """Every chunk id with its vector of a kind, in the order of `chunks`; chunks without one are left out.

        Retrieval indexes are built from this. Vectors are read in batches, as chunks are.
        """
        for batch in self._live().batches("chunks", size=64):
            with self._live().read() as txn:
                found = [(value, vector_of(txn, kind, key)) for key, value in batch]
            yield from ((parse_chunk(value).chunk_id, vector) for value, vector in found if vector is not None)

    def vector_kinds(self) -> frozenset[VectorKind]:
        """The kinds of vectors that any chunk has."""
        with self._live().read() as txn:
            return frozenset(kind for kind in VECTOR_KINDS if any(txn.scan("vectors", vector_prefix(kind), limit=1)))

    def vector_many(self, kind: VectorKind, chunk_ids: Iterable[str]) -> dict[str, Vector]:
        """The vectors of these chunks, from one snapshot; ids without a vector are left out."""
        vectors = {}
        with self._live().read() as txn:
            for chunk_id in chunk_ids:
                place = txn.get("places", digest(chunk_id))
                vector = None if place is None or len(place) != PLACE_BYTES else vector_of(txn, kind, bytes(place))
                if vector is not None:
                    vectors[chunk_id] = vector
        return vectors

    def places(self) -> Iterator[tuple[bytes, bytes]]:
        """Of every chunk, the digest of its id and that of its document's id (`H` in docs/formats.md), in batches."""
        for batch in self._live().batches("places", size=4096):
            for name, place in batch:
                yield name, place[:32]

    # KV

    def get_kv(self, identity: KVIdentity) -> ChunkKV | None:
        """The chunk's KV in new tensors; None if it is missing or, with a warning in the log, damaged."""
        return self.get_many([identity]).get(identity)

    def get_many(
        self, identities: Iterable[KVIdentity], *, device: Place | None = None, shape: KVShape | None = None
    ) -> dict[KVIdentity, ChunkKV]:
        """The KV of several chunks, from one snapshot, on the CPU or on `device`; misses are left out (see `get_kv`).

        For a model whose layers are on several devices, `device` names one for each layer.

        Callers with a model pass the `shape` of its KV: a record of another shape is then a miss. The store's own
        record of shapes may be wrong if the store is foreign.
        """
        wanted = list(dict.fromkeys(identities))
        if shape is not None and shape.dtype == "uint8":
            return {of: kv for of in wanted if (kv := self._state(of, shape)) is not None}
        try:
            with self._live().read() as txn:
                if not isinstance(device, tuple):
                    return read_many(txn, wanted, shape, device)
                return {of: kv.to(device) for of, kv in read_many(txn, wanted, shape).items()}
        except CorruptStoreError as error:
            # LMDB cannot read a page of one of the records. Read them one by one, so that the others are found.
            if len(wanted) == 1:
                warn_unusable(wanted[0].key(), error)
                return {}
            return {of: kv for one in wanted for of, kv in self.get_many([one], device=device, shape=shape).items()}

    def _state(self, identity: KVIdentity, shape: KVShape) -> ChunkKV | None:
        """A state of llama.cpp whose record is intact. Its bytes are read when llama.cpp copies them to its cells, so
        that they are not in memory twice.
        """
        from ragkv.attention.kv import OpaqueKV

        manifest = self._read_state(identity, shape, lambda txn: intact_manifest(txn, identity, shape))
        if manifest is None:
            return None

        def read() -> NDArray[np.uint8] | None:
            kv: Any = self._read_state(identity, shape, lambda txn: read_many(txn, [identity], shape).get(identity))
            return None if kv is None else cast("NDArray[np.uint8]", kv.data)

        kv = OpaqueKV(
            source=read,
            shape=manifest.shape,
            tokens=manifest.tokens,
            encoded_at=manifest.encoded_at,
            identity=identity,
        )
        return cast("ChunkKV", kv)

    def _read_state(self, identity: KVIdentity, shape: KVShape, read: Callable[[Transaction], T | None]) -> T | None:
        """What `read` finds of a record; now and then, the pages that were read leave memory."""
        try:
            with self._live().read() as txn:
                result = read(txn)
        except CorruptStoreError as error:
            warn_unusable(identity.key(), error)
            return None
        self._state_bytes += shape.nbytes(identity.tokens)
        if self._state_bytes > _LARGE_READ_BYTES:
            self._state_bytes = 0
            self.maintenance.give_back_pages()
        return result

    def memory(
        self, device: Place | str = "cpu", *, budget: int | None = None, unstored: Container[bytes] = ()
    ) -> MemoryTier:
        """The KV that this process keeps in memory on a device (or several), shared by all stores of one path.

        `budget`, if given, sets its budget in bytes, which is 0 at first. KV that was deleted from the store is
        dropped; `unstored` are the keys of KV that is not stored yet.
        """
        tier = self._live().memory(str(device))
        if budget is not None:
            tier.resize(budget)
        with self._live().read() as txn:
            tier.retain(
                generation(txn), lambda keys: [key for key in keys if key in unstored or txn.get("kv", key) is not None]
            )
        return tier

    def has_kv(self, identity: KVIdentity) -> bool:
        """Whether the store has a record of exactly this identity. Its segments are only checked by `get_kv`."""
        with self._live().read() as txn:
            return holds(txn, identity.key(), identity)

    def kv_of(self, chunk_id: str) -> list[KVRecord]:
        """The KV records of a chunk as their manifests describe them; the KV itself is not read."""
        with self._live().read() as txn:
            return records_of(txn, chunk_id)

    def put_many(self, records: Iterable[tuple[KVIdentity, ChunkKV | EncodedRecord, str | None]]) -> set[bytes]:
        """Store KV that a question had to encode, about 64 MiB in a transaction, replacing bad records.

        Returns the keys of what was stored: not of KV whose chunk was deleted, or that the budget has no room for.

        Without a chunk's id, KV belongs to the index: it is kept until the next `gc`, or until it has to make room.
        """
        self._refuse_readonly()

        def arrivals() -> Iterator[Arrival]:
            for identity, kv, chunk_id in records:
                (record,) = self._encode([(identity, kv)])
                owner = INDEX_OWNER if chunk_id is None else digest(chunk_id)
                yield Arrival(record=record, tokens=identity.tokens, owner=owner, exact=self._exact)

        stored = set[bytes]()
        for batch in batches(arrivals(), lambda arrival: arrival.record.stored_bytes, STAGE_BYTES):
            self._live()
            stored |= self._evictor.admit(batch)
        return stored

    def keep_kv(self, identity: KVIdentity, kv: ChunkKV) -> None:
        """Store KV that belongs to the index and to no chunk, whatever the budget: the prefix's own."""
        (record,) = self._encode([(identity, kv)])

        def apply(txn: Transaction) -> None:
            new = txn.get("kv", record.key) is None
            txn.put_record(record)
            txn.refer(INDEX_OWNER, record.key)
            if new and self._exact:
                txn.changed.discard(record.key)  # the cached KV equals the stored one

        self._write(apply, need=record.stored_bytes)

    @property
    def _exact(self) -> bool:
        """Whether memory holds new KV with exactly the numbers that are stored."""
        return self.codec.early or self.codec.lossless() == self.codec

    def rounded(self, new: Mapping[KVIdentity, ChunkKV]) -> dict[KVIdentity, ChunkKV]:
        """New KV with the numbers that reading it from the store will give, if the codec rounds early.

        With other lossy codecs, the question that encoded it reads it unrounded.
        """
        return {
            of: round_trip(kv, of, self.codec)[1] if self.codec.suited(kv.shape.dtype).early else kv
            for of, kv in new.items()
        }

    def has_many(self, identities: Iterable[KVIdentity]) -> set[KVIdentity]:
        """The identities of which the store has a record, as `has_kv`; from one snapshot."""
        with self._live().read() as txn:
            return {identity for identity in identities if holds(txn, identity.key(), identity)}

    # What is kept of KV (docs/budget.md)

    @property
    def kv_bytes(self) -> int:
        """The bytes of all KV in its stored form."""
        with self._live().read() as txn:
            return kv_bytes(txn)

    @property
    def budget(self) -> int | None:
        """The bytes that KV may take, for all processes; None without a limit."""
        with self._live().read() as txn:
            return read_budget(txn)

    def set_budget(self, budget: int | None) -> int:
        """Set the budget, and drop the excess, lowest score first; returns the number of dropped records."""
        if budget != self.budget:
            packed = json.dumps(budget).encode()
            self._write(lambda txn: txn.put("meta", BUDGET, packed))
        return self._evictor.shrink() if budget is not None else 0

    def tombstones(self, *, limit: int = 4096) -> list[bytes]:
        """Keys of KV that the shared tiers may hold and no chunk needs any more, for `purge_tombstones`."""
        with self._live().read() as txn:
            found = [key[len(TOMBSTONE) :] for key, _ in txn.scan("meta", TOMBSTONE, limit=limit)]
            return [key for key in found if len(key) == PLACE_BYTES - 4]

    def purge_tombstones(self, keys: Iterable[bytes], delete: Callable[[list[bytes]], bool]) -> int | None:
        """Call `delete` with those of these keys that the store has no record of, and forget all if it is True; returns
        how many were deleted, or None."""
        noted = list(keys)
        with self._live().read() as txn:
            gone = [key for key in noted if txn.get("kv", key) is None]
        if gone and not delete(gone):
            return None
        self._write(for_each(noted, lambda txn, key: txn.delete("meta", TOMBSTONE + key)))
        return len(gone)

    def identities(self) -> Iterator[KVIdentity]:
        """The identity of every record that has a readable manifest, in batches."""
        for batch in self._live().batches("kv", size=256):
            for _, value in batch:
                with suppress(DamagedError):
                    yield Manifest.parse(value).identity

    def spare(self, reading: Callable[[bytes], bool]) -> None:
        """Evict no record for whose KV key `reading` is true: it is being read."""
        self._evictor.pinned = reading

    def record_uses(self, uses: Mapping[bytes, Use], *, seconds_per_token: float | None = None) -> None:
        """Record the uses of questions, by KV key, and the latest measured time per encoded token."""
        self._write(lambda txn: record_uses(txn, uses, seconds_per_token=seconds_per_token))

    def ledger(self) -> UseTotals:
        """Totals over all questions: hits, misses, and admitted and evicted KV."""
        with self._live().read() as txn:
            return read_totals(txn)

    def uses_of(self, keys: Iterable[bytes]) -> dict[bytes, UseRow]:
        """The uses of these records, by KV key; records that no question has used are left out."""
        with self._live().read() as txn:
            return {key: row for key in keys if (row := read_use(txn, key)) is not None}

    def chunks_of(self, owners: Iterable[bytes]) -> dict[bytes, Chunk]:
        """The chunks by the digests of their ids, as in use rows; deleted ones are left out."""
        with self._live().read() as txn:
            return {owner: chunk for owner in owners if (chunk := chunk_named(txn, owner)) is not None}

    def uses(self) -> Iterator[tuple[bytes, UseRow]]:
        """The uses of every record, by KV key, including evicted ones; damaged rows are left out."""
        for batch in self._live().batches("uses"):
            for key, value in batch:
                with suppress(DamagedError):
                    yield key, UseRow.parse(value)

    def stage_kv(self, records: KVRecords) -> int:
        """Commit records ahead of their document, 64 MiB at a time; returns how many.

        This serves documents whose KV does not fit into memory, and a killed ingest continues where it was (`has_kv`).
        The records are orphans until `write_document` refers to them.
        """
        count = 0
        for batch in batches(self._encode(records), lambda record: record.stored_bytes, STAGE_BYTES):
            self._stage(batch)
            count += len(batch)
        return count

    def _stage(self, batch: Sequence[EncodedRecord]) -> None:
        self._write(for_each(batch, Transaction.put_record), need=sum(record.stored_bytes for record in batch))

    @property
    def maintenance(self) -> Maintenance:
        """Verification, repair, garbage collection and copies of this store."""
        return Maintenance(self._live(), self.codec, self._refuse_readonly)

    def _live(self) -> Database:
        if self._database is None:
            raise StoreError(f"{self.directory} is closed: open it again")
        return self._database

    def _refuse_readonly(self) -> None:
        if self.readonly and self._forced:
            raise StoreAccessError(f"{self.directory} may not be written by you: it was opened read-only")
        if self.readonly:
            raise StoreError(f"{self.directory} is open read-only: open it with readonly=False to change it")

    def _write(self, apply: Callable[[Transaction], T], *, need: int = 0) -> T:
        self._refuse_readonly()
        return self._live().write(apply, need=need)

    def _encode(self, records: KVRecords) -> Iterator[EncodedRecord]:
        return (
            kv if isinstance(kv, EncodedRecord) else encode_record(kv, identity, self.codec) for identity, kv in records
        )


def _directory(path: Path | str) -> Path:
    return Path(path) / "store"
