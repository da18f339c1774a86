"""Memory for loaded KV, which is reused.

Loading raw KV takes little longer than a copy, but the page faults of fresh memory take longer than the copy. So
buffers are made of huge pages, and the memory of a buffer that nothing refers to any more is used for the next one.
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
"""How much unused memory is kept at most."""

_HUGE_PAGE = 2 << 20
_SMALLEST = 1 << 20  # malloc reuses the memory of smaller ones

_spares: deque[mmap.mmap] = deque()
"""Changed only in steps that are atomic under the GIL, without a lock: memory is returned by finalizers, which may run
while any lock is held."""


def new_buffer(nbytes: int) -> NDArray[np.uint8]:
    """`(nbytes,)` bytes of any content. Their memory is reused once no array or tensor refers to it."""
    if nbytes < _SMALLEST:
        return np.empty(nbytes, np.uint8)
    memory = _spare(nbytes) or _fresh(nbytes)
    lease = _Lease(memory, nbytes)
    weakref.finalize(lease, _give_back, memory).atexit = False
    return np.asarray(lease)


def spare_bytes() -> int:
    """Bytes of memory that are kept for the next buffers."""
    return sum(map(len, list(_spares)))


class _Lease:
    """The object that every array over a buffer refers to, so that its end is the end of the last of them."""

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
        except OSError:  # a kernel without huge pages is slower, but works
            return memory
    return memory


def _spare(nbytes: int) -> mmap.mmap | None:
    """The smallest spare memory that fits; None if more than half of it would be unused."""
    for memory in sorted(_spares, key=len):
        if nbytes <= len(memory) <= 2 * max(nbytes, _HUGE_PAGE):
            try:
                _spares.remove(memory)
            except ValueError:  # another thread has taken it
                continue
            return memory
    return None


def _give_back(memory: mmap.mmap) -> None:
    _spares.append(memory)
    while spare_bytes() > SPARE_BYTES:
        try:
            _spares.popleft()
        except IndexError:  # another thread has dropped the last one
            return


def drop_spares() -> None:
    """Return the memory that is kept for the next buffers to the system."""
    _spares.clear()
