"""The chunk KV that running requests hold on the device.

Requests lease KV within a budget; KV that several of them hold is counted once. The pool also owns
sequences that several requests share and the first one prefills.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Generator, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

from ragkv.attention.kv import ChunkKV, PlacedChunk
from ragkv.attention.sequence import TokenSequence
from ragkv.engines.base import Forward, Operation, Program, Release, Shared, WaitFor
from ragkv.runtime.executor import Executor


class Lease:
    """KV that a request holds; it is counted once however many requests hold it."""

    __slots__ = ("sizes",)

    def __init__(self, sizes: Mapping[Hashable, int]) -> None:
        self.sizes = sizes


class KVPool:
    """Bytes of chunk KV that running requests hold, within `budget`, and KV that the runtime makes for them.

    A request that needs more than the whole budget may still run, but alone.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._generation = 0
        self._holders: Counter[Hashable] = Counter()
        self._bytes = 0
        self._leases: set[Lease] = set()
        # kept with the KV before them: keys contain its id(), which must not be reused
        self._shared: OrderedDict[Hashable, tuple[ChunkKV, tuple[ChunkKV, ...]]] = OrderedDict()
        self._flights: set[Hashable] = set()

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

    def renew(self, generation: int) -> None:
        """Drop shared sequences of an earlier generation of the model (`Executor.generation`)."""
        if generation != self._generation:
            self._generation = generation
            self._shared.clear()

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


def with_shared(program: Program, pool: KVPool, executor: Executor) -> Generator[Operation, Any, None]:
    """The program with its `Shared` requests served by forward passes or from the pool."""
    answer: Any = None
    try:
        while True:
            operation = program.send(answer)
            answer = None  # the program has used these logits: free them
            answer = (
                (yield from _prefilled(operation, pool, executor))
                if isinstance(operation, Shared)
                else (yield operation)
            )
    except StopIteration:
        return
    finally:
        program.close()


def _prefilled(shared: Shared, pool: KVPool, executor: Executor) -> Generator[Operation, Any, tuple[PlacedChunk, ...]]:
    chunks = shared.before
    position, generation = max((chunk.end for chunk in chunks), default=0), executor.generation()
    pool.renew(generation)
    for part, ids in zip(shared.keys, shared.parts, strict=True):
        key = generation, part
        if not ids:
            continue
        while (kv := pool.shared(key)) is None and not pool.begin(key):
            yield WaitFor(partial(pool.landed, key))
        if kv is None:
            try:
                sequence = TokenSequence.for_kv(chunks, position=position)
                yield Forward((sequence,), (ids,))
                kv = executor.chunk_kv(sequence, encoded_at=position)
                pool.keep(key, kv, chunks)
                yield Release((sequence,))
            finally:
                pool.land(key)
        chunks = (*chunks, PlacedChunk(kv=kv, start=position))
        position += kv.tokens
    return chunks
