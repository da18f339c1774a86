"""Partial attention: partial results merge to the result over all keys, for every kernel."""

from __future__ import annotations

import itertools

import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.attention.partial import PartialAttention, merge_partials, merge_partials_of, partial_attention
from ragkv.attention.sequence import ChunkGroup

SHAPES = [(1, 8, 2), (3, 4, 4), (2, 6, 1)]  # batch, q_heads, kv_heads


def states(batch: int, q_heads: int, kv_heads: int, n: int, m: int, dtype: torch.dtype = torch.float32):
    torch.manual_seed(batch * 100 + n * 10 + m)
    query = torch.randn(batch, q_heads, n, 16, dtype=dtype)
    key, value = torch.randn(2, batch, kv_heads, m, 16, dtype=dtype)
    return query, key, value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", ["none", "causal", "partial"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("shared", [False, True])
def test_fast_path_equals_the_matmul_path(shape, mask, dtype, shared):
    query, key, value = states(*shape, n=7, m=11 if mask == "none" else 7, dtype=dtype)
    if shared:
        key, value = key[:1], value[:1]
    visible = None
    if mask == "causal":
        visible = "causal"
    elif mask == "partial":
        visible = torch.rand(7, 7) > 0.6
        visible[2] = False  # a row that sees nothing
    fast = partial_attention(query, key, value, scale=0.3, temperature=0.8, mask=visible)
    slow = partial_attention(query, key, value, scale=0.3, temperature=0.8, mask=visible, reference=True)
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(fast.out, slow.out, atol=limit, rtol=limit)
    torch.testing.assert_close(fast.lse, slow.lse, atol=limit, rtol=limit)
    assert fast.lse.dtype == torch.float32
    if mask == "partial":
        assert torch.isneginf(fast.lse[:, :, 2]).all()
        assert (fast.out[:, :, 2] == 0).all()


@settings(max_examples=60, deadline=None)
@given(cuts=st.lists(st.integers(0, 24), max_size=6), n=st.integers(1, 4))
def test_any_cut_of_the_keys_merges_to_the_whole(cuts, n):
    query, key, value = states(2, 4, 2, n=n, m=24)
    whole = partial_attention(query, key, value, scale=0.4)
    edges = [0, *sorted(cuts), 24]
    parts = [
        partial_attention(query, key[:, :, a:b], value[:, :, a:b], scale=0.4) for a, b in itertools.pairwise(edges)
    ]
    merged = merge_partials(parts)
    torch.testing.assert_close(merged.out, whole.out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(merged.lse, whole.lse, atol=1e-5, rtol=1e-5)


def test_parts_that_saw_nothing_merge_to_nothing():
    query, key, value = states(1, 4, 2, n=2, m=4)
    empty = partial_attention(query, key[:, :, :0], value[:, :, :0], scale=0.4)
    nothing = merge_partials([empty, empty])
    assert torch.isneginf(nothing.lse).all()
    assert (nothing.out == 0).all()
    part = partial_attention(query, key, value, scale=0.4)
    torch.testing.assert_close(merge_partials([empty, part, empty]).out, part.out)


def scattered(n: int, tokens: list[int]) -> tuple[torch.Tensor, PartialAttention]:
    """A part for these tokens of `n`, and their indices."""
    out, lse = torch.randn(1, 2, len(tokens), 4), torch.randn(1, 2, len(tokens)) * 3
    return torch.tensor(tokens), PartialAttention(out, lse)


def spread(n: int, tokens: torch.Tensor | slice, part: PartialAttention) -> PartialAttention:
    """The part extended to all `n` tokens; the others saw no keys."""
    out, lse = torch.zeros(1, 2, n, 4), torch.full((1, 2, n), -torch.inf)
    out[:, :, tokens], lse[:, :, tokens] = part.out, part.lse
    return PartialAttention(out, lse)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), n=st.integers(1, 6))
def test_parts_of_some_tokens_merge_as_parts_of_all_would(data, n):
    torch.manual_seed(n)
    held: list[tuple[torch.Tensor | slice, PartialAttention]] = []
    for tokens in data.draw(st.lists(st.sets(st.integers(0, n - 1), min_size=1), min_size=1, max_size=5)):
        first, last = min(tokens), max(tokens)
        if len(tokens) == last - first + 1 and data.draw(st.booleans()):
            held.append((slice(first, last + 1), scattered(n, sorted(tokens))[1]))
        else:
            held.append(scattered(n, data.draw(st.permutations(sorted(tokens)))))
    found = merge_partials_of(held, n)
    expected = merge_partials([spread(n, tokens, part) for tokens, part in held])
    torch.testing.assert_close(found.out, expected.out)
    torch.testing.assert_close(found.lse, expected.lse)
    assert found.out.dtype == torch.float32


@pytest.mark.parametrize("order", ["by sequence", "by chunk", "shuffled"])
def test_chunks_of_adjacent_sequences_merge_as_one_of_all(order):
    """Three sequences of two tokens: two read their own two chunks, the last one none."""
    torch.manual_seed(0)
    held = [(slice(at, at + 2), scattered(6, [at, at + 1])[1]) for at in (0, 0, 2, 2)]
    if order != "by sequence":
        held = [held[place] for place in ((0, 2, 1, 3) if order == "by chunk" else (3, 0, 2, 1))]
    held.insert(1, (slice(0, 6), scattered(6, list(range(6)))[1]))
    found = merge_partials_of(held, 6)
    expected = merge_partials([spread(6, tokens, part) for tokens, part in held])
    torch.testing.assert_close(found.out, expected.out)
    torch.testing.assert_close(found.lse, expected.lse)


