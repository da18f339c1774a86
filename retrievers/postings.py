"""Postings as files keep them: by token, the rows that have it and their weights. Checked when they are opened.

numpy follows whatever they say: one wrong row is an `IndexError` in the middle of a question, a negative one the score
of another chunk. The check is one pass over arrays whose checksum was taken a moment ago.
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
    """The one-dimensional array in a .npy file, of one of these types ("int32"), without reading it.

    `ValueError` for any other. A plain array over the map: a slice of a memmap is a Python object with a history, ten
    times dearer.
    """
    import numpy as np

    with os.fdopen(open_plain(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError(f"{path.name} is an array of another version")
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        # Counted here, as numpy's own product of a shape wraps around.
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
    """`ValueError` unless `starts` `(tokens + 1,)` cut `rows` and `weights`, and every row is that of a chunk."""
    import numpy as np

    if len(starts) != tokens + 1 or starts[0] != 0 or starts[-1] != len(rows) or len(rows) != len(weights):
        raise ValueError("its postings are not those of its tokens")
    if (starts[1:] < starts[:-1]).any():
        raise ValueError("its postings are cut backwards")
    if len(rows) and not (rows.min() >= 0 and rows.max() < chunks and np.isfinite(weights).all()):
        raise ValueError("its postings are of chunks that it does not have")
