"""The socket in an index's folder, through which a server answers the commands of the user who started it.

It lies in a folder that only its owner may enter, `INDEX/resident/`, and both sides look at who owns what they find: an
index may come from anyone. Who has the lock beside the socket may make and remove it, so a second server leaves the
first one's alone, and whoever finds that nobody listens removes what a killed server has left.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["FOLDER", "Doorway", "knock", "peer", "vacant"]

FOLDER = "resident"
_SOCKET, _LOCK = "socket", "lock"
_LONGEST = 100
"""Bytes of a socket's path that every system takes; Linux reaches longer ones through /proc."""
_PEER = struct.Struct("3i")
_ENTER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_HELD = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


class Doorway:
    """A server's side of the socket: `listening`, until `close`."""

    def __init__(self, folder: int, lock: int, listening: socket.socket) -> None:
        self._folder = folder
        self._lock = lock
        self.listening = listening

    @classmethod
    def make(cls, index: Path) -> Doorway:
        """Listen in the folder of this index; what a killed server has left there is replaced.

        `BlockingIOError` when another server does; `OSError` when the folder cannot be written, belongs to another
        user, or is on a file system without sockets.
        """
        with suppress(FileExistsError):
            (index / FOLDER).mkdir(0o700)
        folder = os.open(index / FOLDER, _ENTER)
        try:
            if os.fstat(folder).st_uid != os.geteuid():
                raise PermissionError(errno.EPERM, "it belongs to another user", str(index / FOLDER))
            os.fchmod(folder, 0o700)
            lock = os.open(_LOCK, _HELD | os.O_CREAT, 0o600, dir_fd=folder)
            try:
                _hold(lock)
                return cls(folder, lock, _listen(index, folder))
            except BaseException:
                os.close(lock)
                raise
        except BaseException:
            os.close(folder)
            raise

    def close(self) -> None:
        """Nobody is let in any more: remove the socket, then the lock's claim."""
        with suppress(OSError):  # the index is gone, or may not be written any more
            os.unlink(_SOCKET, dir_fd=self._folder)
        self.listening.close()
        os.close(self._lock)
        os.close(self._folder)


def knock(index: Path, *, seconds: float) -> socket.socket | None:
    """A connection to the server of this index, run by the same user; None when there is none.

    A socket that nobody listens at is removed. `seconds` is the most that connecting may take.
    """
    try:
        with _private(index) as folder:
            found = os.lstat(_SOCKET, dir_fd=folder)
            if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
                return None
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.settimeout(seconds)
                connection.connect(_address(index, folder))
                if peer(connection)[1] == os.geteuid():
                    return connection
            except ConnectionRefusedError:
                _remove_stale(folder)
            except OSError:
                connection.close()
                raise
            connection.close()
            return None
    except OSError:
        return None


def vacant(index: Path) -> bool:
    """Whether no server holds the index's doorway (any more)."""
    try:
        with _private(index) as folder:
            lock = os.open(_LOCK, _HELD, dir_fd=folder)
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            finally:
                os.close(lock)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def peer(connection: socket.socket) -> tuple[int | None, int]:
    """Process and user at the other end. Where the system does not tell, only the folder's owner gets in."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None, os.geteuid()
    pid, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid


@contextmanager
def _private(index: Path) -> Iterator[int]:
    """The folder as a descriptor; `OSError` unless it is this user's and nobody else may enter it."""
    folder = os.open(index / FOLDER, _ENTER)
    try:
        found = os.fstat(folder)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(errno.EPERM, "it is not private to this user", str(index / FOLDER))
        yield folder
    finally:
        os.close(folder)


def _address(index: Path, folder: int) -> str:
    """A path of the socket that is short enough: that of a deep folder leads through its descriptor."""
    short = Path("/proc/self/fd", str(folder))
    if short.is_dir():
        return str(short / _SOCKET)
    path = str(index.absolute() / FOLDER / _SOCKET)
    if len(os.fsencode(path)) > _LONGEST:
        raise OSError(errno.ENAMETOOLONG, "the path is too long for a socket", path)
    return path


def _listen(index: Path, folder: int) -> socket.socket:
    with suppress(FileNotFoundError):
        os.unlink(_SOCKET, dir_fd=folder)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(_address(index, folder))
        os.chmod(_SOCKET, 0o600, dir_fd=folder)
        listening.listen(64)
    except BaseException:
        listening.close()
        raise
    return listening


def _hold(lock: int, *, tries: int = 40) -> None:
    """Take the lock, which clients have for a moment at most; `BlockingIOError` when a server has it."""
    for left in range(tries - 1, -1, -1):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not left:
                raise
            time.sleep(0.025)


def _remove_stale(folder: int) -> None:
    """Remove the socket that refused, unless a server is about to replace it."""
    with suppress(OSError):
        lock = os.open(_LOCK, _HELD, dir_fd=folder)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(_SOCKET, dir_fd=folder)
        finally:
            os.close(lock)
