"""The store's tables within one LMDB transaction, and the operations that keep records and references consistent."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from ragkv.errors import StoreError
from ragkv.store.codecs import Buffer
from ragkv.store.record import EncodedRecord

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
    "counters": False,
    "unreferenced": False,
    "changes": False,
    "uses": False,
}
"""Every table, and whether its keys have several values (docs/formats.md)."""

ADDED = {2: ("vectors",), 3: ("counters", "unreferenced", "changes", "uses")}
"""Tables by the format version that added them. An older store gets them when it is first opened for writing, and
`ragkv.store.environment` fills them."""

VALUE_BYTES = 32
"""Length of every value in tables with several values per key: a digest."""

PLACE_BYTES = 36
"""Length of the keys in `chunks`, which are also the values in `places`: a document's digest and an ordinal."""

TIERS = b"fact/tiers"
"""The key in `meta` that says that the index has shared tiers."""
TOMBSTONE = b"tombstone/"
"""Before a KV key in `meta`: no chunk needs it any more, and it is yet to be deleted from the tiers."""

_KEY_LIMIT = 511


def digest(identifier: str) -> bytes:
    """A key of 32 bytes for an id of any length."""
    return hashlib.blake2b(identifier.encode("utf-8", "surrogatepass"), digest_size=32).digest()


def document_key(document_id: str) -> bytes:
    """A document's key in `documents`: the id itself, so that documents are sorted by it.

    LMDB limits keys to 511 bytes, so that a longer id is cut, and its hash is appended.
    """
    if not document_id:
        raise StoreError("a document needs an id that is not empty")
    raw = document_id.encode("utf-8", "surrogatepass")
    return raw if len(raw) < _KEY_LIMIT else raw[: _KEY_LIMIT - 32] + digest(document_id)


INDEX_OWNER = digest("@index")
"""The owner of KV that belongs to the index itself, such as the prefix's."""


