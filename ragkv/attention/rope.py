"""Place a chunk by rotating the query instead of the keys (docs/design.md).

A rotary score depends only on the difference of two positions: q at position i against a key encoded at j and placed at
j + o scores as R(-o)·q does against the key as it is stored. So the few query rows are rotated, in fp32, and the many
keys are read in place. The rotation is the model's own (`apply_rotary_pos_emb` and its `rotary_emb`), so that scaled,
partial and interleaved variants need no code here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Angles = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """A model's rotary embedding, as attention needs it.

    `apply(states, cos, sin)` rotates `(batch, heads, n, head_dim)` by cos/sin of `(batch, n, rotary_dim)`.
    `angles(positions, kind)` gives fp32 cos and sin *without* the attention scaling (YaRN folds it into both; applying
    it twice would inflate scores) for positions `(batch, n)`, negative ones included, on the positions' device.
    `kinds[l]` names layer l's frequencies (Gemma 3 has two kinds), or is None for a layer without RoPE, whose queries
    are never rotated.
    """

    apply: Callable[[Tensor, Tensor, Tensor], Tensor]
    angles: Callable[[Tensor, str], Angles]
    kinds: tuple[str | None, ...]

    def rotate(self, states: Tensor, layer: int, offsets: Tensor) -> Tensor:
        """R(offset)·states: `(batch, heads, n, head_dim)` by offsets `(batch, n)`; fp32 inside, same dtype out."""
        kind = self.kinds[layer]
        if kind is None:
            return states
        return self.apply(states.float(), *self.angles(offsets, kind)).to(states.dtype)

    def factors(self, offsets: Tensor, kind: str, head_dim: int) -> Angles:
        """cos and sin `(offsets, head_dim)` in fp32 such that R(o)·x = cos·x + sin·`quarter(x)`, element by element.

        Applying the model's function to ones shows what it does to each element: which angle belongs to which element
        (halves or pairs), and which elements it leaves alone (cos 1, sin 0).
        """
        cos, sin = self.angles(offsets[None], kind)  # (1, offsets, rotary_dim)
        ones = cos.new_ones((1, 1, cos.shape[1], head_dim))
        nought, unit = torch.zeros_like(cos), torch.ones_like(cos)
        still, along, across, sign = (
            self.apply(ones, c, s)[0, 0] for c, s in ((nought, nought), (cos, nought), (nought, sin), (nought, unit))
        )
        return along, torch.where(still != 0, 0.0, across / sign)

    def moving(self, layer: int, head_dim: int, device: torch.device) -> Tensor:
        """Which elements of a head a rotation changes, `(head_dim,)`; all of them in a layer without RoPE."""
        kind = self.kinds[layer]
        if kind is None:
            return torch.ones(head_dim, dtype=torch.bool, device=device)
        return self.factors(torch.ones(1, dtype=torch.long, device=device), kind, head_dim)[1][0] != 0

    def halves(self, kind: str, head_dim: int) -> tuple[slice, slice] | None:
        """The two halves of a head of which a rotation mixes the first elements, the second, and so on; None if it
        leaves elements alone or mixes others. For tensors on the processor.
        """
        mixed = self.quarter(torch.arange(1.0, head_dim + 1)[None, None, None], kind).flatten().abs()
        for halves in (slice(head_dim // 2), slice(head_dim // 2, None)), (slice(0, None, 2), slice(1, None, 2)):
            first, second = (torch.arange(1.0, head_dim + 1)[half] for half in halves)
            if head_dim % 2 == 0 and mixed[halves[0]].equal(second) and mixed[halves[1]].equal(first):
                return halves
        return None

    def quarter(self, states: Tensor, kind: str) -> Tensor:
        """`states` `(batch, heads, n, head_dim)` rotated by 90°; elements that the rotation leaves alone stay as they
        are.
        """
        return self.apply(states, *self.right_angle(kind, states.device))

    def right_angle(self, kind: str, device: torch.device) -> Angles:
        """cos 0 and sin 1, as `apply` takes them."""
        cos = self.angles(torch.zeros((1, 1), dtype=torch.long, device=device), kind)[0]
        return torch.zeros_like(cos), torch.ones_like(cos)


class QueryRotations:
    """The rotated queries of one forward pass. The factors are computed once per kind of frequencies, not once per
    layer.

    `offsets` are all offsets that the pass will need. A rotated query is cos·q + sin·(q rotated by 90°), so the model's
    own function runs once per layer, and each offset costs two passes over the query.
    """

    def __init__(self, rotary: Rotary, offsets: Sequence[int], device: torch.device) -> None:
        self._rotary = rotary
        self._rows = {offset: row for row, offset in enumerate(sorted(set(offsets)))}
        self._device = device
        self._moved = any(self._rows)
        self._factors: dict[tuple[str, int], Angles] = {}
        self._right: dict[str, Angles] = {}

    def of(self, query: Tensor, layer: int) -> QueryRotation | None:
        """The rotation of this layer's query `(1, q_heads, n, head_dim)`; None where nothing is rotated."""
        kind = self._rotary.kinds[layer]
        if kind is None or not self._moved:
            return None
        key = (kind, query.shape[-1])
        if key not in self._factors:
            back = -torch.tensor(list(self._rows)).to(self._device, non_blocking=True)
            self._factors[key] = self._rotary.factors(back, kind, query.shape[-1])
        if kind not in self._right:
            self._right[kind] = self._rotary.right_angle(kind, self._device)
        wide = query.contiguous().float()  # so that its heads are folded without a copy, whatever the offset
        quarter = self._rotary.apply(wide, *self._right[kind])
        return QueryRotation(wide, quarter, *self._factors[key], self._rows, query.dtype)


@dataclass(slots=True)
class QueryRotation:
    """One layer's query, prepared for rotation by any of the pass's offsets."""

    wide: Tensor
    quarter: Tensor
    cos: Tensor
    sin: Tensor
    rows: dict[int, int]
    dtype: torch.dtype
    _last: tuple[int, slice, Tensor] | None = None

    def by(self, offset: int | Tensor, tokens: slice | Tensor) -> Tensor:
        """R(-offset)·query of these tokens; a tensor `(n,)` of table indices rotates each token by its own offset."""
        if not isinstance(offset, int) or not isinstance(tokens, slice):
            return self._turned(self.rows[offset] if isinstance(offset, int) else offset, tokens)
        # chunks with the same offset follow each other
        if self._last is None or self._last[:2] != (offset, tokens):
            self._last = (offset, tokens, self._turned(self.rows[offset], tokens))
        return self._last[2]

    def _turned(self, row: int | Tensor, tokens: slice | Tensor) -> Tensor:
        turned = self.wide[:, :, tokens] * self.cos[row]
        return turned.addcmul_(self.quarter[:, :, tokens], self.sin[row]).to(self.dtype)
