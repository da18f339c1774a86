"""The store key of a chunk's KV: a hash of everything that its numbers depend on.

Stale or foreign KV gives fluent, wrong answers that nobody notices. When anything that the numbers depend on changes,
the key changes, the store misses, and the chunk is encoded again (docs/design.md).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ragkv.types import Encoding

__all__ = ["PASSED_ON", "SCHEMA_VERSION", "KVIdentity", "pack_ids", "packed_key", "unpack_ids"]

SCHEMA_VERSION = 1
"""Version of the layout of ordinary records (docs/formats.md). It is part of every key, so that a new layout never
reads an old record. Records that it cannot describe have another version in their manifest, and keys like all others.
"""

LONG_WORDS = 9
PASSED_ON = "passed on"
"""The state of a layer of a long document's block that says which of its tokens the block passes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVIdentity:
    """One chunk's KV for one model.

    `model` is the model's fingerprint in hex. `prefix_ids` are the tokens before a `prefixed` chunk. They are empty for
    a `standalone` one, which saw no prefix, so that its record stays valid when the prompt changes. Of a `long` one
    they are the eight words of a digest of all that it saw, and its position (`ragkv.ingest.block`).
    """

    model: str
    encoding: Encoding
    prefix_ids: tuple[int, ...] = ()
    chunk_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.encoding is Encoding.STANDALONE and self.prefix_ids:
            raise ValueError("a standalone chunk saw no prefix: leave prefix_ids empty")
        if self.encoding is Encoding.LONG and len(self.prefix_ids) != LONG_WORDS:
            raise ValueError(f"what a block of a long document saw is said in {LONG_WORDS} words")

    @property
    def position(self) -> int:
        """Where its first token stands."""
        return self.prefix_ids[-1] if self.encoding is Encoding.LONG else len(self.prefix_ids)

    def may_serve(self, token_ids: tuple[int, ...]) -> bool:
        """Whether a chunk of these tokens may need it: its own KV, or a block of the document that it is from."""
        return self.encoding is Encoding.LONG or self.chunk_ids == token_ids

    def key(self) -> bytes:
        """32 bytes, the same in every process.

        Each field is hashed after its length, so that no two identities have the same bytes.
        """
        return packed_key(self.model, self.encoding.value, pack_ids(self.prefix_ids), pack_ids(self.chunk_ids))


def packed_key(model: str, encoding: str, prefix_ids: bytes | memoryview, chunk_ids: bytes | memoryview) -> bytes:
    """`KVIdentity.key`, of packed token ids."""
    digest = hashlib.blake2b(digest_size=32, person=b"ragkv kv record")
    fields = (SCHEMA_VERSION.to_bytes(4, "little"), model.encode(), encoding.encode(), prefix_ids, chunk_ids)
    for field in fields:
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)
    return digest.digest()


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32; `ValueError` for an id outside their range."""
    try:
        return np.array(ids, dtype="<u4").tobytes()
    except OverflowError as error:
        raise ValueError("a token id is negative or does not fit in 32 bits") from error


def unpack_ids(packed: bytes | memoryview) -> tuple[int, ...]:
    """The inverse of `pack_ids`."""
    return tuple(np.frombuffer(packed, dtype="<u4").tolist())
