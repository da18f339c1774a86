"""Walk the B-trees of LMDB's file without LMDB, and check that every page is of the right type and in its place.

The walk goes level by level, hundreds of pages at once.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np

from ragkv.store.pages.page import BRANCH, HEAD, LEAF, Bytes, Nodes, Numbers, PageFile
from ragkv.store.seal import DamagedError

__all__ = ["RECORD_BYTES", "Counts", "Runs", "Tree", "walk"]

Counts: TypeAlias = tuple[Numbers, Numbers]
"""For each node of some leaf pages: how many entries it holds, and the pages of the run that holds its value."""

_RECORD = struct.Struct("=I H H Q Q Q Q Q")
RECORD_BYTES = _RECORD.size
_NO_ROOT = (1 << 64) - 1
_DEPTH_LIMIT = 32  # LMDB's CURSOR_STACK
_BATCH = 512  # pages in memory at once
_NONE: Numbers = np.empty(0, np.int64)


class Tree(NamedTuple):
    """LMDB's record of a tree (`MDB_db`): counts of its pages and entries, and the number of its root page."""

    pad: int
    flags: int
    depth: int
    branch_pages: int
    leaf_pages: int
    run_pages: int
    entries: int
    root: int

    @classmethod
    def parse(cls, record: bytes) -> Tree:
        tree = cls(*_RECORD.unpack(record))
        if tree.depth > _DEPTH_LIMIT or (tree.depth == 0) != (tree.root == _NO_ROOT):
            raise DamagedError(f"a tree has depth {tree.depth} and root {tree.root}")
        return tree


@dataclass(slots=True)
class Runs:
    """Runs of pages that are in use."""

    starts: list[Numbers] = field(default_factory=lambda: [_NONE])
    lengths: list[Numbers] = field(default_factory=lambda: [_NONE])
    pages: int = 0

    def add(self, starts: Numbers, lengths: Numbers) -> None:
        self.starts.append(starts)
        self.lengths.append(lengths)
        self.pages += int(lengths.sum())

    def require_apart(self, other: Runs) -> None:
        """`DamagedError` when a page is in two runs, of these or of `other`."""
        starts, lengths = (np.concatenate(runs) for runs in (self.starts + other.starts, self.lengths + other.lengths))
        order = np.argsort(starts, kind="stable")
        starts, lengths = starts[order], lengths[order]
        PageFile.require(starts[:-1] + lengths[:-1] <= starts[1:], starts[1:], "is used twice")


@dataclass(frozen=True, slots=True)
class _Level:
    """The pages at one height, in the order of their keys.

    `numbers` of the pages, `trees` the index of each page's tree, and `low` the least key that each page may hold,
    as its branch page says.
    """

    numbers: Numbers
    trees: Numbers
    low: list[bytes]

    def pick(self, which: Numbers) -> _Level:
        return _Level(self.numbers[which], self.trees[which], [self.low[page] for page in which.tolist()])

    def batches(self) -> Iterator[_Level]:
        for start in range(0, len(self.numbers), _BATCH):
            yield self.pick(np.arange(start, min(start + _BATCH, len(self.numbers))))


class _Order:
    """Checks that the keys of neighbouring pages are in order, and where their branch page says."""

    def __init__(self, *, integer: bool) -> None:
        self._integer = integer
        self._tree = -1
        self._last: bytes | None = None

    def follow(self, number: int, tree: int, low: bytes, first: bytes, last: bytes) -> None:
        """Check the next page of the level by its first and last key."""
        after = tree != self._tree or self._last is None or self._before(self._last, low)
        if not after or self._before(first, low):
            raise DamagedError(f"page {number} has keys that belong to another page")
        self._tree, self._last = tree, last

    def _before(self, left: bytes, right: bytes) -> bool:
        if self._integer:
            return int.from_bytes(left, sys.byteorder) < int.from_bytes(right, sys.byteorder)
        return left < right


