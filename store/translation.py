"""Errors of LMDB and of the system, turned into ragkv's: one sentence that says what to do."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import lmdb

from ragkv.errors import CorruptStoreError, StoreAccessError, StoreError, StoreFullError
from ragkv.store.pages.file import FULL

__all__ = ["MAX_READERS", "is_full", "translated"]

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
        raise StoreAccessError(f"{directory} may not be read or written by you ({error})") from error
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
