"""Attention in place, against softmax in float64, and the calls that the kernels leave to others."""

from __future__ import annotations

from dataclasses import replace

import oracle
import pytest
import torch

from ragkv.attention import in_place, partial
from ragkv.attention.batch import Step
from ragkv.attention.kv import ChunkKV, PackedTensors, PlacedChunk
from ragkv.attention.partial import LayerCall
from ragkv.attention.rope import Rotary
from ragkv.attention.sequence import ChunkGroup, KVArena, TokenSequence

decode_kernel = pytest.importorskip("ragkv.attention.decode_kernel", exc_type=ImportError)
kernels = decode_kernel.kernels
STILL = Rotary(apply=lambda states, cos, sin: states, angles=lambda positions, kind: None, kinds=(None, None))
CPU = torch.device("cpu")
needs_dot = pytest.mark.skipif(not kernels.has_dot("bfloat16") or kernels.has_tiles(), reason="no AVX512-BF16, or AMX")


def chunk(tokens, heads, width, value_width, dtype=torch.float32, *, kept=None):
    """Random KV of two layers as views of larger tensors; `kept` is its dtype in memory."""
    keys, values = (
        [torch.randn(heads, tokens + 3, 2 * d)[:, 1:-2, :d].to(dtype) for _ in range(2)] for d in (width, value_width)
    )
    if kept is None:
        return ChunkKV(keys=keys, values=values)
    packed = rounded if kept is torch.int8 else torch.Tensor.half
    keys, values = (PackedTensors([packed(t) for t in tensors], dtype) for tensors in (keys, values))
    return ChunkKV(keys=keys, values=values)


def seen(kv, layer=1):
    """What a kernel reads of a layer: unpacked numbers are not rounded to the model's dtype."""
    if not kv.packed:
        return kv.keys[layer], kv.values[layer]
    return tuple(PackedTensors(tensors.stored, torch.float32)[layer] for tensors in (kv.keys, kv.values))


def rounded(numbers):
    """Numbers as the codec q8 keeps them in memory, between other bytes."""
    heads, tokens, width = numbers.shape
    rows = torch.full((heads, tokens + 3, width + 8), 99, dtype=torch.int8)[:, 1:-2, : width + 2]
    largest = numbers.abs().amax(-1, keepdim=True).bfloat16()
    rows[..., :width] = (numbers / largest.float() * 127).round()
    rows[..., width:] = largest.view(torch.int8)
    return rows


def call_of(queries, heads, group, width, value_width, dtype=torch.float32, **more):
    query, key = (torch.randn(1, n, queries, width).to(dtype) for n in (heads * group, heads))
    value = torch.randn(1, heads, queries, value_width).to(dtype)
    return LayerCall(layer=1, query=query, key=key, value=value, scale=0.3, **more)


def truth(call, at, kvs):
    """The attention of the token `at` over a list of (keys, values), in float64."""
    keys, values = (torch.cat([pair[i].double() for pair in kvs], 1)[None] for i in (0, 1))
    values = values if values.shape[-1] else keys
    return oracle.attention(call.query[:, :, at : at + 1], keys, values, call.scale, softcap=call.softcap)[0][0, :, 0]


def stepped(rows, call):
    return Step(rows, [1] * len(rows), STILL, CPU).attend(call)


@pytest.fixture
def calls(monkeypatch):
    """Records the number of parts in each call of the kernel."""
    found, honest = [], in_place._compute

    def watched(call, table, *more):
        found.append(len(table.tokens))
        return honest(call, table, *more)

    monkeypatch.setattr(in_place, "_compute", watched)
    return found


