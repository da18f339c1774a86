"""Check pages when they are first needed, so that opening a store costs the same at any size.

LMDB believes its pages (`ragkv.store.pages.snapshot`), so that it must not meet one that was not checked. Before LMDB
looks for a key, a `SnapshotGuard` goes the same way from the root to the leaf, and checks the pages on it. All keys of
that leaf then need no further check in this snapshot. In a later snapshot, a page that was checked is known again by
its bytes: it is read again, but not checked again.

Who writes has LMDB look at more than what it is asked for. A page that deleting leaves nearly empty is merged with its
neighbour, on every level, for which LMDB also looks up the least key below a neighbour. And where a page was merged,
the one behind it is a neighbour then. So a `WriteGuard` checks the neighbours of the page and of those above it on both
sides, one more for every key that the transaction has deleted from the table, and the first pages below them.
"""

from __future__ import annotations

import os
import weakref
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from ragkv.store.pages.file import Meta, damaged_file, read_meta
from ragkv.store.pages.page import LEAF, Nodes, PageFile
from ragkv.store.pages.single import plain_nodes
from ragkv.store.pages.snapshot import Checker
from ragkv.store.pages.tree import Tree
from ragkv.store.seal import DamagedError

__all__ = ["PageGuard", "SnapshotGuard", "WriteGuard"]

_MOST_DELETED = 64  # keys, after which all of a table is checked at once
_KNOWN_PAGES = 1 << 16
"""Pages that are remembered, of about 300 bytes each; then it begins anew."""


class _Page(NamedTuple):
    """A page that was checked: the hash of its bytes, its first and last key, and of a branch page all keys (the first
    is empty, because LMDB ignores it) and children."""

    digest: int
    first: bytes
    last: bytes
    keys: Sequence[bytes] = ()
    children: Sequence[int] = ()


class _Place(NamedTuple):
    """A page in its tree: which keys it may hold, from `low` up to but without `high`."""

    number: int
    low: bytes
    high: bytes | None


class _Around(NamedTuple):
    """The keys of the leaf that was looked for last, how many neighbours of it were checked, and the least key behind
    them."""

    low: bytes
    high: bytes | None
    width: int
    end: bytes | None

    def holds(self, key: bytes, width: int) -> bool:
        return self.width >= width and self.low <= key and (self.high is None or key < self.high)


class PageGuard:
    """What a process knows of the pages of a data file that it has open."""

    def __init__(self, data: Path, tables: Mapping[str, bool], *, width: int) -> None:
        """`tables` says for each name whether its keys have several values, which then have `width` bytes."""
        self.data = data
        self.tables = tables
        self.width = width
        self.descriptor = os.open(data, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)
        self.known: dict[tuple[int, bool], _Page] = {}
        self.checked = 0
        """How many pages were checked, for tests and benchmarks."""
        self.read = 0
        """How many pages were read for writers, to be checked or known again."""
        self.pages = 0
        """How many pages there are to check, as far as the records of the tables tell."""
        self._latest: SnapshotGuard | None = None

    def snapshot(self, number: int) -> SnapshotGuard | None:
        """The guard of a snapshot, which an open read transaction holds.

        None when its meta page has been written over: begin another transaction.
        """
        latest = self._latest
        if latest is not None and latest.number == number:
            return latest
        try:
            meta = read_meta(self.descriptor, number)
            if meta is None:
                return None
            self._latest = latest = SnapshotGuard(self, number, meta)
        except DamagedError as error:
            raise damaged_file(self.data, f"is damaged ({error})") from error
        return latest


