"""A checksum on every stored value, so that a flipped bit is noticed when it is read: LMDB has no checksums."""

from __future__ import annotations

import xxhash

__all__ = ["Buffer", "DamagedError", "seal", "unseal"]

Buffer = bytes | memoryview
"""Contiguous bytes, owned or a view of the map. (`collections.abc.Buffer` comes with Python 3.12.)"""

_BYTES = 8


class DamagedError(ValueError):
    """A stored value is not what was written. Internal: callers see a miss or a `CorruptStoreError`."""


def seal(*parts: Buffer) -> bytes:
    """The parts joined, followed by their xxh3_64 (8 bytes, big-endian)."""
    body = b"".join(parts)
    return body + xxhash.xxh3_64_digest(body)


def unseal(value: Buffer) -> memoryview:
    """A view of what was sealed; `DamagedError` when its checksum does not match."""
    view = memoryview(value)
    body = view[:-_BYTES]
    if len(view) < _BYTES or xxhash.xxh3_64_digest(body) != view[-_BYTES:]:
        raise DamagedError("its checksum does not match")
    return body
