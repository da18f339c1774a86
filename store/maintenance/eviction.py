"""Keep a store's KV within its budget: record uses, admit what is worth more, evict the lowest score first.

The score of a record is the prefill time that it saves per byte, times how often and how recently it was used. A use
counts half as much after `HALF_LIFE` budgets of KV have been read since (forward decay: Cormode et al., 2009). The
clock counts half-lives, so a weight never has to be updated: the logarithm of all uses keeps its order. Uses of
evicted and rejected KV are remembered too. KV that is asked for repeatedly is admitted, and KV that is asked for once
evicts nothing of a higher score.

Uses are recorded some hundred at a time, because every transaction writes to the disk. Eviction candidates are found by
one walk over all records, outside any write, which serves hundreds of evictions. Each transaction checks again and
keeps what has been used since the walk or is being read. Readers are not disturbed: they see the snapshot in which they
began; a later reader misses the record and encodes the chunk.
"""

from __future__ import annotations

import heapq
import json
import math
import threading
import time
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial

from ragkv.store.codecs import DamagedError
from ragkv.store.counters import counters_of
from ragkv.store.environment import Database
from ragkv.store.maintenance.verify import chunk_named, find_record
from ragkv.store.record import EncodedRecord
from ragkv.store.tables import INDEX_OWNER, Transaction, UseRow, for_each
from ragkv.util import batches
from ragkv.util.files import parse_json

HALF_LIFE = 4.0
"""After this many budgets of KV were read, a use counts half. By simulation (Zipf 0.8 to 1.2, 5,000 chunks, room for
1,000, 10,000 questions), twice the value gains 0.2 points with constant interest and loses 2.3 after a complete change;
half the value does the opposite."""

NEVER = -math.inf
"""The weight of unused KV."""


def elapsed(nbytes: float, room: float) -> float:
    """How far reading `nbytes` advances the clock, with room for `room` bytes."""
    return nbytes / (HALF_LIFE * max(room, nbytes, 1.0))


def used(weight: float, clock: float, times: float = 1.0) -> float:
    """The weight after more uses now: log2 of the sum of 2^clock over all uses."""
    more = clock + math.log2(times)
    high, low = max(weight, more), min(weight, more)
    return high if low == NEVER else high + math.log2(1.0 + 2.0 ** (low - high))


def eviction_score(weight: float, tokens: int, nbytes: int) -> float:
    """The eviction order, lowest first. Tokens stand for prefill time, because all compared KV is of one model."""
    return weight + math.log2(max(tokens, 1) / max(nbytes, 1))


LEDGER = b"fact/kv_ledger"
BUDGET = b"fact/kv_budget"
_MAX_TOTAL = 1 << 53
_USE_BATCH = 1024
_UNLIMITED = 1 << 30
"""The minimal room for the clock without a budget, so that uses are not forgotten early while there is little KV."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Uses of one record since the last recording.

    `hits` found it, `misses` had to encode it; `wanted` counts expected uses (`ragkv warm`).
    `tokens` and `nbytes` are the chunk's and its KV's; `owner` is the digest of the chunk's id.
    """

    tokens: int
    nbytes: int
    owner: bytes
    hits: int = 0
    misses: int = 0
    wanted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UseTotals:
    """Totals over all questions since the index was created.

    `hits` and `misses` count requested chunks; `evictions` count records that made room for others, `refused` those
    that were not stored because they would have displaced KV with a higher score. `hit_tokens` did not have to be
    prefilled, which saved `saved_seconds` at `seconds_per_token`, the last measured rate. `clock` is the module's
    clock.
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
        """The hit rate; None before the first question."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else None


def read_totals(txn: Transaction) -> UseTotals:
    """The totals; zero if there are none or they are invalid."""
    values = _json(txn, LEDGER)
    if not isinstance(values, dict) or values.keys() != {field.name for field in fields(UseTotals)}:
        return UseTotals()
    whole = all(isinstance(value, int | float) and 0 <= value < _MAX_TOTAL for value in values.values())
    return UseTotals(**values) if whole else UseTotals()


def write_totals(txn: Transaction, totals: UseTotals) -> None:
    txn.put("meta", LEDGER, json.dumps(asdict(totals)).encode())


def read_budget(txn: Transaction) -> int | None:
    """The budget in bytes; None without a limit."""
    budget = _json(txn, BUDGET)
    return budget if type(budget) is int and 0 <= budget < 1 << 63 else None


def kv_bytes(txn: Transaction) -> int:
    """The bytes of all payloads, as of the last commit."""
    return counters_of(txn).kv_bytes


