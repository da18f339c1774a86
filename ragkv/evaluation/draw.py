"""A random part of a sequence, the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

__all__ = ["drawn"]

T = TypeVar("T")


def drawn(items: Sequence[T], limit: int | None, seed: int) -> list[T]:
    """At most `limit` of `items` (None: all), drawn by `seed`, in their order."""
    if limit is None or len(items) <= limit:
        return list(items)
    return [items[at] for at in sorted(random.Random(seed).sample(range(len(items)), limit))]
