"""The first executor: transformers' modules with ragkv's attention, all sequences of a step in one forward pass.

`ContextLayout` copies chunks together where that is faster than to read them one by one.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from ragkv.attention import in_place
from ragkv.attention.kv import ChunkKV, PlacedChunk
from ragkv.attention.rope import Rotary
from ragkv.attention.sequence import (
    ChunkGroup,
    KVArena,
    KVCache,
    TokenSequence,
    join,
    worth_joining,
)
from ragkv.model.module_state import ModuleState
from ragkv.runtime.executor import ExecutorTraits
from ragkv.runtime.graphs import DecodeGraph

if TYPE_CHECKING:
    from ragkv.model.language_model import LanguageModel

logger = logging.getLogger(__name__)

SHARED_BY = 2.5
"""From this many sequences per chunk, on average, a chunk is read in place for all of them and not copied for each."""


class BatchExecutor:
    """`Executor` over a `LanguageModel`, which it does not keep alive: the model holds its runtime."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = weakref.ref(model)
        self._arena = KVArena()
        self._layout = ContextLayout()
        self._graph = DecodeGraph()
        self._state: ModuleState | None = None
        self._generation = 0

    @property
    def model(self) -> LanguageModel:
        model = self._model()
        if model is None:
            raise ReferenceError("the runtime's model has been freed: keep a reference to it while it is in use")
        return model

    @cached_property
    def traits(self) -> ExecutorTraits:
        return ExecutorTraits(name="transformers", device=self.model.device)

    def generation(self) -> int:
        if self._state is None or not self._state.same_numbers():
            self._state = ModuleState(self.model.network)
            self._generation += 1
        return self._generation

    def reserve(
        self, sequences: Sequence[TokenSequence], ids: Sequence[Sequence[int]], *, answer: int, running: int
    ) -> None:
        last = max(max(sequence.places(len(some))) for sequence, some in zip(sequences, ids, strict=True))
        self.model.require_positions(last + 1)
        for sequence, some in zip(sequences, ids, strict=True):
            fresh = not sequence.cache.length and sequence.cache.reserve  # without a reserve it reads only once
            if fresh:
                sequence.cache = self._arena.place(len(some), answer, running)

    def lay_out(
        self, sequences: Sequence[TokenSequence], ids: Sequence[Sequence[int]], active: Sequence[TokenSequence]
    ) -> None:
        if not self.model.joins:
            return
        waiting = [
            (sequence, len(some)) for sequence, some in zip(sequences, ids, strict=True) if not sequence.laid_out
        ]
        joining = [sequence for sequence, count in waiting if count == 1 and sequence.cache.length]
        joining += self._layout.in_common([sequence for sequence, _ in waiting if not sequence.cache.length])
        if not joining:
            return
        try:
            self._layout.lay_out(joining, active, self.model.rotary, windowed=bool(self.model.windows))
        except (MemoryError, RuntimeError) as error:  # only an optimisation
            logger.warning("a context's chunks are read one by one, because there is no memory to join them: %s", error)
        for sequence in joining:
            sequence.laid_out = True

    def forward(self, sequences: Sequence[TokenSequence], ids: Sequence[Sequence[int]]) -> Tensor:
        return self._graph.step(self.model, sequences, ids)

    def copied(self, chunks: Sequence[PlacedChunk], *, reserve: int) -> KVCache:
        return KVCache.joined(chunks, self.model.rotary, reserve=reserve)

    def chunk_kv(self, sequence: TokenSequence, *, encoded_at: int) -> ChunkKV:
        return sequence.cache.chunk_kv(encoded_at=encoded_at)

    def release(self, sequences: Sequence[TokenSequence]) -> None:
        for sequence in sequences:
            sequence.cache = KVCache()

    def request_ended(self) -> None:
        self._graph.forget()


class ContextLayout:
    """Chunk KV that was joined, or converted to float32, for decoding; shared by all sequences that read it."""

    def __init__(self) -> None:
        self._joined: weakref.WeakValueDictionary[Hashable, ChunkKV] = weakref.WeakValueDictionary()
        # held as long as the joined KV, so that their id() is not reused
        self._originals: weakref.WeakKeyDictionary[ChunkKV, tuple[ChunkKV, ...]] = weakref.WeakKeyDictionary()

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
