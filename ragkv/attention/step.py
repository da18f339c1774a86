"""One forward pass of many rows: what its layers attend with.

All new tokens of a step are one sequence `(1, N)` to the model. Here each of them finds its own row again: the row's
own tokens, and the chunks that the row sees, each of which is read once for all rows (`ragkv.attention.reading`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ragkv.attention.across import Ranks, merged_across
from ragkv.attention.fresh import Fresh, fresh_of
from ragkv.attention.part import Mask, Part, merge_parts, merge_some, partial_attention
from ragkv.attention.reading import Piece, Plan, Reading, Tokens
from ragkv.attention.rope import Rotary, Turning, Turns
from ragkv.attention.row import Row
from ragkv.attention.single import singles_of
from ragkv.attention.stack import Stack

__all__ = ["KVComplete", "Step", "beside"]


class KVComplete(Exception):  # noqa: N818 - no error
    """Every layer has its keys and values, and nothing else of the pass is wanted."""


class Step:
    """New tokens of some rows, each row once; what the layers of a forward pass attend by.

    `counts[i]` tokens of `rows[i]`. The rows' own KV grows by them, and counts once `commit` is called. With `last`,
    the number of the last layer that has keys of its own, the pass is for keys and values alone: that layer raises
    `KVComplete` as soon as it has them. `shared` tells of layers that read another's keys which one's. With `ranks`,
    all of them take the same step, and each reads the chunks that it holds.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        counts: Sequence[int],
        rotary: Rotary,
        device: torch.device,
        *,
        last: int | None = None,
        shared: Mapping[int, int] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        ends = list(itertools.accumulate(counts))
        self.pieces = [Piece(row=row, at=end - n, n=n) for row, n, end in zip(rows, counts, ends, strict=True)]
        self._last = last
        self._shared = shared or {}
        self._rotary = rotary
        self._ranks = ranks
        self._sites = {device: _Site(self.pieces, rotary, device)}

    @property
    def positions(self) -> list[int]:
        """Every new token's position."""
        return [i for p in self.pieces for i in p.row.places(p.n)]

    @property
    def kept(self) -> list[int]:
        """Indices of the new tokens whose logits are wanted: each row's last."""
        return [p.at + i for p in self.pieces for i in p.row.kept(p.n)]

    def commit(self) -> None:
        """Count the new tokens: all layers have them."""
        for piece in self.pieces:
            piece.row.own.commit(piece.n)
            piece.row.own.shared = self._shared
            piece.row.position += piece.n

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        window: int | None = None,
        sink: Tensor | None = None,
    ) -> Tensor:
        """One layer's attention of the new tokens over their rows' contexts and own tokens.

        `query` `(1, q_heads, N, head_dim)`, `key`/`value` `(1, kv_heads, N, head_dim)`, rotated by the model for
        `positions`. `window` is the layer's sliding window: a query at i sees keys at i-window+1..i. `sink`
        `(q_heads,)` is one more score in every token's softmax, with nothing to read there (gpt-oss).
        Returns `(1, q_heads, N, head_dim)` in the query's dtype.
        """
        if layer == self._last:
            for piece in self.pieces:
                new = slice(piece.at, piece.at + piece.n)
                piece.row.own.append(layer, key[:, :, new], value[:, :, new])
            raise KVComplete
        held = self._shared.get(layer, layer)  # written again by a layer that shares it: the very same numbers
        site = self._site(query.device)
        own = site.own(held, query, key, value, scale=scale, softcap=softcap, window=window)
        plan = site.plan
        readings = plan.readings(window)
        spread = () if self._ranks is None else plan.spread(window)
        if not readings and not spread:
            return beside(sink, own).to(query.dtype)
        turning = site.turns.of(query, layer)
        whole = slice(0, plan.tokens)
        groups: dict[int, list[tuple[Tokens, Part]]] = {0: [(whole, own)]}
        mine: dict[int, list[tuple[Tokens, Part]]] = {}  # of chunks that only some rank has
        for reading in readings:
            part = _read(reading, held, query, turning, scale=scale, softcap=softcap)
            into = groups if self._ranks is None or reading.kv.owner is None else mine
            into.setdefault(reading.group, []).append((reading.tokens, part))
        if self._ranks is not None and spread:
            for (number, tokens), part in zip(spread, merged_across(self._ranks, mine, spread, own), strict=True):
                groups.setdefault(number, []).append((tokens, part))
        for weight in plan.weights:
            if weight.group in groups:  # else its chunks are all out of the window
                group = merge_some(groups.pop(weight.group), plan.tokens)
                entering = group.lse[..., weight.tokens] * weight.factor + weight.addend
                groups[0].append((weight.tokens, Part(group.out[:, :, weight.tokens], entering)))
        return beside(sink, merge_some(groups[0], plan.tokens)).to(query.dtype)

    def _site(self, device: torch.device) -> _Site:
        """What the layers on this device attend with; a second one has it made when the first of its layers asks."""
        if device not in self._sites:
            self._sites[device] = _Site(self.pieces, self._rotary, device)
        return self._sites[device]


