"""One LMDB environment, made safe to share: by threads, by stores of one process, across a fork, while it
grows.

LMDB's own rules, which this file keeps so that no other has to know them: one environment per path and
process; none crosses a fork; the map is never resized under a live transaction; a full map is no error but a
wish to grow.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

import lmdb

from ragkv.errors import CorruptStoreError, StoreError, StoreFullError
from ragkv.store.file import read_header, refuse_network
from ragkv.store.snapshot import PageReport, check_pages
from ragkv.store.transaction import TABLES, VALUE_BYTES, Transaction

__all__ = ["FORMAT_VERSION", "Database"]

FORMAT_VERSION = 1
"""Version of the tables and their rows (docs/formats.md)."""

_MIB = 1 << 20
_SNAPSHOTS = 100  # taken at most until one still has its meta page, where other processes commit all the time
_DAMAGE = (
    lmdb.CorruptedError,
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.NotFoundError,
    lmdb.PageNotFoundError,
)
T = TypeVar("T")


class _Gate:
    """Transactions pass together; resizing, forking and closing wait until all are out and keep others
    out."""

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
        self._users = 0
        self._gone = "is closed: open it again"
        self._tables: dict[str, Any] = {}
        with self._translated():
            header = read_header(self._data)
            if header is None and not create:
                raise CorruptStoreError(f"{self._data} is missing or empty: restore a backup, or ingest again")
            # No spare transactions: they would hold reader slots across a fork.
            self._env: Any = lmdb.open(
                str(directory),
                map_size=header.map_size if header else map_size,
                max_dbs=len(TABLES),
                max_readers=512,
                max_spare_txns=0,
                readonly=readonly,
                create=create,
            )
            try:
                self._page_size = int(self._env.stat()["psize"])
                self._env.reader_check()
                self._prepare(check=header is not None, create=create)
            except BaseException:
                self._env.close()
                raise

    @classmethod
    def acquire(cls, directory: Path, *, readonly: bool, create: bool, map_size: int) -> Database:
        """The process's environment of `directory`, opened by the first who asks."""
        with _registry_lock:
            database = _registry.get(_file_id(directory))
            if database is None:
                refuse_network(directory)
                database = cls(directory, readonly=readonly, create=create, map_size=map_size)
                _registry[_file_id(directory)] = database
            elif create:
                raise StoreError(f"{directory} holds a store already: open it instead")
            elif database.readonly and not readonly:
                raise StoreError(f"{directory} is open read-only in this process: close that store first")
            database._users += 1
            return database

    def release(self) -> None:
        """Give back one `acquire`; the last one closes the environment, after the transactions that still
        run."""
        with _registry_lock:
            self._users -= 1
            if self._users or self._env is None:
                return
            for identifier in [known for known, database in _registry.items() if database is self]:
                del _registry[identifier]
            self._gate.shut()
            self._env.close()
            self._env = None
            self._gate.reopen()

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        """A snapshot. Keep it short: it holds back the reuse of pages; never open one inside another."""
        with self._translated(), self._begin(write=False) as txn:
            yield txn

    def write(self, apply: Callable[[Transaction], T], *, need: int = 0) -> T:
        """Run `apply` in one transaction: all of it or, when it raises, nothing.

        `apply` may run several times, as the map grows under it; `need` is about how many bytes it writes.
        """
        if self.readonly:
            raise StoreError(f"{self.directory} is open read-only: open it with readonly=False to change it")
        while True:
            try:
                with self._translated(), self._begin(write=True) as txn:
                    # Under the write lock, so that two processes cannot cut each other's file.
                    map_size = self._live().info()["map_size"]
                    if self._data.stat().st_size < map_size:
                        os.truncate(self._data, map_size)
                    return apply(txn)
            except lmdb.MapFullError:
                self._resize(need)

    def batches(self, table: str, prefix: bytes = b"", *, size: int = 256) -> Iterator[list[tuple[bytes, bytes]]]:
        """Copies of a table's entries, a transaction per batch, so that the caller may take its time."""
        after: bytes | None = None
        while True:
            with self.read() as txn:
                entries = txn.scan(table, prefix, after=after, limit=size)
                batch = [(key, bytes(value)) for key, value in entries]
            if not batch:
                return
            yield batch
            after = batch[-1][0]

    def check_pages(self) -> PageReport:
        """Check every page that LMDB would follow, the list of free ones and the heads of large values too;
        `CorruptStoreError` for damage."""
        while True:
            self._gate.enter()
            try:
                with self._translated():
                    self._live()
                    return self._check(free=True, heads=True)
            except lmdb.MapResizedError:
                pass  # another process grew the map
            finally:
                self._gate.leave()
            self._resize(None)

    def sizes(self) -> tuple[int, int]:
        """Bytes that the file takes on the disk, and bytes of the map."""
        with self.read():
            return self._data.stat().st_blocks * 512, int(self._live().info()["map_size"])

    @contextmanager
    def _begin(self, *, write: bool) -> Iterator[Transaction]:
        while True:
            self._gate.enter()
            try:
                with (
                    self._live().begin(write=write, buffers=True) as txn,
                    closing(Transaction(txn, self._tables, page_size=self._page_size)) as transaction,
                ):
                    del txn
                    yield transaction
                return
            except lmdb.MapResizedError:
                pass  # another process grew the map; nothing has been yielded yet
            finally:
                self._gate.leave()
            self._resize(None)

    def _live(self) -> Any:
        if self._env is None:
            raise StoreError(f"{self.directory} {self._gone}")
        return self._env

    def _resize(self, need: int | None) -> None:
        """A map with room for `need` more bytes, at least doubled, or of what another process made it
        (None)."""
        with self._translated():
            self._gate.shut()
            try:
                env, target = self._live(), 0
                if need is not None:
                    size = env.info()["map_size"]
                    target = -(-max(2 * size, size + 2 * need) // _MIB) * _MIB
                env.set_mapsize(target)
            finally:
                self._gate.reopen()

    def _prepare(self, *, check: bool, create: bool) -> None:
        """Pages first: LMDB follows none before the tables are opened."""
        while True:
            try:
                if check:
                    self._check(free=not self.readonly)
                self._tables = self._create_tables() if create else self._open_tables()
                return
            except lmdb.MapResizedError:  # by another process, since the header was read
                self._env.set_mapsize(0)

    def _check(self, *, free: bool, heads: bool = False) -> PageReport:
        """While a transaction holds a snapshot, its pages are not written over, except for its meta page; but without
        a lock table (a read-only mount) no writer knows of it, and two commits later they may be."""
        for _ in range(_SNAPSHOTS):
            with self._env.begin() as txn:
                number = txn.id()
                try:
                    report = check_pages(self._data, number, TABLES, width=VALUE_BYTES, free=free, heads=heads)
                except CorruptStoreError:
                    if self._env.info()["last_txnid"] <= number + 1:
                        raise
                    report = None
            if report is not None:
                return report
        raise CorruptStoreError(
            f"{self._data} is damaged (no meta page is that of its last transaction): restore a backup, or delete "
            "the index and ingest again"
        )

    def _create_tables(self) -> dict[str, Any]:
        with self._env.begin(write=True) as txn:
            tables = {name: self._table(name, txn, create=True) for name in TABLES}
            if not txn.put(b"format", b"%d" % FORMAT_VERSION, db=tables["meta"], overwrite=False):
                raise StoreError(f"{self.directory} holds a store already: open it instead")
        return tables

    def _open_tables(self) -> dict[str, Any]:
        """In a transaction that changes nothing: py-lmdb forgets what a reading one opened."""
        with nullcontext() if self.readonly else self._env.begin(write=True) as txn:
            try:
                version = self._version(self._table("meta", txn), txn)
            except (lmdb.NotFoundError, TypeError, ValueError) as error:
                raise CorruptStoreError(
                    f"{self.directory} is an LMDB environment, but no finished store of ragkv: "
                    "delete it and ingest again"
                ) from error
            if version != FORMAT_VERSION:
                raise StoreError(
                    f"{self.directory} has format {version}, and this ragkv reads format {FORMAT_VERSION}: "
                    + ("upgrade ragkv" if version > FORMAT_VERSION else "ingest again into a new index")
                )
            return {name: self._table(name, txn) for name in TABLES}

    def _version(self, meta: Any, txn: Any) -> int:
        with self._env.begin() if txn is None else nullcontext(txn) as reading:
            return int(reading.get(b"format", db=meta))

    def _table(self, name: str, txn: Any, *, create: bool = False) -> Any:
        several = TABLES[name]
        return self._env.open_db(name.encode(), txn=txn, create=create, dupsort=several, dupfixed=several)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """LMDB's and the system's errors as ragkv's, except for the wish to grow."""
        try:
            yield
        except lmdb.MapFullError:
            raise
        except _DAMAGE as error:
            raise CorruptStoreError(
                f"{self.directory} is damaged ({error}): restore a backup, or delete it and ingest again"
            ) from error
        except (lmdb.ReadonlyError, PermissionError) as error:
            raise StoreError(f"{self.directory} may not be read or written by you ({error})") from error
        except (lmdb.Error, OSError) as error:
            if self._is_full(error):
                raise StoreFullError(
                    f"the disk or quota under {self.directory} is full; nothing that was committed is lost: "
                    "make room and try again"
                ) from error
            raise StoreError(f"{self.directory} cannot be used ({error})") from error

    def _is_full(self, error: Exception) -> bool:
        """LMDB tells a short write, which is what a full disk answers with, as an input/output error."""
        said = [os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)]
        if any(text in str(error) for text in said):
            return True
        free = 0
        with suppress(OSError):
            disk = os.statvfs(self.directory)
            free = disk.f_bavail * disk.f_frsize
        return os.strerror(errno.EIO) in str(error) and free < _MIB


_registry: dict[tuple[int, int] | None, Database] = {}
_registry_lock = threading.Lock()


def _file_id(directory: Path) -> tuple[int, int] | None:
    try:
        status = (directory / "data.mdb").stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _before_fork() -> None:
    """No transaction crosses a fork: the child's copy of one would free its parent's reader slot."""
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
        database._gate = _Gate()  # the old one's lock may be another thread's, which the child does not have
    _registry.clear()
    _registry_lock.release()


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
