"""Load KV for a question: from memory, else from the store, else encode it now and store it.

`KVLoader` loads the KV of chunks, `each_document` that of long documents in blocks (APB). `index_request` combines
either with the index's prompt into an engine's request.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from ragkv.errors import CorruptStoreError
from ragkv.index.index import DeferredWrite, Index, memory_budget
from ragkv.ingest import encode_identities
from ragkv.ingest.encoding import Blocks, bare, chunk_identity, make_blocks, plan_blocks, seen_before
from ragkv.store import KVIdentity, MemoryTier, Use
from ragkv.store.record import EncodedRecord
from ragkv.store.tables import digest
from ragkv.store.tier import Fetched
from ragkv.types import Chunk, Document, Encoding, KVUse, ScoredChunk

if TYPE_CHECKING:
    from ragkv.attention.kv import ChunkKV
    from ragkv.attention.pages import PagePool
    from ragkv.engines import ContextChunk, Engine, Request
    from ragkv.model.apb.compressors import Compressor

After: TypeAlias = list[DeferredWrite]
"""Collects the writes to do after an answer's first token."""

K = TypeVar("K", "ChunkKV", "EncodedRecord")

_Seen: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""A chunk's tokens, and those that it sees of its document."""
_UNPACKED = 4
"""1/_UNPACKED of a device's memory for packed KV is for KV that questions have unpacked."""
MOST_SEEN = 1024
"""The approximate number of chunks for which these are cached."""

logger = logging.getLogger(__name__)


