"""Counters of what a store holds, its list of unreferenced KV, and its log of changes, kept by every transaction.

Without counters, `ragkv stats` and `ragkv gc` would have to walk the store. A transaction keeps each row as it was
before its first change (`Transaction.before_records`), and `update` compares the two in the same transaction, so
counters are right after every commit (docs/formats.md, "Counters").

Each change of documents, chunks or vectors increments the generation and leaves a row that names what it touched, so
that derived indexes need not compare everything. The oldest rows are dropped once all of them name more than a quarter
of the chunks, since rebuilding then costs about the same. A gap (some repairs leave one) means that
everything may have changed. A row has a random mark: two copies of a store that diverged, such as a restored backup,
may share generations but not marks. Rows name documents and chunks by half of their ids' digests, because the row of a
deletion outlives the document, and its id may be confidential.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import struct
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ragkv.errors import CorruptStoreError
from ragkv.store.codecs import Buffer, DamagedError, add_checksum, verify_checksum
from ragkv.store.record import Summary, summarise
from ragkv.store.tables import VALUE_BYTES, Transaction, digest, parse_document
from ragkv.util.files import parse_json

_STALE = b"stale"
_TOKENS = b"tokens"
_GROUP = b"kv/"
_UNREADABLE = b"unreadable/"
_ROW_BYTES = 1 << 16
_MOST = 1 << 63


class RecordGroup(NamedTuple):
    """Records that are counted together."""

    model: str
    encoding: str
    codec: str


class RecordSums(NamedTuple):
    """Sums of a group: records, how many of them chunks need, and their bytes as stored and as tensors."""

    records: int = 0
    needed: int = 0
    bytes: int = 0
    raw_bytes: int = 0

    def plus(self, other: RecordSums, sign: int = 1) -> RecordSums:
        return RecordSums(*(left + sign * right for left, right in zip(self, other, strict=True)))


@dataclass(slots=True)
class Counters:
    """Counters, or changes of counters.

    `tokens` of all documents; `groups` of KV records; `unreadable` are the rows of `kv` and `documents` that could not
    be read when they were counted, and so are not in the sums.
    """

    tokens: int = 0
    groups: dict[RecordGroup, RecordSums] = field(default_factory=dict)
    unreadable: Counter[bytes] = field(default_factory=Counter)

    @property
    def unreadable_records(self) -> int:
        return sum(name.startswith(_UNREADABLE + b"kv/") for name in self.unreadable)

    @property
    def bytes_by_encoding(self) -> dict[str, int]:
        """Bytes of KV as stored."""
        sizes: Counter[str] = Counter()
        for group, sums in sorted(self.groups.items()):
            sizes[group.encoding] += sums.bytes
        return dict(sizes)

    @property
    def models(self) -> set[str]:
        """Fingerprints of the models whose KV chunks need."""
        return {group.model for group, sums in self.groups.items() if sums.needed}

    def count_document(self, key: bytes, row: Buffer, sign: int = 1) -> None:
        """Add (or with `sign` -1 take away) a row of `documents`."""
        try:
            self.tokens += sign * parse_document(row).tokens
        except CorruptStoreError:
            self.unreadable[_unreadable("documents", key)] += sign

    def count_record(self, key: bytes, row: Buffer, *, needed: bool, sign: int = 1) -> None:
        """Add (or with `sign` -1 take away) a row of `kv`; `needed` says whether a chunk refers to it."""
        try:
            self.count_summary(summarise(row), needed=needed, sign=sign)
        except DamagedError:
            self.unreadable[_unreadable("kv", key)] += sign

    def count_summary(self, summary: Summary, *, needed: bool, sign: int = 1) -> None:
        """Like `count_record`, for a parsed row."""
        group = RecordGroup(summary.model, summary.encoding, summary.codec)
        sums = RecordSums(1, int(needed), summary.stored_bytes, summary.raw_bytes)
        self.groups[group] = self.groups.get(group, RecordSums()).plus(sums, sign)

    def rows(self) -> dict[bytes, bytes]:
        """The rows of the table `counters`, without empty sums."""
        rows = {_TOKENS: _pack(self.tokens)} if self.tokens else {}
        rows |= {_group_key(group): _pack([*group, *sums]) for group, sums in self.groups.items() if any(sums)}
        return rows | {name: _pack(1) for name, count in self.unreadable.items() if count}


def update_counters(txn: Transaction) -> None:
    """Update the counters and the list of unreferenced KV with the changes of the transaction."""
    change = Counters()
    for key, old in txn.before_documents.items():
        new = txn.get("documents", key)
        if old != new:
            if old is not None:
                change.count_document(key, old, -1)
            if new is not None:
                change.count_document(key, new)
    for key, (row, was_needed) in txn.before_records.items():
        update_unreferenced(txn, key)
        now, needed = txn.get("kv", key), txn.is_needed(key)
        if row == now and was_needed == needed:
            continue
        if row is not None:
            change.count_record(key, row, needed=was_needed, sign=-1)
        if now is not None:
            change.count_record(key, now, needed=needed)
    if not is_stale(txn):
        _apply(txn, change)


def _apply(txn: Transaction, change: Counters) -> None:
    """Add a change to the counters. An impossible result means damage: then they are recounted later."""
    try:
        if change.tokens:
            tokens = _whole(_value(txn, _TOKENS) or 0) + change.tokens
            _put(txn, _TOKENS, tokens, tokens)
        for group, sums in change.groups.items():
            if any(sums):
                key = _group_key(group)
                found = _value(txn, key)
                now = (RecordSums() if found is None else _sums(found)[1]).plus(sums)
                _put(txn, key, [*group, *now], *now)
        for name, count in change.unreadable.items():
            known = txn.get("counters", name) is not None
            # The row was readable when counted and is not now, so its share is unknown.
            if count < 0 and not known:
                raise DamagedError("a row was damaged after it was counted")
            if count:
                number = max(0, known + count)
                _put(txn, name, number, number)
    except DamagedError:
        txn.put("counters", _STALE, add_checksum(b""))


def _put(txn: Transaction, key: bytes, value: Any, *numbers: int) -> None:
    """Store a counter, or delete it when its `numbers` are all 0."""
    if min(numbers) < 0:
        raise DamagedError("a counter is below zero")
    if any(numbers):
        txn.put("counters", key, _pack(value))
    else:
        txn.delete("counters", key)


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


def is_stale(txn: Transaction) -> bool:
    """Whether the counters cannot be trusted and need a `recount`."""
    return txn.get("counters", _STALE) is not None


def read_counters(txn: Transaction) -> Counters | None:
    """The stored counters; None if they cannot be trusted."""
    if is_stale(txn):
        return None
    counters = Counters()
    try:
        for key, value in txn.scan("counters"):
            if key == _TOKENS:
                counters.tokens = _whole(_parse(value))
            elif key.startswith(_UNREADABLE):
                counters.unreadable[key] = 1
            else:
                group, sums = _sums(_parse(value))
                if _group_key(group) != key:
                    raise DamagedError("a counter has a key that is not its own")
                counters.groups[group] = sums
    except DamagedError:
        return None
    return counters


def counters_of(txn: Transaction) -> Counters:
    """The stored counters; with damaged ones, all rows are counted."""
    return read_counters(txn) or count_all(txn)


def has_wrong_counters(txn: Transaction, counters: Counters) -> bool:
    """Whether the stored counters differ from `counters` although they are not marked as stale."""
    if is_stale(txn):
        return False
    return {key: bytes(value) for key, value in txn.scan("counters")} != counters.rows()


def count_all(txn: Transaction) -> Counters:
    """Count all documents and records, row by row."""
    counters = Counters()
    for key, row in txn.scan("documents"):
        counters.count_document(key, row)
    for key, row in txn.scan("kv"):
        counters.count_record(key, row, needed=txn.is_needed(key))
    return counters


def recount(txn: Transaction) -> None:
    """Rebuild the counters and the list of unreferenced KV from the rows, in this transaction.

    It reads every manifest but writes few pages, so it fits into one transaction at any size.
    """
    for table in ("counters", "unreferenced"):
        for key in list(txn.keys(table)):
            txn.delete(table, key)
    for key, row in count_all(txn).rows().items():
        txn.put("counters", key, row)
    for key in unreferenced(txn):
        txn.put("unreferenced", key, b"")


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


def _unreadable(table: str, key: bytes) -> bytes:
    return _UNREADABLE + table.encode() + b"/" + hashlib.blake2b(key, digest_size=32).digest()


def _group_key(group: RecordGroup) -> bytes:
    return _GROUP + hashlib.blake2b(_pack(group), digest_size=32).digest()


def _pack(value: Any) -> bytes:
    return add_checksum(json.dumps(value).encode())


def _value(txn: Transaction, key: bytes) -> Any:
    value = txn.get("counters", key)
    return None if value is None else _parse(value)


def _parse(value: Buffer) -> Any:
    if len(value) > _ROW_BYTES:
        raise DamagedError("a counter is too long")
    try:
        return parse_json(bytes(verify_checksum(value)))
    except ValueError as error:
        raise DamagedError(f"a counter is no JSON ({error})") from error


def _sums(found: Any) -> tuple[RecordGroup, RecordSums]:
    if not isinstance(found, list) or len(found) != len(RecordGroup._fields) + len(RecordSums._fields):
        raise DamagedError("a counter is not as it was written")
    names, numbers = found[:3], found[3:]
    if not all(isinstance(name, str) for name in names):
        raise DamagedError("a counter is not as it was written")
    return RecordGroup(*names), RecordSums(*map(_whole, numbers))


def _whole(found: Any) -> int:
    if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found < _MOST:
        raise DamagedError("a counter is no number")
    return found


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
