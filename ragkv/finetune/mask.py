"""Who sees whom in a packed sample: many questions share one context, each exactly as it would be asked alone.

A packed sample is prefix | chunk 1 … chunk n | question 1 | … | question m in one row. Tokens carry a segment number;
the mask and the positions follow from the segments alone:

- a question sees the prefix, every chunk and itself, never another question;
- a chunk sees the prefix and the chunks before it ("full"), or nothing but itself ("block", papers/block-attention.txt
  section 2, the prefix being a block too);
- positions run on over prefix and chunks; every question starts where the context ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

__all__ = ["PAD_SEGMENT", "Layout", "additive_mask", "layout", "visible"]

PAD_SEGMENT = -1


class Layout(NamedTuple):
    """Per-token columns of one row: segment (0 prefix, 1..n chunks, then questions), question flag, position."""

    segments: list[int]
    asks: list[bool]
    positions: list[int]


def layout(prefix: int, chunks: Sequence[int], questions: Sequence[int]) -> Layout:
    """Lay out one packed row from token counts: `prefix`, one per chunk, one per question (with its answer)."""
    segments = [0] * prefix
    for index, tokens in enumerate(chunks, start=1):
        segments += [index] * tokens
    context = len(segments)
    positions = list(range(context))
    for index, tokens in enumerate(questions, start=len(chunks) + 1):
        segments += [index] * tokens
        positions += range(context, context + tokens)
    asks = [False] * context + [True] * (len(segments) - context)
    return Layout(segments, asks, positions)


def visible(segments: torch.Tensor, asks: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """Return the boolean mask (rows, 1, tokens, tokens), True where the query (dim 2) may see the key (dim 3).

    `segments` (rows, tokens) int with PAD_SEGMENT for padding, `asks` (rows, tokens) bool, `block` (rows,) bool.
    Padding sees padding, so that no row of the softmax is empty.
    """
    import torch

    tokens = segments.shape[1]
    causal = torch.ones(tokens, tokens, dtype=torch.bool, device=segments.device).tril()
    same = segments[:, :, None] == segments[:, None, :]  # (rows, tokens, tokens)
    shared = ~asks & (segments != PAD_SEGMENT)  # keys of the context
    reads = asks | ~block[:, None]  # queries that see the context before them
    reads = reads & (segments != PAD_SEGMENT)
    return (causal & (same | (shared[:, None, :] & reads[:, :, None])))[:, None]


def additive_mask(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `mask` as 0 / most negative finite number of `dtype`, converted once instead of in every layer."""
    import torch

    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
