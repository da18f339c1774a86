"""Place a chunk by rotating the query instead of the keys (docs/design.md).

A rotary score depends only on the difference of two positions: q at position i against a key encoded at j and placed at
j + o scores as R(-o)·q does against the key as it is stored. So the few queries are rotated, in fp32, and the many keys
are read in place. The rotation is the model's own (`apply_rotary_pos_emb` and its `rotary_emb`), so scaled, partial and
interleaved variants need no code here.
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
        """cos and sin `(offsets, head_dim)` in fp32 such that R(o)·x = cos·x + sin·(x rotated by 90°), by element.

        Applying the model's function to ones shows its effect on each element: which angle belongs to which element
        (halves or pairs), and which elements it does not change (cos 1, sin 0).
        """
        cos, sin = self.angles(offsets[None], kind)  # (1, offsets, rotary_dim)
        ones = cos.new_ones((1, 1, cos.shape[1], head_dim))
        nought, unit = torch.zeros_like(cos), torch.ones_like(cos)
        still, along, across, sign = (
            self.apply(ones, c, s)[0, 0] for c, s in ((nought, nought), (cos, nought), (nought, sin), (nought, unit))
        )
        return along, torch.where(still != 0, 0.0, across / sign)

    def moving(self, layer: int, head_dim: int, device: torch.device) -> Tensor:
        """Which elements of a head a rotation changes, `(head_dim,)`; all True for a layer without RoPE."""
        kind = self.kinds[layer]
        if kind is None:
            return torch.ones(head_dim, dtype=torch.bool, device=device)
        return self.factors(torch.ones(1, dtype=torch.long, device=device), kind, head_dim)[1][0] != 0

    def partners(self, kind: str, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """`(head_dim,)` each, on the CPU: the element of a head that a rotation mixes into each one, and its sign.

        R(o)·x = cos·x + sin·sign·x[partner], by `factors`. An unchanged element is its own partner. Angles are computed
        on `device`, and not read back.
        """
        size = self.angles(torch.zeros((1, 1), dtype=torch.long, device=device), kind)[0].shape
        numbered = torch.arange(1, head_dim + 1, dtype=torch.float32)[None, None, None]
        cos, sin = (torch.full(size, number, dtype=torch.float32) for number in (0.0, 1.0))  # by 90°
        rotated = self.apply(numbered, cos, sin).flatten()
        return rotated.abs().long() - 1, rotated.sign()

    def halves(self, kind: str, head_dim: int) -> tuple[slice, slice] | None:
        """The two halves of a head if a rotation mixes each element of one with the same element of the other; None if
        it mixes others or leaves some unchanged.
        """
        partners, places = self.partners(kind, head_dim, torch.device("cpu"))[0], torch.arange(head_dim)
        for first, other in (
            (slice(head_dim // 2), slice(head_dim // 2, None)),
            (slice(0, None, 2), slice(1, None, 2)),
        ):
            mixed = head_dim % 2 == 0 and partners[first].equal(places[other])
            if mixed and partners[other].equal(places[first]):
                return first, other
        return None


class QueryRotations:
    """The rotated queries of one forward pass. The factors are computed once per kind of frequencies, not once per
    layer.

    `offsets` are all offsets that the pass will need. A rotated query is cos·q + sin·(q's partners), so each offset
    costs two passes over the query.
    """

    def __init__(self, rotary: Rotary, offsets: Sequence[int], device: torch.device) -> None:
        self._rotary = rotary
        self._rows = {offset: row for row, offset in enumerate(sorted(set(offsets)))}
        self._device = device
        self._moved = any(self._rows)
        self._tables: dict[tuple[str, int], RotationTable] = {}

    def of(self, query: Tensor, layer: int) -> QueryRotation | None:
        """The rotation of this layer's query `(1, q_heads, n, head_dim)`; None where nothing is rotated."""
        kind = self._rotary.kinds[layer]
        if kind is None or not self._moved:
            return None
        key = (kind, query.shape[-1])
        if key not in self._tables:
            self._tables[key] = self._table(*key)
        return QueryRotation(query, self._tables[key], self._rows)

    def _table(self, kind: str, head_dim: int) -> RotationTable:
        back = -torch.tensor(list(self._rows)).to(self._device, non_blocking=True)
        return RotationTable.of(self._rotary, back, kind, head_dim)


@dataclass(frozen=True, slots=True, eq=False)
class RotationTable:
    """cos and signed sin of some offsets, `(offsets, head_dim)`, and the partners, which may be the head's `halves`."""

    cos: Tensor
    sin: Tensor
    partners: Tensor
    halves: bool

    @classmethod
    def of(cls, rotary: Rotary, offsets: Tensor, kind: str, head_dim: int) -> RotationTable:
        """The table of `offsets` `(n,)`, on their device."""
        cos, sin = rotary.factors(offsets, kind, head_dim)
        partners, sign = rotary.partners(kind, head_dim, offsets.device)
        halves = partners.equal(torch.arange(head_dim).roll(head_dim // 2))
        partners, sign = (each.to(offsets.device, non_blocking=True) for each in (partners, sign))
        return cls(cos, sin * sign, partners, halves)

    def widened(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """`(…, head_dim)` in fp32, and the partner of each element, both contiguous."""
        wide = states.to(torch.float32, memory_format=torch.contiguous_format)
        if not self.halves:
            return wide, wide.index_select(-1, self.partners)
        half = wide.shape[-1] // 2
        return wide, torch.cat([wide[..., half:], wide[..., :half]], -1)


@dataclass(slots=True)
class QueryRotation:
    """One layer's query, prepared for rotation by any of the pass's offsets."""

    query: Tensor
    table: RotationTable
    rows: dict[int, int]
    _wide: tuple[Tensor, Tensor] | None = None
    _last: tuple[int, slice, Tensor] | None = None

    def by(self, offset: int | Tensor, tokens: slice | Tensor) -> Tensor:
        """R(-offset)·query of these tokens; a tensor `(n,)` of table indices rotates each token by its own offset."""
        if not isinstance(offset, int) or not isinstance(tokens, slice):
            return self._rotated(self.rows[offset] if isinstance(offset, int) else offset, tokens)
        # chunks with the same offset are adjacent
        if self._last is None or self._last[:2] != (offset, tokens):
            self._last = (offset, tokens, self._rotated(self.rows[offset], tokens))
        return self._last[2]

    def _rotated(self, row: int | Tensor, tokens: slice | Tensor) -> Tensor:
        if self._wide is None:  # contiguous, so that heads are folded without a copy at any offset
            self._wide = self.table.widened(self.query)
        wide, partner = self._wide
        rotated = wide[:, :, tokens] * self.table.cos[row]
        return rotated.addcmul_(partner[:, :, tokens], self.table.sin[row]).to(self.query.dtype)
