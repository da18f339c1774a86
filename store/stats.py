"""What a store holds and what it costs on the disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ragkv.store.database import Database
from ragkv.store.record import Manifest
from ragkv.store.row import parse_document
from ragkv.store.seal import DamagedError

__all__ = ["StoreStats", "survey"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """Counts, and sizes in bytes.

    `kv_bytes` are the payloads as stored, `kv_bytes_raw` the tensors that they decode to,
    `kv_bytes_by_encoding` the payloads of each encoding. `orphans` are records that no chunk needs,
    `unreadable` those whose manifest is damaged. `file_bytes` is what the file takes on the disk,
    `used_bytes` the part of it that is not free again; `format_version` is the file's.
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


def survey(database: Database, *, generation: int, orphans: int) -> StoreStats:
    """Walks all documents and manifests, in batches: a count of a store that others write to is
    approximate."""
    tokens = raw = unreadable = 0
    by_encoding: Counter[str] = Counter()
    for batch in database.batches("documents"):
        tokens += sum(parse_document(value).tokens for _, value in batch)
    for batch in database.batches("kv"):
        for _, value in batch:
            try:
                manifest = Manifest.parse(value)
            except DamagedError:
                unreadable += 1
                continue
            raw += manifest.raw_bytes
            by_encoding[manifest.identity.encoding.value] += manifest.stored_bytes
    file_bytes, map_bytes = database.sizes()
    with database.read() as txn:
        return StoreStats(
            documents=txn.count("documents"),
            chunks=txn.count("chunks"),
            tokens=tokens,
            kv_records=txn.count("kv"),
            kv_bytes=by_encoding.total(),
            kv_bytes_raw=raw,
            kv_bytes_by_encoding=dict(by_encoding),
            orphans=orphans,
            unreadable=unreadable,
            file_bytes=file_bytes,
            used_bytes=txn.used_bytes(),
            map_bytes=map_bytes,
            generation=generation,
            format_version=database.format,
        )
