"""The device's kernel for packed sequences and chunk KV in pages, against the CPU's path and the plain matmul."""

from __future__ import annotations

import gc
import itertools
from dataclasses import replace

import crowd
import packedkernel
import pytest
import recordedgraph
import torch
from crowd import Asked, alone

from ragkv.attention import pages, sequence, varlen
from ragkv.attention.kv import ChunkKV
from ragkv.attention.pages import PAGE, PagePool
from ragkv.attention.partial import partial_attention
from ragkv.engines import make_engine
from ragkv.runtime import Generation, Runtime, graphs, step
from ragkv.store import Q8, Half, KVIdentity, record
from ragkv.types import Encoding

CPU = torch.device("cpu")
ENGINES = [
    ("block", ()),
    ("block", (("sink", "bos"),)),
    ("ape", (("temperature", 0.6), ("scale", 0.7), ("scale_mode", "log"))),
    ("pced", ()),
    ("full", ()),
]


@pytest.fixture
def kernel(monkeypatch):
    """Lets the kernel take CPU tensors in fp32; records its calls."""
    packedkernel.register()
    monkeypatch.setattr(varlen, "DEVICES", {"cpu"})
    monkeypatch.setattr(varlen, "DTYPES", {torch.float32})
    recordedgraph.use(monkeypatch)
    packedkernel.calls.clear()
    return packedkernel.calls


def states(batch, heads, kv_heads, n, m, width=16):
    generator = torch.Generator().manual_seed(n * m + heads)
    sizes = (batch, heads, n, width), (batch, kv_heads, m, width), (batch, kv_heads, m, width)
    return tuple(torch.randn(size, generator=generator) for size in sizes)


def check_kernel(states, device, dtype, close):
    """Compare the kernel's results on a device, with and without windows, with masks in the plain matmul."""
    shapes = [(1, 8, 5, 5, None), (2, 4, 7, 7, 3), (1, 8, 3, 11, None), (1, 2, 4, 19, 6), (1, 4, 3, 1301, None)]
    for batch, heads, n, m, window in [*shapes, (3, 8, 1, 40, None), (1, 8, 1, 700, 9)]:
        query, key, value = (t.to(device, dtype) for t in states(batch, heads, 2, n, m))
        behind = torch.arange(m - n, m, device=device)[:, None] - torch.arange(m, device=device)
        mask = (behind >= 0) & (behind < (window or m))
        slow = partial_attention(query, key, value, scale=0.3, mask=mask, reference=True)
        out, lse = varlen.causal(query, key, value, scale=0.3, window=window)
        torch.testing.assert_close(out, slow.out, **close)
        torch.testing.assert_close(lse, slow.lse, **close)
        for mask in (None, "causal") if n == m else (None,):
            slow = partial_attention(query, key, value, scale=0.3, temperature=0.8, mask=mask, reference=True)
            fast = partial_attention(query, key, value, scale=0.3, temperature=0.8, mask=mask)
            torch.testing.assert_close(fast.out, slow.out, **close)
            torch.testing.assert_close(fast.lse, slow.lse, **close)


def test_the_kernel_equals_the_matmul(kernel, monkeypatch):
    monkeypatch.setattr("ragkv.attention.partial._kernel", lambda *_: varlen.kernel)
    check_kernel(states, CPU, torch.float32, {"atol": 1e-5, "rtol": 1e-5})
    assert kernel


@pytest.mark.gpu
def test_the_real_kernel_equals_the_matmul():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    check_kernel(states, torch.device("cuda"), torch.bfloat16, {"atol": 2e-2, "rtol": 2e-2})


def test_what_it_cannot_compute_is_left_to_others(kernel):
    query, key, value = states(1, 4, 2, 3, 3)
    assert varlen.takes(query, key, value)
    assert not varlen.takes(query, key, value, softcap=30.0)
    assert not varlen.takes(query.double(), key.double(), value.double())
    assert not varlen.takes(query, key, value[..., :8])
    assert not varlen.takes(*states(1, 4, 2, 3, 3, width=20))
    assert not varlen.takes(*states(1, 4, 2, 3, 3, width=264))


def test_the_keys_of_one_sequence_are_not_copied(kernel, monkeypatch):
    seen = []
    monkeypatch.setattr(varlen, "packed", lambda q, k, v, *_, **__: seen.extend((k, v)) or (q, q[..., 0].T))
    query, key, value = states(1, 8, 2, 3, 40)
    varlen.causal(query, key[:, :, :30], value[:, :, :30], scale=0.3)
    assert [t.data_ptr() for t in seen] == [key.data_ptr(), value.data_ptr()]


def chunk(tokens, layers=2):
    made = [torch.randn(2, tokens, 16) for _ in range(2 * layers)]
    return ChunkKV(keys=tuple(made[:layers]), values=tuple(made[layers:]), encoded_at=3)


def equal(one, other):
    return all(map(torch.equal, (*one.keys, *one.values), (*other.keys, *other.values)))


