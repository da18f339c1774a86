"""Read KV: many records at once, one record layer by layer, or as tensors over LMDB's map.

A question waits for this before its first token, so it is one pass over the bytes: each segment is checked and copied
while it is in the processor's cache, threads share large reads, and memory is reused (`ragkv.store.record`). A record
that is not whole and correct is a miss. What a device is to have is read into memory that it can read by itself, and
crosses in one copy a record. Tensors over the map need no copy; they are only valid within their read transaction and
serve to check the bytes in place and copy them directly to several devices.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, groupby
from operator import add, itemgetter
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from ragkv.errors import ConfigError, CorruptStoreError, KVLostError
from ragkv.store.codecs import Buffer, Codec, DamagedError, MemorySpan, Packing, Raw, codec_from_config
from ragkv.store.documents import matching, require_shape
from ragkv.store.environment import Database
from ragkv.store.record import (
    KVIdentity,
    Manifest,
    checked_payloads,
    checked_segment,
    decode_segments,
    flat_tensor,
    layer_tensors,
    new_buffer,
    record_tensors,
    share,
    typed_tensor,
)
from ragkv.store.tables import Transaction
from ragkv.types import ITEM_SIZES, KVShape

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ragkv.attention.kv import ChunkKV, Place

DECODE_BYTES = 8 << 20
"""Bytes per task: large enough to avoid contention between threads, small enough that they end together."""

STAGED_TOKENS = 2048
"""About so many tokens are read before they begin to cross to a device: 256 MiB of an 8B model's KV."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Loading:
    """A record that is being read into its buffer, from which it goes to the `device`, if there is one."""

    key: bytes
    manifest: Manifest
    codec: Codec
    payloads: list[Buffer]
    packing: Packing | None
    device: torch.device | None
    buffer: NDArray[np.uint8] = field(init=False)
    error: DamagedError | None = field(default=None)
    redo: bool = False
    _staged: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        nbytes = self._bytes_for(self.manifest.raw_bytes)
        if self.device is None:
            self.buffer = new_buffer(nbytes)
        else:
            self._staged = staging(nbytes, self.device)
            self.buffer = self._staged.numpy()

    def decode_tasks(self) -> Iterator[Callable[[], None]]:
        """Tasks that each decode a run of segments of about `DECODE_BYTES`."""
        first, start, end = 0, 0, 0
        for index, segment in enumerate(self.manifest.segments):
            end += segment.raw
            if end - start >= DECODE_BYTES or index + 1 == len(self.manifest.segments):
                place = slice(self._bytes_for(start), self._bytes_for(end))
                yield partial(self._decode, range(first, index + 1), self.buffer[place])
                first, start = index + 1, end

    def tensors(self) -> ChunkKV:
        """Its tensors, once all tasks are done: to a device, all of them in one copy."""
        if self._staged is None or self.device is None:
            return record_tensors(self.manifest, self.buffer, packing=self.packing)
        from ragkv.attention.kv import moved

        return record_tensors(self.manifest, moved(self._staged, self.device), packing=self.packing)

    def _bytes_for(self, raw: int) -> int:
        return raw if self.packing is None else self.packing.bytes_for(raw)

    def _decode(self, run: range, out: NDArray[np.uint8]) -> None:
        if self.error is None:
            try:
                fetch = self.payloads.__getitem__
                self.redo |= not decode_segments(self.manifest, self.codec, run, fetch, out, packing=self.packing)
            except DamagedError as error:
                self.error = error


def staging(nbytes: int, device: torch.device) -> Tensor:
    """`(nbytes,)` bytes of any content, from which the device reads by itself; torch keeps them for the next ones."""
    import torch

    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def read_many(
    txn: Transaction,
    identities: Iterable[KVIdentity],
    shape: KVShape | None = None,
    device: torch.device | None = None,
) -> dict[KVIdentity, ChunkKV]:
    """The KV of these chunks, each in its own buffer, without missing and invalid records.

    What the codec can leave as it is stored is `PackedTensors`. With a `device`, the buffers are there.
    """
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
        loading[identity] = _Loading(key, manifest, codec, payloads, codec.packing(manifest.shape), device)
    share([task for record in loading.values() for task in record.decode_tasks()])
    if otherwise := {identity: replace(each, packing=None) for identity, each in loading.items() if each.redo}:
        loading |= otherwise
        share([task for record in otherwise.values() for task in record.decode_tasks()])
    found = {}
    for identity, record in loading.items():
        if record.error is None:
            found[identity] = record.tensors()
        else:
            warn_unusable(record.key, record.error)
    return found


def find_manifest(txn: Transaction, key: bytes, identity: KVIdentity, shape: KVShape | None = None) -> Manifest | None:
    """The manifest of exactly this identity; None if missing or, with a warning, if invalid.

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
    """Log that an existing record counts as a miss."""
    logger.warning("KV record %s cannot be used and counts as missing: %s", key.hex()[:16], error)


class KVReader:
    """Reads one record layer by layer; get one from `Store.open_kv`.

    Every call of `layer` uses its own snapshot, so that no transaction is open while the caller computes.
    `KVLostError` if the record has been deleted, replaced or damaged since the reader was opened, so that layers of two
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
        """Open a reader, reading only the manifest; None for a miss."""
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


