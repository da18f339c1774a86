"""One LMDB environment, shared by the threads and stores of a process: open, grow, survive a fork, and lock it.

This module applies LMDB's rules, so that no other module has to know them. There is one environment per path and
process. It must not be used after a fork. Its map must not be resized while a transaction is open. A full map is not an
error: it grows. A file that another process made longer is mapped again, and one that was cut is not touched. LMDB's
and the system's errors become ragkv's.

LMDB's own mutex makes every transaction wait silently for the one before it. That is fine for milliseconds, but two
ingests of hours would do work twice or undo each other's. So a long job holds `writer.lock` (flock) from its first read
of the store to its last commit; a single transaction, such as a query that stores KV, does not take it. The kernel
releases the lock however the process ends. The file is never deleted, and its content only serves messages.

LMDB's mutex cannot be waited for with a limit either, and a process that is suspended within a transaction (Ctrl-Z)
holds it. So every write transaction takes its turn by flock of `data.mdb` first (`Database._turn`), and a store whose
turn does not come is opened read-only until it is written to.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import logging
import mmap
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import lmdb

from ragkv.errors import (
    CorruptStoreError,
    StoreAccessError,
    StoreBusyError,
    StoreError,
    StoreExistsError,
    StoreFullError,
    StoreGoneError,
)
from ragkv.store.cache import MemoryTier
from ragkv.store.counters import update_counters
from ragkv.store.data_file import (
    OpenFile,
    PageProgress,
    PageReport,
    Reserve,
    TrustStamp,
    allocate_lock,
    check_pages,
    free_bytes,
    log_progress,
    read_header,
    refuse_links,
    refuse_network,
)
from ragkv.store.tables import TABLES, Transaction
from ragkv.util.files import FULL, NotPlainError, open_plain, parse_json, refusal, require_plain

logger = logging.getLogger(__name__)


class RWLock:
    """A lock that transactions share, and that resizing, forking and closing take exclusively.

    An interrupt (Ctrl-C) can come between any two calls of Python. So the lock itself is taken, not the condition,
    whose methods could return with the lock still held; and `leave` undoes an interrupted `enter`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._inside = set[object]()
        self._shut = False

    def enter(self, who: object) -> None:
        with self._lock:
            while self._shut:
                self._changed.wait()
            self._inside.add(who)

    def leave(self, who: object) -> None:
        with self._lock:
            self._inside.discard(who)
            if self._shut:
                self._changed.notify_all()

    def shut(self) -> None:
        with self._lock:
            self._changed.wait_for(lambda: not self._shut)
            try:
                self._shut = True
                self._changed.wait_for(lambda: not self._inside)
            except BaseException:  # an interrupt: let others continue
                self._shut = False
                self._changed.notify_all()
                raise

    def reopen(self) -> None:
        with self._lock:
            self._shut = False
            self._changed.notify_all()


MAX_READERS = 512
"""Reader slots in the lock table of an environment."""

_MIB = 1 << 20
_DAMAGE = (
    lmdb.CorruptedError,
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.NotFoundError,
    lmdb.PageNotFoundError,
)


@contextmanager
def translated(directory: Path) -> Iterator[None]:
    """Turn errors that the block raises into a `StoreError` about the store in `directory`.

    `lmdb.MapFullError` passes: the map then has to grow.
    """
    try:
        yield
    except lmdb.MapFullError:
        raise
    except _DAMAGE as error:
        raise CorruptStoreError(
            f"{directory} is damaged ({error}): restore a backup, or delete it and ingest again"
        ) from error
    except (lmdb.ReadonlyError, PermissionError) as error:
        raise StoreAccessError(f"{directory} may not be read or written by you ({refusal(error)})") from error
    except lmdb.ReadersFullError as error:
        raise StoreError(
            f"{directory} is being read {MAX_READERS} times at once, which is the limit: "
            "end some of the processes or threads that read it, and try again"
        ) from error
    except (lmdb.Error, OSError) as error:
        if os.strerror(errno.EROFS) in str(error):
            raise StoreAccessError(f"{directory} may not be written: it is on a read-only mount") from error
        if is_full(error, directory):
            raise StoreFullError(
                f"the disk or quota under {directory} is full; nothing that was committed is lost: "
                "make room and try again, delete documents that you do without, or copy the index to a larger disk "
                "(ragkv backup)"
            ) from error
        raise StoreError(f"{directory} cannot be used ({error})") from error


