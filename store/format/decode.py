"""From payloads to bytes: what all ways to read a record have in common."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import xxhash
from numpy.typing import NDArray

from ragkv.store.codec import Codec, codec_from_config
from ragkv.store.format.record import Manifest
from ragkv.store.seal import Buffer, DamagedError

__all__ = ["Fetch", "check_payloads", "checked_payloads", "checked_segment", "decode_segments"]

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


def check_payloads(manifest: Manifest, fetch: Fetch) -> None:
    """Decode a record as `tensor.decode_record` does, in the memory of one segment, because it may claim any size."""
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
