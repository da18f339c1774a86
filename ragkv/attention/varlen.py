"""Attention on a GPU by torch's kernel for packed sequences: grouped heads read in place, a logsumexp, windows.

The operator behind `torch.nn.attention.varlen` calls FlashAttention with sequences of any lengths in one launch. A
sequence here is a set of queries with the keys that they see: the new tokens of one stream, or one chunk and the tokens
that read it. It takes half types and heads of at most 256 numbers, and has no softcap; `takes` checks this. The
operator is called directly, because torch's wrapper accepts less and differs from version to version.

Tests without a GPU (`tests/support/packedkernel.py`) replace the operator by a plain kernel with the same shapes and
rules as FlashAttention's (torch's `flash_api.cpp`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

DEVICES = {"cuda"}
"""Kinds of devices that have the kernel, and to which KV is copied from pinned memory."""
DTYPES = {torch.bfloat16, torch.float16}
_WIDEST = 256


def takes(query: Tensor, key: Tensor, value: Tensor, *, softcap: float | None = None) -> bool:
    """Whether the kernel can compute these; all tensors have their heads in dimension 1, or all in dimension 2."""
    width = query.shape[-1]
    return (
        softcap is None
        and query.device.type in DEVICES
        and query.dtype in DTYPES
        and not (query.requires_grad and torch.is_grad_enabled())  # there is no gradient through the logsumexp
        and query.dtype == key.dtype == value.dtype
        and width == key.shape[-1] == value.shape[-1]
        and width % 8 == 0
        and width <= _WIDEST
    )


def bounds(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Offsets of packed sequences of these lengths, with the end of the last one: int32 `(sequences + 1,)`."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=True)


def packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: tuple[Tensor, Tensor],
    most: tuple[int, int],
    *,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    used: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One launch over packed sequences: output `(tokens, q_heads, head_dim)` and logsumexp `(q_heads, tokens)` in fp32.

    `query` `(tokens, q_heads, head_dim)`; `key` and `value` `(keys, kv_heads, head_dim)`, any strides but the last.
    `ends` are the `bounds` of queries and keys, `most` the longest of each. With `used`, int32 `(sequences,)`, the
    keys' bounds only say where each sequence begins, in any order, and `used` is its number of keys. `causal`: the
    queries are the last of their keys; `window` is then how many keys each sees. Every query must see a key.
    """
    if most[0] == 1 and window is None and len(query) == len(ends[0]) - 1:
        causal = False  # one query sees all keys; non-causal, the kernel folds the heads of a group and splits the keys
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        *ends,
        *most,
        0.0,  # dropout
        causal,
        False,  # return_debug_mask
        scale=scale,
        window_size_left=None if window is None else window - 1,
        window_size_right=0 if causal else None,
        seqused_k=used,
    )
    return out, lse


def kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: object, scale: float, temperature: float, _softcap: float | None
) -> tuple[Tensor, Tensor]:
    """A `Kernel` of `ragkv.attention.partial` for a mask that is None or "causal": a sequence for each batch row."""
    return _batched(query, key, value, scale=scale / temperature, causal=mask == "causal")


def causal(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of queries `(batch, q_heads, n, head_dim)` that are the last n of the keys: `(out, lse)`."""
    return _batched(query, key, value, scale=scale, causal=True, window=window)


def _batched(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, causal: bool, window: int | None = None
) -> tuple[Tensor, Tensor]:
    batch, heads, n, _ = query.shape
    m = key.shape[2]
    queries, keys, values = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))  # no copy of one batch row
    if batch == 1 and n > 1 and not causal:
        size = split_length(m, heads, n)
        if size < m:
            return _split_kv_attention(queries, keys, values, size, scale)
    out, lse = packed(
        queries,
        keys,
        values,
        (_even(batch, n, query.device), _even(batch, m, query.device)),
        (n, m),
        scale=scale,
        causal=causal,
        window=window,
    )
    return out.reshape(batch, n, *out.shape[1:]).transpose(1, 2), lse.reshape(-1, batch, n).transpose(0, 1)


_ROWS, _BLOCKS, _LEAST_KEYS = 128, 256, 256
"""Queries of a head per block of the kernel; blocks that keep a GPU busy; keys that are worth a block."""


def split_length(keys: int, rows: int, n: int) -> int:
    """The length in keys of the splits in which `rows` heads or sequences of n queries each should read theirs."""
    splits = min(keys // _LEAST_KEYS, -(-_BLOCKS // (rows * -(-n // _ROWS))))
    return -(-keys // max(1, splits))


def _split_kv_attention(
    queries: Tensor, keys: Tensor, values: Tensor, size: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Few queries over many keys: split the keys, which the kernel would otherwise read in few blocks, and merge."""
    n, m = len(queries), len(keys)
    splits = -(-m // size)
    out, lse = packed(
        queries.repeat(splits, 1, 1),
        keys,
        values,
        (_even(splits, n, queries.device), _even(splits, size, queries.device).clamp(max=m)),
        (n, size),
        scale=scale,
    )
    merged, total = merged_splits(out.reshape(splits, n, *out.shape[1:]), lse.reshape(-1, splits, n))
    return merged.to(out.dtype).transpose(0, 1)[None], total[None]


def merged_splits(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Partial attentions of the same queries, `(splits, n, heads, head_dim)` and `(heads, splits, n)`, as one over all
    keys: `(n, heads, head_dim)` and `(heads, n)`, in fp32. Each query sees some keys of each split.
    """
    logs = lse.log_softmax(1)  # one launch; logsumexp takes a dozen
    shares = logs.exp().permute(1, 2, 0)
    return (out * shares[..., None]).sum(0), (lse - logs)[:, 0]


def _even(sequences: int, length: int, device: torch.device) -> Tensor:
    """`bounds` of equal lengths; cached, because every layer of a pass asks for the same."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():  # memory made in a graph belongs to it
        return _made_even(sequences, length, device)
    return _kept_even(sequences, length, device)


def _made_even(sequences: int, length: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # so that it may also be used with gradients
        return torch.arange(0, sequences * length + 1, length, dtype=torch.int32, device=device)


_kept_even = functools.lru_cache(64)(_made_even)
