"""Rows that read their first tokens in one step: questions, or chunks that are encoded, as one causal batch.

A row's own attention is a kernel call per layer, and for a question of a dozen tokens the call costs more than its
work. Rows of about one length are padded to the longest of them and read by one call. It is causal, so no token sees
the padding behind it, and no mask is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ragkv.attention.part import Part, partial_attention
from ragkv.attention.reading import Piece, Tokens
from ragkv.attention.stack import Stack

__all__ = ["Fresh", "fresh_of"]

MOST_TOKENS = 512
"""A longer row is worth a call of its own."""
PADDING = 1.25
"""The most places that a batch may have for each of its tokens."""


class Fresh:
    """Rows without own KV, and the new tokens of each."""

    def __init__(self, pieces: Sequence[Piece], device: torch.device) -> None:
        self._pieces = pieces
        self._longest = max(piece.n for piece in pieces)
        self.tokens: Tokens
        """Where their tokens stand in the step, row by row."""
        self._gather: Tensor | None = None
        ends = [piece.at + piece.n for piece in pieces]
        if all(p.n == self._longest for p in pieces) and ends[:-1] == [p.at for p in pieces[1:]]:
            self.tokens = slice(pieces[0].at, ends[-1])
            return
        places = torch.arange(self._longest)
        at, n = (torch.tensor(numbers)[:, None] for numbers in zip(*((p.at, p.n) for p in pieces), strict=True))
        real = (places < n).flatten().nonzero()[:, 0]
        gather = (at + places.minimum(n - 1)).flatten()  # (rows · longest): padding repeats the row's last token
        told = torch.cat([gather, real, gather[real]]).to(device, non_blocking=True)
        self._gather, self._real, self.tokens = torch.split(told, [len(gather), len(real), len(real)])

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, softcap: float | None
    ) -> Part:
        """Append the new tokens and attend over them; of `(1, heads, N, head_dim)`, for `tokens` of them."""
        for piece in self._pieces:
            new = slice(piece.at, piece.at + piece.n)
            piece.row.own.append(layer, key[:, :, new], value[:, :, new])
        query, key, value = (self._rows(states) for states in (query, key, value))
        part = partial_attention(query, key, value, scale=scale, mask="causal", softcap=softcap)
        out, lse = part.out.transpose(0, 1).flatten(1, 2), part.lse.transpose(0, 1).flatten(1, 2)
        if self._gather is not None:
            out, lse = out[:, self._real], lse[:, self._real]
        return Part(out[None], lse[None])

    def _rows(self, states: Tensor) -> Tensor:
        """`(1, heads, N, head_dim)` as `(rows, heads, longest, head_dim)`."""
        which = self.tokens if self._gather is None else self._gather
        heads, head_dim = states.shape[1], states.shape[3]
        rows = states[0, :, which].reshape(heads, len(self._pieces), self._longest, head_dim)
        return rows.transpose(0, 1)


def fresh_of(pieces: Iterable[Piece], window: int | None, device: torch.device) -> tuple[list[Fresh], list[Piece]]:
    """Those of the pieces that are read together, longest first, and the others."""
    found: list[Piece] = []
    others: list[Piece] = []
    for piece in pieces:
        short = 1 < piece.n <= (MOST_TOKENS if window is None else min(window, MOST_TOKENS))
        together = short and not piece.row.own.length and not isinstance(piece.row, Stack)
        (found if together else others).append(piece)
    batches: list[list[Piece]] = []
    tokens = 0
    for piece in sorted(found, key=lambda each: (-each.n, each.at)):
        if batches and batches[-1][0].n * (len(batches[-1]) + 1) <= PADDING * (tokens + piece.n):
            batches[-1].append(piece)
            tokens += piece.n
        else:
            batches.append([piece])
            tokens = piece.n
    alone = {piece.at for batch in batches if len(batch) == 1 for piece in batch}
    others += [piece for piece in found if piece.at in alone]
    return [Fresh(batch, device) for batch in batches if len(batch) > 1], others
