"""One page checked by itself, when it is first needed (`ragkv.store.pages.guard`).

`PageFile.nodes` makes the same checks of hundreds of pages at once, but takes several times as long for a single one. A
test holds that they agree on damaged pages.
"""

from __future__ import annotations

import struct
from itertools import pairwise

from ragkv.store.pages.page import BIG, BRANCH, HEAD, LEAF, node_limit, overflow_pages
from ragkv.store.seal import DamagedError

__all__ = ["plain_nodes"]

_HEAD = struct.Struct("=q 2x H H H")
_NODE = struct.Struct("=4H")
_RUN = struct.Struct("=q")
_KEY_LIMIT = 511


def plain_nodes(page: bytes, number: int, *, branch: bool, pages: int) -> tuple[list[bytes], list[int]]:
    """The keys of a branch page with its children, or of a leaf with one value per key; `DamagedError` says what is
    wrong. `pages` is how many the file has. The first key of a branch page is empty, because LMDB ignores it."""
    size = len(page)
    own, kind, lower, upper = _HEAD.unpack_from(page)
    if own != number:
        raise DamagedError(f"page {number} is another one")
    if kind != (BRANCH if branch else LEAF):
        raise DamagedError(f"page {number} is of the wrong type")
    if not HEAD <= lower <= upper <= size or (lower | upper) & 1:
        raise DamagedError(f"page {number} has wrong bounds")
    count = (lower - HEAD) // 2
    if count < 1 + branch:
        raise DamagedError(f"page {number} has too few entries")
    keys: list[bytes] = []
    children: list[int] = []
    spans: list[tuple[int, int]] = []
    most = node_limit(size)
    for at in struct.unpack_from(f"={count}H", page, HEAD):
        if at & 1 or at < upper or at + _NODE.size > size:
            raise DamagedError(f"page {number} has a wrong pointer")
        low, high, flags, length = _NODE.unpack_from(page, at)
        value, end = low | high << 16, at + _NODE.size + length
        if branch:
            children.append(value | flags << 32)
        else:
            large = _NODE.size + length + value > most
            if not length or flags & ~BIG or (large and not flags):
                raise DamagedError(f"page {number} has a node of a wrong size or kind")
            if flags and end + _RUN.size <= size:
                start = _RUN.unpack_from(page, end)[0]
                if not 2 <= start < pages or overflow_pages(value, size) > pages - start:
                    raise DamagedError(f"page {start} is outside the file")
            end += _RUN.size if flags else value
        if end > size or length > _KEY_LIMIT:
            raise DamagedError(f"page {number} has a node of a wrong size")
        spans.append((at, end + 1 & -2))
        keys.append(page[at + _NODE.size : at + _NODE.size + length])
    if branch:
        keys[0] = b""
    if any(left >= right for left, right in pairwise(keys)):
        raise DamagedError(f"page {number} has keys out of order")
    expected = upper
    for start, end in sorted(spans):
        if start != expected:
            raise DamagedError(f"page {number} has nodes that overlap or leave a gap")
        expected = end
    if expected != size:
        raise DamagedError(f"page {number} has nodes that overlap or leave a gap")
    return keys, children
