"""Proof, before LMDB follows them, that the pages of a snapshot are sound: LMDB believes its file, and one flipped
bit in a page can kill the process that reads it, or make a writer overwrite what is alive.

Every branch and leaf page is read once. The pages of large values (segments, texts) are not: their places and
lengths stand in the leaves, and their bytes are sealed. docs/formats.md, "What is checked when".
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ragkv.errors import CorruptStoreError
from ragkv.store.pages.file import read_meta
from ragkv.store.pages.page import BIG, DUPLICATES, SUB_TREE, Nodes, PageFile, overflow_pages
from ragkv.store.pages.tree import RECORD_BYTES, Counts, Runs, Tree, walk
from ragkv.store.seal import DamagedError

__all__ = ["PageReport", "check_pages", "free_bytes"]

# flags of LMDB's trees
_INTEGER_KEYS = 0x08
_SEVERAL = 0x14  # MDB_DUPSORT | MDB_DUPFIXED
_VALUES = 0x10  # MDB_DUPFIXED: the tree of one key's values
_NO_SUBDIR = 0x4000  # how the environment was opened that wrote last; says nothing of the pages


@dataclass(frozen=True, slots=True, kw_only=True)
class PageReport:
    """Pages of a snapshot: `live` hold something, `free` may be written over, `unaccounted` are neither: lost
    to use, but no danger. The last two are None when the list of free pages was left out."""

    live: int
    free: int | None
    unaccounted: int | None


def check_pages(
    data: Path, transaction: int, tables: Mapping[str, bool], *, width: int, free: bool, heads: bool = False
) -> PageReport | None:
    """Check the snapshot `transaction`, which an open read transaction has to hold; None when its meta page has
    been written over since: take another.

    `tables` says for each known name whether its keys have several values, then of `width` bytes. `free`:
    check the list of free pages too, which only writers use. `heads`: also the head of every large value (one
    more read each), which is used by nothing but its deletion. `CorruptStoreError` for damage.
    """
    descriptor = os.open(data, os.O_RDONLY)
    try:
        meta = read_meta(descriptor, transaction)
        if meta is None:
            return None
        file = PageFile(descriptor, page_size=meta.page_size, pages=meta.last_page + 1)
        checker = _Checker(file, width=width, heads=heads)
        checker.tables(Tree.parse(meta.main), tables)
        freed = Runs()
        if free:
            checker.free_list(Tree.parse(meta.free), freed, transaction)
    except DamagedError as error:
        raise CorruptStoreError(
            f"{data} is damaged ({error}): restore a backup, or delete the index and ingest again"
        ) from error
    finally:
        os.close(descriptor)
    return checker.report(freed, free=free)


def free_bytes(data: Path, transaction: int) -> int:
    """Bytes of the pages that the list of free pages names; 0 when it cannot be read."""
    descriptor = os.open(data, os.O_RDONLY)
    try:
        meta = read_meta(descriptor, transaction)
        if meta is None:
            return 0
        file = PageFile(descriptor, page_size=meta.page_size, pages=meta.last_page + 1)
        freed = Runs()
        _Checker(file, width=0, heads=False).free_list(Tree.parse(meta.free), freed, transaction)
    except DamagedError:
        return 0
    finally:
        os.close(descriptor)
    return freed.pages * meta.page_size


class _Checker:
    def __init__(self, file: PageFile, *, width: int, heads: bool) -> None:
        self._file = file
        self._width = width
        self._heads = heads
        self._live = Runs()

    def tables(self, main: Tree, kinds: Mapping[str, bool]) -> None:
        """The tree that names the tables, and the tables."""
        named: list[tuple[str, Tree]] = []

        def leaf(nodes: Nodes) -> Counts:
            table = nodes.flags == SUB_TREE
            nodes.require(table | (nodes.flags & ~BIG == 0), "has a node of an unknown kind")
            nodes.require(~table | (nodes.data_sizes == RECORD_BYTES), "has a table's record of a wrong size")
            which = np.flatnonzero(table)
            for node, key in zip(which.tolist(), nodes.keys(which), strict=True):
                named.append((key.decode("latin-1"), Tree.parse(nodes.data(node))))
            return self._values(nodes, heads=self._heads)

        if main.flags:
            raise DamagedError("the tree of its tables has unknown flags")
        walk(self._file, [main], self._live, leaf)
        for name, tree in named:
            flags = _SEVERAL if kinds.get(name) else 0
            if name in kinds and tree.flags != flags:
                raise DamagedError(f"the table {name!r} has flags {tree.flags:#x} instead of {flags:#x}")
            if tree.flags == _SEVERAL:
                self._several(tree)
            elif not tree.flags:  # a table of another kind is none of ragkv's: nothing will open it
                walk(self._file, [tree], self._live, self._plain, heads=self._heads)

    def _plain(self, nodes: Nodes) -> Counts:
        nodes.require(nodes.flags & ~BIG == 0, "has a node of an unknown kind")
        return self._values(nodes, heads=self._heads)

    def _values(self, nodes: Nodes, *, heads: bool) -> Counts:
        """One value per node; a large one in a run of pages of its own."""
        big = np.flatnonzero(nodes.flags & BIG)
        starts, sizes = nodes.big_at(big), nodes.data_sizes[big]
        lengths = overflow_pages(sizes, self._file.page_size)
        self._file.require_inside(starts, lengths)
        if heads:
            lengths = self._file.run_lengths(starts, sizes)
            self._file.require_inside(starts, lengths)
        self._live.add(starts, lengths)
        pages = np.zeros_like(nodes.page)
        pages[big] = lengths
        return np.ones_like(nodes.page), pages

    def _several(self, table: Tree) -> None:
        """Several values per key: one lies in its node, a few in a small page there, many in a tree of their
        own."""
        trees: list[Tree] = []

        def leaf(nodes: Nodes) -> Counts:
            single, small, own = (nodes.flags == kind for kind in (0, DUPLICATES, DUPLICATES | SUB_TREE))
            nodes.require(single | small | own, "has a node of an unknown kind")
            nodes.require(~single | (nodes.data_sizes == self._width), "has a value of a wrong size")
            nodes.require(~own | (nodes.data_sizes == RECORD_BYTES), "has a tree's record of a wrong size")
            entries = np.ones_like(nodes.page)
            which = np.flatnonzero(small)
            entries[which] = self._file.sub_pages(nodes, which, self._width)
            for node in np.flatnonzero(own).tolist():
                tree = Tree.parse(nodes.data(node))
                most = self._file.pages * self._file.page_size
                if (tree.pad, tree.flags) != (self._width, _VALUES) or not 0 < tree.entries <= most:
                    raise DamagedError(f"page {nodes.numbers[nodes.page[node]]} has a wrong tree of values")
                entries[node] = tree.entries
                trees.append(tree)
            return entries, np.zeros_like(nodes.page)

        # LMDB adds the pages of the keys' own trees to the table's, and forgets to take them off again.
        walk(self._file, [table], self._live, leaf, counted_alone=False)
        walk(self._file, trees, self._live, None, width=self._width)

    def free_list(self, tree: Tree, freed: Runs, transaction: int) -> None:
        """The pages that a writer may take: per transaction that freed some, 8-byte numbers, first how many,
        then the pages, descending."""

        def leaf(nodes: Nodes) -> Counts:
            nodes.require(nodes.flags & ~BIG == 0, "has a node of an unknown kind")
            counts = self._values(nodes, heads=True)
            for node, key in enumerate(nodes.keys(np.arange(len(nodes.page)))):
                number = int(nodes.numbers[nodes.page[node]])
                value = nodes.data(node)
                if nodes.flags[node] & BIG:
                    value = self._file.value(int(nodes.big_at(np.array([node]))[0]), int(nodes.data_sizes[node]))
                pages = np.frombuffer(value, "=i8", len(value) // 8)
                if (
                    len(value) % 8
                    or not len(pages)
                    or pages[0] != len(pages) - 1
                    or (pages[1:-1] <= pages[2:]).any()
                    or int.from_bytes(key, sys.byteorder) > transaction
                ):
                    raise DamagedError(f"page {number} has a wrong list of free pages")
                pages = pages[:0:-1]  # ascending
                first = np.flatnonzero(np.diff(pages, prepend=-1) != 1)
                lengths = np.diff(first, append=len(pages))
                self._file.require_inside(pages[first], lengths)
                freed.add(pages[first], lengths)
            return counts

        if tree.flags & ~_NO_SUBDIR != _INTEGER_KEYS:
            raise DamagedError("the tree of its free pages has unknown flags")
        # LMDB leaves branch pages of this tree with one child at times (ITS#8336)
        walk(self._file, [tree], self._live, leaf, heads=True, integer=True, least=1)
        self._live.require_apart(freed)

    def report(self, freed: Runs, *, free: bool) -> PageReport:
        live = self._live.pages
        rest = self._file.pages - 2 - live - freed.pages
        return PageReport(live=live, free=freed.pages if free else None, unaccounted=rest if free else None)
