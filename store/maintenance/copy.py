"""Copy a whole store from one snapshot, while others read and write.

A plain copy is LMDB's hot copy. It takes every page unchanged, so it also works on a damaged store. A compacted copy
is written entry by entry in key order, without free pages. That also removes deleted content, which LMDB keeps in
free pages until it needs them. LMDB's own compaction is not used: in py-lmdb 3.0.0 it dies of SIGSEGV once about 62
chunks share one record, when the values of one key get a tree of their own.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lmdb

from ragkv.errors import StoreError, StoreFullError
from ragkv.store.data_file import read_header
from ragkv.store.environment import Database, is_full
from ragkv.store.maintenance.verify import Counter, Notify
from ragkv.store.tables import TABLES, Transaction
from ragkv.util.batches import batches
from ragkv.util.files import sync_path

_BATCH_BYTES = 64 << 20  # dirty pages are kept in memory until their transaction commits
_ROOM = 64 << 20


def rewrite(source: Transaction, folder: Path, *, size: int, advance: Callable[[int], object]) -> None:
    """Write the entries of `source`, about `size` bytes, into a new environment in `folder`, and sync it.

    `advance` is called with the bytes of each batch. `lmdb.Error` if there is no room.
    """
    map_size = 2 * size + _ROOM  # a limit, not bytes on the disk
    with closing(
        lmdb.open(str(folder), map_size=map_size, max_dbs=len(TABLES), sync=False, metasync=False, lock=False)
    ) as target:
        for name in source.tables:
            several = TABLES[name]
            table = target.open_db(name.encode(), dupsort=several, dupfixed=several)
            if name == "changes":  # only useful to the source's retrieval indexes, and it names deleted documents
                continue
            for batch in batches(source.scan(name), _entry_bytes, _BATCH_BYTES):
                with target.begin(write=True, db=table) as txn, txn.cursor() as cursor:
                    cursor.putmulti(batch, dupdata=True, append=not several)
                advance(sum(map(_entry_bytes, batch)))
        target.sync(True)


def _entry_bytes(entry: tuple[bytes, memoryview]) -> int:
    return len(entry[0]) + len(entry[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """The path of a copy, and the bytes on disk of the original store and of the copy."""

    path: Path
    bytes_before: int
    bytes_after: int
    verified: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"path": str(self.path)}


def copy_store(database: Database, folder: Path, *, compact: bool, on_progress: Notify | None = None) -> int:
    """Write `data.mdb` into `folder`, which exists, and sync it to the disk; returns its bytes.

    `StoreFullError` if there is no room, if possible before anything is written.
    """
    header = read_header(database.directory / "data.mdb")
    used = header.used if header is not None else 0
    with database.read() as txn:
        expected = txn.used_bytes() if compact else used
    free = shutil.disk_usage(folder).free
    if free < expected:
        raise StoreFullError(
            f"{folder} has {free} bytes free, and the copy needs about {expected}: make room, or copy to another disk"
        )
    progress = Counter(on_progress, "copy", expected)
    data = folder / "data.mdb"
    if compact:
        _rewrite(database, folder, expected, progress)
    else:
        _pour(database, data, progress)
    sync_path(folder)
    progress.finish()
    written = data.stat().st_size
    copied = read_header(data)  # refuses a file that is shorter than its pages
    if copied is None:
        raise StoreError(f"{database.directory} could not be copied: LMDB wrote nothing")
    return written


def _rewrite(database: Database, folder: Path, size: int, progress: Counter) -> None:
    with database.read() as txn:
        try:
            rewrite(txn, folder, size=size, advance=progress.add)
        except lmdb.Error as error:
            if is_full(error, folder):
                raise StoreFullError(f"{folder} cannot be written ({error}): make room and try again") from error
            raise


def _pour(database: Database, data: Path, progress: Counter) -> None:
    with data.open("xb", buffering=0) as file:

        def write(block: memoryview) -> None:
            try:
                while block:
                    block = block[_written(file.write(block), progress) :]
            except OSError as error:
                raise StoreFullError(f"{data} cannot be written ({error.strerror}): make room and try again") from error

        database.copy(write)
        os.fsync(file.fileno())


def _written(count: int | None, progress: Counter) -> int:
    progress.add(count or 0)
    return count or 0
