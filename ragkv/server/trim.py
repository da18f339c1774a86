"""Memory that was freed goes back to the system.

Every answer has a thread, and glibc gives threads heaps of their own, which keep what was freed in them. So a server's
memory would grow for hours after it needed no more.
"""

from __future__ import annotations

import ctypes
from functools import cache

__all__ = ["trim_memory"]


def trim_memory() -> None:
    """Give free pages of all heaps back; nothing where the system's library cannot (macOS, musl). Milliseconds."""
    if (trim := _malloc_trim()) is not None:
        trim(0)


@cache
def _malloc_trim() -> ctypes._NamedFuncPointer | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