def test_chunks_lie_in_pages_until_the_last_view_is_gone(kernel):
    token = chunk(1).nbytes
    pool = PagePool(CPU, pages.BLOCK * PAGE * token)
    given = [chunk(n) for n in (1, PAGE, PAGE + 1, 3 * PAGE)]
    held = [pool.hold(kv) for kv in given]
    assert all(map(equal, held, given))
    assert [(kv.pages.first, kv.pages.count) for kv in held] == [(0, 1), (1, 1), (2, 2), (4, 3)]
    assert pool.hold(held[0]) is held[0]
    head = held[2].head(5)
    del held[1:3]
    gc.collect()
    assert pool.hold(chunk(2 * PAGE)).pages.first != 2  # a view of these pages is alive
    head_is = head.keys[0].clone()
    more = [pool.hold(chunk(PAGE)) for _ in range(4)]
    assert torch.equal(head.keys[0], head_is)
    assert more[0].pages.first == 1  # the freed page
    del head
    gc.collect()
    assert pool.hold(chunk(2 * PAGE)).pages.first == 2
    large = chunk((pages.BLOCK + 1) * PAGE)
    assert pool.hold(large) is large  # larger than the budget


@pytest.mark.parametrize("codec", [Half(), Q8()], ids=str)
def test_packed_chunks_are_unpacked_into_pages_within_the_budget(kernel, codec):
    """Chunks with equal layers in one operation, as a record is read; others layer by layer."""
    of = KVIdentity(model="m", encoding=Encoding.STANDALONE, chunk_ids=tuple(range(PAGE)))
    _, packed = record.round_trip(chunk(PAGE), of, codec)
    apart = replace(packed, stacked=None)
    assert packed.packed
    assert packed.stacked is not None
    wide = packed.wide()
    pool = PagePool(CPU, 2 * wide.nbytes)
    held = [pool.hold(packed), pool.hold(apart)]
    assert all(equal(kv, wide) for kv in held)
    assert [kv.pages.first for kv in held] == [0, 1]
    assert pool.hold(packed) is packed  # no pages left
    assert PagePool(CPU, wide.nbytes - 1).hold(packed) is packed


