"""The chunk KV that running requests hold on the device.

Requests lease KV within a budget; KV that several of them hold is counted once. The pool also owns KV that the runtime
makes for them: sequences that several requests share and the first one prefills, and chunks that were joined, or
converted to float32, for decoding.
"""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from ragkv.attention import in_place
from ragkv.attention.kv import ChunkKV, PlacedChunk
from ragkv.attention.rope import Rotary
from ragkv.attention.sequence import ChunkGroup, TokenSequence, join, worth_joining
from ragkv.engines.base import Forward, Operation, Program, Release, Shared, WaitFor
from ragkv.model.module_state import ModuleState

SHARED_BY = 2.5
"""From this many sequences per chunk, on average, a chunk is read in place for all of them and not copied for each."""


class Lease:
    """KV that a request holds; it is counted once however many requests hold it."""

    __slots__ = ("sizes",)

    def __init__(self, sizes: Mapping[Hashable, int]) -> None:
        self.sizes = sizes


class KVPool:
    """Bytes of chunk KV that running requests hold, within `budget`, and KV that the runtime makes for them.

    A request that needs more than the whole budget may still run, but alone. `module` gives the model's modules: shared
    sequences that were prefilled with other weights are dropped.
    """

    def __init__(self, budget: int, module: Callable[[], nn.Module] | None = None) -> None:
        self.budget = budget
        self._module = module
        self._state: ModuleState | None = None
        """What the shared sequences were prefilled with."""
        self._generation = 0
        self._holders: Counter[Hashable] = Counter()
        self._bytes = 0
        self._leases: set[Lease] = set()
        # kept with the KV before them: keys contain its id(), which must not be reused
        self._shared: OrderedDict[Hashable, tuple[ChunkKV, tuple[ChunkKV, ...]]] = OrderedDict()
        self._flights: set[Hashable] = set()
        self._joined: weakref.WeakValueDictionary[Hashable, ChunkKV] = weakref.WeakValueDictionary()
        # kept as long as the joined KV, so that their id() is not reused
        self._originals: weakref.WeakKeyDictionary[ChunkKV, tuple[ChunkKV, ...]] = weakref.WeakKeyDictionary()

    def emptied(self) -> KVPool:
        """A new pool with the same budget."""
        return KVPool(self.budget, self._module)

    @property
    def leased(self) -> int:
        """Bytes that requests hold now."""
        return self._bytes

    @property
    def leases(self) -> int:
        """The number of leases."""
        return len(self._leases)

    def holds(self, key: Hashable) -> bool:
        """Whether a request holds this KV."""
        return key in self._holders

    def fits(self, sizes: Mapping[Hashable, int]) -> bool:
        """Whether these fit into the budget now."""
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
        """This request no longer holds any of it; a second call does nothing."""
        if lease not in self._leases:
            return
        self._leases.remove(lease)
        for key, size in lease.sizes.items():
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
                self._bytes -= size

    def generation(self) -> int:
        """Part of the keys of shared sequences; another number once the model computes something else."""
        if self._module is not None and not (self._state and self._state.same_numbers()):
            self._state = ModuleState(self._module())
            self._generation += 1
            self._shared.clear()
        return self._generation

    def shared(self, key: Hashable) -> ChunkKV | None:
        """A sequence that was prefilled for another request, if it is still kept."""
        if key not in self._shared:
            return None
        self._shared.move_to_end(key)
        return self._shared[key][0]

    def begin(self, key: Hashable) -> bool:
        """Whether the caller shall prefill the sequence; False while another request does."""
        if key in self._flights:
            return False
        self._flights.add(key)
        return True

    def land(self, key: Hashable) -> None:
        """Record that the request which began a prefill has kept the result, or given up."""
        self._flights.discard(key)

    def landed(self, key: Hashable) -> bool:
        """Whether no request is prefilling it now."""
        return key not in self._flights

    def keep(self, key: Hashable, kv: ChunkKV, before: Sequence[PlacedChunk]) -> None:
        """Keep a sequence, prefilled after `before`, for the next request; the least recently used ones are dropped
        first.
        """
        self._shared[key] = kv, tuple(chunk.kv for chunk in before)
        while len(self._shared) > 1 and sum(each.nbytes for each, _ in self._shared.values()) > self.budget:
            self._shared.popitem(last=False)

    def lay_out(
        self, sequences: Sequence[TokenSequence], active: Sequence[TokenSequence], rotary: Rotary, *, windowed: bool
    ) -> None:
        """Lay out for decoding the contexts of `sequences`, which have read their questions; `active` are all running
        sequences.

        KV that `ragkv.attention.in_place` reads needs no layout. Otherwise, with a single query, a kernel call per
        chunk costs more than the chunk's keys, so a group's chunks are joined, once for all sequences that see the same
        ones. Chunks that several sequences see in different combinations are not copied.
        """
        seen = Counter(id(kv) for sequence in active for chunk in sequence.segments for kv in self._of(chunk.kv))
        runs = Counter(_run(group.segments) for sequence in active for group in sequence.groups)
        for sequence in sequences:
            sequence.groups = tuple(self._laid_out(group, seen, runs, rotary, windowed) for group in sequence.groups)

    def in_common(self, sequences: Sequence[TokenSequence]) -> list[TokenSequence]:
        """Those of `sequences`, which are about to read their questions, whose contexts should be joined first.

        If several sequences see the same chunks, one joined KV is read for all of them: they would need the copy for
        the second token anyway, and it saves a rotated query per chunk.
        """
        runs = {
            sequence: tuple(_run(group.segments) for group in sequence.groups)
            for sequence in sequences
            if sequence.groups
        }
        times = Counter(runs.values())
        seen = Counter(id(chunk.kv) for sequence in runs for chunk in sequence.segments)
        return [
            sequence
            for sequence, keys in runs.items()
            if times[keys] > 1 and all(seen[id(chunk.kv)] == times[keys] for chunk in sequence.segments)
        ]

    def _of(self, kv: ChunkKV) -> tuple[ChunkKV, ...]:
        """The chunks that a joined KV was made of; else the chunk itself."""
        return self._originals.get(kv, (kv,))

    def _laid_out(
        self, group: ChunkGroup, seen: Counter[int], runs: Counter[Hashable], rotary: Rotary, windowed: bool
    ) -> ChunkGroup:
        if in_place.reads_in_place(group) and not any(
            in_place.shared(seen[id(chunk.kv)], chunk.kv.tokens) for chunk in group.segments
        ):
            return group
        chunks = tuple(chunk for chunk in group.segments if chunk.kv.tokens)
        if not worth_joining(replace(group, segments=chunks), windowed=windowed):
            return self._wide(group)
        key = _run(chunks)
        readers = sum(seen[id(chunk.kv)] for chunk in chunks) / len(chunks)
        if key not in self._joined and readers / max(runs[key], 1) >= SHARED_BY:
            return self._wide(group)
        kv = self._made(key, chunks, lambda: join(chunks, rotary))
        return replace(group, segments=(PlacedChunk(kv=kv, start=chunks[0].start),))

    def _wide(self, group: ChunkGroup) -> ChunkGroup:
        """The group with its KV widened, because every step reads it; made once for all sequences that see it."""
        if not any(chunk.kv.packed for chunk in group.segments):
            return group
        return replace(group, segments=tuple(map(self._widened, group.segments)))

    def _widened(self, chunk: PlacedChunk) -> PlacedChunk:
        if not chunk.kv.packed:
            return chunk
        return replace(chunk, kv=self._made(("wide", id(chunk.kv)), (chunk,), chunk.kv.wide))

    def _made(self, key: Hashable, chunks: tuple[PlacedChunk, ...], make: Callable[[], ChunkKV]) -> ChunkKV:
        kv = self._joined.get(key)
        if kv is None:
            kv = self._joined[key] = make()
            self._originals[kv] = tuple(chunk.kv for chunk in chunks)
        return kv


