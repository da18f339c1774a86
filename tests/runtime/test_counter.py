"""What a batch costs: each chunk read once per layer and step, memory that does not grow with the questions."""

from __future__ import annotations

import gc
import weakref
from collections import Counter

import pytest
import torch
from crowd import Asked, engine, generation, request
from crowd import Recorder as Quiet
from torch.utils._python_dispatch import TorchDispatchMode

import ragkv.attention.step
from ragkv.engines import Row, Segment
from ragkv.runtime import Generation, Runtime
from ragkv.runtime.pool import Pool

QUESTIONS = 6


class Reads:
    """Calls of `partial_attention` over stored KV: (layer's keys, T) of each, step by step."""

    def __init__(self, monkeypatch, model, stored):
        self.steps = []
        where = {key.data_ptr(): (kv, layer) for kv in stored for layer, key in enumerate(kv.keys)}
        partial, step = ragkv.attention.step.partial_attention, model.step

        def counted(query, key, value, **more):
            found = where.get(key.data_ptr())
            if found is not None:
                self.steps[-1][found[0], found[1], more.get("temperature", 1.0)] += 1
            return partial(query, key, value, **more)

        def stepped(*args, **more):
            self.steps.append(Counter())
            return step(*args, **more)

        monkeypatch.setattr(ragkv.attention.step, "partial_attention", counted)
        monkeypatch.setattr(model, "step", stepped)


def crowd(name, tuning=(), chunks=None, **more):
    """Questions over overlapping chunks, in orders of their own: at other offsets for each."""
    orders = chunks or [(7, 6, 5), (6, 7), (5, 6, 7), (7,), (6, 5), (5, 7, 6)]
    return [
        Asked(engine=(name, tuning), prefix=True, chunks=order, suffix=(80 + i, 81), steps=4, heat=0.0, **more)
        for i, order in enumerate(orders)
    ]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize(
    ("name", "tuning"),
    [
        ("block", ()),
        ("block", (("sink", "bos"),)),
        ("ape", ()),
        ("ape", (("temperature", 0.9), ("scale", 0.9))),
        ("pced", ()),
        ("mapreduce", (("instruction", "sum"), ("summary_tokens", 3))),
    ],
)
def test_each_chunk_is_read_once_per_layer_and_step(family, name, tuning, make_model, monkeypatch):
    model, asked = make_model(family), crowd(name, tuning)
    requests = [request(model, one) for one in asked]
    stored = {id(kv): kv for r in requests for kv in (r.prefix, *(c.kv for c in r.chunks))}.values()
    reads = Reads(monkeypatch, model, stored)
    runtime = Runtime(model)
    jobs = [runtime.submit(engine(one), r, generation(one, Quiet())) for one, r in zip(asked, requests, strict=True)]
    while runtime.advance():
        continue
    assert all(job.ended and job.error is None for job in jobs)
    assert reads.steps[0]
    for step in reads.steps:
        assert set(step.values()) <= {1}
    chunks = {id(kv) for r in requests for c in r.chunks for kv in [c.kv]}
    assert {id(kv) for kv, _, _ in reads.steps[0]} >= chunks


def test_two_temperatures_read_a_chunk_twice_and_no_more(make_model, monkeypatch):
    model = make_model("llama")
    asked = crowd("ape", (("temperature", 0.9),)) + crowd("ape", (("temperature", 0.7),))
    requests = [request(model, one) for one in asked]
    reads = Reads(monkeypatch, model, {id(c.kv): c.kv for r in requests for c in r.chunks}.values())
    runtime = Runtime(model)
    for one, r in zip(asked, requests, strict=True):
        runtime.submit(engine(one), r, generation(one, Quiet()))
    while runtime.advance():
        continue
    assert {temperature for step in reads.steps for _, _, temperature in step} == {0.9, 0.7}
    assert all(set(step.values()) <= {1} for step in reads.steps)


class Allocated(TorchDispatchMode):
    """Bytes of storage made, those of the largest tensor, and those that live at the same time at most."""

    def __init__(self):
        super().__init__()
        self.live = self.most = 0
        self._known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key = storage.data_ptr()
                if key and key not in self._known:
                    self._known.add(key)
                    self.live += storage.nbytes()
                    self.most = max(self.most, self.live)
                    weakref.finalize(storage, self._gone, key, storage.nbytes())
        return result

    def _gone(self, key, size):
        self._known.discard(key)
        self.live -= size


