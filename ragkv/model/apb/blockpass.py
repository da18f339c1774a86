"""The attention of one block: over prefix and anchor, over what earlier blocks pass on, and over itself (§3.6, Eq. 2).

Keys stand where they were rotated for, so no query is turned. What is passed on has no queries: it takes part in
attention alone. In each layer a block first chooses what it passes on, then exchanges it, then attends; so blocks may
run one after another, or side by side on several ranks, with the same tensor operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ragkv.attention.kv import ChunkKV
from ragkv.attention.ownkv import OwnKV
from ragkv.attention.part import Part, merge_parts, partial_attention
from ragkv.attention.rope import Rotary
from ragkv.attention.step import KVComplete, beside
from ragkv.model.apb.compressor import Compressor, Local, chosen

__all__ = ["BlockPass", "Exchange", "Kept", "Seeing", "gathered"]

WINDOW_STEP = 256
"""So many tokens at a time read their sliding window."""
MERGE_STEP = 512
"""So many tokens at a time are merged: their parts in fp32 stay in a processor's cache."""


class Kept(NamedTuple):
    """C_h, what a block passes on in one layer: keys, values `(kv_heads, p, head_dim)`, positions `(kv_heads, p)`."""

    key: Tensor
    value: Tensor
    positions: Tensor


class Exchange(Protocol):
    """How what a block passes on comes to the later ones."""

    def swap(self, block: int, layer: int, mine: Kept) -> Sequence[Kept]:
        """Give what `block` passes on in `layer`; what all blocks before it do, first to last (AllGather, §3.5).

        Called once for each block and layer that has keys of its own, the layers of a block in order.
        """


def gathered(key: Tensor, value: Tensor, which: Tensor, position: int) -> Kept:
    """The tokens `which` `(kv_heads, p)` of a block whose first one stands at `position`, with where they stand."""

    def taken(states: Tensor) -> Tensor:
        return states.gather(1, which[..., None].expand(-1, -1, states.shape[-1]))

    return Kept(taken(key), taken(value), which + position)


