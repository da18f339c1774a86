"""From payloads to tensors: what all ways to read a record have in common."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from ragkv.attention.kv import ChunkKV, State
from ragkv.store.codec import Codec, codec_from_config
from ragkv.store.format.buffer import new_buffer
from ragkv.store.format.record import Manifest
from ragkv.store.seal import Buffer, DamagedError

__all__ = [
    "check_payloads",
    "checked_payloads",
    "checked_segment",
    "decode_record",
    "decode_segments",
    "flat_tensor",
    "layer_tensors",
    "record_tensors",
    "typed_tensor",
]

Fetch = Callable[[int], Buffer | None]
"""Gives a segment's payload by its index; None when it is missing."""

_UNDECODABLE = (ArithmeticError, LookupError, MemoryError, RuntimeError, TypeError, ValueError, struct.error)


_SMALL = 64 << 20
_EXPANSION = 64
"""No KV is this compressible: `int4` makes it eight times smaller. A large record that claims to be is a bomb."""


def checked_payloads(manifest: Manifest, fetch: Fetch) -> list[Buffer]:
    """All payloads of a record. Call it before memory is allocated for the tensors.

    `DamagedError` when a payload is not as long as the manifest says, or when all of them are too short for the tensors
    that they claim to hold.
    """
    payloads: list[Buffer] = []
    for index, segment in enumerate(manifest.segments):
        payload = fetch(index)
        if payload is None:
            raise DamagedError(f"segment {index} is missing")
        if memoryview(payload).nbytes != segment.stored:
            raise DamagedError(f"segment {index} is not as long as its manifest says")
        payloads.append(payload)
    if manifest.raw_bytes > max(_SMALL, _EXPANSION * manifest.stored_bytes):
        raise DamagedError(f"it claims {manifest.raw_bytes} bytes in payloads of {manifest.stored_bytes}")
    return payloads


def decode_record(manifest: Manifest, fetch: Fetch) -> ChunkKV:
    """The tensors of a record, as views of one new buffer.

    `DamagedError` or `ConfigError` (unknown codec) when the record cannot be read.
    """
    codec = codec_from_config(manifest.codec)
    payloads = checked_payloads(manifest, fetch)
    buffer = new_buffer(manifest.raw_bytes)
    decode_segments(manifest, codec, range(len(manifest.segments)), payloads.__getitem__, buffer)
    return record_tensors(manifest, buffer)


def check_payloads(manifest: Manifest, fetch: Fetch) -> None:
    """Decode a record as `decode_record` does, in the memory of one segment, because it may claim any size."""
    codec = codec_from_config(manifest.codec)
    payloads = checked_payloads(manifest, fetch)
    scratch = np.empty(max((segment.raw for segment in manifest.segments), default=0), np.uint8)
    for index, segment in enumerate(manifest.segments):
        decode_segments(manifest, codec, range(index, index + 1), payloads.__getitem__, scratch[: segment.raw])


def checked_segment(manifest: Manifest, index: int, payload: Buffer | None) -> Buffer:
    """The payload; `DamagedError` unless it is what was written."""
    segment = manifest.segments[index]
    if payload is None:
        raise DamagedError(f"segment {index} is missing")
    if memoryview(payload).nbytes != segment.stored or xxhash.xxh3_64_intdigest(payload) != segment.digest:
        raise DamagedError(f"the checksum of segment {index} does not match")
    return payload


def decode_segments(manifest: Manifest, codec: Codec, run: range, fetch: Fetch, out: NDArray[np.uint8]) -> None:
    """Decode a run of segments into `out`, which they fill; `DamagedError` when one is not what was written.

    Each payload is checked right before it is decoded, so that it is in the processor's cache for the copy.
    """
    start = 0
    keeping, layers = codec.lossless(), len(manifest.shapes)
    for index in run:
        end = start + manifest.segments[index].raw
        payload = checked_segment(manifest, index, fetch(index))
        try:
            of = codec if manifest.segments[index].layer < layers else keeping
            of.decode(payload, out=out[start:end])
        except DamagedError:
            raise
        except _UNDECODABLE as error:  # the checksum is right, but anybody may have written the payload
            raise DamagedError(f"segment {index} cannot be decoded ({error!r})") from error
        start = end


def flat_tensor(manifest: Manifest, buffer: NDArray[np.uint8]) -> Tensor:
    """A view of the bytes as numbers of the record's dtype."""
    return typed_tensor(manifest.dtype, buffer)


def typed_tensor(dtype: torch.dtype, buffer: NDArray[np.uint8]) -> Tensor:
    """A view of the bytes as numbers of this dtype; a copy where they do not begin at a multiple of its size."""
    if buffer.__array_interface__["data"][0] % dtype.itemsize:
        buffer = buffer.copy()
    return torch.from_numpy(buffer.view(f"i{dtype.itemsize}")).view(dtype)


def record_tensors(manifest: Manifest, buffer: NDArray[np.uint8]) -> ChunkKV:
    """All layers of a record as views of `buffer`, which holds them one after another, and then its states."""
    end = manifest.kv_bytes
    flat, tokens, views, start = flat_tensor(manifest, buffer[:end]), manifest.tokens, [], 0
    for kv_heads, key_dim, value_dim in manifest.shapes:
        for dim in (key_dim, value_dim):  # one torch call for each, because there are many
            views.append(flat.as_strided((kv_heads, tokens, dim), (tokens * dim, dim, 1), start))
            start += kv_heads * tokens * dim
    states = []
    for layer, name, dtype, sizes in manifest.states:
        begin, end = end, end + math.prod(sizes) * dtype.itemsize
        states.append(State(layer, name, typed_tensor(dtype, buffer[begin:end]).view(sizes)))
    return ChunkKV(
        keys=tuple(views[::2]), values=tuple(views[1::2]), encoded_at=manifest.encoded_at, states=tuple(states)
    )


def layer_tensors(manifest: Manifest, layer: int, flat: Tensor) -> tuple[Tensor, Tensor]:
    """A layer's keys and values as views of `flat`, which holds them in this order."""
    kv_heads, key_dim, value_dim = manifest.shapes[layer]
    cut = kv_heads * manifest.tokens * key_dim
    return (
        flat[:cut].view(kv_heads, manifest.tokens, key_dim),
        flat[cut:].view(kv_heads, manifest.tokens, value_dim),
    )
