"""A plain CPU kernel for `aten::_flash_attention_forward` with FlashAttention's shapes, rules and quirks.

It refuses what the CUDA kernel refuses, and gives a query that sees no key the logsumexp +inf, as CUDA does.
"""

import functools

import torch

calls: list[torch.Size] = []
"""The shape of the queries in each call since a test cleared the list."""


def _rows(bounds, at):
    return slice(int(bounds[at]), int(bounds[at + 1]))


def attend(
    query,
    key,
    value,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    return_debug_mask,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
    seqused_k=None,
    alibi_slopes=None,
    block_table=None,
    num_splits=None,
):
    """The computation of torch's `flash_api.cpp`, in fp32."""
    assert not any((dropout_p, return_debug_mask, alibi_slopes, block_table, num_splits))
    calls.append(query.shape)
    left, right = (-1 if size is None else size for size in (window_size_left, window_size_right))
    if is_causal and max_q > 1:
        right = 0
    heads, kv_heads, width = query.shape[1], key.shape[-2], query.shape[-1]
    assert heads % kv_heads == 0
    assert width % 8 == 0
    assert width <= 256
    assert query.ndim == key.ndim == value.ndim == 3
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    for numbers in (cum_seq_q, cum_seq_k, seqused_k):
        assert numbers is None or (numbers.dtype == torch.int32 and numbers.is_contiguous())
    sequences = len(cum_seq_q) - 1
    assert cum_seq_k.shape == cum_seq_q.shape
    assert seqused_k is None or seqused_k.shape == (sequences,)
    if max_q == 1 and heads > kv_heads and left == right == -1:  # heads become queries, one sequence per token
        assert len(query) == sequences
    out, lse = torch.full_like(query, torch.nan), torch.full((heads, len(query)), torch.nan)
    for at in range(sequences):
        rows, start = _rows(cum_seq_q, at), int(cum_seq_k[at])
        used = int(cum_seq_k[at + 1]) - start if seqused_k is None else int(seqused_k[at])
        keys, values = key[start : start + used], value[start : start + used]
        n = rows.stop - rows.start
        assert n <= max_q
        assert used == len(keys) <= max_k
        keys, values = (t.float().repeat_interleave(heads // kv_heads, 1) for t in (keys, values))
        scores = torch.einsum("nhd,mhd->hnm", query[rows].float(), keys) * scale
        behind = torch.arange(used - n, used)[:, None] - torch.arange(used)  # aligned at the end
        if left >= 0:
            scores = scores.masked_fill(behind > left, -torch.inf)
        if right >= 0:
            scores = scores.masked_fill(behind < -right, -torch.inf)
        total = scores.logsumexp(-1)
        weights = torch.exp(scores - total.nan_to_num(neginf=0.0)[..., None])
        out[rows] = torch.einsum("hnm,mhd->nhd", weights, values).to(query.dtype)
        lse[:, rows] = total.masked_fill(total.isneginf(), torch.inf)
    return out, lse, torch.zeros(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)


@functools.cache
def register() -> torch.library.Library:
    """Register it as the CPU kernel of the operator, once per process; it exists as long as the returned object."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", attend, "CPU")
    return library
