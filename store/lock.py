"""The writer's lock: one long writing job at a time, and a name for who has it.

With LMDB's own mutex, every transaction silently waits for the one before it. That is right for a put of milliseconds.
It is wrong for an ingest of hours: two of them would do work twice or undo each other's, and nobody would be told why
nothing moves. So a job holds `writer.lock` from its first look at the store to its last commit. A single transaction,
such as a query that stores KV, does not take the lock.

The lock is flock's. The kernel releases it however the process ends, so that it is never stale, and the file is never
deleted. The file's content is only used in messages.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ragkv.boundary.plainfile import NotPlainError, open_plain, parse_json, require_plain
from ragkv.errors import StoreAccessError, StoreBusyError, StoreError, StoreFullError
from ragkv.store.pages.file import FULL

__all__ = ["LOCK_FILE", "Holder", "WriterLock"]

LOCK_FILE = "writer.lock"

_SETTLE = 1.0  # seconds that a new holder has to write its name
_POLL = 0.25
_YEAR_9999 = 253_370_764_800  # the last year for which `time.localtime` works everywhere

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The process that has the lock; `since` is in seconds since 1970."""

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
        """Whether the process has certainly ended: its name stays in the file when it is killed."""
        if self.host != socket.gethostname():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False


class _Lease:
    """An open lock file. `fd` is None once it is closed, which in the child of a fork it is from the start."""

    __slots__ = ("fd",)

    def __init__(self, path: Path) -> None:
        with _leases_lock:  # a fork between the next two lines would leave the child an open file that it cannot close
            self.fd: int | None = open_plain(path, os.O_RDWR | os.O_CREAT)
            _leases.add(self)

    def close(self) -> None:
        with _leases_lock:
            _leases.discard(self)
            if self.fd is not None:
                os.close(self.fd)
                self.fd = None

    def try_lock(self, path: Path) -> bool:
        """Take the lock. False when another process has it, or when `path` names another file by now."""
        if self.fd is None:
            return False
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        try:
            return os.path.samestat(os.fstat(self.fd), path.lstat())
        except FileNotFoundError:
            return False

    def read(self) -> Holder | None:
        """What the holder wrote about itself; None when it has not written yet, or has ended."""
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
    """The writer's lock of the store in `directory`. The thread that holds it may take it again; others wait."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK_FILE
        self._owner: tuple[int, int] | None = None  # process and thread

    @contextmanager
    def hold(
        self, command: str, *, timeout: float | None = None, on_wait: Callable[[Holder], None] | None = None
    ) -> Iterator[None]:
        """Hold the lock within the `with` block; `command` names the job to others.

        Waits for `timeout` seconds, without end when it is None, and not at all when it is 0; then `StoreBusyError`
        names the holder. `on_wait` is called once for each holder that is waited for; unset, the log gets a warning.
        """
        me = (os.getpid(), threading.get_ident())
        if self._owner == me:
            yield
            return
        lease = self._acquire(command, timeout, on_wait or self._log)
        self._owner = me
        try:
            yield
        finally:
            if lease.fd is not None:  # None in the child of a fork, which leaves the block that its parent entered
                self._owner = None
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
        began, pause, told = time.monotonic(), 0.005, None
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
            if holder is not None and holder != told:
                on_wait(holder)
                told = holder
            time.sleep(pause)
            pause = min(2 * pause, _POLL)

    def _log(self, holder: Holder) -> None:
        logger.warning("waiting for %s, which writes to %s", holder, self._path.parent)

    def _refused(self, error: OSError) -> StoreError:
        if isinstance(error, NotPlainError):
            return StoreError(f"{self._path} cannot be locked ({error.strerror}): delete it, it holds nothing")
        if error.errno in FULL:
            return StoreFullError(f"the disk or quota under {self._path.parent} is full: make room and try again")
        return StoreAccessError(f"{self._path.parent} may not be written by you ({error.strerror})")


_leases: set[_Lease] = set()
_leases_lock = threading.Lock()


def _in_child() -> None:
    """Close the lock files: a child shares them with its parent, and would keep the lock after the parent's end."""
    for lease in _leases:
        if lease.fd is not None:
            os.close(lease.fd)
            lease.fd = None
    _leases.clear()
    _leases_lock.release()


def _register() -> None:
    before: Any = _leases_lock.acquire
    os.register_at_fork(before=before, after_in_parent=_leases_lock.release, after_in_child=_in_child)


_register()
