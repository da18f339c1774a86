"""The KV that a question reads: from memory, else from the store, else from a shared tier, else encoded and stored.

`KVSource.plan` works out once what a question reads (`Reads`). The request leases its `sizes`, `get` loads the KV of
its `identities`, and `request` makes the engine's request of it.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from ragkv.errors import CorruptStoreError
from ragkv.index.index import DeferredWrite, Index, memory_budget
from ragkv.ingest import encode_identities
from ragkv.ingest.encoding import Blocks, bare, chunk_identity, make_blocks, plan_blocks, seen_before
from ragkv.store import KVIdentity, MemoryTier, Use
from ragkv.store.record import EncodedRecord
from ragkv.store.tables import digest
from ragkv.types import Chunk, Document, Encoding, KVUse, ScoredChunk

if TYPE_CHECKING:
    from ragkv.attention.kv import ChunkKV
    from ragkv.attention.pages import PagePool
    from ragkv.engines import Engine, Request
    from ragkv.model.apb.compressors import Compressor

After: TypeAlias = list[DeferredWrite]
"""Collects the writes to do after an answer's first token."""

K = TypeVar("K", "ChunkKV", "EncodedRecord")

_Seen: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""A chunk's tokens, and those that it sees of its document."""
_UNPACKED = 4
"""1/_UNPACKED of a device's memory for packed KV is for KV that questions have unpacked."""
SEEN_CHUNKS = 1024
"""The approximate number of chunks for which these are cached."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """What a question reads of the store: its chunks, and for an engine that reads KV the `identities` of that, one per
    chunk, or one per block of its `documents`, in the prompt's order.

    `owners` are the ids of the chunks that need them, `sizes` the bytes to lease by key, the prompt's prefix included.
    """

    scored: Sequence[ScoredChunk]
    identities: Sequence[KVIdentity] = ()
    owners: Mapping[KVIdentity, str] = field(default_factory=dict)
    documents: Sequence[tuple[ScoredChunk, Blocks]] = ()
    compressor: Compressor | None = None
    sizes: Mapping[Hashable, int] = field(default_factory=dict)


class Prefetch:
    """KV that a thread loads from the store in the background; what is not taken is dropped."""

    def __init__(self, load: Callable[[], dict[KVIdentity, ChunkKV]]) -> None:
        self._loaded: dict[KVIdentity, ChunkKV] = {}
        self._load = load
        self._thread = threading.Thread(target=self._run, name="ragkv-prefetch")
        with suppress(RuntimeError):  # no more threads can be started: the answer loads it
            self._thread.start()

    def take(self, identities: Sequence[KVIdentity]) -> dict[KVIdentity, ChunkKV]:
        """The loaded KV among these; waits for the load to end."""
        self._wait()
        return {identity: self._loaded.pop(identity) for identity in identities if identity in self._loaded}

    def drop(self) -> None:
        """Wait for the load to end, so that the store can be closed, and drop the rest."""
        self._wait()
        self._loaded.clear()

    def _wait(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._loaded = self._load()
        except Exception as error:  # also if memory runs out: the answer's own load will raise it
            logger.debug("nothing was loaded ahead: %r", error)


class KVSource:
    """The KV of one index for its current model and prompt. Thread-safe."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._store = index.store
        self._unpacked: weakref.WeakKeyDictionary[ChunkKV, weakref.ref[ChunkKV]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._seen: tuple[int, dict[str, _Seen]] = -1, {}
        """What chunks see of their documents, by generation of the store."""

    def identity(self, encoding: Encoding, chunk_ids: tuple[int, ...]) -> KVIdentity:
        """The store key for these tokens' KV."""
        return chunk_identity(self._index.fingerprint, encoding, self._index.prefix_ids, chunk_ids)

    def identities(self, encoding: Encoding, chunks: Sequence[Chunk]) -> list[KVIdentity]:
        """The store keys of these chunks' KV. A chunk that is not from the index has no document to see, so its key is
        that of `prefixed` KV.
        """
        index, seen = self._index, self._seen_by(chunks) if encoding is Encoding.CONTEXT else {}
        identities = []
        for chunk in chunks:
            ids, before = seen.get(chunk.chunk_id, ((), ()))
            mine = before if ids == chunk.token_ids else ()
            if mine and not index.has_tokens(mine):  # the index may be untrusted
                raise CorruptStoreError(
                    f"the text before chunk {chunk.chunk_id!r} in the index at {index.folder} has tokens that its "
                    "model does not have: delete its document, or ingest into a new index"
                )
            identities.append(chunk_identity(index.fingerprint, encoding, index.prefix_ids, chunk.token_ids, mine))
        return identities

    def _seen_by(self, chunks: Sequence[Chunk]) -> Mapping[str, _Seen]:
        """Chunk id -> the tokens of a chunk of the index, and the tokens that it sees of its document. Cached until the
        documents change.
        """
        generation, window, prompt = self._store.generation, self._index.config.encoding.context, self._index.prompt
        tokens, (known_at, known) = self._index.model.tokens, self._seen
        if known_at != generation or len(known) > SEEN_CHUNKS:
            self._seen = _, known = generation, {}

        def look(document: Document, chunk: Chunk, before: Iterator[Chunk]) -> None:
            ids = seen_before(chunk, before, document.title, window, prompt, tokens)
            known[chunk.chunk_id] = chunk.token_ids, ids

        wanted = dict.fromkeys(chunk.chunk_id for chunk in chunks)
        if new := [chunk_id for chunk_id in wanted if chunk_id not in known]:
            self._store.with_preceding(new, look)
        return known

    def plan(self, engine: Engine, scored: Sequence[ScoredChunk]) -> Reads:
        """What an engine reads for a question with these chunks, best last.

        CorruptStoreError for token ids outside the embedding table, because the index may be untrusted;
        PromptTooLongError for a whole document that is longer than the model's positions.
        """
        index = self._index
        index.require_known_tokens(scored)
        if engine.reads is None:
            return Reads(scored=scored)
        if not engine.whole_documents:
            identities = self.identities(engine.reads, [candidate.chunk for candidate in scored])
            owners = {key: candidate.chunk.chunk_id for key, candidate in zip(identities, scored, strict=True)}
            return Reads(scored=scored, identities=identities, owners=owners, sizes=self._sizes(identities))
        from ragkv.model.apb.document import compressor_for

        compressor, documents, owners = compressor_for(engine.config.compressor, index.model), [], {}
        for best, chunks in self._documents(scored):
            index.require_known_tokens([replace(best, chunk=chunk) for chunk in chunks])
            blocks = plan_blocks(
                chunks, engine.config, compressor, model=index.fingerprint, prefix_ids=index.prefix_ids
            )
            index.model.require_positions(blocks.layout.end)
            documents.append((best, blocks))
            owners |= blocks.all
        return Reads(
            scored=scored,
            identities=[identity for _, blocks in documents for identity in blocks.identities],
            owners=owners,
            documents=documents,
            compressor=compressor,
            sizes=self._sizes(owners),
        )

    def _sizes(self, identities: Collection[KVIdentity]) -> dict[Hashable, int]:
        if self._index.vllm is not None:  # which holds it
            return {}
        prefix = self.identity(Encoding.STANDALONE, self._index.prefix_ids)
        shape = self._index.shape
        return {identity.key(): shape.nbytes(identity.tokens) for identity in {*identities, prefix}}

    def _documents(self, scored: Sequence[ScoredChunk]) -> list[tuple[ScoredChunk, list[Chunk]]]:
        """Each document once, with its best chunk; the best document last. A chunk that is not from the index counts as
        a document.
        """
        store = self._store
        by_document: dict[str, tuple[ScoredChunk, list[Chunk]]] = {}
        for candidate in reversed(scored):
            chunk = candidate.chunk
            stored = store.chunk(chunk.chunk_id)
            its = stored is not None and stored.token_ids == chunk.token_ids
            name = chunk.document_id if its else f"\0{chunk.chunk_id}"
            if name not in by_document:
                by_document[name] = candidate, list(store.chunks(chunk.document_id)) if its else [chunk]
        return list(reversed(by_document.values()))

    def prefetch(self, engine: Engine, likely: Sequence[ScoredChunk]) -> Prefetch | None:
        """Begin to load these chunks' KV from the store unless it is in memory; `drop` the result in the end."""
        if engine.reads is None or engine.whole_documents or self._index.vllm is not None:
            return None
        identities = {
            identity.key(): identity for identity in self.identities(engine.reads, [each.chunk for each in likely])
        }
        wanted = [identities[key] for key in self.memory().missing(identities)]
        return self._load_ahead(wanted) if wanted else None

    def _load_ahead(self, wanted: Sequence[KVIdentity]) -> Prefetch:
        device, shape = self._index.model.place, self._index.shape
        return Prefetch(lambda: self._store.get_many(wanted, device=device, shape=shape))

    def get(
        self, reads: Reads, prefetch: Prefetch | None = None, *, keep: bool = False, after: After | None = None
    ) -> tuple[list[ChunkKV], KVUse]:
        """The KV of `reads.identities` on the model's device, and its use.

        What no tier delivers is encoded in a batch while the rest is loaded. It is stored for chunks of the index, and
        with `keep` for others too (until the next `gc`): now, or with `after` later, so that no first token waits for
        a write.
        """
        lost: set[KVIdentity] = set()

        def owned(new: Mapping[KVIdentity, K]) -> Iterator[tuple[KVIdentity, K, str | None]]:
            """Each with the id of its chunk; None if the index has no such chunk."""
            known = self._store.chunk_many(reads.owners[identity] for identity in new)
            for identity, kv in new.items():
                chunk = known.get(reads.owners[identity])
                # the caller's chunk may have other tokens than the index's chunk with that id
                own = chunk is not None and identity.may_serve(chunk.token_ids)
                yield identity, kv, reads.owners[identity] if own else None

        def store(new: Mapping[KVIdentity, K], kvs: Mapping[KVIdentity, ChunkKV]) -> None:
            def write() -> None:
                self._store.put_many(record for record in owned(new) if keep or record[2] is not None)

            self._write(write, kvs, after)

        def make(missing: Sequence[KVIdentity]) -> dict[KVIdentity, ChunkKV]:
            fetched = self._index.fetch(missing)
            kvs = {identity: kv for identity, (_, kv) in fetched.items()}
            if fetched:
                store({identity: record for identity, (record, _) in fetched.items()}, kvs)
            if rest := [identity for identity in missing if identity not in fetched]:
                lost.update(rest)
                encoded = self._encode(reads, rest, after)
                store(encoded, encoded)
                if self._index.config.tiers:
                    mine = [(identity, kv) for identity, kv, owner in owned(encoded) if owner is not None]
                    self._index.offer(mine, patient=False)
                kvs |= encoded
            return kvs

        kvs, held = self.find(reads.identities, make, prefetch)
        hits = [identity for identity in reads.identities if identity not in lost]
        self._note_uses(reads, kvs, lost)
        return [kvs[identity] for identity in reads.identities], KVUse(
            hits=len(hits),
            misses=len(reads.identities) - len(hits),
            bytes=sum(kvs[identity].nbytes for identity in hits),
            tokens=sum(kvs[identity].tokens for identity in hits),
            memory_hits=sum(identity in held for identity in hits),
        )

    def find(
        self,
        identities: Sequence[KVIdentity],
        make: Callable[[Sequence[KVIdentity]], Mapping[KVIdentity, ChunkKV]],
        prefetch: Prefetch | None = None,
    ) -> tuple[dict[KVIdentity, ChunkKV], set[KVIdentity]]:
        """KV on the model's device from memory, else from the store, else from `make`; and the identities that were in
        memory.
        """
        by_key = {identity.key(): identity for identity in identities}
        device = self._index.model.place

        def new_kv(missing: Sequence[KVIdentity]) -> dict[KVIdentity, ChunkKV]:
            return {identity: kv.to(device) for identity, kv in make(missing).items()} if missing else {}

        def load(keys: Sequence[bytes]) -> dict[bytes, ChunkKV]:
            wanted = [by_key[key] for key in keys]
            stored = self._store.has_many(wanted)
            absent = [identity for identity in wanted if identity not in stored]
            ahead = prefetch or (self._load_ahead(list(stored)) if absent and stored else None)
            try:
                loaded = new_kv(absent)
                if ahead is not None:
                    loaded |= ahead.take([identity for identity in wanted if identity not in loaded])
            finally:
                if ahead is not None:
                    ahead.drop()
            if rest := [identity for identity in wanted if identity not in loaded]:
                loaded |= self._store.get_many(rest, device=device, shape=self._index.shape)
            loaded |= new_kv([identity for identity in rest if identity not in loaded])  # damaged, or deleted meanwhile
            return {identity.key(): self._paged(kv) for identity, kv in loaded.items()}

        kvs, held = self.memory().get_many(by_key, load)
        return {by_key[key]: self._readable(kv) for key, kv in kvs.items()}, {by_key[key] for key in held}

    def _encode(self, reads: Reads, missing: Sequence[KVIdentity], after: After | None) -> dict[KVIdentity, ChunkKV]:
        """New KV, rounded as the store rounds it: of `missing`, and of the anchors that missing blocks need."""
        model, store = self._index.model, self._store
        prefix = self.prefix(after) if reads.documents or missing[0].position else None
        started = time.perf_counter()
        encoded: dict[KVIdentity, ChunkKV] = {}
        if not reads.documents:
            encoded = encode_identities(model, missing, lambda: prefix)
        for _, blocks in reads.documents:
            new = [identity for identity in blocks.identities if identity in missing and identity not in encoded]
            anchor = blocks.anchor
            if anchor is not None and new not in ([], [blocks.identities[0]]) and not store.has_kv(anchor):
                new.append(anchor)
            if new:
                assert reads.compressor is not None
                encoded |= make_blocks(blocks, new, model, reads.compressor, prefix, self._stored)
        encoded = store.rounded(encoded)
        self._index.write_behind.note_encoded(sum(kv.tokens for kv in encoded.values()), time.perf_counter() - started)
        return encoded

    def _stored(self, identity: KVIdentity) -> ChunkKV | None:
        return self._store.get_many([identity], device=self._index.model.place, shape=self._index.shape).get(identity)

    def _write(self, write: Callable[[], object], kvs: Mapping[KVIdentity, ChunkKV], after: After | None) -> None:
        """Run the write of this KV now, or add it to `after`."""
        if after is None:
            self._index.write_behind.keep(write)
        else:
            keys = [identity.key() for identity in kvs]
            after.append(self._index.write_behind.defer(write, keys, sum(kv.nbytes for kv in kvs.values())))

    def _note_uses(self, reads: Reads, kvs: Mapping[KVIdentity, ChunkKV], lost: Collection[KVIdentity]) -> None:
        """Count the uses of this KV; `lost` had to be encoded."""
        uses = []
        for identity in dict.fromkeys(reads.identities):
            kv, hit = kvs[identity], identity not in lost
            owner = digest(reads.owners[identity])
            uses.append(
                (
                    identity.key(),
                    Use(tokens=kv.tokens, nbytes=kv.nbytes, owner=owner, hits=int(hit), misses=int(not hit)),
                )
            )
        self._index.write_behind.note_uses(uses)

    def prefix(self, after: After | None = None) -> ChunkKV | None:
        """The prefix's standalone KV, from the store after its first use. None for a prompt without a prefix.

        `after` is as in `get`.
        """
        if not self._index.prefix_ids:
            return None
        identity = self.identity(Encoding.STANDALONE, self._index.prefix_ids)

        def encode(_: Sequence[KVIdentity]) -> Mapping[KVIdentity, ChunkKV]:
            [kv] = self._index.model.encode([self._index.prefix_ids])
            rounded = self._store.rounded({identity: kv})
            self._write(lambda: self._store.keep_kv(identity, rounded[identity]), rounded, after)
            return rounded

        return self.find([identity], encode)[0][identity]

    def request(
        self,
        engine: Engine,
        reads: Reads,
        question: str,
        suffix_ids: tuple[int, ...],
        *,
        prefetch: Prefetch | None = None,
        keep: bool = False,
        after: After | None = None,
    ) -> tuple[Request, KVUse]:
        """The engine's request with the prompt's end `suffix_ids`, and its KV use; the others are as in `get`."""
        from ragkv.engines import ContextChunk, Request

        kvs: list[ChunkKV | None] = [None] * len(reads.scored)
        use, elsewhere = KVUse(), self._index.vllm is not None
        if elsewhere and not reads.documents:
            use = self._store_missing(reads)
        elif reads.identities:
            loaded, use = self.get(reads, prefetch, keep=keep, after=after)
            kvs = [*map(bare, loaded)] if reads.documents else [*loaded]
        parts = [(candidate.score, candidate.chunk.token_ids) for candidate in reads.scored]
        if reads.documents:
            parts = [
                (best.score, blocks.ids[span.start : span.stop])
                for best, blocks in reads.documents
                for span in map(blocks.layout.span, range(blocks.layout.blocks))
            ]
        seen = [identity.prefix_ids[len(self._index.prefix_ids) :] for identity in reads.identities if elsewhere]
        request = Request(
            prefix_ids=self._index.prefix_ids,
            prefix=None if engine.encoding is None or elsewhere else self.prefix(after),
            chunks=tuple(
                ContextChunk(token_ids=ids, score=score, kv=kv, seen=before)
                for (score, ids), kv, before in zip(parts, kvs, seen or [()] * len(parts), strict=True)
            ),
            suffix_ids=suffix_ids,
            question=question,
            prompt=self._index.prompt,
        )
        return request, use

    def _store_missing(self, reads: Reads) -> KVUse:
        """Encode and store what is not stored, for another process to read; nothing that is stored is loaded."""
        wanted = [*dict.fromkeys(reads.identities)]
        stored = self._store.has_many(wanted)
        if missing := [identity for identity in wanted if identity not in stored]:
            self.get(replace(reads, identities=missing), keep=True)
        prefix = self.identity(Encoding.STANDALONE, self._index.prefix_ids)
        if wanted and self._index.prefix_ids and not self._store.has_kv(prefix):
            self.prefix()
        return KVUse(
            hits=len(stored), misses=len(missing), bytes=0, tokens=sum(each.tokens for each in stored), memory_hits=0
        )

    def memory(self) -> MemoryTier:
        """The cache of the index's KV on the model's device."""
        unstored = self._index.write_behind.unstored
        return self._store.memory(self._index.model.place, budget=self._budget, unstored=unstored)

    @cached_property
    def _budget(self) -> int:
        if self._index.shape.dtype == "uint8":  # its bytes are not kept: llama.cpp has them in its cells
            return 0
        whole = memory_budget(self._index.config.memory_budget, self._index.model.place)
        return whole - whole // _UNPACKED if self._unpacks else whole

    @property
    def _unpacks(self) -> bool:
        """Whether KV in a device's memory is packed, and its kernels need it unpacked."""
        packing = self._store.codec.packing(self._index.shape)
        return self._index.model.device.type != "cpu" and packing is not None

    @cached_property
    def _pages(self) -> PagePool | None:
        """Pages for the KV in memory, where a kernel reads many chunks at once (`ragkv.attention.pages`)."""
        from ragkv.attention import varlen
        from ragkv.attention.pages import PagePool

        model = self._index.model
        capped = getattr(model.config, "attn_logit_softcapping", None) is not None
        budget = self._budget // (_UNPACKED - 1) if self._unpacks else self._budget
        return None if capped or model.device.type not in varlen.DEVICES else PagePool(model.place, budget)

    def _paged(self, kv: ChunkKV) -> ChunkKV:
        return kv if kv.packed or self._pages is None else self._pages.hold(kv)

    def _readable(self, kv: ChunkKV) -> ChunkKV:
        """The KV in the form that the device's kernels read: unpacked, once for all questions that use it."""
        if not kv.packed or self._index.model.device.type == "cpu":
            return kv
        with self._lock:
            readable = self._unpacked.get(kv, lambda: None)()
            if readable is None:
                readable = kv.wide() if self._pages is None else self._pages.hold(kv).wide()
                self._unpacked[kv] = weakref.ref(readable)
            return readable
