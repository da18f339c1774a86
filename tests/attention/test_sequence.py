"""A row's own KV, and chunks laid out as one."""

from __future__ import annotations

import pytest
import torch

from ragkv.attention.kv import ChunkKV, PlacedChunk
from ragkv.attention.sequence import (
    LONG,
    ArenaBlock,
    ChunkGroup,
    KVArena,
    KVCache,
    TokenSequence,
    join,
    worth_joining,
)


def test_own_kv_keeps_a_choice_of_its_tokens():
    own = KVCache()
    states = torch.arange(5.0).view(1, 1, 5, 1)
    own.append(0, states, states + 10)
    own.commit(5)
    own.select([1, 3, 4])
    new = torch.full((1, 1, 1, 1), 9.0)
    keys, values = own.append(0, new, new)
    assert keys.flatten().tolist() == [1, 3, 4, 9]
    assert values.flatten().tolist() == [11, 13, 14, 9]


def test_a_place_is_clean_when_it_is_taken():
    arena = KVArena()
    first, stays = arena.place(4, 4, 2), arena.place(4, 4, 2)
    block = first.block
    assert stays.block is block
    for own in (first, stays):
        own.append(0, torch.full((1, 2, 8, 4), torch.nan), torch.full((1, 2, 8, 4), torch.nan))
        own.commit(8)
    slot = first.slot
    del first
    again = arena.place(2, 2, 2)
    assert (again.block, again.slot) == (block, slot)
    assert not block.keys[0][slot].any()
    assert not block.values[0][slot].any()
    assert block.keys[0][stays.slot].isnan().any()


def test_a_block_that_found_no_memory_for_values_finds_it_later():
    class Never:
        shape, device = (1, 2, 3, 4), torch.device("cpu")

        def new_zeros(self, shape):
            raise RuntimeError("can't allocate memory")

    block, states = ArenaBlock(2, 64), torch.randn(1, 2, 3, 4)
    with pytest.raises(RuntimeError, match="memory"):
        block.make(0, states, Never())
    block.make(0, states, states)
    assert block.keys[0].shape == block.values[0].shape == (2, 2, 64, 4)


def test_own_tokens_grow_without_losing_or_moving_old_ones():
    own = KVCache(reserve=4)
    pieces = [torch.randn(1, 2, n, 4) for n in (3, 1, 1, 9, 1)]
    for i, piece in enumerate(pieces):
        for layer in (0, 1):
            keys, values = own.append(layer, piece + layer, -piece)
            torch.testing.assert_close(keys, torch.cat(pieces[: i + 1], 2) + layer)
            torch.testing.assert_close(values, layer - keys)
        own.commit(piece.shape[2])
    assert own.length == 15


def test_tokens_of_a_pass_that_failed_are_overwritten():
    own, first = KVCache(reserve=1), torch.randn(1, 2, 3, 4)
    own.append(0, first, first)
    own.commit(3)
    for n in (2, 7, 1):  # whatever the failed passes wrote or reserved
        own.append(0, torch.randn(1, 2, n, 4), torch.randn(1, 2, n, 4))
        assert own.length == 3
    again = torch.randn(1, 2, 2, 4)
    keys, values = own.append(0, again, -again)
    own.append(1, torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 4))
    torch.testing.assert_close(keys, torch.cat([first, again], 2))
    torch.testing.assert_close(values, torch.cat([first, -again], 2))


def test_a_chunk_cut_from_own_tokens_is_its_own_memory():
    own = KVCache()
    states = torch.randn(1, 1, 3, 4)
    own.append(0, states, states)
    own.commit(3)
    own.append(0, -states, -states)  # not committed, as after a failed pass
    kv = own.chunk_kv(encoded_at=7)
    own.append(0, -states, -states)
    own.commit(3)
    torch.testing.assert_close(kv.keys[0], states[0])
    assert (kv.tokens, kv.encoded_at, kv.nbytes) == (3, 7, 2 * 3 * 4 * 4)
    assert kv.keys[0].is_contiguous()
    assert kv.keys[0].untyped_storage().nbytes() == 3 * 4 * 4


def test_a_step_copies_nothing_while_there_is_room_and_room_doubles():
    """A long answer copies its tokens a logarithmic number of times, not once every `reserve` steps."""
    own, places, step = KVCache(reserve=8), [], torch.randn(1, 1, 1, 2)
    for _ in range(1000):
        keys, _ = own.append(0, step, step)
        own.commit(1)
        places.append((keys.data_ptr(), keys.untyped_storage().nbytes()))
    assert len(set(places[:9])) == 1
    assert len({size for _, size in places}) < 15


