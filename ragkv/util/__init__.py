"""Batches of a sequence by the sizes of its items, and memory in huge pages."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

HUGE_PAGE = 2 << 20
"""Bytes of a huge page."""


def huge_memory(nbytes: int) -> mmap.mmap:
    """Memory for `nbytes`, which are 0, in huge pages where Linux has them; `MemoryError` if there is no room.

    Of ordinary pages a processor looks up one in 4 KB, and its prefetcher ends with each.
    """
    size = -(-nbytes // HUGE_PAGE) * HUGE_PAGE
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"there is no room for {size} bytes") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        with suppress(OSError):  # a kernel without huge pages is slower, but works
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def batches(
    items: Iterable[T], size_of: Callable[[T], int], most: int, *, count: int | None = None
) -> Iterator[list[T]]:
    """Batches of at most `most` in sizes and `count` items, in order. A larger item is a batch of its own."""
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
