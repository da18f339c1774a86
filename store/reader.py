"""Read KV: many records at once, one record layer by layer, or as tensors over LMDB's map.

A question waits for this before its first token, so it is one pass over the bytes: each segment is checked and copied
while it is in the CPU's cache, threads share large reads, and memory is reused (`ragkv.store.record`). A record that is
incomplete or damaged is a miss. KV for a device is read into pinned memory, and each record is uploaded in one copy
while the next ones are read. Tensors over the map need no copy; they are only valid within their read transaction, and
serve to check the bytes in place and copy them directly to several devices.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from operator import add
from threading import Lock
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from ragkv.errors import ConfigError, CorruptStoreError, KVLostError
from ragkv.store.codecs import Buffer, Bytes, Codec, DamagedError, MemorySpan, Packing, Raw, codec_from_config
from ragkv.store.documents import matching, require_shape
from ragkv.store.environment import Database
from ragkv.store.record import (
    UNDECODABLE,
    KVIdentity,
    Manifest,
    checked_payloads,
    checked_segment,
    decode_segments,
    layer_tensors,
    new_buffer,
    packed_parts,
    record_tensors,
    share,
    typed_tensor,
)
from ragkv.store.tables import Transaction
from ragkv.types import ITEM_SIZES, KVShape
from ragkv.util.plugins import kernel_module

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ragkv.attention.kv import ChunkKV, CopyStream

DECODE_BYTES = 8 << 20
"""Bytes per task: large enough to avoid contention between threads, small enough that they end together."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Loading:
    """A record that is being read by tasks, each of which decodes a run of segments of about `DECODE_BYTES`.

    The last task makes its tensors, which are uploaded to a device by `copies`, in one copy, while others read.
    """

    key: bytes
    manifest: Manifest
    codec: Codec
    payloads: list[Buffer]
    packing: Packing | None
    copies: CopyStream | None
    kv: ChunkKV | None = field(default=None, init=False)
    error: DamagedError | None = field(default=None, init=False)
    redo: bool = field(default=False, init=False)
    _buffer: NDArray[np.uint8] | None = field(default=None, init=False)
    _staged: Tensor | None = field(default=None, init=False)
    _left: int = field(default=0, init=False)
    _lock: Lock = field(default_factory=Lock, init=False)

    def tasks(self) -> list[Callable[[], None]]:
        runs, first, start, end = list[tuple[range, slice]](), 0, 0, 0
        for index, segment in enumerate(self.manifest.segments):
            end += segment.raw
            if end - start >= DECODE_BYTES or index + 1 == len(self.manifest.segments):
                runs.append((range(first, index + 1), slice(self._bytes_for(start), self._bytes_for(end))))
                first, start = index + 1, end
        self._left = len(runs)
        if not runs:
            self._finish()
        return [partial(self._decode, *each) for each in runs]

    def _finish(self) -> None:
        buffer: NDArray[np.uint8] | Tensor = self._place()
        if self.copies is not None and self._staged is not None:
            buffer = self.copies.send(self._staged)
        self.kv = record_tensors(self.manifest, buffer, packing=self.packing)
        self._buffer = self._staged = None

    def _place(self) -> NDArray[np.uint8]:
        """The buffer, allocated when it is the record's turn, so that little memory waits for its upload."""
        with self._lock:
            if self._buffer is None:
                nbytes = self._bytes_for(self.manifest.raw_bytes)
                if self.copies is None:
                    self._buffer = new_buffer(nbytes)
                else:
                    self._staged = self.copies.staging(nbytes)
                    self._buffer = self._staged.numpy()
            return self._buffer

    def _bytes_for(self, raw: int) -> int:
        return raw if self.packing is None else self.packing.bytes_for(raw)

    def _decode(self, run: range, place: slice) -> None:
        if self.error is None:
            out = self._place()[place]
            try:
                if not self._copied(run, out) and not self._decoded(run, out):
                    self.redo = True  # set, never unset: other threads decode other runs
            except DamagedError as error:
                self.error = error
        with self._lock:
            self._left -= 1
            last = not self._left
        if last and self.error is None and not self.redo:
            self._finish()

    def _decoded(self, run: range, out: NDArray[np.uint8]) -> bool:
        fetch = self.payloads.__getitem__
        return decode_segments(self.manifest, self.codec, run, fetch, out, packing=self.packing)

    def _copied(self, run: range, out: NDArray[np.uint8]) -> bool:
        """Whether the run was intact and could be copied in its stored form, without holding the GIL."""
        kernel = kernel_module("ragkv.store.read_kernel")
        if kernel is None or (self.packing is None and not isinstance(self.codec, Raw)):
            return False
        segments = []
        for index in run:
            payload, segment = np.frombuffer(self.payloads[index], np.uint8), self.manifest.segments[index]
            parts: list[Bytes] | None = [payload] if payload.size == segment.raw else None
            if self.packing is not None:
                try:
                    parts = packed_parts(self.codec, self.packing, self.payloads[index], segment.raw)
                except UNDECODABLE:  # perhaps a wrong checksum: `_decoded` finds the reason
                    return False
            if parts is None:
                return False
            segments.append((payload, segment.digest, parts))
        return bool(kernel.copy_checked(segments, out))


def read_many(
    txn: Transaction,
    identities: Iterable[KVIdentity],
    shape: KVShape | None = None,
    device: torch.device | None = None,
) -> dict[KVIdentity, ChunkKV]:
    """The KV of these chunks, each in its own buffer, without missing and invalid records.

    KV that the codec can leave in its stored form is `PackedTensors`. With a `device`, the buffers are there, and later
    computation waits until they are complete.
    """
    copies = None
    if device is not None and device.type != "cpu":
        from ragkv.attention.kv import copy_stream

        copies = copy_stream(device)
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
        loading[identity] = _Loading(key, manifest, codec, payloads, codec.packing(manifest.shape), copies)
    try:
        share([task for record in loading.values() for task in record.tasks()])
        if otherwise := {identity: replace(each, packing=None) for identity, each in loading.items() if each.redo}:
            loading |= otherwise
            share([task for record in otherwise.values() for task in record.tasks()])
    finally:
        if copies is not None:
            copies.wait()
    for record in loading.values():
        if record.error is not None:
            warn_unusable(record.key, record.error)
    return {identity: record.kv for identity, record in loading.items() if record.kv is not None}


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
        return layer_tensors(manifest, layer, typed_tensor(manifest.dtype, buffer))

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
    txn: Transaction, identities: Iterable[KVIdentity], place: tuple[torch.device, ...], shape: KVShape | None = None
) -> dict[KVIdentity, ChunkKV]:
    """The KV of these chunks on several devices; misses are left out."""
    found = {identity: map_record(txn, identity, shape) for identity in dict.fromkeys(identities)}
    return {identity: kv.to(place, copy=True) for identity, kv in found.items() if kv is not None}


def forget(kv: ChunkKV) -> None:
    """Empty the tensors, so that later use is an error instead of wrong numbers or a crash."""
    for tensor in kv.tensors:
        tensor.set_()  # type: ignore[call-overload]


def _over_map(manifest: Manifest, payloads: list[NDArray[np.uint8]]) -> ChunkKV:
    """Tensors as views of one tensor that spans all segments and what is between them in the map.

    A tensor made separately for each of them would take longer than the checksums.
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
