"""The kernel for attention of many queries, against softmax in float64, and the calls that it leaves to others."""

from __future__ import annotations

import oracle
import pytest
import torch

from ragkv.attention import partial
from ragkv.attention.partial import partial_attention

flash = pytest.importorskip("ragkv.attention.flash_kernel", exc_type=ImportError)
needs_dot = pytest.mark.skipif(
    not flash.kernels.has_dot("bfloat16") or flash.kernels.has_tiles(), reason="no AVX512-BF16, or AMX"
)
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=needs_dot)]


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def calls(monkeypatch):
    """Records the queries of each call of the kernel."""
    found, honest = [], partial._flash

    def watched(query, *more):
        found.append(tuple(query.shape))
        return honest(query, *more)

    monkeypatch.setattr(partial, "_flash", watched)
    return found


def tensors(batch, heads, kv_heads, n, m, width, dtype):
    """A query, keys and values; keys and values are views of larger tensors."""
    query = torch.randn(batch, n, heads, width).transpose(1, 2).to(dtype)
    key, value = (torch.randn(batch, kv_heads, m + 3, 2 * width)[:, :, 3:, :width].to(dtype) for _ in range(2))
    return query, key, torch.cat([value, key], -1)[..., :width]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "n", "m", "width", "causal"),
    [
        (1, 2, 2, 8, 5, 64, False),
        (2, 4, 2, 75, 256, 64, False),
        (1, 3, 1, 97, 129, 96, False),
        (2, 4, 2, 200, 200, 96, True),
        (1, 6, 2, 64, 64, 64, True),
        (1, 2, 1, 12, 65, 96, False),
        (1, 8, 1, 300, 300, 64, True),
        (1, 2, 1, 65, 65, 64, True),
    ],
    ids=str,
)
def test_it_is_exact(batch, heads, kv_heads, n, m, width, causal, dtype, calls):
    """Full and partial blocks, heads that share a key head, queries in several bands and units."""
    torch.manual_seed(0)
    query, key, value = tensors(batch, heads, kv_heads, n, m, width, dtype)
    found = partial_attention(query, key, value, scale=0.8, temperature=4.0, mask="causal" if causal else None)
    out, lse = oracle.attention(query, key, value, 0.2, causal=causal)
    assert len(calls) == 1
    assert found.out.dtype == dtype
    tolerance = 3e-5 if dtype == torch.float32 else 1.6e-2
    torch.testing.assert_close(found.out.double(), out, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(found.lse.double(), lse, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_scores_are_no_matter(dtype, calls):
    torch.manual_seed(1)
    query, key, value = tensors(1, 2, 2, 30, 150, 64, dtype)
    found = partial_attention(query, key, value, scale=30.0)
    out, lse = oracle.attention(query, key, value, 30.0)
    torch.testing.assert_close(found.out.double(), out, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(found.lse.double(), lse, atol=1e-2, rtol=1e-5)
    assert len(calls) == 1


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_result_does_not_depend_on_other_queries(dtype, causal):
    torch.manual_seed(2)
    query, key, value = tensors(1, 2, 2, 200, 200, 64, dtype)
    mask = "causal" if causal else None
    together, lse = partial._flash(query, key, value, mask, 0.2, 1.0, None)
    parts = ((0, 7), (0, 100)) if causal else ((0, 7), (50, 63), (199, 200))
    for first, last in parts:
        end = last if causal else 200
        out, its = partial._flash(query[:, :, first:last], key[:, :, :end], value[:, :, :end], mask, 0.2, 1.0, None)
        assert torch.equal(out, together[:, :, first:last])
        assert torch.equal(its, lse[:, :, first:last])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_share_the_queries(dtype, monkeypatch):
    torch.manual_seed(3)
    given = *tensors(2, 4, 2, 150, 90, 64, dtype), None, 0.2, 1.0, None
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    alone = partial._flash(*given)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for _ in range(5):
        assert all(map(torch.equal, partial._flash(*given), alone))


@pytest.mark.parametrize("which", [1, 2], ids=["keys", "values"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_number_that_is_none_stays_one_and_touches_no_other_head(dtype, which):
    given = tensors(1, 2, 2, 10, 70, 64, dtype)
    given[which][0, 0, 69, 3] = torch.nan
    out, _ = partial._flash(*given, None, 0.2, 1.0, None)
    assert out[0, 0].isnan().any()
    assert not out[0, 1].isnan().any()
    shorter, _ = partial._flash(given[0], *(each[:, :, :67] for each in given[1:]), None, 0.2, 1.0, None)
    assert not shorter.isnan().any()


def test_what_it_does_not_take(calls, monkeypatch):
    def attend(query, key, value, mask=None, **more):
        partial_attention(query, key, value, scale=0.1, mask=mask, **more)

    attend(*tensors(1, 1, 1, 20, 9, 64, torch.float32), torch.ones(20, 9, dtype=torch.bool))
    attend(*tensors(1, 1, 1, 20, 9, 64, torch.float32), softcap=3.0)
    attend(*tensors(1, 1, 1, partial._QUERIES - 1, 9, 64, torch.float32))
    attend(*tensors(1, 1, 1, 20, 9, 24, torch.float32))
    attend(*tensors(1, 1, 1, 20, 9, 64, torch.float16))
    query, key, value = tensors(1, 1, 1, 20, 9, 64, torch.float32)
    attend(query, key[..., ::2].repeat_interleave(2, -1), torch.stack([value, value], -1)[..., 0])
    with torch.enable_grad():
        attend(query.requires_grad_(), key, value)
    monkeypatch.setattr(flash.kernels, "has_tiles", lambda: True)
    attend(*tensors(1, 1, 1, 20, 9, 64, torch.bfloat16))
    assert calls == []
    attend(*tensors(1, 1, 1, partial._QUERIES, 9, 64, torch.float32))
    assert len(calls) == 1
