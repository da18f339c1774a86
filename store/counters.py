"""Counters of what a store holds, its list of unreferenced KV, and its log of changes, kept by every transaction.

Without counters, `ragkv stats` and `ragkv gc` would have to walk the store. A transaction keeps each row as it was
before its first change (`Transaction.before_records`), and `update_counters` compares the two in the same transaction,
so counters are right after every commit (docs/formats.md, "Counters").

Each change of documents, chunks or vectors increments the generation and leaves a row that names what it touched, so
that derived indexes need not compare everything. The oldest rows are dropped once all of them name more than a quarter
of the chunks, since rebuilding then costs about the same. A gap (some repairs leave one) means that
everything may have changed. A row has a random mark: two copies of a store that diverged, such as a restored backup,
may share generations but not marks. Rows name documents and chunks by half of their ids' digests, because the row of a
deletion outlives the document, and its id may be confidential.
"""

from __future__ import annotations

import json
import secrets
import struct
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ragkv.errors import CorruptStoreError
from ragkv.store.codecs import Buffer, DamagedError, add_checksum, verify_checksum
from ragkv.store.record import stored_sizes
from ragkv.store.tables import VALUE_BYTES, Transaction, digest, parse_document
from ragkv.util.files import parse_json

COUNTERS = b"counters"
"""The key in `meta`."""
_KV = "kv/"
_ROW_BYTES = 1 << 16
_LIMIT = 1 << 63


class Counters(Counter[str]):
    """Counters, or changes of counters.

    `tokens` of all documents; `raw`, the bytes of all KV as tensors; `kv/` and an encoding, its bytes as stored;
    `unreadable`, the rows of `kv` and `documents` that could not be read when they were counted.
    """

    def count(self, table: str, row: Buffer | None, sign: int = 1) -> None:
        """Add (or with `sign` -1 take away) a row of `documents` or `kv`."""
        try:
            if row is not None and table == "documents":
                self["tokens"] += sign * parse_document(row).tokens
            elif row is not None:
                encoding, stored, raw = stored_sizes(row)
                self[_KV + encoding] += sign * stored
                self["raw"] += sign * raw
        except (CorruptStoreError, DamagedError):
            self["unreadable"] += sign

    @property
    def bytes_by_encoding(self) -> dict[str, int]:
        """Bytes of KV as stored."""
        return {name.removeprefix(_KV): size for name, size in sorted(self.items()) if name.startswith(_KV)}

    @property
    def kv_bytes(self) -> int:
        return sum(self.bytes_by_encoding.values())


def update_counters(txn: Transaction) -> None:
    """Update the counters and the list of unreferenced KV with the changes of the transaction.

    If a row was damaged after it was counted, its share is unknown, so everything is counted anew.
    """
    change, before = Counters(), Counters()
    tables: Mapping[str, Mapping[bytes, bytes | None]] = {"documents": txn.before_documents, "kv": txn.before_records}
    for table, rows in tables.items():
        for key, old in rows.items():
            new = txn.get(table, key)
            if old != new:
                before.count(table, old)
                change.count(table, old, -1)
                change.count(table, new)
    for key in txn.before_records:
        update_unreferenced(txn, key)
    if any(change.values()) or before["unreadable"]:
        counters = None if before["unreadable"] else read_counters(txn)
        if counters is not None:
            counters.update(change)
        if counters is None or min(counters.values()) < 0:
            counters = count_all(txn)
        _write(txn, counters)


def update_unreferenced(txn: Transaction, key: bytes) -> None:
    """Add a KV key to the list of unreferenced KV or remove it, according to its references."""
    garbage = is_garbage(txn, key)
    if garbage == (txn.get("unreferenced", key) is not None):
        return
    if garbage:
        txn.put("unreferenced", key, b"")
    else:
        txn.delete("unreferenced", key)


def is_garbage(txn: Transaction, key: bytes) -> bool:
    """Whether a KV key has a record or segments but no reference."""
    if txn.is_referenced(key):
        return False
    if txn.get("kv", key) is not None:
        return True
    return len(key) == VALUE_BYTES and next(txn.scan("segments", key, limit=1), None) is not None


def read_counters(txn: Transaction) -> Counters | None:
    """The stored counters; None if they are damaged."""
    value = txn.get("meta", COUNTERS)
    if value is None:
        return Counters()
    try:
        if len(value) > _ROW_BYTES:
            return None
        counters = parse_json(bytes(verify_checksum(value)))
    except ValueError:
        return None
    if not isinstance(counters, dict) or any(type(n) is not int or not 0 <= n < _LIMIT for n in counters.values()):
        return None
    return Counters(counters)


def counters_of(txn: Transaction) -> Counters:
    """The stored counters; if they are damaged, all rows are counted."""
    counters = read_counters(txn)
    return count_all(txn) if counters is None else counters


def count_all(txn: Transaction) -> Counters:
    """Count all documents and records, row by row."""
    counters = Counters()
    for table in ("documents", "kv"):
        for _, row in txn.scan(table):
            counters.count(table, row)
    return counters


