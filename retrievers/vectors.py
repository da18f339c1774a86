"""Vector search: dense (FAISS), learned sparse (token weights, as in SPLADE and bge-m3), late interaction (ColBERT).

Dense: the chunks whose unit vectors have the largest inner product with the query's. Each segment stores its vectors as
a memory-mapped array and searches it exactly. With a FAISS factory string other than `Flat`, large segments also have
an approximate index. It only proposes candidates: scores are always inner products with the vectors themselves, in
float64, so they depend neither on the kind of index nor on its other content. Row numbers are the ids and rows are
never removed; a selector hides deleted chunks.

FAISS trusts its files: it allocates the memory that they name. An approximate index is only read if it has this user's
keyed stamp (`ragkv.util.files`); otherwise it counts as damaged and is rebuilt from the store's vectors.

Sparse: a segment stores, for each token, the rows that contain it with their weights. A query adds up the postings of
its tokens with `np.add.at`, as bm25s does. On 100,000 chunks of 163 tokens and queries of 14 tokens, scipy's sparse
product, `bincount` and fancy indexing were up to three times slower; dense columns for common tokens were a fifth
faster but took 125 MB more.

Late interaction compares a query's token vectors with those of each candidate. It is too expensive for all chunks, so
it scores the candidates of a cheaper index, with vectors from the store.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ragkv.errors import ConfigError, RetrievalError
from ragkv.retrievers.arrays import Postings, best_rows, mapped_array, term_hashes
from ragkv.retrievers.segments import IndexSegment, SegmentedIndex
from ragkv.util import batches
from ragkv.util.files import has_keyed_checksum, keyed_checksum, require_plain, write_plain

_Asked: TypeAlias = tuple[NDArray[Any], NDArray[np.float32]]
"""The hashes of a question's tokens and their weights."""

_POINTS_PER_CENTROID = 39  # with fewer, FAISS warns on stderr that its clusters are poor
_CODES = 256  # centroids of one byte, in product and residual quantisers
_ADD_BLOCK = 8192  # rows added at once
_SCALAR = "SQ(?:4|6|8|fp16|bf16)"
_KNOWN = re.compile(
    (
        r"(?:(?:OPQ#(?:_#)?|PCAW?R?#|RR#),)?"
        rf"(?:Flat|{_SCALAR}|HNSW@(?:,(?:Flat|{_SCALAR}|PQ#))?|IVF#(?:_HNSW@)?,(?:Flat|{_SCALAR}|PQ#(?:x#)?))"
        rf"(?:,(?:RFlat|Refine\((?:Flat|{_SCALAR})\)))?"
    )
    .replace("#", "[1-9][0-9]*")
    .replace("@", "(?:[2-9]|[1-9][0-9]+)")  # FAISS crashes on a graph of one neighbour
)
"""Supported factory strings: inner products, with selectors. Most other kinds of FAISS cannot exclude rows."""


def _inner(factory: str) -> str:
    """The factory string without `IDMap`."""
    return re.sub(r"^(IDMap2?,)+", "", factory)


def make(factory: str, dimension: int) -> Any:
    """An empty index for inner products; `ConfigError` if FAISS cannot create it for this dimension.

    Only supported kinds are passed to FAISS. Others cannot exclude rows, so they would find deleted chunks, and some
    crash the process. The string may come from an untrusted `ragkv.toml`.
    """
    import faiss

    if not _KNOWN.fullmatch(_inner(factory)):
        raise _refused(
            factory, "it is none of the kinds that ragkv knows; FAISS cannot leave deleted chunks out of most"
        )
    if _too_large(factory):
        raise _refused(factory, "FAISS cannot make it: its tables alone would take gigabytes")
    try:
        return faiss.index_factory(dimension, _inner(factory), faiss.METRIC_INNER_PRODUCT)
    except (RuntimeError, MemoryError) as error:
        raise _refused(factory, f"FAISS cannot make it for vectors of {dimension} numbers: {_reason(error)}") from error


