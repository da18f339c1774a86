"""The attention mask of a packed row, in which many questions share a context and each is answered as if asked alone.

A packed row is prefix | chunk 1 … chunk n | question 1 | … | question m. Each token has a segment number, which
determines the mask and the positions:

- a question sees the prefix, every chunk and itself, never another question;
- a chunk sees the prefix and the chunks before it ("full"), or only itself ("block", Block-Attention §2, where the
  prefix is a block too);
- positions count on over prefix and chunks, and every question starts where the context ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["PAD_SEGMENT", "visible"]

PAD_SEGMENT = -1


def visible(segments: torch.Tensor, asks: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """The bool mask (rows, 1, tokens, tokens), True where the query (dim 2) may see the key (dim 3).

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
