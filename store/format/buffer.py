"""Memory for loaded KV, used again and again.

Loading raw KV costs little more than a copy, but the page faults of fresh memory cost more than the copy does:
so buffers come in huge pages, and the memory of one that nobody refers to any more serves the next.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["SPARE_BYTES", "drop_spares", "new_buffer", "spare_bytes"]

SPARE_BYTES = 256 << 20
"""At most so much unused memory is kept for the next buffers."""

_HUGE_PAGE = 2 << 20
_SMALLEST = 1 << 20  # malloc hands smaller ones out again by itself

_spares: deque[mmap.mmap] = deque()
"""Only touched in steps that are atomic under the GIL: memory comes back in finalizers, which run anywhere, also
under any lock."""


def new_buffer(nbytes: int) -> NDArray[np.uint8]:
    """`(nbytes,)` bytes of any content; their memory is used again once no array or tensor refers to it."""
    if nbytes < _SMALLEST:
        return np.empty(nbytes, np.uint8)
    memory = _spare(nbytes) or _fresh(nbytes)
    lease = _Lease(memory, nbytes)
    weakref.finalize(lease, _give_back, memory).atexit = False
    return np.asarray(lease)


def spare_bytes() -> int:
    """Memory that waits for the next buffers."""
    return sum(map(len, list(_spares)))


class _Lease:
    """What every array over a buffer refers to in the end."""

    def __init__(self, memory: mmap.mmap, nbytes: int) -> None:
        self._bytes = np.frombuffer(memory, np.uint8, count=nbytes)
        self.__array_interface__: dict[str, Any] = self._bytes.__array_interface__


def _fresh(nbytes: int) -> mmap.mmap:
    size = -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"there is no room for {size} bytes of KV") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without huge pages: slower, and as good
            return memory
    return memory


def _spare(nbytes: int) -> mmap.mmap | None:
    """The smallest that fits, unless most of it would lie idle."""
    for memory in sorted(_spares, key=len):
        if nbytes <= len(memory) <= 2 * max(nbytes, _HUGE_PAGE):
            try:
                _spares.remove(memory)
            except ValueError:  # another thread was faster
                continue
            return memory
    return None


def _give_back(memory: mmap.mmap) -> None:
    _spares.append(memory)
    while spare_bytes() > SPARE_BYTES:
        try:
            _spares.popleft()
        except IndexError:  # another thread was faster
            return


def drop_spares() -> None:
    """Give the memory that waits for the next buffers back to the system."""
    _spares.clear()