def test_without_memory_for_pages_chunks_lie_by_themselves(kernel, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("no memory")

    pool, kv = PagePool(CPU, 1 << 30), chunk(3)
    with monkeypatch.context() as patch:
        patch.setattr(pages, "PageBlock", full)
        assert pool.hold(kv) is kv
    assert pool.hold(kv) is kv  # no second attempt


def test_kv_that_the_kernel_does_not_read_is_left_where_it_is(kernel):
    pool = PagePool(CPU, 1 << 30)
    odd = ChunkKV(keys=(torch.randn(1, 3, 12),), values=(torch.randn(1, 3, 12),))
    assert pool.hold(odd) is odd
    empty = chunk(0)
    assert pool.hold(empty) is empty


def questions(name, tuning):
    """Questions over chunks in different orders, so that a chunk is read at different offsets."""
    orders = [(7, 6, 5), (6, 7), (5,), (), (4,)]
    return [Asked(engine=(name, tuning), chunks=order, suffix=(80 + i, 81), steps=5) for i, order in enumerate(orders)]


def hold_in_pages(pool, monkeypatch):
    """From now on, requests read the bank's chunks from pages."""
    bank = crowd._bank

    def paged(*which):
        prefix, kvs = bank(*which)
        return pool.hold(prefix), [pool.hold(kv) for kv in kvs]

    monkeypatch.setattr(crowd, "_bank", paged)


@pytest.mark.parametrize(
    ("family", "name", "tuning"),
    [
        pytest.param(family, *each, marks=[pytest.mark.nightly] * (each not in often))
        for family, often in (("llama", ENGINES), ("gemma3", ENGINES[2:5]), ("gemma2", ENGINES[3:4]))
        for each in ENGINES
    ],
    ids=str,
)
def test_questions_over_pages_have_the_answers_of_the_processor(family, name, tuning, make_model, kernel, monkeypatch):
    """Together and alone; gemma3 has windows, and gemma2 a softcap, which the kernel does not support."""
    model = make_model(family)
    asked = questions(name, tuning)
    kernel.clear()  # the self-check on load called it
    with monkeypatch.context() as patch:
        patch.setattr(varlen, "DEVICES", set())
        expected = [alone(model, one) for one in asked]
    assert not kernel
    hold_in_pages(PagePool(CPU, 1 << 30), monkeypatch)
    monkeypatch.setattr(crowd, "_ALONE", {})
    found = [alone(model, one) for one in asked]
    together = [(tokens, scores) for _, tokens, scores in crowd.together(model, asked)[1]]
    for (tokens, scores), (want, wanted) in zip(found + together, expected * 2, strict=True):
        assert [token.token_id for token in tokens] == [token.token_id for token in want]
        for one, other in zip(scores, wanted, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    assert bool(kernel) == (family != "gemma2")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma2"])
@pytest.mark.parametrize(("name", "tuning"), ENGINES, ids=lambda each: str(each))
def test_questions_on_a_gpu_have_the_answers_of_the_processor(family, name, tuning, dtype, make_model, monkeypatch):
    """In bfloat16, these weights amplify rounding, and tokens may differ: so the first token's logits are compared."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model, asked = make_model(family), questions(name, tuning)
    expected = [alone(model, one)[1] for one in asked]
    there = make_model(family, dtype, "cuda")
    hold_in_pages(PagePool(there.device, 1 << 30), monkeypatch)
    found = [alone(there, one)[1] for one in asked] + [scores for _, _, scores in crowd.together(there, asked)[1]]
    for scores, wanted in zip(found, expected * 2, strict=True):
        for one, other in list(zip(scores, wanted, strict=True))[: None if dtype == "float32" else 1]:
            error = (one.float().cpu() - other).norm() / other.norm()
            assert error < (1e-4 if dtype == "float32" else 0.2)


def test_steps_that_repeat_are_captured_once_for_each_set_of_sequences(make_model, kernel, monkeypatch):
    model, replays = make_model("llama"), []

    def captured(work):
        replays.append(0)

        def replay():
            replays[-1] += 1
            return work()

        return replay

    monkeypatch.setattr(recordedgraph.RecordedCapture, "whole", lambda _, work: captured(work))
    monkeypatch.setattr(graphs, "ALIKE_STEPS", 3)
    monkeypatch.setattr(graphs, "WORTH", 6)
    monkeypatch.setattr(crowd, "_ALONE", {})
    one, other, *_ = (replace(asked, steps=9) for asked in questions("block", ()))
    expected = [alone(model, asked)[1] for asked in (one, other)]
    assert replays == [5, 5]  # of nine tokens: one after prefill and two before the captured step
    runtime, found = crowd.together(model, [one, replace(other, steps=6)])
    torch.testing.assert_close([scores for _, _, scores in found], [expected[0], expected[1][:6]], atol=1e-4, rtol=1e-4)
    assert replays == [5, 5, 2]  # three steps of one request are not worth a capture after so few replays
    assert runtime.executor._graph._captured is None
    _, found = crowd.together(model, [one, replace(other, at=6)])
    torch.testing.assert_close([scores for _, _, scores in found], expected, atol=1e-4, rtol=1e-4)
    assert replays[3:] == [2, 0]  # one had the first six steps; the other has the three after it


def test_what_does_not_repeat_is_not_captured(make_model, kernel, monkeypatch):
    """A split prefill takes several tokens per step, and an answer may outgrow its memory."""
    one = replace(questions("block", ())[0], steps=12)
    asked = replace(one, suffix=tuple(range(80, 110)))
    model = make_model("llama")
    with monkeypatch.context() as patch:
        patch.setattr(varlen, "DEVICES", set())
        expected = [[token.token_id for token in alone(model, each)[0]] for each in (one, asked)]
    monkeypatch.setattr(step, "MOST_TOKENS", 3)
    monkeypatch.setattr(sequence, "MOST_TOKENS", 3)
    monkeypatch.setattr(crowd, "_ALONE", {})
    assert [token.token_id for token in alone(model, one)[0]] == expected[0]
    [(_, tokens, _)] = crowd.together(model, [asked], batch_tokens=4)[1]
    assert [token.token_id for token in tokens] == expected[1]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "tuning"), ENGINES, ids=lambda each: str(each))
def test_a_captured_step_computes_what_its_kernels_do(name, tuning, make_model, monkeypatch):
    """Rounding depends on how keys are split, so answers are compared as long as their tokens are equal."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model, captures, whole = make_model("llama", "bfloat16", "cuda"), [], graphs.Capture.whole
    asked = [replace(one, steps=12) for one in questions(name, tuning)]

    def answers():
        crowd._ALONE.clear()
        return [alone(model, one) for one in asked] + [each[1:] for each in crowd.together(model, asked)[1]]

    monkeypatch.setattr(graphs.Capture, "whole", lambda self, work: captures.append(whole(self, work)) or captures[-1])
    monkeypatch.setattr(graphs, "ALIKE_STEPS", 3)
    found = answers()
    assert captures
    monkeypatch.setattr(graphs, "ALIKE_STEPS", 1 << 30)
    compared = 0
    for (tokens, scores), (others, wanted) in zip(found, answers(), strict=True):
        for one, other, score, want in zip(tokens, others, scores, wanted, strict=False):
            assert (score.float() - want.float()).norm() / want.norm() < 0.2
            compared += 1
            if one.token_id != other.token_id:
                break
    assert compared > 6 * len(found)


def test_a_question_reads_all_chunks_of_a_layer_in_one_launch(make_model, kernel, monkeypatch):
    model, launches = make_model("llama"), []
    pool, packed = PagePool(CPU, 1 << 30), varlen.packed

    def counted(*given, **more):
        launches.append(more.get("used") is not None)
        return packed(*given, **more)

    monkeypatch.setattr(varlen, "packed", counted)
    hold_in_pages(pool, monkeypatch)
    [one, *_] = questions("block", ())
    wanted = crowd.request(model, one)
    launches.clear()
    runtime = Runtime(model)
    list(itertools.islice(runtime.decode(make_engine("block", {}), wanted, Generation(max_new_tokens=1)), 1))
    assert launches == [False, True] * model.layers  # its own tokens, then the prefix and three chunks
