"""The KV of a store: read, written ahead of documents and behind questions, and kept within the budget."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from ragkv.attention.shape import KVShape
from ragkv.errors import CorruptStoreError
from ragkv.store.document import holds
from ragkv.store.format.identity import KVIdentity
from ragkv.store.format.record import EncodedRecord
from ragkv.store.format.use import UseRow
from ragkv.store.history import generation
from ragkv.store.memory import MemoryTier
from ragkv.store.reader import KVReader, read_many, warn_unusable
from ragkv.store.seal import DamagedError
from ragkv.store.transaction import (
    INDEX_OWNER,
    Transaction,
    digest,
)
from ragkv.store.upkeep.check import chunk_named
from ragkv.store.upkeep.eviction import Arrival
from ragkv.store.upkeep.stats import (
    KVRecord,
    orphans,
    records_of,
)
from ragkv.store.upkeep.usage import (
    BUDGET,
    Ledger,
    Use,
    kv_bytes,
    read_budget,
    read_ledger,
    read_use,
    record_uses,
)
from ragkv.types import Chunk

if TYPE_CHECKING:
    from ragkv.attention.kv import ChunkKV, Place

from ragkv.store.openstore import KVRecords, OpenStore

__all__ = ["KVStore"]

STAGE_BYTES = 64 << 20


class KVStore(OpenStore):
    """The part of `Store` that keeps KV."""

    def get_kv(self, identity: KVIdentity) -> ChunkKV | None:
        """The chunk's KV in new tensors; None when it is not there or, with a warning in the log, cannot be trusted."""
        return self.get_many([identity]).get(identity)

    def get_many(
        self, identities: Iterable[KVIdentity], *, device: Place | None = None, shape: KVShape | None = None
    ) -> dict[KVIdentity, ChunkKV]:
        """The KV of several chunks, from one snapshot, on the CPU or on `device`; misses are left out (see `get_kv`).

        Of a model whose layers are on several devices, `device` names one for each layer.

        A caller who has the model gives the `shape` of its KV: a record of another shape is then a miss. What the store
        itself says about shapes may be wrong, if somebody else made it.
        """
        wanted = list(dict.fromkeys(identities))
        try:
            with self._live().read() as txn:
                if device is None or (not isinstance(device, tuple) and device.type == "cpu"):
                    return read_many(txn, wanted, shape)
                from ragkv.store.mapped import move_many

                return move_many(txn, wanted, device, shape)
        except CorruptStoreError as error:
            # LMDB cannot read a page of one of the records. Read them one by one, so that the others are found.
            if len(wanted) == 1:
                warn_unusable(wanted[0].key(), error)
                return {}
            return {of: kv for one in wanted for of, kv in self.get_many([one], device=device, shape=shape).items()}

    def open_kv(self, identity: KVIdentity) -> KVReader | None:
        """The chunk's KV, to be read layer by layer; None as in `get_kv`."""
        try:
            return KVReader.open(self._live(), identity)
        except CorruptStoreError as error:
            warn_unusable(identity.key(), error)
            return None

    @contextmanager
    def mapped_kv(self, identity: KVIdentity) -> Iterator[ChunkKV | None]:
        """The chunk's KV as views of the file, checked, for as long as the block lasts; None as in `get_kv`.

        The tensors are read-only and are emptied at the end of the block. The block holds a read transaction: keep it
        short, and do not use the store within it.
        """
        from ragkv.store.mapped import forget, map_record

        kv, held = None, ExitStack()
        try:
            with ExitStack() as stack:
                txn = stack.enter_context(self._live().read())
                kv = map_record(txn, identity)
                held = stack.pop_all()
        except CorruptStoreError as error:
            warn_unusable(identity.key(), error)
        try:
            yield kv
        finally:
            if kv is not None:
                forget(kv)
            held.close()  # without the block's own exception, which is no error of the store

    def memory(
        self, device: Place | str = "cpu", *, budget: int | None = None, unstored: Container[bytes] = ()
    ) -> MemoryTier:
        """The KV that this process keeps in memory on a device (or several), shared by all stores of one path.

        `budget`, when given, sets its budget in bytes, which is 0 at first. KV that was deleted from the store is
        dropped; `unstored` names what is yet to be stored.
        """
        tier = self._live().memory(str(device))
        if budget is not None:
            tier.resize(budget)
        with self._live().read() as txn:
            tier.retain(
                generation(txn), lambda keys: [key for key in keys if key in unstored or txn.get("kv", key) is not None]
            )
        return tier

    def has_kv(self, identity: KVIdentity) -> bool:
        """Whether the store has a record of exactly this identity. Its segments are only checked by `get_kv`."""
        with self._live().read() as txn:
            return holds(txn, identity.key(), identity)

    def kv_of(self, chunk_id: str) -> list[KVRecord]:
        """The KV records of a chunk as their manifests describe them; the KV itself is not read."""
        with self._live().read() as txn:
            return records_of(txn, chunk_id)

    def put_kv(self, identity: KVIdentity, kv: ChunkKV, *, chunk_id: str) -> bool:
        """Store KV that a question had to compute, replacing a bad record.

        False when the chunk was deleted, or when the budget holds nothing that is worth less.
        """
        return bool(self.put_many([(identity, kv, chunk_id)]))

    def put_many(self, made: Iterable[tuple[KVIdentity, ChunkKV, str | None]]) -> set[bytes]:
        """`put_kv` for several, about 64 MiB in a transaction; returns the keys of those that were stored.

        Without a chunk's id, KV belongs to the index: it is kept until the next `gc`, or until it has to make room.
        """
        self._refuse_readonly()
        stored, size, batch = set[bytes](), 0, list[Arrival]()
        for identity, kv, chunk_id in made:
            (record,) = self._encode([(identity, kv)])
            owner = INDEX_OWNER if chunk_id is None else digest(chunk_id)
            tokens, exact = len(identity.chunk_ids), self.codec.lossless() == self.codec
            batch.append(Arrival(record=record, tokens=tokens, owner=owner, exact=exact))
            size += record.stored_bytes
            if size >= STAGE_BYTES:
                self._live()
                stored, size, batch = stored | self._evictor.let_in(batch), 0, []
        self._live()
        return stored | (self._evictor.let_in(batch) if batch else set())

    def keep_kv(self, identity: KVIdentity, kv: ChunkKV) -> None:
        """Store KV that belongs to the index and to no chunk, whatever the budget: the prefix's own."""
        (record,) = self._encode([(identity, kv)])

        def apply(txn: Transaction) -> None:
            new = txn.get("kv", record.key) is None
            txn.put_record(record)
            txn.refer(INDEX_OWNER, record.key)
            if new and self.codec.lossless() == self.codec:
                txn.changed.discard(record.key)  # what memory holds of it is what is stored

        self._write(apply, need=record.stored_bytes)

    def has_many(self, identities: Iterable[KVIdentity]) -> set[KVIdentity]:
        """Those of which the store has a record, as `has_kv`; from one snapshot."""
        with self._live().read() as txn:
            return {identity for identity in identities if holds(txn, identity.key(), identity)}

    # What is kept of KV (docs/budget.md)

    @property
    def kv_bytes(self) -> int:
        """The bytes of all KV, as it is stored."""
        with self._live().read() as txn:
            return kv_bytes(txn)

    @property
    def budget(self) -> int | None:
        """The bytes that KV may take, for all processes; None without a limit."""
        with self._live().read() as txn:
            return read_budget(txn)

    def set_budget(self, budget: int | None) -> int:
        """Set the budget, and drop what is above it, the least worth first; returns how many records went."""
        if budget != self.budget:
            packed = json.dumps(budget).encode()
            self._write(lambda txn: txn.put("meta", BUDGET, packed))
        return self._evictor.shrink() if budget is not None else 0

    def spare(self, reading: Callable[[bytes], bool]) -> None:
        """Evict no record of which this says that it is being read, by its KV key."""
        self._evictor.spared = reading

    def record_uses(self, uses: Mapping[bytes, Use], *, seconds_per_token: float | None = None) -> None:
        """Record what questions have used, by KV key, and at which rate KV was encoded last."""
        self._write(lambda txn: record_uses(txn, uses, seconds_per_token=seconds_per_token))

    def ledger(self) -> Ledger:
        """What all questions have found, and what became of KV."""
        with self._live().read() as txn:
            return read_ledger(txn)

    def uses_of(self, keys: Iterable[bytes]) -> dict[bytes, UseRow]:
        """The uses of these records, by KV key; what no question has used is left out."""
        with self._live().read() as txn:
            return {key: row for key in keys if (row := read_use(txn, key)) is not None}

    def chunks_of(self, owners: Iterable[bytes]) -> dict[bytes, Chunk]:
        """The chunks by the digests of their ids, as rows of uses name them; those that are gone are left out."""
        with self._live().read() as txn:
            return {owner: chunk for owner in owners if (chunk := chunk_named(txn, owner)) is not None}

    def uses(self) -> Iterator[tuple[bytes, UseRow]]:
        """The uses of every record, by KV key, also of those that have left; damaged rows are left out."""
        for batch in self._live().batches("uses"):
            for key, value in batch:
                with suppress(DamagedError):
                    yield key, UseRow.parse(value)

    def stage_kv(self, records: KVRecords) -> int:
        """Commit records ahead of their document, 64 MiB at a time; returns how many.

        This serves documents whose KV does not fit into memory, and lets a killed ingest go on where it was (`has_kv`).
        The records are orphans until `write_document` refers to them.
        """
        count, size, batch = 0, 0, list[EncodedRecord]()
        for record in self._encode(records):
            batch.append(record)
            count, size = count + 1, size + record.stored_bytes
            if size >= STAGE_BYTES:
                self._stage(batch, size)
                size, batch = 0, []
        self._stage(batch, size)
        return count

    def orphans(self) -> Iterator[bytes]:
        """Keys of the records that no chunk needs."""
        return orphans(self._live())

    def _stage(self, batch: Sequence[EncodedRecord], size: int) -> None:
        def apply(txn: Transaction) -> None:
            for record in batch:
                txn.put_record(record)

        if batch:
            self._write(apply, need=size)
