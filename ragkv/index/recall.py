"""A chunk's KV for a question: from memory, else from the store, else encoded now and kept."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from ragkv.errors import RagkvError
from ragkv.index.budget import memory_budget
from ragkv.index.index import Index
from ragkv.store import KVIdentity, MemoryTier
from ragkv.types import Encoding, KVUse, ScoredChunk

if TYPE_CHECKING:
    from ragkv.attention.kv import ChunkKV
    from ragkv.engines import Engine, Request

__all__ = ["Ahead", "Recall"]

logger = logging.getLogger(__name__)


class Ahead:
    """KV on its way from the store while something else works; what is not taken is dropped."""

    def __init__(self, load: Callable[[], dict[KVIdentity, ChunkKV]]) -> None:
        self._found: dict[KVIdentity, ChunkKV] = {}
        self._load = load
        self._thread = threading.Thread(target=self._run, name="ragkv-prefetch")
        self._thread.start()

    def take(self, identities: Sequence[KVIdentity]) -> dict[KVIdentity, ChunkKV]:
        """Those of these that were loaded; waits for the load to end."""
        self._thread.join()
        return {identity: self._found.pop(identity) for identity in identities if identity in self._found}

    def drop(self) -> None:
        """Wait for the load to end, so that the store may be closed, and forget what was not taken."""
        self._thread.join()
        self._found.clear()

    def _run(self) -> None:
        try:
            self._found = self._load()
        except RagkvError as error:
            logger.debug("nothing was loaded ahead: %s", error)  # the answer's own load meets it again, and tells


class Recall:
    """The KV of one index, for the model and prompt that it has now; threads may share one."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._store = index.store

    def identity(self, encoding: Encoding, chunk_ids: tuple[int, ...]) -> KVIdentity:
        """The store key for these tokens' KV."""
        return KVIdentity(
            model=self._index.fingerprint,
            encoding=encoding,
            prefix_ids=self._index.prefix_ids if encoding is Encoding.PREFIXED else (),
            chunk_ids=chunk_ids,
        )

    def prefix(self) -> ChunkKV | None:
        """The prefix's own KV, standalone; from the store after its first use. None for a prompt without a prefix."""
        if not self._index.prefix_ids:
            return None
        identity = self.identity(Encoding.STANDALONE, self._index.prefix_ids)

        def encode(_: Sequence[KVIdentity]) -> list[ChunkKV]:
            [made] = self._index.model.encode([self._index.prefix_ids])
            self._index.keeper.keep(lambda: self._store.keep_kv(identity, made))
            return [made]

        found, _ = self._find([identity], encode)
        return found[identity]

    def ahead(self, encoding: Encoding | None, chunks: Sequence[ScoredChunk]) -> Ahead | None:
        """Begin to load what the store has of these chunks' KV and memory has not; `drop` it in the end."""
        if encoding is None:
            return None
        identities = {
            identity.key(): identity
            for scored in chunks
            for identity in (self.identity(encoding, scored.chunk.token_ids),)
        }
        wanted = [identities[key] for key in self.memory().missing(identities)]
        device, shape = self._index.model.place, self._index.shape
        return Ahead(lambda: self._store.get_many(wanted, device=device, shape=shape)) if wanted else None

    def chunks(
        self,
        encoding: Encoding | None,
        chunks: Sequence[ScoredChunk],
        ahead: Ahead | None = None,
        *,
        keep: bool = False,
    ) -> tuple[list[ChunkKV | None], KVUse]:
        """Each chunk's KV on the model's device, and where it came from; no KV for an engine without an encoding.

        What `ahead` has loaded is not read again. What had to be encoded is stored for chunks of the index, and with
        `keep` for others too, until the next `gc`.
        """
        if encoding is None:
            return [None] * len(chunks), KVUse(hits=0, misses=0, bytes=0, tokens=0)
        identities = [self.identity(encoding, scored.chunk.token_ids) for scored in chunks]
        owners = {identity: scored.chunk.chunk_id for identity, scored in zip(identities, chunks, strict=True)}
        lost: list[KVIdentity] = []

        def encode(missing: Sequence[KVIdentity]) -> list[ChunkKV]:
            lost.extend(missing)
            prefix = self.prefix() if encoding is Encoding.PREFIXED else None
            encoded = self._index.model.encode([identity.chunk_ids for identity in missing], prefix=prefix)

            def write() -> None:
                known = self._store.chunk_many(owners[identity] for identity in missing)
                for identity, kv in zip(missing, encoded, strict=True):
                    chunk = known.get(owners[identity])
                    # an id of the caller's own may mean other tokens than the index's chunk of that id
                    if chunk is not None and chunk.token_ids == identity.chunk_ids:
                        self._store.put_kv(identity, kv, chunk_id=chunk.chunk_id)
                    elif keep:
                        self._store.keep_kv(identity, kv)

            self._index.keeper.keep(write)
            return encoded

        found, held = self._find(identities, encode, ahead)
        hits = [identity for identity in identities if identity not in lost]
        use = KVUse(
            hits=len(hits),
            misses=len(chunks) - len(hits),
            bytes=sum(found[identity].nbytes for identity in hits),
            tokens=sum(found[identity].tokens for identity in hits),
            memory_hits=sum(identity in held for identity in hits),
        )
        return [found[identity] for identity in identities], use

    def request(
        self,
        engine: Engine,
        question: str,
        scored: Sequence[ScoredChunk],
        ahead: Ahead | None = None,
        *,
        keep: bool = False,
    ) -> tuple[Request, KVUse]:
        """What the engine starts from, and how much of it came from the store; `ahead` has begun to load it."""
        from ragkv.engines import ContextChunk, Request

        index = self._index
        index.require_known_tokens(scored)
        kvs, use = self.chunks(engine.encoding, scored, ahead, keep=keep)
        request = Request(
            prefix_ids=index.prefix_ids,
            prefix=None if engine.encoding is None else self.prefix(),
            chunks=tuple(
                ContextChunk(token_ids=s.chunk.token_ids, score=s.score, kv=kv)
                for s, kv in zip(scored, kvs, strict=True)
            ),
            suffix_ids=index.prompt.suffix_ids(index.model.tokens, question),
            question=question,
            prompt=index.prompt,
        )
        return request, use

    def sizes(self, encoding: Encoding | None, scored: Sequence[ScoredChunk]) -> dict[Hashable, int]:
        """The KV that a question reads, and how many bytes each is: what it leases of the runtime's pool."""
        if encoding is None:
            return {}
        shape = self._index.shape
        read = {self.identity(encoding, s.chunk.token_ids): len(s.chunk.token_ids) for s in scored}
        read[self.identity(Encoding.STANDALONE, self._index.prefix_ids)] = len(self._index.prefix_ids)
        return {identity.key(): shape.nbytes(tokens) for identity, tokens in read.items()}

    def memory(self) -> MemoryTier:
        """What the process keeps of the index's KV on the model's device."""
        return self._store.memory(self._index.model.place, budget=self._budget)

    @cached_property
    def _budget(self) -> int:
        return memory_budget(self._index.config.memory_budget, self._index.model.place)

    def _find(
        self,
        identities: Sequence[KVIdentity],
        encode: Callable[[Sequence[KVIdentity]], list[ChunkKV]],
        ahead: Ahead | None = None,
    ) -> tuple[dict[KVIdentity, ChunkKV], set[KVIdentity]]:
        """KV on the model's device from memory, else from the store, else encoded; and what was in memory."""
        by_key = {identity.key(): identity for identity in identities}
        device = self._index.model.place

        def load(keys: Sequence[bytes]) -> dict[bytes, ChunkKV]:
            wanted = [by_key[key] for key in keys]
            found = {} if ahead is None else ahead.take(wanted)
            if rest := [identity for identity in wanted if identity not in found]:
                found |= self._store.get_many(rest, device=device, shape=self._index.shape)
            if missing := [identity for identity in wanted if identity not in found]:
                found.update(zip(missing, (kv.to(device) for kv in encode(missing)), strict=True))
            return {key: found[by_key[key]] for key in keys}

        found, held = self.memory().get_many(by_key, load)
        return {by_key[key]: kv for key, kv in found.items()}, {by_key[key] for key in held}