def recount(txn: Transaction) -> None:
    """Rebuild the counters and the list of unreferenced KV from the rows, in this transaction.

    It reads every manifest but writes few pages, so it fits into one transaction at any size.
    """
    _write(txn, count_all(txn))
    for key in list(txn.keys("unreferenced")):
        txn.delete("unreferenced", key)
    for key in unreferenced(txn):
        txn.put("unreferenced", key, b"")


def _write(txn: Transaction, counters: Counters) -> None:
    txn.put("meta", COUNTERS, add_checksum(json.dumps(+counters, sort_keys=True).encode()))


def unreferenced(txn: Transaction) -> Iterator[bytes]:
    """Every KV key that belongs on the list, found by walking all of them.

    The segments of a record are skipped together.
    """
    for key in txn.keys("kv"):
        if not txn.is_referenced(key):
            yield key
    after: bytes | None = None
    while segment_key := next(txn.keys("segments", after=after), None):
        key = segment_key[:VALUE_BYTES]
        if txn.get("kv", key) is None and is_garbage(txn, key):
            yield key
        after = key + b"\xff\xff\xff\xff" if len(segment_key) >= VALUE_BYTES else segment_key


_LEAST = 1024
_SHARE = 4
NAME_BYTES = 16
_HEAD = struct.Struct("<QI8s")
"""The weight of all rows up to this one including dropped ones; its own (its chunks plus 1); its mark."""


class Version(NamedTuple):
    """A state of a store: its generation, and a random mark, in which diverged copies differ."""

    generation: int
    mark: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Which documents and chunks were added, changed or removed up to `version`, by their names (`name_of`)."""

    version: Version
    documents: frozenset[bytes]
    chunks: frozenset[bytes]


def name_of(identifier: str) -> bytes:
    """The name of a document or a chunk in a row."""
    return digest(identifier)[:NAME_BYTES]


def generation(txn: Transaction) -> int:
    """The number of transactions that changed documents, chunks or vectors."""
    value = txn.get("meta", b"generation")
    return 0 if value is None else int.from_bytes(value[:8], "big")


def version(txn: Transaction) -> Version:
    """The generation with its mark."""
    now = generation(txn)
    return Version(now, _mark(txn, now))


def advance(txn: Transaction, document: str | None = None, chunks: Collection[str] = ()) -> None:
    """Record a change of a document, so that derived indexes are updated.

    `chunks` are the ids of the chunks whose text or vectors have changed. Without a document, the change is unknown.
    """
    before = generation(txn)
    now = (before + 1) % (1 << 64)
    txn.put("meta", b"generation", now.to_bytes(8, "big"))
    if document is None:
        return
    last = txn.get("changes", _key(before))
    total = 0 if last is None or len(last) < _HEAD.size else _HEAD.unpack_from(last)[0]
    weight = len(chunks) + 1
    total = (total + weight) % (1 << 64)
    names = (name_of(document), *sorted(map(name_of, chunks)))
    txn.put("changes", _key(now), add_checksum(_HEAD.pack(total, weight, secrets.token_bytes(8)), *names))
    _trim(txn, total, max(_LEAST, txn.count("chunks") // _SHARE))


def changes_since(txn: Transaction, since: Version) -> Changes | None:
    """The changes since a version; None if they are unknown or the version is not from this store's past."""
    now = generation(txn)
    if not 0 <= since.generation <= now or _mark(txn, since.generation) != since.mark:
        return None
    documents: set[bytes] = set()
    chunks: set[bytes] = set()
    for number in range(since.generation + 1, now + 1):
        value = txn.get("changes", _key(number))
        try:
            named = None if value is None else parse_change(value)
        except DamagedError:
            named = None
        if named is None:
            return None
        documents.add(named[0])
        chunks.update(named[1])
    return Changes(version=version(txn), documents=frozenset(documents), chunks=frozenset(chunks))


def parse_change(value: Buffer) -> tuple[bytes, list[bytes]]:
    """The names of the document and its chunks in a row; `DamagedError` if it is unreadable."""
    names = bytes(verify_checksum(value)[_HEAD.size :])
    if not names or len(names) % NAME_BYTES:
        raise DamagedError("it does not name a document and its chunks")
    document, *chunks = (names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES))
    return document, chunks


def _trim(txn: Transaction, total: int, limit: int) -> None:
    """Drop the oldest rows until the others weigh no more than `limit`."""
    for key in list(_oldest(txn, total, limit)):
        txn.delete("changes", key)


def _oldest(txn: Transaction, total: int, limit: int) -> Iterator[bytes]:
    for key, value in txn.scan("changes"):
        upto, weight, _ = _HEAD.unpack_from(value) if len(value) >= _HEAD.size else (0, 0, b"")
        if weight and 0 <= total - upto + weight <= limit:
            return
        yield key


def _mark(txn: Transaction, number: int) -> str:
    """The mark of a generation; empty if it has no row."""
    value = txn.get("changes", _key(number))
    return "" if value is None or len(value) < _HEAD.size else _HEAD.unpack_from(value)[2].hex()


def _key(number: int) -> bytes:
    return number.to_bytes(8, "big")