class Seeing:
    """A causal sequence of tokens from `position` on that sees `before` as well: KV where it was encoded."""

    def __init__(self, before: Sequence[ChunkKV], position: int, *, last: int, shared: Mapping[int, int]) -> None:
        self._before = before
        self._position = position
        self._last = last
        self._shared = shared
        self.own = OwnKV(reserve=0)

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
        """As `ragkv.attention.step.Step.attend`, of `(1, heads, n, head_dim)`."""
        held = self._shared.get(layer, layer)
        if held == layer:
            self.own.append(layer, key, value)
            self.layer_known(layer, query, key, value, scale)
        if layer == self._last:
            raise KVComplete
        keys, values, positions = self._seen(held, key)
        seen = (keys, values, None if window is None else positions)
        own = self._own(query, key, value, scale=scale, softcap=softcap, window=window)
        part = _with_context(own, query, *seen, position=self._position, scale=scale, softcap=softcap, window=window)
        return beside(sink, part).to(query.dtype)

    def layer_known(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
        """A layer of its own keys has them."""

    def passed(self, layer: int) -> Sequence[Kept]:
        """What earlier blocks pass on in this layer."""
        return ()

    def done(self, tokens: int) -> ChunkKV:
        """The KV of all tokens, after the pass."""
        self.own.commit(tokens)
        self.own.shared = self._shared
        return self.own.chunk_kv(encoded_at=self._position)

    def _seen(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values `(1, kv_heads, m, head_dim)` that all tokens see, and the keys' positions `(kv_heads, m)`."""
        heads = like.shape[1]
        places = [
            torch.arange(kv.encoded_at, kv.encoded_at + kv.tokens, device=like.device).expand(heads, -1)
            for kv in self._before
        ]
        found = [Kept(kv.keys[layer], kv.values[layer], at) for kv, at in zip(self._before, places, strict=True)]
        found += self.passed(layer)
        if not found:
            nothing = like[0, :, :0]
            return nothing[None], nothing[None], torch.empty((heads, 0), dtype=torch.long, device=like.device)
        keys, values, positions = (torch.cat(each, 1) for each in zip(*found, strict=True))
        return keys[None], values[None], positions

    def _own(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, softcap: float | None, window: int | None
    ) -> Part:
        """Causal attention over the sequence itself."""
        n = key.shape[2]
        if window is None or n <= window:
            return partial_attention(query, key, value, scale=scale, mask="causal", softcap=softcap)
        parts = []
        for start in range(0, n, WINDOW_STEP):
            end, first = min(start + WINDOW_STEP, n), max(0, start - window + 1)
            behind = torch.arange(start, end, device=key.device)[:, None] - torch.arange(first, end, device=key.device)
            mask = (behind >= 0) & (behind < window)
            near = key[:, :, first:end], value[:, :, first:end]
            parts.append(partial_attention(query[:, :, start:end], *near, scale=scale, mask=mask, softcap=softcap))
        return Part(torch.cat([p.out for p in parts], 2), torch.cat([p.lse for p in parts], 2))


class BlockPass(Seeing):
    """One block: it passes on what `compressor` chooses of its `candidates`, at most `most` tokens per kv head."""

    def __init__(
        self,
        block: int,
        before: Sequence[ChunkKV],
        position: int,
        exchange: Exchange,
        compressor: Compressor,
        *,
        candidates: range,
        most: int,
        rotary: Rotary,
        last: int,
        shared: Mapping[int, int],
    ) -> None:
        super().__init__(before, position, last=last, shared=shared)
        self._block = block
        self._exchange = exchange
        self._compressor = compressor
        self._candidates = candidates
        self._most = most
        self._rotary = rotary
        self._passed: dict[int, Sequence[Kept]] = {}
        self.chosen: dict[int, Tensor] = {}
        """By layer, the block's tokens that are passed on, `(kv_heads, p)`."""

    def layer_known(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
        which = torch.empty((key.shape[1], 0), dtype=torch.long, device=key.device)
        if self._most:
            first = self._candidates.start
            which = chosen(self._compressor, self._local(layer, query, key, value, scale), self._most) + first
        self.chosen[layer] = which
        kept = gathered(key[0], value[0], which, self._position)
        self._passed[layer] = self._exchange.swap(self._block, layer, kept)

    def passed(self, layer: int) -> Sequence[Kept]:
        return self._passed[layer]

    def _local(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Local:
        which = slice(self._candidates.start, self._candidates.stop)
        q, k, v = query[:, :, which], key[:, :, which], value[:, :, which]
        position = self._position + which.start

        def unturned() -> tuple[Tensor, Tensor]:
            back = -torch.arange(position, position + k.shape[2], device=k.device)[None]
            return self._rotary.rotate(q, layer, back)[0], self._rotary.rotate(k, layer, back)[0]

        return Local(layer=layer, position=position, query=q[0], key=k[0], value=v[0], scale=scale, unturned=unturned)


def _with_context(
    own: Part,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor | None,
    *,
    position: int,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> Part:
    """`own` merged with what all tokens see, or, of a sliding window, what is near enough to each by its position."""
    if positions is None or window is None:
        if not keys.shape[2]:
            return own
        return _merged(partial_attention(query, keys, values, scale=scale, softcap=softcap), own)
    heads, n = keys.shape[1], query.shape[2]
    near = (positions > position - window).any(0)
    if not bool(near.any()):
        return own
    keys, values, positions = keys[:, :, near], values[:, :, near], positions[:, near]
    reach = min(n, int(positions.max()) + window - position)  # later tokens see none of them
    if reach < 1:
        return own
    behind = torch.arange(position, position + reach, device=keys.device)[:, None] - positions[:, None, :]
    # (kv_heads, g, reach, head_dim): a mask for each kv head
    grouped = query[0, :, :reach].reshape(heads, -1, reach, query.shape[-1])
    part = partial_attention(
        grouped, keys[0, :, None], values[0, :, None], scale=scale, mask=behind < window, softcap=softcap
    )
    seen = Part(part.out.flatten(0, 1)[None], part.lse.flatten(0, 1)[None])
    merged = merge_parts([seen, Part(own.out[:, :, :reach], own.lse[:, :, :reach])])
    if reach == n:
        return merged
    return Part(
        torch.cat([merged.out, own.out[:, :, reach:].float()], 2), torch.cat([merged.lse, own.lse[:, :, reach:]], 2)
    )


def _merged(seen: Part, own: Part) -> Part:
    """`merge_parts` of the two, many tokens some at a time."""
    tokens = own.lse.shape[-1]
    if tokens <= 2 * MERGE_STEP:
        return merge_parts([seen, own])
    out = torch.empty_like(own.out, dtype=torch.float32)
    lse = torch.empty_like(own.lse)
    for start in range(0, tokens, MERGE_STEP):
        at = slice(start, start + MERGE_STEP)
        pair = [Part(part.out[:, :, at], part.lse[:, :, at]) for part in (seen, own)]
        merged = merge_parts(pair)
        out[:, :, at], lse[:, :, at] = merged.out, merged.lse
    return Part(out, lse)
