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
from ragkv.store.transaction import INDEX_OWNER, Transaction
from ragkv.store.upkeep.check import find_record
from ragkv.store.upkeep.progress import Counter, Notify
from ragkv.store.upkeep.verification import segment_count

__all__ = ["Collection", "collect"]

_BATCH = 256
Kind: TypeAlias = Literal["records", "index_records", "segments"]


@dataclass(slots=True, kw_only=True)
class Collection:
    """What was dropped, or in a dry run would be.

    `index_records` are KV that belonged to the index itself. `bytes` are payloads. The file keeps its size and uses
    the space again; `ragkv compact` makes it smaller. The caller fills in what it drops of retrieval indexes
    (`derived`, `derived_bytes`).
    """

    records: int = 0
    segments: int = 0
    index_records: int = 0
    bytes: int = 0
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

    Hold the writer's lock.
    """
    found = Collection(dry_run=dry_run)
    with database.read() as txn:
        progress = Counter(on_progress, "gc", txn.count("kv") + txn.count("segments"), "rows")
    for table in ("kv", "segments"):
        garbage = _garbage(database, table, in_use, progress)
        for start in range(0, len(garbage), _BATCH):
            _sweep(database, table, garbage[start : start + _BATCH], in_use, found)
    progress.finish()
    return found


def _garbage(database: Database, table: str, in_use: Callable[[Manifest], bool], progress: Counter) -> list[bytes]:
    keys: list[bytes] = []

    def visit(txn: Transaction, key: bytes) -> int:
        if _as_garbage(txn, table, key, in_use) is not None:
            keys.append(key)
        progress.add()
        return 0

    database.walk(table, visit)
    return keys


def _sweep(
    database: Database, table: str, keys: list[bytes], in_use: Callable[[Manifest], bool], found: Collection
) -> None:
    """Look at the rows again and drop them in one transaction: a query may refer to a record since it was found.

    A dry run only looks.
    """

    def apply(txn: Transaction) -> list[tuple[Kind, int]]:
        dropped = []
        for key in keys:
            garbage = _as_garbage(txn, table, key, in_use)
            if garbage is None:
                continue
            dropped.append(garbage)
            if found.dry_run:
                continue
            if table == "segments":
                txn.delete(table, key)
            else:
                txn.delete("needs", INDEX_OWNER, key)
                txn.delete("references", key)
                txn.drop_record(key)
        return dropped

    if found.dry_run:
        with database.read() as txn:
            dropped = apply(txn)
    else:
        dropped = database.write(apply)
    for kind, size in dropped:
        setattr(found, kind, getattr(found, kind) + 1)
        found.bytes += size


def _as_garbage(
    txn: Transaction, table: str, key: bytes, in_use: Callable[[Manifest], bool]
) -> tuple[Kind, int] | None:
    """What kind of garbage a row is, and how many bytes of payload go with it; None when it is in use."""
    value = txn.get(table, key)
    if value is None:
        return None
    if table == "segments":
        orphan = int.from_bytes(key[32:], "big") >= segment_count(txn, key[:32])
        return ("segments", len(value)) if orphan else None
    owners = txn.values("references", key)
    kind: Kind = "records"
    if owners:
        manifest = find_record(txn, key)
        if owners != [INDEX_OWNER] or manifest is None or in_use(manifest):
            return None
        kind = "index_records"
    return kind, txn.payload_bytes(key)
