"""The long documents of an index over several ranks: whose blocks are whose, loaded there or encoded now (APB §3.5)."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ragkv.attention.kv import ChunkKV
from ragkv.distributed.group import Group
from ragkv.distributed.lockstep import Lockstep
from ragkv.distributed.shardsearch import gathered
from ragkv.errors import RanksError, UsageError
from ragkv.index.index import Index
from ragkv.index.recall import After, Recall
from ragkv.index.wholedocument import OneDocument, each_document, given_blocks, planned
from ragkv.ingest.block import Blocks, make_blocks, stored_block, with_choice
from ragkv.types import KVUse, ScoredChunk

if TYPE_CHECKING:
    from ragkv.engines import ContextChunk, Engine
    from ragkv.model.apb import Compressor
    from ragkv.store import KVIdentity

__all__ = ["ShardBooks", "rank_of"]

_NOTHING = KVUse(hits=0, misses=0, bytes=0, tokens=0)


def rank_of(name: str, size: int) -> int:
    """The rank that holds what is called so, the same for as long as there are `size` ranks."""
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()) % size


class ShardBooks:
    """The documents that a question's chunks are from, for an engine that reads whole ones. All ranks ask alike."""

    def __init__(self, index: Index, recall: Recall, group: Group, engine: Engine) -> None:
        self._index = index
        self._recall = recall
        self._group = group
        self._engine = engine

    def sharded(
        self, scored: Sequence[ScoredChunk], mine: Sequence[ScoredChunk], after: After
    ) -> tuple[list[ContextChunk], KVUse]:
        """Of documents that each lie on one rank, the best last; `mine` are the chunks whose documents lie here.

        UsageError on all ranks when one rank's document cannot be read as a whole.
        """
        found: list[OneDocument] = []
        failure: UsageError | None = None
        try:
            found = list(each_document(self._index, self._recall, self._engine, mine, after))
        except UsageError as error:  # the others have begun, and wait for what is told next
            failure = error
        told = gathered(self._group, [_told(one) for one in found] if failure is None else str(failure))
        if failures := [each for each in told if isinstance(each, str)]:
            raise failure or UsageError(failures[0])
        here = {one.best.chunk.chunk_id: one for one in found}
        there = [(rank, told_of) for rank, each in enumerate(told) for told_of in each]
        places = {each.chunk.chunk_id: place for place, each in enumerate(scored)}
        given: list[ContextChunk] = []
        try:
            for rank, (best, blocks) in sorted(there, key=lambda one: places[one[1][0]]):
                one = here[best] if rank == self._group.rank else None
                given += self._given(scored[places[best]].score, blocks, rank, one)
        except (TypeError, ValueError, KeyError) as error:
            raise RanksError(
                f"What a rank says of its documents cannot be read ({error}); run the same version on all ranks."
            ) from error
        return given, sum((one.use for one in found), _NOTHING)

    def split(
        self, scored: Sequence[ScoredChunk], prefix: ChunkKV | None, after: After
    ) -> tuple[list[ContextChunk], KVUse]:
        """Of documents that all ranks have, the best last: block h lies on rank h mod n, a short document on any one.

        Blocks that are nowhere are encoded by all ranks together, each its own. UsageError on all ranks when they do
        not have the same documents.
        """
        from ragkv.model.apb.choice import compressor_for

        compressor = compressor_for(self._engine.config.compressor, self._index.model)
        plans = list(planned(self._index, self._engine, compressor, scored))
        self._require_same([blocks for _, blocks in plans])
        given: list[ContextChunk] = []
        use = _NOTHING
        for best, blocks in plans:
            kvs, of_one = self._part(blocks, compressor, prefix, after)
            given += given_blocks(best, blocks, kvs)
            use += of_one
        return given, use

    def _given(self, score: float, blocks: Sequence[Any], rank: int, one: OneDocument | None) -> list[ContextChunk]:
        """A document that lies on a rank: its blocks, or what stands for them where that is another one."""
        from ragkv.engines import ContextChunk

        if one is not None:
            return [replace(each, kv=replace(each.stored(), owner=rank)) for each in one.given]
        return [
            ContextChunk(token_ids=tuple(map(int, ids)), score=score, kv=self._elsewhere(rank, len(ids), int(at)))
            for at, ids in blocks
        ]

    def _require_same(self, plans: Sequence[Blocks]) -> None:
        keys = [identity.key().hex() for blocks in plans for identity in blocks.identities]
        mine = hashlib.blake2b(repr(keys).encode(), digest_size=32).digest()
        for rank, other in enumerate(told := self._group.gather_bytes(mine)):
            if other != told[0]:
                raise UsageError(
                    f"Rank {rank} has other versions of the documents than rank 0, or none; give all ranks the same "
                    "index, or name shards with {rank} or --shards."
                )

    def _part(
        self, blocks: Blocks, compressor: Compressor, prefix: ChunkKV | None, after: After
    ) -> tuple[list[ChunkKV], KVUse]:
        """The KV of a document's blocks where they are this rank's, else what stands for it."""
        rank, size, layout = self._group.rank, self._group.size, blocks.layout
        owners = [h % size for h in range(layout.blocks)]
        if layout.blocks == 1:
            owners = [rank_of(blocks.identities[0].key().hex(), size)]
        mine = {identity: h for h, identity in enumerate(blocks.identities) if owners[h] == rank}
        found, held = self._recall.there(list(mine))
        made: dict[KVIdentity, ChunkKV] = {}
        there = torch.zeros(layout.blocks, dtype=torch.uint8)
        there[[mine[identity] for identity in found]] = 1
        if not self._group.gather(there).amax(0).all():
            started = time.perf_counter()
            encode = self._alone if layout.blocks == 1 else self._together
            made = encode(blocks, compressor, prefix, mine, found)
            self._index.keeper.note_encoded(sum(kv.tokens for kv in made.values()), time.perf_counter() - started)
            self._keep(blocks, made, after)
        kvs = {**found, **made}
        self._recall.note(list(mine), {i: blocks.owners[h] for i, h in mine.items()}, kvs, set(made))
        hits = [identity for identity in mine if identity not in made]
        use = KVUse(
            hits=len(hits),
            misses=len(mine) - len(hits),
            bytes=sum(kvs[identity].nbytes for identity in hits),
            tokens=sum(kvs[identity].tokens for identity in hits),
            memory_hits=len(held.intersection(hits)),
        )
        return [
            replace(kvs[identity], owner=rank)
            if identity in mine
            else self._elsewhere(owners[h], len(layout.span(h)), layout.position(h))
            for h, identity in enumerate(blocks.identities)
        ], use

    def _alone(
        self,
        blocks: Blocks,
        compressor: Compressor,
        prefix: ChunkKV | None,
        mine: Mapping[KVIdentity, int],
        found: Mapping[KVIdentity, ChunkKV],
    ) -> dict[KVIdentity, ChunkKV]:
        """A document of one block, where it is this rank's."""
        missing = [identity for identity in mine if identity not in found]
        return dict(make_blocks(blocks, missing, self._index.model, compressor, prefix, lambda _: None))

    def _together(
        self,
        blocks: Blocks,
        compressor: Compressor,
        prefix: ChunkKV | None,
        mine: Mapping[KVIdentity, int],
        found: Mapping[KVIdentity, ChunkKV],
    ) -> dict[KVIdentity, ChunkKV]:
        """All ranks encode what any of them lacks, each its own blocks; what this rank has made, and the anchor."""
        from ragkv.model.apb import Block, Book

        model, layout = self._index.model, blocks.layout
        known: dict[int, Block] = {}
        for identity, kv in found.items():
            block = stored_block(kv, layout.passed(mine[identity]), model)
            if block is not None:
                known[mine[identity]] = block
        anchor, made = None, {}
        if blocks.anchor is not None and len(known) < len(mine):
            anchor = self._recall.there([blocks.anchor])[0].get(blocks.anchor)
        book = Book(model=model, layout=layout, ids=blocks.ids, compressor=compressor, prefix=prefix, anchor_kv=anchor)
        if blocks.anchor is not None and anchor is None and len(known) < len(mine):
            anchor = book.anchor()
            assert anchor is not None
            book, made = replace(book, anchor_kv=anchor), {blocks.anchor: anchor}
        for h, block in enumerate(Lockstep(self._group).run(book, known)):
            identity = blocks.identities[h]
            if identity in mine and h not in known:
                made[identity] = with_choice(replace(block, kv=replace(block.kv, owner=None)))
        return made

    def _keep(self, blocks: Blocks, made: Mapping[KVIdentity, ChunkKV], after: After) -> None:
        """Store what was made, when the first token is there; until then it is in memory."""
        store, owners, pairs = self._index.store, blocks.all, list(made.items())
        self._recall.hold(made)
        if pairs and store.chunk(blocks.owners[0]) is not None:
            self._recall.do(lambda: store.put_many([(i, kv, owners[i]) for i, kv in pairs]), pairs, after)

    def _elsewhere(self, rank: int, tokens: int, encoded_at: int) -> ChunkKV:
        layers = len(self._index.shape.layers)
        return ChunkKV.elsewhere(owner=rank, layers=layers, tokens=tokens, encoded_at=encoded_at)


def _told(one: OneDocument) -> list[Any]:
    """A document for the other ranks: its best chunk, and of each block where it was encoded and its tokens."""
    blocks = [[each.stored().encoded_at, list(each.token_ids)] for each in one.given]
    return [one.best.chunk.chunk_id, blocks]
