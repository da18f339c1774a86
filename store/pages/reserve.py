"""A reserve of disk space, so that documents can still be deleted when the disk is full.

LMDB writes a changed page to a new place before it can free the old one, so that deleting needs space too. The reserve
is in `data.mdb` itself, behind the last page: blocks that the file system has given to the file, and that no other file
can take. A transaction that adds to the store has to leave it there (`Database.write` with a `need`); one that deletes
may write into it. Nothing is created or returned, so that a crash cannot leave anything half done.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from ragkv.store.pages.file import FULL

__all__ = ["Reserve", "allocate_lock", "reserve_bytes"]

_MIB = 1 << 20
_LEAST, _MOST = _MIB // 2, 64 * _MIB
_PAGE = 4096
_CANNOT = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV})


def reserve_bytes(used: int) -> int:
    """How many bytes are kept free behind `used` bytes of pages.

    A deletion rewrites leaves, branches and lists of free pages. That is a few per cent of a store, because the bytes
    of KV are on pages of their own.
    """
    return min(max(used // 8, _LEAST), _MOST)


class Reserve:
    """The reserve of one data file, as this process knows it. Use it under LMDB's write lock."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self._end = 0  # the file has blocks up to here, and keeps them

    def wanted(self, used: int, need: int) -> int:
        """The offset up to which blocks are needed for a transaction that writes about `need` bytes behind `used`.

        Blocks for `need` itself are only included when the disk is nearly full, so that files do not grow needlessly.
        """
        end = used + reserve_bytes(used)
        if need and shutil.disk_usage(self._data).free < 2 * need + reserve_bytes(used):
            end += need
        return end

    def keep(self, used: int, end: int) -> None:
        """Allocate blocks from `used` to `end`; `OSError` of `FULL` when there are none.

        Does nothing where the file system cannot allocate blocks in advance.
        """
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
    """Allocate blocks for LMDB's lock table: LMDB writes it through a map, where a full disk is SIGBUS.

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
        # If an old table was never allocated in full, its first page is enough for all but unusually many readers.
        if error.errno in FULL and status.st_blocks * 512 < _PAGE:
            raise
    finally:
        os.close(descriptor)
