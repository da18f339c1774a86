"""Read the KV of many records at once.

A question waits for this before its first token, so it is one pass over the bytes: each segment is checked and copied
while it is in the CPU's cache, threads share large reads, and memory is reused (`ragkv.store.record`). A record that is
incomplete or damaged is a miss. KV for a device is read into pinned memory, and each record is uploaded in one copy
while the next ones are read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ragkv.errors import ConfigError
from ragkv.store.codecs import Buffer, Bytes, Codec, DamagedError, Packing, Raw, codec_from_config
from ragkv.store.documents import matching, require_shape
from ragkv.store.record import (
    UNDECODABLE,
    KVIdentity,
    Manifest,
    checked_payloads,
    checked_segment,
    decode_segments,
    new_buffer,
    packed_parts,
    record_tensors,
    share,
)
from ragkv.store.tables import Transaction
from ragkv.types import KVShape
from ragkv.util.lazy import torch_if_loaded
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
        # compiling and loading kernels takes longer than a process without torch, which answers one question, has
        kernel = None if torch_if_loaded() is None else kernel_module("ragkv.store.read_kernel")
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


def intact_manifest(txn: Transaction, identity: KVIdentity, shape: KVShape) -> Manifest | None:
    """The manifest of a record with the right checksums; None, as in `read_many`, for any other. Nothing is decoded."""
    key = identity.key()
    manifest = find_manifest(txn, key, identity, shape)
    try:
        if manifest is not None:
            for index, payload in enumerate(checked_payloads(manifest, partial(txn.segment, key))):
                checked_segment(manifest, index, payload)
        return manifest
    except DamagedError as error:
        warn_unusable(key, error)
        return None


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
