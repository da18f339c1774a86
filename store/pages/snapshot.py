"""Check the pages of a snapshot before LMDB follows them.

LMDB believes its file: one flipped bit in a page can kill the process that reads it, or make a writer overwrite live
pages. Every branch and leaf page is read once. The pages of large values (segments, texts) are not read, because their
places and lengths are in the leaves, and their bytes have a checksum. docs/formats.md, "What is checked when".
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from ragkv.store.pages.file import Meta, damaged_file, read_meta
from ragkv.store.pages.page import BIG, DUPLICATES, SUB_TREE, Nodes, PageFile, overflow_pages
from ragkv.store.pages.tree import RECORD_BYTES, Counts, Runs, Tree, walk
from ragkv.store.seal import DamagedError

__all__ = ["Checker", "PageReport", "check_catalog", "check_pages", "free_bytes", "free_digest"]

# Flags of LMDB's trees.
_INTEGER_KEYS = 0x08
_SEVERAL = 0x14  # MDB_DUPSORT | MDB_DUPFIXED
_VALUES = 0x10  # MDB_DUPFIXED: the tree of one key's values
_NO_SUBDIR = 0x4000  # how the last writer opened the environment; says nothing about the pages


@dataclass(frozen=True, slots=True, kw_only=True)
class PageReport:
    """Counts of a snapshot's pages.

    `live` pages hold something, `free` ones may be written over, and `unaccounted` ones are neither: lost, but
    harmless. The last two are None when the list of free pages was not checked.
    """

    live: int
    free: int | None
    unaccounted: int | None


def check_pages(
    data: Path, transaction: int, tables: Mapping[str, bool], *, width: int, free: bool, heads: bool = False
) -> PageReport | None:
    """Check the snapshot `transaction`, which an open read transaction has to hold.

    None when a later transaction has written over its meta page: take another snapshot. `tables` says for each known
    name whether its keys have several values, which then have `width` bytes. `free`: also check the list of free
    pages, which only writers use. `heads`: also check the head of every large value, which takes one more read each
    and is only used when the value is deleted. `CorruptStoreError` for damage.
    """
    try:
        with _opened(data, transaction) as found:
            if found is None:
                return None
            meta, file = found
            checker = Checker(file, width=width, heads=heads)
            checker.tables(Tree.parse(meta.main), tables)
            freed = Runs()
            if free:
                checker.free_list(Tree.parse(meta.free), freed, transaction)
    except DamagedError as error:
        raise damaged_file(data, f"is damaged ({error})") from error
    return checker.report(freed, free=free)


def check_catalog(data: Path, transaction: int, tables: Mapping[str, bool], *, free: bool) -> bool:
    """Check the tree that names the tables and, with `free`, the list of free pages, which only writers use.

    The trees of the tables are checked when they are needed (`ragkv.store.pages.guard`).

    False when a later transaction has written over the meta page, see `check_pages`. `CorruptStoreError` for damage.
    """
    try:
        with _opened(data, transaction) as found:
            if found is not None:
                meta, file = found
                checker = Checker(file, width=0, heads=False)
                checker.catalog(Tree.parse(meta.main), tables)
                if free:
                    checker.free_list(Tree.parse(meta.free), Runs(), transaction)
    except DamagedError as error:
        raise damaged_file(data, f"is damaged ({error})") from error
    return found is not None


def free_bytes(data: Path, transaction: int) -> int:
    """Bytes of the pages that the list of free pages names; 0 when it cannot be read."""
    freed = Runs()
    try:
        with _opened(data, transaction) as found:
            if found is None:
                return 0
            meta, file = found
            Checker(file, width=0, heads=False).free_list(Tree.parse(meta.free), freed, transaction)
    except DamagedError:
        return 0
    return freed.pages * meta.page_size


def free_digest(data: Path, transaction: int) -> int | None:
    """A hash of the list of free pages, which is checked; None when it cannot be read, or there is a later snapshot."""
    digest = xxhash.xxh3_64()
    try:
        with _opened(data, transaction) as found:
            if found is None:
                return None
            meta, file = found
            Checker(file, width=0, heads=False).free_list(Tree.parse(meta.free), Runs(), transaction, digest.update)
            digest.update(meta.free)
    except DamagedError:
        return None
    return digest.intdigest()


@contextmanager
def _opened(data: Path, transaction: int) -> Iterator[tuple[Meta, PageFile] | None]:
    """The meta page of a snapshot, and the file's pages up to its last; None as `read_meta`."""
    descriptor = os.open(data, os.O_RDONLY)
    try:
        meta = read_meta(descriptor, transaction)
        file = meta and PageFile(descriptor, page_size=meta.page_size, pages=meta.last_page + 1)
        yield (meta, file) if meta and file else None
    finally:
        os.close(descriptor)


