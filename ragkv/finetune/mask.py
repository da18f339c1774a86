"""Who sees whom in a packed sample: many questions share one context, each exactly as it would be asked alone.

A packed sample is prefix | chunk 1 … chunk n | question 1 | … | question m in one row. Tokens carry a segment number;
the mask and the positions follow from the segments alone:

- a question sees the prefix, every chunk and itself, never another question;
- a chunk sees the prefix and the chunks before it ("full"), or nothing but itself ("block", papers/block-attention.txt
  section 2, the prefix being a block too);
- positions run on over prefix and chunks; every question starts where the context ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["PAD_SEGMENT", "visible"]

PAD_SEGMENT = -1


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
