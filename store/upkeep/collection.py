"""What nothing refers to any more, dropped: `ragkv gc`'s part in the store.

An ingest commits KV ahead of its documents (`Store.stage_kv`), and until they come nothing tells those records from
the leavings of an ingest that died. So there is one rule: garbage is collected while no ingest runs, that is with the
writer's lock held for the whole of `collect`. Queries may go on: they refer to what they put in the same transaction.
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
    """What was dropped (in a dry run: would be). `bytes` are payloads; the file keeps its size and uses them again,
    `compact` makes it smaller."""

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
    """Drop records that no chunk needs, segments without a record, and of the index's own records those that are not
    `in_use`. Call it with the writer's lock held."""
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
        if _weigh(txn, table, key, in_use) is not None:
            keys.append(key)
        progress.add()
        return 0

    database.walk(table, visit)
    return keys


def _sweep(
    database: Database, table: str, keys: list[bytes], in_use: Callable[[Manifest], bool], found: Collection
) -> None:
    """Weigh and drop in one transaction, as a query may have taken a record up since it was found; of a dry run,
    only weigh."""

    def apply(txn: Transaction) -> list[tuple[Kind, int]]:
        weighed = []
        for key in keys:
            garbage = _weigh(txn, table, key, in_use)
            if garbage is None:
                continue
            weighed.append(garbage)
            if found.dry_run:
                continue
            if table == "segments":
                txn.delete(table, key)
            else:
                txn.delete("needs", INDEX_OWNER, key)
                txn.delete("references", key)
                txn.drop_record(key)
        return weighed

    if found.dry_run:
        with database.read() as txn:
            weighed = apply(txn)
    else:
        weighed = database.write(apply)
    for kind, size in weighed:
        setattr(found, kind, getattr(found, kind) + 1)
        found.bytes += size


def _weigh(txn: Transaction, table: str, key: bytes, in_use: Callable[[Manifest], bool]) -> tuple[Kind, int] | None:
    """What kind of garbage a row is and how many bytes of payload go with it; None when it is none."""
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
    return kind, sum(len(payload) for _, payload in txn.scan("segments", key))
