"""What changed from one generation of the store to the next, so that what is derived from it compares no more.

Every change of documents, chunks or vectors counts the generation up and leaves a row that names what it touched. Old
rows are dropped as soon as all of them together name more than a quarter of the chunks: whatever is as far behind as
that is made anew at about the same cost. Rows may be missing for other reasons as well (an older ragkv wrote, a repair
could not say what it touched): a gap means that everything may have changed.

A row also has a random mark. Two copies of a store that went different ways, such as a backup that was put back, may
have the same generations, but not the same marks. So what was derived from the one does not follow the other.

Rows name documents and chunks by the first half of their ids' digests, because the row of a deletion outlives the
document, and an id may say what nobody should read any more.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ragkv.store.seal import Buffer, DamagedError, seal, unseal
from ragkv.store.transaction import Transaction, digest

__all__ = [
    "NAME_BYTES",
    "Changes",
    "Version",
    "advance",
    "changes_since",
    "generation",
    "name_of",
    "parse_change",
    "version",
]

_LEAST = 1024
_SHARE = 4
NAME_BYTES = 16
_HEAD = struct.Struct("<QI8s")
"""The weight of all rows up to this one, dropped ones too; its own (the chunks that it names and 1); its mark."""


class Version(NamedTuple):
    """A state of a store: its generation, and the mark that tells it from others of that number."""

    generation: int
    mark: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Which documents and chunks were added, changed or removed up to `version`, by their names (`name_of`)."""

    version: Version
    documents: frozenset[bytes]
    chunks: frozenset[bytes]


def name_of(identifier: str) -> bytes:
    """How a row names a document or a chunk."""
    return digest(identifier)[:NAME_BYTES]


def generation(txn: Transaction) -> int:
    """How many transactions have changed documents, chunks or their vectors."""
    value = txn.get("meta", b"generation")
    return 0 if value is None else int.from_bytes(value[:8], "big")


def version(txn: Transaction) -> Version:
    """The generation with its mark."""
    now = generation(txn)
    return Version(now, _mark(txn, now))


def advance(txn: Transaction, document: str | None = None, chunks: Collection[str] = ()) -> None:
    """Count a change of a document, so that what is derived knows that it is behind.

    `chunks` are the ids of the chunks whose text or vectors differ now. Without a document, what changed is not known.
    """
    before = generation(txn)
    now = (before + 1) % (1 << 64)
    txn.put("meta", b"generation", now.to_bytes(8, "big"))
    if document is None or "changes" not in txn.tables:
        return
    last = txn.get("changes", _key(before))
    total = 0 if last is None or len(last) < _HEAD.size else _HEAD.unpack_from(last)[0]
    weight = len(chunks) + 1
    total = (total + weight) % (1 << 64)
    names = (name_of(document), *sorted(map(name_of, chunks)))
    txn.put("changes", _key(now), seal(_HEAD.pack(total, weight, secrets.token_bytes(8)), *names))
    _trim(txn, total, max(_LEAST, txn.count("chunks") // _SHARE))


def changes_since(txn: Transaction, since: Version) -> Changes | None:
    """What has changed since a version; None if that is not known, or the version is not one of this store's past."""
    now = generation(txn)
    if not 0 <= since.generation <= now or _mark(txn, since.generation) != since.mark:
        return None
    documents: set[bytes] = set()
    chunks: set[bytes] = set()
    for number in range(since.generation + 1, now + 1):
        value = txn.get("changes", _key(number))
        try:
            named = None if value is None else parse_change(value)
        except DamagedError:
            named = None
        if named is None:
            return None
        documents.add(named[0])
        chunks.update(named[1])
    return Changes(version=version(txn), documents=frozenset(documents), chunks=frozenset(chunks))


def parse_change(value: Buffer) -> tuple[bytes, list[bytes]]:
    """The names of the document and of the chunks in a row; `DamagedError` when it cannot be read."""
    names = bytes(unseal(value)[_HEAD.size :])
    if not names or len(names) % NAME_BYTES:
        raise DamagedError("it does not name a document and its chunks")
    document, *chunks = (names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES))
    return document, chunks


def _trim(txn: Transaction, total: int, limit: int) -> None:
    """Drop the oldest rows until the others weigh no more than `limit`."""
    for key in list(_oldest(txn, total, limit)):
        txn.delete("changes", key)


def _oldest(txn: Transaction, total: int, limit: int) -> Iterator[bytes]:
    for key, value in txn.scan("changes"):
        upto, weight, _ = _HEAD.unpack_from(value) if len(value) >= _HEAD.size else (0, 0, b"")
        if weight and 0 <= total - upto + weight <= limit:
            return
        yield key


def _mark(txn: Transaction, number: int) -> str:
    """The mark of a generation; empty if it has no row."""
    value = txn.get("changes", _key(number))
    return "" if value is None or len(value) < _HEAD.size else _HEAD.unpack_from(value)[2].hex()


def _key(number: int) -> bytes:
    return number.to_bytes(8, "big")
