"""FAISS files of a segment, opened only when they are what `DenseIndex` wrote.

FAISS believes its files: it takes the memory that they name, and searches by the numbers in them. A flat index is plain
enough to be checked byte for byte before FAISS sees it. An approximate one is not: only one that bears this user's mark
(`ragkv.boundary.ownmark`) is read, and any other counts as damage, as the store's vectors give it anew.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

from ragkv.boundary.ownmark import has_mark
from ragkv.boundary.plainfile import open_plain, require_plain

__all__ = ["read_vectors"]

_FLAT = struct.Struct("<4s i q q q ? i Q")
"""Kind, width of a vector, count of vectors, two unused fields, whether it is trained, metric, count of numbers."""
_INNER_PRODUCT = 0
_WIDEST = 1 << 16


def read_vectors(flat: Path, near: Path, mark: Path, rows: int) -> dict[str, Any]:
    """`flat`, `near` and `shared` of a segment of so many rows, their large arrays left in the files.

    `ValueError`, `RuntimeError` (FAISS) or `OSError` for files that are not a segment's.
    """
    import faiss

    exact: Any = _flat(flat, rows) if require_plain(flat) else None
    close = _near(near, mark, rows) if require_plain(near) else None
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


def _near(path: Path, mark: Path, rows: int) -> Any:
    """An approximate index over so many rows, of this user's own making."""
    import faiss

    if not require_plain(mark) or not has_mark(path, mark):
        raise ValueError(f"{path.name} is not known to be of this user's making")
    index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    if (index.ntotal, index.metric_type, index.is_trained) != (rows, faiss.METRIC_INNER_PRODUCT, True):
        raise ValueError(f"{path.name} is an index of another kind")
    return index