def read_use(txn: Transaction, key: bytes) -> UseRow | None:
    """The use row of a record; None if it was never used or the row is damaged."""
    value = txn.get("uses", key)
    try:
        return None if value is None else UseRow.parse(value)
    except DamagedError:
        return None


def eviction_score_of(row: UseRow | None) -> float:
    """The eviction score of a record, lowest for unused ones."""
    return NEVER if row is None else eviction_score(row.weight, row.tokens, row.nbytes)


def record_uses(txn: Transaction, uses: Mapping[bytes, Use], *, seconds_per_token: float | None = None) -> None:
    """Add these uses, by KV key, to the rows and the totals. A chunk needs what it used from now on."""
    totals, budget, now = read_totals(txn), read_budget(txn), time.time()
    room = max(kv_bytes(txn), _UNLIMITED) if budget is None else budget
    rate = totals.seconds_per_token if seconds_per_token is None else seconds_per_token
    clock, hits, misses, tokens = totals.clock, 0, 0, 0
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
    write_totals(
        txn,
        replace(
            totals,
            hits=totals.hits + hits,
            misses=totals.misses + misses,
            hit_tokens=totals.hit_tokens + tokens,
            saved_seconds=totals.saved_seconds + tokens * rate,
            seconds_per_token=rate,
            clock=clock,
        ),
    )


def forget_gone(database: Database, *, dry_run: bool = False) -> int:
    """Forget the uses of KV that is not stored and whose chunk is deleted; returns their number."""
    gone: list[bytes] = []

    def is_gone(txn: Transaction, key: bytes) -> bool:
        row = read_use(txn, key)
        return txn.get("kv", key) is None and (row is None or txn.get("places", row.owner) is None)

    def visit(txn: Transaction, key: bytes) -> int:
        gone.extend([key] if is_gone(txn, key) else ())
        return 0

    def forget(txn: Transaction, key: bytes) -> None:
        if is_gone(txn, key):
            txn.delete("uses", key)
            txn.add_tombstone(key)

    database.walk("uses", visit)
    for batch in batches(() if dry_run else gone, lambda _: 1, _USE_BATCH):
        database.write(for_each(batch, forget))
    return len(gone)


def _refer(txn: Transaction, key: bytes, owner: bytes) -> None:
    """Add a reference from a chunk to a record that was made for another chunk with the same tokens."""
    if txn.get("kv", key) is None or txn.get("places", owner) is None or txn.has("needs", owner, key):
        return
    manifest, chunk = find_record(txn, key), chunk_named(txn, owner)
    if manifest is not None and chunk is not None and manifest.identity.may_serve(chunk.token_ids):
        txn.refer(owner, key)


def _json(txn: Transaction, key: bytes) -> object:
    try:
        return parse_json(bytes(txn.get("meta", key) or b"null"))
    except ValueError:
        return None


