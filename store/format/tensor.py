"""From a record's bytes to its tensors."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragkv.attention.kv import DTYPES, ChunkKV, State
from ragkv.attention.shape import ITEM_SIZES, DType
from ragkv.store.codec import codec_from_config
from ragkv.store.format.buffer import new_buffer
from ragkv.store.format.decode import Fetch, checked_payloads, decode_segments
from ragkv.store.format.record import Manifest

__all__ = ["decode_record", "flat_tensor", "layer_tensors", "record_tensors", "typed_tensor"]


def decode_record(manifest: Manifest, fetch: Fetch) -> ChunkKV:
    """The tensors of a record, as views of one new buffer.

    `DamagedError` or `ConfigError` (unknown codec) when the record cannot be read.
    """
    codec = codec_from_config(manifest.codec)
    payloads = checked_payloads(manifest, fetch)
    buffer = new_buffer(manifest.raw_bytes)
    decode_segments(manifest, codec, range(len(manifest.segments)), payloads.__getitem__, buffer)
    return record_tensors(manifest, buffer)


def flat_tensor(manifest: Manifest, buffer: NDArray[np.uint8]) -> Tensor:
    """A view of the bytes as numbers of the record's dtype."""
    return typed_tensor(manifest.dtype, buffer)


def typed_tensor(dtype: DType, buffer: NDArray[np.uint8]) -> Tensor:
    """A view of the bytes as numbers of this dtype; a copy where they do not begin at a multiple of its size."""
    if buffer.__array_interface__["data"][0] % ITEM_SIZES[dtype]:
        buffer = buffer.copy()
    return torch.from_numpy(buffer.view(f"i{ITEM_SIZES[dtype]}")).view(DTYPES[dtype])


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
        begin, end = end, end + math.prod(sizes) * ITEM_SIZES[dtype]
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
