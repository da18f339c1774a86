"""From tensors to a record: the numbers of each layer cut into segments, and these encoded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from ragkv.attention.kv import ChunkKV, dtype_name
from ragkv.store.codec import Codec, Slab
from ragkv.store.format.buffer import new_buffer
from ragkv.store.format.identity import KVIdentity
from ragkv.store.format.record import SEGMENT_BYTES, EncodedRecord, Manifest, Segment
from ragkv.store.format.typed import DTYPES
from ragkv.store.seal import Buffer

__all__ = ["TOKEN_STEP", "encode_record"]

JOINT_BYTES = 1 << 18
"""The keys and the values of a longer layer are in segments of their own. Shorter runs of pages are easier to reuse,
and each tensor is still contiguous."""
TOKEN_STEP = 128
"""A head that is too long for one segment is cut at a multiple of this many tokens, which a codec's groups divide."""


def encode_record(kv: ChunkKV, identity: KVIdentity, codec: Codec) -> EncodedRecord:
    """Encode `kv`; `ValueError` when it cannot be the KV of `identity`."""
    tensors, shape = (*kv.keys, *kv.values), kv.shape
    if shape.dtype not in DTYPES.values() or any(tensor.dtype != kv.dtype for tensor in tensors):
        raise ValueError(f"a record holds tensors of one dtype out of {list(DTYPES.values())}")
    if kv.tokens != len(identity.chunk_ids):
        raise ValueError(f"the KV holds {kv.tokens} tokens, its identity {len(identity.chunk_ids)}")
    segments: list[Segment] = []
    payloads: list[Buffer] = []
    buffer = new_buffer(kv.nbytes)
    start = 0
    for layer, pair in enumerate(zip(kv.keys, kv.values, strict=True)):
        end = start
        for tensor in pair:
            begin, end = end, end + tensor.numel() * tensor.element_size()
            np.copyto(buffer[begin:end], _bytes(tensor))
        for slabs in _cut(*pair):
            begin, start = start, start + sum(slab.nbytes for slab in slabs)
            payload = codec.encode(buffer[begin:start].data, slabs)
            digest = xxhash.xxh3_64_intdigest(payload)
            segments.append(Segment(layer, start - begin, memoryview(payload).nbytes, digest))
            payloads.append(payload)
    keeping = codec.lossless()
    for place, state in enumerate(kv.states, kv.layers):
        whole = _bytes(state.value)
        for slab in _cut_state(state.value):
            begin, start = start, start + slab.nbytes
            np.copyto(buffer[begin:start], whole[: slab.nbytes])
            whole = whole[slab.nbytes :]
            payload = keeping.encode(buffer[begin:start].data, (slab,))
            digest = xxhash.xxh3_64_intdigest(payload)
            segments.append(Segment(place, slab.nbytes, memoryview(payload).nbytes, digest))
            payloads.append(payload)
    manifest = Manifest(
        identity=identity,
        dtype=shape.dtype,
        encoded_at=kv.encoded_at,
        shapes=shape.layers,
        codec=codec.config(),
        segments=tuple(segments),
        states=shape.states,
    )
    return EncodedRecord(
        key=identity.key(),
        manifest=manifest.pack(),
        segments=tuple(payloads),
        stored_bytes=manifest.stored_bytes,
    )


def _cut(key: Tensor, value: Tensor) -> Iterator[tuple[Slab, ...]]:
    """The slabs of each segment of a layer.

    A segment holds the whole layer, or as many whole heads of its keys or values as fit, or a run of one head's tokens.
    """
    dtype = dtype_name(key.dtype)
    whole = (Slab("keys", dtype, *key.shape), Slab("values", dtype, *value.shape))
    if sum(slab.nbytes for slab in whole) <= JOINT_BYTES:
        if whole[0].nbytes + whole[1].nbytes:
            yield tuple(slab for slab in whole if slab.nbytes)
        return
    for slab in whole:
        row = slab.dim * slab.item_size
        heads = SEGMENT_BYTES // max(1, row * slab.tokens)
        if not slab.nbytes:
            continue
        if heads:
            for head in range(0, slab.heads, heads):
                yield (slab._replace(heads=min(heads, slab.heads - head)),)
            continue
        tokens = max(1, SEGMENT_BYTES // row // TOKEN_STEP * TOKEN_STEP or SEGMENT_BYTES // row)
        for _ in range(slab.heads):
            for token in range(0, slab.tokens, tokens):
                yield (slab._replace(heads=1, tokens=min(tokens, slab.tokens - token)),)


def _cut_state(value: Tensor) -> Iterator[Slab]:
    """The slab of each segment of a state: a run of its numbers."""
    left, dtype = value.numel(), dtype_name(value.dtype)
    while left:
        run = min(left, SEGMENT_BYTES // value.element_size())
        yield Slab("states", dtype, 1, 1, run)
        left -= run


def _bytes(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The tensor's bytes in row-major order; a view of it if that is its order."""
    flat: np.ndarray[Any, np.dtype[np.uint8]] = tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy()
    return flat
