"""Caches of several rows side by side, so that one forward pass resumes all of them.

Rows that step together again and again stay together: only when others join or some leave is anything copied. What
grows with the tokens ends with each row's last token, so shorter rows begin with padding that a mask hides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ragkv.attention.kv import ChunkKV
from ragkv.attention.ownkv import OwnKV
from ragkv.model.cachetree import CacheTree, Leaf
from ragkv.model.packing import Packing

__all__ = ["OwnState", "SideBySide", "side_by_side"]


@dataclass(frozen=True, slots=True, eq=False)
class SideBySide:
    """`tensors`, one for each of the tree's leaves; row i has read `lengths[i]` tokens."""

    tree: CacheTree
    packing: Packing
    tensors: Sequence[Tensor]
    lengths: tuple[int, ...]

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def row(self, index: int, *, last: int | None = None) -> list[Tensor]:
        """One row's tensors, of what grows only the `last` tokens; not copied."""
        tokens = self.lengths[index] if last is None else last
        found = []
        for leaf, tensor in zip(self.tree.leaves, self.tensors, strict=True):
            one = tensor.narrow(leaf.rows, index, 1)
            if leaf.tokens is not None:
                one = one.narrow(leaf.tokens, one.shape[leaf.tokens] - tokens, tokens)
            found.append(one)
        return found

    def resumable(self) -> list[Tensor]:
        """The tensors for a forward pass: what it may write into is copied, so that a pass that fails harms nothing."""
        return [t.clone() if leaf.tokens is None else t for leaf, t in zip(self.tree.leaves, self.tensors, strict=True)]

    def visible(self, more: int) -> Tensor | None:
        """The mask `(rows, tokens)` over all and `more` new ones, 0 for padding; None where nothing is padded."""
        if min(self.lengths) == self.longest or all(leaf.tokens is None for leaf in self.tree.leaves):
            return None
        first = self.longest - torch.tensor(self.lengths)
        return (torch.arange(self.longest + more) >= first[:, None]).long()


class OwnState(OwnKV):
    """Where a row's cache is: in which rows side by side, and which of them. `length` are the tokens it read itself."""

    __slots__ = ("held", "index")

    def __init__(self) -> None:
        super().__init__(reserve=0)
        self.held: SideBySide | None = None
        self.index = 0

    def chunk_kv(self, *, encoded_at: int = 0) -> ChunkKV:
        assert self.held is not None
        own = self.held.row(self.index, last=self.length)
        return self.held.packing.pack([t.clone() for t in own], self.length, encoded_at)


def side_by_side(places: Sequence[tuple[SideBySide, int]]) -> SideBySide:
    """These rows together, in this order; nothing is copied if they are already."""
    first = places[0][0]
    tree = first.tree
    if all(held is first for held, _ in places) and [index for _, index in places] == list(range(len(first.lengths))):
        return first
    rows = [held.row(index) for held, index in places]
    lengths = tuple(held.lengths[index] for held, index in places)
    longest = max(lengths)
    tensors = [
        torch.cat([_padded(leaf, each[number], longest) for each in rows], leaf.rows)
        for number, leaf in enumerate(tree.leaves)
    ]
    return SideBySide(tree, first.packing, tensors, lengths)


def _padded(leaf: Leaf, tensor: Tensor, tokens: int) -> Tensor:
    """With zeros before its tokens: no number that is none, which would get through any mask."""
    if leaf.tokens is None or tensor.shape[leaf.tokens] == tokens:
        return tensor
    shape = list(tensor.shape)
    shape[leaf.tokens] = tokens - shape[leaf.tokens]
    return torch.cat([tensor.new_zeros(shape), tensor], leaf.tokens)
