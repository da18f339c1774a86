"""Queries rotated back by how far a chunk was moved, against rotation by complex numbers in fp64."""

from __future__ import annotations

import pytest
import torch

from ragkv.attention.kv import ChunkKV, PlacedChunk
from ragkv.attention.rope import QueryRotations, Rotary
from ragkv.attention.sequence import join

HEAD_DIM = 8
FREQUENCIES = {
    "near": torch.tensor([1.0, 0.3, 0.1, 0.03], dtype=torch.double),
    "far": torch.tensor([0.5, 0.05, 0.005, 0.0005], dtype=torch.double),
}
KINDS = ("near", None, "far", "near")


def angles(positions, kind):
    phases = positions[..., None].double() * FREQUENCIES[kind]
    phases = torch.cat([phases, phases], -1)  # (batch, n, head_dim), as transformers lays them out
    return phases.cos().float(), phases.sin().float()


def apply(states, cos, sin):
    def half_rotated(x):
        return torch.cat([-x[..., HEAD_DIM // 2 :], x[..., : HEAD_DIM // 2]], -1)

    cos, sin = cos[:, None], sin[:, None]
    return states * cos + half_rotated(states) * sin


ROTARY = Rotary(apply=apply, angles=angles, kinds=KINDS)


def exact(states, kind, offset):
    """R(offset)·states in fp64: elements i and i + head_dim/2 of a head form one complex number."""
    wide = states.double()
    pairs = torch.complex(wide[..., : HEAD_DIM // 2], wide[..., HEAD_DIM // 2 :])
    rotated = pairs * torch.exp(1j * offset * FREQUENCIES[kind])
    return torch.cat([rotated.real, rotated.imag], -1)


def rotations_of(offsets, rotary=ROTARY):
    return QueryRotations(rotary, offsets, torch.device("cpu"))


def paired(states, cos, sin):
    """Adjacent elements form a complex number, as in GLM and Cohere; only the first half of a head is rotated."""
    cos, sin = (t[:, None, :, : HEAD_DIM // 4].repeat_interleave(2, -1) for t in (cos, sin))

    moved, still = states[..., : HEAD_DIM // 2], states[..., HEAD_DIM // 2 :]
    quarter = torch.stack([-moved[..., 1::2], moved[..., 0::2]], -1).flatten(-2)
    return torch.cat([moved * cos + quarter * sin, still], -1)


def neighbours(states, cos, sin):
    """Adjacent elements form a complex number, in the whole head."""
    cos, sin = (t[:, None, :, : HEAD_DIM // 2].repeat_interleave(2, -1) for t in (cos, sin))
    return states * cos + torch.stack([-states[..., 1::2], states[..., 0::2]], -1).flatten(-2) * sin


@pytest.mark.parametrize("function", [apply, paired])
@pytest.mark.parametrize("offsets", [[-4], [5, 0, -4, 3, 5, 12]], ids=str)
def test_tokens_are_rotated_back_by_every_offset(function, offsets):
    """None may get another token's states or another chunk's angle; `paired` leaves half a head as it is."""
    query, tokens = torch.randn(1, 4, 5, HEAD_DIM), torch.tensor([3, 0, 4])
    rotation = rotations_of(offsets, Rotary(apply=function, angles=angles, kinds=KINDS)).of(query, 0)
    for offset in offsets:
        expected = function(query, *angles(torch.full((1, 5), -offset), "near"))[:, :, tokens]
        torch.testing.assert_close(rotation.by(offset, tokens), expected, atol=1e-5, rtol=0)


def casting(states, cos, sin):
    """A model's rotary function that computes in the query's dtype, as some families' do."""
    return apply(states, cos.to(states.dtype), sin.to(states.dtype))


@pytest.mark.parametrize("function", [apply, casting])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_rounded_once(dtype, function):
    """Rotated in fp32: the result is the exact one rounded, but for a last bit where fp32 itself is on the edge."""
    rotary = Rotary(apply=function, angles=angles, kinds=KINDS)
    query = torch.randn(1, 4, 50, HEAD_DIM).to(dtype)
    expected = exact(query, "near", -13).to(dtype)
    rotated = rotations_of([13], rotary).of(query, 0).by(13, slice(0, 50))
    for found in (rotated, rotary.rotate(query, 0, torch.full((1, 50), -13))):
        assert found.dtype == dtype
        assert (found == expected).float().mean() > 0.99


@pytest.mark.parametrize("function", [apply, casting])
def test_keys_that_are_laid_out_are_rounded_once(function):
    """The same for what a decode step reads: keys rotated to their place in fp32, each layer by its own frequencies."""
    rotary = Rotary(apply=function, angles=angles, kinds=KINDS)
    drawn = [torch.randn(2, 40, HEAD_DIM).bfloat16() for _ in KINDS]
    kv = ChunkKV(keys=tuple(drawn), values=tuple(drawn), encoded_at=4)
    whole = join([PlacedChunk(kv=kv, start=17), PlacedChunk(kv=kv, start=1)], rotary)
    for key, stored, kind in zip(whole.keys, drawn, KINDS, strict=True):
        assert key.dtype == torch.bfloat16
        for placed, offset in ((key[:, :40], 13), (key[:, 40:], -3)):
            expected = stored if kind is None else exact(stored, kind, offset).bfloat16()
            assert (placed == expected).float().mean() > 0.99


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("function", "halves"), [(apply, "adjacent"), (neighbours, "paired"), (paired, None)])
def test_keys_are_laid_out_as_the_model_rotates_them(function, halves, dtype):
    """Halves, pairs, and other layouts: a partial rotation, which the model's own function computes."""
    rotary = Rotary(apply=function, angles=angles, kinds=KINDS)
    expected = {"adjacent": (slice(4), slice(4, None)), "paired": (slice(0, None, 2), slice(1, None, 2))}.get(halves)
    assert rotary.halves("near", HEAD_DIM) == expected
    drawn = [torch.randn(2, 40, HEAD_DIM).to(dtype) for _ in KINDS]
    kv = ChunkKV(keys=tuple(drawn), values=tuple(drawn), encoded_at=4)
    whole = join(
        [PlacedChunk(kv=kv, start=17), PlacedChunk(kv=kv.head(9), start=1), PlacedChunk(kv=kv, start=4)], rotary
    )
    for layer, (key, stored) in enumerate(zip(whole.keys, drawn, strict=True)):
        for placed, offset in ((key[:, :40], 13), (key[:, 40:49], -3), (key[:, 49:], 0)):
            some = stored[None, :, : placed.shape[1]]
            moved = rotary.rotate(some, layer, torch.full((1, some.shape[2]), offset))[0]
            torch.testing.assert_close(placed, moved, atol=1e-5, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5)
        torch.testing.assert_close(whole.values[layer][:, 40:49], stored[:, :9], atol=0, rtol=0)
