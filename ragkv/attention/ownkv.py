"""The keys and values of the tokens that a row computes itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ragkv.attention.kv import ChunkKV

__all__ = ["OwnKV"]


class OwnKV:
    """Keys and values of the tokens that a row computes itself: its question and what it generates.

    Memory is taken in blocks that double, so that a decode step writes one column and never copies the rest
    (a `DynamicCache` concatenates the whole cache at every step). `reserve` is how many tokens more than the first
    ones it makes room for.
    """

    __slots__ = ("_keys", "_values", "length", "reserve", "shared")

    def __init__(self, *, reserve: int = 64) -> None:
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self.length = 0
        """Tokens held: what `commit` has counted."""
        self.reserve = reserve
        self.shared: Mapping[int, int] = {}
        """Layers that hold nothing, because they read what another holds: that one."""

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write `(1, kv_heads, n, head_dim)` of `layer` after the tokens held; views of these and the new ones.

        They count once the forward pass is over and `commit` was called; until then a second try overwrites them.
        """
        used, end = self.length, self.length + key.shape[2]
        keys = self._keys[layer] = _reserved(self._keys.get(layer), key, used, end, self.reserve)
        values = self._values[layer] = _reserved(self._values.get(layer), value, used, end, self.reserve)
        keys[:, :, used:end] = key
        values[:, :, used:end] = value
        return keys[:, :, :end], values[:, :, :end]

    def commit(self, tokens: int) -> None:
        """All layers hold `tokens` more."""
        self.length += tokens

    @torch.inference_mode()
    def select(self, tokens: Sequence[int]) -> None:
        """Keep only these of the tokens held, in this order."""
        places = torch.tensor(tokens)

        def kept(held: dict[int, Tensor]) -> dict[int, Tensor]:
            return {layer: block[:, :, places.to(block.device, non_blocking=True)] for layer, block in held.items()}

        self._keys, self._values, self.length = kept(self._keys), kept(self._values), len(tokens)

    def chunk_kv(self, *, encoded_at: int = 0) -> ChunkKV:
        """All tokens, cut free from the memory that is reserved for more."""

        def cut(held: dict[int, Tensor]) -> tuple[Tensor, ...]:
            nothing = {layer: held[at].new_empty((1, 0, self.length, 0)) for layer, at in self.shared.items()}
            whole = (each[0] for _, each in sorted((held | nothing).items()))
            return tuple(t if t.shape[1] == self.length else t[:, : self.length].clone() for t in whole)

        keys, values = self.layers()
        return ChunkKV(keys=cut(keys), values=cut(values), encoded_at=encoded_at)

    def layers(self) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Keys and values by layer, `(1, kv_heads, capacity, head_dim)`, of which the first `length` tokens count."""
        return self._keys, self._values


def _reserved(held: Tensor | None, new: Tensor, used: int, end: int, reserve: int) -> Tensor:
    """`held` with room for `end` tokens, grown at least twofold when it must move."""
    if held is not None and held.shape[2] >= end:
        return held
    capacity = max(end + reserve, 2 * used)
    batch, kv_heads, _, head_dim = new.shape
    grown = new.new_empty((batch, kv_heads, capacity, head_dim))
    if held is not None:
        grown[:, :, :used] = held[:, :, :used]
    return grown