def _too_large(factory: str) -> bool:
    """Whether the numbers in a factory string, which may be untrusted, would make FAISS allocate too much memory."""
    most = {"IVF": 1 << 20, "HNSW": 512, "NSG": 512, "x": 16}
    numbers = re.findall(r"(IVF|HNSW|NSG|x)?([0-9]+)", factory)
    return len(factory) > 200 or any(
        len(number) > 9 or int(number) > most.get(name, 1 << 16) for name, number in numbers
    )


def least_rows(index: Any, factory: str) -> int:
    """The number of vectors that training needs."""
    import faiss

    lists = faiss.try_extract_index_ivf(index)
    centroids = max(lists.nlist if lists else 0, _CODES if re.search(r"PQ|RQ|LSQ|Residual", factory) else 0)
    return _POINTS_PER_CENTROID * int(centroids)


def fill(index: Any, factory: str, vectors: NDArray[np.float32]) -> None:
    """Train the index on `vectors` (rows, d) and add them."""
    try:
        index.train(vectors)
        for start in range(0, len(vectors), _ADD_BLOCK):
            index.add(vectors[start : start + _ADD_BLOCK])
    except RuntimeError as error:
        raise _refused(factory, f"FAISS fails on {len(vectors)} chunks: {_reason(error)}") from error


def parameters(index: Any, some: Any) -> Any:
    """Search parameters in the class that this index expects; wrappers get those of the wrapped index.

    `some` is a selector, or None for all rows.
    """
    import faiss

    index = faiss.downcast_index(index)
    more = {} if some is None else {"sel": some}
    if isinstance(index, faiss.IndexPreTransform):
        inner = parameters(index.index, some)
        return faiss.SearchParametersPreTransform(index_params=inner)
    if isinstance(index, faiss.IndexRefine):
        inner = parameters(index.base_index, some)
        return faiss.IndexRefineSearchParameters(base_index_params=inner)
    if isinstance(index, faiss.IndexIVFPQ):
        return faiss.IVFPQSearchParameters(nprobe=NPROBE, **more)
    if isinstance(index, faiss.IndexIVF):
        return faiss.SearchParametersIVF(nprobe=NPROBE, **more)
    if isinstance(index, faiss.IndexHNSW):
        return faiss.SearchParametersHNSW(efSearch=EF_SEARCH, **more)
    return faiss.SearchParameters(**more) if more else None


def _refused(factory: str, why: str) -> ConfigError:
    return ConfigError(
        f"index_factory = {factory!r} cannot be the dense index ({why}); write a FAISS factory string such as "
        "Flat, IVF1024,Flat, HNSW32 or OPQ64,IVF1024,PQ64."
    )


def _reason(error: BaseException) -> str:
    """The last clause of FAISS's message, which begins with C++ names and paths."""
    return str(error).strip().split(": ")[-1] or "out of memory"


FLAT = "IDMap2,Flat"
"""The factory string of the exact index. A leading `IDMap2,` is ignored, because rows are the ids."""
NPROBE = 16  # IVF lists searched
EF_SEARCH = 64  # HNSW candidates
EXACT_BELOW = 10_000  # smaller segments are always searched exactly: 10,000 vectors of dimension 1024 take 4 ms
REFINE = 4  # an approximate index proposes this many times the wanted number of chunks
EXTRA = 16  # additional candidates, so that a tie at the cut needs no second search
TIE = 1e-5  # the rounding of float32 sums cannot change the order of scores that differ by more
_BLOCK = 1024  # vectors stacked at once
_WIDEST = 1 << 16
_UNIT = 0.01  # how far a length may be from 1; float16 vectors are off by a thousandth


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Vectors:
    """The vectors of a segment, and an approximate index over the same rows, or None."""

    rows: NDArray[np.float32]  # (rows, d)
    near: Any = None


