"""One LMDB environment that threads and stores of one process can share, and that survives a fork and grows.

This module keeps LMDB's rules, so that no other has to know them: there is one environment per path and process; it
must not be used after a fork; its map must not be resized while a transaction is open; and a full map is no error, but
means that it has to grow.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import lmdb

from ragkv.errors import CorruptStoreError, StoreAccessError, StoreError, StoreExistsError, StoreFullError
from ragkv.store.memory import MemoryTier
from ragkv.store.migration import FORMAT_VERSION, migrate, needs_migration
from ragkv.store.pages.file import FULL, OpenFile, damaged_file, read_header, refuse_links, refuse_network
from ragkv.store.pages.guard import PageGuard, SnapshotGuard, WriteGuard
from ragkv.store.pages.note import Note
from ragkv.store.pages.reserve import Reserve, allocate_lock
from ragkv.store.pages.snapshot import PageReport, check_catalog, check_pages, free_bytes
from ragkv.store.tally import settle
from ragkv.store.transaction import ADDED, TABLES, VALUE_BYTES, Transaction
from ragkv.store.translation import MAX_READERS, translated

__all__ = ["LMDB_FILES", "Database"]

_OLDEST = 1
LMDB_FILES = ("data.mdb", "lock.mdb")

_MIB = 1 << 20
_WALK_BYTES = 32 * _MIB
_WALK_KEYS = 1024
_SNAPSHOTS = 100  # attempts to check a snapshot before another process's commits write over its meta page
T = TypeVar("T")

logger = logging.getLogger(__name__)


class _Gate:
    """A lock that transactions share, and that resizing, forking and closing take alone."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._inside = 0
        self._shut = False

    def enter(self) -> None:
        with self._condition:
            self._condition.wait_for(lambda: not self._shut)
            self._inside += 1

    def leave(self) -> None:
        with self._condition:
            self._inside -= 1
            self._condition.notify_all()

    def shut(self) -> None:
        with self._condition:
            self._condition.wait_for(lambda: not self._shut)
            self._shut = True
            self._condition.wait_for(lambda: not self._inside)

    def reopen(self) -> None:
        with self._condition:
            self._shut = False
            self._condition.notify_all()


