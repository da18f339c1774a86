"""KV on the device that requests hold in common: what they lease, what is prefilled for several, what is joined."""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from ragkv.attention.join import join, worth_joining
from ragkv.attention.kv import ChunkKV, Segment
from ragkv.attention.rope import Rotary
from ragkv.attention.row import Group, Row

__all__ = ["Lease", "Pool"]

SHARED_BY = 2.5
"""Rows per chunk, on average, from which a chunk is read where it lies for all of them, and not copied for each."""


class Lease:
    """KV that a request holds, counted once however many requests hold it."""

    __slots__ = ("sizes",)

    def __init__(self, sizes: Mapping[Hashable, int]) -> None:
        self.sizes = sizes


class Pool:
    """Bytes of chunk KV that running requests hold, within `budget`; and KV that the runtime makes for them.

    A request that needs more than the whole budget may still run, but alone.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._holders: Counter[Hashable] = Counter()
        self._bytes = 0
        self._leases: set[Lease] = set()
        # with what stands before them: a key has the identity of that, which no other KV may take
        self._shared: OrderedDict[Hashable, tuple[ChunkKV, tuple[ChunkKV, ...]]] = OrderedDict()
        self._flights: set[Hashable] = set()
        self._joined: weakref.WeakValueDictionary[Hashable, ChunkKV] = weakref.WeakValueDictionary()
        # held as long as what was joined from them, so that no other KV takes their identity
        self._originals: weakref.WeakKeyDictionary[ChunkKV, tuple[ChunkKV, ...]] = weakref.WeakKeyDictionary()

    @property
    def leased(self) -> int:
        """Bytes that requests hold now."""
        return self._bytes

    @property
    def leases(self) -> int:
        """How many are held."""
        return len(self._leases)

    def holds(self, key: Hashable) -> bool:
        """Whether a request holds this KV now."""
        return key in self._holders

    def fits(self, sizes: Mapping[Hashable, int]) -> bool:
        """Whether a request may take these now."""
        more = sum(size for key, size in sizes.items() if key not in self._holders)
        return not self._bytes or self._bytes + more <= self.budget

    def lease(self, sizes: Mapping[Hashable, int]) -> Lease:
        """Count them as held, whether they fit or not."""
        self._bytes += sum(size for key, size in sizes.items() if key not in self._holders)
        self._holders.update(sizes.keys())
        lease = Lease(dict(sizes))
        self._leases.add(lease)
        return lease

    def release(self, lease: Lease) -> None:
        """Nothing of it is held by this request any more; nothing happens the second time."""
        if lease not in self._leases:
            return
        self._leases.remove(lease)
        for key, size in lease.sizes.items():
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
                self._bytes -= size

    def shared(self, key: Hashable) -> ChunkKV | None:
        """A sequence that was prefilled for another request, if it is still here."""
        if key not in self._shared:
            return None
        self._shared.move_to_end(key)
        return self._shared[key][0]

    def begin(self, key: Hashable) -> bool:
        """Whether the caller shall prefill the sequence; False while another does."""
        if key in self._flights:
            return False
        self._flights.add(key)
        return True

    def land(self, key: Hashable) -> None:
        """Whoever began it has kept it, or gave it up."""
        self._flights.discard(key)

    def landed(self, key: Hashable) -> bool:
        """Whether nobody prefills it now."""
        return key not in self._flights

    def keep(self, key: Hashable, kv: ChunkKV, before: Sequence[Segment]) -> None:
        """Keep a sequence, prefilled after `before`, for the next that asks; the least recently used ones go first."""
        self._shared[key] = kv, tuple(segment.kv for segment in before)
        while len(self._shared) > 1 and sum(each.nbytes for each, _ in self._shared.values()) > self.budget:
            self._shared.popitem(last=False)

    def settle(self, rows: Sequence[Row], active: Sequence[Row], rotary: Rotary, *, windowed: bool) -> None:
        """Lay the contexts of `rows`, which have read their questions, out for single tokens; `active` are all rows.

        A kernel call per chunk costs more than its keys do when there is one query, so a group's segments are joined,
        once for all rows that see the same ones. Chunks that several rows see among others stay where they lie.
        """
        seen = Counter(id(kv) for row in active for segment in row.segments for kv in self._of(segment.kv))
        runs = Counter(_run(group.segments) for row in active for group in row.groups)
        for row in rows:
            row.groups = tuple(self._settled(group, seen, runs, rotary, windowed) for group in row.groups)

    def in_common(self, rows: Sequence[Row]) -> list[Row]:
        """Those of `rows`, which are about to read their questions, that should be settled before.

        Where several see the same chunks and no others do, one joined KV is read for all of them: the copy that they
        would need for the second token anyway saves a turned query for each chunk.
        """
        runs = {row: tuple(_run(group.segments) for group in row.groups) for row in rows if row.groups}
        times = Counter(runs.values())
        seen = Counter(id(segment.kv) for row in runs for segment in row.segments)
        return [
            row
            for row, keys in runs.items()
            if times[keys] > 1 and all(seen[id(segment.kv)] == times[keys] for segment in row.segments)
        ]

    def _of(self, kv: ChunkKV) -> tuple[ChunkKV, ...]:
        """The chunks of a run that was joined; else the chunk itself."""
        return self._originals.get(kv, (kv,))

    def _settled(
        self, group: Group, seen: Counter[int], runs: Counter[Hashable], rotary: Rotary, windowed: bool
    ) -> Group:
        segments, others = _joinable(group)
        if not worth_joining(replace(group, segments=segments), windowed=windowed):
            return group
        key = _run(segments)
        readers = sum(seen[id(segment.kv)] for segment in segments) / len(segments)
        if key not in self._joined and readers / max(runs[key], 1) >= SHARED_BY:
            return group
        kv = self._joined.get(key)
        if kv is None:
            kv = self._joined[key] = replace(join(segments, rotary), owner=segments[0].kv.owner)
            self._originals[kv] = tuple(segment.kv for segment in segments)
        return replace(group, segments=(*others, Segment(kv=kv, start=segments[0].start)))


def _joinable(group: Group) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
    """The segments that may be one, and the others: what lies on this rank stays apart from what all ranks have."""
    segments = tuple(segment for segment in group.segments if segment.kv.tokens)
    if all(segment.kv.owner is None for segment in segments):
        return segments, ()
    mine = tuple(segment for segment in segments if segment.kv.owner is not None and segment.kv.here)
    return mine, tuple(segment for segment in segments if segment not in mine)


def _run(segments: Sequence[Segment]) -> Hashable:
    """What two rows have in common that see the same chunks at the same distances."""
    return tuple((id(segment.kv), segment.start - segments[0].start) for segment in segments if segment.kv.tokens)
