"""The store's tables inside one LMDB transaction, and the operations that keep records and references in
step."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from ragkv.errors import CorruptStoreError, StoreError
from ragkv.store.format.record import EncodedRecord
from ragkv.store.pages.page import is_whole_run
from ragkv.store.seal import Buffer

__all__ = [
    "ADDED",
    "INDEX_OWNER",
    "PLACE_BYTES",
    "TABLES",
    "VALUE_BYTES",
    "Transaction",
    "digest",
    "document_key",
    "place_of",
    "shape_key",
]

TABLES: Mapping[str, bool] = {
    "meta": False,
    "documents": False,
    "texts": False,
    "chunks": False,
    "places": False,
    "kv": False,
    "segments": False,
    "references": True,
    "needs": True,
    "vectors": False,
}
"""Name of every table, and whether a key has several values (docs/formats.md)."""

ADDED = {2: ("vectors",)}
"""Tables that came with a format version; a store of an earlier one lacks them until it is opened for writing."""

VALUE_BYTES = 32
"""Length of every value in the tables of several values per key: a digest."""

PLACE_BYTES = 36
"""Length of the keys in `chunks`, which are the values in `places`: a digest and a number."""

_KEY_LIMIT = 511


def digest(identifier: str) -> bytes:
    """A key of 32 bytes for an identifier of any length."""
    return hashlib.blake2b(identifier.encode("utf-8", "surrogatepass"), digest_size=32).digest()


def document_key(document_id: str) -> bytes:
    """The id itself, so that documents come in the order of their ids; a long one keeps its start and a
    hash."""
    if not document_id:
        raise StoreError("a document needs an id that is not empty")
    raw = document_id.encode("utf-8", "surrogatepass")
    return raw if len(raw) < _KEY_LIMIT else raw[: _KEY_LIMIT - 32] + digest(document_id)


INDEX_OWNER = digest("@index")
"""Refers to what the index itself needs (the prefix's KV); no chunk id has this form."""


class Transaction:
    """Values come as views of the map, which die with the transaction: copy what has to live longer.

    A table that the store is too old to have is an empty one.
    """

    __slots__ = ("_page_size", "_tables", "_txn", "changed")

    def __init__(self, txn: Any, tables: Mapping[str, Any], *, page_size: int) -> None:
        self._txn = txn
        self._tables = tables
        self._page_size = page_size
        self.changed: set[bytes] = set()
        """KV keys of the records that were written or dropped."""

    def close(self) -> None:
        """Let go of LMDB's transaction: py-lmdb keeps its reader slot for as long as anybody refers to it."""
        self._txn = None

    def number(self) -> int:
        """Of the commit whose state this is."""
        return int(self._txn.id())

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of the tables that the store has."""
        return tuple(self._tables)

    def get(self, table: str, key: bytes) -> memoryview | None:
        if table not in self._tables or not 0 < len(key) <= _KEY_LIMIT:  # a key that a damaged row gave
            return None
        value: memoryview | None = self._txn.get(key, db=self._tables[table])
        return value

    def put(self, table: str, key: bytes, value: Buffer) -> None:
        """Add or replace; in a table with several values per key, add."""
        self._require_removable(table, key)
        self._txn.put(key, value, db=self._tables[table])

    def delete(self, table: str, key: bytes, value: bytes = b"") -> bool:
        """Whether there was one. An empty `value` means all values of the key."""
        self._require_removable(table, key)
        return bool(self._txn.delete(key, value, db=self._tables[table]))

    def _require_removable(self, table: str, key: bytes) -> None:
        """LMDB frees as many pages as the head of a large value says, were they somebody else's."""
        value = None if TABLES[table] else self.get(table, key)
        if value is not None and not is_whole_run(key, value, self._page_size):
            raise CorruptStoreError(
                f"the store is damaged (the pages of a value in the table {table!r} contradict its length): restore a "
                "backup, or delete the index and ingest again"
            )

    def values(self, table: str, key: bytes) -> list[bytes]:
        """All values of a key."""
        with self._txn.cursor(db=self._tables[table]) as cursor:
            return [bytes(value) for value in cursor.iternext_dup()] if cursor.set_key(key) else []

    def has(self, table: str, key: bytes, value: bytes) -> bool:
        """Whether a key has this value, in a table with several values per key."""
        with self._txn.cursor(db=self._tables[table]) as cursor:
            return bool(cursor.set_key_dup(key, value))

    def keys(self, table: str, *, after: bytes | None = None) -> Iterator[bytes]:
        """Keys in order, each once, those up to and with `after` left out; no value is read from the disk."""
        if table not in self._tables:
            return
        with self._txn.cursor(db=self._tables[table]) as cursor:
            found = cursor.set_range(after) if after else cursor.first()
            if found and bytes(cursor.key()) == after:
                found = cursor.next_nodup()
            while found:
                yield bytes(cursor.key())
                found = cursor.next_nodup()

    def scan(
        self, table: str, prefix: bytes = b"", *, after: bytes | None = None, limit: int | None = None
    ) -> Iterator[tuple[bytes, memoryview]]:
        """Keys that begin with `prefix`, in order, those up to and with `after` left out, at most `limit`."""
        if table not in self._tables:
            return
        with self._txn.cursor(db=self._tables[table]) as cursor:
            start = after or prefix
            found = cursor.set_range(start) if start else cursor.first()
            if found and bytes(cursor.key()) == after:
                found = cursor.next()
            while found and limit != 0 and (key := bytes(cursor.key())).startswith(prefix):
                yield key, cursor.value()
                found, limit = cursor.next(), limit and limit - 1

    def count(self, table: str) -> int:
        """Entries of a table."""
        if table not in self._tables:
            return 0
        return int(self._txn.stat(self._tables[table])["entries"])

    def used_bytes(self, *tables: str) -> int:
        """Bytes of the pages that hold something, over these tables, or all."""
        pages, size = 0, 0
        for table in (self._tables[name] for name in tables or self._tables if name in self._tables):
            stat = self._txn.stat(table)
            pages += stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
            size = stat["psize"]
        return pages * size

    def segment(self, key: bytes, index: int) -> memoryview | None:
        return self.get("segments", _segment_key(key, index))

    def put_record(self, record: EncodedRecord) -> None:
        """Write a record in place of whatever was there, damaged or not."""
        self.drop_record(record.key)
        for index, payload in enumerate(record.segments):
            self.put("segments", _segment_key(record.key, index), payload)
        self.put("kv", record.key, record.manifest)

    def drop_record(self, key: bytes) -> None:
        """Forget a record with all segments there are, whatever its manifest says."""
        self.changed.add(key)
        self.delete("kv", key)
        if len(key) != VALUE_BYTES:  # no record's: it would take the segments of all that begin with it
            return
        for segment_key in [found for found, _ in self.scan("segments", key)]:
            self.delete("segments", segment_key)

    def refer(self, chunk: bytes, key: bytes) -> None:
        """Note that a chunk (by the digest of its id) needs a record."""
        self.put("references", key, chunk)
        self.put("needs", chunk, key)

    def release(self, chunk: bytes) -> list[bytes]:
        """Forget all that a chunk needs; the records that it needed, for `collect`."""
        keys = self.values("needs", chunk)
        self.delete("needs", chunk)
        for key in keys:
            self.delete("references", key, chunk)
        return keys

    def collect(self, keys: set[bytes]) -> None:
        """Drop those of the records that no chunk needs any more."""
        for key in keys:
            if self.get("references", key) is None:
                self.drop_record(key)


def shape_key(model: str) -> bytes:
    """Where `meta` says of what shape a model's KV is, by its fingerprint."""
    return b"shape/" + digest(model)


def place_of(document_row: bytes) -> bytes:
    """The digest of a document's id, from its key in `documents`."""
    if len(document_row) == _KEY_LIMIT:
        return document_row[-32:]
    return hashlib.blake2b(document_row, digest_size=32).digest()


def _segment_key(key: bytes, index: int) -> bytes:
    return key + index.to_bytes(4, "big")
