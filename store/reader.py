"""Read KV: many records at once, or one record layer by layer.

A question has to wait for this before its first token, so it is one pass over the bytes: each segment is checked and
copied while it is in the processor's cache, threads share large reads, and memory is reused
(`ragkv.store.format.buffer`). A record that is not whole and correct is a miss.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from ragkv.attention.shape import KVShape
from ragkv.errors import ConfigError, CorruptStoreError, KVLostError
from ragkv.store.codec import Codec, codec_from_config
from ragkv.store.database import Database
from ragkv.store.document import matching, require_shape
from ragkv.store.format.buffer import new_buffer
from ragkv.store.format.decode import checked_payloads, decode_segments
from ragkv.store.format.identity import KVIdentity
from ragkv.store.format.record import Manifest
from ragkv.store.parallel import share
from ragkv.store.seal import Buffer, DamagedError
from ragkv.store.transaction import Transaction

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ragkv.attention.kv import ChunkKV

__all__ = ["KVReader", "find_manifest", "read_many", "warn_unusable"]

PIECE_BYTES = 8 << 20
"""What a thread takes at a time: large enough that threads rarely contend, small enough that they end together."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Loading:
    """A record that is being read into its buffer."""

    key: bytes
    manifest: Manifest
    codec: Codec
    payloads: list[Buffer]
    buffer: NDArray[np.uint8]
    error: DamagedError | None = field(default=None)

    def pieces(self) -> Iterator[Callable[[], None]]:
        """Tasks that each decode a run of segments of about `PIECE_BYTES`."""
        first, start, end = 0, 0, 0
        for index, segment in enumerate(self.manifest.segments):
            end += segment.raw
            if end - start >= PIECE_BYTES or index + 1 == len(self.manifest.segments):
                yield partial(self._decode, range(first, index + 1), self.buffer[start:end])
                first, start = index + 1, end

    def _decode(self, run: range, out: NDArray[np.uint8]) -> None:
        if self.error is None:
            try:
                decode_segments(self.manifest, self.codec, run, self.payloads.__getitem__, out)
            except DamagedError as error:
                self.error = error


def read_many(
    txn: Transaction, identities: Iterable[KVIdentity], shape: KVShape | None = None
) -> dict[KVIdentity, ChunkKV]:
    """The KV of these chunks, each in a buffer of its own; what is missing or cannot be trusted is left out."""
    from ragkv.store.format.tensor import record_tensors

    loading: dict[KVIdentity, _Loading] = {}
    for identity in dict.fromkeys(identities):
        key = identity.key()
        manifest = find_manifest(txn, key, identity, shape)
        if manifest is None:
            continue
        try:
            codec = codec_from_config(manifest.codec)
            payloads = checked_payloads(manifest, partial(txn.segment, key))
        except (ConfigError, DamagedError) as error:
            warn_unusable(key, error)
            continue
        loading[identity] = _Loading(key, manifest, codec, payloads, new_buffer(manifest.raw_bytes))
    share([piece for record in loading.values() for piece in record.pieces()])
    found = {}
    for identity, record in loading.items():
        if record.error is None:
            found[identity] = record_tensors(record.manifest, record.buffer)
        else:
            warn_unusable(record.key, record.error)
    return found


def find_manifest(txn: Transaction, key: bytes, identity: KVIdentity, shape: KVShape | None = None) -> Manifest | None:
    """The manifest of exactly this identity; None when there is none or, with a warning, it cannot be trusted.

    `shape` is as in `require_shape`.
    """
    value = txn.get("kv", key)
    if value is None:
        return None
    try:
        manifest = matching(value, identity)
        require_shape(txn, manifest, shape)
        return manifest
    except DamagedError as error:
        warn_unusable(key, error)
        return None


def warn_unusable(key: bytes, error: Exception) -> None:
    """Log that a record is there but counts as a miss."""
    logger.warning("KV record %s cannot be used and counts as missing: %s", key.hex()[:16], error)


class KVReader:
    """Reads one record layer by layer; get one from `Store.open_kv`.

    Every call of `layer` takes a snapshot of its own, so that no transaction is open while the caller computes.
    `KVLostError` when the record was deleted, replaced or damaged since the reader was opened, so that layers of two
    records are never mixed.
    """

    def __init__(self, database: Database, identity: KVIdentity, manifest: Manifest, packed: bytes) -> None:
        self.identity = identity
        self._database = database
        self._key = identity.key()
        self._manifest = manifest
        self._packed = packed
        self._codec = codec_from_config(manifest.codec)

    @classmethod
    def open(cls, database: Database, identity: KVIdentity) -> Self | None:
        """A reader, for which only the manifest is read; None for a miss."""
        key = identity.key()
        with database.read() as txn:
            manifest, packed = find_manifest(txn, key, identity), bytes(txn.get("kv", key) or b"")
        try:
            return None if manifest is None else cls(database, identity, manifest, packed)
        except ConfigError as error:
            warn_unusable(key, error)
            return None

    @property
    def layers(self) -> int:
        return len(self._manifest.shapes)

    @property
    def tokens(self) -> int:
        return self._manifest.tokens

    @property
    def encoded_at(self) -> int:
        """The position of the first token while the chunk was prefilled."""
        return self._manifest.encoded_at

    @property
    def dtype(self) -> torch.dtype:
        from ragkv.attention.kv import DTYPES

        return DTYPES[self._manifest.dtype]

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys `(kv_heads, tokens, key_dim)` and values `(kv_heads, tokens, value_dim)`."""
        from ragkv.store.format.tensor import flat_tensor, layer_tensors

        if not 0 <= layer < self.layers:
            raise IndexError(f"there is no layer {layer}: the record has {self.layers}")
        manifest = self._manifest
        buffer = new_buffer(manifest.layer_bytes(layer))
        try:
            with self._database.read() as txn:
                now = txn.get("kv", self._key)
                if now is None or bytes(now) != self._packed:
                    raise KVLostError(self._lost("was deleted or replaced"))
                fetch = partial(txn.segment, self._key)
                decode_segments(manifest, self._codec, manifest.layer_run(layer), fetch, buffer)
        except (DamagedError, CorruptStoreError) as error:
            raise KVLostError(self._lost(f"cannot be used ({error})")) from error
        return layer_tensors(manifest, layer, flat_tensor(manifest, buffer))

    def _lost(self, what: str) -> str:
        return f"KV record {self._key.hex()[:16]} {what} while it was read: ask for it again, or encode the chunk"
