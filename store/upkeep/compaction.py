"""Write a store anew, entry by entry, without free pages and without what was deleted.

LMDB can compact a copy itself, but py-lmdb 3.0.0 dies of SIGSEGV there as soon as about 62 chunks share one record,
which is when the values of one key get a tree of their own. Entries come in the order of their keys, so that pages are
filled one after another. All values are read in one snapshot, while others read and write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import lmdb

from ragkv.store.transaction import TABLES, Transaction

__all__ = ["rewrite"]

_BATCH_BYTES = 64 << 20  # dirty pages are kept in memory until their transaction commits
_ROOM = 64 << 20


def rewrite(source: Transaction, folder: Path, *, size: int, advance: Callable[[int], object]) -> None:
    """Write the entries of `source`, about `size` bytes, into a new environment in `folder`, and sync it to the disk.

    `advance` is called with the bytes of each batch. `lmdb.Error` when there is no room.
    """
    map_size = 2 * size + _ROOM  # a limit, not bytes on the disk
    with closing(
        lmdb.open(str(folder), map_size=map_size, max_dbs=len(TABLES), sync=False, metasync=False, lock=False)
    ) as target:
        for name in source.tables:
            several = TABLES[name]
            table = target.open_db(name.encode(), dupsort=several, dupfixed=several)
            if name == "changes":  # of use to the retrieval indexes beside the source; it tells of what was deleted
                continue
            for batch, weight in _batches(source.scan(name)):
                with target.begin(write=True, db=table) as txn, txn.cursor() as cursor:
                    cursor.putmulti(batch, dupdata=True, append=not several)
                advance(weight)
        target.sync(True)


def _batches(entries: Iterator[tuple[bytes, memoryview]]) -> Iterator[tuple[list[tuple[bytes, Any]], int]]:
    batch: list[tuple[bytes, Any]] = []
    weight = 0
    for key, value in entries:
        batch.append((key, value))
        weight += len(key) + len(value)
        if weight >= _BATCH_BYTES:
            yield batch, weight
            batch, weight = [], 0
    if batch:
        yield batch, weight
