"""An LMDB environment's file as this process maps it: whole before it is touched, and longer when it has to be.

The map must not be resized while a transaction is open; a file that another process has made longer has to be mapped
anew; and one that was cut must not be touched.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import lmdb

from ragkv.errors import CorruptStoreError, StoreError
from ragkv.store.gate import Gate
from ragkv.store.pages.file import OpenFile, read_header
from ragkv.store.pages.guard import PageGuard, SnapshotGuard, WriteGuard
from ragkv.store.pages.reserve import allocate_lock
from ragkv.store.transaction import TABLES, VALUE_BYTES, Transaction
from ragkv.store.translation import MAX_READERS, translated

__all__ = ["FileMap"]

_MIB = 1 << 20
logger = logging.getLogger(__name__)


class FileMap:
    """An environment that is open, and its transactions. The pages of a snapshot are checked by a guard, if any."""

    def __init__(self, directory: Path, *, readonly: bool, create: bool, map_size: int) -> None:
        self.directory = directory
        self.readonly = readonly
        self._data = directory / "data.mdb"
        self._gate = Gate()
        self._gone = "is closed: open it again"
        self._tables: dict[str, Any] = {}
        self._guard: PageGuard | None = None
        """Checks the pages of the tables when they are needed; None when all have been checked."""
        with translated(self.directory):
            header = read_header(self._data)
            if header is None and not create:
                raise CorruptStoreError(f"{self._data} is missing or empty: restore a backup, or ingest again")
            self._env: Any = self._open(map_size=header.map_size if header else map_size, create=create)
            # Without a lock table (on a read-only mount, or without permission), no writer knows that we read: see
            # `read`.
            self._unlocked = self._env.readers().startswith("(no reader locks)")
            try:
                self._page_size = int(self._env.stat()["psize"])
                self._file = OpenFile(self._data)
                self._guard = None if header is None else PageGuard(self._data, TABLES, width=VALUE_BYTES)
                self._lock_file = None if self._unlocked else OpenFile(directory / "lock.mdb")
                self._env.reader_check()
            except BaseException:
                self._env.close()
                raise

    def _open(self, *, map_size: int, create: bool) -> Any:
        # py-lmdb would keep spare transactions, which hold reader slots across a fork.
        options: dict[str, Any] = {
            "map_size": map_size,
            "max_dbs": len(TABLES),
            "max_readers": MAX_READERS,
            "max_spare_txns": 0,
            "readonly": self.readonly,
            "create": create,
        }
        allocate_lock(self.directory / "lock.mdb")
        try:
            return lmdb.open(str(self.directory), **options)
        except (lmdb.ReadonlyError, PermissionError):
            if not self.readonly or not os.access(self._data, os.R_OK):
                raise
            return lmdb.open(str(self.directory), **options, lock=False)

    def _close(self) -> None:
        """Close the environment, unless its lock table was cut short.

        LMDB would then touch pages of the table that are gone, which is SIGBUS. So the environment stays open until
        the process ends.
        """
        if self._lock_file is not None and self._lock_file.is_cut():
            logger.warning("%s/lock.mdb was cut short while it was open", self.directory)
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._env))
        else:
            self._env.close()

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        """A snapshot. Keep it short, because writers cannot reuse pages meanwhile; never open one inside another.

        `StoreError` when the store was read without a lock, and a writer may have changed the snapshot's pages.
        """
        with translated(self.directory), self._begin(write=False) as txn:
            try:
                yield txn
            except Exception as error:
                self._refuse_overtaken(txn, error)
                raise
            self._refuse_overtaken(txn, None)

    def _refuse_overtaken(self, txn: Transaction, error: Exception | None) -> None:
        """Refuse what was read without a lock if a writer may have changed it meanwhile.

        A writer leaves the pages of the last two snapshots alone even when it knows of no reader, because it needs
        them in case it is killed. So what was read is whole if there was at most one commit since.
        """
        if self._unlocked and self._live().info()["last_txnid"] > txn.number() + 1:
            raise StoreError(
                f"{self.directory} was written to while it was read without a lock (it may not be written from "
                "here): try again when the writing has ended"
            ) from error

    def sizes(self) -> tuple[int, int]:
        """The bytes that the file takes on the disk, and the bytes of the map."""
        with self.read():
            return self._data.stat().st_blocks * 512, int(self._live().info()["map_size"])

    @contextmanager
    def _begin(self, *, write: bool) -> Iterator[Transaction]:
        while True:
            self._gate.enter()
            try:
                guard = self._guard
                with self._snapshot(write=write) as txn:
                    pages = None if guard is None else self._guarded(guard, txn.id() - write)
                    if guard is None or pages is not None:
                        checks = WriteGuard(pages) if write and pages is not None else pages
                        transaction = Transaction(txn, self._tables, page_size=self._page_size, pages=checks)
                        del txn
                        with closing(transaction):
                            yield transaction
                        return
                del txn
                continue  # commits have written over the snapshot's meta page before it was read
            except lmdb.ReadersFullError:  # here and below: raised before anything was yielded
                if not self._clear_stale():
                    raise
                continue
            except lmdb.MapResizedError:
                pass  # another process grew the map
            finally:
                self._gate.leave()
            self._resize(None)

    def _guarded(self, guard: PageGuard, number: int) -> SnapshotGuard | None:
        """The guard of a snapshot; None when commits have written over its first pages: begin another transaction."""
        try:
            return guard.snapshot(number)
        except CorruptStoreError:
            if self._unlocked and self._live().info()["last_txnid"] > number + 1:
                return None
            raise

    @contextmanager
    def _snapshot(self, *, write: bool = False) -> Iterator[Any]:
        """LMDB's transaction, begun only when the files are as long as they have to be.

        If a file was cut while it was open, the first touch of a missing page kills the process. A file that is cut
        during the transaction is not noticed in time.
        """
        env = self._live()
        if self._lock_file is not None:
            self._lock_file.size()
        size = self._file.size(2 * self._page_size)  # beginning reads a meta page
        with env.begin(write=write, buffers=True) as txn:
            needed = (env.info()["last_pgno"] + 1) * self._page_size
            if size < needed:  # the file was cut, unless another process has made it longer meanwhile
                self._file.size(needed)
            yield txn

    def _clear_stale(self) -> int:
        """Free the reader slots of processes that were killed; returns how many."""
        with translated(self.directory):
            return int(self._live().reader_check())

    def _live(self) -> Any:
        if self._env is None:
            raise StoreError(f"{self.directory} {self._gone}")
        return self._env

    def _resize(self, need: int | None) -> None:
        """Double the map, or more to make room for `need` bytes; with None, make it as long as the file.

        The file is as long as the map of the process that wrote last.
        """
        with translated(self.directory):
            self._gate.shut()
            try:
                env, target = self._live(), self._data.stat().st_size
                if need is not None:
                    size = env.info()["map_size"]
                    target = -(-max(2 * size, size + 2 * need) // _MIB) * _MIB
                env.set_mapsize(target)
            finally:
                self._gate.reopen()
