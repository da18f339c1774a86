"""How families call the function that applies their RoPE: with queries and keys, with one of them, with a slice of it.

Which it is cannot be seen from outside, so every way is offered and the proof on load takes the one that the model's
keys obey.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Turn", "turns_of"]

Turn = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(states `(batch, heads, n, head_dim)`, cos, sin `(batch, n, rotary_dim)`) -> states, rotated."""


def turns_of(apply: Callable[..., Any]) -> tuple[Turn, ...]:
    """The ways in which a family's `apply_rotary_pos_emb` may mean to be called, the usual one first."""

    def pair(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotated: Tensor = apply(states, states[:, :1], cos, sin)[0]
        return rotated

    def lone(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # Gemma 3n, Gemma 4
        rotated: Tensor = apply(states, cos, sin)
        return rotated

    return pair, lone, _sliced(pair), _sliced(lone)


def _sliced(turn: Turn) -> Turn:
    """`turn` of the first dimensions alone, as many as have angles (Phi, Persimmon, StableLM)."""

    def first(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        width = cos.shape[-1]
        return torch.cat([turn(states[..., :width], cos, sin), states[..., width:]], -1)

    return first
