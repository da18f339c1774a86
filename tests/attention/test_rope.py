"""Queries turned back by how far a chunk was moved, against rotation by complex numbers in fp64."""

from __future__ import annotations

import pytest
import torch

from ragkv.attention.kv import ChunkKV, PlacedKV
from ragkv.attention.rope import Rotary, Turns
from ragkv.attention.settle import join

HEAD_DIM = 8
FREQUENCIES = {
    "near": torch.tensor([1.0, 0.3, 0.1, 0.03], dtype=torch.double),
    "far": torch.tensor([0.5, 0.05, 0.005, 0.0005], dtype=torch.double),
}
KINDS = ("near", None, "far", "near")


def angles(positions, kind):
    turned = positions[..., None].double() * FREQUENCIES[kind]
    turned = torch.cat([turned, turned], -1)  # (batch, n, head_dim), as transformers lays them out
    return turned.cos().float(), turned.sin().float()


def apply(query, key, cos, sin):
    def half_turned(x):
        return torch.cat([-x[..., HEAD_DIM // 2 :], x[..., : HEAD_DIM // 2]], -1)

    cos, sin = cos[:, None], sin[:, None]
    return query * cos + half_turned(query) * sin, key * cos + half_turned(key) * sin


ROTARY = Rotary(apply=apply, angles=angles, kinds=KINDS)


def exact(states, kind, offset):
    """R(offset)·states in fp64: number i and number i + head_dim/2 of a head are one complex number."""
    wide = states.double()
    pairs = torch.complex(wide[..., : HEAD_DIM // 2], wide[..., HEAD_DIM // 2 :])
    turned = pairs * torch.exp(1j * offset * FREQUENCIES[kind])
    return torch.cat([turned.real, turned.imag], -1)


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("offsets", [[7], [3, 11], [5, 0, -4, 3, 5, 12]], ids=str)
def test_every_row_is_turned_back_by_every_offset(batch, offsets):
    """Rows of a batch differ, and so do their turns: none may get another row's states or another chunk's angle."""
    query = torch.randn(batch, 4, 5, HEAD_DIM)
    found = Turns(ROTARY).turn(query, 0, offsets)
    assert len(found) == len(offsets)
    for turned, offset in zip(found, offsets, strict=True):
        torch.testing.assert_close(turned.double(), exact(query, "near", -offset), atol=1e-5, rtol=0)


def test_layers_of_one_pass_have_their_own_frequencies_and_chunks():
    """What is computed once and used again belongs to one kind of frequencies and one list of offsets."""
    query, turns = torch.randn(2, 4, 3, HEAD_DIM), Turns(ROTARY)
    for layer, offsets in ((0, [2, 9]), (2, [2, 9]), (0, [9]), (3, [4, 6]), (2, [4, 6]), (0, [2, 9])):
        for turned, offset in zip(turns.turn(query, layer, offsets), offsets, strict=True):
            torch.testing.assert_close(turned.double(), exact(query, KINDS[layer], -offset), atol=1e-5, rtol=0)


def test_a_layer_without_positions_turns_nothing():
    query = torch.randn(2, 4, 3, HEAD_DIM)
    assert all(turned is query for turned in Turns(ROTARY).turn(query, 1, [5, -2]))
    assert ROTARY.rotate(query, 1, torch.full((2, 3), 5)) is query


def test_a_chunk_that_was_not_moved_is_read_with_the_query_itself():
    query = torch.randn(1, 4, 3, HEAD_DIM)
    turned, itself = Turns(ROTARY).turn(query, 0, [5, 0])
    assert itself is query
    assert not torch.equal(turned, query)


def casting(query, key, cos, sin):
    """A model's function that computes in the dtype of the query, as some families' do."""
    return apply(query, key, cos.to(query.dtype), sin.to(query.dtype))


@pytest.mark.parametrize("function", [apply, casting])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_rounded_once(dtype, function):
    """Turned in fp32: the result is the exact one rounded, but for a last bit where fp32 itself is on the edge."""
    rotary = Rotary(apply=function, angles=angles, kinds=KINDS)
    query = torch.randn(2, 4, 50, HEAD_DIM).to(dtype)
    offsets = torch.full((2, 50), -13)
    expected = exact(query, "near", -13).to(dtype)
    for found in (Turns(rotary).turn(query, 0, [13])[0], rotary.rotate(query, 0, offsets)):
        assert found.dtype == dtype
        assert (found == expected).float().mean() > 0.99


@pytest.mark.parametrize("function", [apply, casting])
def test_keys_that_are_laid_out_are_rounded_once(function):
    """The same for what a decode step reads: keys turned to their place in fp32, each layer by its own frequencies."""
    rotary = Rotary(apply=function, angles=angles, kinds=KINDS)
    drawn = [torch.randn(2, 40, HEAD_DIM).bfloat16() for _ in KINDS]
    kv = ChunkKV(keys=tuple(drawn), values=tuple(drawn), encoded_at=4)
    whole = join([PlacedKV(kv=kv, start=17), PlacedKV(kv=kv, start=1)], rotary)
    for key, stored, kind in zip(whole.keys, drawn, KINDS, strict=True):
        assert key.dtype == torch.bfloat16
        for placed, offset in ((key[:, :40], 13), (key[:, 40:], -3)):
            expected = stored if kind is None else exact(stored, kind, offset).bfloat16()
            assert (placed == expected).float().mean() > 0.99