class Transaction:
    """One LMDB transaction over the store's tables.

    Values are views of the map, valid within the transaction. A table that an old store lacks reads as empty.
    """

    __slots__ = ("_tables", "_txn", "before_documents", "before_records", "changed")

    def __init__(self, txn: Any, tables: Mapping[str, Any]) -> None:
        self._txn = txn
        self._tables = tables
        self.changed: set[bytes] = set()
        """Keys of the KV records that this transaction wrote or dropped."""
        self.before_documents: dict[bytes, bytes | None] = {}
        """Rows of `documents` that this transaction has changed, as they were before it."""
        self.before_records: dict[bytes, tuple[bytes | None, bool]] = {}
        """Rows of `kv` that this transaction has changed, or whose references or segments it has: as they were before
        it, and whether a chunk needed them."""

    def close(self) -> None:
        """Release LMDB's transaction: py-lmdb keeps its reader slot for as long as anything refers to it."""
        self._txn = None

    def number(self) -> int:
        """The number of the commit whose state this is."""
        return int(self._txn.id())

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of the tables that the store has."""
        return tuple(self._tables)

    def get(self, table: str, key: bytes) -> memoryview | None:
        # LMDB raises for a key of an impossible length, and a damaged row may hold one.
        if table not in self._tables or not 0 < len(key) <= _KEY_LIMIT:
            return None
        value: memoryview | None = self._txn.get(key, db=self._tables[table])
        return value

    def put(self, table: str, key: bytes, value: Buffer) -> None:
        """Add or replace a value; in a table with several values per key, add one."""
        self._note(table, key)
        self._txn.put(key, value, db=self._tables[table])

    def delete(self, table: str, key: bytes, value: bytes = b"") -> bool:
        """Delete a value, or with an empty `value` all values of the key; whether there was one."""
        self._note(table, key)
        return bool(self._txn.delete(key, value, db=self._tables[table]))

    def _note(self, table: str, key: bytes) -> None:
        """Keep a counted row before its first change (`ragkv.store.counters`)."""
        if table == "documents":
            if key not in self.before_documents:
                row = self.get(table, key)
                self.before_documents[key] = None if row is None else bytes(row)
        elif table in ("kv", "segments", "references"):
            record = key[:VALUE_BYTES] if table == "segments" else key
            if record not in self.before_records:
                row = self.get("kv", record)
                self.before_records[record] = None if row is None else bytes(row), self.is_needed(record)

    def values(self, table: str, key: bytes) -> list[bytes]:
        """All values of a key."""
        with self._txn.cursor(db=self._tables[table]) as cursor:
            return [bytes(value) for value in cursor.iternext_dup()] if cursor.set_key(key) else []

    def has(self, table: str, key: bytes, value: bytes) -> bool:
        """Whether this is one of the key's values, in a table with several values per key."""
        with self._txn.cursor(db=self._tables[table]) as cursor:
            return bool(cursor.set_key_dup(key, value))

    def is_referenced(self, key: bytes) -> bool:
        """Whether a chunk or the index itself refers to a record."""
        return self.get("references", key) is not None

    def is_needed(self, key: bytes) -> bool:
        """Whether a chunk refers to a record."""
        first = self.get("references", key)
        if first is None or bytes(first) != INDEX_OWNER:
            return first is not None
        with self._txn.cursor(db=self._tables["references"]) as cursor:
            found = cursor.set_key(key)
            while found and bytes(cursor.value()) == INDEX_OWNER:
                found = cursor.next_dup()
            return bool(found)

    def keys(self, table: str, *, after: bytes | None = None) -> Iterator[bytes]:
        """Keys in order, each once, beginning behind `after`. No value is read from the disk."""
        if table not in self._tables:
            return
        with self._txn.cursor(db=self._tables[table]) as cursor:
            found = cursor.set_range(after) if after else cursor.first()
            if found and bytes(cursor.key()) == after:
                found = cursor.next_nodup()
            while found:
                key = bytes(cursor.key())
                yield key
                found = cursor.next_nodup()

    def scan(
        self, table: str, prefix: bytes = b"", *, after: bytes | None = None, limit: int | None = None
    ) -> Iterator[tuple[bytes, memoryview]]:
        """At most `limit` entries whose keys begin with `prefix`, in order, beginning behind `after`."""
        if table not in self._tables:
            return
        with self._txn.cursor(db=self._tables[table]) as cursor:
            start = after or prefix
            found = cursor.set_range(start) if start else cursor.first()
            if found and bytes(cursor.key()) == after:
                found = cursor.next_nodup()
            while found and limit != 0 and (key := bytes(cursor.key())).startswith(prefix):
                yield key, cursor.value()
                found, limit = cursor.next(), limit and limit - 1

    def count(self, table: str) -> int:
        """Entries of a table."""
        if table not in self._tables:
            return 0
        return int(self._txn.stat(self._tables[table])["entries"])

    def used_bytes(self, *tables: str) -> int:
        """Bytes of the pages that hold something, of these tables or of all."""
        pages, size = 0, 0
        for table in (self._tables[name] for name in tables or self._tables if name in self._tables):
            stat = self._txn.stat(table)
            pages += stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
            size = stat["psize"]
        return pages * size

    def segment(self, key: bytes, index: int) -> memoryview | None:
        return self.get("segments", _segment_key(key, index))

    def payload_bytes(self, key: bytes) -> int:
        """Bytes of a record's segments; they are not read."""
        return sum(len(payload) for _, payload in self.scan("segments", key))

    def put_record(self, record: EncodedRecord) -> None:
        """Write a record, replacing an old one even if damaged."""
        self.drop_record(record.key)
        for index, payload in enumerate(record.segments):
            self.put("segments", _segment_key(record.key, index), payload)
        self.put("kv", record.key, record.manifest)

    def drop_record(self, key: bytes) -> None:
        """Delete a record with all segments under its key, whatever its manifest says."""
        self.changed.add(key)
        self.delete("kv", key)
        if len(key) != VALUE_BYTES:  # a shorter, damaged key would match segments of other records
            return
        for segment_key in [found for found, _ in self.scan("segments", key)]:
            self.delete("segments", segment_key)

    def refer(self, chunk: bytes, key: bytes) -> None:
        """Add a reference from a chunk (by the digest of its id) to a record."""
        self.put("references", key, chunk)
        self.put("needs", chunk, key)

    def release(self, chunk: bytes) -> list[bytes]:
        """Delete all references of a chunk; returns the keys of the records that it needed, for `collect`."""
        keys = self.values("needs", chunk)
        self.delete("needs", chunk)
        for key in keys:
            self.delete("references", key, chunk)
        return keys

    def collect(self, keys: set[bytes]) -> None:
        """Drop the records that no chunk needs any more."""
        for key in keys:
            if not self.is_referenced(key):
                self.drop_record(key)
                self.delete("uses", key)
                self.bury(key)

    def bury(self, key: bytes) -> None:
        """Note that the tiers, if there are any, need not hold a record any more."""
        if self.get("meta", TIERS) is not None:
            self.put("meta", TOMBSTONE + key, b"")


def shape_key(model: str) -> bytes:
    """The key in `meta` of the shape of a model's KV, by the model's fingerprint."""
    return b"shape/" + digest(model)


def document_digest(key: bytes) -> bytes:
    """The digest of a document's id, from its key in `documents`.

    It is the document's key in `texts`, and the keys of its chunks begin with it.
    """
    if len(key) == _KEY_LIMIT:
        return key[-32:]
    return hashlib.blake2b(key, digest_size=32).digest()


def chunk_key(document: bytes, ordinal: int) -> bytes:
    """A chunk's key in `chunks`, from the digest of its document's id; the value in `places`."""
    return document + ordinal.to_bytes(4, "big")


def _segment_key(key: bytes, index: int) -> bytes:
    return key + index.to_bytes(4, "big")