def is_full(error: Exception, directory: Path) -> bool:
    """Whether an error of LMDB or of the system means that the disk under `directory` is full."""
    if isinstance(error, lmdb.DiskError) or any(os.strerror(code) in str(error) for code in FULL):
        return True
    # LMDB reports a short write, which a full disk causes, as an input/output error.
    free = 0
    with suppress(OSError):
        free = shutil.disk_usage(directory).free
    return os.strerror(errno.EIO) in str(error) and free < _MIB


class FileMap:
    """An open environment and its transactions. LMDB reads no page of a table before the table is opened."""

    def __init__(self, directory: Path, *, readonly: bool, create: bool, map_size: int) -> None:
        self.directory = directory
        self.readonly = readonly
        self.data = directory / "data.mdb"
        self.tables: dict[str, Any] = {}
        self.rwlock = RWLock()
        self._gone = "is closed: open it again"
        with translated(self.directory):
            header = read_header(self.data)
            if header is None and not create:
                raise CorruptStoreError(f"{self.data} is missing or empty: restore a backup, or ingest again")
            self.is_new = header is None
            self.env: Any = self._open(map_size=header.map_size if header else map_size, create=create)
            # Without a lock table (on a read-only mount, or without permission), no writer knows that we read: see
            # `read`.
            self.unlocked = self.env.readers().startswith("(no reader locks)")
            try:
                self.page_size = int(self.env.stat()["psize"])
                self.file = OpenFile(self.data)
                self._lock_file = None if self.unlocked else OpenFile(directory / "lock.mdb")
                self.env.reader_check()
            except BaseException:
                self.env.close()
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
            return lmdb.open(os.fsencode(self.directory), **options)
        except (lmdb.ReadonlyError, PermissionError):
            if not self.readonly or not os.access(self.data, os.R_OK):
                raise
            return lmdb.open(os.fsencode(self.directory), **options, lock=False)

    def reopen(self, open_tables: Callable[[], dict[str, Any]], *, readonly: bool) -> None:
        """Open the environment and its tables again, when all transactions have ended."""
        with translated(self.directory):
            self.rwlock.shut()
            try:
                map_size = max(self.live().info()["map_size"], self.data.stat().st_size)
                self.env.close()
                self.env, self.readonly = None, readonly
                self.env = self._open(map_size=map_size, create=False)
                self.tables = open_tables()
            finally:
                self.rwlock.reopen()

    def close(self) -> None:
        """Wait for the transactions, and close the environment, unless its lock table was cut.

        LMDB would then touch lost pages of the table, which raises SIGBUS. So the environment stays open until the
        process ends.
        """
        self.rwlock.shut()
        if self._lock_file is not None and self._lock_file.is_cut():
            logger.warning("%s/lock.mdb was cut short while it was open", self.directory)
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.env))
        else:
            self.env.close()
        self.env = None
        self.rwlock.reopen()

    def forget(self) -> None:
        """Mark it as unusable in the child of a fork."""
        self.env.close()
        self.env = None
        self._gone = "was opened before a fork: open it again in this process"
        self.rwlock = RWLock()  # the old one may be held by a thread that the child does not have

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        """A snapshot. Keep it short, because writers cannot reuse pages meanwhile; never open one inside another.

        `StoreError` when the store was read without a lock, and a writer may have changed the snapshot's pages.
        """
        with translated(self.directory), self.begin(write=False) as txn:
            try:
                yield txn
            except Exception as error:
                self._refuse_overtaken(txn, error)
                raise
            self._refuse_overtaken(txn, None)

    def _refuse_overtaken(self, txn: Transaction, error: Exception | None) -> None:
        """Refuse what was read without a lock if a writer may have changed it meanwhile.

        Even if a writer knows of no reader, it leaves the pages of the last two snapshots unchanged, because it needs
        them if it is killed. So a read is consistent if there was at most one commit since.
        """
        if self.unlocked and self.live().info()["last_txnid"] > txn.number() + 1:
            raise StoreError(
                f"{self.directory} was written to while it was read without a lock (it may not be written from "
                "here): try again when the writing has ended"
            ) from error

    @contextmanager
    def begin(self, *, write: bool) -> Iterator[Transaction]:
        while True:
            me = object()
            try:
                self.rwlock.enter(me)
                with self.snapshot(write=write) as txn:
                    transaction = Transaction(txn, self.tables)
                    del txn
                    with closing(transaction):
                        yield transaction
                return
            except lmdb.ReadersFullError:  # here and below: raised before anything was yielded
                if not self.clear_stale():
                    raise
                continue
            except lmdb.MapResizedError:
                pass  # another process grew the map
            finally:
                self.rwlock.leave(me)
            self.resize(None)

    @contextmanager
    def snapshot(self, *, write: bool = False) -> Iterator[Any]:
        """LMDB's transaction, begun only if the files have their full length.

        If a file was cut while it was open, touching a missing page kills the process. A file that is cut during the
        transaction is not noticed in time.
        """
        env = self.live()
        if self._lock_file is not None:
            self._lock_file.size()
        size = self.file.size(2 * self.page_size)  # beginning reads a meta page
        with env.begin(write=write, buffers=True) as txn:
            needed = (env.info()["last_pgno"] + 1) * self.page_size
            if size < needed:  # the file was cut, unless another process has extended it meanwhile
                self.file.size(needed)
            yield txn

    def clear_stale(self) -> int:
        """Free the reader slots of processes that were killed; returns how many."""
        with translated(self.directory):
            return int(self.live().reader_check())

    def live(self) -> Any:
        if self.env is None:
            raise StoreError(f"{self.directory} {self._gone}")
        return self.env

    def resize(self, need: int | None) -> None:
        """Double the map, or more to make room for `need` bytes; with None, make it as long as the file.

        The file is as long as the map of its last writer.
        """
        with translated(self.directory):
            self.rwlock.shut()
            try:
                env, target = self.live(), self.data.stat().st_size
                if need is not None:
                    size = env.info()["map_size"]
                    target = -(-max(2 * size, size + 2 * need) // _MIB) * _MIB
                self.map_again(target)
            finally:
                self.rwlock.reopen()

    def map_again(self, size: int) -> None:
        """Map `size` bytes instead, while there is no transaction. `StoreError` if the address space has no room.

        LMDB releases its map before it makes another, and loses the environment if that fails. So the room is checked
        first.
        """
        env = self.live()
        more = size - env.info()["map_size"]
        try:
            if more > 0:
                mmap.mmap(-1, more, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ).close()
        except OSError as error:
            raise StoreError(
                f"{self.directory} has grown to {size} bytes, and this process may not map that much "
                f"({error.strerror}): allow it more address space (ulimit -v)"
            ) from error
        env.set_mapsize(size)


LOCK_FILE = "writer.lock"

_SETTLE = 1.0  # seconds that a new holder has to write its name
_POLL = 0.25
_YEAR_9999 = 253_370_764_800  # the last year for which `time.localtime` works everywhere


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The process that holds the lock; `since` is in seconds since 1970."""

    pid: int
    host: str
    command: str
    since: float

    def __str__(self) -> str:
        """`PID 123 (ragkv ingest docs/, since 12:01)`, with the host if it is another, and the day if not today."""
        where = "" if self.host == socket.gethostname() else f" on {self.host}"
        began, today = time.localtime(self.since), time.localtime()
        day = "" if began[:3] == today[:3] else "%Y-%m-%d "
        return f"PID {self.pid}{where} ({self.command}, since {time.strftime(f'{day}%H:%M', began)})"

    def is_possible(self) -> bool:
        """Whether ragkv may have written this. Anybody can write the file, and its text appears in messages."""
        texts = (self.host, self.command)
        return (
            all(isinstance(text, str) and text.isprintable() for text in texts)
            and type(self.pid) is int
            and 0 < self.pid < 1 << 31
            and type(self.since) in (int, float)
            and 0 <= self.since < _YEAR_9999
        )

    def is_gone(self) -> bool:
        """Whether the process has certainly ended: if it was killed, its name is still in the file."""
        if self.host != socket.gethostname():
            return False
        try:
            os.kill(self.pid, 0)
        except OSError as error:
            return isinstance(error, ProcessLookupError)
        return False


class _Lease:
    """An open lock file. `fd` is None once it is closed; the child of a fork closes it at once."""

    __slots__ = ("fd",)

    def __init__(self, path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> None:
        with _leases_lock:  # a fork between the next two lines would leave the child an open file that it cannot close
            self.fd: int | None = open_plain(path, flags)
            _leases.add(self)

    def close(self) -> None:
        with _leases_lock:
            _leases.discard(self)
            if self.fd is not None:
                fcntl.flock(self.fd, fcntl.LOCK_UN)  # also for a child that a fork has just made
                os.close(self.fd)
                self.fd = None

    def try_flock(self) -> bool:
        """Take the lock of the open file. False if it is held through another descriptor."""
        if self.fd is None:
            return False
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def try_lock(self, path: Path) -> bool:
        """Take the lock. False if another process has it, or if `path` now names another file."""
        if self.fd is None or not self.try_flock():
            return False
        try:
            return os.path.samestat(os.fstat(self.fd), path.lstat())
        except FileNotFoundError:
            return False

    def read(self) -> Holder | None:
        """What the holder has written about itself; None if it has not written yet, or has ended."""
        try:
            holder = Holder(**parse_json(os.pread(self.fd or -1, 65536, 0)))
        except (ValueError, TypeError):
            return None
        return None if not holder.is_possible() or holder.is_gone() else holder

    def write(self, holder: Holder | None) -> None:
        if self.fd is not None:
            os.ftruncate(self.fd, 0)
            if holder is not None:
                try:
                    os.pwrite(self.fd, json.dumps(asdict(holder)).encode(), 0)
                except OSError as error:
                    # On a full disk, the job that deletes documents has to work without a name.
                    if error.errno not in FULL:
                        raise


class WriterLock:
    """The writer's lock of the store in `directory`. It is reentrant for its thread; others wait."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK_FILE
        self._owner: tuple[int, int] | None = None  # process and thread

    @contextmanager
    def hold(
        self, command: str, *, timeout: float | None = None, on_wait: Callable[[Holder], None] | None = None
    ) -> Iterator[None]:
        """Hold the lock within the `with` block; `command` names the job to others.

        Waits for `timeout` seconds (None: without limit, 0: not at all); then raises `StoreBusyError`, which names the
        holder. `on_wait` is called once for each holder that it waits for; by default a warning is logged, or a line of
        level INFO if the wait has a limit.
        """
        me = (os.getpid(), threading.get_ident())
        if self._owner == me:
            yield
            return
        level = logging.WARNING if timeout is None else logging.INFO
        lease = self._acquire(command, timeout, on_wait or partial(self._log, level))
        self._owner = me
        try:
            yield
        finally:
            if lease.fd is not None:  # None in the child of a fork, which leaves the block that its parent entered
                self._owner = None
                with suppress(OSError):  # of a disk that fails: what the block raised says more, and the lock is freed
                    lease.write(None)
            lease.close()

    def holder(self) -> Holder | None:
        """Who holds the lock now, as far as that is known."""
        try:
            if not require_plain(self._path):
                return None
            lease = _Lease(self._path)
        except OSError as error:
            raise self._refused(error) from error
        try:
            return None if lease.try_lock(self._path) else lease.read()
        finally:
            lease.close()

    def _acquire(self, command: str, timeout: float | None, on_wait: Callable[[Holder], None]) -> _Lease:
        began, pause, reported = time.monotonic(), 0.005, None
        while True:
            try:
                lease = _Lease(self._path)
            except OSError as error:
                raise self._refused(error) from error
            try:
                if lease.try_lock(self._path):
                    lease.write(Holder(pid=os.getpid(), host=socket.gethostname(), command=command, since=time.time()))
                    return lease
                holder = lease.read()
            except OSError as error:
                lease.close()
                raise self._refused(error) from error
            except BaseException:
                lease.close()
                raise
            lease.close()
            waited = time.monotonic() - began
            if timeout is not None and waited >= timeout and (holder or waited >= timeout + _SETTLE):
                raise StoreBusyError(
                    f"{self._path.parent} is being written by {holder or 'another process'}: "
                    "wait until that has ended, or stop it; what it has committed stays"
                )
            if holder is not None and holder != reported:
                on_wait(holder)
                reported = holder
            time.sleep(pause)
            pause = min(2 * pause, _POLL)

    def _log(self, level: int, holder: Holder) -> None:
        logger.log(level, "waiting for %s, which writes to %s", holder, self._path.parent)

    def _refused(self, error: OSError) -> StoreError:
        if isinstance(error, NotPlainError):
            return StoreError(f"{self._path} cannot be locked ({error.strerror}): delete it, it holds nothing")
        if error.errno in FULL:
            return StoreFullError(f"the disk or quota under {self._path.parent} is full: make room and try again")
        if isinstance(error, FileNotFoundError):
            return StoreGoneError(f"{self._path.parent} is gone: open the index again where it is now")
        return StoreAccessError(f"{self._path.parent} may not be written by you ({error.strerror})")


_leases: set[_Lease] = set()
_leases_lock = threading.Lock()


def _locks_in_child() -> None:
    """Close the lock files: a child shares them with its parent, and would keep the lock after the parent's end."""
    for lease in _leases:
        if lease.fd is not None:
            os.close(lease.fd)
            lease.fd = None
    _leases.clear()
    _leases_lock.release()


os.register_at_fork(
    before=cast("Any", _leases_lock.acquire),
    after_in_parent=_leases_lock.release,
    after_in_child=_locks_in_child,
)


FORMAT_VERSION = 4
"""Version of the tables and their rows (docs/formats.md)."""

OPEN_SECONDS = 1.0
"""How long opening a store waits for another writer's transaction, before it opens the store read-only at first."""
WRITE_SECONDS = 10.0
"""How long a transaction waits for that of another writer, unless it belongs to a long job."""

_ATTEMPTS = 5  # to check a file that other processes write to meanwhile
LOOK_SECONDS = 60.0
"""Seconds between two checks of an open store that only this user's processes have written to its file."""
_LOOK_SHARE = 0.01  # the most of a process's time that checks of an open store take

LMDB_FILES = ("data.mdb", "lock.mdb")

_WALK_BYTES = 32 * _MIB
_WALK_KEYS = 1024
T = TypeVar("T")


class Database:
    """An open environment with the tables of a store. Get it with `acquire`, return it with `release`."""

    def __init__(self, directory: Path, *, readonly: bool, create: bool, map_size: int) -> None:
        self.directory = directory
        self.readonly = readonly
        self._map = FileMap(directory, readonly=readonly, create=create, map_size=map_size)
        self._stamp = TrustStamp(self._map.data)
        self._reserve = Reserve(self._map.data)
        self._users = 0
        self._tiers: dict[str, MemoryTier] = {}
        self._look_at = time.monotonic() + LOOK_SECONDS
        self._damage = ""
        self._jobs = 0  # long jobs that write in this process
        self._overdue = False
        try:
            with translated(directory):
                self._prepare(create=create)
        except BaseException:
            self._map.env.close()
            raise

    def _prepare(self, *, create: bool) -> None:
        """Check the pages, unless this user's processes have done so, and then open the tables: LMDB reads no page of a
        table before."""
        while True:
            try:
                if not self._map.is_new and not self._stamp.holds():
                    self.check_pages(log_progress(self._map.data))
                self._map.tables = self._create_tables() if create else self._open_tables()
                return
            except lmdb.MapResizedError:  # another process grew the map since the header was read
                self._map.map_again(self._map.data.stat().st_size)

    def check_pages(self, on_progress: PageProgress | None = None) -> PageReport:
        """Check every page of the newest snapshot, and the list of free pages; `CorruptStoreError` for damage.

        While a transaction holds a snapshot, its pages and those of later snapshots are not overwritten, except for the
        two meta pages. Without a lock table no writer knows of the snapshot, so damage only counts if no process wrote
        meanwhile.
        """
        with translated(self.directory):
            for attempt in range(_ATTEMPTS):
                stamp = self._stamp.at_rest()
                with self._map.begin(write=False) as txn:
                    try:
                        report = check_pages(self._map.data, on_progress)
                    except CorruptStoreError:
                        if self._map.env.info()["last_txnid"] == txn.number() or attempt == _ATTEMPTS - 1:
                            raise
                    else:
                        self._stamp.write(stamp)
                        return report
        raise AssertionError("the last attempt returns or raises")

    def _create_tables(self) -> dict[str, Any]:
        with self._writing() as txn:
            tables = {name: self._table(name, txn, create=True) for name in TABLES}
            if not txn.put(b"format", b"%d" % FORMAT_VERSION, db=tables["meta"], overwrite=False):
                raise StoreExistsError(f"{self.directory} holds a store already: open it instead")
        return tables

    def _open_tables(self) -> dict[str, Any]:
        """Open the tables.

        This takes a write transaction although nothing changes, because py-lmdb forgets tables that were opened in a
        read transaction, unless the environment is read-only. So it is read-only at first if another process is within
        a transaction.
        """
        if not self.readonly:
            try:
                with self._turn(OPEN_SECONDS), self._map.env.begin(write=True) as txn:
                    return self._tables_in(txn)
            except StoreBusyError as error:
                logger.info("opened read-only until it is written to: %s", error)
                self._map.reopen(lambda: self._tables_in(None), readonly=True)
                return self._map.tables
        return self._tables_in(None)

    def _for_writing(self) -> FileMap:
        """The map, opened again if it was opened read-only because another process was writing."""

        def tables() -> dict[str, Any]:
            with self._map.env.begin(write=True) as txn:
                return self._tables_in(txn)

        if self._map.readonly:
            self._map.reopen(tables, readonly=False)
        return self._map

    def _tables_in(self, txn: Any) -> dict[str, Any]:
        try:
            meta = self._table("meta", txn)
            with self._map.env.begin() if txn is None else nullcontext(txn) as reading:
                version = int(reading.get(b"format", db=meta))
        except (lmdb.NotFoundError, TypeError, ValueError) as error:
            raise CorruptStoreError(
                f"{self.directory} is an LMDB environment, but no finished store of ragkv: delete it and ingest again"
            ) from error
        if version != FORMAT_VERSION:
            raise StoreError(
                f"{self.directory} has format {version}, and this ragkv reads format {FORMAT_VERSION}: "
                + ("upgrade ragkv" if version > FORMAT_VERSION else "ingest again into a new index")
            )
        return {name: self._table(name, txn) for name in TABLES}

    @contextmanager
    def _writing(self) -> Iterator[Any]:
        """LMDB's own write transaction, with the stamp of a process that writes."""
        with self._turn(WRITE_SECONDS), self._map.env.begin(write=True) as txn:
            self._stamp.begin()
            yield txn
        self._stamp.end()

    @contextmanager
    def _turn(self, seconds: float) -> Iterator[None]:
        """Be the only one that writes, of all threads and processes.

        `StoreBusyError` if that takes more than `seconds`; the next call then does not wait at all. A long job waits
        for as long as it takes.
        """
        try:
            lease = _Lease(self._map.data, os.O_RDONLY)
        except FileNotFoundError:
            self._map.file.size()  # raises: it was moved or deleted
            raise
        try:
            ends, pause, warned = time.monotonic() + (0 if self._overdue else seconds), 0.001, False
            while lease.fd is not None and not lease.try_flock():
                if time.monotonic() >= ends:
                    if not self._jobs:
                        self._overdue = True
                        raise StoreBusyError(f"{self.directory} cannot be written: {self._why_busy()}")
                    if not warned:
                        logger.warning("waiting to write to %s: %s", self.directory, self._why_busy())
                    warned = True
                time.sleep(pause)
                pause = min(2 * pause, _POLL / 10)
            self._overdue = False
            yield
        finally:
            lease.close()

    def _why_busy(self) -> str:
        holder = None
        with suppress(StoreError):
            holder = WriterLock(self.directory).holder()
        return (
            f"{holder or 'another process'} has been within a transaction for long and may be suspended; "
            "let it continue (fg, kill -CONT), or end it"
        )

    @contextmanager
    def long_job(self) -> Iterator[None]:
        """Within the block, this process waits for other writers without a limit."""
        self._jobs += 1
        try:
            yield
        finally:
            self._jobs -= 1

    def _table(self, name: str, txn: Any, *, create: bool = False) -> Any:
        several = TABLES[name]
        return self._map.env.open_db(name.encode(), txn=txn, create=create, dupsort=several, dupfixed=several)

    @property
    def in_place(self) -> bool:
        """Whether the file that was opened is still the one at its path."""
        return self._map.file.in_place

    def read(self) -> AbstractContextManager[Transaction]:
        """A snapshot, as `FileMap.read`; `CorruptStoreError` if the file was found damaged since it was opened."""
        self._look_again()
        return self._map.read()

    def _look_again(self) -> None:
        """From time to time, check the pages again if something other than this user's processes wrote to the file.

        LMDB would follow damaged pages, which may kill the process.
        """
        began = time.monotonic()
        if began >= self._look_at and self.in_place:
            self._look_at = began + LOOK_SECONDS  # other threads continue meanwhile
            self._damage = ""
            if not self._stamp.holds():
                try:
                    self.check_pages(log_progress(self._map.data))
                except CorruptStoreError as error:
                    self._damage = str(error)
                ended = time.monotonic()
                self._look_at = ended + max(LOOK_SECONDS, (ended - began) / _LOOK_SHARE)
        if self._damage:
            raise CorruptStoreError(self._damage)

    def sizes(self) -> tuple[int, int]:
        """The bytes that the file takes on the disk, and the bytes of the map."""
        with self._map.read():
            return self._map.data.stat().st_blocks * 512, int(self._map.live().info()["map_size"])

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
                except (StoreAccessError, StoreFullError) as error:
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
        """Return one `acquire`. The last one closes the environment, when all transactions have ended; if that is
        interrupted, it stays open until the next `release`.
        """
        with _registry_lock:
            if self._users == 1 and self._map.env is not None:
                self._map.close()
                for identifier in [known for known, database in _registry.items() if database is self]:
                    del _registry[identifier]
            self._users -= 1

    def write(self, apply: Callable[[Transaction], T], *, need: int = 0) -> T:
        """Run `apply` in one transaction: all of it takes effect or, if it raises, nothing.

        `apply` may run several times, because the map may have to grow. `need` is about how many bytes it writes. With
        0 it adds next to nothing, and may use the disk space that is reserved for it (`ragkv.store.data_file`).
        """
        if self.readonly:
            raise StoreError(f"{self.directory} is open read-only: open it with readonly=False to change it")
        self._look_again()
        while True:
            try:
                with (
                    translated(self.directory),
                    self._turn(WRITE_SECONDS),
                    self._for_writing().begin(write=True) as txn,
                ):
                    self._stamp.begin()
                    # Only here, under the write lock, can no other process change the file's length.
                    map_size = self._map.live().info()["map_size"]
                    if self._map.data.stat().st_size < map_size:
                        os.truncate(self._map.data, map_size)
                    self._keep_reserve(need)
                    result = apply(txn)
                    update_counters(txn)
            except lmdb.MapFullError:
                # Dead readers keep pages from being reused. Without them, there may be enough room.
                if not self._map.clear_stale():
                    self._map.resize(need)
                continue
            except StoreFullError:
                self._map.resize(None)  # the file cannot grow, so the map must not be larger than the file
                raise
            finally:
                self._stamp.end()
            for tier in list(self._tiers.values()):
                tier.drop(txn.changed)
            return result

    def _keep_reserve(self, need: int) -> None:
        """Make sure that a transaction that adds to the store leaves room for one that deletes from it."""
        info = self._map.live().info()
        used = (info["last_pgno"] + 1) * self._map.page_size
        end = self._reserve.wanted(used, need)
        short = end > info["map_size"]
        try:
            self._reserve.keep(used, min(end, info["map_size"]))
        except OSError as error:
            # Free pages within the file serve as well.
            if error.errno not in FULL or (need and free_bytes(self._map.data) < end - used + need):
                raise
        else:
            if short and need and free_bytes(self._map.data) < end - used + need:
                raise lmdb.MapFullError

    def memory(self, device: str) -> MemoryTier:
        """The cache of this store's KV on a device in this process, until the last store closes or a fork."""
        self._map.live()
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
        """Call `write` with the environment's file as of one snapshot, in blocks, while others read and write.

        LMDB writes into a pipe, so `write` can report progress, and stop the copy by raising. During the copy this
        process cannot grow the map: a writer that needs it waits, and so do the transactions after it.
        """
        while True:
            with self.read():
                failure = self._pour(write)
                if failure is None:
                    return
                if not isinstance(failure, lmdb.MapResizedError):
                    raise failure
            self._map.resize(None)  # another process grew the map; LMDB reports that before it writes anything

    def _pour(self, write: Callable[[memoryview], object]) -> Exception | None:
        """Call `write` with LMDB's output; returns the error that stopped LMDB, if any."""
        env, (source, sink) = self._map.live(), os.pipe()
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
            with open(source, "rb", buffering=0) as stream:  # noqa: PTH123 - a pipe has no path
                while size := stream.readinto(buffer):
                    write(memoryview(buffer)[:size])
        finally:
            filler.join()  # it ends even if `write` has raised, because the pipe is closed by then
        return failures[0] if failures else None


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
        database._map.rwlock.shut()


def _in_parent() -> None:
    for database in _registry.values():
        database._map.rwlock.reopen()
    _registry_lock.release()


def _in_child() -> None:
    for database in _registry.values():
        database._map.forget()
    _registry.clear()
    _registry_lock.release()


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