CHUNKS = [[50 + i + j for j in range(24)] for i in range(6)]


def placed(model, lengths, *, apart=0):
    found, at = [], 3
    for kv in model.encode([CHUNKS[i][:n] for i, n in enumerate(lengths)]):
        found.append(PlacedChunk(kv=kv, start=at))
        at += kv.tokens + apart
    return tuple(found)


def test_joined_keys_are_those_of_a_forward_at_those_positions(unlike_family, make_model):
    model = make_model(unlike_family)
    segments = placed(model, [4, 9, 2])
    whole = join(segments, model.rotary)
    assert (whole.tokens, whole.encoded_at) == (15, 3)
    for at, ids, segment in zip((0, 4, 13), CHUNKS, segments, strict=False):
        row = TokenSequence((), segment.start)
        model.step([row], [ids[: segment.kv.tokens]])
        direct = row.cache.chunk_kv()
        for layer in range(model.layers):
            found = whole.keys[layer][:, at : at + segment.kv.tokens]
            torch.testing.assert_close(found, direct.keys[layer], atol=1e-4, rtol=1e-4)
            assert torch.equal(whole.values[layer][:, at : at + segment.kv.tokens], segment.kv.values[layer])


def blank(tokens: int, start: int) -> PlacedChunk:
    return PlacedChunk(kv=ChunkKV(keys=(torch.zeros(1, tokens, 2),), values=(torch.zeros(1, tokens, 2),)), start=start)


def test_what_gains_nothing_is_not_joined():
    one, after, far, empty = blank(4, 3), blank(9, 7), blank(9, 9), blank(0, 7)
    assert worth_joining(ChunkGroup(segments=(one, after)), windowed=True)
    assert not worth_joining(ChunkGroup(segments=(one,)), windowed=False)
    assert not worth_joining(ChunkGroup(segments=(one, empty)), windowed=False)  # `empty` has no tokens
    assert worth_joining(ChunkGroup(segments=(one, empty, after)), windowed=True)
    assert worth_joining(ChunkGroup(segments=(one, far)), windowed=False)
    assert not worth_joining(ChunkGroup(segments=(one, far)), windowed=True)  # a window is cut by position
    assert not worth_joining(ChunkGroup(segments=(one, one)), windowed=True)  # APE's chunks share their positions
    assert not worth_joining(ChunkGroup(segments=(blank(LONG, 0), blank(LONG, LONG))), windowed=False)
    assert not worth_joining(ChunkGroup(segments=()), windowed=False)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_chunks_move_towards_the_beginning_too(family, make_model):
    """Encoded after a prefix and placed before that position: the keys equal those of a forward pass there."""
    model = make_model(family)
    [prefix] = model.encode([CHUNKS[3][:9]])
    moved = model.encode([CHUNKS[0][:5], CHUNKS[1][:4]], prefix=prefix)
    whole = join([PlacedChunk(kv=kv, start=start) for kv, start in zip(moved, (2, 7), strict=True)], model.rotary)
    assert whole.encoded_at == 2
    for at, end, kv, offset in ((0, 5, moved[0], -7), (5, 9, moved[1], -2)):
        for layer in range(model.layers):
            there = model.rotary.rotate(kv.keys[layer][None], layer, torch.tensor([[offset]]))[0]
            torch.testing.assert_close(whole.keys[layer][:, at:end], there, atol=1e-5, rtol=1e-5)


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


def test_tensors_of_a_chunk_may_differ_in_width_and_move():
    """Every machine has the device `meta`; a chunk that is on the device already is not copied."""
    keys, values = ((torch.zeros(2, 3, 4), torch.zeros(1, 3, 8)), (torch.zeros(2, 3, 5), torch.zeros(1, 3, 6)))
    kv = ChunkKV(keys=keys, values=values, encoded_at=5)
    assert kv.shape.layers == ((2, 4, 5), (1, 8, 6))
    assert kv.nbytes == 4 * 3 * (2 * 9 + 14)
    placed = PlacedChunk(kv=kv, start=12)
    assert (placed.offset, placed.end) == (7, 15)
    moved = kv.to(torch.device("meta"))
    assert (moved.encoded_at, moved.shape, moved.keys[0].device.type) == (5, kv.shape, "meta")
    assert kv.to(torch.device("cpu")) is kv
