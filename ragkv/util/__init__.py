"""Cut a sequence of items into batches by their sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


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
