"""Split a sequence into batches by the sizes of its items, and allocate memory in huge pages."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

HUGE_PAGE = 2 << 20
"""Bytes of a huge page."""


def huge_memory(nbytes: int) -> mmap.mmap:
    """`nbytes` zeroed bytes, in huge pages where Linux has them; MemoryError if there is not enough memory.

    With ordinary pages, there is one address translation per 4 KB, and the hardware prefetcher stops at each boundary.
    """
    size = -(-nbytes // HUGE_PAGE) * HUGE_PAGE
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"there is no room for {size} bytes") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        with suppress(OSError):  # without huge pages it is slower, but works
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def batches(
    items: Iterable[T], size_of: Callable[[T], int], most: int, *, count: int | None = None
) -> Iterator[list[T]]:
    """Batches, in order, of at most `count` items and `most` in sizes; a larger item is a batch of its own."""
    batch: list[T] = []
    total = 0
    for item in items:
        size = size_of(item)
        if batch and (total + size > most or len(batch) == count):
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size
    if batch:
        yield batch
