"""The step turned inside out: for each chunk KV, the rows that see it, so that one call reads it for all of them.

A plan is made once per forward pass on the host, from positions that the host knows; every layer follows it. Layers
that differ in their sliding window see different keys, so there is one list of readings for each window.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ragkv.attention.kv import ChunkKV, Segment
from ragkv.attention.row import Group, Row

__all__ = ["Piece", "Plan", "Reading", "Tokens"]

Tokens = slice | Tensor
"""Some of a step's tokens, in their order: a slice, or their indices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One row's new tokens in a step: the `n` tokens from the step's token `at` on."""

    row: Row
    at: int
    n: int

    @property
    def last(self) -> int:
        """Position of the last of them."""
        return self.row.position + self.n - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One chunk KV, read once for all tokens that see it.

    `offset` is how far the prompts moved the chunk, one number, or for each token the row of the pass's table of
    turns. Keys before `first` are seen by none of the tokens; `mask` `(n, m)` is True where one of the others is seen,
    None when all are. `group` 0 is ordinary attention; the others are merged and weighed first.
    """

    kv: ChunkKV
    tokens: Tokens
    offset: int | Tensor
    temperature: float
    group: int
    first: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """How a weighed group enters the softmax of the tokens that see it: a·lse + b, `(n,)` each."""

    group: int
    tokens: Tokens
    factor: Tensor
    addend: Tensor


class Plan:
    """Which chunks the new tokens of a step read, and how."""

    def __init__(self, pieces: Sequence[Piece], device: torch.device) -> None:
        self.pieces = tuple(pieces)
        self.tokens = sum(piece.n for piece in pieces)
        self._device = device
        self._seen = _seen(pieces)
        places = sorted({s.offset for uses in self._seen.values() for _, s in uses})
        self._rows = {offset: row for row, offset in enumerate(places)}
        self._readings: dict[int | None, tuple[Reading, ...]] = {}
        self._spread: dict[int | None, tuple[tuple[int, Tokens], ...]] = {}
        self.weights = self._weights()

    @property
    def offsets(self) -> list[int]:
        """All offsets of all segments, each once, rising; a reading's table of turns has them in this order."""
        return list(self._rows)

    def readings(self, window: int | None) -> tuple[Reading, ...]:
        """What a layer with this sliding window reads: a token at i sees keys at i-window+1..i."""
        if window not in self._readings:
            here = ((key, uses) for key, uses in self._seen.items() if uses[0][1].kv.here)
            found = (self._reading(key, uses, window) for key, uses in here)
            self._readings[window] = tuple(reading for reading in found if reading is not None)
        return self._readings[window]

    def spread(self, window: int | None) -> tuple[tuple[int, Tokens], ...]:
        """The groups that see chunks of which each lies on one rank, and whose tokens these are: alike on all ranks."""
        if window not in self._spread:
            found: dict[int, dict[int, Piece]] = {}
            for (_, _, group, _), uses in self._seen.items():
                for piece, seg in uses:
                    near = window is None or seg.end > piece.row.position - window + 1
                    if near and seg.kv.owner is not None:
                        found.setdefault(group, {})[piece.at] = piece
            self._spread[window] = tuple(
                (group, _tokens([found[group][at] for at in sorted(found[group])], self._device))
                for group in sorted(found)
            )
        return self._spread[window]

    def _reading(
        self, key: tuple[int, float, int, int], uses: list[tuple[Piece, Segment]], window: int | None
    ) -> Reading | None:
        _, temperature, group, _ = key
        first, masked = 0, False
        if window is not None:
            uses = [(piece, seg) for piece, seg in uses if seg.end > piece.row.position - window + 1]
            if not uses:
                return None
            first = max(0, min(piece.row.position - window + 1 - seg.start for piece, seg in uses))
            masked = any(piece.last - seg.start - first >= window for piece, seg in uses)
        kv = uses[0][1].kv
        mask = None
        if masked and window is not None:
            # where each token stands, seen from the chunk's first token
            behind = torch.cat(
                [torch.arange(p.row.position - s.start, p.row.position - s.start + p.n) for p, s in uses]
            ).to(self._device, non_blocking=True)
            mask = behind[:, None] - torch.arange(first, kv.tokens, device=self._device) < window
        offsets = {seg.offset for _, seg in uses}
        offset: int | Tensor
        if len(offsets) == 1:
            [offset] = offsets
        else:
            offset = torch.tensor([self._rows[s.offset] for p, s in uses for _ in range(p.n)]).to(
                self._device, non_blocking=True
            )
        return Reading(
            kv=kv,
            tokens=_tokens([piece for piece, _ in uses], self._device),
            offset=offset,
            temperature=temperature,
            group=group,
            first=first,
            mask=mask,
        )

    def _weights(self) -> list[Weight]:
        found: dict[int, list[tuple[Piece, tuple[float, float]]]] = {}
        for piece in self.pieces:
            for group, each in _numbered(piece.row):
                if group:
                    found.setdefault(group, []).append((piece, each.weight))
        weights = []
        for group, uses in found.items():
            pairs = torch.tensor([weight for piece, weight in uses for _ in range(piece.n)]).to(
                self._device, non_blocking=True
            )
            tokens = _tokens([piece for piece, _ in uses], self._device)
            weights.append(Weight(group=group, tokens=tokens, factor=pairs[:, 0], addend=pairs[:, 1]))
        return weights


def _numbered(row: Row) -> Iterator[tuple[int, Group]]:
    """The row's groups with their numbers: 0 for all that are ordinary attention, then one by one."""
    weighed = 0
    for group in row.groups:
        if group.plain:
            yield 0, group
        else:
            weighed += 1
            yield weighed, group


def _seen(pieces: Sequence[Piece]) -> dict[tuple[int, float, int, int], list[tuple[Piece, Segment]]]:
    """(chunk KV, temperature, group, time) -> who sees it; a row that sees one KV twice does so at two times."""
    found: dict[tuple[int, float, int, int], list[tuple[Piece, Segment]]] = {}
    for piece in pieces:
        times: Counter[tuple[int, float, int]] = Counter()
        for number, group in _numbered(piece.row):
            for segment in group.segments:
                if not segment.kv.tokens:
                    continue
                key = (id(segment.kv), group.temperature, number)
                found.setdefault((*key, times[key]), []).append((piece, segment))
                times[key] += 1
    return found


def _tokens(pieces: Sequence[Piece], device: torch.device) -> Tokens:
    """The pieces' tokens: a slice where they stand next to each other."""
    if all(before.at + before.n == after.at for before, after in itertools.pairwise(pieces)):
        return slice(pieces[0].at, pieces[-1].at + pieces[-1].n)
    return torch.cat([torch.arange(p.at, p.at + p.n) for p in pieces]).to(device, non_blocking=True)
