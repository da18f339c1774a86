"""Memory that was freed goes back to the system.

Every answer has a thread, and glibc gives threads heaps of their own, which keep what was freed in them; and it takes
ever larger tensors from these heaps once one of that size was freed (mallopt(3), M_ARENA_MAX and M_MMAP_THRESHOLD). So
a server's memory would grow for hours after it needed no more.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

__all__ = ["limit_heaps", "trim_memory"]

_HEAPS = 2
_MAPPED_FROM = 1 << 20
"""Bytes from which on memory is the system's own mapping, which goes back when it is freed."""
# mallopt's numbers, from glibc's malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def limit_heaps() -> None:
    """Few heaps for all threads of this process, and large tensors in none; as early in a process as can be.

    Does nothing where the system's library cannot (macOS, musl), or where the user has set `MALLOC_…` variables.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt(_M_ARENA_MAX, _HEAPS)
    mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM)
    mallopt(_M_TRIM_THRESHOLD, 16 * _MAPPED_FROM)


def trim_memory() -> None:
    """Give free pages of all heaps back; nothing where the system's library cannot (macOS, musl). Milliseconds."""
    if (trim := _malloc_trim()) is not None:
        trim(0)


@cache
def _malloc_trim() -> ctypes._NamedFuncPointer | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
