"""Postings in files: for each token, the rows that have it, with weights. They are checked when they are opened.

numpy would use whatever rows they name: a row that does not exist is an `IndexError` during a question, and a negative
one is the score of another chunk. The check is one pass over arrays that were just read for their checksum.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragkv.boundary.plainfile import open_plain

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["mapped_array", "require_postings"]


def mapped_array(path: Path, kinds: tuple[str, ...]) -> NDArray[Any]:
    """Map the one-dimensional array in a .npy file; `ValueError` unless its type is one of `kinds`, such as "int32".

    The result is a plain array over the map, because slicing a `np.memmap` takes ten times longer.
    """
    import numpy as np

    with os.fdopen(open_plain(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError(f"{path.name} is an array of another version")
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        # Check the shape here, because numpy's own product of a shape can overflow.
        if len(shape) != 1 or dtype not in [np.dtype(kind) for kind in kinds]:
            raise ValueError(f"{path.name} holds another array than it should")
        if file.tell() + shape[0] * dtype.itemsize != size:
            raise ValueError(f"{path.name} does not hold the numbers that it says")
        if not shape[0]:  # nothing to map
            return np.empty(0, dtype)
        return np.asarray(np.memmap(file, dtype, mode="r", offset=file.tell(), shape=shape))


def require_postings(
    starts: NDArray[Any], rows: NDArray[Any], weights: NDArray[np.float32], *, tokens: int, chunks: int
) -> None:
    """`ValueError` unless `starts` `(tokens + 1,)` divide `rows` and `weights`, and every row is that of a chunk."""
    import numpy as np

    if len(starts) != tokens + 1 or starts[0] != 0 or starts[-1] != len(rows) or len(rows) != len(weights):
        raise ValueError("its postings are not those of its tokens")
    if (starts[1:] < starts[:-1]).any():
        raise ValueError("its postings are cut backwards")
    if len(rows) and not (rows.min() >= 0 and rows.max() < chunks and np.isfinite(weights).all()):
        raise ValueError("its postings are of chunks that it does not have")
