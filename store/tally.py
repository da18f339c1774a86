"""Counters of what a store holds, and the list of its KV that nothing refers to, kept by every transaction.

Without them, `ragkv stats` and `ragkv gc` would have to walk the whole store. A transaction keeps each row as it was
before it changes it (`Transaction.before_records`), and `settle` compares it with what it has become, in the same
transaction. So the counters are right after every commit. docs/formats.md, "Counters".
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ragkv.boundary.plainfile import parse_json
from ragkv.errors import CorruptStoreError
from ragkv.store.format.record import Summary, summarise
from ragkv.store.format.row import parse_document
from ragkv.store.seal import Buffer, DamagedError, seal, unseal
from ragkv.store.transaction import VALUE_BYTES, Transaction

__all__ = [
    "Group",
    "Sums",
    "Tally",
    "has_wrong_counters",
    "is_garbage",
    "is_stale",
    "read_tally",
    "recount",
    "relist",
    "settle",
    "take_tally",
]

_STALE = b"stale"
_TOKENS = b"tokens"
_GROUP = b"kv/"
_UNREADABLE = b"unreadable/"
_ROW_BYTES = 1 << 16
_MOST = 1 << 63


class Group(NamedTuple):
    """Records that are counted together."""

    model: str
    encoding: str
    codec: str


class Sums(NamedTuple):
    """Of a group: its records, how many of them a chunk needs, and their bytes as stored and as tensors."""

    records: int = 0
    needed: int = 0
    bytes: int = 0
    raw_bytes: int = 0

    def plus(self, other: Sums, sign: int = 1) -> Sums:
        return Sums(*(left + sign * right for left, right in zip(self, other, strict=True)))


@dataclass(slots=True)
class Tally:
    """Counters, or changes of counters.

    `tokens` of all documents; `groups` of KV records; `unreadable` names the rows of `kv` and `documents` that could
    not be read when they were counted, which have no part in the sums.
    """

    tokens: int = 0
    groups: dict[Group, Sums] = field(default_factory=dict)
    unreadable: Counter[bytes] = field(default_factory=Counter)

    @property
    def unreadable_records(self) -> int:
        return sum(name.startswith(_UNREADABLE + b"kv/") for name in self.unreadable)

    @property
    def bytes_by_encoding(self) -> dict[str, int]:
        """Bytes of KV as stored."""
        found: Counter[str] = Counter()
        for group, sums in sorted(self.groups.items()):
            found[group.encoding] += sums.bytes
        return dict(found)

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
        """As `count_record`, for a row that was read."""
        group = Group(summary.model, summary.encoding, summary.codec)
        sums = Sums(1, int(needed), summary.stored_bytes, summary.raw_bytes)
        self.groups[group] = self.groups.get(group, Sums()).plus(sums, sign)

    def rows(self) -> dict[bytes, bytes]:
        """As rows of the table `counters`; sums of nothing have none."""
        rows = {_TOKENS: _pack(self.tokens)} if self.tokens else {}
        rows |= {_group_key(group): _pack([*group, *sums]) for group, sums in self.groups.items() if any(sums)}
        return rows | {name: _pack(1) for name, count in self.unreadable.items() if count}


def settle(txn: Transaction) -> None:
    """Bring the counters and the list of unreferenced KV up to date with what the transaction has changed."""
    change = Tally()
    for key, old in txn.before_documents.items():
        new = txn.get("documents", key)
        if old != new:
            if old is not None:
                change.count_document(key, old, -1)
            if new is not None:
                change.count_document(key, new)
    for key, (row, was_needed) in txn.before_records.items():
        relist(txn, key)
        now, needed = txn.get("kv", key), txn.is_needed(key)
        if row == now and was_needed == needed:
            continue
        if row is not None:
            change.count_record(key, row, needed=was_needed, sign=-1)
        if now is not None:
            change.count_record(key, now, needed=needed)
    if not is_stale(txn):
        _apply(txn, change)


def _apply(txn: Transaction, change: Tally) -> None:
    """Add a change to the counters. If that gives no sense, something was damaged: they are then counted anew later."""
    try:
        if change.tokens:
            _put(txn, _TOKENS, _whole(_value(txn, _TOKENS) or 0) + change.tokens)
        for group, sums in change.groups.items():
            if any(sums):
                key = _group_key(group)
                found = _value(txn, key)
                _put_group(txn, key, group, (Sums() if found is None else _sums(found)[1]).plus(sums))
        for name, count in change.unreadable.items():
            known = txn.get("counters", name) is not None
            # A row that was readable when it was counted, and is not now: what it counted for is not known.
            if count < 0 and not known:
                raise DamagedError("a row was damaged after it was counted")
            if count:
                _put(txn, name, max(0, known + count))
    except DamagedError:
        txn.put("counters", _STALE, seal(b""))


def _put_group(txn: Transaction, key: bytes, group: Group, sums: Sums) -> None:
    if min(sums) < 0:
        raise DamagedError("a counter is below zero")
    if any(sums):
        txn.put("counters", key, _pack([*group, *sums]))
    else:
        txn.delete("counters", key)


def _put(txn: Transaction, key: bytes, number: int) -> None:
    if number < 0:
        raise DamagedError("a counter is below zero")
    if number:
        txn.put("counters", key, _pack(number))
    else:
        txn.delete("counters", key)


def relist(txn: Transaction, key: bytes) -> None:
    """Put a KV key on the list of unreferenced KV, or take it off, as it has to be now."""
    garbage = is_garbage(txn, key)
    if garbage == (txn.get("unreferenced", key) is not None):
        return
    if garbage:
        txn.put("unreferenced", key, b"")
    else:
        txn.delete("unreferenced", key)


def is_garbage(txn: Transaction, key: bytes) -> bool:
    """Whether there is a record, or segments, under a KV key that nothing refers to."""
    if txn.is_referenced(key):
        return False
    if txn.get("kv", key) is not None:
        return True
    return len(key) == VALUE_BYTES and next(txn.scan("segments", key, limit=1), None) is not None


def is_stale(txn: Transaction) -> bool:
    """Whether the counters cannot be trusted, and have to be counted anew (`recount`)."""
    return txn.get("counters", _STALE) is not None


def read_tally(txn: Transaction) -> Tally | None:
    """The counters as they are stored; None if the store is too old to have any, or they cannot be trusted."""
    if "counters" not in txn.tables or is_stale(txn):
        return None
    found = Tally()
    try:
        for key, value in txn.scan("counters"):
            if key == _TOKENS:
                found.tokens = _whole(_parse(value))
            elif key.startswith(_UNREADABLE):
                found.unreadable[key] = 1
            else:
                group, sums = _sums(_parse(value))
                if _group_key(group) != key:
                    raise DamagedError("a counter lies under a key that is not its own")
                found.groups[group] = sums
    except DamagedError:
        return None
    return found


def has_wrong_counters(txn: Transaction, tally: Tally) -> bool:
    """Whether the counters are not those of `tally`, although they claim to be right."""
    if "counters" not in txn.tables or is_stale(txn):
        return False
    return {key: bytes(value) for key, value in txn.scan("counters")} != tally.rows()


def take_tally(txn: Transaction) -> Tally:
    """Count all documents and records, row by row."""
    found = Tally()
    for key, row in txn.scan("documents"):
        found.count_document(key, row)
    for key, row in txn.scan("kv"):
        found.count_record(key, row, needed=txn.is_needed(key))
    return found


def recount(txn: Transaction) -> None:
    """Make the counters and the list of unreferenced KV anew from the rows, in this transaction.

    This reads every manifest and writes a few pages, so that it fits into one transaction at any size.
    """
    for table in ("counters", "unreferenced"):
        for key in list(txn.keys(table)):
            txn.delete(table, key)
    for key, row in take_tally(txn).rows().items():
        txn.put("counters", key, row)
    for key in unreferenced(txn):
        txn.put("unreferenced", key, b"")


def unreferenced(txn: Transaction) -> Iterator[bytes]:
    """Every KV key that has to be on the list, found by walking all of them.

    The segments of a record are passed over at once.
    """
    for key in txn.keys("kv"):
        if not txn.is_referenced(key):
            yield key
    after: bytes | None = None
    while found := next(txn.keys("segments", after=after), None):
        key = found[:VALUE_BYTES]
        if txn.get("kv", key) is None and is_garbage(txn, key):
            yield key
        after = key + b"\xff\xff\xff\xff" if len(found) >= VALUE_BYTES else found


def _unreadable(table: str, key: bytes) -> bytes:
    return _UNREADABLE + table.encode() + b"/" + hashlib.blake2b(key, digest_size=32).digest()


def _group_key(group: Group) -> bytes:
    return _GROUP + hashlib.blake2b(_pack(group), digest_size=32).digest()


def _pack(value: Any) -> bytes:
    return seal(json.dumps(value).encode())


def _value(txn: Transaction, key: bytes) -> Any:
    value = txn.get("counters", key)
    return None if value is None else _parse(value)


def _parse(value: Buffer) -> Any:
    if len(value) > _ROW_BYTES:
        raise DamagedError("a counter is too long")
    try:
        return parse_json(bytes(unseal(value)))
    except ValueError as error:
        raise DamagedError(f"a counter is no JSON ({error})") from error


def _sums(found: Any) -> tuple[Group, Sums]:
    if not isinstance(found, list) or len(found) != len(Group._fields) + len(Sums._fields):
        raise DamagedError("a counter is not as it was written")
    names, numbers = found[:3], found[3:]
    if not all(isinstance(name, str) for name in names):
        raise DamagedError("a counter is not as it was written")
    return Group(*names), Sums(*map(_whole, numbers))


def _whole(found: Any) -> int:
    if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found < _MOST:
        raise DamagedError("a counter is no number")
    return found
