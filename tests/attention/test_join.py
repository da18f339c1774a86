"""Chunks laid out as one: which groups gain by it, and that the keys are those of a forward at their places."""

from __future__ import annotations

import pytest
import torch

from ragkv.attention.join import LONG, join, worth_joining
from ragkv.attention.kv import ChunkKV, Segment
from ragkv.attention.row import Group, Row

CHUNKS = [[50 + i + j for j in range(24)] for i in range(6)]


def placed(model, lengths, *, apart=0):
    found, at = [], 3
    for kv in model.encode([CHUNKS[i][:n] for i, n in enumerate(lengths)]):
        found.append(Segment(kv=kv, start=at))
        at += kv.tokens + apart
    return tuple(found)


def test_joined_keys_are_those_of_a_forward_at_those_positions(family, make_model):
    model = make_model(family)
    segments = placed(model, [4, 9, 2])
    whole = join(segments, model.rotary)
    assert (whole.tokens, whole.encoded_at) == (15, 3)
    for at, ids, segment in zip((0, 4, 13), CHUNKS, segments, strict=False):
        row = Row((), segment.start)
        model.step([row], [ids[: segment.kv.tokens]])
        direct = row.own.chunk_kv()
        for layer in range(model.layers):
            found = whole.keys[layer][:, at : at + segment.kv.tokens]
            torch.testing.assert_close(found, direct.keys[layer], atol=1e-4, rtol=1e-4)
            assert torch.equal(whole.values[layer][:, at : at + segment.kv.tokens], segment.kv.values[layer])


def blank(tokens: int, start: int) -> Segment:
    return Segment(kv=ChunkKV(keys=(torch.zeros(1, tokens, 2),), values=(torch.zeros(1, tokens, 2),)), start=start)


def test_what_gains_nothing_is_not_joined():
    one, after, far, empty = blank(4, 3), blank(9, 7), blank(9, 9), blank(0, 7)
    assert worth_joining(Group(segments=(one, after)), windowed=True)
    assert not worth_joining(Group(segments=(one,)), windowed=False)
    assert not worth_joining(Group(segments=(one, empty)), windowed=False)  # which has no tokens
    assert worth_joining(Group(segments=(one, empty, after)), windowed=True)
    assert worth_joining(Group(segments=(one, far)), windowed=False)
    assert not worth_joining(Group(segments=(one, far)), windowed=True)  # a window is cut by position
    assert not worth_joining(Group(segments=(one, one)), windowed=True)  # APE's share their positions
    assert not worth_joining(Group(segments=(blank(LONG, 0), blank(LONG, LONG))), windowed=False)
    assert not worth_joining(Group(segments=()), windowed=False)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_chunks_move_towards_the_beginning_too(family, make_model):
    """Encoded after a prefix and placed before where it was encoded: the keys are those of a forward at that place."""
    model = make_model(family)
    [prefix] = model.encode([CHUNKS[3][:9]])
    moved = model.encode([CHUNKS[0][:5], CHUNKS[1][:4]], prefix=prefix)
    whole = join([Segment(kv=kv, start=start) for kv, start in zip(moved, (2, 7), strict=True)], model.rotary)
    assert whole.encoded_at == 2
    for at, end, kv, offset in ((0, 5, moved[0], -7), (5, 9, moved[1], -2)):
        for layer in range(model.layers):
            there = model.rotary.rotate(kv.keys[layer][None], layer, torch.tensor([[offset]]))[0]
            torch.testing.assert_close(whole.keys[layer][:, at:end], there, atol=1e-5, rtol=1e-5)
