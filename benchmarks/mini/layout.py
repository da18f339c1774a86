"""The per-token columns of a packed row (`ragkv.finetune.mask`), and its mask in the form that transformers takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

__all__ = ["Layout", "additive_mask", "layout"]


class Layout(NamedTuple):
    """The columns of one row: segment (0 prefix, 1..n chunks, then questions), question flag, position."""

    segments: list[int]
    asks: list[bool]
    positions: list[int]


def layout(prefix: int, chunks: Sequence[int], questions: Sequence[int]) -> Layout:
    """Lay out a row from the token counts of the prefix, of each chunk, and of each question with its answer."""
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


def additive_mask(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`mask` as 0 and the most negative finite number of `dtype`, converted once instead of in every layer."""
    import torch

    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
