"""FAISS indexes by their factory string: made, trained, asked, and refused in one sentence when they cannot serve.

Row numbers are the ids and rows are never removed, so an index needs no `IDMap2` around it (which is accepted, and
around IVF would be wrong the day that something is removed): deleted chunks are left out of a search by a selector.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ragkv.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["fill", "is_flat", "least_rows", "make", "parameters", "selector"]

_POINTS_PER_CENTROID = 39  # below it FAISS warns, on stderr, that its clusters mean little
_CODES = 256  # centroids of a byte, in product and residual quantisers
_BLOCK = 8192  # rows added at once


def _inner(factory: str) -> str:
    """Without the maps of ids around it, which row numbers make needless."""
    return re.sub(r"^(IDMap2?,)+", "", factory)


def is_flat(factory: str) -> bool:
    """All vectors are compared, as the exact search does anyway."""
    return _inner(factory) == "Flat"


def make(factory: str, dimension: int) -> Any:
    """An empty index for inner products; `ConfigError` when FAISS has none of that name and dimension.

    Neither is one that cannot leave chunks out of a search: what is deleted would be found.
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
        # An index that is not trained says so; before or instead, one that knows no selectors says that.
        if "params" in _reason(error, clauses=2) or isinstance(_innermost(index), faiss.IndexPQ):
            raise _refused(factory, "FAISS cannot leave deleted chunks out of its searches") from error
    return index


def _too_large(factory: str) -> bool:
    """A factory string stands in the index's own configuration, and FAISS takes memory for whatever number it reads."""
    most = {"IVF": 1 << 20, "HNSW": 512, "NSG": 512, "x": 16}
    numbers = re.findall(r"(IVF|HNSW|NSG|x)?([0-9]+)", factory)
    return len(factory) > 200 or any(
        len(number) > 9 or int(number) > most.get(name, 1 << 16) for name, number in numbers
    )


def least_rows(index: Any, factory: str) -> int:
    """How many vectors its training wants."""
    import faiss

    lists = faiss.try_extract_index_ivf(index)
    centroids = max(lists.nlist if lists else 0, _CODES if re.search(r"PQ|RQ|LSQ|Residual", factory) else 0)
    return _POINTS_PER_CENTROID * int(centroids)


def fill(index: Any, factory: str, vectors: NDArray[np.float32]) -> None:
    """Train on `vectors` (rows, d) and add them."""
    try:
        index.train(vectors)
        for start in range(0, len(vectors), _BLOCK):
            index.add(vectors[start : start + _BLOCK])
    except RuntimeError as error:
        raise _refused(factory, f"FAISS fails on {len(vectors)} chunks: {_reason(error)}") from error


def selector(allowed: NDArray[np.bool_]) -> Any:
    """Rows that a search may find: a bit each, so that asking costs the same however many there are."""
    import faiss
    import numpy as np

    return faiss.IDSelectorBitmap(np.packbits(allowed, bitorder="little"))


def parameters(index: Any, some: Any, *, nprobe: int, ef_search: int) -> Any:
    """Search settings in the class that this index wants; wrappers hand them on. `some`: a selector, or None."""
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
    """What is inside refinement and transformation."""
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
    """The last clauses of FAISS's message, whose front is C++ names and paths."""
    return ": ".join(str(error).strip().split(": ")[-clauses:]) or "out of memory"
