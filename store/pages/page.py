"""Read the pages of LMDB's file without LMDB.

LMDB follows whatever a page says, so that one flipped bit in a pointer, a length or a type kills the process (SIGSEGV,
SIGABRT) or lets a writer overwrite live pages. Every check here works on many pages at once, `(pages, page_size)`
bytes. It raises `DamagedError`, which names a page, before anything is read that was not checked. The layout is that
of LMDB 0.9 (mdb.c: `MDB_page`, `MDB_node`), in the byte order of the machine.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ragkv.store.seal import DamagedError

__all__ = [
    "BIG",
    "BRANCH",
    "DUPLICATES",
    "HEAD",
    "LEAF",
    "SUB_TREE",
    "Bytes",
    "Nodes",
    "Numbers",
    "PageFile",
    "is_whole_run",
    "node_limit",
    "overflow_pages",
]

Numbers = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

HEAD = 16
"""Bytes of a page's head: its number (8), pad, flags, lower and upper (2 each). In the first page of an overflow run,
the number of the run's pages (4) takes the place of lower and upper."""

BRANCH, LEAF, OVERFLOW, FIXED, SUB_PAGE = 0x01, 0x02, 0x04, 0x22, 0x72  # types of pages, as whole flag words
_DIRTY = 0x10  # set in memory while a transaction is changing the page
BIG, SUB_TREE, DUPLICATES = 0x01, 0x02, 0x04  # flags of leaf nodes
_NODE = 8  # bytes of a node's head: data size or child (lo, hi), flags, key size
_KEY_LIMIT = 511
_FIRST_BYTES = np.array([((1 << 8 * size) - 1) << 8 * (8 - size) for size in range(9)], np.uint64)


def overflow_pages(size: npt.NDArray[np.int64] | int, page_size: int) -> Any:
    """Pages of the run that holds a value of `size` bytes."""
    return (HEAD - 1 + size) // page_size + 1


def is_whole_run(key: bytes, value: memoryview, page_size: int) -> bool:
    """Whether the head of the run of pages that holds `value`, a view of LMDB's map, is right.

    True for a small value, which is in its node and has no run.
    """
    if _NODE + len(key) + len(value) <= node_limit(page_size):
        return True
    body = np.frombuffer(value, np.uint8)
    head = ctypes.string_at(body.ctypes.data - HEAD, HEAD)  # the head is in the map right before the value
    flags, pages = struct.unpack("=10x H I", head)
    return bool(flags & ~_DIRTY == OVERFLOW and pages == overflow_pages(len(value), page_size))


