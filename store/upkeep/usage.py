"""What questions have used of a store's KV: a row for each record, and a ledger of all.

Uses are gathered by whoever answers (`ragkv.index.keeper`) and recorded some hundred at a time, because every
transaction is a write to the disk.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace

from ragkv.boundary.plainfile import parse_json
from ragkv.store.database import Database
from ragkv.store.format.use import UseRow
from ragkv.store.seal import DamagedError
from ragkv.store.tally import read_tally, take_tally
from ragkv.store.transaction import Transaction
from ragkv.store.upkeep.check import chunk_named, find_record
from ragkv.store.worth import NEVER, elapsed, used, worth

__all__ = [
    "BUDGET",
    "LEDGER",
    "Ledger",
    "Use",
    "forget_gone",
    "kv_bytes",
    "read_budget",
    "read_ledger",
    "read_use",
    "record_uses",
    "worth_of",
    "write_ledger",
]

LEDGER = b"fact/kv_ledger"
BUDGET = b"fact/kv_budget"
_MOST = 1 << 53
_BATCH = 1024
_UNLIMITED = 1 << 30
"""The least room by which time goes where there is no budget: nothing leaves, and little KV is no reason to forget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What questions did with one record since it was recorded last.

    `hits` found it, and `misses` had to make it; `wanted` counts what is expected and did not happen (`ragkv warm`).
    `tokens` and `nbytes` are the chunk's and its KV's; `owner` is the digest of the chunk's id.
    """

    tokens: int
    nbytes: int
    owner: bytes
    hits: int = 0
    misses: int = 0
    wanted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What all questions together found, and what became of KV, since the index was made.

    `hits` and `misses` count chunks that were asked for; `evictions` records that made room for others, and `refused`
    those that were not stored because what they would have displaced is worth more. `hit_tokens` did not have to be
    prefilled: at `seconds_per_token`, the rate at which this index encoded last, that is `saved_seconds`. `clock` is
    that of `ragkv.store.worth`.
    """

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    refused: int = 0
    hit_tokens: int = 0
    saved_seconds: float = 0.0
    seconds_per_token: float = 0.0
    clock: float = 0.0

    @property
    def hit_rate(self) -> float | None:
        """The share of chunks whose KV was there; None before the first."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else None


def read_ledger(txn: Transaction) -> Ledger:
    """The ledger; an empty one when there is none, or what is there cannot be one."""
    found = _json(txn, LEDGER)
    if not isinstance(found, dict) or found.keys() != {field.name for field in fields(Ledger)}:
        return Ledger()
    for field in fields(Ledger):
        value = found[field.name]
        number = type(value) is int or (type(value) is float and isinstance(field.default, float))
        if not number or not math.isfinite(value) or not 0 <= value < _MOST:
            return Ledger()
    return Ledger(**found)


def write_ledger(txn: Transaction, ledger: Ledger) -> None:
    txn.put("meta", LEDGER, json.dumps(asdict(ledger)).encode())


def read_budget(txn: Transaction) -> int | None:
    """The bytes that KV may take; None without a limit."""
    found = _json(txn, BUDGET)
    return found if type(found) is int and 0 <= found < 1 << 63 else None


def kv_bytes(txn: Transaction) -> int:
    """The payloads of all records, as the last commit left them."""
    counted = read_tally(txn) or take_tally(txn)
    return sum(sums.bytes for sums in counted.groups.values())


def read_use(txn: Transaction, key: bytes) -> UseRow | None:
    """The row of a record; None when it was never used, or its row is damaged."""
    value = txn.get("uses", key)
    try:
        return None if value is None else UseRow.parse(value)
    except DamagedError:
        return None


def worth_of(row: UseRow | None) -> float:
    """By what a record is kept; what no question has used leaves first."""
    return NEVER if row is None else worth(row.weight, row.tokens, row.nbytes)


def record_uses(txn: Transaction, uses: Mapping[bytes, Use], *, seconds_per_token: float | None = None) -> None:
    """Add these uses, by KV key, to the rows and the ledger. A chunk needs what it used from now on."""
    ledger, budget, now = read_ledger(txn), read_budget(txn), time.time()
    room = max(kv_bytes(txn), _UNLIMITED) if budget is None else budget
    rate = ledger.seconds_per_token if seconds_per_token is None else seconds_per_token
    clock, hits, misses, tokens = ledger.clock, 0, 0, 0
    for key, use in uses.items():
        times = use.hits + use.misses + use.wanted
        if not times or len(key) != 32:
            continue
        before = read_use(txn, key)
        clock += elapsed(use.nbytes, room) * (use.hits + use.misses)  # what is only wanted has not been read
        row = UseRow(
            weight=used(NEVER if before is None else before.weight, clock, times),
            count=(0 if before is None else before.count) + use.hits + use.misses,
            last=now,
            tokens=use.tokens,
            nbytes=use.nbytes,
            owner=use.owner,
        )
        txn.put("uses", key, row.pack())
        _refer(txn, key, use.owner)
        hits, misses, tokens = hits + use.hits, misses + use.misses, tokens + use.hits * use.tokens
    write_ledger(
        txn,
        replace(
            ledger,
            hits=ledger.hits + hits,
            misses=ledger.misses + misses,
            hit_tokens=ledger.hit_tokens + tokens,
            saved_seconds=ledger.saved_seconds + tokens * rate,
            seconds_per_token=rate,
            clock=clock,
        ),
    )


def forget_gone(database: Database, *, dry_run: bool = False) -> int:
    """Forget the uses of what is not stored, and whose chunk is gone too; returns how many there are."""
    gone: list[bytes] = []

    def is_gone(txn: Transaction, key: bytes) -> bool:
        row = read_use(txn, key)
        return txn.get("kv", key) is None and (row is None or txn.get("places", row.owner) is None)

    def visit(txn: Transaction, key: bytes) -> int:
        if is_gone(txn, key):
            gone.append(key)
        return 0

    database.walk("uses", visit)
    for start in range(0, 0 if dry_run else len(gone), _BATCH):

        def apply(txn: Transaction, start: int = start) -> None:
            for key in gone[start : start + _BATCH]:
                if is_gone(txn, key):
                    txn.delete("uses", key)

        database.write(apply)
    return len(gone)


def _refer(txn: Transaction, key: bytes, owner: bytes) -> None:
    """Note that a chunk needs a record that was made for another chunk of the same tokens."""
    if txn.get("kv", key) is None or txn.get("places", owner) is None or txn.has("needs", owner, key):
        return
    manifest, chunk = find_record(txn, key), chunk_named(txn, owner)
    if manifest is not None and chunk is not None and manifest.identity.may_serve(chunk.token_ids):
        txn.refer(owner, key)


def _json(txn: Transaction, key: bytes) -> object:
    value = txn.get("meta", key)
    try:
        found: object = None if value is None else parse_json(bytes(value))
    except ValueError:
        return None
    return found
