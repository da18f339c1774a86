"""Room kept back, so that what takes documents away still works when the disk is full.

LMDB writes every page that a transaction changes anew before it can free the old one, so that deleting needs room too.
The reserve lies in `data.mdb` itself, behind the last page: blocks that the file system has given to the file, and that
nobody else can take. What adds to the store has to leave it there (`Database.write` with a `need`); what deletes may
write into it. Nothing has to be made or given back, so there is nothing for a crash to leave half done.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from ragkv.store.pages.file import FULL

__all__ = ["Reserve", "allocate_lock", "reserve_bytes"]

_MIB = 1 << 20
_LEAST, _MOST = _MIB // 2, 64 * _MIB
_PAGE = 4096
_CANNOT = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV})


def reserve_bytes(used: int) -> int:
    """How much room is kept behind `used` bytes of pages.

    A deletion writes leaves and branches anew, and their lists of free pages: some per cent of a store, as the
    bytes of KV lie on pages of their own.
    """
    return min(max(used // 8, _LEAST), _MOST)


class Reserve:
    """The reserve of one data file, as far as this process has seen to it. Use it under LMDB's write lock."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self._end = 0  # blocks up to here are known to be there; they stay

    def wanted(self, used: int, need: int) -> int:
        """The offset at which the room must end for a transaction that writes about `need` bytes behind `used`.

        Its own bytes are only asked for on a disk that is nearly full, lest a file be longer than it has to.
        """
        end = used + reserve_bytes(used)
        if need:
            disk = os.statvfs(self._data)
            if disk.f_bavail * disk.f_frsize < 2 * need + reserve_bytes(used):
                end += need
        return end

    def keep(self, used: int, end: int) -> None:
        """Have blocks from `used` to `end`; `OSError` of `FULL` when there are none. Does nothing where the file
        system cannot say so."""
        if end <= self._end:
            return
        descriptor = os.open(self._data, os.O_RDWR)
        try:
            os.posix_fallocate(descriptor, used, end - used)
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
        finally:
            os.close(descriptor)
        self._end = end


def allocate_lock(lock: Path) -> None:
    """Have blocks for LMDB's lock table: it is written through a map, where a full disk is SIGBUS.

    `OSError` of `FULL` when there are none. A file that may not be written is left to LMDB.
    """
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o664)
    except OSError as error:
        if error.errno in FULL:
            raise
        return
    try:
        status = os.fstat(descriptor)
        os.posix_fallocate(descriptor, 0, max(_PAGE, status.st_size))
    except OSError as error:
        # of an old table that was never allocated, the first page serves more readers than most have
        if error.errno in FULL and status.st_blocks * 512 < _PAGE:
            raise
    finally:
        os.close(descriptor)
