"""The blocks of a long document on several ranks, side by side: APB's executor for `torchrun` (APB §3.5).

Rank r runs block t·ranks + r in round t. In every layer each rank gives what its block passes on and gets what all
others of the round do; a block sees those before it, of this round and of all earlier ones. The tensor operations are
those of `Sequential`, and so are the results, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ragkv.attention.across import Ranks
from ragkv.attention.kv import ChunkKV
from ragkv.model.apb.blockpass import Kept
from ragkv.model.apb.book import Block, Book

__all__ = ["Lockstep"]


class Lockstep:
    """An `Executor` whose blocks lie on the ranks that run them: block h on rank h mod `ranks.size`.

    All ranks run the same books in the same order. `passed` counts the bytes of keys and values that this rank has
    passed on: `flops.passing_bytes` for each of its blocks.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.passed = 0

    def run(self, book: Book, known: Mapping[int, Block] | None = None) -> Iterator[Block]:
        """All blocks in order; those of other ranks as `ChunkKV.elsewhere`. Of the `known`, only its own are read."""
        ranks, blocks = self._ranks, book.layout.blocks
        mine = {h: made for h, made in (known or {}).items() if h % ranks.size == ranks.rank}
        there = torch.zeros(blocks, dtype=torch.uint8)
        there[list(mine)] = 1
        todo = ranks.gather(there).amax(0) == 0  # what its own rank does not have
        exchange = _Round(self, ranks, book)
        own = [h for h in range(ranks.rank, blocks, ranks.size) if todo[h]]
        anchor = book.anchor() if own else None
        for first in range(0, blocks, ranks.size):
            exchange.begin(first)
            h = first + ranks.rank
            made = mine.get(h)
            if h < blocks and made is None:
                made = book.encode(h, anchor, exchange)
            elif todo[first:].any():  # else nobody waits for what the others of this round pass on
                exchange.attend(made)
            for block in range(first, min(first + ranks.size, blocks)):
                yield self._block(book, block, made)

    def _block(self, book: Book, block: int, made: Block | None) -> Block:
        owner = block % self._ranks.size
        if owner == self._ranks.rank:
            assert made is not None
            return replace(made, kv=replace(made.kv, owner=owner))
        layout = book.layout
        kv = ChunkKV.elsewhere(
            owner=owner,
            layers=book.model.layers,
            tokens=len(layout.span(block)),
            encoded_at=layout.position(block),
        )
        return Block(kv=kv, chosen=())


class _Round:
    """The exchange of blocks that run at the same time."""

    def __init__(self, lockstep: Lockstep, ranks: Ranks, book: Book) -> None:
        self._lockstep = lockstep
        self._ranks = ranks
        self._layout = book.layout
        self._model = book.model
        self._kept: dict[tuple[int, int], Kept] = {}
        self._first = 0

    def begin(self, first: int) -> None:
        """The next round, of the blocks from `first` on."""
        self._first = first

    def swap(self, block: int, layer: int, mine: Kept) -> Sequence[Kept]:
        self._gather(layer, mine)
        return [self._kept[before, layer] for before in range(block)]

    def attend(self, made: Block | None) -> None:
        """Take part in a round without encoding: with a block that is known, or with none."""
        for layer in range(self._model.layers):
            if layer not in self._model.shared:
                self._gather(layer, None if made is None else made.kept(layer))

    def _gather(self, layer: int, mine: Kept | None) -> None:
        """One all-gather of [K|V], `(kv_heads, l_p, key_dim + value_dim)`, and of places where a layer has a window."""
        shape, most = self._model.kv_shape, self._layout.lengths.passing
        heads, key_dim, value_dim = shape.layers[layer]
        both = torch.zeros(
            (heads, most, key_dim + value_dim), dtype=getattr(torch, shape.dtype), device=self._model.device
        )
        places = torch.zeros((heads, most), dtype=torch.int64, device=self._model.device)
        if mine is not None:
            count = mine.key.shape[1]
            both[:, :count] = torch.cat([mine.key, mine.value], -1)
            places[:, :count] = mine.positions
            self._lockstep.passed += both.nbytes
        found = self._ranks.gather(both)
        where = self._ranks.gather(places) if self._model.windows else places.expand(self._ranks.size, -1, -1)
        for rank in range(self._ranks.size):
            block = self._first + rank
            if block < self._layout.blocks:
                self._keep(block, layer, found[rank], where[rank], key_dim)

    def _keep(self, block: int, layer: int, both: Tensor, places: Tensor, key_dim: int) -> None:
        count = self._layout.passed(block)
        key, value = both[:, :count, :key_dim], both[:, :count, key_dim:]
        self._kept[block, layer] = Kept(key.contiguous(), value.contiguous(), places[:, :count])