def node_limit(page_size: int) -> int:
    """LMDB's `me_nodemax`: the value of a larger node is in a run of pages."""
    return ((page_size - HEAD) // 2 & -2) - 2


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of several pages of one type, page by page in the order of their keys.

    Per page: `numbers`, `counts` (of nodes) and `starts` (the index of its first node). Per node: `page` (the index of
    its page), `at` (where it begins in `flat`, the bytes of all pages) and `key_sizes`; in a leaf also `data_at`,
    `data_sizes` and `flags`, in a branch `children`.
    """

    numbers: Numbers
    flat: Bytes
    counts: Numbers
    starts: Numbers
    page: Numbers
    at: Numbers
    key_sizes: Numbers
    data_sizes: Numbers
    flags: Numbers
    children: Numbers

    @property
    def data_at(self) -> Numbers:
        return self.at + _NODE + self.key_sizes

    def keys(self, nodes: Numbers) -> list[bytes]:
        view = self.flat.data
        starts = self.at[nodes] + _NODE
        ends = starts + self.key_sizes[nodes]
        return [view[start:end].tobytes() for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]

    def data(self, node: int) -> bytes:
        start = int(self.data_at[node])
        return self.flat[start : start + int(self.data_sizes[node])].tobytes()

    def big_at(self, nodes: Numbers) -> Numbers:
        """Page numbers of the overflow runs that hold the values of big nodes."""
        return _words(self.flat, self.data_at[nodes], "=i8")

    def require(self, right: npt.NDArray[np.bool_], what: str) -> None:
        """`right` holds for every node, else `DamagedError`."""
        if not right.all():
            raise DamagedError(f"page {self.numbers[self.page[right.argmin()]]} {what}")


class PageFile:
    """Reads pages of a file that others may append to. A page outside of the file is damage, never a crash."""

    def __init__(self, descriptor: int, *, page_size: int, pages: int) -> None:
        self.descriptor = descriptor
        self.page_size = page_size
        self.pages = pages

    def read(self, numbers: Numbers, *, size: int | None = None) -> Bytes:
        """The first `size` bytes of the pages (all bytes by default), `(pages, size)`.

        Each page must hold its own number.
        """
        size = size or self.page_size
        self.require_inside(numbers, np.ones_like(numbers))
        found = np.empty((len(numbers), size), np.uint8)
        if sys.platform == "linux":  # so that the disk reads them in parallel
            for number in numbers.tolist():
                os.posix_fadvise(self.descriptor, number * self.page_size, size, os.POSIX_FADV_WILLNEED)
        for row, number in zip(found, numbers.tolist(), strict=True):
            if os.preadv(self.descriptor, [row.data], number * self.page_size) != size:
                raise DamagedError(f"page {number} is missing")
        own = found[:, :8].copy().view("=i8")[:, 0]
        self.require(own == numbers, numbers, "is another one")
        return found

    def page(self, number: int) -> bytes:
        """All of one page."""
        if not 2 <= number < self.pages:
            raise DamagedError(f"page {number} is outside the file")
        found = os.pread(self.descriptor, self.page_size, number * self.page_size)
        if len(found) != self.page_size:
            raise DamagedError(f"page {number} is missing")
        return found

    def require_inside(self, starts: Numbers, lengths: Numbers) -> None:
        right = (starts >= 2) & (starts < self.pages) & (lengths <= self.pages - starts)
        self.require(right, starts, "is outside the file")

    @staticmethod
    def require(right: npt.NDArray[np.bool_], numbers: Numbers, what: str) -> None:
        if not right.all():
            raise DamagedError(f"page {numbers[right.argmin()]} {what}")

    def nodes(self, numbers: Numbers, kind: int, *, least: int, integer: bool = False) -> Nodes:
        """The nodes of branch or leaf pages, at least `least` in each page.

        Nodes are inside of their page and side by side, as LMDB's arithmetic of free space needs them, and their keys
        are in order. `integer`: keys are 8-byte integers of the machine.
        """
        pages, size = self.read(numbers), self.page_size
        words = pages.view(np.uint16)
        lower, upper = (words[:, column].astype(np.int64) for column in (6, 7))
        self.require(words[:, 5] == kind, numbers, "is of the wrong type")
        self.require(
            (lower >= HEAD) & (lower <= upper) & (upper <= size) & ((lower | upper) & 1 == 0),
            numbers,
            "has wrong bounds",
        )
        counts = (lower - HEAD) // 2
        self.require(counts >= least, numbers, "has too few entries")
        starts = np.cumsum(counts) - counts
        page = np.repeat(np.arange(len(numbers)), counts)
        slot = np.arange(len(page)) - starts[page]
        pointer = words[page, HEAD // 2 + slot].astype(np.int64)
        self.require(
            (pointer & 1 == 0) & (pointer >= upper[page]) & (pointer + _NODE <= size),
            numbers[page],
            "has a wrong pointer",
        )
        at = page * size + pointer
        flat = words.reshape(-1)
        low, high, flags, key_sizes = (flat[at // 2 + word].astype(np.int64) for word in range(4))
        value = low | high << 16
        inline = np.where(flags & BIG, 8, value) if kind == LEAF else 0
        lengths = _NODE + key_sizes + inline
        right = (pointer + lengths <= size) & (key_sizes <= _KEY_LIMIT)
        if kind == LEAF:
            large = _NODE + key_sizes + value > node_limit(self.page_size)
            right &= (key_sizes > 0) & (flags < 8) & ((flags & BIG != 0) | ~large)
        self.require(right, numbers[page], "has a node of a wrong size")
        nodes = Nodes(
            numbers=numbers,
            flat=pages.reshape(-1),
            counts=counts,
            starts=starts,
            page=page,
            at=at,
            key_sizes=key_sizes,
            data_sizes=value,
            flags=flags,
            children=value | flags << 32,
        )
        self._require_tiling(nodes, lengths, upper)
        real = (slot > 0) | (kind == LEAF)  # LMDB ignores the first key of a branch page
        nodes.require((key_sizes > 0) | ~real, "has an empty key")
        if integer:
            nodes.require((key_sizes == 8) | ~real, "has a key that is not a number")
        follows = np.flatnonzero(slot > (0 if kind == LEAF else 1))
        right = np.ones(len(page), np.bool_)
        right[follows] = _less(nodes, follows - 1, follows, integer=integer)
        nodes.require(right, "has keys out of order")
        return nodes

    def _require_tiling(self, nodes: Nodes, lengths: Numbers, upper: Numbers) -> None:
        """Nodes fill their page from `upper` to its end without gaps: deleting one moves the others by its size."""
        order = np.argsort(nodes.at, kind="stable")
        begin = nodes.at[order]
        end = begin + (lengths[order] + 1 & -2)
        base = np.arange(len(upper)) * self.page_size
        expected = np.concatenate([[0], end[:-1]])
        expected[nodes.starts] = base + upper
        right = begin == expected
        last = nodes.starts + nodes.counts - 1
        right[last] &= end[last] == base + self.page_size
        self.require(right, nodes.numbers[nodes.page[order]], "has nodes that overlap or leave a gap")

    def fixed(self, numbers: Numbers, width: int) -> tuple[Bytes, Numbers]:
        """Pages of sorted values of `width` bytes without nodes (LEAF2): their bytes `(pages, page_size)`, and how
        many values each holds."""
        pages = self.read(numbers)
        words = pages.view(np.uint16)
        pad, flags, lower, upper = (words[:, column].astype(np.int64) for column in (4, 5, 6, 7))
        self.require(flags == FIXED, numbers, "is of the wrong type")
        counts = _fixed_counts(pad, lower, upper, np.full_like(pad, self.page_size), width)
        self.require(counts > 0, numbers, "has wrong bounds")
        index = np.repeat(np.arange(len(numbers)), counts)
        slot = np.arange(len(index)) - (np.cumsum(counts) - counts)[index]
        at = index * self.page_size + HEAD + slot * width
        self.require(_rising(pages.reshape(-1), at, slot, width), numbers[index], "has values out of order")
        return pages, counts

    def sub_pages(self, nodes: Nodes, which: Numbers, width: int) -> Numbers:
        """How many values of `width` bytes are in the sub-page that is the data of each of the nodes `which`."""
        at, size = nodes.data_at[which], nodes.data_sizes[which]
        self.require(size >= HEAD, nodes.numbers[nodes.page[which]], "has a sub-page that is too small")
        root = _words(nodes.flat, at, "=i8")
        pad, flags, lower, upper = (_words(nodes.flat, at + offset, "=u2") for offset in (8, 10, 12, 14))
        counts = _fixed_counts(pad, lower, upper, size, width)
        right = (flags == SUB_PAGE) & (root >= 2) & (counts > 0)
        self.require(right, nodes.numbers[nodes.page[which]], "has a damaged sub-page")
        index = np.repeat(np.arange(len(which)), counts)
        slot = np.arange(len(index)) - (np.cumsum(counts) - counts)[index]
        rising = _rising(nodes.flat, at[index] + HEAD + slot * width, slot, width)
        self.require(rising, nodes.numbers[nodes.page[which[index]]], "has values out of order")
        return counts

    def run_lengths(self, starts: Numbers, sizes: Numbers) -> Numbers:
        """The lengths in pages of the runs that hold values of `sizes` bytes, as the heads of the runs say.

        A run may be longer than its value needs: LMDB leaves it so when it writes a value twice in one transaction,
        as it does with lists of free pages.
        """
        heads = self.read(starts, size=HEAD)
        lengths = heads.view(np.uint32)[:, 3].astype(np.int64)
        right = (heads.view(np.uint16)[:, 5] == OVERFLOW) & (lengths >= overflow_pages(sizes, self.page_size))
        self.require(right, starts, "is not an overflow page of its value's size")
        return lengths

    def value(self, start: int, size: int) -> bytes:
        """The value in an overflow run."""
        value = os.pread(self.descriptor, size, start * self.page_size + HEAD)
        if len(value) != size:
            raise DamagedError(f"page {start} is missing")
        return value


def _fixed_counts(pad: Numbers, lower: Numbers, upper: Numbers, size: Numbers, width: int) -> Numbers:
    """How many values are in pages or sub-pages of `size` bytes; 0 where the head contradicts itself.

    LMDB counts 2 bytes of each value in `lower` and the rest of its width in `upper`.
    """
    counts = (lower - HEAD) // 2
    right = (pad == width) & (lower >= HEAD) & (lower & 1 == 0) & (lower <= upper)
    right &= (HEAD + counts * width <= size) & (upper == size - counts * (width - 2))
    return np.where(right, counts, 0)


def _words(flat: Bytes, at: Numbers, kind: str) -> Numbers:
    """The integers that begin at the bytes `at` of `flat`, aligned or not."""
    width = np.dtype(kind).itemsize
    view: npt.NDArray[Any] = np.ndarray((len(flat) - width + 1,), kind, flat.data, strides=(1,))
    return view[at].astype(np.int64)


def _less(nodes: Nodes, left: Numbers, right: Numbers, *, integer: bool) -> npt.NDArray[np.bool_]:
    """Whether the keys of `left` come before those of `right`, 8 bytes at a time while they are equal."""
    sizes = (nodes.key_sizes[left], nodes.key_sizes[right])
    starts = (nodes.at[left] + _NODE, nodes.at[right] + _NODE)
    if integer:
        return _words(nodes.flat, starts[0], "=u8") < _words(nodes.flat, starts[1], "=u8")
    less = sizes[0] < sizes[1]  # decides where one key begins with the other
    open_ = np.arange(len(left))
    for done in range(0, _KEY_LIMIT, 8):
        words = [
            _prefix(nodes.flat, start[open_] + done, size[open_] - done)
            for start, size in zip(starts, sizes, strict=True)
        ]
        less[open_] = np.where(words[0] == words[1], less[open_], words[0] < words[1])
        equal = (words[0] == words[1]) & (np.maximum(sizes[0][open_], sizes[1][open_]) > done + 8)
        open_ = open_[equal]
        if not len(open_):
            break
    return less


def _prefix(flat: Bytes, at: Numbers, size: Numbers) -> npt.NDArray[np.uint64]:
    """Up to 8 of the `size` bytes at `at` as a big-endian number, with zeros behind the end."""
    view: npt.NDArray[Any] = np.ndarray((len(flat) - 7,), ">u8", flat.data, strides=(1,))
    last = len(flat) - 8
    words: npt.NDArray[np.uint64] = view[np.minimum(at, last)].astype(np.uint64)
    late = np.flatnonzero(at > last)  # a whole word there would reach past the end of `flat`
    words[late] <<= (8 * np.minimum(at[late] - last, 7)).astype(np.uint64)
    return words & _FIRST_BYTES[np.minimum(np.maximum(size, 0), 8)]


def _rising(flat: Bytes, at: Numbers, slot: Numbers, width: int) -> npt.NDArray[np.bool_]:
    """Whether each value of `width` bytes is greater than the one before it in its page (`slot` 0 is the first)."""
    right = np.ones(len(at), np.bool_)
    follows = np.flatnonzero(slot > 0)
    values = flat[at[:, None] + np.arange(width)]  # (values, width)
    rows = values.view(f"S{width}")[:, 0] if len(at) else np.empty(0, "S1")
    right[follows] = rows[follows - 1] < rows[follows]
    return right