def test_the_given_parts_are_not_written_to():
    parts = [scattered(3, [0, 1, 2]), (slice(0, 3), scattered(3, [0, 1, 2])[1]), scattered(3, [2, 0])]
    kept = [(part.out.clone(), part.lse.clone()) for _, part in parts]
    merge_partials_of(parts, 3)
    for (_, part), (out, lse) in zip(parts, kept, strict=True):
        assert torch.equal(part.out, out)
        assert torch.equal(part.lse, lse)


def test_huge_scores_do_not_overflow():
    part = PartialAttention(torch.ones(1, 1, 1, 4), torch.full((1, 1, 1), 3e4))
    other = PartialAttention(torch.zeros(1, 1, 1, 4), torch.full((1, 1, 1), -3e4))
    torch.testing.assert_close(merge_partials([part, other]).out, torch.ones(1, 1, 1, 4))


def test_group_weight_is_the_identity_at_one_in_both_modes():
    part = PartialAttention(torch.ones(1, 2, 1, 4), torch.randn(1, 2, 1))
    for mode in ("power", "log"):
        weighed = ChunkGroup(segments=(), scale_mode=mode).weigh(part)
        torch.testing.assert_close(weighed.lse, part.lse)
    half = ChunkGroup(segments=(), temperature=0.5, scale=0.8, scale_mode="log").weigh(part)
    torch.testing.assert_close(half.lse, part.lse * 0.5 + torch.tensor(0.8).log())


def test_parts_of_half_types_merge_in_fp32():
    """A thousand parts of one key each: sums in a half type would deviate by far more than one rounding."""
    query, key, value = states(1, 2, 2, n=3, m=1000, dtype=torch.bfloat16)
    parts = [partial_attention(query, key[:, :, i : i + 1], value[:, :, i : i + 1], scale=0.2) for i in range(1000)]
    merged = merge_partials(parts)
    out, lse = oracle.attention(query, key, value, 0.2)
    assert merged.out.dtype == torch.float32
    torch.testing.assert_close(merged.out.double(), out, atol=1e-4, rtol=0)
    torch.testing.assert_close(merged.lse, lse.float(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("mask", [None, "causal", "own", "each"])
def test_scores_that_do_not_fit_at_once_are_computed_some_tokens_at_a_time(mask, monkeypatch):
    query, key, value = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 5)
    given = {"own": torch.rand(7, 7) < 0.6, "each": torch.rand(2, 7, 7) < 0.6}.get(mask, mask)
    whole = partial_attention(query, key, value, scale=0.3, mask=given, softcap=3.0)
    monkeypatch.setattr("ragkv.attention.partial._SCORES", 2 * 4 * 7 * 3)
    some = partial_attention(query, key, value, scale=0.3, mask=given, softcap=3.0)
    torch.testing.assert_close(some.out, whole.out)
    torch.testing.assert_close(some.lse, whole.lse)


HALF, FULL = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("dtypes", "width", "shared", "options", "limit"),
    [
        ((FULL, FULL), 16, False, {"reference": True}, 1e-5),  # the matmul path
        ((FULL, FULL), 16, False, {"softcap": 2.0, "temperature": 0.5}, 1e-5),  # the cap comes before the temperature
        # values of another width than keys: a kernel that requires equal widths must not be chosen
        *(((FULL, FULL), width, shared, {}, 1e-5) for width in (8, 24) for shared in (False, True)),
        ((FULL, HALF), 16, False, {}, 1e-2),
        ((HALF, FULL), 16, False, {}, 1e-2),
        ((HALF, HALF), 16, False, {"softcap": 20.0}, 1e-2),  # only inputs and output are rounded
    ],
    ids=str,
)
def test_it_is_attention_by_its_definition(dtypes, width, shared, options, limit):
    query, key, _ = states(2, 4, 2, n=3, m=40)
    query, key, value = query.to(dtypes[0]), key.to(dtypes[1]), torch.randn(2, 2, 40, width).to(dtypes[1])
    if shared:
        key, value = key[:1], value[:1]
    found = partial_attention(query, key, value, scale=0.4, **options)
    softcap, temperature = options.get("softcap"), options.get("temperature", 1.0)
    scale, cap = 0.4 / temperature, softcap and softcap / temperature
    out, lse = oracle.attention(query, *(t.expand(2, -1, -1, -1) for t in (key, value)), scale, softcap=cap)
    assert found.out.dtype == dtypes[0]
    torch.testing.assert_close(found.out.double(), out, atol=limit, rtol=limit)
    torch.testing.assert_close(found.lse, lse.float(), atol=1e-5, rtol=1e-5)
    nothing = partial_attention(query, key[:, :, :0], value[:, :, :0], scale=0.4, **options)
    torch.testing.assert_close(merge_partials([nothing, found]).out, found.out.float())
