"""FAISS files of a segment, opened only when they are what `DenseIndex` wrote.

FAISS believes its files: it takes the memory that they name, and searches by the numbers in them. A flat index is plain
enough to be checked byte for byte before FAISS sees it. An approximate one is FAISS's own business (recent releases
check what they read); here the memory that it may take is bounded by its file, and what it says of itself compared
with the segment.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ragkv.files.plainfile import open_plain, require_plain

__all__ = ["read_vectors"]

_FLAT = struct.Struct("<4s i q q q ? i Q")
"""Kind, width of a vector, count of vectors, two unused fields, whether it is trained, metric, count of numbers."""
_INNER_PRODUCT = 0
_WIDEST = 1 << 16
_LIMIT = "get_deserialization_vector_byte_limit"
_limit_lock = threading.Lock()
"""FAISS has one limit for the whole process: two threads would leave each other's behind."""


def read_vectors(flat: Path, near: Path, rows: int) -> dict[str, Any]:
    """`flat`, `near` and `shared` of a segment of so many rows, their large arrays left in the files.

    `ValueError`, `RuntimeError` (FAISS) or `OSError` for files that are not a segment's.
    """
    import faiss

    exact: Any = _flat(flat, rows) if require_plain(flat) else None
    close = _near(near, rows) if require_plain(near) else None
    shared = exact is None
    if shared:
        if not isinstance(close, faiss.IndexHNSWFlat):
            raise FileNotFoundError(f"{flat.name} is not there")
        exact = faiss.downcast_index(close.storage)
        if not isinstance(exact, faiss.IndexFlat) or exact.metric_type != faiss.METRIC_INNER_PRODUCT:
            raise ValueError("the approximate index holds no vectors")
    if exact.ntotal != rows or (close is not None and (close.ntotal, close.d) != (rows, exact.d)):
        raise ValueError("the vectors are of another set of chunks")
    return {"flat": exact, "near": close, "shared": shared}


def _flat(path: Path, rows: int) -> Any:
    """A flat index for inner products; every byte of its head is accounted for."""
    import faiss

    with os.fdopen(open_plain(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(_FLAT.size)
    if len(head) < _FLAT.size:
        raise ValueError(f"{path.name} is too short")
    kind, width, count, _, _, trained, metric, numbers = _FLAT.unpack(head)
    if (
        (kind, count, trained, metric) != (b"IxFI", rows, True, _INNER_PRODUCT)
        or not 0 < width <= _WIDEST
        or numbers != rows * width
        or size != _FLAT.size + 4 * numbers
    ):
        raise ValueError(f"{path.name} holds no vectors of {rows} chunks")
    return faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)


def _near(path: Path, rows: int) -> Any:
    """An approximate index over so many rows; what it keeps of each may not be more than its file."""
    import faiss

    size = path.lstat().st_size
    with _limited(size):
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    lists = faiss.try_extract_index_ivf(index)
    if lists is not None and (
        lists.nlist > size
        or lists.quantizer.ntotal != lists.nlist
        or lists.invlists.nlist != lists.nlist
        or lists.invlists.code_size != lists.code_size
        or sum(map(lists.invlists.list_size, range(lists.nlist))) != rows
    ):
        raise ValueError(f"{path.name} contradicts itself")
    if index.metric_type != faiss.METRIC_INNER_PRODUCT or not index.is_trained:
        raise ValueError(f"{path.name} is an index of another kind")
    return index


@contextmanager
def _limited(size: int) -> Iterator[None]:
    """FAISS takes no more than `size` bytes for one array meanwhile, in releases that can be told so."""
    import faiss

    if not hasattr(faiss, _LIMIT):
        yield
        return
    with _limit_lock:
        before = faiss.get_deserialization_vector_byte_limit()
        faiss.set_deserialization_vector_byte_limit(min(before, size))
        try:
            yield
        finally:
            faiss.set_deserialization_vector_byte_limit(before)
