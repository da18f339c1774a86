"""The long documents that a question's chunks are from, in blocks: from the store, or encoded now and kept (APB)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ragkv.index.recall import After, Recall
from ragkv.ingest.block import Blocks, bare, make_blocks, plan_blocks
from ragkv.types import Chunk, KVUse, ScoredChunk

if TYPE_CHECKING:
    from ragkv.attention.kv import ChunkKV
    from ragkv.engines import ContextChunk, Engine
    from ragkv.index.index import Index
    from ragkv.model.apb import Compressor
    from ragkv.store import KVIdentity

__all__ = ["OneDocument", "each_document", "given_blocks", "planned", "whole_documents"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OneDocument:
    """A document's blocks, in order, as an engine receives them; `best` is its best chunk that was found."""

    best: ScoredChunk
    given: tuple[ContextChunk, ...]
    use: KVUse


def whole_documents(
    index: Index, recall: Recall, engine: Engine, scored: Sequence[ScoredChunk], after: After | None
) -> tuple[list[ContextChunk], KVUse]:
    """The blocks of the documents that these chunks are from, best document last, and where their KV came from.

    `after` is as in `Recall.chunks`. A chunk that is not of the index is a document of its own.
    """
    found: list[ContextChunk] = []
    use = KVUse(hits=0, misses=0, bytes=0, tokens=0)
    for document in each_document(index, recall, engine, scored, after):
        found += document.given
        use += document.use
    return found, use


def each_document(
    index: Index, recall: Recall, engine: Engine, scored: Sequence[ScoredChunk], after: After | None
) -> Iterator[OneDocument]:
    """`whole_documents`, one after another."""
    from ragkv.model.apb.choice import compressor_for

    compressor = compressor_for(engine.config.compressor, index.model)
    for best, blocks in planned(index, engine, compressor, scored):
        kvs, use = _loaded(index, recall, blocks, compressor, after)
        yield OneDocument(best=best, given=given_blocks(best, blocks, kvs), use=use)


def planned(
    index: Index, engine: Engine, compressor: Compressor, scored: Sequence[ScoredChunk]
) -> Iterator[tuple[ScoredChunk, Blocks]]:
    """How each of the documents that these chunks are from is cut, with its best chunk; the best document last.

    CorruptStoreError for tokens that the model does not have, PromptTooLongError for a document beyond its positions.
    """
    for best, chunks in _documents(index, scored):
        index.require_known_tokens([replace(best, chunk=chunk) for chunk in chunks])
        blocks = plan_blocks(chunks, engine.config, compressor, model=index.fingerprint, prefix_ids=index.prefix_ids)
        index.model.require_positions(blocks.layout.end)
        yield best, blocks


def given_blocks(best: ScoredChunk, blocks: Blocks, kvs: Sequence[ChunkKV]) -> tuple[ContextChunk, ...]:
    """A document's blocks with their KV, as an engine receives them."""
    from ragkv.engines import ContextChunk

    spans = map(blocks.layout.span, range(blocks.layout.blocks))
    return tuple(
        ContextChunk(token_ids=blocks.ids[span.start : span.stop], score=best.score, kv=bare(kv))
        for span, kv in zip(spans, kvs, strict=True)
    )


def _documents(index: Index, scored: Sequence[ScoredChunk]) -> list[tuple[ScoredChunk, list[Chunk]]]:
    """Each document once, with its best chunk; the best document last, as the best chunk is."""
    found: dict[str, tuple[ScoredChunk, list[Chunk]]] = {}
    for each in reversed(scored):
        chunk = each.chunk
        stored = index.store.chunk(chunk.chunk_id)
        its = stored is not None and stored.token_ids == chunk.token_ids
        name = chunk.document_id if its else f"\0{chunk.chunk_id}"
        if name not in found:
            found[name] = each, list(index.store.chunks(chunk.document_id)) if its else [chunk]
    return list(reversed(found.values()))


def _loaded(
    index: Index, recall: Recall, blocks: Blocks, compressor: Compressor, after: After | None
) -> tuple[list[ChunkKV], KVUse]:
    """The KV of a document's blocks; what is missing is encoded, with what it needs of the others."""
    store, place = index.store, index.model.place
    owners = blocks.all
    lost: set[KVIdentity] = set()

    def load(identity: KVIdentity) -> ChunkKV | None:
        return store.get_many([identity], device=place, shape=index.shape).get(identity)

    def encode(missing: Sequence[KVIdentity]) -> list[ChunkKV]:
        lost.update(missing)
        wanted = list(missing)
        if blocks.anchor is not None and any(identity != blocks.identities[0] for identity in missing):
            wanted += [] if store.has_kv(blocks.anchor) else [blocks.anchor]
        started = time.perf_counter()
        prefix = recall.prefix(after)
        made = list(make_blocks(blocks, wanted, index.model, compressor, prefix, load))
        index.keeper.note_encoded(sum(kv.tokens for _, kv in made), time.perf_counter() - started)
        own = store.chunk(blocks.owners[0]) is not None
        if own:
            recall.do(lambda: store.put_many([(i, kv, owners[i]) for i, kv in made]), made, after)
        known = dict(made)
        return [known[identity] for identity in missing]

    found, held = recall.find(blocks.identities, encode)
    hits = [identity for identity in blocks.identities if identity not in lost]
    recall.note(blocks.identities, dict(zip(blocks.identities, blocks.owners, strict=True)), found, lost)
    return [found[identity] for identity in blocks.identities], KVUse(
        hits=len(hits),
        misses=len(lost),
        bytes=sum(found[identity].nbytes for identity in hits),
        tokens=sum(found[identity].tokens for identity in hits),
        memory_hits=sum(identity in held for identity in hits),
    )
