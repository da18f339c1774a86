"""What a store holds and what it costs on the disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from ragkv.store.database import Database
from ragkv.store.format.record import Manifest, summarise
from ragkv.store.format.row import StoredDocument, parse_chunk, parse_document
from ragkv.store.format.vector import VECTOR_KINDS, vector_prefix
from ragkv.store.history import generation
from ragkv.store.seal import DamagedError
from ragkv.store.tally import Sums, read_tally, take_tally
from ragkv.store.transaction import INDEX_OWNER, Transaction, digest, document_digest, document_key

__all__ = [
    "DocumentStats",
    "KVRecord",
    "StoreStats",
    "needed_models",
    "orphans",
    "records_of",
    "survey",
    "survey_documents",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """Counts, and sizes in bytes.

    `kv_bytes` are the payloads as stored, `kv_bytes_raw` the tensors that they decode to, `kv_bytes_by_encoding` the
    payloads by encoding. `orphans` are records that no chunk needs, `unreadable` those whose manifest was
    damaged when it was counted.
    `file_bytes` is what the file takes on the disk, `used_bytes` the part of it that holds something, `map_bytes` the
    size of LMDB's map.
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

    `kv_records` and `kv_bytes` cover all KV that its chunks need, each record once; another document with the same
    passages counts the same records again. `kv_bytes_own` are the records that no other document needs, which deleting
    this one frees. `ingested_at` is in seconds since 1970.
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

    `prefix_tokens` is how many tokens of the prompt's prefix the chunk saw, `shared_by` how many chunks need the
    record.
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
    found = []
    for key in txn.values("needs", digest(chunk_id)):
        value = txn.get("kv", key)
        if value is None:
            continue
        with suppress(DamagedError):
            manifest = Manifest.parse(value)
            found.append(
                KVRecord(
                    key=key.hex(),
                    model=manifest.identity.model,
                    encoding=manifest.identity.encoding.value,
                    prefix_tokens=len(manifest.identity.prefix_ids),
                    layers=len(manifest.shapes),
                    dtype=manifest.dtype,
                    codec=str(manifest.codec["id"]),
                    bytes=manifest.stored_bytes,
                    raw_bytes=manifest.raw_bytes,
                    segments=len(manifest.segments),
                    shared_by=len(set(txn.values("references", key)) - {INDEX_OWNER}),
                )
            )
    return sorted(found, key=lambda record: (record.encoding, record.key))


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
    at = document_digest(key)
    names = {digest(parse_chunk(row).chunk_id) for _, row in txn.scan("chunks", at)}
    sizes = {record: _payload_bytes(txn, record) for name in names for record in txn.values("needs", name)}
    text = txn.get("texts", at)
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
            len(part) for kind in VECTOR_KINDS for _, part in txn.scan("vectors", vector_prefix(kind, at))
        ),
        ingested_at=stored.ingested_at,
    )


def _payload_bytes(txn: Transaction, record: bytes) -> int:
    """Bytes of a record's payloads, as its manifest says, or as they are if it cannot be read."""
    try:
        return summarise(txn.get("kv", record) or b"").stored_bytes
    except DamagedError:
        return txn.payload_bytes(record)


def needed_models(database: Database) -> set[str]:
    """Fingerprints of the models that made the KV that chunks need."""
    with database.read() as txn:
        return (read_tally(txn) or take_tally(txn)).models


def orphans(database: Database) -> Iterator[bytes]:
    """Keys of the records that no chunk needs, nor the index itself; read in batches."""
    with database.read() as txn:
        listed = "unreferenced" in txn.tables
    for batch in database.batches("unreferenced" if listed else "kv"):
        with database.read() as txn:
            keys = [key for key, _ in batch if txn.get("kv", key) is not None and not txn.is_referenced(key)]
        yield from keys


def survey(database: Database) -> StoreStats:
    """The counters of one snapshot; a store without them, or with damaged ones, is counted row by row."""
    unlisted = sum(1 for _ in orphans(database))
    file_bytes, map_bytes = database.sizes()
    with database.read() as txn:
        tally = read_tally(txn)
        if tally is None:
            tally = take_tally(txn)
        sums = Sums()
        for group in tally.groups.values():
            sums = sums.plus(group)
        return StoreStats(
            documents=txn.count("documents"),
            chunks=txn.count("chunks"),
            tokens=tally.tokens,
            kv_records=txn.count("kv"),
            kv_bytes=sums.bytes,
            kv_bytes_raw=sums.raw_bytes,
            kv_bytes_by_encoding=tally.bytes_by_encoding,
            orphans=unlisted,
            unreadable=tally.unreadable_records,
            file_bytes=file_bytes,
            used_bytes=txn.used_bytes(),
            map_bytes=map_bytes,
            generation=generation(txn),
            format_version=database.format,
        )
