"""Tensors of a chunk, and the cache of a row's own tokens."""

from __future__ import annotations

import pytest
import torch

from ragkv.attention.kv import ChunkKV, PlacedChunk


def chunk(tokens: int = 3, encoded_at: int = 0) -> ChunkKV:
    keys = tuple(torch.randn(2, tokens, 4) for _ in range(2))
    return ChunkKV(keys=keys, values=keys, encoded_at=encoded_at)


def test_offset_is_how_far_the_prompt_moved_it():
    assert PlacedChunk(kv=chunk(encoded_at=5), start=12).offset == 7
    assert PlacedChunk(kv=chunk(tokens=3), start=12).end == 15


def test_every_tensor_of_a_layer_is_checked():
    """Keys and values of a layer, and all layers, must have the same tokens and heads."""
    good = torch.zeros(2, 3, 4)
    with pytest.raises(ValueError, match="one key and one value"):
        ChunkKV(keys=(), values=())
    for key, value in (
        (torch.zeros(2, 5, 4), good),
        (torch.zeros(2, 5, 4), torch.zeros(2, 5, 4)),  # another number of tokens than layer 0
        (good, torch.zeros(1, 3, 4)),  # other heads
        (good, torch.zeros(2, 4, 4)),  # other tokens
        (torch.zeros(1, 2, 3, 4), good),
    ):
        with pytest.raises(ValueError, match="layer 1"):
            ChunkKV(keys=(good, key), values=(good, value))


def test_layers_may_differ_in_width_and_values_from_keys():
    kv = ChunkKV(keys=(torch.zeros(2, 3, 4), torch.zeros(1, 3, 8)), values=(torch.zeros(2, 3, 5), torch.zeros(1, 3, 6)))
    assert kv.shape.layers == ((2, 4, 5), (1, 8, 6))
    assert kv.nbytes == 4 * 3 * (2 * 9 + 14)


def test_a_copy_on_another_device_is_the_same_chunk():
    """Every machine has the device `meta`; a chunk that is on the device already is not copied."""
    kv = chunk(encoded_at=9)
    moved = kv.to(torch.device("meta"))
    assert (moved.encoded_at, moved.tokens, moved.shape) == (9, 3, kv.shape)
    assert moved.keys[0].device.type == "meta"
    assert kv.to(torch.device("cpu")) is kv