def walk(
    file: PageFile,
    trees: Sequence[Tree],
    used: Runs,
    leaf: Callable[[Nodes], Counts] | None,
    *,
    heads: bool = False,
    integer: bool = False,
    width: int = 0,
    least: int = 2,
    counted_alone: bool = True,
) -> None:
    """Check all pages of `trees`, which are of one kind, and add them to `used`.

    `leaf` checks what the nodes of leaf pages mean; None for trees of bare values of `width` bytes. `heads`: `leaf`
    counts the pages of runs by their heads, not by the sizes of values. `integer`: keys are numbers. `least` is how
    many children a branch page has at least. `counted_alone`: the trees' records count their own pages only.
    `DamagedError` says what is wrong.
    """
    depth = np.array([tree.depth for tree in trees], np.int64)
    counted = np.zeros((4, len(trees)), np.int64)  # branch pages, leaf pages, pages of runs, entries
    rooted = np.flatnonzero(depth)
    roots = [min(trees[tree].root, file.pages) for tree in rooted.tolist()]
    level = _Level(np.array(roots, np.int64), rooted, [b""] * len(roots))
    height = 1
    while len(level.numbers):
        used.add(level.numbers, np.ones_like(level.numbers))
        if used.pages > file.pages:  # pages name each other in a circle
            raise DamagedError(f"page {level.numbers[0]} is used twice")
        low = depth[level.trees] == height
        leaves, branches = level.pick(np.flatnonzero(low)), level.pick(np.flatnonzero(~low))
        for row, pages in enumerate((branches, leaves)):
            counted[row] += np.bincount(pages.trees, minlength=len(trees))
        order = _Order(integer=integer)
        for batch in leaves.batches():
            if leaf is None:
                found, counts = file.fixed(batch.numbers, width)
                _follow_values(order, batch, found, counts, width)
                counted[3] += _sums(batch.trees, counts, len(trees))
            else:
                nodes = file.nodes(batch.numbers, LEAF, least=1, integer=integer)
                _follow_keys(order, batch, nodes, skip=0)
                entries, runs = leaf(nodes)
                counted[2] += _sums(batch.trees[nodes.page], runs, len(trees))
                counted[3] += _sums(batch.trees[nodes.page], entries, len(trees))
        level = _children(file, branches, integer=integer, least=least)
        height += 1
    for tree, sums in zip(trees, counted.T.tolist(), strict=True):
        right = bool(tree.entries == sums[3])
        if counted_alone:
            right &= [tree.branch_pages, tree.leaf_pages] == sums[:2]
            right &= tree.run_pages == sums[2] if heads else tree.run_pages >= sums[2]
        if not right:
            raise DamagedError(f"the tree at page {tree.root} does not hold what its record says")


def _children(file: PageFile, branches: _Level, *, integer: bool, least: int) -> _Level:
    """The level below the branch pages of a level."""
    numbers, trees, low = [_NONE], [_NONE], list[bytes]()
    order = _Order(integer=integer)
    for batch in branches.batches():
        nodes = file.nodes(batch.numbers, BRANCH, least=least, integer=integer)
        _follow_keys(order, batch, nodes, skip=1)
        numbers.append(nodes.children)
        trees.append(batch.trees[nodes.page])
        keys = nodes.keys(np.arange(len(nodes.page)))
        for start, bound in zip(nodes.starts.tolist(), batch.low, strict=True):
            keys[start] = bound  # LMDB ignores the first key of a branch page
        low += keys
    return _Level(np.concatenate(numbers), np.concatenate(trees), low)


def _follow_keys(order: _Order, level: _Level, nodes: Nodes, *, skip: int) -> None:
    first, last = nodes.starts + skip, nodes.starts + nodes.counts - 1
    real = np.flatnonzero(first <= last)
    level = level.pick(real)
    keys = nodes.keys(first[real]), nodes.keys(last[real])
    for row in zip(level.numbers.tolist(), level.trees.tolist(), level.low, *keys, strict=True):
        order.follow(*row)


def _follow_values(order: _Order, level: _Level, pages: Bytes, counts: Numbers, width: int) -> None:
    rows = zip(level.numbers.tolist(), level.trees.tolist(), level.low, pages, counts.tolist(), strict=True)
    for number, tree, low, page, count in rows:
        end = HEAD + count * width
        order.follow(number, tree, low, page[HEAD : HEAD + width].tobytes(), page[end - width : end].tobytes())


def _sums(trees: Numbers, values: Numbers, count: int) -> Numbers:
    """Sums of `values` by tree, `(count,)`."""
    return np.bincount(trees, values, count).astype(np.int64)
