"""Open the FAISS files of a segment, but only if they are what `DenseIndex` writes.

FAISS believes its files: it allocates the memory that they name, and searches by the numbers in them. A flat index is
simple enough to be checked in full before FAISS sees it. An approximate index is not, so that it is only read if it has
this user's mark (`ragkv.boundary.ownmark`). Any other counts as damage, and is rebuilt from the store's vectors.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragkv.boundary.ownmark import has_mark
from ragkv.boundary.plainfile import open_plain, require_plain

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Vectors", "read_vectors"]

_FLAT = struct.Struct("<4s i q q q ? i Q")
"""The kind, the numbers of a vector, the count of vectors, two unused fields, whether it is trained, the metric, the
count of all numbers."""
_INNER_PRODUCT = 0
_WIDEST = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Vectors:
    """The vectors of a segment.

    `flat` holds all vectors, in rows. `near` is an approximate index over the same rows, or None. If `near` holds the
    vectors themselves (HNSW32), `flat` is the part of it that does, and `shared` is True.
    """

    flat: Any
    near: Any = None
    shared: bool = False

    def rows(self) -> NDArray[np.float32]:
        """(rows, d), a read-only view of FAISS's memory, which may be a map; valid as long as this object lives."""
        import faiss
        import numpy as np

        if not self.flat.ntotal:
            return np.empty((0, self.flat.d), dtype=np.float32)
        view = faiss.rev_swig_ptr(self.flat.get_xb(), self.flat.ntotal * self.flat.d)
        view.flags.writeable = False
        return view.reshape(self.flat.ntotal, self.flat.d)  # type: ignore[no-any-return]


def read_vectors(flat: Path, near: Path, mark: Path, rows: int) -> Vectors:
    """The vectors of a segment with this number of rows; their arrays are mapped, not read.

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
    return Vectors(flat=exact, near=close, shared=shared)


def _flat(path: Path, rows: int) -> Any:
    """A flat index for inner products. Every field of its header is checked."""
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
    """An approximate index over this number of rows, which this user's ragkv has written."""
    import faiss

    if not require_plain(mark) or not has_mark(path, mark):
        raise ValueError(f"{path.name} is not known to be of this user's making")
    index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    if (index.ntotal, index.metric_type, index.is_trained) != (rows, faiss.METRIC_INNER_PRODUCT, True):
        raise ValueError(f"{path.name} is an index of another kind")
    return index