@pytest.mark.parametrize(
    ("dtype", "kept", "heads", "group", "width", "value_width", "softcap"),
    [
        (torch.bfloat16, [None], 2, 4, 32, 32, None),
        (torch.bfloat16, [torch.int8], 2, 4, 32, 32, None),
        (torch.float16, [torch.int8], 2, 1, 80, 80, None),
        # more query heads than are read at a time for a key head, and not a multiple
        (torch.float32, [torch.int8, torch.float16], 1, 11, 8, 8, 5.0),
        (torch.float32, [None], 3, 2, 24, 16, 5.0),
        (torch.bfloat16, [None], 1, 4, 40, 0, None),  # latents
    ],
    ids=str,
)
def test_it_is_exact(dtype, kept, heads, group, width, value_width, softcap, calls):
    """Chunks of one key, of a block of keys, and of one more or less; large scores."""
    torch.manual_seed(0)
    sizes = [1, decode_kernel.BLOCK - 1, 7, decode_kernel.BLOCK, 2 * decode_kernel.BLOCK + 1]
    kvs = [chunk(n, heads, width, value_width, dtype, kept=each) for each in kept for n in sizes]
    kvs.append(chunk(5, heads, width, value_width, dtype))  # packed and unpacked chunks in one table
    call = call_of(1, heads, group, width, value_width, dtype, softcap=softcap)
    call.query.mul_(20.0)
    row = TokenSequence.over([PlacedChunk(kv=kv, start=0) for kv in kvs], position=600)
    found = stepped([row], call)
    expected = truth(call, 0, [*map(seen, kvs), (call.key[0], call.value[0])])
    assert found.dtype == dtype
    assert calls == [1]
    torch.testing.assert_close(
        found[0, :, 0], expected.to(dtype), atol=2e-5, rtol=2e-2 if dtype != torch.float32 else 0
    )


