"""Give back the memory that the pages of a mapped file take in this process.

A page that was read stays mapped until the system needs its memory, so that a process that goes through a large store
seems to hold all of it. The system keeps the file's pages in its cache anyway: after they are given back, the next
access maps them again, and nothing is lost.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

__all__ = ["give_back", "mapped_bytes"]

_DONTNEED = 4
_STATUS = Path("/proc/self/status")
_MAPS = Path("/proc/self/maps")


def mapped_bytes() -> int:
    """Bytes of files that are in this process's memory, libraries too; 0 where the system does not tell."""
    with suppress(OSError, ValueError):
        for line in _STATUS.read_text(encoding="ascii").splitlines():
            if line.startswith("RssFile:"):
                return int(line.split()[1]) * 1024
    return 0


def give_back(file: Path) -> int:
    """Unmap the resident pages of a file that is mapped read-only; the bytes of its maps, 0 if that is not possible.

    Other threads may read the map meanwhile: they only wait for the pages that they touch.
    """
    done = 0
    with suppress(OSError, ValueError, AttributeError):
        inode = file.stat().st_ino
        libc = ctypes.CDLL(None, use_errno=True)
        for line in _MAPS.read_bytes().splitlines():
            area, rights, _, _, number, *name = line.split(None, 5)
            if int(number) != inode or not name or os.fsencode(file.name) not in name[0] or b"w" in rights:
                continue
            start, end = (int(part, 16) for part in area.split(b"-"))
            if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _DONTNEED) == 0:
                done += end - start
    return done