def map_record(txn: Transaction, identity: KVIdentity, shape: KVShape | None = None) -> ChunkKV | None:
    """A record's tensors; None for a miss.

    Tensors of the raw codec are views of the map if contiguous; other codecs are decoded. The map is read-only memory,
    which torch does not know: writing to such a tensor kills the process. The tensors are only valid within `txn`.
    """
    key = identity.key()
    manifest = find_manifest(txn, key, identity, shape)
    if manifest is None:
        return None
    try:
        if not isinstance(codec_from_config(manifest.codec), Raw) or not manifest.segments:
            return read_many(txn, [identity], shape).get(identity)
        if any(segment.raw != segment.stored for segment in manifest.segments):
            raise DamagedError("its segments are not as long as its tensors")
        payloads = [
            np.frombuffer(checked_segment(manifest, index, txn.segment(key, index)), np.uint8)
            for index in range(len(manifest.segments))
        ]
    except (DamagedError, ConfigError) as error:
        warn_unusable(key, error)
        return None
    return _over_map(manifest, payloads)


def move_many(
    txn: Transaction, identities: Iterable[KVIdentity], place: Place, shape: KVShape | None = None
) -> dict[KVIdentity, ChunkKV]:
    """The KV of these chunks on another device or several; misses are left out.

    Some cross to the device while the next ones are read, and memory that it reads from is used again.
    """
    if not isinstance(place, tuple):
        read: dict[KVIdentity, ChunkKV] = {}
        wanted = list(dict.fromkeys(identities))
        rounds = (end // STAGED_TOKENS for end in accumulate(identity.tokens for identity in wanted))
        for _, some in groupby(zip(rounds, wanted, strict=True), key=itemgetter(0)):
            read |= read_many(txn, [identity for _, identity in some], shape, place)
        return read
    found = {identity: map_record(txn, identity, shape) for identity in dict.fromkeys(identities)}
    return {identity: kv.to(place, copy=True) for identity, kv in found.items() if kv is not None}


def forget(kv: ChunkKV) -> None:
    """Empty the tensors, so that later use is an error instead of wrong numbers or a crash."""
    for tensor in kv.tensors:
        tensor.set_()  # type: ignore[call-overload]


def _over_map(manifest: Manifest, payloads: list[NDArray[np.uint8]]) -> ChunkKV:
    """Tensors as views of one tensor that spans all segments and what is between them in the map.

    Making a tensor from memory for each of them would take longer than the checksums.
    """
    import torch

    from ragkv.attention.kv import DTYPES, ChunkKV, State

    dtype, item_size, tokens = DTYPES[manifest.dtype], ITEM_SIZES[manifest.dtype], manifest.tokens
    addresses = [int(payload.__array_interface__["data"][0]) for payload in payloads]
    sizes = [payload.size for payload in payloads]
    base = min(addresses) // item_size * item_size
    span = max(map(add, addresses, sizes)) - base
    flat = torch.from_numpy(np.asarray(MemorySpan(base, span, item_size, payloads))).view(dtype)
    tensors = []
    index = begin = start = 0  # a segment; where it begins, and where the tensor begins, in the record's bytes
    for kv_heads, key_dim, value_dim in manifest.shapes:
        for dim in (key_dim, value_dim):
            end = start + kv_heads * tokens * dim * item_size
            if end == start:  # the layer keeps no such tensor
                tensors.append(flat.new_empty((kv_heads, tokens, dim)))
                continue
            while begin + sizes[index] <= start:
                begin, index = begin + sizes[index], index + 1
            offset, rest = divmod(addresses[index] + start - begin - base, item_size)
            if end <= begin + sizes[index] and not rest:  # it is within one segment, and aligned
                tensors.append(flat.as_strided((kv_heads, tokens, dim), (tokens * dim, dim, 1), offset))
            else:
                copy = np.concatenate(list(_joined_bytes(payloads[index:], start - begin, end - begin)))
                tensors.append(torch.from_numpy(copy).view(dtype).view(kv_heads, tokens, dim))
            start = end
    states = []
    for place, (layer, name, of, shape) in enumerate(manifest.states, len(manifest.shapes)):
        run = payloads[manifest.layer_run(place).start : manifest.layer_run(place).stop]
        whole = run[0] if len(run) == 1 else np.concatenate(run)
        address = int(whole.__array_interface__["data"][0])
        held = np.asarray(MemorySpan(address, whole.size, 1, whole))
        states.append(State(layer, name, typed_tensor(of, held).view(shape)))
    return ChunkKV(
        keys=tuple(tensors[::2]), values=tuple(tensors[1::2]), encoded_at=manifest.encoded_at, states=tuple(states)
    )


def _joined_bytes(payloads: list[NDArray[np.uint8]], start: int, end: int) -> Iterator[NDArray[np.uint8]]:
    """The bytes `start:end` of the concatenated payloads."""
    for payload in payloads:
        if end <= 0:
            return
        yield payload[max(0, start) : end]
        start, end = start - payload.size, end - payload.size
