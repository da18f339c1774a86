"""GPT-J and CodeGen keep sine and cosine of every position in a table of each layer, instead of a rotary embedding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ragkv.attention.rope import Rotary

__all__ = ["tabled"]


def tabled(attention: Any, apply: Callable[..., Tensor], layers: int) -> Rotary | None:
    """Their rotation; None for an attention without such a table `embed_positions` `(positions, rotary_dim)`."""
    if not isinstance(getattr(attention, "embed_positions", None), Tensor):
        return None

    def angles(positions: Tensor, _kind: str) -> tuple[Tensor, Tensor]:
        found = attention.embed_positions.to(positions.device)[positions.abs()]  # sines, then cosines
        sin, cos = found.float().chunk(2, -1)
        return cos, sin * positions.sign()[..., None]

    def turn(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        width = 2 * cos.shape[-1]
        moved = apply(states[..., :width].transpose(1, 2), sin, cos).transpose(1, 2)  # it wants (batch, n, heads, d)
        return torch.cat([moved, states[..., width:]], -1)

    return Rotary(apply=turn, angles=angles, kinds=("default",) * layers)
