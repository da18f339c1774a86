"""Rows that take one token in a step, read together over their own tokens (`ragkv.attention.slab`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ragkv.attention.part import Part, partial_attention
from ragkv.attention.reading import Piece, Tokens
from ragkv.attention.slab import Slab, SlabKV

__all__ = ["Singles", "singles_of"]


class Singles:
    """Single tokens of rows in one slab."""

    def __init__(self, slab: Slab, pieces: Sequence[Piece], slots: Sequence[int], device: torch.device) -> None:
        self._slab = slab
        order = sorted(range(len(slots)), key=lambda i: slots[i])
        at = [pieces[i].at for i in order]
        told = torch.tensor([[slots[i] for i in order], [pieces[i].row.own.length for i in order], at])
        self._slots, self._places, tokens = told.to(device, non_blocking=True)
        self._height = max(slots) + 1
        self._whole = len(slots) == self._height
        self.tokens: Tokens = slice(at[0], at[-1] + 1) if at == list(range(at[0], at[0] + len(at))) else tokens
        """Where they stand in the step, in the order of the slots."""
        lengths = [0] * self._height
        for piece, slot in zip(pieces, slots, strict=True):
            lengths[slot] = piece.row.own.length + 1
        self._lengths = lengths
        self._masks: dict[int | None, Tensor | None] = {}
        self._device = device

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        softcap: float | None,
        window: int | None,
    ) -> Part:
        """Write the new tokens and attend over each row's own; of `(1, heads, N, head_dim)`, for `tokens` of them."""
        slab = self._slab
        slab.make(layer, key, value)
        new_keys, new_values, queries = (t[0, :, self.tokens].transpose(0, 1) for t in (key, value, query))
        slab.write(layer, self._slots, self._places, new_keys, new_values)
        longest = max(self._lengths)
        keys, values = (t[layer][: self._height, :, :longest] for t in (slab.keys, slab.values))
        if not self._whole:  # rows between them that take no token: computed with the others, and dropped
            spread = queries.new_zeros((self._height, *queries.shape[1:]))
            spread[self._slots] = queries
            queries = spread
        part = partial_attention(
            queries[:, :, None], keys, values, scale=scale, mask=self._mask(window), softcap=softcap
        )
        out, lse = part.out[:, :, 0], part.lse[:, :, 0]
        if not self._whole:
            out, lse = out[self._slots], lse[self._slots]
        return Part(out.transpose(0, 1)[None], lse.transpose(0, 1)[None])

    def _mask(self, window: int | None) -> Tensor | None:
        """`(rows, 1, m)`, True where a row's single token sees; None when all see all."""
        if window not in self._masks:
            longest = max(self._lengths)
            firsts = [0 if window is None else max(0, length - window) for length in self._lengths]
            if min(self._lengths) == longest and not any(firsts):
                self._masks[window] = None
            else:
                # a row without a token sees one, so that no number is none
                bounds = torch.tensor([firsts, [max(length, 1) for length in self._lengths]])
                first, end = bounds.to(self._device, non_blocking=True)[:, :, None, None]
                places = torch.arange(longest, device=self._device)
                self._masks[window] = (places >= first) & (places < end)
        return self._masks[window]


def singles_of(pieces: Sequence[Piece], device: torch.device) -> tuple[list[Singles], list[Piece]]:
    """The pieces that are read together, and the others."""
    found: dict[int, list[tuple[Piece, Slab, int]]] = {}
    for piece in pieces:
        own = piece.row.own
        if piece.n == 1 and isinstance(own, SlabKV) and own.slab is not None and own.length < own.slab.capacity:
            found.setdefault(id(own.slab), []).append((piece, own.slab, own.slot))
    singles = []
    together: set[int] = set()
    for uses in found.values():
        slots = [slot for _, _, slot in uses]
        if len(uses) > 1 and 2 * len(uses) > max(slots):  # else most of what is read is nobody's
            singles.append(Singles(uses[0][1], [piece for piece, _, _ in uses], slots, device))
            together.update(piece.at for piece, _, _ in uses)
    return singles, [piece for piece in pieces if piece.at not in together]
