"""Where the blocks of a document run: here one after another; `ragkv.distributed` has ranks run them side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from ragkv.attention.kv import ChunkKV
from ragkv.model.apb.blockpass import Kept
from ragkv.model.apb.book import Block, Book

__all__ = ["Executor", "InOrder", "Sequential"]


class Executor(Protocol):
    """Runs blocks. What it gives is the same, bit for bit, whatever it runs them on."""

    def run(self, book: Book, known: Mapping[int, Block] | None = None) -> Iterator[Block]:
        """All blocks of the document in order; those that are `known` are not encoded again.

        A block that another process holds is given with `ChunkKV.elsewhere`.
        """


class InOrder:
    """The exchange of blocks that run one after another: what is passed on is kept for those to come."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], Kept] = {}

    def swap(self, block: int, layer: int, mine: Kept) -> Sequence[Kept]:
        self._kept[block, layer] = mine
        return [self._kept[before, layer] for before in range(block)]

    def know(self, block: int, made: Block, layers: Sequence[int]) -> None:
        """What an encoded block passes on."""
        for layer in layers:
            self._kept[block, layer] = made.kept(layer)


class Sequential:
    """One process, block after block: a block needs only those before it (the paper's single-host case)."""

    def run(self, book: Book, known: Mapping[int, Block] | None = None) -> Iterator[Block]:
        known = known or {}
        exchange = InOrder()
        layers = [layer for layer in range(book.model.layers) if layer not in book.model.shared]
        anchor: ChunkKV | None = None
        for block in range(book.layout.blocks):
            made = known.get(block)
            if made is not None:
                exchange.know(block, made, layers)
            else:
                anchor = book.anchor() if anchor is None and block else anchor
                made = book.encode(block, anchor, exchange)
            yield made
