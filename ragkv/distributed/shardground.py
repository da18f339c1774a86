"""What answers stand on where the chunks' KV lies on several ranks (`ragkv.index.ground`)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ragkv.attention.kv import ChunkKV
from ragkv.distributed.group import Group
from ragkv.distributed.shardbooks import ShardBooks, rank_of
from ragkv.distributed.shardsearch import ShardFinder, gathered, packed, unpacked
from ragkv.errors import RagkvError, RetrievalError
from ragkv.index.finder import Finder
from ragkv.index.ground import IndexGround
from ragkv.index.index import Index
from ragkv.index.recall import After, Ahead, Recall
from ragkv.index.task import Task
from ragkv.types import Encoding, KVUse, ScoredChunk

if TYPE_CHECKING:
    from ragkv.engines import ContextChunk, Request
    from ragkv.runtime import Runtime

__all__ = ["ShardGround"]


class ShardGround(IndexGround):
    """An index of which each rank has documents of its own (`shards`), or holds the KV of some chunks.

    All ranks ask it the same in the same order. `index` is the one on this rank; `runtime` takes its steps together
    with those of the other ranks.
    """

    def __init__(self, index: Index, group: Group, runtime: Runtime, *, shards: bool) -> None:
        self._shards = ShardFinder(index, group) if shards else None
        super().__init__(index, self._shards or Finder(index), Recall(index))
        self._group = group
        self._runtime = runtime
        self._owners: Mapping[str, int] = {}
        self._prefixes: dict[tuple[int, ...], ChunkKV] = {}
        self.sizes = self._sizes_here
        self.ahead = self._nothing_ahead

    @property
    def runtime(self) -> Runtime:
        return self._runtime

    def find(self, task: Task, on_candidates: Callable[[list[ScoredChunk]], None]) -> list[ScoredChunk]:
        if self._shards is not None:
            found = super().find(task, on_candidates)
            self._owners = {s.chunk.chunk_id: self._shards.owners.get(s.chunk.chunk_id, 0) for s in found}
            return found
        found = self._first_finds(task, on_candidates)
        self._owners = {s.chunk.chunk_id: rank_of(s.chunk.chunk_id, self._group.size) for s in found}
        return found

    def _first_finds(self, task: Task, on_candidates: Callable[[list[ScoredChunk]], None]) -> list[ScoredChunk]:
        """What rank 0 finds: the others' copies of the index may not be the same to the last document."""
        mine: list[Any] | str = []
        error: RagkvError | None = None
        if self._group.rank == 0:
            try:
                mine = packed(super().find(task, on_candidates))
            except RagkvError as failure:
                mine, error = str(failure), failure
        told = gathered(self._group, mine)[0]
        if isinstance(told, str):
            raise error or RetrievalError(told)
        return unpacked(told, 0)

    def request(
        self, task: Task, scored: Sequence[ScoredChunk], ahead: Ahead | None, after: After
    ) -> tuple[Request, KVUse]:
        from ragkv.engines import Request

        index = self._index
        index.require_known_tokens(scored)
        prefix = None if task.engine.encoding is None else self._prefix(after)
        given, use = (self._books if task.engine.whole_documents else self._chunks)(task, scored, after)
        request = Request(
            prefix_ids=index.prefix_ids,
            prefix=prefix,
            chunks=tuple(given),
            suffix_ids=index.prompt.suffix_ids(index.model.tokens, task.question),
            question=task.question,
            prompt=index.prompt,
        )
        numbers = torch.tensor([use.hits, use.misses, use.bytes, use.tokens, use.memory_hits])
        hits, misses, nbytes, tokens, held = self._group.gather(numbers).sum(0).tolist()
        return request, KVUse(hits=hits, misses=misses, bytes=nbytes, tokens=tokens, memory_hits=held)

    def _chunks(self, task: Task, scored: Sequence[ScoredChunk], after: After) -> tuple[list[ContextChunk], KVUse]:
        """Each chunk, with its KV where it is this rank's; and what this rank has loaded."""
        from ragkv.engines import ContextChunk

        encoding, mine = task.engine.encoding, self._mine(scored)
        kvs, use = self._recall.chunks(encoding, mine, keep=task.keep, after=after)
        here = {s.chunk.chunk_id: kv for s, kv in zip(mine, kvs, strict=True)}
        return [
            ContextChunk(token_ids=s.chunk.token_ids, score=s.score, kv=self._kv(encoding, s, here)) for s in scored
        ], use

    def _books(self, task: Task, scored: Sequence[ScoredChunk], after: After) -> tuple[list[ContextChunk], KVUse]:
        """The blocks of the documents that the chunks are from, with their KV where they are this rank's."""
        books = ShardBooks(self._index, self._recall, self._group, task.engine)
        if self._shards is not None:
            return books.sharded(scored, self._mine(scored), after)
        return books.split(scored, self._prefix(after), after)

    def _kv(self, encoding: Encoding | None, scored: ScoredChunk, here: Mapping[str, ChunkKV | None]) -> ChunkKV | None:
        """A chunk's KV, or what stands for it where another rank has it."""
        chunk_id, tokens = scored.chunk.chunk_id, len(scored.chunk.token_ids)
        if encoding is None or not tokens:
            return None
        owner = self._owners[chunk_id]
        if (kv := here.get(chunk_id)) is not None:
            return replace(kv, owner=owner)
        at = len(self._index.prefix_ids) if encoding is Encoding.PREFIXED else 0
        return ChunkKV.elsewhere(owner=owner, layers=len(self._index.shape.layers), tokens=tokens, encoded_at=at)

    def _prefix(self, after: After) -> ChunkKV | None:
        """The prefix's KV, the same bits on all ranks: rank 0's, which it tells once."""
        ids = self._index.prefix_ids
        if not ids:
            return None
        if ids not in self._prefixes:
            kv = self._recall.prefix(after)
            assert kv is not None
            self._prefixes = {
                ids: replace(
                    kv,
                    keys=tuple(self._group.first(key) for key in kv.keys),
                    values=tuple(self._group.first(value) for value in kv.values),
                )
            }
        return self._prefixes[ids]

    def _mine(self, scored: Sequence[ScoredChunk]) -> list[ScoredChunk]:
        return [s for s in scored if self._owners[s.chunk.chunk_id] == self._group.rank and s.chunk.token_ids]

    def _sizes_here(
        self, encoding: Encoding | None, scored: Sequence[ScoredChunk], *, whole: bool = False
    ) -> dict[Hashable, int]:
        if not whole or self._shards is not None:
            return self._recall.sizes(encoding, self._mine(scored), whole=whole)
        return {
            what: -(-size // self._group.size)
            for what, size in self._recall.sizes(encoding, scored, whole=True).items()
        }

    def _nothing_ahead(self, encoding: Encoding | None, chunks: Sequence[ScoredChunk]) -> Ahead | None:
        return None  # who holds a chunk is known when all are found
