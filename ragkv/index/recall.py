"""A chunk's KV for a question: from memory, else from the store, else encoded now and kept."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

from ragkv.errors import RagkvError
from ragkv.index.budget import memory_budget
from ragkv.index.index import Index
from ragkv.index.keeper import Later
from ragkv.store import KVIdentity, MemoryTier, Use
from ragkv.store.transaction import digest
from ragkv.types import Encoding, KVUse, ScoredChunk

if TYPE_CHECKING:
    from ragkv.attention.kv import ChunkKV

__all__ = ["After", "Ahead", "Recall"]

After: TypeAlias = list[Later]
"""Writes that wait until an answer has its first token."""

logger = logging.getLogger(__name__)


class Ahead:
    """KV on its way from the store while something else works; what is not taken is dropped."""

    def __init__(self, load: Callable[[], dict[KVIdentity, ChunkKV]], wanted: Sequence[KVIdentity] = ()) -> None:
        self.wanted = frozenset(wanted)
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

    def prefix(self, after: After | None = None) -> ChunkKV | None:
        """The prefix's own KV, standalone; from the store after its first use. None for a prompt without a prefix.

        `after` is as in `chunks`.
        """
        if not self._index.prefix_ids:
            return None
        identity = self.identity(Encoding.STANDALONE, self._index.prefix_ids)

        def encode(_: Sequence[KVIdentity]) -> list[ChunkKV]:
            [made] = self._index.model.encode([self._index.prefix_ids])
            self.do(lambda: self._store.keep_kv(identity, made), [(identity, made)], after)
            return [made]

        found, _ = self.find([identity], encode)
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
        return self._load_ahead(wanted) if wanted else None

    def chunks(
        self,
        encoding: Encoding | None,
        chunks: Sequence[ScoredChunk],
        ahead: Ahead | None = None,
        *,
        keep: bool = False,
        after: After | None = None,
    ) -> tuple[list[ChunkKV | None], KVUse]:
        """Each chunk's KV on the model's device, and where it came from; no KV for an engine without an encoding.

        What neither memory nor the store has is encoded together, while `ahead` and the store load the rest. It is
        stored for chunks of the index, and with `keep` for others too, until the next `gc`: now, or with `after` when
        that is done, so that no first token waits for a write.
        """
        if encoding is None:
            return [None] * len(chunks), KVUse(hits=0, misses=0, bytes=0, tokens=0)
        identities = [self.identity(encoding, scored.chunk.token_ids) for scored in chunks]
        owners = {identity: scored.chunk.chunk_id for identity, scored in zip(identities, chunks, strict=True)}
        lost: set[KVIdentity] = set()

        def encode(missing: Sequence[KVIdentity]) -> list[ChunkKV]:
            lost.update(missing)
            prefix = self.prefix(after) if encoding is Encoding.PREFIXED else None
            started = time.perf_counter()
            encoded = self._index.model.encode([identity.chunk_ids for identity in missing], prefix=prefix)
            made = list(zip(missing, encoded, strict=True))
            self._index.keeper.note_encoded(sum(kv.tokens for kv in encoded), time.perf_counter() - started)
            self.do(lambda: self._store_made(made, owners, keep=keep), made, after)
            return encoded

        found, held = self.find(identities, encode, ahead)
        hits = [identity for identity in identities if identity not in lost]
        self.note(identities, owners, found, lost)
        use = KVUse(
            hits=len(hits),
            misses=len(chunks) - len(hits),
            bytes=sum(found[identity].nbytes for identity in hits),
            tokens=sum(found[identity].tokens for identity in hits),
            memory_hits=sum(identity in held for identity in hits),
        )
        return [found[identity] for identity in identities], use

    def sizes(
        self, encoding: Encoding | None, scored: Sequence[ScoredChunk], *, whole: bool = False
    ) -> dict[Hashable, int]:
        """The KV that a question reads, and how many bytes each is: what it leases of the runtime's pool.

        `whole`: that of the documents which the chunks are from.
        """
        if encoding is None:
            return {}
        shape = self._index.shape
        if whole:
            names = {each.chunk.document_id for each in scored}
            stored = {name: self._store.document(name) for name in names}
            return {("document", name): shape.nbytes(found.tokens) for name, found in stored.items() if found}
        read = {self.identity(encoding, s.chunk.token_ids): len(s.chunk.token_ids) for s in scored}
        read[self.identity(Encoding.STANDALONE, self._index.prefix_ids)] = len(self._index.prefix_ids)
        return {identity.key(): shape.nbytes(tokens) for identity, tokens in read.items()}

    def memory(self) -> MemoryTier:
        """What the process keeps of the index's KV on the model's device."""
        unstored = self._index.keeper.unstored
        return self._store.memory(self._index.model.place, budget=self._budget, unstored=unstored)

    @cached_property
    def _budget(self) -> int:
        return memory_budget(self._index.config.memory_budget, self._index.model.place)

    def find(
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
            found: dict[KVIdentity, ChunkKV] = {}
            there = self._store.has_many(wanted)
            absent = [identity for identity in wanted if identity not in there]
            coming = [] if ahead is None else [identity for identity in wanted if identity in ahead.wanted]
            begun = [identity for identity in wanted if identity in there and identity not in coming]
            beside = self._load_ahead(begun) if absent and begun else None
            try:
                if absent:
                    found.update(zip(absent, (kv.to(device) for kv in encode(absent)), strict=True))
                found |= {} if ahead is None else ahead.take([one for one in coming if one not in found])
                found |= {} if beside is None else beside.take(begun)
            finally:
                if beside is not None:
                    beside.drop()
            if rest := [identity for identity in wanted if identity not in found]:
                found |= self._store.get_many(rest, device=device, shape=self._index.shape)
            if missing := [identity for identity in wanted if identity not in found]:  # damaged, or gone since
                found.update(zip(missing, (kv.to(device) for kv in encode(missing)), strict=True))
            return {key: found[by_key[key]] for key in keys}

        found, held = self.memory().get_many(by_key, load)
        return {by_key[key]: kv for key, kv in found.items()}, {by_key[key] for key in held}

    def there(self, identities: Sequence[KVIdentity]) -> tuple[dict[KVIdentity, ChunkKV], set[KVIdentity]]:
        """KV on the model's device of those that memory or the store has; and what was in memory."""
        by_key = {identity.key(): identity for identity in identities}

        def load(keys: Sequence[bytes]) -> dict[bytes, ChunkKV]:
            wanted = [by_key[key] for key in keys]
            found = self._store.get_many(wanted, device=self._index.model.place, shape=self._index.shape)
            return {identity.key(): kv for identity, kv in found.items()}

        found, held = self.memory().get_many(by_key, load)
        return {by_key[key]: kv for key, kv in found.items()}, {by_key[key] for key in held}

    def hold(self, made: Mapping[KVIdentity, ChunkKV]) -> None:
        """Keep what was made in memory, whatever becomes of it in the store."""
        by_key = {identity.key(): kv for identity, kv in made.items()}
        self.memory().get_many(by_key, lambda keys: {key: by_key[key] for key in keys})

    def _load_ahead(self, wanted: Sequence[KVIdentity]) -> Ahead:
        device, shape = self._index.model.place, self._index.shape
        return Ahead(lambda: self._store.get_many(wanted, device=device, shape=shape), wanted)

    def do(self, write: Callable[[], object], made: Sequence[tuple[KVIdentity, ChunkKV]], after: After | None) -> None:
        """Store what was made now, or note it for the end of whoever gave `after`."""
        if after is None:
            self._index.keeper.keep(write)
        else:
            keys = [identity.key() for identity, _ in made]
            after.append(self._index.keeper.noted(write, keys, sum(kv.nbytes for _, kv in made)))

    def _store_made(
        self, made: Sequence[tuple[KVIdentity, ChunkKV]], owners: Mapping[KVIdentity, str], *, keep: bool
    ) -> None:
        """Store what was encoded for the chunks of the index, and with `keep` for others too."""
        known = self._store.chunk_many(owners[identity] for identity, _ in made)
        wanted: list[tuple[KVIdentity, ChunkKV, str | None]] = []
        for identity, kv in made:
            chunk = known.get(owners[identity])
            # an id of the caller's own may mean other tokens than the index's chunk of that id
            own = chunk is not None and chunk.token_ids == identity.chunk_ids
            if own or keep:
                wanted.append((identity, kv, owners[identity] if own else None))
        self._store.put_many(wanted)

    def note(
        self,
        identities: Sequence[KVIdentity],
        owners: Mapping[KVIdentity, str],
        found: Mapping[KVIdentity, ChunkKV],
        lost: Collection[KVIdentity],
    ) -> None:
        """Count what a question used."""
        self._index.keeper.note_uses(
            [
                (
                    identity.key(),
                    Use(
                        tokens=found[identity].tokens,
                        nbytes=found[identity].nbytes,
                        owner=digest(owners[identity]),
                        hits=int(identity not in lost),
                        misses=int(identity in lost),
                    ),
                )
                for identity in dict.fromkeys(identities)
            ]
        )