_LEAST = 1024
"""Candidates that a walk collects, at least a sixteenth of all: so a walk reads at most 16 records per eviction."""
_BATCH = 64
"""The most evictions in one transaction, so that other writers can come in between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """KV that was encoded for a question: the record, the number of tokens, and the digest of the chunk's id.

    `owner` is `INDEX_OWNER` for text that is no chunk of the index. `exact`: it decodes without loss.
    """

    record: EncodedRecord
    tokens: int
    owner: bytes
    exact: bool = False


class Evictor:
    """Admits KV to one store and evicts it. Thread-safe.

    `pinned` says whether a KV key is being read in this process; such a record stays.
    """

    def __init__(self, database: Database) -> None:
        self.pinned: Callable[[bytes], bool] = lambda key: False
        self._database = database
        self._lock = threading.Lock()
        self._least: list[tuple[float, bytes]] = []  # candidates of the last walk, lowest score first

    def admit(self, arrivals: Sequence[Arrival]) -> set[bytes]:
        """Store these records, evicting KV with lower scores, in one transaction; returns the evicted keys.

        A record is left out if its chunk is deleted, or if KV with a higher score would have to leave.
        """
        need = sum(arrival.record.stored_bytes for arrival in arrivals)
        waiting, stored = list(arrivals), set[bytes]()
        with self._lock:
            if self._excess() > 0:
                self._shrink()
            if not self._least and self._excess(need) > 0:
                self._least = self._walk()
            for last in (False, True):
                admit = partial(self._admit, arrivals=waiting, last=last)
                admitted, waiting, looked = self._database.write(admit, need=need)
                self._least = self._least[looked:]
                for entry in admitted if self._least else ():
                    insort(self._least, entry)
                stored.update(key for _, key in admitted)
                if last or not waiting:
                    break
                self._least = self._walk()
        return stored

    def shrink(self) -> int:
        """Evict the lowest scores until the store is within its budget; returns the number of records."""
        with self._lock:
            return self._shrink()

    def _shrink(self) -> int:
        dropped = 0
        while self._excess() > 0:
            self._least, before = self._walk(), dropped
            while self._least and self._excess() > 0:
                batch, self._least = self._least[:_BATCH], self._least[_BATCH:]
                dropped += self._database.write(lambda txn: self._drop(txn, batch))  # noqa: B023
            if dropped == before:
                break  # the rest is being read, or belongs to the index
        return dropped

    def _excess(self, more: int = 0) -> int:
        """The bytes by which the store would exceed its budget with this many more."""
        with self._database.read() as txn:
            budget = read_budget(txn)
            return 0 if budget is None else kv_bytes(txn) + more - budget

    def _walk(self) -> list[tuple[float, bytes]]:
        """The records with the lowest scores, each with its score."""
        scores: list[tuple[float, bytes]] = []

        def visit(txn: Transaction, key: bytes) -> int:
            value = eviction_score_of(read_use(txn, key))
            if value != NEVER or txn.is_needed(key):
                scores.append((value, key))
            return 0

        self._database.walk("kv", visit)
        return heapq.nsmallest(max(_LEAST, len(scores) // 16), scores)

    def _admit(
        self, txn: Transaction, arrivals: Sequence[Arrival], *, last: bool
    ) -> tuple[list[tuple[float, bytes]], list[Arrival], int]:
        """Store arrivals that fit, or whose score is higher than that of the KV they displace.

        Returns those with their scores, the arrivals that need more candidates, and the number of candidates consumed.
        """
        stored, waiting = list[tuple[float, bytes]](), list[Arrival]()
        budget, total, seen, evicted, refused = read_budget(txn), kv_bytes(txn), 0, 0, 0
        for arrival in arrivals:
            key, size, owner = arrival.record.key, arrival.record.stored_bytes, arrival.owner
            if owner != INDEX_OWNER and txn.get("places", owner) is None:
                continue
            row, before, new = read_use(txn, key), txn.payload_bytes(key), txn.get("kv", key) is None
            clock = read_totals(txn).clock
            own = eviction_score(used(NEVER, clock), arrival.tokens, size) if row is None else eviction_score_of(row)
            if budget is not None and size > budget:
                refused += 1
                continue
            if budget is not None and total - before + size > budget:
                short = total - before + size - budget
                leaving, freed, looked = self._leaving(txn, short, own, seen, key)
                if freed < short:
                    if looked == len(self._least) and not last:
                        waiting.append(arrival)
                    else:
                        refused += 1
                    continue
                for victim in leaving:
                    txn.evict(victim)
                seen, evicted, total = looked, evicted + len(leaving), total - freed
            txn.put_record(arrival.record)
            if arrival.exact and new:
                txn.changed.discard(key)  # the cached KV equals the stored one
            txn.refer(owner, key)
            total += size - before
            stored.append((own, key))
        if evicted or refused:
            _count(txn, evicted, refused)
        return stored, waiting, seen

    def _leaving(
        self, txn: Transaction, short: int, own: float, looked: int, but: bytes
    ) -> tuple[list[bytes], int, int]:
        """Candidates with a score below `own` that free `short` bytes: keys, their bytes, candidates consumed."""
        leaving, freed = list[bytes](), 0
        while freed < short and looked < len(self._least) and self._least[looked][0] < own:
            value, key = self._least[looked]
            looked += 1
            if key != but and self._may_leave(txn, key, value):
                leaving.append(key)
                freed += txn.payload_bytes(key)
        return leaving, freed, looked

    def _drop(self, txn: Transaction, batch: Sequence[tuple[float, bytes]]) -> int:
        budget, total, dropped = read_budget(txn), kv_bytes(txn), 0
        for value, key in batch:
            if budget is None or total <= budget:
                break
            if self._may_leave(txn, key, value):
                total -= txn.payload_bytes(key)
                txn.evict(key)
                dropped += 1
        if dropped:
            _count(txn, dropped)
        return dropped

    def _may_leave(self, txn: Transaction, key: bytes, value: float) -> bool:
        """Whether a candidate still exists with the same score and is not being read in this process."""
        if txn.get("kv", key) is None or self.pinned(key) or eviction_score_of(read_use(txn, key)) != value:
            return False
        return value != NEVER or txn.is_needed(key)  # else the prefix's, or staged by an ingest


def _count(txn: Transaction, evicted: int, refused: int = 0) -> None:
    totals = read_totals(txn)
    write_totals(txn, replace(totals, evictions=totals.evictions + evicted, refused=totals.refused + refused))