class Checker:
    """Checks the trees of one snapshot, and collects the pages that they use."""

    def __init__(self, file: PageFile, *, width: int, heads: bool) -> None:
        self._file = file
        self._width = width
        self._heads = heads
        self._live = Runs()

    def tables(self, main: Tree, kinds: Mapping[str, bool]) -> None:
        """The tree that names the tables, and the tables."""
        for tree in self.catalog(main, kinds).values():
            self.table(tree)

    def table(self, tree: Tree) -> None:
        """All pages of a table."""
        if tree.flags == _SEVERAL:
            self._several(tree)
        elif not tree.flags:  # a table of another kind is not ragkv's, so that nothing opens it
            walk(self._file, [tree], self._live, self.plain_leaf, heads=self._heads)

    def catalog(self, main: Tree, kinds: Mapping[str, bool]) -> dict[str, Tree]:
        """The tree that names the tables, checked, and the tables' own trees, of which nothing is checked but their
        records."""
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
        return dict(named)

    def plain_leaf(self, nodes: Nodes) -> Counts:
        nodes.require(nodes.flags & ~BIG == 0, "has a node of an unknown kind")
        return self._values(nodes, heads=self._heads)

    def _values(self, nodes: Nodes, *, heads: bool) -> Counts:
        """Leaves with one value per node; a large value is in a run of pages of its own."""
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
        """A table with several values per key."""
        trees: list[Tree] = []
        # LMDB adds the pages of the keys' own trees to the table's count, and does not subtract them again.
        walk(self._file, [table], self._live, lambda nodes: self._several_leaf(nodes, trees), counted_alone=False)
        walk(self._file, trees, self._live, None, width=self._width)

    def several_leaf(self, nodes: Nodes) -> None:
        """Leaves of a table with several values per key, and the trees of those keys that have many."""
        trees: list[Tree] = []
        self._several_leaf(nodes, trees)
        walk(self._file, trees, self._live, None, width=self._width)

    def _several_leaf(self, nodes: Nodes, trees: list[Tree]) -> Counts:
        """One value is in the key's node, a few are in a sub-page there, and many are in a tree of their own, which is
        added to `trees`."""
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

    def free_list(
        self, tree: Tree, freed: Runs, transaction: int, told: Callable[[bytes], object] = lambda _: None
    ) -> None:
        """The list of pages that a writer may take; `told` gets its keys and values.

        For each transaction that freed pages, it holds 8-byte numbers: their count, then the pages, descending.
        """

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
                told(key)
                told(value)
                pages = pages[:0:-1]  # ascending
                first = np.flatnonzero(np.diff(pages, prepend=-1) != 1)
                lengths = np.diff(first, append=len(pages))
                self._file.require_inside(pages[first], lengths)
                freed.add(pages[first], lengths)
            return counts

        if tree.flags & ~_NO_SUBDIR != _INTEGER_KEYS:
            raise DamagedError("the tree of its free pages has unknown flags")
        # LMDB sometimes leaves branch pages of this tree with one child (ITS#8336).
        walk(self._file, [tree], self._live, leaf, heads=True, integer=True, least=1)
        self._live.require_apart(freed)

    def report(self, freed: Runs, *, free: bool) -> PageReport:
        live = self._live.pages
        rest = self._file.pages - 2 - live - freed.pages
        return PageReport(live=live, free=freed.pages if free else None, unaccounted=rest if free else None)
