"""Which chunks are of documents that meet conditions, without reading all documents for every question.

The values of a field are read when a condition first asks for it, and the chunks of a document when it first meets one.
What a list of conditions has found is kept. After a change, only the documents that the store names as changed are
read again (`Store.changes`).
"""

from __future__ import annotations

import fnmatch
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ragkv.errors import UsageError
from ragkv.index.selection import is_pattern, unmatched, values_of, wanted_values, where_filter
from ragkv.retrievers.roster import KeySet, keys_of
from ragkv.store import Store
from ragkv.store.history import name_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Inventory"]

_KEPT = 32  # lists of conditions whose chunks are kept
_FEW = 8  # up to one chunk in so many is read with its document, more are found among the keys of all

Conditions = Mapping[str, Sequence[str]]
"""Patterns by the field that has to match one of them."""


@dataclass(slots=True)
class _Column:
    """The values of one field: by document, and the documents by value."""

    of: dict[str, tuple[str, ...]] = field(default_factory=dict)
    holders: dict[str, set[str]] = field(default_factory=dict)

    def put(self, document_id: str, values: tuple[str, ...]) -> None:
        """Replace a document's values; none when it has no such field, or is gone."""
        for value in self.of.pop(document_id, ()):
            holders = self.holders[value]
            holders.discard(document_id)
            if not holders:
                del self.holders[value]
        if values:
            self.of[document_id] = values
        for value in values:
            self.holders.setdefault(value, set()).add(document_id)

    def matching(self, patterns: Iterable[str]) -> set[str]:
        """The documents of which a value matches one of the patterns."""
        found: set[str] = set()
        for pattern in patterns:
            if not is_pattern(pattern):
                found |= self.holders.get(pattern, set())
                continue
            match = re.compile(fnmatch.translate(pattern)).match
            for value, holders in self.holders.items():
                if match(value):
                    found |= holders
        return found


@dataclass(slots=True)
class _Found:
    """What conditions have found: the documents that meet them, and their chunks unless these are all that there are.

    `settled` is False while the chunks are those from before a change.
    """

    documents: set[str]
    chunks: KeySet | None = None
    settled: bool = False


class Inventory:
    """The documents of one store by their fields, for any number of threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._version = self._store.version
        self._columns: dict[str, _Column] = {}
        self._documents: dict[str, int] = {}
        """How many chunks each document has."""
        self._names: dict[bytes, str] = {}
        """The ids of these documents, by the names that `Changes` has for them."""
        self._chunks: dict[str, NDArray[Any]] = {}
        """The keys of a document's chunks, where they are known."""
        self._found: dict[tuple[str, ...], _Found] = {}

    def among(self, where: Sequence[str]) -> KeySet | None:
        """The chunks of the documents that meet `where`, None for all that there are.

        UsageError for a condition of another form, or if no document meets them.
        """
        conditions, name = wanted_values(where), tuple(where)
        with self._lock:
            self._follow(conditions)
            found = self._found.pop(name, None) or _Found(self._matching(conditions))
            if not found.settled:
                found.chunks, found.settled = self._chunks_of(found.documents), True
            self._found[name] = found  # the last one asked for is the last one to go
            while len(self._found) > _KEPT:
                del self._found[next(iter(self._found))]
            if not found.documents:
                raise UsageError(unmatched(where))
            return found.chunks

    def _matching(self, conditions: Conditions) -> set[str]:
        found = [self._columns[name].matching(patterns) for name, patterns in conditions.items()]
        return set.intersection(*found) if found else set(self._documents)

    def _follow(self, conditions: Conditions) -> None:
        """Bring what is known up to the store's generation, with the columns that the conditions ask for."""
        if self._version != self._store.version:
            changes = self._store.changes(self._version)
            if changes is None:
                self._forget()
            else:
                self._version = changes.version
                for name in changes.documents:
                    self._read_again(name)
        new = {name: _Column() for name in conditions if name not in self._columns}
        if new or not self._columns:
            # What is written meanwhile is named by the changes since `_version`, and is then read again.
            self._documents, self._names = {}, {}
            for stored in self._store.documents():
                self._documents[stored.document.document_id] = stored.chunks
                self._names[name_of(stored.document.document_id)] = stored.document.document_id
                for label, column in new.items():
                    column.put(stored.document.document_id, values_of(stored.document, label))
            self._columns |= new

    def _read_again(self, name: bytes) -> None:
        """Read the document that `Changes` names so, which may be gone, or new."""
        document_id = self._names.get(name)
        stored = self._store.document_named(name) if document_id is None else self._store.document(document_id)
        if stored is not None:
            document_id = self._names[name] = stored.document.document_id
            self._documents[document_id] = stored.chunks
        elif document_id is None:
            return
        else:
            del self._names[name]
            self._documents.pop(document_id, None)
        self._chunks.pop(document_id, None)
        for label, column in self._columns.items():
            column.put(document_id, () if stored is None else values_of(stored.document, label))
        for where, found in self._found.items():
            holds = stored is not None and where_filter(where)(stored.document)
            if holds or document_id in found.documents:
                found.settled = False
            (found.documents.add if holds else found.documents.discard)(document_id)
            if found.chunks is None:  # it stood for all documents, and there may be others now
                found.settled = False

    def _chunks_of(self, documents: set[str]) -> KeySet | None:
        """The chunks of some documents; None if these are all documents."""
        import numpy as np

        if self._documents.keys() <= documents:
            return None
        unknown = [document_id for document_id in documents if document_id not in self._chunks]
        few = sum(self._documents.get(document_id, 0) for document_id in unknown) * _FEW <= sum(
            self._documents.values()
        )
        if few:
            for document_id in unknown:
                self._chunks[document_id] = keys_of(chunk.chunk_id for chunk in self._store.chunks(document_id))
        else:
            self._read_places()
        nothing = np.empty(0, dtype="S16")
        return KeySet(np.unique(np.concatenate([nothing, *(self._chunks.get(each, nothing) for each in documents)])))

    def _read_places(self) -> None:
        """The chunks of all documents, from the keys in the store, so that no chunk is read."""
        import numpy as np

        names, owners = bytearray(), bytearray()
        for name, owner in self._store.places():
            names += name[:16]
            owners += owner[:16]
        order = np.argsort(np.frombuffer(owners, dtype="S16"), kind="stable")
        owned, first = np.unique(np.frombuffer(owners, dtype="S16")[order], return_index=True)
        parts = np.split(np.frombuffer(names, dtype="S16")[order], first[1:])
        by_owner = dict(zip(owned.tolist(), parts, strict=False))
        for document_id, key in zip(self._documents, keys_of(self._documents).tolist(), strict=True):
            if key in by_owner:
                self._chunks[document_id] = by_owner[key]
