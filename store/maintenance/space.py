"""What a store holds and takes on disk; garbage collection, which drops KV that nothing refers to; and copies.

An ingest commits KV ahead of its documents (`Store.stage_kv`). Until the documents follow, these records look like the
remains of a killed ingest. So garbage is only collected while no ingest runs: hold the writer's lock for the whole of
`collect`. Queries may run meanwhile, because they refer to a record in the transaction that puts it.

A copy is made from one snapshot, while others read and write. A plain one is LMDB's hot copy. It takes every page
unchanged, so it also works on a damaged store. A compacted one is written entry by entry in key order, without free
pages. That also removes deleted content, which LMDB keeps in free pages until it needs them. LMDB's own compaction is
not used: in py-lmdb 3.0.0 it dies of SIGSEGV once about 62 chunks share one record, when the values of one key get a
tree of their own.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import lmdb

from ragkv.errors import StoreError, StoreFullError
from ragkv.store.codecs import DamagedError
from ragkv.store.counters import counters_of, generation, is_garbage, update_unreferenced
from ragkv.store.data_file import read_header
from ragkv.store.environment import FORMAT_VERSION, Database, is_full
from ragkv.store.maintenance.verify import Counter, Notify, find_record
from ragkv.store.record import Manifest
from ragkv.store.tables import (
    INDEX_OWNER,
    TABLES,
    VECTOR_KINDS,
    StoredDocument,
    Transaction,
    digest,
    document_digest,
    document_key,
    parse_chunk,
    parse_document,
    vector_prefix,
)
from ragkv.util import batches
from ragkv.util.files import sync_path


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """Counts, and sizes in bytes.

    `kv_bytes` are the stored payloads, `kv_bytes_raw` the decoded tensors, `kv_bytes_by_encoding` the payloads by
    encoding. `orphans` are records that no chunk needs, `unreadable` rows of documents and KV that were damaged when
    they were counted.
    `file_bytes` is the file's size on disk, `used_bytes` its part in use, `map_bytes` the size of LMDB's map.
    """

    documents: int
    chunks: int
    tokens: int
    kv_records: int
    kv_bytes: int
    kv_bytes_raw: int
    kv_bytes_by_encoding: Mapping[str, int]
    orphans: int
    unreadable: int
    file_bytes: int
    used_bytes: int
    map_bytes: int
    generation: int
    format_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentStats:
    """One document's share of a store.

    `kv_records` and `kv_bytes` cover all KV that its chunks need, without duplicates; another document with the same
    passages counts the same records again. `kv_bytes_own` are the records that deleting this document would free.
    `ingested_at` is in seconds since 1970.
    """

    document: str
    source: str
    chunks: int
    tokens: int
    kv_records: int
    kv_bytes: int
    kv_bytes_own: int
    text_bytes: int
    vector_bytes: int
    ingested_at: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVRecord:
    """A KV record as its manifest describes it. `bytes` are as stored, `raw_bytes` those of the tensors.

    `prefix_tokens` is the number of prefix tokens that the chunk attended to, `shared_by` the number of chunks that
    need the record.
    """

    key: str
    model: str
    encoding: str
    prefix_tokens: int
    layers: int
    dtype: str
    codec: str
    bytes: int
    raw_bytes: int
    segments: int
    shared_by: int


def records_of(txn: Transaction, chunk_id: str) -> list[KVRecord]:
    """The records that a chunk needs, by encoding. One whose manifest is damaged is left out; `verify` reports it."""
    records = []
    for key in txn.values("needs", digest(chunk_id)):
        value = txn.get("kv", key)
        if value is None:
            continue
        with suppress(DamagedError):
            manifest = Manifest.parse(value)
            records.append(
                KVRecord(
                    key=key.hex(),
                    model=manifest.identity.model,
                    encoding=manifest.identity.encoding.value,
                    prefix_tokens=manifest.identity.position,
                    layers=len(manifest.shapes),
                    dtype=manifest.dtype,
                    codec=str(manifest.codec["id"]),
                    bytes=manifest.stored_bytes,
                    raw_bytes=manifest.raw_bytes,
                    segments=len(manifest.segments),
                    shared_by=len(set(txn.values("references", key)) - {INDEX_OWNER}),
                )
            )
    return sorted(records, key=lambda record: (record.encoding, record.key))


def survey_documents(database: Database, document_ids: Iterable[str] | None = None) -> Iterator[DocumentStats]:
    """All documents in the order of their ids, or those with these ids, each from a snapshot of its own."""
    if document_ids is None:
        keys: Iterable[bytes] = (key for batch in database.batches("documents") for key, _ in batch)
    else:
        keys = map(document_key, document_ids)
    for key in keys:
        with database.read() as txn:
            value = txn.get("documents", key)
            share = None if value is None else _share(txn, key, parse_document(value))
        if share is not None:
            yield share


def _share(txn: Transaction, key: bytes, stored: StoredDocument) -> DocumentStats:
    place = document_digest(key)
    names = {digest(parse_chunk(row).chunk_id) for _, row in txn.scan("chunks", place)}
    sizes = {record: txn.payload_bytes(record) for name in names for record in txn.values("needs", name)}
    text = txn.get("texts", place)
    return DocumentStats(
        document=stored.document.document_id,
        source=stored.document.source,
        chunks=stored.chunks,
        tokens=stored.tokens,
        kv_records=len(sizes),
        kv_bytes=sum(sizes.values()),
        kv_bytes_own=sum(size for record, size in sizes.items() if names.issuperset(txn.values("references", record))),
        text_bytes=0 if text is None else len(text),
        vector_bytes=sum(
            len(part) for kind in VECTOR_KINDS for _, part in txn.scan("vectors", vector_prefix(kind, place))
        ),
        ingested_at=stored.ingested_at,
    )


def needed_models(database: Database) -> set[str]:
    """Fingerprints of the models that made the KV that chunks need."""
    models: set[str] = set()

    def visit(txn: Transaction, key: bytes) -> int:
        manifest = find_record(txn, key)
        if manifest is not None and txn.is_needed(key):
            models.add(manifest.identity.model)
        return 0

    database.walk("kv", visit)
    return models


def orphans(database: Database) -> Iterator[bytes]:
    """Keys of the records that no chunk needs, nor the index itself; read in batches."""
    for batch in database.batches("unreferenced"):
        with database.read() as txn:
            keys = [key for key, _ in batch if txn.get("kv", key) is not None and not txn.is_referenced(key)]
        yield from keys


def survey(database: Database) -> StoreStats:
    """The counters of one snapshot (`counters_of`)."""
    unlisted = sum(1 for _ in orphans(database))
    file_bytes, map_bytes = database.sizes()
    with database.read() as txn:
        counters = counters_of(txn)
        return StoreStats(
            documents=txn.count("documents"),
            chunks=txn.count("chunks"),
            tokens=counters["tokens"],
            kv_records=txn.count("kv"),
            kv_bytes=counters.kv_bytes,
            kv_bytes_raw=counters["raw"],
            kv_bytes_by_encoding=counters.bytes_by_encoding,
            orphans=unlisted,
            unreadable=counters["unreadable"],
            file_bytes=file_bytes,
            used_bytes=txn.used_bytes(),
            map_bytes=map_bytes,
            generation=generation(txn),
            format_version=FORMAT_VERSION,
        )


_BATCH = 256
Kind: TypeAlias = Literal["records", "index_records", "segments"]


@dataclass(slots=True, kw_only=True)
class Collection:
    """What was dropped, or in a dry run would be.

    `index_records` are KV of the index itself, `uses` use rows of KV whose chunks are deleted. `bytes` are payloads.
    `tiers` are values that were deleted from the shared tiers.
    The file keeps its size and reuses the space; `ragkv compact` makes it smaller. The caller fills in the retrieval
    indexes that it drops (`derived`, `derived_bytes`).
    """

    records: int = 0
    segments: int = 0
    index_records: int = 0
    bytes: int = 0
    uses: int = 0
    tiers: int = 0
    derived: int = 0
    derived_bytes: int = 0
    dry_run: bool = False

    def to_json(self) -> dict[str, Any]:
        """The object that `ragkv gc --json` prints."""
        return {name: getattr(self, name) for name in self.__slots__}


def collect(
    database: Database,
    *,
    in_use: Callable[[Manifest], bool],
    dry_run: bool = False,
    on_progress: Notify | None = None,
) -> Collection:
    """Drop records that no chunk needs, segments without a record, and the index's own records that are not `in_use`.

    Hold the writer's lock. It only visits the list of unreferenced KV and the index's own records.
    """
    collection = Collection(dry_run=dry_run)
    keys = _candidates(database)
    progress = Counter(on_progress, "gc", len(keys), "records")
    for start in range(0, len(keys), _BATCH):
        batch = keys[start : start + _BATCH]
        _sweep(database, batch, in_use, collection)
        progress.add(len(batch))
    progress.finish()
    return collection


def _candidates(database: Database) -> list[bytes]:
    """KV keys of possible garbage, which no chunk needs."""
    with database.read() as txn:
        own = txn.values("needs", INDEX_OWNER)
    return own + [key for batch in database.batches("unreferenced") for key, _ in batch]


def _sweep(database: Database, keys: list[bytes], in_use: Callable[[Manifest], bool], collection: Collection) -> None:
    """Check the records again and drop them in one transaction: a query may refer to one by now.

    A dry run only checks.
    """

    def apply(txn: Transaction) -> list[tuple[Kind, int, int]]:
        dropped = []
        for key in keys:
            garbage = _as_garbage(txn, key, in_use)
            if garbage is None:
                if not collection.dry_run:
                    update_unreferenced(txn, key)  # a damaged list may name what is in use
                continue
            dropped.append(garbage)
            if not collection.dry_run:
                txn.evict(key, (INDEX_OWNER,))
        return dropped

    if collection.dry_run:
        with database.read() as txn:
            dropped = apply(txn)
    else:
        dropped = database.write(apply)
    for kind, count, size in dropped:
        setattr(collection, kind, getattr(collection, kind) + count)
        collection.bytes += size


def _as_garbage(txn: Transaction, key: bytes, in_use: Callable[[Manifest], bool]) -> tuple[Kind, int, int] | None:
    """The kind and amount of garbage under a KV key and its payload bytes; None if there is none."""
    if is_garbage(txn, key):
        if txn.get("kv", key) is not None:
            return "records", 1, txn.payload_bytes(key)
        return "segments", sum(1 for _ in txn.scan("segments", key)), txn.payload_bytes(key)
    if txn.is_needed(key):
        return None
    manifest = find_record(txn, key)
    if manifest is None or in_use(manifest):
        return None
    return "index_records", 1, txn.payload_bytes(key)


_BATCH_BYTES = 64 << 20  # dirty pages are kept in memory until their transaction commits
_ROOM = 64 << 20


def _entry_bytes(entry: tuple[bytes, memoryview]) -> int:
    return len(entry[0]) + len(entry[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """The path of a copy, and the bytes on disk of the original store and of the copy."""

    path: Path
    bytes_before: int
    bytes_after: int
    verified: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"path": str(self.path)}


def copy_store(database: Database, folder: Path, *, compact: bool, on_progress: Notify | None = None) -> int:
    """Write `data.mdb` into `folder`, which exists, and sync it to the disk; returns its bytes.

    `StoreFullError` if there is no room, if possible before anything is written.
    """
    header = read_header(database.directory / "data.mdb")
    used = header.used if header is not None else 0
    with database.read() as txn:
        expected = txn.used_bytes() if compact else used
    free = shutil.disk_usage(folder).free
    if free < expected:
        raise StoreFullError(
            f"{folder} has {free} bytes free, and the copy needs about {expected}: make room, or copy to another disk"
        )
    progress = Counter(on_progress, "copy", expected)
    data = folder / "data.mdb"
    if compact:
        _rewrite(database, folder, expected, progress)
    else:
        _pour(database, data, progress)
    sync_path(folder)
    progress.finish()
    written = data.stat().st_size
    copied = read_header(data)  # refuses a file that is shorter than its pages
    if copied is None:
        raise StoreError(f"{database.directory} could not be copied: LMDB wrote nothing")
    return written


def _rewrite(database: Database, folder: Path, size: int, progress: Counter) -> None:
    """Write the entries of a snapshot, about `size` bytes, into a new environment in `folder`, and sync it."""
    map_size = 2 * size + _ROOM  # a limit, not bytes on the disk
    options: dict[str, Any] = {"map_size": map_size, "max_dbs": len(TABLES), "sync": False, "metasync": False}
    with database.read() as source:
        try:
            with closing(lmdb.open(os.fsencode(folder), lock=False, **options)) as target:
                for name, several in TABLES.items():
                    table = target.open_db(name.encode(), dupsort=several, dupfixed=several)
                    if name == "changes":  # for the source's retrieval indexes only, and it names deleted documents
                        continue
                    for batch in batches(source.scan(name), _entry_bytes, _BATCH_BYTES):
                        with target.begin(write=True, db=table) as txn, txn.cursor() as cursor:
                            cursor.putmulti(batch, dupdata=True, append=not several)
                        progress.add(sum(map(_entry_bytes, batch)))
                target.sync(True)
        except lmdb.Error as error:
            if is_full(error, folder):
                raise StoreFullError(f"{folder} cannot be written ({error}): make room and try again") from error
            raise


def _pour(database: Database, data: Path, progress: Counter) -> None:
    with data.open("xb", buffering=0) as file:

        def write(block: memoryview) -> None:
            try:
                while block:
                    count = file.write(block) or 0
                    progress.add(count)
                    block = block[count:]
            except OSError as error:
                raise StoreFullError(f"{data} cannot be written ({error.strerror}): make room and try again") from error

        database.copy(write)
        os.fsync(file.fileno())