def _run(chunks: Sequence[PlacedChunk]) -> Hashable:
    """A key that is equal for sequences that see the same chunks at the same distances."""
    return tuple((id(chunk.kv), chunk.start - chunks[0].start) for chunk in chunks if chunk.kv.tokens)


def with_shared(program: Program, pool: KVPool) -> Generator[Operation, Any, None]:
    """The program with its `Shared` requests served by forward passes or from the pool."""
    answer: Any = None
    try:
        while True:
            operation = program.send(answer)
            answer = None  # the program has used these logits: free them
            answer = (yield from _prefilled(operation, pool)) if isinstance(operation, Shared) else (yield operation)
    except StopIteration:
        return
    finally:
        program.close()


def _prefilled(shared: Shared, pool: KVPool) -> Generator[Operation, Any, tuple[PlacedChunk, ...]]:
    chunks = shared.before
    at, generation = max((chunk.end for chunk in chunks), default=0), pool.generation()
    for part, ids in zip(shared.keys, shared.parts, strict=True):
        key = generation, part
        if not ids:
            continue
        while (kv := pool.shared(key)) is None and not pool.begin(key):
            yield WaitFor(partial(pool.landed, key))
        if kv is None:
            try:
                sequence = TokenSequence.for_kv(chunks, position=at)
                yield Forward((sequence,), (ids,))
                kv = sequence.cache.chunk_kv(encoded_at=at)
                pool.keep(key, kv, chunks)
                yield Release((sequence,))
            finally:
                pool.land(key)
        chunks = (*chunks, PlacedChunk(kv=kv, start=at))
        at += kv.tokens
    return chunks