class DenseIndex(SegmentedIndex[NDArray[np.float32], NDArray[np.float32], Vectors]):
    """The index over unit vectors `(d,)`; scores are cosines. Zero vectors are accepted and never found."""

    name = "dense"
    parts = ("vectors.npy", "near", "mark")

    def __init__(self, factory: str = FLAT) -> None:
        super().__init__()
        if not isinstance(factory, str):
            raise ConfigError("index_factory of the dense index must be a text.")
        self.factory = factory

    def fields(self) -> dict[str, Any]:
        return {"factory": self.factory}

    def _is_blank(self, chunk_id: str, vector: NDArray[np.float32]) -> bool:
        return is_zero_dense(vector, f"The vector of chunk {chunk_id!r}")

    def _gather(self, vectors: Iterator[NDArray[np.float32]], others: Sequence[Vectors]) -> Vectors:
        dimension = others[0].rows.shape[1] if others else None
        blocks: list[NDArray[np.float32]] = []
        while block := list(islice(vectors, _BLOCK)):
            if dimension is None:
                dimension = len(block[0])
                make(self.factory, dimension)
            strange = next((len(vector) for vector in block if len(vector) != dimension), None)
            if strange is not None:
                raise RetrievalError(
                    f"A vector of {strange} numbers came among vectors of {dimension}: one index is of one embedder; "
                    "embed the documents again."
                )
            blocks.append(np.stack(block, dtype=np.float32, casting="same_kind"))
        return self._indexed(np.concatenate(blocks) if blocks else np.empty((0, dimension or 1), np.float32))

    def _merge(self, parts: Sequence[tuple[Vectors, NDArray[np.bool_]]]) -> Vectors:
        return self._indexed(np.concatenate([data.rows[living] for data, living in parts]))

    def _indexed(self, rows: NDArray[np.float32]) -> Vectors:
        """The vectors with an approximate index, if the factory asks for one and there are enough rows."""
        if _inner(self.factory) == "Flat" or len(rows) < EXACT_BELOW:
            return Vectors(rows=rows)
        near = make(self.factory, rows.shape[1])
        if len(rows) < least_rows(near, self.factory):
            return Vectors(rows=rows)
        fill(near, self.factory, rows)
        return Vectors(rows=rows, near=near)

    def _query(
        self, query: NDArray[np.float32], segments: Sequence[IndexSegment[Vectors]]
    ) -> NDArray[np.float32] | None:
        if is_zero_dense(query, "The question's vector") or not segments:
            return None
        width = segments[0].data.rows.shape[1]
        if len(query) != width:
            raise RetrievalError(
                f"The question's vector has {len(query)} numbers and the index is of vectors of {width}: "
                "ask with the embedder that the documents were embedded with."
            )
        return np.ascontiguousarray(query, dtype=np.float32)

    def _search(
        self,
        segment: IndexSegment[Vectors],
        query: NDArray[np.float32],
        k: int,
        allowed: NDArray[np.bool_] | None,
        *,
        exact: bool,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """`exact` skips the approximate index, which finds too few if few rows are allowed."""
        data = segment.data
        with np.errstate(all="ignore"):  # an index of somebody else may hold any number
            find = _exactly if data.near is None or exact else _nearly
            best = find(data, query, k, allowed)
            # Sum row by row: the rounding of a matrix product depends on which other rows are multiplied.
            scores = (data.rows[best].astype(np.float64) * query.astype(np.float64)).sum(axis=1).astype(np.float32)
        real = np.isfinite(scores)
        return best[real], scores[real]

    def _write(self, data: Vectors, folder: Path, name: str) -> None:
        import faiss

        np.save(folder / f"{name}.vectors.npy", data.rows.reshape(-1))
        if data.near is not None:
            near = folder / f"{name}.near"
            try:
                faiss.write_index(data.near, str(near))
            except RuntimeError as error:
                raise OSError(str(error)) from error
            write_plain(folder / f"{name}.mark", keyed_checksum(near))

    def _read(self, folder: Path, name: str, rows: int) -> Vectors:
        """`RuntimeError` (FAISS) or `OSError` for invalid files, too."""
        import faiss

        numbers, near, mark = (folder / f"{name}.{part}" for part in self.parts)
        vectors = mapped_array(numbers, ("float32",))
        if not rows or len(vectors) % rows or not 0 < len(vectors) // rows <= _WIDEST:
            raise ValueError(f"{numbers.name} holds no vectors of {rows} chunks")
        vectors = vectors.reshape(rows, -1)
        if not require_plain(near):
            return Vectors(rows=vectors)
        if not require_plain(mark) or not has_keyed_checksum(near, mark):
            raise ValueError(f"{near.name} is not known to be of this user's making")
        index = faiss.read_index(str(near), faiss.IO_FLAG_MMAP_IFC)
        if (index.ntotal, index.d, index.metric_type, index.is_trained) != (
            *vectors.shape,
            faiss.METRIC_INNER_PRODUCT,
            True,
        ):
            raise ValueError(f"{near.name} is an index of another kind")
        return Vectors(rows=vectors, near=index)

    def _agree(self, data: Sequence[Vectors]) -> bool:
        return len({vectors.rows.shape[1] for vectors in data}) < 2


def _exactly(data: Vectors, query: NDArray[np.float32], k: int, allowed: NDArray[np.bool_] | None) -> NDArray[np.int64]:
    """The allowed rows with the best `k` scores, and all that tie with the last of them."""
    rows = None if allowed is None else np.flatnonzero(allowed)
    # einsum reads the memory almost twice as fast as a product of BLAS
    if rows is None or 4 * len(rows) > len(data.rows):
        scores = np.einsum("ij,j->i", data.rows, query)[slice(None) if rows is None else rows]
    else:
        scores = np.einsum("ij,j->i", data.rows[rows], query)
    least = np.partition(scores, -k)[-k] - TIE if k < len(scores) else -np.inf
    best = np.flatnonzero(scores >= least)
    return best if rows is None else rows[best]


def _nearly(data: Vectors, query: NDArray[np.float32], k: int, allowed: NDArray[np.bool_] | None) -> NDArray[np.int64]:
    """The allowed rows that the approximate index proposes."""
    import faiss

    living = int(len(data.rows) if allowed is None else allowed.sum())
    some = None if allowed is None else faiss.IDSelectorBitmap(np.packbits(allowed, bitorder="little"))
    ask = partial(data.near.search, query[None], params=parameters(data.near, some))
    want = max(k * REFINE, k + EXTRA)
    while True:
        want = min(want, living)
        scores, rows = (column[0] for column in ask(want))  # (want,), row -1 beyond the last hit
        real = (rows >= 0) & (rows < len(data.rows))
        rows, scores = rows[real], scores[real]
        # Some approximate indexes return distances and some similarities, so compare absolute differences.
        if len(rows) < want or want == living or abs(scores[-1] - scores[k - 1]) > TIE:
            return rows  # type: ignore[no-any-return]
        want *= 4


def is_zero_dense(vector: NDArray[Any], what: str) -> bool:
    """True for a zero vector (of an empty text), False for a unit vector; `RetrievalError` for any other."""
    if vector.ndim != 1:
        raise RetrievalError(f"{what} has the shape {vector.shape}; an index holds one vector (d,) for each chunk.")
    square = float(np.dot(vector, vector)) if vector.dtype == np.float32 else float(np.square(vector, dtype="f8").sum())
    if square == 0:
        return True
    if not abs(square - 1) < 2 * _UNIT:  # NaN too
        raise RetrievalError(f"{what} is of length {square**0.5:.3g}, not 1; normalise what the embedder gives.")
    return False


_WEIGHTS = ("float32",)


class SparseIndex(SegmentedIndex[Mapping[str, float], _Asked, Postings]):
    """The index over mappings of token to weight. A chunk without a token of the question is no hit."""

    name = "sparse"
    parts = Postings.PARTS

    def _is_blank(self, chunk_id: str, vector: Mapping[str, float]) -> bool:
        return is_zero_sparse(vector, f"Chunk {chunk_id!r}")

    def _gather(self, vectors: Iterator[Mapping[str, float]], others: Sequence[Postings]) -> Postings:
        numbers: dict[str, int] = {}
        tokens, weights, lengths = array("i"), array("f"), array("i")
        for vector in vectors:
            if not all(vector.values()):
                vector = {token: weight for token, weight in vector.items() if weight}
            tokens.extend([numbers.setdefault(token, len(numbers)) for token in vector])
            weights.extend(vector.values())
            lengths.append(len(vector))
        rows = np.repeat(np.arange(len(lengths), dtype=np.int32), np.frombuffer(lengths, dtype=np.int32))
        return Postings.collect(
            list(numbers), np.frombuffer(tokens, dtype=np.int32), rows, np.frombuffer(weights, dtype=np.float32)
        )

    def _merge(self, parts: Sequence[tuple[Postings, NDArray[np.bool_]]]) -> Postings:
        return Postings.merged(parts)

    def _query(self, query: Mapping[str, float], segments: Sequence[IndexSegment[Postings]]) -> _Asked | None:
        if is_zero_sparse(query, "The question"):
            return None
        return term_hashes(query), np.array(list(query.values()), dtype=np.float32)

    def _search(
        self,
        segment: IndexSegment[Postings],
        query: _Asked,
        k: int,
        allowed: NDArray[np.bool_] | None,
        *,
        exact: bool,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        data, (words, weights) = segment.data, query
        scores = np.zeros(len(segment.id_table), dtype=np.float32)
        for posting, weight in zip(data.find(words), weights, strict=True):
            np.add.at(scores, data.rows[posting], data.numbers[posting] * weight)
        return best_rows(scores, k, allowed)

    def _write(self, data: Postings, folder: Path, name: str) -> None:
        data.write(folder, name)

    def _read(self, folder: Path, name: str, rows: int) -> Postings:
        return Postings.read(folder, name, rows, _WEIGHTS)


def is_zero_sparse(vector: Mapping[str, float], what: str) -> bool:
    """Whether all weights are zero; `RetrievalError` for a weight that is negative or not finite."""
    total = sum(vector.values())
    if not vector or (math.isfinite(total) and total == 0 and not any(vector.values())):
        return True
    if not math.isfinite(total) or min(vector.values()) < 0:
        raise RetrievalError(f"{what} has a token weight that is negative or no number; the embedder is at fault.")
    return False


_BATCH_ROWS = 8192
"""Chunk tokens per matrix product: 32 MiB of float32 at 1024 dimensions."""

_NOTHING = -1.0
"""The score of a text without tokens: the lowest possible mean of cosines, relevance 0 by PCED Eq. 4."""


def colbert_scores(query: NDArray[Any], documents: Sequence[NDArray[Any]]) -> list[float]:
    """For each document, the mean over query tokens of the best inner product with a document token.

    query: (tokens, d); documents: each (tokens, d), of any float type, computed in float32. The scores are those of
    FlagEmbedding's `colbert_score`; without rows, the score is -1. `RetrievalError` if dimensions differ.
    """
    query = _rows(query)
    rows = [_rows(document) for document in documents]
    scores = np.full(len(rows), _NOTHING, dtype=np.float32)
    if not len(query):
        return [_NOTHING] * len(rows)
    filled: list[int] = []
    for number, document in enumerate(rows):
        if not len(document):
            continue
        if document.shape[1] != query.shape[1]:
            raise RetrievalError(
                f"A ColBERT vector of {document.shape[1]} numbers cannot be compared with a query's of "
                f"{query.shape[1]}: they are of different embedders; embed the documents again."
            )
        filled.append(number)
    for batch in batches(filled, lambda number: len(rows[number]), _BATCH_ROWS):
        scores[batch] = _batch(query, [rows[i] for i in batch])
    return [float(score) for score in scores]


def _rows(vectors: NDArray[Any]) -> NDArray[Any]:
    if vectors.ndim != 2:
        raise RetrievalError(f"ColBERT vectors must be (tokens, d), not of shape {vectors.shape}.")
    return vectors


def _batch(query: NDArray[Any], documents: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """(documents,): the scores of documents that are not empty."""
    lengths = [len(document) for document in documents]
    stacked = np.empty((sum(lengths), query.shape[1]), dtype=np.float32)
    np.concatenate(documents, out=stacked, casting="same_kind")
    products = stacked @ query.astype(np.float32).T  # (document tokens, query tokens)
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1]))
    best = np.maximum.reduceat(products, starts, axis=0)  # (documents, query tokens)
    return best.mean(axis=1)  # type: ignore[no-any-return]
