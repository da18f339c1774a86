"""From payloads to tensors: what reading a whole record, one layer, and the map itself have in common."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from ragkv.attention.kv import ChunkKV
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
]

Fetch = Callable[[int], Buffer | None]
_UNDECODABLE = (ArithmeticError, LookupError, MemoryError, RuntimeError, TypeError, ValueError, struct.error)


_SMALL = 64 << 20
_EXPANSION = 64
"""No KV is that compressible: `int4` makes an eighth of it. What claims to be is a bomb, unless it is small."""


def checked_payloads(manifest: Manifest, fetch: Fetch) -> list[Buffer]:
    """All payloads of a record, each as long as its manifest says, before memory is taken for what they hold;
    `DamagedError` when one is not, or when they are too few bytes for the tensors that they claim to be."""
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


def decode_record(manifest: Manifest, fetch: Callable[[int], Buffer | None]) -> ChunkKV:
    """The tensors of a record, views of one buffer of their own; `fetch` gives a segment's payload by its index.

    `DamagedError` or `ConfigError` (unknown codec) when the record cannot be read.
    """
    codec = codec_from_config(manifest.codec)
    payloads = checked_payloads(manifest, fetch)
    buffer = new_buffer(manifest.raw_bytes)
    decode_segments(manifest, codec, range(len(manifest.segments)), payloads.__getitem__, buffer)
    return record_tensors(manifest, buffer)


def check_payloads(manifest: Manifest, fetch: Callable[[int], Buffer | None]) -> None:
    """Decode a record as `decode_record`, in the memory of one segment: it may claim any size."""
    codec = codec_from_config(manifest.codec)
    payloads = checked_payloads(manifest, fetch)
    scratch = np.empty(max((segment.raw for segment in manifest.segments), default=0), np.uint8)
    for index, segment in enumerate(manifest.segments):
        decode_segments(manifest, codec, range(index, index + 1), payloads.__getitem__, scratch[: segment.raw])


def checked_segment(manifest: Manifest, index: int, payload: Buffer | None) -> Buffer:
    """The payload, when it is what was written; else `DamagedError`."""
    segment = manifest.segments[index]
    if payload is None:
        raise DamagedError(f"segment {index} is missing")
    if memoryview(payload).nbytes != segment.stored or xxhash.xxh3_64_intdigest(payload) != segment.digest:
        raise DamagedError(f"the checksum of segment {index} does not match")
    return payload


def decode_segments(manifest: Manifest, codec: Codec, run: range, fetch: Fetch, out: NDArray[np.uint8]) -> None:
    """A run of segments into `out`, which they fill; `DamagedError` when one is not what was written.

    Every payload is checked before it is decoded, so that it is still hot in the cache for the copy.
    """
    start = 0
    for index in run:
        end = start + manifest.segments[index].raw
        payload = checked_segment(manifest, index, fetch(index))
        try:
            codec.decode(payload, out=out[start:end])
        except DamagedError:
            raise
        except _UNDECODABLE as error:  # the payload has the right checksum, and its author may be anybody
            raise DamagedError(f"segment {index} cannot be decoded ({error!r})") from error
        start = end


def flat_tensor(manifest: Manifest, buffer: NDArray[np.uint8]) -> Tensor:
    """The bytes as numbers of the record's dtype; a view."""
    return torch.from_numpy(buffer.view(f"i{manifest.dtype.itemsize}")).view(manifest.dtype)


def record_tensors(manifest: Manifest, buffer: NDArray[np.uint8]) -> ChunkKV:
    """All layers of a record, which lie in `buffer` one after another; views of it."""
    flat, tokens, views, start = flat_tensor(manifest, buffer), manifest.tokens, [], 0
    for kv_heads, key_dim, value_dim in manifest.shapes:
        for dim in (key_dim, value_dim):  # one call per tensor: there are many
            views.append(flat.as_strided((kv_heads, tokens, dim), (tokens * dim, dim, 1), start))
            start += kv_heads * tokens * dim
    return ChunkKV(keys=tuple(views[::2]), values=tuple(views[1::2]), encoded_at=manifest.encoded_at)


def layer_tensors(manifest: Manifest, layer: int, flat: Tensor) -> tuple[Tensor, Tensor]:
    """A layer's keys and values, which fill `flat` in that order; views of it."""
    kv_heads, key_dim, value_dim = manifest.shapes[layer]
    cut = kv_heads * manifest.tokens * key_dim
    return (
        flat[:cut].view(kv_heads, manifest.tokens, key_dim),
        flat[cut:].view(kv_heads, manifest.tokens, value_dim),
    )
