"""Contexts laid out for decode steps: which rows share a joined context, and that a step reads it in place."""

from __future__ import annotations

import gc

import pytest
import torch
from asking import request as asked
from storekit import identity
from torch.utils._python_dispatch import TorchDispatchMode

import ragkv.attention.partial
from ragkv.attention import in_place
from ragkv.attention.kv import PlacedChunk
from ragkv.attention.sequence import ChunkGroup, TokenSequence
from ragkv.engines import make_engine
from ragkv.runtime import Stream, runtime_of
from ragkv.runtime.batch_executor import ContextLayout
from ragkv.runtime.graphs import RECORDED_PASSES
from ragkv.runtime.kv_pool import KVPool
from ragkv.store import Q8, Half
from ragkv.store.record import round_trip

CHUNKS = [[50 + i + j for j in range(24)] for i in range(6)]
SCORES = [0.5, 0.6, 0.7, 0.8, 0.9, 0.95]


@pytest.fixture
def model(make_model):
    return make_model("llama")


@pytest.fixture
def kvs(model):
    return model.encode([ids[:n] for ids, n in zip(CHUNKS, (4, 9, 5, 7), strict=False)])


def side_by_side(kvs, *, start=3):
    results = []
    for kv in kvs:
        results.append(PlacedChunk(kv=kv, start=start))
        start = results[-1].end
    return tuple(results)


def settled(pool, model, rows, active=None, *, windowed=False):
    pool.lay_out(rows, rows if active is None else active, model.rotary, windowed=windowed)
    return [[segment.kv for segment in row.segments] for row in rows]


@pytest.mark.skipif(in_place._kernels() is None, reason="the processor has no AVX2")
def test_what_few_rows_read_is_left_where_it_lies(model, kvs):
    """A long chunk is joined once for three rows that read it; a short one, or one for two rows, is read separately."""
    long = model.encode([[3 + i % 90 for i in range(600)]])
    rows = [TokenSequence.over(side_by_side((*kvs, *long), start=start), position=900) for start in (3, 4, 5)]
    before = [row.groups for row in rows]
    settled(ContextLayout(), model, rows[:2])
    assert [row.groups for row in rows] == before
    settled(ContextLayout(), model, rows)
    assert not any(row.groups is groups for row, groups in zip(rows, before, strict=True))


@pytest.mark.usefixtures("without_kernel")
def test_a_rows_chunks_become_one_where_it_alone_reads_them(model, kvs):
    row = TokenSequence((ChunkGroup(segments=side_by_side(kvs), temperature=0.5, scale=0.7, scale_mode="log"),), 50)
    [[kv]] = settled(ContextLayout(), model, [row])
    assert kv.tokens == sum(one.tokens for one in kvs)
    assert (row.segments[0].start, row.position) == (3, 50)
    [found] = row.groups
    assert (found.temperature, found.scale, found.scale_mode) == (0.5, 0.7, "log")  # its weights are kept


@pytest.mark.usefixtures("without_kernel")
def test_a_group_that_gains_nothing_is_the_one_that_was_given(model, kvs):
    alone, apart = (
        ChunkGroup(segments=s)
        for s in (side_by_side(kvs[:1]), (*side_by_side(kvs[:1]), PlacedChunk(kv=kvs[1], start=9)))
    )
    row = TokenSequence((alone, apart), 50)
    settled(ContextLayout(), model, [row], windowed=True)
    assert row.groups[0] is alone
    assert row.groups[1] is apart
    settled(ContextLayout(), model, [row])
    assert [kv.tokens for kv in (segment.kv for segment in row.groups[1].segments)] == [13]


@pytest.mark.usefixtures("without_kernel")
def test_rows_that_see_the_same_chunks_at_the_same_distances_share_what_is_joined(model, kvs):
    """Including a row that comes later."""
    pool, starts = ContextLayout(), (3, 3, 20, 3)
    *rows, later = (TokenSequence.over(side_by_side(kvs, start=start), position=90) for start in starts)
    found = settled(pool, model, rows) + settled(pool, model, [later], [*rows, later])
    assert len({id(kv) for kvs in found for kv in kvs}) == 1
    assert tuple(row.segments[0].start for row in (*rows, later)) == starts


@pytest.mark.usefixtures("without_kernel")
def test_rows_that_see_the_same_chunks_at_other_distances_share_nothing(model, kvs):
    near, far = ((PlacedChunk(kv=kvs[0], start=3), PlacedChunk(kv=kvs[1], start=start)) for start in (7, 40))
    [[one], [other]] = settled(ContextLayout(), model, [TokenSequence.over(seen, position=90) for seen in (near, far)])
    assert one is not other


@pytest.mark.usefixtures("without_kernel")
def test_chunks_that_many_rows_see_among_others_stay_where_they_lie(model, kvs):
    """Each chunk is then read once for all rows; joined, every row would have its own copy."""
    orders = [kvs, kvs[::-1], [kvs[1], kvs[0], *kvs[2:]], [*kvs[2:], *kvs[:2]]]
    rows = [TokenSequence.over(side_by_side(order), position=90) for order in orders]
    assert settled(ContextLayout(), model, rows) == [list(order) for order in orders]


@pytest.mark.usefixtures("without_kernel")
def test_what_is_joined_lives_as_long_as_the_rows_that_read_it(model, kvs):
    pool, row = ContextLayout(), TokenSequence.over(side_by_side(kvs), position=90)
    settled(pool, model, [row])
    assert len(pool._joined) == len(pool._originals) == 1
    row.groups = ()
    gc.collect()
    assert len(pool._joined) == len(pool._originals) == 0


