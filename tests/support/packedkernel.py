"""A plain kernel for `torch_attn::_varlen_attn`, for processors: FlashAttention's shapes, rules and oddities.

What the CUDA kernel refuses is refused, a query that sees no key has the logsumexp +inf as it has there, and the
logsumexp is `(q_heads, tokens)`, which is not what torch documents.
"""

from __future__ import annotations

import functools

import torch

calls: list[torch.Size] = []
"""The shape of each call's queries since a test cleared it."""


def _rows(bounds, at):
    return slice(int(bounds[at]), int(bounds[at + 1]))


def attend(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    is_causal=False,
    scale=None,
    window_size=None,
    enable_gqa=False,
    seqused_k=None,
    block_table=None,
    num_splits=None,
):
    """As torch.nn.attention.varlen documents it, in fp32."""
    calls.append(query.shape)
    left, right = window_size or (-1, -1)
    heads, kv_heads, width = query.shape[1], key.shape[-2], query.shape[-1]
    assert heads % kv_heads == 0
    assert enable_gqa or heads == kv_heads
    assert width % 8 == 0
    assert width <= 256
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    for numbers in (cu_seq_q, cu_seq_k, seqused_k, block_table):
        assert numbers is None or (numbers.dtype == torch.int32 and numbers.is_contiguous())
    sequences = len(cu_seq_q) - 1
    assert cu_seq_k.shape == cu_seq_q.shape
    if block_table is not None:
        assert key.ndim == value.ndim == 4
        assert key.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
        assert len(block_table) == len(seqused_k) == sequences
    out, lse = torch.full_like(query, torch.nan), torch.full((heads, len(query)), torch.nan)
    for at in range(sequences):
        rows = _rows(cu_seq_q, at)
        if block_table is None:
            keys, values = key[_rows(cu_seq_k, at)], value[_rows(cu_seq_k, at)]
        else:
            keys, values = (pages[block_table[at].long()].flatten(0, 1) for pages in (key, value))
        used = len(keys) if seqused_k is None else int(seqused_k[at])
        n = rows.stop - rows.start
        assert n <= max_q
        assert used <= min(len(keys), max_k)
        keys, values = (t[:used].float().repeat_interleave(heads // kv_heads, 1) for t in (keys, values))
        scores = torch.einsum("nhd,mhd->hnm", query[rows].float(), keys) * scale
        behind = torch.arange(used - n, used)[:, None] - torch.arange(used)  # aligned to the end
        if left >= 0:
            scores = scores.masked_fill(behind > left, -torch.inf)
        if right >= 0:
            scores = scores.masked_fill(behind < -right, -torch.inf)
        total = scores.logsumexp(-1)
        weights = torch.exp(scores - total.nan_to_num(neginf=0.0)[..., None])
        out[rows] = torch.einsum("hnm,mhd->nhd", weights, values).to(query.dtype)
        lse[:, rows] = total.masked_fill(total.isneginf(), torch.inf)
    return out, lse, torch.zeros(2, dtype=torch.uint64)


@functools.cache
def register() -> None:
    """Make it the operator's kernel on processors, once per process."""
    import torch.nn.attention.varlen

    torch.library.register_kernel("torch_attn::_varlen_attn", "cpu", attend)