class SnapshotGuard:
    """Checks the pages of one snapshot. Threads may share it."""

    def __init__(self, guard: PageGuard, number: int, meta: Meta) -> None:
        self.number = number
        self._guard = guard
        self._file = PageFile(guard.descriptor, page_size=meta.page_size, pages=meta.last_page + 1)
        self._trees = self._checker().catalog(Tree.parse(meta.main), guard.tables)
        guard.pages = sum(tree.branch_pages + tree.leaf_pages for tree in self._trees.values())
        self._sound: dict[int, tuple[bytes, _Page]] = {}  # with the least key that the page may hold where it is
        self._last: dict[str, tuple[bytes, bytes | None]] = {}  # the keys around the last one, whose pages are checked
        self._around: dict[str, _Around] = {}
        self._whole: set[str] = set()  # tables of which all pages are checked

    def reach(self, table: str, key: bytes, *, ahead: int = 0) -> bytes | None:
        """Check the pages that lead to where `key` is or would be, and up to `ahead` leaves behind that one.

        Returns the least key that is not in the leaves that were checked; None when they are the last ones.
        `CorruptStoreError` for damage.
        """
        last = self._last.get(table)
        if last is not None and last[0] <= key and (last[1] is None or key < last[1]):
            return last[1]
        tree = self._trees.get(table)
        if tree is None or not tree.depth:
            return None
        try:
            low, end = self._descend(tree, key, ahead, several=self._guard.tables[table])
        except DamagedError as error:
            raise damaged_file(self._guard.data, f"is damaged ({error})") from error
        self._last[table] = low, end
        return end

    def surround(self, table: str, key: bytes, *, width: int, ahead: int = 0) -> bytes | None:
        """As `reach`, with `width` pages on both sides of the way, and the first pages below these."""
        if table in self._whole:
            return None
        last = self._around.get(table)
        if last is not None and not ahead and last.holds(key, width):
            return last.end
        tree = self._trees.get(table)
        if tree is None or not tree.depth:
            return None
        try:
            if width > _MOST_DELETED:
                self._checker().table(tree)
                self._whole.add(table)
                self._guard.read += tree.branch_pages + tree.leaf_pages
                return None
            around = self._around[table] = self._neighbours(tree, key, width, ahead, several=self._guard.tables[table])
        except DamagedError as error:
            raise damaged_file(self._guard.data, f"is damaged ({error})") from error
        return around.end

    def _neighbours(self, tree: Tree, key: bytes, width: int, ahead: int, *, several: bool) -> _Around:
        run = [_Place(tree.root, b"", None)]  # neighbours on one level, of which `at` is on the way to the key
        first: list[_Place] = []  # besides, the first pages below those of the level above
        at = 0
        for height in range(1, tree.depth):
            below = [self._children(place)[0] for place in (*first, *run)]
            middle = self._children(run[at])
            place = max(n for n, child in enumerate(middle) if child.low <= key)
            left, right = middle[:place], middle[place:]
            for each in reversed(run[:at]):
                left = [*self._children(each), *left] if len(left) < width else left
            further = width + (ahead if height == tree.depth - 1 else 0)
            for each in run[at + 1 :]:
                right = [*right, *self._children(each)] if len(right) <= further else right
            at = min(width, len(left))
            run = [*left[len(left) - at :], *right[: further + 1]]
            taken = {child.number for child in run}
            first = [child for child in below if child.number not in taken]
        for group in (run, *([place] for place in first)):
            bounds = [*(place.low for place in group), group[-1].high]
            self._require_leaves([place.number for place in group], bounds, several=several)
        self._guard.read += len(run) + len(first)
        return _Around(run[at].low, run[at].high, width, run[-1].high)

    def _children(self, place: _Place) -> list[_Place]:
        """The pages below a branch page, which is checked."""
        page = self._branch(place.number, place.low, place.high)
        return list(map(_Place, page.children, [place.low, *page.keys[1:]], [*page.keys[1:], place.high]))

    def _descend(self, tree: Tree, key: bytes, ahead: int, *, several: bool) -> tuple[bytes, bytes | None]:
        """The range of keys of the leaves that were checked."""
        lows: list[bytes] = [b""]
        high: bytes | None = None
        children: Sequence[int] = [tree.root]
        for height in range(tree.depth):
            if height == tree.depth - 1:
                self._require_leaves(children, [*lows, high], several=several)
                return lows[0], high
            page = self._branch(children[0], lows[0], high)
            at = bisect_right(page.keys, key) - 1
            until = min(at + 1 + (ahead if height == tree.depth - 2 else 0), len(page.children))
            children = page.children[at:until]
            lows = [lows[0] if at == 0 else page.keys[at], *page.keys[at + 1 : until]]
            high = page.keys[until] if until < len(page.keys) else high
        raise DamagedError(f"the tree at page {tree.root} has no leaves")

    def _branch(self, number: int, low: bytes, high: bytes | None) -> _Page:
        known = self._sound.get(number)
        if known is not None and known[0] == low:
            return known[1]
        page = self._again(number, several=False)
        if page is None or not page.children:
            page = self._alone(number, branch=True)
        self._place(number, page, low, high)
        return page

    def _require_leaves(self, numbers: Sequence[int], bounds: Sequence[bytes | None], *, several: bool) -> None:
        """`bounds` are the least keys of these leaves and, last, of the one behind them."""
        places = list(zip(numbers, bounds, bounds[1:], strict=False))
        new: list[tuple[int, bytes | None, bytes | None]] = []
        for number, low, high in places:
            known = self._sound.get(number)
            if known is not None and known[0] == low:
                continue
            page = self._again(number, several=several)
            if page is None or page.children:
                new.append((number, low, high))
            else:
                self._place(number, page, low or b"", high)
        if len(new) == 1 and not several:
            [(number, low, high)] = new
            self._place(number, self._alone(number, branch=False), low or b"", high)
            return
        if not new:
            return
        nodes = self._file.nodes(np.array([min(number, self._file.pages) for number, _, _ in new]), LEAF, least=1)
        if several:
            self._checker().several_leaf(nodes)
        else:
            self._checker().plain_leaf(nodes)
        for (number, low, high), page in zip(new, _leaves(nodes, self._file.page_size), strict=True):
            self._remember(number, page, several=several)
            self._place(number, page, low or b"", high)

    def _alone(self, number: int, *, branch: bool) -> _Page:
        raw = self._file.page(number)
        keys, children = plain_nodes(raw, number, branch=branch, pages=self._file.pages)
        digest = xxhash.xxh3_64_intdigest(raw)
        page = _Page(digest, keys[1], keys[-1], keys, children) if branch else _Page(digest, keys[0], keys[-1])
        self._remember(number, page, several=False)
        return page

    def _again(self, number: int, *, several: bool) -> _Page | None:
        """What is known of a page if its bytes are those that were checked."""
        page = self._guard.known.get((number, several))
        if page is not None and xxhash.xxh3_64_intdigest(self._file.page(number)) == page.digest:
            return page
        return None

    def _remember(self, number: int, page: _Page, *, several: bool) -> None:
        if len(self._guard.known) >= _KNOWN_PAGES:
            self._guard.known.clear()
        self._guard.known[number, several] = page
        self._guard.checked += 1

    def _place(self, number: int, page: _Page, low: bytes, high: bytes | None) -> None:
        """Note that a page is where it belongs, or raise: its keys are those that the page above leads to it for."""
        if page.first < low or (high is not None and page.last >= high):
            raise DamagedError(f"page {number} has keys that belong to another page")
        if len(self._sound) >= _KNOWN_PAGES:
            self._sound.clear()
        self._sound[number] = low, page

    def _checker(self) -> Checker:
        return Checker(self._file, width=self._guard.width, heads=False)


class WriteGuard:
    """Checks the pages that a write transaction may meet: those of the snapshot that it began with, which nobody writes
    over."""

    def __init__(self, snapshot: SnapshotGuard) -> None:
        self._snapshot = snapshot
        self._deleted: dict[str, int] = {}

    def reach(self, table: str, key: bytes, *, ahead: int = 0) -> bytes | None:
        """As `SnapshotGuard.reach`."""
        return self._snapshot.surround(table, key, width=1 + self._deleted.get(table, 0), ahead=ahead)

    def count_deleted(self, table: str) -> None:
        """A key of the table is about to be deleted."""
        self._deleted[table] = self._deleted.get(table, 0) + 1


def _leaves(nodes: Nodes, page_size: int) -> list[_Page]:
    firsts, lasts = nodes.keys(nodes.starts), nodes.keys(nodes.starts + nodes.counts - 1)
    pages = nodes.flat.reshape(-1, page_size)
    digests = [xxhash.xxh3_64_intdigest(page.tobytes()) for page in pages]
    return [_Page(*found) for found in zip(digests, firsts, lasts, strict=True)]