def _peak(model, questions, context):
    """The most bytes that live at a time while so many questions over one context of random KV are answered."""
    generator = torch.Generator().manual_seed(1)
    [kv] = model.encode([torch.randint(3, 300, (context,), generator=generator).tolist()])
    runtime = Runtime(model)
    from ragkv.engines import Engine, answer_from

    class Over(Engine):
        name, encoding, Config = "over", None, dict

        def program(self, request, model):
            row = Row.over((Segment(kv=kv, start=3),), position=3 + context)
            return answer_from(row, request.suffix_ids)

    asked = crowd("full", chunks=[()])[0]
    with Allocated() as allocated:
        for _ in range(questions):
            runtime.submit(Over(), request(model, asked), Generation(max_new_tokens=3))
        while runtime.advance():
            continue
    return allocated.most


def test_memory_does_not_grow_with_questions_times_context(make_model):
    model = make_model("llama-long")
    model.eos_ids, eos = frozenset(), model.eos_ids
    try:
        few, many = ([_peak(model, questions, context) for context in (400, 3200)] for questions in (2, 24))
    finally:
        model.eos_ids = eos
    token = 2 * 2 * 16 * 4 * 2  # keys and values of a token, all layers
    grown = (many[1] - many[0]) - (few[1] - few[0])
    assert grown < 22 * 2800 * token / 20  # a copy for each question would be twenty times that


def test_rows_that_come_one_after_another_do_not_copy_the_context_each(make_model):
    """Every question has the chunks in an order of its own: however they arrive, few runs are joined."""
    model = make_model("llama")
    runtime = Runtime(model)
    joined = []
    for one in crowd("block", chunks=[(7, 6, 5), (6, 7, 5), (5, 6, 7), (7, 5, 6), (6, 5, 7), (5, 7, 6)]):
        long = Asked(
            **{field: getattr(one, field) for field in one.__slots__}
            if hasattr(one, "__slots__")
            else vars(one) | {"steps": 40}
        )
        runtime.submit(engine(long), request(model, long), Generation(max_new_tokens=40))
        for _ in range(4):
            runtime.advance()
        joined.append(len(runtime.pool._joined))
    assert max(joined) <= 2
    while runtime.advance():
        continue
    gc.collect()
    assert not runtime.pool._joined


def _kv(model, ids):
    return model.encode([ids])[0]


def test_a_pool_counts_each_kv_once():
    pool = Pool(10)
    first, second = pool.lease({"a": 4, "b": 3}), pool.lease({"b": 3, "c": 1})
    assert pool.leased == 8
    assert pool.fits({"a": 4, "d": 2})
    assert not pool.fits({"d": 3})
    pool.release(first)
    pool.release(first)
    assert pool.leased == 4
    pool.release(second)
    assert (pool.leased, pool.leases) == (0, 0)
    assert pool.fits({"e": 99})  # more than there is, but alone
    large = pool.lease({"e": 99})
    assert not pool.fits({"a": 1})
    pool.release(large)
    assert pool.leased == 0


def test_a_joined_run_is_shared_and_goes_with_its_last_row(make_model):
    model, pool = make_model("llama"), Pool(1 << 30)
    kvs = [_kv(model, [5 + i, 6, 7]) for i in range(3)]

    def row(order, start=0):
        places = [start + 3 * i for i in range(3)]
        return Row.over([Segment(kv=kvs[k], start=at) for k, at in zip(order, places, strict=True)], position=start + 9)

    same = [row((0, 1, 2)), row((0, 1, 2), start=5)]  # the same run, wherever it stands
    pool.settle(same, same, model.rotary, windowed=False)
    [one], [other] = same[0].segments, same[1].segments
    assert one.kv is other.kv
    assert (one.start, other.start) == (0, 5)
    gone = weakref.ref(one.kv)
    several = [row(order) for order in ((0, 2, 1), (1, 0, 2), (2, 1, 0))]
    pool.settle(several, [*same, *several], model.rotary, windowed=False)
    assert [len(each.segments) for each in several] == [3, 3, 3]  # many read them in other orders: they stay
    del one, other, same
    assert gone() is None
    assert not pool._joined


def test_sequences_in_common_stay_within_the_budget(make_model):
    model = make_model("llama")
    kvs = [_kv(model, [5 + i, 6, 7]) for i in range(4)]
    pool = Pool(2 * kvs[0].nbytes)
    for i, kv in enumerate(kvs):
        pool.keep(("sequence", i), kv, ())
        assert pool.shared(("sequence", 0)) is (kvs[0] if i < 4 else None)
    assert [pool.shared(("sequence", i)) is not None for i in range(4)] == [True, False, False, True]
