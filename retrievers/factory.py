"""Make, train and search FAISS indexes by their factory string, and refuse in one sentence those that cannot serve.

Row numbers are the ids, and rows are never removed: a selector leaves deleted chunks out of a search. So an index needs
no `IDMap2` around it; a factory string may have one, and it is ignored.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ragkv.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["fill", "is_flat", "least_rows", "make", "parameters", "selector"]

_POINTS_PER_CENTROID = 39  # with fewer, FAISS warns on stderr that its clusters are poor
_CODES = 256  # centroids of one byte, in product and residual quantisers
_BLOCK = 8192  # rows added at once


def _inner(factory: str) -> str:
    """The factory string without maps of ids."""
    return re.sub(r"^(IDMap2?,)+", "", factory)


def is_flat(factory: str) -> bool:
    """Whether the index is exact, so that the vectors themselves are enough."""
    return _inner(factory) == "Flat"


def make(factory: str, dimension: int) -> Any:
    """An empty index for inner products; `ConfigError` when FAISS cannot make it for this dimension.

    An index that cannot leave rows out of a search is refused too: it would find deleted chunks.
    """
    import faiss
    import numpy as np

    if not (factory.isascii() and factory.isprintable() and not re.match(r"IVF0*[,_(]", _inner(factory))):
        raise _refused(factory, "it is not the name of an index")
    if _too_large(factory):
        raise _refused(factory, "FAISS cannot make it: its tables alone would take gigabytes")
    try:
        index = faiss.index_factory(dimension, _inner(factory), faiss.METRIC_INNER_PRODUCT)
    except (RuntimeError, MemoryError) as error:
        raise _refused(factory, f"FAISS cannot make it for vectors of {dimension} numbers: {_reason(error)}") from error
    some = selector(np.ones(1, dtype=np.bool_))
    try:
        index.search(
            np.ones((1, dimension), dtype=np.float32), 1, params=parameters(index, some, nprobe=1, ef_search=1)
        )
    except RuntimeError as error:
        # Any untrained index fails here. One that does not support selectors complains about `params` instead.
        if "params" in _reason(error, clauses=2) or isinstance(_innermost(index), faiss.IndexPQ):
            raise _refused(factory, "FAISS cannot leave deleted chunks out of its searches") from error
    return index


def _too_large(factory: str) -> bool:
    """Whether the numbers in a factory string are too large: FAISS allocates memory for whatever it reads.

    The string may come from the configuration of an index that somebody else made.
    """
    most = {"IVF": 1 << 20, "HNSW": 512, "NSG": 512, "x": 16}
    numbers = re.findall(r"(IVF|HNSW|NSG|x)?([0-9]+)", factory)
    return len(factory) > 200 or any(
        len(number) > 9 or int(number) > most.get(name, 1 << 16) for name, number in numbers
    )


def least_rows(index: Any, factory: str) -> int:
    """How many vectors the index needs for training."""
    import faiss

    lists = faiss.try_extract_index_ivf(index)
    centroids = max(lists.nlist if lists else 0, _CODES if re.search(r"PQ|RQ|LSQ|Residual", factory) else 0)
    return _POINTS_PER_CENTROID * int(centroids)


def fill(index: Any, factory: str, vectors: NDArray[np.float32]) -> None:
    """Train the index on `vectors` (rows, d), and add them."""
    try:
        index.train(vectors)
        for start in range(0, len(vectors), _BLOCK):
            index.add(vectors[start : start + _BLOCK])
    except RuntimeError as error:
        raise _refused(factory, f"FAISS fails on {len(vectors)} chunks: {_reason(error)}") from error


def selector(allowed: NDArray[np.bool_]) -> Any:
    """A selector of the rows that a search may find; with a bit per row, its cost does not depend on their number."""
    import faiss
    import numpy as np

    return faiss.IDSelectorBitmap(np.packbits(allowed, bitorder="little"))


def parameters(index: Any, some: Any, *, nprobe: int, ef_search: int) -> Any:
    """Search parameters in the class that this index expects; wrappers get those of the index inside.

    `some` is a selector, or None for all rows.
    """
    import faiss

    index = faiss.downcast_index(index)
    more = {} if some is None else {"sel": some}
    if isinstance(index, faiss.IndexPreTransform):
        inner = parameters(index.index, some, nprobe=nprobe, ef_search=ef_search)
        return faiss.SearchParametersPreTransform(index_params=inner)
    if isinstance(index, faiss.IndexRefine):
        inner = parameters(index.base_index, some, nprobe=nprobe, ef_search=ef_search)
        return faiss.IndexRefineSearchParameters(base_index_params=inner)
    if isinstance(index, faiss.IndexIVFPQ):
        return faiss.IVFPQSearchParameters(nprobe=nprobe, **more)
    if isinstance(index, faiss.IndexIVF):
        return faiss.SearchParametersIVF(nprobe=nprobe, **more)
    if isinstance(index, faiss.IndexHNSW):
        return faiss.SearchParametersHNSW(efSearch=ef_search, **more)
    return faiss.SearchParameters(**more) if more else None


def _innermost(index: Any) -> Any:
    """The index within refinement and transformation."""
    import faiss

    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexPreTransform):
        return _innermost(index.index)
    return _innermost(index.base_index) if isinstance(index, faiss.IndexRefine) else index


def _refused(factory: str, why: str) -> ConfigError:
    return ConfigError(
        f"{factory!r} cannot be the dense index ({why}); write a FAISS factory string such as Flat, IVF1024,Flat, "
        "HNSW32 or OPQ64,IVF1024,PQ64."
    )


def _reason(error: BaseException, clauses: int = 1) -> str:
    """The last clauses of FAISS's message, which begins with C++ names and paths."""
    return ": ".join(str(error).strip().split(": ")[-clauses:]) or "out of memory"
