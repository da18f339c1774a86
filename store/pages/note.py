"""What a process that may write leaves for the next one, so that not each checks all pages before its first write.

A writer takes pages from LMDB's list of free pages, and would write over live ones if the list were wrong. Only a walk
over all pages can show that it is right. So after each commit of a process that has had it shown, the note says which
state that was, and what the list was. It holds for the very file as it was left: whatever touches the file changes its
times. What a disk loses silently does not, so that the list is compared, and pages are checked when they are needed
(`ragkv.store.pages.guard`). docs/formats.md, "What is checked when".
"""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Self

from ragkv.boundary.plainfile import open_plain, read_plain
from ragkv.store.pages.snapshot import free_digest
from ragkv.store.seal import DamagedError, seal, unseal

__all__ = ["NOTE_FILE", "Note"]

NOTE_FILE = "checked"
_FIELDS = struct.Struct("<7Q")


@dataclass(frozen=True, slots=True)
class Note:
    """A file in a state: its identity, its size in bytes, its times (ns), the transaction, and the hash of its list of
    free pages."""

    device: int
    inode: int
    size: int
    changed: int
    modified: int
    transaction: int
    free: int

    @classmethod
    def of(cls, data: Path, transaction: int) -> Self | None:
        """What is to be noted now of the newest state; None when it is not the newest any more, or is damaged."""
        free = free_digest(data, transaction)
        if free is None:
            return None
        now = data.stat()
        mask = (1 << 64) - 1
        times = now.st_ctime_ns & mask, now.st_mtime_ns & mask
        return cls(now.st_dev & mask, now.st_ino & mask, now.st_size, *times, transaction, free)

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """The note in a store's folder; None when there is none that can be read."""
        with suppress(OSError, DamagedError, struct.error):
            return cls(*_FIELDS.unpack(unseal(read_plain(folder / NOTE_FILE, limit=1024))))
        return None

    def write(self, folder: Path) -> None:
        """Leave the note. If it cannot be written, or is lost with the power, the next writer checks all pages."""
        with suppress(OSError):
            descriptor = open_plain(folder / NOTE_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            try:
                os.pwrite(descriptor, seal(_FIELDS.pack(*astuple(self))), 0)
            finally:
                os.close(descriptor)
