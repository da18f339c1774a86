"""A least-recently-used cache of KV in memory, so that queries share the same tensors.

A running query keeps the tensors of an evicted entry alive by its reference. The cache no longer counts them but finds
them while they live, so no two queries hold the same KV twice.

An entry cannot be stale: its key is a hash of everything that its numbers depend on (`KVIdentity`). The record in the
*store* may be deleted with its document, or rewritten by a repair or another codec. Both drop the entry, even one that
is being loaded (`drop`). Records that another process deleted are dropped at the next question (`retain`).
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from ragkv.attention.kv import ChunkKV

Load: TypeAlias = "Callable[[Sequence[bytes]], Mapping[bytes, ChunkKV]]"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """What a cache holds now, and its counters since it was created.

    `hits` and `misses` count requested chunks; a chunk that another thread is loading is a hit. `evictions` count
    entries that made room for others, `drops` those that the store deleted or rewrote.
    """

    budget: int
    bytes: int
    entries: int
    hits: int
    misses: int
    evictions: int
    drops: int


class _PendingLoad:
    """KV that a thread is loading; other threads wait for it instead of loading it again.

    It is a held lock: an interrupt between two lines of an `Event` could leave the event's own lock held.
    """

    __slots__ = ("_ended", "_kv", "_running", "dropped", "failed")

    def __init__(self) -> None:
        self._running = threading.Lock()
        self._running.acquire()
        self._kv: ChunkKV | None = None
        self._ended = False
        self.dropped = False
        self.failed = False

    def finish(self, kv: ChunkKV | None, *, failed: bool) -> None:
        if not self._ended:
            self._kv, self.failed, self._ended = kv, failed, True
            self._running.release()

    def wait(self) -> ChunkKV | None:
        with self._running:
            return self._kv


class MemoryTier:
    """Chunk KV on one device by KV key, at most `budget` bytes; for any number of threads."""

    def __init__(self, budget: int = 0) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, ChunkKV] = OrderedDict()
        self._alive: weakref.WeakValueDictionary[bytes, ChunkKV] = weakref.WeakValueDictionary()
        """All KV held by queries, in `_entries` or evicted."""
        self._pending: dict[bytes, _PendingLoad] = {}
        self._budget = budget
        self._generation: int | None = None
        self._bytes = self._hits = self._misses = self._evictions = self._drops = 0

    def get_many(self, keys: Iterable[bytes], load: Load) -> tuple[dict[bytes, ChunkKV], set[bytes]]:
        """The KV of these keys, and which of them were found without `load`.

        `load` is called once, without a lock, with the keys that are neither in memory nor being loaded; it omits what
        does not exist. If another thread fails to load a key, this one loads it.
        """
        rest = list(dict.fromkeys(keys))
        loaded_kv: dict[bytes, ChunkKV] = {}
        held: set[bytes] = set()
        while rest:
            own: dict[bytes, _PendingLoad] = {}
            others: dict[bytes, _PendingLoad] = {}
            loaded: Mapping[bytes, ChunkKV] | None = None
            try:
                with self._lock:
                    for key in rest:
                        if (kv := self._get(key)) is not None:
                            loaded_kv[key] = kv
                            held.add(key)
                            self._hits += 1
                        elif key in self._pending:
                            others[key] = self._pending[key]
                        else:
                            own[key] = self._pending[key] = _PendingLoad()
                            self._misses += 1
                loaded = load(list(own)) if own else {}
            finally:
                try:
                    self._finish(own, loaded)
                except BaseException:  # an interrupt, also before its first line: others would wait for ever
                    self._finish(own, loaded)
                    raise
            loaded_kv |= {key: kv for key in own if (kv := loaded.get(key)) is not None}
            # Wait for others only after loading, or two threads could wait for each other.
            for key, pending in others.items():
                kv = pending.wait()
                if kv is not None:
                    loaded_kv[key] = kv
                    held.add(key)
            with self._lock:
                self._hits += len(others.keys() & held)
            rest = [key for key, pending in others.items() if pending.failed]
        return loaded_kv, held

    def missing(self, keys: Iterable[bytes]) -> list[bytes]:
        """The keys that are neither in memory nor being loaded, without counting misses."""
        with self._lock:
            return [key for key in keys if key not in self._alive and key not in self._pending]

    def drop(self, keys: Collection[bytes]) -> None:
        """Drop entries that the store has deleted or rewritten, including those that are being loaded."""
        with self._lock:
            for key in keys:
                if key in self._pending:
                    self._pending[key].dropped = True
                self._alive.pop(key, None)
                if key in self._entries:
                    self._remove(key)
                    self._drops += 1

    def retain(self, generation: int, present: Callable[[Sequence[bytes]], Collection[bytes]]) -> None:
        """Drop entries that are not `present`; only calls it if the store's generation has changed."""
        with self._lock:
            if generation == self._generation:
                return
            self._generation = generation
            keys = {*self._alive, *self._pending}
        self.drop(keys - set(present(list(keys))))

    def resize(self, budget: int) -> None:
        """Set the budget in bytes; 0 keeps nothing."""
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

    def _finish(self, own: Mapping[bytes, _PendingLoad], loaded: Mapping[bytes, ChunkKV] | None) -> None:
        """Keep the loaded KV, None after an error, and release the threads that wait for it."""
        by_key = loaded or {}
        with self._lock:
            for key, pending in own.items():
                if self._pending.get(key) is pending:
                    kv = by_key.get(key)
                    if kv is not None and not pending.dropped:
                        self._insert(key, kv)
                    del self._pending[key]
        for key, pending in own.items():
            pending.finish(by_key.get(key), failed=loaded is None)

    def _get(self, key: bytes) -> ChunkKV | None:
        kv = self._alive.get(key)
        if key in self._entries:
            self._entries.move_to_end(key)
        elif kv is not None:  # evicted, and used again
            self._insert(key, kv)
        return kv

    def _insert(self, key: bytes, kv: ChunkKV) -> None:
        self._alive[key] = kv
        size = kv.nbytes
        if key in self._entries or size > self._budget:  # too large: it would evict everything, and then itself
            return
        self._entries[key] = kv
        self._bytes += size
        self._shrink()

    def _shrink(self) -> None:
        while self._bytes > self._budget:
            self._remove(next(iter(self._entries)))
            self._evictions += 1

    def _remove(self, key: bytes) -> None:
        size = self._entries[key].nbytes
        del self._entries[key]
        self._bytes -= size
