"""Hot KV in memory: what one query loaded, the next finds there, tensor for tensor.

Least recently used goes first when the budget is full. An entry that a running query still reads lives on by
reference after it was dropped; it is only not counted and not found any more.

Why an entry cannot be stale: its key is the hash of all that its numbers depend on (`KVIdentity`), so another
model, prompt or text is another key. What may change under a key is what the *store* holds: a record deleted with
its document, or written again (repaired, or by another codec). Both drop the entry, also one on its way in
(`drop`), and what another process deleted is dropped at the first look after it (`retain`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ragkv.attention.kv import ChunkKV

__all__ = ["Load", "MemoryTier", "MemoryUse"]

Load: TypeAlias = Callable[[Sequence[bytes]], Mapping[bytes, ChunkKV]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """What a tier holds now, and what it has done since it was made.

    `hits` and `misses` count the chunks that were asked for; one that another thread was loading is a hit.
    `evictions` count what went for want of room, `drops` what the store deleted or wrote again.
    """

    budget: int
    bytes: int
    entries: int
    hits: int
    misses: int
    evictions: int
    drops: int


class _Flight:
    """A load under way: other threads wait for it instead of loading the same."""

    __slots__ = ("_done", "_kv", "dropped", "failed")

    def __init__(self) -> None:
        self._done = threading.Event()
        self._kv: ChunkKV | None = None
        self.dropped = False
        self.failed = False

    def land(self, kv: ChunkKV | None, *, failed: bool) -> None:
        self._kv, self.failed = kv, failed
        self._done.set()

    def wait(self) -> ChunkKV | None:
        self._done.wait()
        return self._kv


class MemoryTier:
    """Chunk KV by KV key, on one device, at most `budget` bytes; any number of threads."""

    def __init__(self, budget: int = 0) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, ChunkKV] = OrderedDict()
        self._flights: dict[bytes, _Flight] = {}
        self._budget = budget
        self._generation: int | None = None
        self._bytes = self._hits = self._misses = self._evictions = self._drops = 0

    def get_many(self, keys: Iterable[bytes], load: Load) -> tuple[dict[bytes, ChunkKV], set[bytes]]:
        """The KV of these keys, and which of them `load` was not asked for.

        `load` gets the keys that are neither here nor being loaded, in one call, and no lock is held meanwhile; it
        may leave out what there is not. A key whose load by another thread failed is loaded by this one.
        """
        rest = list(dict.fromkeys(keys))
        found: dict[bytes, ChunkKV] = {}
        held: set[bytes] = set()
        while rest:
            own: dict[bytes, _Flight] = {}
            others: dict[bytes, _Flight] = {}
            with self._lock:
                for key in rest:
                    if key in self._entries:
                        self._entries.move_to_end(key)
                        found[key] = self._entries[key]
                        held.add(key)
                        self._hits += 1
                    elif key in self._flights:
                        others[key] = self._flights[key]
                    else:
                        own[key] = self._flights[key] = _Flight()
                        self._misses += 1
            found |= self._load(own, load)
            for key, flight in others.items():  # only now, when nobody waits for this thread
                kv = flight.wait()
                if kv is not None:
                    found[key] = kv
                    held.add(key)
            with self._lock:
                self._hits += len(others.keys() & held)
            rest = [key for key, flight in others.items() if flight.failed]
        return found, held

    def missing(self, keys: Iterable[bytes]) -> list[bytes]:
        """Those that are neither here nor being loaded, at this moment; nothing is counted."""
        with self._lock:
            return [key for key in keys if key not in self._entries and key not in self._flights]

    def drop(self, keys: Collection[bytes]) -> None:
        """Forget these: the store has deleted or rewritten them. A load that began before does not stay either."""
        with self._lock:
            for key in keys:
                if key in self._flights:
                    self._flights[key].dropped = True
                if key in self._entries:
                    self._remove(key)
                    self._drops += 1

    def retain(self, generation: int, present: Callable[[Sequence[bytes]], Collection[bytes]]) -> None:
        """Drop what is not `present`, which is asked only when the store's generation is another than last time."""
        with self._lock:
            if generation == self._generation:
                return
            self._generation = generation
            keys = [*self._entries, *self._flights]
        self.drop(set(keys) - set(present(keys)))

    def resize(self, budget: int) -> None:
        """Another budget from now on; 0 keeps nothing."""
        with self._lock:
            self._budget = budget
            self._shrink()

    def use(self) -> MemoryUse:
        with self._lock:
            return MemoryUse(
                budget=self._budget,
                bytes=self._bytes,
                entries=len(self._entries),
                hits=self._hits,
                misses=self._misses,
                evictions=self._evictions,
                drops=self._drops,
            )

    def _load(self, flights: Mapping[bytes, _Flight], load: Load) -> dict[bytes, ChunkKV]:
        if not flights:
            return {}
        loaded: Mapping[bytes, ChunkKV] = {}
        failed = True
        try:
            loaded = load(list(flights))
            failed = False
        finally:
            with self._lock:
                for key, flight in flights.items():
                    del self._flights[key]
                    kv = loaded.get(key)
                    if kv is not None and not flight.dropped:
                        self._insert(key, kv)
            for key, flight in flights.items():
                flight.land(loaded.get(key), failed=failed)
        return {key: kv for key in flights if (kv := loaded.get(key)) is not None}

    def _insert(self, key: bytes, kv: ChunkKV) -> None:
        if kv.nbytes > self._budget:  # passed through: it would empty the tier, and not stay
            return
        self._entries[key] = kv
        self._bytes += kv.nbytes
        self._shrink()

    def _shrink(self) -> None:
        while self._bytes > self._budget:
            self._remove(next(iter(self._entries)))
            self._evictions += 1

    def _remove(self, key: bytes) -> None:
        self._bytes -= self._entries.pop(key).nbytes