class Prefetch:
    """KV that a thread loads from the store in the background; what is not taken is dropped."""

    def __init__(self, load: Callable[[], dict[KVIdentity, ChunkKV]], wanted: Sequence[KVIdentity] = ()) -> None:
        self.wanted = frozenset(wanted)
        self._found: dict[KVIdentity, ChunkKV] = {}
        self._load = load
        self._thread = threading.Thread(target=self._run, name="ragkv-prefetch")
        with suppress(RuntimeError):  # no more threads can be started: the answer loads it
            self._thread.start()

    def take(self, identities: Sequence[KVIdentity]) -> dict[KVIdentity, ChunkKV]:
        """The loaded KV among these; waits for the load to end."""
        self._wait()
        return {identity: self._found.pop(identity) for identity in identities if identity in self._found}

    def drop(self) -> None:
        """Wait for the load to end, so that the store can be closed, and drop the rest."""
        self._wait()
        self._found.clear()

    def _wait(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._found = self._load()
        except Exception as error:  # also if memory runs out: the answer's own load will raise it
            logger.debug("nothing was loaded ahead: %r", error)


class KVLoader:
    """Loads the KV of one index for its current model and prompt. Thread-safe."""

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
        """Chunk id -> the tokens of a chunk of the index, and the tokens that it sees of its document.

        Cached until the documents change, because a question needs them several times.
        """
        generation, window, prompt = self._store.generation, self._index.config.encoding.context, self._index.prompt
        tokens, (known_at, known) = self._index.model.tokens, self._seen
        if known_at != generation or len(known) > MOST_SEEN:
            self._seen = _, known = generation, {}

        def look(document: Document, chunk: Chunk, before: Iterator[Chunk]) -> None:
            ids = seen_before(chunk, before, document.title, window, prompt, tokens)
            known[chunk.chunk_id] = chunk.token_ids, ids

        wanted = dict.fromkeys(chunk.chunk_id for chunk in chunks)
        if new := [chunk_id for chunk_id in wanted if chunk_id not in known]:
            self._store.with_preceding(new, look)
        return known

    def prefix(self, after: After | None = None) -> ChunkKV | None:
        """The prefix's standalone KV, from the store after its first use. None for a prompt without a prefix.

        `after` is as in `chunks`.
        """
        if not self._index.prefix_ids:
            return None
        identity = self.identity(Encoding.STANDALONE, self._index.prefix_ids)

        def encode(_: Sequence[KVIdentity]) -> list[ChunkKV]:
            [kv] = self._index.model.encode([self._index.prefix_ids])
            made = self._store.rounded({identity: kv})[identity]
            self.write(lambda: self._store.keep_kv(identity, made), [(identity, made)], after)
            return [made]

        found, _ = self.find([identity], encode)
        return found[identity]

    def prefetch(self, encoding: Encoding | None, chunks: Sequence[ScoredChunk]) -> Prefetch | None:
        """Begin to load these chunks' KV from the store unless it is in memory; `drop` the result in the end."""
        if encoding is None:
            return None
        found = self.identities(encoding, [scored.chunk for scored in chunks])
        identities = {identity.key(): identity for identity in found}
        wanted = [identities[key] for key in self.memory().missing(identities)]
        return self._load_ahead(wanted) if wanted else None

    def chunks(
        self,
        encoding: Encoding | None,
        chunks: Sequence[ScoredChunk],
        prefetch: Prefetch | None = None,
        *,
        keep: bool = False,
        after: After | None = None,
    ) -> tuple[list[ChunkKV | None], KVUse]:
        """Each chunk's KV on the model's device, and its use; no KV for an engine without an encoding.

        Missing KV is encoded in a batch while the rest is loaded. It is stored for chunks of the index, and with `keep`
        for others too (until the next `gc`): now, or with `after` later, so that no first token waits for a write.
        """
        if encoding is None:
            return [None] * len(chunks), KVUse()
        identities = self.identities(encoding, [scored.chunk for scored in chunks])
        owners = {identity: scored.chunk.chunk_id for identity, scored in zip(identities, chunks, strict=True)}
        lost: set[KVIdentity] = set()

        def encode(missing: Sequence[KVIdentity]) -> list[ChunkKV]:
            lost.update(missing)
            prefix = self.prefix(after) if missing[0].position else None
            started = time.perf_counter()
            found = encode_identities(self._index.model, missing, lambda: prefix)
            found = self._store.rounded(found)
            encoded = [(identity, found[identity]) for identity in missing]
            self._index.write_behind.note_encoded(sum(kv.tokens for _, kv in encoded), time.perf_counter() - started)
            self.write(lambda: self._store_made(encoded, owners, keep=keep), encoded, after)
            self._share(encoded, owners)
            return [kv for _, kv in encoded]

        def store(fetched: Fetched) -> None:
            records = [(identity, record) for identity, (record, _) in fetched.items()]
            tensors = [(identity, kv) for identity, (_, kv) in fetched.items()]
            self.write(lambda: self._store_made(records, owners, keep=keep), tensors, after)

        found, held = self.find(identities, encode, prefetch, store)
        use = self.count_use(identities, owners, found, lost=lost, held=held)
        return [found[identity] for identity in identities], use

    def sizes(
        self, encoding: Encoding | None, scored: Sequence[ScoredChunk], *, whole: bool = False
    ) -> dict[Hashable, int]:
        """Bytes of each KV that a question reads, which it leases from the runtime's pool.

        `whole`: for the complete documents of the chunks.
        """
        if encoding is None:
            return {}
        shape = self._index.shape
        if whole:
            names = {each.chunk.document_id for each in scored}
            stored = {name: self._store.document(name) for name in names}
            return {("document", name): shape.nbytes(found.tokens) for name, found in stored.items() if found}
        read = set(self.identities(encoding, [each.chunk for each in scored]))
        read.add(self.identity(Encoding.STANDALONE, self._index.prefix_ids))
        return {identity.key(): shape.nbytes(identity.tokens) for identity in read}

    def memory(self) -> MemoryTier:
        """The cache of the index's KV on the model's device."""
        unstored = self._index.write_behind.unstored
        return self._store.memory(self._index.model.place, budget=self._budget, unstored=unstored)

    @cached_property
    def _budget(self) -> int:
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
        return kv if self._pages is None or kv.packed else self._pages.hold(kv)

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

    def find(
        self,
        identities: Sequence[KVIdentity],
        encode: Callable[[Sequence[KVIdentity]], list[ChunkKV]] | None = None,
        prefetch: Prefetch | None = None,
        store: Callable[[Fetched], None] | None = None,
    ) -> tuple[dict[KVIdentity, ChunkKV], set[KVIdentity]]:
        """KV on the model's device from memory, else from the store, else from a shared tier, else encoded; and the
        identities that were in memory. `store` receives KV from tiers; without it, tiers are not asked. Without
        `encode`, KV that is found nowhere is left out.
        """
        by_key = {identity.key(): identity for identity in identities}
        device = self._index.model.place

        def make(missing: Sequence[KVIdentity]) -> dict[KVIdentity, ChunkKV]:
            fetched = {} if store is None else self._index.fetch(missing)
            if fetched and store is not None:
                store(fetched)
            loaded = {identity: kv.to(device) for identity, (_, kv) in fetched.items()}
            rest = [identity for identity in missing if identity not in loaded]
            if rest and encode is not None:
                loaded.update(zip(rest, (kv.to(device) for kv in encode(rest)), strict=True))
            return loaded

        def load(keys: Sequence[bytes]) -> dict[bytes, ChunkKV]:
            wanted = [by_key[key] for key in keys]
            loaded: dict[KVIdentity, ChunkKV] = {}
            there = self._store.has_many(wanted)
            absent = [identity for identity in wanted if identity not in there]
            coming = [] if prefetch is None else [identity for identity in wanted if identity in prefetch.wanted]
            stored = [identity for identity in wanted if identity in there and identity not in coming]
            loading = self._load_ahead(stored) if absent and stored else None
            try:
                if absent:
                    loaded |= make(absent)
                loaded |= {} if prefetch is None else prefetch.take([one for one in coming if one not in loaded])
                loaded |= {} if loading is None else loading.take(stored)
            finally:
                if loading is not None:
                    loading.drop()
            if rest := [identity for identity in wanted if identity not in loaded]:
                loaded |= self._store.get_many(rest, device=device, shape=self._index.shape)
            if missing := [identity for identity in wanted if identity not in loaded]:  # damaged, or deleted meanwhile
                loaded |= make(missing)
            return {identity.key(): self._paged(kv) for identity, kv in loaded.items()}

        found, held = self.memory().get_many(by_key, load)
        return {by_key[key]: self._readable(kv) for key, kv in found.items()}, {by_key[key] for key in held}

    def _share(self, made: Sequence[tuple[KVIdentity, ChunkKV]], owners: Mapping[KVIdentity, str]) -> None:
        """Write new KV of the index's chunks to the shared tiers, in a thread of theirs."""
        if self._index.config.tiers:
            mine = [(identity, kv) for identity, kv, owner in self._owned(made, owners) if owner is not None]
            self._index.offer(mine, patient=False)

    def hold(self, made: Mapping[KVIdentity, ChunkKV]) -> None:
        """Keep new KV in memory, independent of the store."""
        by_key = {identity.key(): kv for identity, kv in made.items()}
        self.memory().get_many(by_key, lambda keys: {key: by_key[key] for key in keys})

    def _load_ahead(self, wanted: Sequence[KVIdentity]) -> Prefetch:
        device, shape = self._index.model.place, self._index.shape
        return Prefetch(lambda: self._store.get_many(wanted, device=device, shape=shape), wanted)

    def write(
        self, write: Callable[[], object], encoded: Sequence[tuple[KVIdentity, ChunkKV]], after: After | None
    ) -> None:
        """Run the write now, or add it to `after`."""
        if after is None:
            self._index.write_behind.keep(write)
        else:
            keys = [identity.key() for identity, _ in encoded]
            after.append(self._index.write_behind.defer(write, keys, sum(kv.nbytes for _, kv in encoded)))

    def _store_made(
        self,
        encoded: Sequence[tuple[KVIdentity, K]],
        owners: Mapping[KVIdentity, str],
        *,
        keep: bool,
    ) -> None:
        """Store new KV of chunks of the index, and with `keep` of others too."""
        self._store.put_many(one for one in self._owned(encoded, owners) if keep or one[2] is not None)

    def _owned(
        self, encoded: Sequence[tuple[KVIdentity, K]], owners: Mapping[KVIdentity, str]
    ) -> Iterator[tuple[KVIdentity, K, str | None]]:
        """Each with the id of its chunk; None if the index has no such chunk."""
        known = self._store.chunk_many(owners[identity] for identity, _ in encoded)
        for identity, kv in encoded:
            chunk = known.get(owners[identity])
            # the caller's chunk may have other tokens than the index's chunk with that id
            own = chunk is not None and chunk.token_ids == identity.chunk_ids
            yield identity, kv, owners[identity] if own else None

    def count_use(
        self,
        identities: Sequence[KVIdentity],
        owners: Mapping[KVIdentity, str],
        kvs: Mapping[KVIdentity, ChunkKV],
        *,
        lost: Collection[KVIdentity],
        held: Collection[KVIdentity],
    ) -> KVUse:
        """Count a question's uses of KV; `lost` had to be encoded and `held` was in memory."""
        self._index.write_behind.note_uses(
            [
                (
                    identity.key(),
                    Use(
                        tokens=kvs[identity].tokens,
                        nbytes=kvs[identity].nbytes,
                        owner=digest(owners[identity]),
                        hits=int(identity not in lost),
                        misses=int(identity in lost),
                    ),
                )
                for identity in dict.fromkeys(identities)
            ]
        )
        hits = [identity for identity in identities if identity not in lost]
        return KVUse(
            hits=len(hits),
            misses=len(identities) - len(hits),
            bytes=sum(kvs[identity].nbytes for identity in hits),
            tokens=sum(kvs[identity].tokens for identity in hits),
            memory_hits=sum(identity in held for identity in hits),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentBlocks:
    """A document's blocks in order, as an engine gets them; `best` is its best retrieved chunk."""

    best: ScoredChunk
    chunks: tuple[ContextChunk, ...]
    use: KVUse


def each_document(
    index: Index, kv_loader: KVLoader, engine: Engine, scored: Sequence[ScoredChunk], after: After | None
) -> Iterator[DocumentBlocks]:
    """The documents of these chunks, the best last. A chunk that is not from the index counts as a document.

    `after` is as in `KVLoader.chunks`.
    """
    from ragkv.model.apb.document import compressor_for

    compressor = compressor_for(engine.config.compressor, index.model)
    for best, blocks in planned(index, engine, compressor, scored):
        kvs, use = _loaded(index, kv_loader, blocks, compressor, after)
        yield DocumentBlocks(best=best, chunks=given_blocks(best, blocks, kvs), use=use)


def planned(
    index: Index, engine: Engine, compressor: Compressor, scored: Sequence[ScoredChunk]
) -> Iterator[tuple[ScoredChunk, Blocks]]:
    """The block plan of each document of these chunks, with its best chunk; the best document last.

    CorruptStoreError for unknown token ids, PromptTooLongError for a document longer than the model's positions.
    """
    for best, chunks in _documents(index, scored):
        index.require_known_tokens([replace(best, chunk=chunk) for chunk in chunks])
        blocks = plan_blocks(chunks, engine.config, compressor, model=index.fingerprint, prefix_ids=index.prefix_ids)
        index.model.require_positions(blocks.layout.end)
        yield best, blocks


def given_blocks(best: ScoredChunk, blocks: Blocks, kvs: Sequence[ChunkKV]) -> tuple[ContextChunk, ...]:
    """A document's blocks with their KV, as an engine gets them."""
    from ragkv.engines import ContextChunk

    spans = map(blocks.layout.span, range(blocks.layout.blocks))
    return tuple(
        ContextChunk(token_ids=blocks.ids[span.start : span.stop], score=best.score, kv=bare(kv))
        for span, kv in zip(spans, kvs, strict=True)
    )


def _documents(index: Index, scored: Sequence[ScoredChunk]) -> list[tuple[ScoredChunk, list[Chunk]]]:
    """Each document once, with its best chunk; the best document last."""
    by_document: dict[str, tuple[ScoredChunk, list[Chunk]]] = {}
    for candidate in reversed(scored):
        chunk = candidate.chunk
        stored = index.store.chunk(chunk.chunk_id)
        its = stored is not None and stored.token_ids == chunk.token_ids
        name = chunk.document_id if its else f"\0{chunk.chunk_id}"
        if name not in by_document:
            by_document[name] = candidate, list(index.store.chunks(chunk.document_id)) if its else [chunk]
    return list(reversed(by_document.values()))


def _loaded(
    index: Index, kv_loader: KVLoader, blocks: Blocks, compressor: Compressor, after: After | None
) -> tuple[list[ChunkKV], KVUse]:
    """The KV of a document's blocks; missing ones are encoded with the KV that other blocks pass on."""
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
        prefix = kv_loader.prefix(after)
        encoded = list(store.rounded(dict(make_blocks(blocks, wanted, index.model, compressor, prefix, load))).items())
        index.write_behind.note_encoded(sum(kv.tokens for _, kv in encoded), time.perf_counter() - started)
        own = store.chunk(blocks.owners[0]) is not None
        if own:
            kv_loader.write(lambda: store.put_many([(i, kv, owners[i]) for i, kv in encoded]), encoded, after)
            index.offer(encoded, patient=False)
        known = dict(encoded)
        return [known[identity] for identity in missing]

    def keep(fetched: Fetched) -> None:
        records = [(identity, record, owners[identity]) for identity, (record, _) in fetched.items()]
        if store.chunk(blocks.owners[0]) is not None:
            kv_loader.write(lambda: store.put_many(records), [(i, kv) for i, (_, kv) in fetched.items()], after)

    found, held = kv_loader.find(blocks.identities, encode, store=keep)
    use = kv_loader.count_use(blocks.identities, owners, found, lost=lost, held=held)
    return [found[identity] for identity in blocks.identities], use


def index_request(
    index: Index,
    kv_loader: KVLoader,
    engine: Engine,
    question: str,
    scored: Sequence[ScoredChunk],
    prefetch: Prefetch | None = None,
    *,
    keep: bool = False,
    after: After | None = None,
    suffix_ids: tuple[int, ...] | None = None,
) -> tuple[Request, KVUse]:
    """The engine's request and its KV use; the arguments are those of `KVLoader.chunks`, and the prompt's end."""
    from ragkv.engines import ContextChunk, Request

    index.require_known_tokens(scored)
    if engine.whole_documents:
        documents = list(each_document(index, kv_loader, engine, scored, after))
        context_blocks = [block for document in documents for block in document.chunks]
        use = sum((document.use for document in documents), KVUse())
    else:
        kvs, use = kv_loader.chunks(engine.reads, scored, prefetch, keep=keep, after=after)
        context_blocks = [
            ContextChunk(token_ids=s.chunk.token_ids, score=s.score, kv=kv) for s, kv in zip(scored, kvs, strict=True)
        ]
    request = Request(
        prefix_ids=index.prefix_ids,
        prefix=None if engine.encoding is None else kv_loader.prefix(after),
        chunks=tuple(context_blocks),
        suffix_ids=index.prompt.suffix_ids(index.model.tokens, question) if suffix_ids is None else suffix_ids,
        question=question,
        prompt=index.prompt,
    )
    return request, use
