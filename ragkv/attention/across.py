"""Attention over KV that lies on several ranks: every rank reads its own, and all merge what all have read.

The new tokens are everybody's: each rank runs them through the whole model, so that only the parts of attention travel,
an output and a logsumexp for each token, head and layer, however long the context is (APB §3, decoding).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ragkv.attention.part import Part, merge_parts, merge_some
from ragkv.attention.reading import Tokens

__all__ = ["Ranks", "merged_across"]


class Ranks(Protocol):
    """The processes that answer together. All of them call the same methods in the same order."""

    @property
    def rank(self) -> int:
        """This process's number, from 0."""

    @property
    def size(self) -> int:
        """How many they are."""

    def gather(self, mine: Tensor) -> Tensor:
        """Every rank's tensor, all of one shape, in the order of the ranks: `(ranks, *mine.shape)`, alike on all."""

    def first(self, mine: Tensor) -> Tensor:
        """Rank 0's tensor, of the shape that all have."""


def merged_across(
    ranks: Ranks,
    parts: Mapping[int, Sequence[tuple[Tokens, Part]]],
    spread: Sequence[tuple[int, Tokens]],
    like: Part,
) -> list[Part]:
    """The parts of all ranks, merged in the order of the ranks: one for each of `spread`'s groups and tokens, in fp32.

    `parts` are those that this rank has read, by group, of the tokens of `like`, `(1, q_heads, n, head_dim)`. One
    collective, of `(q_heads, tokens, head_dim + 1)` for all groups together; a rank that has nothing to say of a token
    sends the logsumexp −inf.
    """
    told = []
    for group, tokens in spread:
        if group in parts:
            mine = merge_some(parts[group], like.lse.shape[-1])
            out, lse = mine.out[0, :, tokens].float(), mine.lse[0, :, tokens]
        else:
            out = torch.zeros_like(like.out[0, :, tokens], dtype=torch.float32)
            lse = torch.full_like(like.lse[0, :, tokens], -torch.inf)
        told.append(torch.cat([out, lse[..., None]], -1))
    gathered = ranks.gather(torch.cat(told, 1)).to(like.out.device)  # (ranks, q_heads, tokens, head_dim + 1)
    each = torch.split(gathered, [part.shape[1] for part in told], 2)
    return [merge_parts([Part(one[None, ..., :-1], one[None, ..., -1]) for one in group]) for group in each]