@pytest.mark.parametrize("family", ["llama-yarn", "gemma3", "mistral-sliding"])
@pytest.mark.parametrize("gaps", [(0, 0, 0), (0, 0, 3), (0, 2, 0), (1, 0, -2)], ids=str)
@pytest.mark.usefixtures("without_kernel")
def test_a_group_is_laid_out_as_its_chunks_lie(family, gaps, make_model):
    """Adjacent chunks, chunks with a gap, and overlapping chunks; a window depends on each token's position."""
    model = make_model(family)
    segments, place = [], 2
    for kv, gap in zip(model.encode([CHUNKS[i][:n] for i, n in enumerate((4, 3, 5))]), gaps, strict=True):
        segments.append(PlacedChunk(kv=kv, start=place + gap))
        place = segments[-1].end
    apart, together = TokenSequence.over(segments, position=place), TokenSequence.over(segments, position=place)
    settled(ContextLayout(), model, [together], windowed=bool(model.windows))
    expected = model.step([apart], [[100, 101, 102]], every=True)
    found = model.step([together], [[100, 101, 102]], every=True)
    torch.testing.assert_close(found, expected, atol=3e-5 * float(expected.abs().max()), rtol=0)


class Largest(TorchDispatchMode):
    """The largest allocation of any operation: outputs that share no storage with an input."""

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


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("name", ["block", "pced"])
@pytest.mark.parametrize("family", ["llama3-scaling", "mistral-sliding"])
def test_a_step_reads_the_context_in_place(name, family, kernel, make_model, monkeypatch, request):
    """The same pointers at every step, and no operation of a step allocates as much as a layer's context.

    With 144 context tokens, a layer's keys (18 KB) are larger than anything else that a step allocates.
    """
    if not kernel:
        request.getfixturevalue("without_kernel")
    kernel = in_place._kernels() is not None
    model = make_model(family)
    engine = make_engine(name, {})
    stream = Stream(runtime_of(model), engine, asked(model, engine, chunks=CHUNKS, scores=SCORES))
    for token in range(RECORDED_PASSES):  # the last of them is recorded
        stream.advance(token)
    honest, pointers = ragkv.attention.partial.partial_attention, []

    def watched(query, key, value, **rest):
        pointers[-1].append((key.untyped_storage().data_ptr(), value.untyped_storage().data_ptr()))
        return honest(query, key, value, **rest)

    monkeypatch.setattr(ragkv.attention.partial, "partial_attention", watched)
    largest = Largest()
    with largest:
        for token in (6, 7, 8):
            pointers.append([])
            stream.advance(token)
    assert pointers[0] == pointers[1] == pointers[2]
    assert bool(pointers[0]) != kernel
    keys_of_a_layer = 144 * 2 * 16 * 4
    assert 0 < largest.bytes < keys_of_a_layer


def test_a_pool_counts_each_kv_once():
    pool = KVPool(10)
    first, second = pool.lease({"a": 4, "b": 3}), pool.lease({"b": 3, "c": 1})
    assert pool.leased == 8
    assert pool.fits({"a": 4, "d": 2})
    assert not pool.fits({"d": 3})
    pool.release(first)
    pool.release(first)
    assert pool.leased == 4
    pool.release(second)
    assert (pool.leased, pool.leases) == (0, 0)
    assert pool.fits({"e": 99})  # more than the budget, but alone
    large = pool.lease({"e": 99})
    assert not pool.fits({"a": 1})
    pool.release(large)
    assert pool.leased == 0


def test_sequences_in_common_stay_within_the_budget(make_model):
    model = make_model("llama")
    kvs = model.encode([[5 + i, 6, 7] for i in range(4)])
    pool = KVPool(2 * kvs[0].nbytes)
    for i, kv in enumerate(kvs):
        pool.keep(("sequence", i), kv, ())
        assert pool.shared(("sequence", 0)) is (kvs[0] if i < 4 else None)
    assert [pool.shared(("sequence", i)) is not None for i in range(4)] == [True, False, False, True]


@pytest.mark.usefixtures("without_kernel")
@pytest.mark.parametrize("codec", [Half(), Q8()], ids=repr)
def test_what_every_step_reads_is_unpacked_once_for_all(codec, model, kvs):
    """When joined, and when unpacked separately; a second user of the pool gets the same tensors."""
    half = [round_trip(kv, identity(*range(kv.tokens)), codec)[1] for kv in kvs]
    assert all(kv.packed for kv in half)
    pool = ContextLayout()
    apart = (PlacedChunk(kv=half[0], start=0), PlacedChunk(kv=half[1], start=half[0].tokens + 9))
    rows = [TokenSequence.over(apart, position=60) for _ in range(2)]
    settled(pool, model, rows, windowed=True)
    first, second = ([segment.kv for segment in row.segments] for row in rows)
    assert [id(kv) for kv in first] == [id(kv) for kv in second]
    for kv, of in zip(first, half, strict=False):
        assert all(torch.equal(a, b) for a, b in zip(kv.keys, of.keys, strict=True))
    assert not any(kv.packed for kv in first)
    joined = TokenSequence.over(side_by_side(half), position=60)
    exact = TokenSequence.over(side_by_side([kv.wide() for kv in half]), position=60)
    settled(ContextLayout(), model, [joined, exact])
    [one], [other] = ([segment.kv for segment in row.segments] for row in (joined, exact))
    for a, b in zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True):
        assert torch.equal(a, b)
