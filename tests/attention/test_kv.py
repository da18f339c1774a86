"""Tensors of a chunk and the cache of a row's own tokens."""

from __future__ import annotations

import pytest
import torch

from ragkv.attention.kv import ChunkKV, Segment
from ragkv.attention.ownkv import OwnKV


def chunk(tokens: int = 3, encoded_at: int = 0) -> ChunkKV:
    keys = tuple(torch.randn(2, tokens, 4) for _ in range(2))
    return ChunkKV(keys=keys, values=keys, encoded_at=encoded_at)


def test_shapes_must_agree():
    good = torch.zeros(2, 3, 4)
    with pytest.raises(ValueError, match="one key and one value"):
        ChunkKV(keys=(), values=())
    with pytest.raises(ValueError, match="layer 1"):
        ChunkKV(keys=(good, torch.zeros(2, 5, 4)), values=(good, good))


def test_offset_is_how_far_the_prompt_moved_it():
    assert Segment(kv=chunk(encoded_at=5), start=12).offset == 7
    assert Segment(kv=chunk(tokens=3), start=12).end == 15


def test_own_tokens_grow_without_losing_or_moving_old_ones():
    own = OwnKV(reserve=4)
    pieces = [torch.randn(1, 2, n, 4) for n in (3, 1, 1, 9, 1)]
    for i, piece in enumerate(pieces):
        for layer in (0, 1):
            keys, values = own.append(layer, piece + layer, -piece)
            torch.testing.assert_close(keys, torch.cat(pieces[: i + 1], 2) + layer)
            torch.testing.assert_close(values, layer - keys)
        own.commit(piece.shape[2])
    assert own.length == 15


def test_tokens_of_a_pass_that_failed_are_overwritten():
    own, first = OwnKV(reserve=1), torch.randn(1, 2, 3, 4)
    own.append(0, first, first)
    own.commit(3)
    for n in (2, 7, 1):  # it does not matter how far the failed passes got, nor what they had room for
        own.append(0, torch.randn(1, 2, n, 4), torch.randn(1, 2, n, 4))
        assert own.length == 3
    again = torch.randn(1, 2, 2, 4)
    keys, values = own.append(0, again, -again)
    own.append(1, torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 4))
    torch.testing.assert_close(keys, torch.cat([first, again], 2))
    torch.testing.assert_close(values, torch.cat([first, -again], 2))


def test_a_decode_step_copies_nothing_while_there_is_room():
    own = OwnKV(reserve=8)
    first, _ = own.append(0, torch.randn(1, 1, 2, 4), torch.randn(1, 1, 2, 4))
    own.commit(2)
    for _ in range(8):
        keys, _ = own.append(0, torch.randn(1, 1, 1, 4), torch.randn(1, 1, 1, 4))
        own.commit(1)
        assert keys.data_ptr() == first.data_ptr()


def test_a_chunk_cut_from_own_tokens_is_its_own_memory():
    own = OwnKV()
    states = torch.randn(1, 1, 3, 4)
    own.append(0, states, states)
    own.commit(3)
    kv = own.chunk_kv(encoded_at=7)
    own.append(0, -states, -states)
    own.commit(3)
    torch.testing.assert_close(kv.keys[0], states[0])
    assert (kv.tokens, kv.encoded_at, kv.nbytes) == (3, 7, 2 * 3 * 4 * 4)
    assert kv.keys[0].is_contiguous()
    assert kv.keys[0].untyped_storage().nbytes() == 3 * 4 * 4


def test_a_chunk_is_cut_of_whole_passes_alone():
    own = OwnKV()
    states = torch.randn(1, 1, 3, 4)
    own.append(0, states, states)
    own.commit(3)
    own.append(0, states, states)  # not committed: the pass failed
    assert own.chunk_kv().tokens == 3


def test_every_tensor_of_a_layer_is_checked():
    """Keys and values of one layer, and the layers among each other, hold the same tokens and heads."""
    good = torch.zeros(2, 3, 4)
    for key, value in (
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
    """`meta` is a device that every machine has; a chunk that is there already is not copied."""
    kv = chunk(encoded_at=9)
    moved = kv.to(torch.device("meta"))
    assert (moved.encoded_at, moved.tokens, moved.shape) == (9, 3, kv.shape)
    assert moved.keys[0].device.type == "meta"
    assert kv.to(torch.device("cpu")) is kv


def test_memory_for_own_tokens_doubles():
    """A long answer moves its tokens a logarithm of times, not once in `reserve` steps."""
    own, places = OwnKV(reserve=4), set()
    step = torch.randn(1, 1, 1, 2)
    for _ in range(1000):
        keys, _ = own.append(0, step, step)
        own.commit(1)
        places.add(keys.untyped_storage().nbytes())
    assert len(places) < 15


def test_a_cut_goes_to_the_end_of_what_is_held():
    own = OwnKV(reserve=50)
    for layer in range(2):
        own.append(layer, torch.randn(1, 1, 4, 2), torch.randn(1, 1, 4, 2))
    own.commit(4)
    assert own.chunk_kv().tokens == 4