class Database:
    """An open environment. Get one from `acquire`, give it back with `release`."""

    def __init__(self, directory: Path, *, readonly: bool, create: bool, map_size: int) -> None:
        self.directory = directory
        self.readonly = readonly
        self._data = directory / "data.mdb"
        self._gate = _Gate()
        self._reserve = Reserve(self._data)
        self._users = 0
        self._tiers: dict[str, MemoryTier] = {}
        self._gone = "is closed: open it again"
        self.format = FORMAT_VERSION
        self._tables: dict[str, Any] = {}
        self._guard: PageGuard | None = None
        """Checks the pages of the tables when they are needed; None when all have been checked."""
        self._noted = False
        """Whether a process that has had all pages checked left the file as this one has found it."""
        self._trusting = threading.Lock()
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
                self._prepare(check=header is not None, create=create)
                self._migrate()
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

    @property
    def trusted(self) -> bool:
        """Whether a write costs its own pages only: all pages were checked, or are those of a process that did."""
        with self._trusting:
            return self._guard is None or self._is_noted()

    def _trust(self) -> None:
        """Check all pages before this process first writes, unless the last writer did and left a note of it.

        Then pages are checked when they are needed, until that has cost as much as checking all.
        """
        with self._trusting:
            guard = self._guard
            if guard is not None and (not self._is_noted() or guard.read > guard.pages):
                self.check_pages(heads=False)

    def _is_noted(self) -> bool:
        if not self._noted:
            note = Note.read(self.directory)
            self._noted = note is not None and note == self._note()
        return self._noted

    def _note(self) -> Note | None:
        """What is to be noted of the newest state; None when it cannot be read."""
        self._gate.enter()
        try:
            with translated(self.directory), self._snapshot() as txn:
                return Note.of(self._data, txn.id())
        except (lmdb.Error, StoreError):  # another process grew the map, for example
            return None
        finally:
            self._gate.leave()

    def check_pages(self, *, heads: bool = True) -> PageReport:
        """Check every page that LMDB would follow, and the list of free pages; `CorruptStoreError` for damage.

        `heads`: check the heads of large values too.
        """
        while True:
            self._gate.enter()
            try:
                with translated(self.directory):
                    self._live()
                    report = self._check(free=True, heads=heads)
                    self._guard = None
                    return report
            except lmdb.MapResizedError:
                pass  # another process grew the map
            finally:
                self._gate.leave()
            self._resize(None)

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

    def _prepare(self, *, check: bool, create: bool) -> None:
        """Check the first pages, then open the tables: LMDB follows no page before it opens a table."""
        while True:
            try:
                if check:
                    self._check_catalog()
                self._tables = self._create_tables() if create else self._open_tables()
                return
            except lmdb.MapResizedError:  # another process grew the map since the header was read
                self._env.set_mapsize(self._data.stat().st_size)
            except lmdb.MapFullError:  # there is no room for the tables that an older format lacks
                self._resize(0)

    def _migrate(self) -> None:
        """Fill the tables that an older format lacks, in a transaction of its own (`ragkv.store.migration`)."""
        if self.readonly:
            return
        with self.read() as txn:
            due = needs_migration(txn)
        if due:
            self.write(migrate)

    def _check_catalog(self) -> None:
        """Check what opening the tables needs; the rest is checked when it is needed."""
        for _ in range(_SNAPSHOTS):
            with self._snapshot() as txn:
                number = txn.id()
                try:
                    if check_catalog(self._data, number, TABLES, free=not self.readonly):
                        return
                except CorruptStoreError:
                    if self._env.info()["last_txnid"] <= number + 1:
                        raise
        raise damaged_file(self._data, "is damaged (no meta page is that of its last transaction)")

    def _check(self, *, free: bool, heads: bool = False) -> PageReport:
        """Check the pages of the newest snapshot.

        While a transaction holds a snapshot, its pages are not written over, except for its meta page. Without a lock
        table, however, no writer knows of the transaction, and two commits later all of its pages may be.
        """
        for _ in range(_SNAPSHOTS):
            with self._snapshot() as txn:
                number = txn.id()
                try:
                    report = check_pages(self._data, number, TABLES, width=VALUE_BYTES, free=free, heads=heads)
                except CorruptStoreError:
                    if self._env.info()["last_txnid"] <= number + 1:
                        raise
                    report = None
            if report is not None:
                return report
        raise damaged_file(self._data, "is damaged (no meta page is that of its last transaction)")

    def _create_tables(self) -> dict[str, Any]:
        with self._env.begin(write=True) as txn:
            tables = {name: self._table(name, txn, create=True) for name in TABLES}
            if not txn.put(b"format", b"%d" % FORMAT_VERSION, db=tables["meta"], overwrite=False):
                raise StoreExistsError(f"{self.directory} holds a store already: open it instead")
        return tables

    def _open_tables(self) -> dict[str, Any]:
        """Open the tables, and add those that an older format lacks, which `_migrate` fills.

        This takes a write transaction even if nothing changes, because py-lmdb forgets tables that were opened in a
        read transaction.
        """
        with nullcontext() if self.readonly else self._env.begin(write=True) as txn:
            try:
                version = self._version(self._table("meta", txn), txn)
            except (lmdb.NotFoundError, TypeError, ValueError) as error:
                raise CorruptStoreError(
                    f"{self.directory} is an LMDB environment, but no finished store of ragkv: "
                    "delete it and ingest again"
                ) from error
            if not _OLDEST <= version <= FORMAT_VERSION:
                raise StoreError(
                    f"{self.directory} has format {version}, and this ragkv reads formats {_OLDEST} to "
                    f"{FORMAT_VERSION}: " + ("upgrade ragkv" if version > _OLDEST else "ingest again into a new index")
                )
            self.format = version if self.readonly else FORMAT_VERSION
            later = {name for since, names in ADDED.items() if since > version for name in names}
            tables = {name: self._table(name, txn) for name in TABLES if name not in later}
        if not self.readonly and later:
            self._check(free=True)  # making a table is the first write
            self._guard = None
            with self._env.begin(write=True) as txn:
                tables |= {name: self._table(name, txn, create=True) for name in TABLES if name in later}
        return tables

    def _version(self, meta: Any, txn: Any) -> int:
        with self._env.begin() if txn is None else nullcontext(txn) as reading:
            return int(reading.get(b"format", db=meta))

    def _table(self, name: str, txn: Any, *, create: bool = False) -> Any:
        several = TABLES[name]
        return self._env.open_db(name.encode(), txn=txn, create=create, dupsort=several, dupfixed=several)


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
        database._gate, database._trusting = _Gate(), threading.Lock()
    _registry.clear()
    _registry_lock.release()


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
