"""Dense retrieval by FAISS: the chunks whose unit vectors have the largest inner product with the question's.

Every segment has its vectors in a flat FAISS index, which is exact and, once loaded, mapped, so that opening 400 MB
only takes as long as checking them. With a factory string other than `Flat`, segments that are large enough also have
an approximate index. It only proposes candidates. Scores are always inner products with the vectors themselves,
computed in float64, so that a score depends neither on the kind of index nor on what else is in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ragkv.boundary.ownmark import mark_of
from ragkv.boundary.plainfile import write_plain
from ragkv.errors import ConfigError, RetrievalError
from ragkv.retrievers.base import ScoreKind
from ragkv.retrievers.factory import fill, is_flat, least_rows, make, parameters, selector
from ragkv.retrievers.faissfile import Vectors, read_vectors
from ragkv.retrievers.segment import Segment, SegmentedIndex

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["DenseConfig", "DenseIndex"]

_BLOCK = 1024  # vectors that are passed to FAISS at once
_SPARE = 16  # candidates beyond those wanted, so that a tie at the cut is seen without a second search
_TIE = 1e-5  # the rounding of float32 sums cannot change the order of scores that differ by more
_UNIT = 0.01  # how far a length may be from 1; float16 vectors are off by a thousandth


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseConfig:
    """`factory` is a FAISS factory string. `IDMap2,` in front of it changes nothing, because rows are the ids.

    Segments with fewer than `exact_below` chunks are searched exactly, whatever the factory, because searching 10,000
    vectors of 1024 numbers takes 4 ms. `nprobe` is how many lists of an IVF index are searched, `ef_search` how many
    candidates HNSW keeps. An approximate index proposes `refine` times as many chunks as are wanted.
    """

    factory: str = "IDMap2,Flat"
    nprobe: int = 16
    ef_search: int = 64
    exact_below: int = 10_000
    refine: int = 4

    def __post_init__(self) -> None:
        if not isinstance(self.factory, str):
            raise ConfigError("factory of the dense index must be a text.")
        for name in ("nprobe", "ef_search", "exact_below", "refine"):
            number = getattr(self, name)
            if type(number) is not int or not 1 <= number < 1 << 31:
                raise ConfigError(f"{name} of the dense index must be at least 1, not {str(number)[:30]}.")

    def check(self, dimension: int) -> None:
        """`ConfigError` when FAISS cannot make the index for `dimension` numbers; call this before embedding."""
        make(self.factory, dimension)


class DenseIndex(SegmentedIndex["NDArray[np.float32]", "NDArray[np.float32]", Vectors]):
    """The `VectorIndex` over unit vectors `(d,)`; scores are cosines. Zero vectors are accepted and never found."""

    name = "dense"
    parts = ("flat", "near", "mark")
    score_kind: ScoreKind = "dense"

    def __init__(self, config: DenseConfig | None = None) -> None:
        super().__init__()
        self.config = config or DenseConfig()

    def fields(self) -> dict[str, Any]:
        return asdict(self.config)

    @classmethod
    def _configured(cls, fields: dict[str, Any]) -> Self:
        return cls(DenseConfig(**fields))

    def _is_blank(self, chunk_id: str, vector: NDArray[np.float32]) -> bool:
        return _is_zero(vector, f"The vector of chunk {chunk_id!r}")

    def _gather(self, vectors: Iterator[NDArray[np.float32]], others: Sequence[Vectors]) -> Vectors:
        import faiss
        import numpy as np

        dimension = others[0].flat.d if others else None
        flat: Any = None
        while block := list(islice(vectors, _BLOCK)):
            if dimension is None:
                dimension = len(block[0])
                self.config.check(dimension)
            strange = next((len(vector) for vector in block if len(vector) != dimension), None)
            if strange is not None:
                raise RetrievalError(
                    f"A vector of {strange} numbers came among vectors of {dimension}: one index is of one embedder; "
                    "embed the documents again."
                )
            flat = flat or faiss.IndexFlatIP(dimension)
            flat.add(np.stack(block, dtype=np.float32, casting="same_kind"))
        return self._indexed(flat or faiss.IndexFlatIP(dimension or 1))

    def _merge(self, parts: Sequence[tuple[Vectors, NDArray[np.bool_]]]) -> Vectors:
        import faiss

        flat = faiss.IndexFlatIP(parts[0][0].flat.d)
        for data, kept in parts:
            rows = data.rows()
            for start in range(0, len(rows), _BLOCK):
                block = slice(start, start + _BLOCK)
                flat.add(rows[block][kept[block]])
        return self._indexed(flat)

    def _indexed(self, flat: Any) -> Vectors:
        """The vectors in `flat`, with an approximate index if the factory says so and there are enough rows."""
        import faiss

        exact = Vectors(flat=flat)
        if is_flat(self.config.factory) or flat.ntotal < self.config.exact_below:
            return exact
        near = make(self.config.factory, flat.d)
        if flat.ntotal < least_rows(near, self.config.factory):
            return exact
        fill(near, self.config.factory, exact.rows())
        shared = isinstance(near, faiss.IndexHNSWFlat)
        return Vectors(flat=faiss.downcast_index(near.storage) if shared else flat, near=near, shared=shared)

    def _query(self, query: NDArray[np.float32], segments: Sequence[Segment[Vectors]]) -> NDArray[np.float32] | None:
        import numpy as np

        if _is_zero(query, "The question's vector") or not segments:
            return None
        width = segments[0].data.flat.d
        if len(query) != width:
            raise RetrievalError(
                f"The question's vector has {len(query)} numbers and the index is of vectors of {width}: "
                "ask with the embedder that the documents were embedded with."
            )
        return np.ascontiguousarray(query, dtype=np.float32)[None]

    def _search(
        self,
        segment: Segment[Vectors],
        query: NDArray[np.float32],
        k: int,
        allowed: NDArray[np.bool_] | None,
        *,
        exact: bool,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """`exact`: without the approximate index, which finds too few where few rows are allowed."""
        import numpy as np

        data = segment.data
        living = int(data.flat.ntotal if allowed is None else allowed.sum())
        near = None if exact else data.near
        some = None if allowed is None else selector(allowed)
        config = self.config
        index = data.flat if near is None else near
        ask = partial(
            index.search, query, params=parameters(index, some, nprobe=config.nprobe, ef_search=config.ef_search)
        )
        want = k + _SPARE if near is None else max(k * config.refine, k + _SPARE)
        while True:
            want = min(want, living)
            scores, rows = (found[0] for found in ask(want))  # (want,), row -1 where there are not so many
            real = (rows >= 0) & (rows < data.flat.ntotal)
            rows, scores = rows[real], scores[real]
            # Some approximate indexes give distances and some similarities, so compare by the difference only.
            if len(rows) < want or want == living or abs(scores[-1] - scores[k - 1]) > _TIE:
                break
            want *= 4
        if near is None and len(rows) > k:
            rows = rows[scores >= scores[k - 1] - _TIE]
        # Sum row by row: the rounding of a matrix product depends on which other rows are multiplied.
        exactly = (data.rows()[rows].astype(np.float64) * query.astype(np.float64)).sum(axis=1)
        return rows, exactly.astype(np.float32)

    def _write(self, data: Vectors, folder: Path, name: str) -> None:
        import faiss

        try:
            if not data.shared:
                faiss.write_index(data.flat, str(folder / f"{name}.flat"))
            if data.near is not None:
                near = folder / f"{name}.near"
                faiss.write_index(data.near, str(near))
                write_plain(folder / f"{name}.mark", mark_of(near))
        except RuntimeError as error:
            raise OSError(str(error)) from error

    def _read(self, folder: Path, name: str, rows: int) -> Vectors:
        flat, near, mark = (folder / f"{name}.{part}" for part in self.parts)
        return read_vectors(flat, near, mark, rows)

    def _agree(self, data: Sequence[Vectors]) -> bool:
        return len({vectors.flat.d for vectors in data}) < 2


def _is_zero(vector: NDArray[Any], what: str) -> bool:
    """True for a zero vector (of an empty text), False for a unit vector; `RetrievalError` for any other."""
    import numpy as np

    if vector.ndim != 1:
        raise RetrievalError(f"{what} has the shape {vector.shape}; an index holds one vector (d,) for each chunk.")
    square = float(np.dot(vector, vector)) if vector.dtype == np.float32 else float(np.square(vector, dtype="f8").sum())
    if square == 0:
        return True
    if not abs(square - 1) < 2 * _UNIT:  # NaN too
        raise RetrievalError(f"{what} is of length {square**0.5:.3g}, not 1; normalise what the embedder gives.")
    return False
