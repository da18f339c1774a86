"""The context laid out once: what a step reads is what was asked for, and a step copies nothing."""

from __future__ import annotations

import pytest
import torch
from asking import request
from torch.utils._python_dispatch import TorchDispatchMode

import ragkv.attention.context
from ragkv.attention.context import Context, ContextGroup
from ragkv.attention.kv import ChunkKV, PlacedKV
from ragkv.attention.settle import LONG, join, settle
from ragkv.engines import make_engine

CHUNKS = [[50 + i + j for j in range(24)] for i in range(6)]
SCORES = [0.5, 0.6, 0.7, 0.8, 0.9, 0.95]


def placed(model, lengths, *, apart=0):
    found, at = [], 3
    for kv in model.encode([CHUNKS[i][:n] for i, n in enumerate(lengths)]):
        found.append(PlacedKV(kv=kv, start=at))
        at += kv.tokens + apart
    return tuple(found)


def test_joined_keys_are_those_of_a_forward_at_those_positions(family, make_model):
    model = make_model(family)
    chunks = placed(model, [4, 9, 2])
    whole = join(chunks, model.rotary)
    for at, ids, chunk in zip((0, 4, 13), CHUNKS, chunks, strict=False):
        own = model.own()
        ids = torch.tensor([ids[: chunk.kv.tokens]])
        model.forward(ids, torch.arange(chunk.start, chunk.end)[None], own=own)
        direct = own.chunk_kv(0)
        for layer in range(model.layers):
            found = whole.keys[layer][:, at : at + chunk.kv.tokens]
            torch.testing.assert_close(found, direct.keys[layer], atol=1e-4, rtol=1e-4)
            assert torch.equal(whole.values[layer][:, at : at + chunk.kv.tokens], chunk.kv.values[layer])


def test_what_gains_nothing_is_not_copied(make_model):
    model = make_model("llama")
    chunks = placed(model, [4, 9])
    alone, apart = ContextGroup(chunks=chunks[:1]), ContextGroup(chunks=placed(model, [4, 9], apart=2))
    kept = settle(Context(groups=(alone, apart)), model.rotary, windowed=True)
    assert kept.groups[0] is alone
    assert kept.groups[1] is apart  # a window is cut by position
    [group] = settle(Context(groups=(apart,)), model.rotary, windowed=False).groups
    assert [c.kv.tokens for c in group.chunks] == [13]
    long = tuple(
        PlacedKV(kv=ChunkKV(keys=(torch.zeros(1, LONG, 2),), values=(torch.zeros(1, LONG, 2),)), start=LONG * i)
        for i in range(2)
    )
    group = ContextGroup(chunks=long)
    assert settle(Context(groups=(group,)), model.rotary, windowed=False).groups[0] is group


def test_a_group_keeps_its_weights(make_model):
    model = make_model("llama")
    group = ContextGroup(chunks=placed(model, [4, 9]), temperature=0.5, scale=0.7, scale_mode="log")
    [found] = settle(Context(groups=(group,)), model.rotary, windowed=False).groups
    assert (found.temperature, found.scale, found.scale_mode) == (0.5, 0.7, "log")


class Largest(TorchDispatchMode):
    """The most bytes that any operation allocated anew: outputs whose storage none of its inputs has."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("name", ["ape", "block", "pced"])
@pytest.mark.parametrize("family", ["llama3-scaling", "mistral-sliding"])
def test_a_step_reads_the_context_in_place(name, family, make_model, monkeypatch):
    """The same pointers at every step, and no operation of a step makes anything as large as a layer's context.

    144 context tokens, so that a layer's keys (18 KB) are larger than all else that a step makes.
    """
    model = make_model(family)
    engine = make_engine(name, {})
    stream = engine.start(model, request(model, engine, chunks=CHUNKS, scores=SCORES))
    stream.advance(5)
    honest, pointers = ragkv.attention.context.partial_attention, []

    def watched(query, key, value, **rest):
        pointers[-1].append((key.untyped_storage().data_ptr(), value.untyped_storage().data_ptr()))
        return honest(query, key, value, **rest)

    monkeypatch.setattr(ragkv.attention.context, "partial_attention", watched)
    largest = Largest()
    with largest:
        for token in (6, 7, 8):
            pointers.append([])
            stream.advance(token)
    assert pointers[0] == pointers[1] == pointers[2]
    keys_of_a_layer = 144 * 2 * 16 * 4
    assert 0 < largest.bytes < keys_of_a_layer


def forward(model, context, start):
    ids = torch.tensor([[100, 101, 102]])
    positions = torch.arange(start, start + 3)[None]
    return model.forward(ids, positions, context=context, own=model.own(), every=True)[0]


@pytest.mark.parametrize("family", ["llama-yarn", "gemma3", "mistral-sliding"])
@pytest.mark.parametrize("gaps", [(0, 0, 0), (0, 0, 3), (0, 2, 0), (1, 0, -2)], ids=str)
def test_a_group_is_laid_out_as_its_chunks_lie(family, gaps, make_model):
    """Chunks end to end, with a gap somewhere, or one over the other; a window is cut by where each token stands."""
    model = make_model(family)
    chunks, at = [], 2
    for kv, gap in zip(model.encode([CHUNKS[i][:n] for i, n in enumerate((4, 3, 5))]), gaps, strict=True):
        chunks.append(PlacedKV(kv=kv, start=at + gap))
        at = chunks[-1].end
    context = Context(groups=(ContextGroup(chunks=tuple(chunks)),))
    settled = settle(context, model.rotary, windowed=bool(model.windows))
    expected = forward(model, context, at)
    torch.testing.assert_close(forward(model, settled, at), expected, atol=3e-5 * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_chunks_move_towards_the_beginning_too(family, make_model):
    """Encoded after a prefix and placed before where it was encoded: the keys are those of a forward at that place."""
    model = make_model(family)
    [prefix] = model.encode([CHUNKS[3][:9]])
    moved = model.encode([CHUNKS[0][:5], CHUNKS[1][:4]], prefix=prefix)
    whole = join([PlacedKV(kv=kv, start=start) for kv, start in zip(moved, (2, 7), strict=True)], model.rotary)
    assert whole.encoded_at == 2
    for at, end, kv, offset in ((0, 5, moved[0], -7), (5, 9, moved[1], -2)):
        for layer in range(model.layers):
            there = model.rotary.rotate(kv.keys[layer][None], layer, torch.tensor([[offset]]))[0]
            torch.testing.assert_close(whole.keys[layer][:, at:end], there, atol=1e-5, rtol=1e-5)
