"""One LMDB environment that threads and stores of one process can share, and that survives a fork and grows.

This module and `ragkv.store.filemap` keep LMDB's rules, so that no other has to know them: there is one environment per
path and process; it must not be used after a fork; its map must not be resized while a transaction is open; and a full
map is no error, but means that it has to grow.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import lmdb

from ragkv.errors import StoreAccessError, StoreError, StoreExistsError, StoreFullError
from ragkv.store.checkedmap import CheckedMap
from ragkv.store.gate import Gate
from ragkv.store.memory import MemoryTier
from ragkv.store.migration import migrate, needs_migration
from ragkv.store.pages.file import FULL, refuse_links, refuse_network
from ragkv.store.pages.reserve import Reserve
from ragkv.store.pages.snapshot import free_bytes
from ragkv.store.tally import settle
from ragkv.store.transaction import Transaction
from ragkv.store.translation import translated

__all__ = ["LMDB_FILES", "Database"]

LMDB_FILES = ("data.mdb", "lock.mdb")

_MIB = 1 << 20
_WALK_BYTES = 32 * _MIB
_WALK_KEYS = 1024
T = TypeVar("T")

logger = logging.getLogger(__name__)


class Database(CheckedMap):
    """An open environment. Get one from `acquire`, give it back with `release`."""

    def __init__(self, directory: Path, *, readonly: bool, create: bool, map_size: int) -> None:
        super().__init__(directory, readonly=readonly, create=create, map_size=map_size)
        self._reserve = Reserve(self._data)
        self._users = 0
        self._tiers: dict[str, MemoryTier] = {}
        try:
            with translated(self.directory):
                self._migrate()
        except BaseException:
            self._env.close()
            raise

    @classmethod
    def acquire(cls, directory: Path, *, readonly: bool | None, create: bool, map_size: int) -> Database:
        """The process's environment of `directory`, which the first call opens.

        `readonly` None: read-write where the system permits it, else read-only.
        """
        with _registry_lock:
            database = _registry.get(_file_id(directory))
            if database is None:
                refuse_links(directory, LMDB_FILES)
                refuse_network(directory)
                try:
                    database = cls(directory, readonly=bool(readonly), create=create, map_size=map_size)
                except (
                    StoreAccessError,
                    StoreFullError,
                ) as error:  # full: an older format cannot be brought up to date
                    if readonly is not None:
                        raise
                    logger.info("opened read-only: %s", error)
                    database = cls(directory, readonly=True, create=False, map_size=map_size)
                _registry[_file_id(directory)] = database
            elif create:
                raise StoreExistsError(f"{directory} holds a store already: open it instead")
            elif database.readonly and readonly is False:
                raise StoreError(f"{directory} is open read-only in this process: close that store first")
            database._users += 1
            return database

    def release(self) -> None:
        """Give back one `acquire`. The last one closes the environment, when all transactions have ended."""
        with _registry_lock:
            self._users -= 1
            if self._users or self._env is None:
                return
            for identifier in [known for known, database in _registry.items() if database is self]:
                del _registry[identifier]
            self._gate.shut()
            self._close()
            self._env = None
            self._gate.reopen()

    def write(self, apply: Callable[[Transaction], T], *, need: int = 0) -> T:
        """Run `apply` in one transaction: all of it takes effect or, when it raises, nothing.

        `apply` may run several times, because the map may have to grow. `need` is about how many bytes it writes. With
        0 it adds next to nothing, and may use the disk space that is reserved for it (`ragkv.store.pages.reserve`).
        """
        if self.readonly:
            raise StoreError(f"{self.directory} is open read-only: open it with readonly=False to change it")
        self._trust()
        while True:
            try:
                with translated(self.directory), self._begin(write=True) as txn:
                    # Only here, under the write lock, can no other process change the file's length.
                    map_size = self._live().info()["map_size"]
                    if self._data.stat().st_size < map_size:
                        os.truncate(self._data, map_size)
                    self._keep_reserve(need)
                    result = apply(txn)
                    settle(txn)
            except lmdb.MapFullError:
                # Dead readers keep pages from being reused. Without them, there may be enough room.
                if not self._clear_stale():
                    self._resize(need)
                continue
            except StoreFullError:
                self._resize(None)  # the file cannot grow, so that the map must not be larger than the file
                raise
            if (note := self._note()) is not None:
                note.write(self.directory)
            for tier in list(self._tiers.values()):
                tier.drop(txn.changed)
            return result

    def _keep_reserve(self, need: int) -> None:
        """Make sure that a transaction that adds to the store leaves room for one that deletes from it."""
        info = self._live().info()
        used = (info["last_pgno"] + 1) * self._page_size
        end = self._reserve.wanted(used, need)
        short = end > info["map_size"]
        try:
            self._reserve.keep(used, min(end, info["map_size"]))
        except OSError as error:
            # Free pages within the file serve as well.
            if error.errno not in FULL or (need and self._free_bytes(info) < end - used + need):
                raise
        else:
            if short and need and self._free_bytes(info) < end - used + need:
                raise lmdb.MapFullError

    def _free_bytes(self, info: Mapping[str, int]) -> int:
        return free_bytes(self._data, info["last_txnid"])

    def memory(self, device: str) -> MemoryTier:
        """The KV of this store that the process keeps in memory on a device, until the last store closes or a fork."""
        self._live()
        with _registry_lock:
            return self._tiers.setdefault(device, MemoryTier())

    def batches(
        self, table: str, prefix: bytes = b"", *, after: bytes | None = None, size: int = 256
    ) -> Iterator[list[tuple[bytes, bytes]]]:
        """Copies of a table's entries, all or those behind `after`.

        Each batch has a transaction of its own, so that the caller may take its time.
        """
        while True:
            batch: list[tuple[bytes, bytes]] = []
            weight = 0
            with self.read() as txn:
                for key, value in txn.scan(table, prefix, after=after, limit=size):
                    batch.append((key, bytes(value)))
                    weight += len(value)
                    if weight >= _WALK_BYTES:
                        break
            if not batch:
                return
            yield batch
            after = batch[-1][0]

    def walk(self, table: str, visit: Callable[[Transaction, bytes], int]) -> None:
        """Call `visit` for every key of a table; each call sees one snapshot.

        `visit` returns about how many bytes it read. After 32 MiB or 1024 keys a new snapshot is taken, so that writers
        can reuse pages.
        """
        after: bytes | None = None
        while True:
            size = count = 0
            with self.read() as txn:
                for key in txn.keys(table, after=after):
                    size, count, after = size + visit(txn, key), count + 1, key
                    if size >= _WALK_BYTES or count >= _WALK_KEYS:
                        break
                else:
                    return

    def copy(self, write: Callable[[memoryview], object]) -> None:
        """Call `write` with the environment's file as of one snapshot, in pieces, while others read and write.

        LMDB writes into a pipe, so that `write` can report progress, and stop the copy by raising. During the copy this
        process cannot grow the map: a writer that needs it waits, and so do the transactions after it.
        """
        while True:
            with self.read():
                failure = self._pour(write)
                if failure is None:
                    return
                if not isinstance(failure, lmdb.MapResizedError):
                    raise failure
            self._resize(None)  # another process grew the map; LMDB says so before it writes anything

    def _pour(self, write: Callable[[memoryview], object]) -> Exception | None:
        """Call `write` with what LMDB writes; returns the error that stopped LMDB, if any."""
        env, (source, sink) = self._live(), os.pipe()
        failures: list[Exception] = []

        def fill() -> None:
            try:
                env.copyfd(sink)
            except Exception as error:
                failures.append(error)
            finally:
                os.close(sink)

        filler = threading.Thread(target=fill, name="ragkv-copy")
        filler.start()
        try:
            buffer = bytearray(_MIB)
            with open(source, "rb", buffering=0) as pieces:  # noqa: PTH123 - a pipe has no path
                while size := pieces.readinto(buffer):
                    write(memoryview(buffer)[:size])
        finally:
            filler.join()  # it ends even if `write` has raised, because the pipe is closed by then
        return failures[0] if failures else None

    def _migrate(self) -> None:
        """Fill the tables that an older format lacks, in a transaction of its own (`ragkv.store.migration`)."""
        if self.readonly:
            return
        with self.read() as txn:
            due = needs_migration(txn)
        if due:
            self.write(migrate)


_registry: dict[tuple[int, int] | None, Database] = {}
_registry_lock = threading.Lock()


def _file_id(directory: Path) -> tuple[int, int] | None:
    try:
        status = (directory / "data.mdb").stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _before_fork() -> None:
    """Wait for all transactions: the child's copy of one would free the parent's reader slot."""
    _registry_lock.acquire()
    for database in _registry.values():
        database._gate.shut()


def _in_parent() -> None:
    for database in _registry.values():
        database._gate.reopen()
    _registry_lock.release()


def _in_child() -> None:
    for database in _registry.values():
        database._env.close()
        database._env = None
        database._gone = "was opened before a fork: open it again in this process"
        # The old ones may be held by a thread that the child does not have.
        database._gate, database._trusting = Gate(), threading.Lock()
    _registry.clear()
    _registry_lock.release()


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
