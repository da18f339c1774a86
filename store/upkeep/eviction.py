"""Keep a store's KV within its budget: what is let in, and what leaves for it, the least worth first.

What could leave is found by walking all records, outside of any write, and used up transaction by transaction: a walk
serves hundreds of evictions. Each transaction looks again at what it drops. What has been used since the walk, or is
being read, stays.

Nobody who reads is disturbed. A reader sees the snapshot in which it began, and copies what it reads; whoever looks
later does not find the record, and encodes the chunk.
"""

from __future__ import annotations

import heapq
import threading
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ragkv.store.database import Database
from ragkv.store.format.record import EncodedRecord
from ragkv.store.transaction import INDEX_OWNER, Transaction
from ragkv.store.upkeep.usage import kv_bytes, read_budget, read_ledger, read_use, worth_of, write_ledger
from ragkv.store.worth import NEVER, used, worth

__all__ = ["Arrival", "Evictor"]

_LEAST = 1024
"""So many are found by a walk, or a sixteenth of all: then a walk reads sixteen records for each that leaves."""
_BATCH = 64
"""So many leave at most in one transaction while the store is above its budget; others write between two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """KV that was made for a question: the record, the number of tokens, and the digest of the chunk's id.

    `owner` is `INDEX_OWNER` for text that is no chunk of the index. `exact`: it decodes to what was encoded.
    """

    record: EncodedRecord
    tokens: int
    owner: bytes
    exact: bool = False


@dataclass(slots=True)
class _Outcome:
    """What one transaction did: the arrivals that it stored, those for which too few candidates were known, and how
    many candidates it has used up."""

    stored: list[tuple[float, bytes]] = field(default_factory=list)
    short: list[Arrival] = field(default_factory=list)
    looked: int = 0


class Evictor:
    """Lets KV into one store and out of it; for any number of threads.

    `spared` says of a KV key whether it is being read in this process: such a record stays.
    """

    def __init__(self, database: Database) -> None:
        self.spared: Callable[[bytes], bool] = lambda key: False
        self._database = database
        self._lock = threading.Lock()
        self._least: list[tuple[float, bytes]] = []  # candidates, least worth first, as the last walk found them

    def let_in(self, arrivals: Sequence[Arrival]) -> set[bytes]:
        """Store these records, and drop what is worth less for them, in one transaction; returns the keys of those.

        One is left out if its chunk is gone, or if what would have to leave for it is worth more.
        """
        need = sum(arrival.record.stored_bytes for arrival in arrivals)
        waiting, stored = list(arrivals), set[bytes]()
        with self._lock:
            if self._excess() > 0:
                self._shrink()
            if not self._least and self._excess(need) > 0:
                self._least = self._walk()
            for last in (False, True):
                done = self._database.write(lambda txn: self._admit(txn, waiting, last=last), need=need)  # noqa: B023
                self._least = self._least[done.looked :]
                for entry in done.stored if self._least else ():
                    insort(self._least, entry)
                stored.update(key for _, key in done.stored)
                waiting = done.short
                if last or not waiting:
                    break
                self._least = self._walk()
        return stored

    def shrink(self) -> int:
        """Drop what is worth least until the store is within its budget; returns how many records went."""
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
                break  # all that is left is being read, or is the index's own
        return dropped

    def _excess(self, more: int = 0) -> int:
        """The bytes by which the store would be above its budget with so many more."""
        with self._database.read() as txn:
            budget = read_budget(txn)
            return 0 if budget is None else kv_bytes(txn) + more - budget

    def _walk(self) -> list[tuple[float, bytes]]:
        """The records that are worth least, each with its worth."""
        found: list[tuple[float, bytes]] = []

        def visit(txn: Transaction, key: bytes) -> int:
            value = worth_of(read_use(txn, key))
            if value != NEVER or txn.is_needed(key):
                found.append((value, key))
            return 0

        self._database.walk("kv", visit)
        return heapq.nsmallest(max(_LEAST, len(found) // 16), found)

    def _admit(self, txn: Transaction, arrivals: Sequence[Arrival], *, last: bool) -> _Outcome:
        """Store what there is room for, or what is worth more than what leaves for it."""
        budget, total, done, evicted, refused = read_budget(txn), kv_bytes(txn), _Outcome(), 0, 0
        for arrival in arrivals:
            key, size, owner = arrival.record.key, arrival.record.stored_bytes, arrival.owner
            if owner != INDEX_OWNER and txn.get("places", owner) is None:
                continue
            row, before, new = read_use(txn, key), txn.payload_bytes(key), txn.get("kv", key) is None
            clock = read_ledger(txn).clock
            own = worth(used(NEVER, clock), arrival.tokens, size) if row is None else worth_of(row)
            if budget is not None and size > budget:
                refused += 1
                continue
            if budget is not None and total - before + size > budget:
                short = total - before + size - budget
                leaving, freed, looked = self._leaving(txn, short, own, done.looked, key)
                if freed < short:
                    if looked == len(self._least) and not last:
                        done.short.append(arrival)
                    else:
                        refused += 1
                    continue
                for victim in leaving:
                    _evict(txn, victim)
                done.looked, evicted, total = looked, evicted + len(leaving), total - freed
            txn.put_record(arrival.record)
            if arrival.exact and new:
                txn.changed.discard(key)  # what memory holds of it is what is stored
            txn.refer(owner, key)
            total += size - before
            done.stored.append((own, key))
        if evicted or refused:
            _count(txn, evicted, refused)
        return done

    def _leaving(
        self, txn: Transaction, short: int, own: float, looked: int, but: bytes
    ) -> tuple[list[bytes], int, int]:
        """What is worth less than `own` and frees `short` bytes: the keys, their bytes, how many candidates it took."""
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
                _evict(txn, key)
                dropped += 1
        if dropped:
            _count(txn, dropped)
        return dropped

    def _may_leave(self, txn: Transaction, key: bytes, value: float) -> bool:
        """Whether a candidate is still there and worth as little as it was, and nobody here is reading it."""
        if txn.get("kv", key) is None or self.spared(key) or worth_of(read_use(txn, key)) != value:
            return False
        return value != NEVER or txn.is_needed(key)  # else it is the prefix's, or staged for a document on its way


def _evict(txn: Transaction, key: bytes) -> None:
    for owner in txn.values("references", key):
        txn.delete("needs", owner, key)
    txn.delete("references", key)
    txn.drop_record(key)


def _count(txn: Transaction, evicted: int, refused: int = 0) -> None:
    ledger = read_ledger(txn)
    write_ledger(txn, replace(ledger, evictions=ledger.evictions + evicted, refused=ledger.refused + refused))
