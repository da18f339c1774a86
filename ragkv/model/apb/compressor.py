"""Which keys and values of a block are worth passing on: every compressor scores tokens, per layer and kv head (§3.4).

Training-free scorers are here; the trained retaining heads are in `ragkv.model.apb.heads`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["AttentionScore", "Compressor", "KeyNorm", "Local", "Random", "chosen", "highest_logits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """The tokens of a block that may be passed on, in one layer.

    `query` `(q_heads, n, head_dim)`, `key` and `value` `(kv_heads, n, head_dim)` as attention gets them, rotated for
    the positions from `position` on. `unturned()` gives query and key without their positions.
    """

    layer: int
    position: int
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    unturned: Callable[[], tuple[Tensor, Tensor]]

    @property
    def tokens(self) -> int:
        return self.key.shape[1]


class Compressor(Protocol):
    """Scores tokens; those with the highest scores are passed on. Alike in every process and at every time."""

    def identity(self) -> str:
        """What its choice depends on beside the block: a part of the key under which blocks are stored."""

    def scores(self, local: Local) -> Tensor:
        """`(kv_heads, n)` in fp32."""


def chosen(compressor: Compressor, local: Local, most: int) -> Tensor:
    """The indices of the `most` best tokens for each kv head, rising, `(kv_heads, most)`; among equals the first."""
    scores = compressor.scores(local).float()
    best = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :most]
    return best.sort(-1).values


@dataclass(frozen=True, slots=True)
class KeyNorm:
    """Keys of small norm draw attention (Devoto et al. 2024): they are passed on. Nothing to train, no question.

    Of little use to models that bring all keys of a head to one norm (Qwen3, Gemma 3).
    """

    def identity(self) -> str:
        return "key-norm"

    def scores(self, local: Local) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(local.key, dim=-1, dtype=torch.float32)
        return -norms


@dataclass(frozen=True, slots=True)
class Random:
    """Any tokens: the paper's ablation ("Rd.", Table 3). The same ones wherever and whenever a block is encoded."""

    seed: int = 0

    def identity(self) -> str:
        return f"random-{self.seed}"

    def scores(self, local: Local) -> Tensor:
        told = f"{self.seed} {local.layer} {local.position}".encode()
        seed = int.from_bytes(hashlib.blake2b(told, digest_size=7).digest(), "little")
        drawn = torch.rand(local.key.shape[:2], generator=torch.Generator().manual_seed(seed))
        return drawn.to(local.key.device)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionScore:
    """The highest attention logit that a token gets from the question's tokens and the heads of its group.

    That is the label which retaining heads are trained to foretell (Locret), from queries of a question that has seen
    the prompt's prefix alone. `queries[layer]` is `(q_heads, l_q, head_dim)`, turned to where the question will stand.
    """

    queries: Mapping[int, Tensor]
    question: str = ""

    def identity(self) -> str:
        return f"attention-{self.question}"

    def scores(self, local: Local) -> Tensor:
        return highest_logits(self.queries[local.layer], local.key, local.scale)


def highest_logits(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """For each key, the highest logit before the softmax that a query of its group gives it, `(kv_heads, n)` in fp32.

    `query` `(q_heads, m, head_dim)` and `key` `(kv_heads, n, head_dim)`, both turned to where they stand.
    """
    asking = query.float().reshape(key.shape[0], -1, query.shape[-1])  # (kv_heads, g·m, head_dim)
    logits: Tensor = asking @ key.float().transpose(-1, -2) * scale
    return logits.amax(1)
