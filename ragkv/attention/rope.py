"""Place a chunk by turning the query, not the keys (docs/design.md).

A rotary score depends only on the difference of positions: q at position i against a key encoded at j and placed
at j + o scores as R(-o)·q does against the key as it is stored. So the few query rows are rotated, in fp32, and the
many keys are read where they lie. The rotation is the model's own (`apply_rotary_pos_emb` and its `rotary_emb`), so
that scaled, partial and interleaved variants need no code here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Rotary", "Turns"]

Angles = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """A model's rotary embedding, as the attention needs it.

    `apply(q, k, cos, sin)` rotates `(batch, heads, n, head_dim)` by cos/sin of `(batch, n, rotary_dim)`.
    `angles(positions, kind)` gives fp32 cos and sin *without* the attention scaling (YaRN folds it into both; a
    second one would inflate scores) for positions `(batch, n)`, negative ones included. `kinds[l]` names layer l's
    frequencies (Gemma 3 has two kinds), or is None for a layer without RoPE, whose queries are never turned.
    """

    apply: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    angles: Callable[[Tensor, str], Angles]
    kinds: tuple[str | None, ...]

    def rotate(self, states: Tensor, layer: int, offsets: Tensor) -> Tensor:
        """R(offset)·states: `(batch, heads, n, head_dim)` by offsets `(batch, n)`; fp32 inside, same dtype out."""
        kind = self.kinds[layer]
        if kind is None:
            return states
        cos, sin = self.angles(offsets, kind)
        wide = states.float()
        return self.apply(wide, wide[:, :1], cos, sin)[0].to(states.dtype)


class Turns:
    """The turned queries of one forward pass; the angles are computed once per kind, not once per layer."""

    def __init__(self, rotary: Rotary) -> None:
        self._rotary = rotary
        self._angles: dict[tuple[str, tuple[int, ...]], Angles] = {}

    def turn(self, query: Tensor, layer: int, offsets: Sequence[int]) -> list[Tensor]:
        """R(-o)·query for each of `offsets`: a list of tensors shaped and typed as `query`.

        Offset 0 (APE, PCED: the chunk lies where it was encoded) gives `query` itself.
        """
        kind = self._rotary.kinds[layer]
        moved = tuple(sorted({o for o in offsets if o != 0}))
        if kind is None or not moved:
            return [query] * len(offsets)
        batch = query.shape[0]
        cos, sin = self._angles_of(kind, moved, query.device)
        # (offsets·batch, q_heads, n, head_dim): all turns of a layer in one rotation
        wide = query.float().repeat(len(moved), 1, 1, 1)
        if batch > 1:
            cos, sin = cos.repeat_interleave(batch, 0), sin.repeat_interleave(batch, 0)
        # the model's function rotates a query and a key; the key is one head that nobody reads
        turned = self._rotary.apply(wide, wide[:, :1], cos, sin)[0].to(query.dtype).tensor_split(len(moved))
        place = dict(zip(moved, turned, strict=True))
        return [place[o] if o != 0 else query for o in offsets]

    def _angles_of(self, kind: str, moved: tuple[int, ...], device: torch.device) -> Angles:
        key = (kind, moved)
        if key not in self._angles:
            positions = -torch.tensor(moved, device=device)[:, None]  # (offsets, 1): one turn for all rows
            self._angles[key] = self._rotary.angles(positions, kind)
        return self._angles[key]