def test_sequences_have_their_own_chunks_weights_and_tokens(calls):
    """One in a block of an arena, one with its own memory, one without chunks, and one with two groups."""
    torch.manual_seed(1)
    kvs = [chunk(n, 2, 16, 16) for n in (5, 70, 9, 33)]
    arena = KVArena()
    weighed = ChunkGroup(segments=(PlacedChunk(kv=kvs[2], start=0), PlacedChunk(kv=kvs[3], start=0)), temperature=0.5)
    groups = [(ChunkGroup(segments=(PlacedChunk(kv=kv, start=0),)),) for kv in kvs[:2]]
    rows = [TokenSequence(each, 90) for each in (groups[0], (), (*groups[1], weighed), groups[1])]
    for row in rows[:3]:
        row.cache = arena.place(3, 9, 4)
    own = {row: [] for row in rows}
    for step in range(3):
        call = call_of(4, 2, 2, 16, 16)
        mixed = Step(rows, [1] * 4, STILL, CPU)
        found = mixed.attend(call)
        mixed.commit()
        for at, row in enumerate(rows):
            own[row].append((call.key[0][:, at : at + 1], call.value[0][:, at : at + 1]))
            plain = [(s.kv.keys[1], s.kv.values[1]) for g in row.groups if g.plain for s in g.segments]
            if at == 2:
                continue
            torch.testing.assert_close(found[0, :, at], truth(call, at, [*plain, *own[row]]).float(), atol=1e-5, rtol=0)
        alone = TokenSequence(rows[2].groups, 90)
        for key, value in own[rows[2]][:-1]:
            alone.cache.append(1, key[None], value[None])
            alone.cache.commit(1)
        one = LayerCall(
            **{name: getattr(call, name) for name in ("layer", "scale")},
            **{name: getattr(call, name)[:, :, 2:3] for name in ("query", "key", "value")},
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(in_place, "_kernels", lambda: None)
            torch.testing.assert_close(found[:, :, 2:3], stepped([alone], one), atol=1e-5, rtol=0)
        assert calls.pop() == 5, step


def test_what_many_read_is_read_once_for_all(calls, monkeypatch):
    """The kernel skips a long chunk of three sequences, which is read once for all, and reads their short ones."""
    torch.manual_seed(2)
    long, *short = (chunk(n, 2, 16, 16) for n in (600, 9, 5, 3))
    segments = [PlacedChunk(kv=kv, start=0) for kv in (short[0], long, *short[1:])]
    rows = [TokenSequence.over(segments, position=617) for _ in range(3)]
    read, honest = [], LayerCall.partial

    def watched(call, query, key, value, **more):
        read.append(tuple(key.shape[1:3]))
        return honest(call, query, key, value, **more)

    monkeypatch.setattr(LayerCall, "partial", watched)
    call = call_of(3, 2, 2, 16, 16)
    found = stepped(rows, call)
    assert (read, calls) == ([(2, 600)], [3])
    for at in range(3):
        own = call.key[0][:, at : at + 1], call.value[0][:, at : at + 1]
        kvs = [*((kv.keys[1], kv.values[1]) for kv in (long, *short)), own]
        torch.testing.assert_close(found[0, :, at], truth(call, at, kvs).float(), atol=1e-5, rtol=0)
    assert stepped(rows[:2], call_of(2, 2, 2, 16, 16)).isfinite().all()
    assert (read, calls) == ([(2, 600)], [3, 2])


@pytest.mark.parametrize("window", [1, 5, 9, 12, 25, 90])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_window_ends_with_the_token(window, rows):
    """Eight own tokens precede it; three rows read the second of three chunks together."""
    torch.manual_seed(3)
    kvs = [chunk(n, 1, 16, 16) for n in (10, 400, 10)]
    call = call_of(rows, 1, 2, 16, 16, window=window)
    own = torch.randn(2, rows, 1, 1, 8, 16)
    placed = [PlacedChunk(kv=kv, start=start) for kv, start in zip(kvs, (0, 10, 410), strict=True)]
    found = [TokenSequence.over(placed, position=428) for _ in range(rows)]
    for row, key, value in zip(found, *own, strict=True):
        row.cache.append(1, key, value)
        row.cache.commit(8)
    result = stepped(found, call)
    for at in range(rows):
        each = [(kv.keys[1], kv.values[1]) for kv in kvs]
        each += [(own[0, at, 0], own[1, at, 0]), (call.key[0][:, at : at + 1], call.value[0][:, at : at + 1])]
        seen = [tuple(torch.cat([pair[i] for pair in each], 1)[:, -window:] for i in (0, 1))]
        torch.testing.assert_close(result[0, :, at], truth(call, at, seen).float(), atol=1e-5, rtol=0)


def test_groups_that_change_are_found_anew():
    torch.manual_seed(5)
    row = TokenSequence((), 9)
    for kv in (chunk(4, 1, 16, 16), chunk(9, 1, 16, 16)):
        row.groups = (ChunkGroup(segments=(PlacedChunk(kv=kv, start=0),)),)
        call = call_of(1, 1, 2, 16, 16)
        expected = truth(call, 0, [(kv.keys[1], kv.values[1]), (call.key[0], call.value[0])]).float()
        torch.testing.assert_close(stepped([row], call)[0, :, 0], expected, atol=1e-5, rtol=0)


def test_sequences_leave_a_block_that_is_full(calls):
    torch.manual_seed(6)
    arena, rows, own = KVArena(), [TokenSequence((), 0) for _ in range(2)], []
    for row in rows:
        row.cache = arena.place(60, 4, 2)
        pair = torch.randn(2, 1, 63, 16)
        row.cache.append(1, *pair[:, None])
        row.cache.commit(63)
        own.append([(pair[0], pair[1])])
    assert {row.cache.block.capacity for row in rows} == {64}
    for _ in range(3):
        call = call_of(2, 1, 2, 16, 16)
        step = Step(rows, [1, 1], STILL, CPU)
        found = step.attend(call)
        step.commit()
        for at in range(2):
            own[at].append((call.key[0][:, at : at + 1], call.value[0][:, at : at + 1]))
            torch.testing.assert_close(found[0, :, at], truth(call, at, own[at]).float(), atol=1e-5, rtol=0)
    assert [row.cache.block for row in rows] == [None, None]
    assert calls == [2, 2, 2]


def test_the_numbers_of_a_query_may_lie_apart(calls):
    kv, call = chunk(9, 1, 16, 16), call_of(1, 1, 2, 16, 16)
    apart = replace(call, query=torch.stack([call.query, call.key.expand_as(call.query)], -1)[..., 0])
    assert apart.query.stride(3) == 2
    found = [stepped([TokenSequence.over([PlacedChunk(kv=kv, start=0)], position=9)], each) for each in (call, apart)]
    assert torch.equal(*found)
    assert calls == [1, 1]


@pytest.mark.parametrize("which", ["keys", "values"])
def test_a_number_that_is_none_is_not_lost(which):
    kv = chunk(100, 1, 16, 16)
    getattr(kv, which)[1][0, 70, 3] = torch.nan
    row = TokenSequence.over([PlacedChunk(kv=kv, start=0)], position=100)
    assert stepped([row], call_of(1, 1, 2, 16, 16)).isnan().any()


def test_threads_share_the_heads(monkeypatch, calls):
    torch.manual_seed(4)
    kv, call = chunk(50, 5, 16, 16), call_of(1, 5, 2, 16, 16)
    one = stepped([TokenSequence.over([PlacedChunk(kv=kv, start=0)], position=50)], call)
    monkeypatch.setattr(in_place, "_NUMBERS", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    several = stepped([TokenSequence.over([PlacedChunk(kv=kv, start=0)], position=50)], call)
    assert torch.equal(one, several)
    assert calls == [1, 1]


def test_what_the_kernel_does_not_take(calls):
    """Other dtypes, also of a single chunk, widths that are not multiples of 8, and gradients are left to torch."""
    wide = torch.float64
    for kv, width, dtype in (
        (chunk(6, 1, 12, 12), 12, torch.float32),
        (chunk(6, 1, 16, 16, wide), 16, wide),
        (chunk(6, 1, 16, 16, wide), 16, torch.float32),
    ):
        call, group = call_of(1, 1, 2, width, width, dtype), ChunkGroup(segments=(PlacedChunk(kv=kv, start=0),))
        assert not in_place.reads_in_place(group)
        expected = truth(call, 0, [(kv.keys[1], kv.values[1]), (call.key[0], call.value[0])])
        found = stepped([TokenSequence((group,), 6)], call)[0, :, 0]
        torch.testing.assert_close(found, expected.to(dtype), atol=1e-5, rtol=0)
    for kv, dtype in ((chunk(6, 1, 16, 16, kept=torch.float16), torch.bfloat16), (chunk(6, 1, 16, 16), torch.float16)):
        call, row = call_of(1, 1, 2, 16, 16, dtype), TokenSequence.over([PlacedChunk(kv=kv, start=0)], position=6)
        expected = truth(call, 0, [(kv.keys[1], kv.values[1]), (call.key[0], call.value[0])])
        torch.testing.assert_close(stepped([row], call)[0, :, 0], expected.to(dtype), atol=2e-2, rtol=0)
    for width, dtype in ((12, torch.float32), (16, wide)):
        assert stepped([TokenSequence((), 6)], call_of(1, 1, 2, width, width, dtype)).isfinite().all()
    gaps = [tensor[..., ::2] for tensor in chunk(6, 1, 32, 32).keys]
    row = TokenSequence.over([PlacedChunk(kv=ChunkKV(keys=gaps, values=gaps), start=0)], position=6)
    assert not in_place.reads_in_place(row.groups[0])
    assert in_place.InPlace.of(Step([row], [1], STILL, CPU).spans, torch.float32, single=True, many=True).spans == ()
    call = call_of(1, 1, 2, 16, 16)
    call.query.requires_grad_()
    stepped([TokenSequence.over([PlacedChunk(kv=chunk(6, 1, 16, 16), start=0)], position=6)], call).sum().backward()
    assert call.query.grad is not None
    assert calls == []


def test_without_the_kernel_torch_computes_it(without_kernel, calls):
    row = TokenSequence.over([PlacedChunk(kv=chunk(6, 1, 16, 16), start=0)], position=6)
    assert stepped([row], call_of(1, 1, 2, 16, 16)).isfinite().all()
    assert calls == []


FREQUENCIES = 0.3 ** torch.arange(8.0)
ROTARY = Rotary(
    apply=lambda states, cos, sin: torch.cat(
        [
            states[..., :8] * cos[:, None] - states[..., 8:16] * sin[:, None],
            states[..., 8:16] * cos[:, None] + states[..., :8] * sin[:, None],
            states[..., 16:],
        ],
        -1,
    ),
    angles=lambda positions, kind: (
        (positions[..., None] * FREQUENCIES).cos(),
        (positions[..., None] * FREQUENCIES).sin(),
    ),
    kinds=("some", "some"),
)
"""It rotates the first 16 elements of a head."""


@pytest.fixture
def launches(monkeypatch):
    """Records the tokens of each part in each call of the kernel for many tokens."""
    pytest.importorskip("ragkv.attention.flash_kernel", exc_type=ImportError)
    found, honest = [], in_place._compute_many

    def watched(call, table, *more):
        found.append(table.counts.tolist())
        return honest(call, table, *more)

    monkeypatch.setattr(in_place, "_compute_many", watched)
    with torch.no_grad():
        yield found


def context(group, row, before, call, at, n):
    """Positions, keys and values that a sequence's tokens may read, in float64: of a group, or its own."""
    placed, keys, values = [], [], []
    for segment in group.segments:
        placed.append(torch.arange(segment.start, segment.end))
        far = torch.full((1, segment.kv.tokens), segment.offset)
        keys.append(ROTARY.apply(segment.kv.keys[1][None].double(), *ROTARY.angles(far, "some"))[0])
        values.append(segment.kv.values[1].double())
    if group.plain:
        new = row.position + torch.arange(n)
        placed += [row.position - before[0].shape[1] + torch.arange(before[0].shape[1]), new]
        keys += [before[0].double(), call.key[0, :, at : at + n].double()]
        values += [before[1].double(), call.value[0, :, at : at + n].double()]
    return torch.cat(placed), torch.cat(keys, 1), torch.cat(values, 1)


def attended(row, before, call, at, n):
    """`(n, q_heads, width)`: attention of each new token, in float64; its groups enter with their weights."""
    plain = ChunkGroup(segments=tuple(s for group in row.groups if group.plain for s in group.segments))
    weighed = [group for group in row.groups if not group.plain]
    outs = []
    for i in range(n):
        query, parts = call.query[0, :, at + i].double(), []
        for group in (plain, *weighed):
            placed, keys, values = context(group, row, before, call, at, n)
            place = row.position + i
            seen = (placed <= place) & (placed > place - (call.window or 10**6))
            share = len(query) // len(keys)
            keys, values = (t[:, seen].repeat_interleave(share, 0) for t in (keys, values))
            scores = (query[:, None] @ keys.mT)[:, 0] * call.scale / group.temperature
            lse = scores.logsumexp(-1)
            if not group.plain:
                lse = lse * group.weight[0] + group.weight[1]
            parts.append((lse, (scores.softmax(-1)[:, None] @ values)[:, 0] if seen.any() else torch.zeros_like(query)))
        shares = torch.stack([lse for lse, _ in parts]).softmax(0)
        outs.append(sum(share[:, None] * out for share, (_, out) in zip(shares, parts, strict=True)))
    return torch.stack(outs)


@pytest.mark.parametrize("window", [None, 4, 100, 150])
@pytest.mark.parametrize(
    ("dtype", "kept", "heads", "group", "width"),
    [
        (torch.float32, None, 1, 2, 16),
        (torch.float32, torch.float16, 2, 1, 32),  # rows of two cache lines
        (torch.float32, torch.int8, 2, 1, 32),
        pytest.param(torch.bfloat16, None, 2, 4, 32, marks=needs_dot),
        pytest.param(torch.bfloat16, torch.int8, 2, 4, 32, marks=needs_dot),
    ],
    ids=str,
)
def test_many_tokens_are_exact(dtype, kept, heads, group, width, window, calls, launches):
    """A sequence with a weighted group, with earlier tokens of its own, without any, with moved chunks, and a single
    token.
    """
    torch.manual_seed(7)
    kvs = [chunk(n, heads, width, width, dtype, kept=kept) for n in (1, 63, 70, 128, 9)]
    before = [[torch.randn(heads, n, width).to(dtype) for _ in range(2)] for n in (70, 0, 5, 0, 20)]
    chunks = [PlacedChunk(kv=kv, start=start) for kv, start in zip(kvs, (0, 5, 68, 138, 70), strict=True)]
    weighed = ChunkGroup(segments=(chunks[4], chunks[2]), temperature=0.5, scale=0.8, scale_mode="log")
    rows = [
        TokenSequence((ChunkGroup(segments=(chunks[0], chunks[1])), weighed), 210),
        TokenSequence((), 0),
        TokenSequence.over(chunks[:4], position=275),
        TokenSequence.over(chunks[:2], position=70),
        TokenSequence.over(chunks[:2], position=90),
    ]
    arena = KVArena()
    for row in rows[:3]:
        row.cache = arena.place(270, 9, 4)
    for row, pair in zip(rows, before, strict=True):
        row.cache.append(1, *(each[None] for each in pair))
        row.cache.commit(pair[0].shape[1])
    counts = [66, 200, 7, 1, 3]
    call = call_of(sum(counts), heads, group, width, width, dtype, window=window)
    found = Step(rows, counts, ROTARY, CPU).attend(call)
    assert found.dtype == dtype
    assert launches == [[66, 200, 7, 3, 66] if window != 4 else [66, 200, 7, 3]]
    assert len(calls) == 1
    at = 0
    for row, own, n in zip(rows, before, counts, strict=True):
        expected = attended(row, own, call, at, n)
        close = 3e-2 if dtype == torch.bfloat16 else 2e-5
        torch.testing.assert_close(found[0, :, at : at + n].transpose(0, 1).double(), expected, atol=close, rtol=close)
        at += n


@pytest.mark.parametrize(
    ("dtype", "width", "close"), [(torch.float32, 16, 2e-5), pytest.param(torch.bfloat16, 32, 3e-2, marks=needs_dot)]
)
def test_many_tokens_have_what_single_ones_leave_to_others(dtype, width, close, calls, launches):
    """A long chunk is read once for the three sequences that decode over it; a fourth sequence reads it in place."""
    torch.manual_seed(9)
    segments = [PlacedChunk(kv=chunk(n, 2, width, width, dtype), start=at) for n, at in ((600, 2), (9, 602))]
    rows = [TokenSequence.over(segments, position=611) for _ in range(4)]
    call = call_of(23, 2, 2, width, width, dtype)
    found = Step(rows, [1, 20, 1, 1], ROTARY, CPU).attend(call)
    assert (launches, calls) == ([[20]], [3])
    nothing = torch.empty(2, 2, 0, width)
    for row, at, n in zip(rows, (0, 1, 21, 22), (1, 20, 1, 1), strict=True):
        expected = attended(row, nothing, call, at, n)
        torch.testing.assert_close(found[0, :, at : at + n].transpose(0, 1).double(), expected, atol=close, rtol=close)


def test_threads_share_many_tokens(monkeypatch, launches):
    torch.manual_seed(8)
    kvs, call = [chunk(n, 2, 16, 16) for n in (90, 30)], call_of(70, 2, 3, 16, 16)

    def attend():
        segments = [PlacedChunk(kv=kvs[0], start=0), PlacedChunk(kv=kvs[1], start=90)]
        return Step([TokenSequence.over(segments, position=120)], [70], ROTARY, CPU).attend(call)

    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    alone = attend()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    monkeypatch.setattr(partial, "_PRODUCTS", 1)
    assert all(torch.equal(attend(), alone) for _ in range(5))
    assert launches == [[70]] * 6


@pytest.mark.parametrize("which", ["keys", "values"])
def test_a_number_that_is_none_is_seen_by_those_that_read_it(which, launches):
    kvs, call = [chunk(100, 1, 16, 16) for _ in range(2)], call_of(20, 1, 2, 16, 16)
    getattr(kvs[1], which)[1][0, 99, 3] = torch.nan
    rows = [TokenSequence.over([PlacedChunk(kv=kv, start=0)], position=100) for kv in kvs]
    found = Step(rows, [10, 10], ROTARY, CPU).attend(call)
    assert found[:, :, :10].isfinite().all()
    assert found[:, :, 10:].isnan().any(-1).all()
    assert launches == [[10, 10]]
