"""Garbage collection, the store's part of `ragkv gc`: drop what nothing refers to any more.

An ingest commits KV ahead of its documents (`Store.stage_kv`). Until the documents follow, nothing tells these records
from what a killed ingest left behind. Garbage is therefore only collected while no ingest runs: hold the writer's lock
for the whole of `collect`. Queries may run meanwhile, because they refer to a record in the transaction that puts it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ragkv.store.database import Database
from ragkv.store.format.record import Manifest
from ragkv.store.tally import is_garbage, relist, unreferenced
from ragkv.store.transaction import INDEX_OWNER, Transaction
from ragkv.store.upkeep.check import find_record
from ragkv.store.upkeep.progress import Counter, Notify

__all__ = ["Collection", "collect"]

_BATCH = 256
Kind: TypeAlias = Literal["records", "index_records", "segments"]


@dataclass(slots=True, kw_only=True)
class Collection:
    """What was dropped, or in a dry run would be.

    `index_records` are KV that belonged to the index itself, `uses` what was known of KV whose chunks are gone. `bytes`
    are payloads. The file keeps its size and uses the space again; `ragkv compact` makes it smaller. The caller fills
    in what it drops of retrieval indexes (`derived`, `derived_bytes`).
    """

    records: int = 0
    segments: int = 0
    index_records: int = 0
    bytes: int = 0
    uses: int = 0
    derived: int = 0
    derived_bytes: int = 0
    dry_run: bool = False

    def to_json(self) -> dict[str, Any]:
        """The object that `ragkv gc --json` prints."""
        return {name: getattr(self, name) for name in self.__slots__}


def collect(
    database: Database,
    *,
    in_use: Callable[[Manifest], bool],
    dry_run: bool = False,
    on_progress: Notify | None = None,
) -> Collection:
    """Drop records that no chunk needs, segments without a record, and the index's own records that are not `in_use`.

    Hold the writer's lock. This looks at what the list of unreferenced KV names and at the index's own records, not at
    the rest of the store.
    """
    found = Collection(dry_run=dry_run)
    keys = _candidates(database)
    progress = Counter(on_progress, "gc", len(keys), "records")
    for start in range(0, len(keys), _BATCH):
        batch = keys[start : start + _BATCH]
        _sweep(database, batch, in_use, found)
        progress.add(len(batch))
    progress.finish()
    return found


def _candidates(database: Database) -> list[bytes]:
    """KV keys of what may be garbage: no chunk needs it."""
    with database.read() as txn:
        own = txn.values("needs", INDEX_OWNER)
        listed = "unreferenced" in txn.tables
    if listed:
        return own + [key for batch in database.batches("unreferenced") for key, _ in batch]
    with database.read() as txn:  # of an older format, which can only be a dry run
        return own + list(unreferenced(txn))


def _sweep(database: Database, keys: list[bytes], in_use: Callable[[Manifest], bool], found: Collection) -> None:
    """Look at the records again and drop them in one transaction: a query may refer to one since it was found.

    A dry run only looks.
    """

    def apply(txn: Transaction) -> list[tuple[Kind, int, int]]:
        dropped = []
        for key in keys:
            garbage = _as_garbage(txn, key, in_use)
            if garbage is None:
                if not found.dry_run:
                    relist(txn, key)  # a damaged list may name what is in use
                continue
            dropped.append(garbage)
            if not found.dry_run:
                txn.delete("needs", INDEX_OWNER, key)
                txn.delete("references", key)
                txn.drop_record(key)
        return dropped

    if found.dry_run:
        with database.read() as txn:
            dropped = apply(txn)
    else:
        dropped = database.write(apply)
    for kind, count, size in dropped:
        setattr(found, kind, getattr(found, kind) + count)
        found.bytes += size


def _as_garbage(txn: Transaction, key: bytes, in_use: Callable[[Manifest], bool]) -> tuple[Kind, int, int] | None:
    """What kind of garbage is under a KV key, how much, and its bytes of payload; None when there is none."""
    if is_garbage(txn, key):
        if txn.get("kv", key) is not None:
            return "records", 1, txn.payload_bytes(key)
        return "segments", sum(1 for _ in txn.scan("segments", key)), txn.payload_bytes(key)
    if txn.is_needed(key):
        return None
    manifest = find_record(txn, key)
    if manifest is None or in_use(manifest):
        return None
    return "index_records", 1, txn.payload_bytes(key)
