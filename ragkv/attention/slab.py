"""Own KV of several rows side by side, so that one call per layer reads it for all rows that take one token.

Rows differ in length, so their tokens are masked to it. A slab's rows have room for equally many tokens; which slab a
row gets depends on what it needs, so little is wasted, and a row that outgrows its slab leaves it.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from ragkv.attention.kv import ChunkKV
from ragkv.attention.ownkv import OwnKV

__all__ = ["Slab", "SlabKV", "Slabs"]

MOST_TOKENS = 1024
"""A row that needs more has memory of its own: its keys are worth a call of their own."""
MOST_ROWS = 32


class Slab:
    """Room for `rows` rows of `capacity` tokens: of a layer `(rows, kv_heads, capacity, head_dim)`, made when used."""

    def __init__(self, rows: int, capacity: int) -> None:
        self.capacity = capacity
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.free = list(range(rows))[::-1]
        self._rows = rows

    @torch.inference_mode()
    def take(self) -> int:
        """A free row, cleared: whoever had it may have left numbers that are none, and these get through any mask."""
        slot = self.free.pop()
        for held in (*self.keys.values(), *self.values.values()):
            held[slot].zero_()
        return slot

    def make(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Take the memory of a layer like `(1, kv_heads, n, head_dim)`."""
        if layer not in self.keys:
            for held, like in ((self.keys, key), (self.values, value)):
                # zeros: what no row has written is masked, but a number that is none would get through any mask
                held[layer] = like.new_zeros((self._rows, like.shape[1], self.capacity, like.shape[3]))

    def write(self, layer: int, slots: Tensor, places: Tensor, key: Tensor, value: Tensor) -> None:
        """One token for each of some rows: `key`/`value` `(rows, kv_heads, head_dim)` at `places` of `slots`."""
        self.keys[layer][slots, :, places] = key
        self.values[layer][slots, :, places] = value


class SlabKV(OwnKV):
    """A row's own KV in a slab; in memory of its own once it needs more than the slab has."""

    __slots__ = ("slab", "slot")

    def __init__(self, slab: Slab) -> None:
        super().__init__()
        self.slot = slab.take()
        self.slab: Slab | None = slab

    def __del__(self) -> None:
        slab: Slab | None = getattr(self, "slab", None)  # none: it was not made
        if slab is not None:
            slab.free.append(self.slot)

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        end = self.length + key.shape[2]
        if self.slab is not None and end > self.slab.capacity:
            self._leave(self.slab)
        if self.slab is None:
            return super().append(layer, key, value)
        self.slab.make(layer, key, value)
        keys, values = (t[layer][self.slot : self.slot + 1] for t in (self.slab.keys, self.slab.values))
        keys[:, :, self.length : end] = key
        values[:, :, self.length : end] = value
        return keys[:, :, :end], values[:, :, :end]

    def layers(self) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        if self.slab is None:
            return super().layers()
        one = slice(self.slot, self.slot + 1)
        keys = {layer: t[one] for layer, t in self.slab.keys.items()}
        return keys, {layer: t[one] for layer, t in self.slab.values.items()}

    def chunk_kv(self, *, encoded_at: int = 0) -> ChunkKV:
        if self.slab is not None:
            self._leave(self.slab)  # its place is the next row's, so what is cut must not lie there
        return super().chunk_kv(encoded_at=encoded_at)

    def _leave(self, slab: Slab) -> None:
        keys, values = self.layers()
        self._keys = {layer: t[:, :, : self.length].clone() for layer, t in keys.items()}
        self._values = {layer: t[:, :, : self.length].clone() for layer, t in values.items()}
        self.slab = None
        slab.free.append(self.slot)


class Slabs:
    """All slabs of a runtime; one is freed with the last row in it."""

    def __init__(self) -> None:
        self._slabs: list[weakref.ref[Slab]] = []

    def place(self, tokens: int, more: int, rows: int) -> OwnKV:
        """Own KV for a row of `tokens` tokens and at most `more` to come, one of about `rows` that run now."""
        needed = tokens + more
        if rows < 2 or needed > MOST_TOKENS:
            return OwnKV(reserve=min(more, MOST_TOKENS))
        capacity = max(64, 1 << (needed - 1).bit_length())
        alive = [(ref, slab) for ref in self._slabs if (slab := ref()) is not None]
        self._slabs = [ref for ref, _ in alive]
        for _, slab in alive:
            if slab.capacity == capacity and slab.free:
                return SlabKV(slab)
        slab = Slab(min(rows, MOST_ROWS), capacity)
        self._slabs.append(weakref.ref(slab))
        return SlabKV(slab)
