"""Copy a whole store from one snapshot, while others read and write.

A plain copy is LMDB's own hot copy. It takes every page as it is, so that it also works on a damaged store. A compacted
copy is written anew (`ragkv.store.upkeep.compaction`) without free pages. That also removes what was deleted, since
LMDB does not overwrite a freed page until it needs it.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lmdb

from ragkv.boundary.plainfile import sync_path
from ragkv.errors import StoreError, StoreFullError
from ragkv.store.database import Database
from ragkv.store.pages.file import read_header
from ragkv.store.translation import is_full
from ragkv.store.upkeep.compaction import rewrite
from ragkv.store.upkeep.progress import Counter, Notify

__all__ = ["Copy", "copy_store"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Where a copy is, and the bytes on the disk of the store that was copied and of the copy."""

    path: Path
    bytes_before: int
    bytes_after: int
    verified: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"path": str(self.path)}


def copy_store(database: Database, folder: Path, *, compact: bool, on_progress: Notify | None = None) -> int:
    """Write `data.mdb` into `folder`, which exists, and sync it to the disk; returns its bytes.

    `StoreFullError` when there is no room, before anything is written if that can be known.
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

        def write(piece: memoryview) -> None:
            try:
                while piece:
                    piece = piece[_written(file.write(piece), progress) :]
            except OSError as error:
                raise StoreFullError(f"{data} cannot be written ({error.strerror}): make room and try again") from error

        database.copy(write)
        os.fsync(file.fileno())


def _written(count: int | None, progress: Counter) -> int:
    progress.add(count or 0)
    return count or 0