class _Site:
    """A step on one device: the plan of its readings, the turns of its queries, and the masks of its rows."""

    def __init__(self, pieces: Sequence[Piece], rotary: Rotary, device: torch.device) -> None:
        self.plan = Plan(pieces, device)
        self.turns = Turns(rotary, self.plan.offsets, device)
        self._singles, self._alone = singles_of(pieces, device)
        self._device = device
        self._masks: dict[tuple[int, int | None], Tensor] = {}
        self._fresh: dict[int | None, tuple[list[Fresh], list[Piece]]] = {}

    def own(
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
        """Every new token over the tokens of its own row."""
        if window not in self._fresh:
            self._fresh[window] = fresh_of(self._alone, window, self._device)
        fresh, alone = self._fresh[window]
        parts: list[tuple[Tokens, Part]] = [
            (batch.tokens, batch.attend(layer, query, key, value, scale=scale, softcap=softcap)) for batch in fresh
        ]
        for single in self._singles:
            part = single.attend(layer, query, key, value, scale=scale, softcap=softcap, window=window)
            parts.append((single.tokens, part))
        for piece in alone:
            if isinstance(piece.row, Stack):
                seen = self._visible(piece, window)
                part = _stacked_part(piece, layer, query, key, value, seen, scale=scale, softcap=softcap)
            else:
                part = _own_part(piece, layer, query, key, value, scale=scale, softcap=softcap, window=window)
            parts.append((slice(piece.at, piece.at + piece.n), part))
        return _put_together(parts, query)

    def _visible(self, piece: Piece, window: int | None) -> Tensor:
        """What a stack's new tokens see of it; made once for all layers with this window."""
        assert isinstance(piece.row, Stack)
        key = (piece.at, window)
        if key not in self._masks:
            self._masks[key] = piece.row.visible(piece.n, window, self._device)
        return self._masks[key]


def _read(
    reading: Reading,
    layer: int,
    query: Tensor,
    turning: Turning | None,
    *,
    scale: float,
    softcap: float | None,
) -> Part:
    """The part of one chunk, for all tokens that see it."""
    if turning is None or (isinstance(reading.offset, int) and reading.offset == 0):
        rows = query[:, :, reading.tokens]
    else:
        rows = turning.by(reading.offset, reading.tokens)
    key, value = reading.kv.keys[layer][None], reading.kv.values[layer][None]
    if reading.first:
        key, value = key[:, :, reading.first :], value[:, :, reading.first :]
    return partial_attention(
        rows, key, value, scale=scale, temperature=reading.temperature, mask=reading.mask, softcap=softcap
    )


def _own_part(
    piece: Piece,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> Part:
    """Causal attention of a row's new tokens over all tokens of its own."""
    new = slice(piece.at, piece.at + piece.n)
    query, key, value = query[:, :, new], key[:, :, new], value[:, :, new]
    keys, values = piece.row.own.append(layer, key, value)
    n, m = piece.n, keys.shape[2]
    if n == 1:
        first = 0 if window is None else max(0, m - window)
        return partial_attention(query, keys[:, :, first:], values[:, :, first:], scale=scale, softcap=softcap)
    if window is None or m <= window:
        new_part = partial_attention(query, key, value, scale=scale, mask="causal", softcap=softcap)
        if n == m:
            return new_part
        before = partial_attention(query, keys[:, :, : m - n], values[:, :, : m - n], scale=scale, softcap=softcap)
        return merge_parts([before, new_part])
    first = max(0, m - n - window + 1)
    behind = torch.arange(m - n, m, device=query.device)[:, None] - torch.arange(first, m, device=query.device)
    mask: Mask = (behind >= 0) & (behind < window)
    return partial_attention(query, keys[:, :, first:], values[:, :, first:], scale=scale, mask=mask, softcap=softcap)


def _stacked_part(
    piece: Piece,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    *,
    scale: float,
    softcap: float | None,
) -> Part:
    """Attention of a stack's new tokens over those of its tokens that they see."""
    new = slice(piece.at, piece.at + piece.n)
    keys, values = piece.row.own.append(layer, key[:, :, new], value[:, :, new])
    return partial_attention(query[:, :, new], keys, values, scale=scale, mask=visible, softcap=softcap)


def _put_together(parts: Sequence[tuple[Tokens, Part]], query: Tensor) -> Part:
    """Parts of some tokens each, every token in one of them, as one part of all tokens."""
    if len(parts) == 1 and isinstance(parts[0][0], slice):
        return parts[0][1]
    batch, q_heads, tokens, _ = query.shape
    out = query.new_empty((batch, q_heads, tokens, parts[0][1].out.shape[-1]))
    lse = query.new_empty((batch, q_heads, tokens), dtype=torch.float32)
    for which, part in parts:
        out[:, :, which], lse[:, :, which] = part.out, part.lse
    return Part(out, lse)


def beside(sink: Tensor | None, part: Part) -> Tensor:
    """The output of all that the tokens see, once a sink has had its share: a part of lse `sink` whose output is 0."""
    if sink is None:
        return part.out
    share = torch.sigmoid(part.lse - sink.float()[:, None])  # (batch, q_heads, n)
    return part.out.float() * share[..., None]
