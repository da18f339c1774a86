"""Which chunks are of documents that meet conditions, without reading all documents for every question.

The fields of documents and their chunks are in an index of their own (`ragkv.index.fieldindex`), which follows the
store. What a list of conditions has found is kept, and remains the same object until it changes: searches keep what
they made of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ragkv.errors import UsageError
from ragkv.index.fieldindex import FieldIndex
from ragkv.index.selection import unmatched, wanted_values
from ragkv.retrievers.roster import KeySet

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Inventory"]

_KEPT = 32  # lists of conditions whose chunks are kept


@dataclass(frozen=True, slots=True)
class _Found:
    """What conditions have found at a version of the store: how many documents meet them, and their chunks."""

    version: tuple[int, str]
    documents: int
    chunks: KeySet | None


class Inventory:
    """The documents of one index by their fields, for any number of threads. `fields` gives the current index."""

    def __init__(self, fields: Callable[[], FieldIndex]) -> None:
        self._fields = fields
        self._lock = threading.Lock()
        self._found: dict[tuple[str, ...], _Found] = {}

    def among(self, where: Sequence[str]) -> KeySet | None:
        """The chunks of the documents that meet `where`, None for all that there are.

        UsageError for a condition of another form, or if no document meets them.
        """
        conditions, name = wanted_values(where), tuple(where)
        with self._lock:
            index = self._fields()
            found = self._found.pop(name, None)
            version = index.generation, index.mark
            if found is None or found.version != version:
                documents, keys = index.chunks(conditions)
                found = _Found(version, documents, _same(keys, found))
            self._found[name] = found  # the last one asked for is the last one to go
            while len(self._found) > _KEPT:
                del self._found[next(iter(self._found))]
        if not found.documents:
            raise UsageError(unmatched(where))
        return found.chunks

    def documents(self, where: Sequence[str]) -> list[str]:
        """The ids of the documents that meet `where`, which need not be there any more; UsageError as `among`."""
        conditions = wanted_values(where)
        with self._lock:
            found = self._fields().documents(conditions)
        if not found:
            raise UsageError(unmatched(where))
        return found


def _same(keys: NDArray[Any] | None, before: _Found | None) -> KeySet | None:
    """The set of these chunks; the very object that was found before if it has no others."""
    import numpy as np

    if keys is None:
        return None
    known = None if before is None else before.chunks
    return known if known is not None and np.array_equal(keys, known.keys) else KeySet(keys)
