"""What do the vector indexes cost, compared with the libraries that they are built on?

Baselines: FAISS's `IndexFlatIP` called directly, over the same vectors, and bm25s over the same tokens (its scores are
others, its postings are the same). Questions are asked of both in turns. Vectors are random, which an exact search
does not notice; tokens are drawn by Zipf and Mandelbrot's law, as a subword vocabulary has them, so that a question
meets a few tokens that half of all chunks have.
"""

from __future__ import annotations

import gc
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragkv.benchmarks.speed.report import Report, Row, machine, versions
from ragkv.retrievers import DenseIndex, Hit, SparseIndex

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["measure"]

DIMENSION = 1024  # bge-m3's
VOCABULARY = 50_000
CHUNK_TOKENS = 200  # drawn; about 160 of them differ
QUESTION_TOKENS = 14
TOP_K = 10
UPDATE = 20  # chunks: a document


def measure(
    *,
    chunks: int = 100_000,
    questions: int = 50,
    folder: Path | None = None,
    on_step: Callable[[str], None] | None = None,
) -> Report:
    """Medians over `questions`; `folder` is where indexes are written (the system's temporary folder)."""
    say = on_step or (lambda _: None)
    rows = []
    for part in (_dense, _sparse):
        with tempfile.TemporaryDirectory(dir=folder) as place:
            rows += part(chunks, questions, Path(place), say)
        gc.collect()
    return Report(
        bench="retrieval", machine=machine("cpu"), versions=versions("faiss-cpu", "bm25s", "numpy"), rows=tuple(rows)
    )


def _dense(chunks: int, questions: int, folder: Path, say: Callable[[str], None]) -> list[Row]:
    import faiss
    import numpy as np

    say(f"dense: {chunks} vectors of {DIMENSION} numbers …")
    rng = np.random.default_rng(0)
    vectors, asked = (_units(rng, number) for number in (chunks, questions))
    ids = [f"chunk-{at:06}" for at in range(chunks)]

    def build_raw() -> Any:
        raw = faiss.IndexFlatIP(DIMENSION)
        raw.add(vectors)
        return raw

    def build() -> DenseIndex:
        index = DenseIndex()
        index.update(zip(ids, vectors, strict=True), (), generation=1, embedder="bench")
        return index

    raw, raw_seconds, raw_memory = _made(build_raw)
    index, seconds, memory = _made(build)
    faiss.write_index(raw, str(folder / "raw"))
    index.save(folder / "index")
    _, raw_open = _timed(lambda: faiss.read_index(str(folder / "raw")))
    loaded, opened = _timed(lambda: DenseIndex.load(folder / "index"))
    say("dense: questions …")
    times, same = _asked(
        [
            lambda at: _hits(ids, raw.search(asked[at : at + 1], TOP_K)),
            lambda at: index.search(asked[at], TOP_K),
            lambda at: loaded.search(asked[at], TOP_K),
        ],
        questions,
    )
    name, flat = f"dense, {chunks} chunks", "FAISS IndexFlatIP"
    rows = [
        _row(f"{name}: query p50", times[1] * 1000, "ms", flat, times[0] * 1000),
        _row(f"{name}: query p50, mapped", times[2] * 1000, "ms", flat, times[0] * 1000),
        _row(f"{name}: same hits", same, "%", flat, 100.0, more_is_better=True),
        _row(f"{name}: build", seconds, "s", flat, raw_seconds),
        _row(f"{name}: open", opened, "s", f"{flat}, read", raw_open),
        *_memory_row(name, memory, flat, raw_memory),
    ]
    fresh = _units(rng, UPDATE)
    added = [(f"new-{at}", vector) for at, vector in enumerate(fresh)]
    _, update = _timed(lambda: loaded.update(added, ids[:UPDATE], generation=2, embedder="bench"))
    mutable = faiss.index_factory(DIMENSION, "IDMap2,Flat", faiss.METRIC_INNER_PRODUCT)
    mutable.add_with_ids(vectors, np.arange(chunks))

    def change() -> None:
        mutable.remove_ids(np.arange(UPDATE))
        mutable.add_with_ids(fresh, np.arange(chunks, chunks + UPDATE))

    _, raw_update = _timed(change)
    return [*rows, _row(f"{name}: replace {UPDATE}", update * 1000, "ms", "FAISS IDMap2,Flat", raw_update * 1000)]


def _sparse(chunks: int, questions: int, folder: Path, say: Callable[[str], None]) -> list[Row]:
    import bm25s
    import numpy as np

    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it reports every step to any handler there is
    say(f"sparse: {chunks} chunks of {CHUNK_TOKENS} tokens …")
    rng = np.random.default_rng(0)
    names = [str(token) for token in range(VOCABULARY)]
    drawn = _zipf(rng, (chunks, CHUNK_TOKENS))
    ids = [f"chunk-{at:06}" for at in range(chunks)]
    asked = [_named(names, *_weights(rng, row)) for row in _zipf(rng, (questions, QUESTION_TOKENS))]

    def build_raw() -> Any:
        raw = bm25s.BM25()
        raw.index((list(drawn), {name: at for at, name in enumerate(names)}), show_progress=False)
        return raw

    weighted = [_weights(rng, row) for row in drawn]

    def build() -> SparseIndex:
        index = SparseIndex()
        vectors = (_named(names, *found) for found in weighted)
        index.update(zip(ids, vectors, strict=True), (), generation=1, embedder="bench")
        return index

    raw, raw_seconds, raw_memory = _made(build_raw)
    index, seconds, memory = _made(build)
    say("sparse: questions …")
    tokens = [[list(question)] for question in asked]

    def ask_raw(at: int) -> Any:
        return raw.retrieve(tokens[at], k=TOP_K, show_progress=False)

    times, _ = _asked([ask_raw, lambda at: index.search(asked[at], TOP_K)], questions)
    raw.save(folder / "raw", show_progress=False)
    index.save(folder / "index")
    _, raw_open = _timed(lambda: bm25s.BM25.load(folder / "raw", mmap=True, show_progress=False))
    _, opened = _timed(lambda: SparseIndex.load(folder / "index"))
    name = f"sparse, {chunks} chunks"
    return [
        _row(f"{name}: query p50", times[1] * 1000, "ms", "bm25s", times[0] * 1000),
        _row(f"{name}: build", seconds, "s", "bm25s", raw_seconds),
        _row(f"{name}: open", opened, "s", "bm25s, mapped", raw_open),
        *_memory_row(name, memory, "bm25s", raw_memory),
    ]


def _units(rng: np.random.Generator, rows: int) -> NDArray[np.float32]:
    import numpy as np

    made = rng.standard_normal((rows, DIMENSION), dtype=np.float32)
    made /= np.linalg.norm(made, axis=1, keepdims=True)
    return made


def _zipf(rng: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.int32]:
    """Token numbers; the r-th most frequent has a share proportional to 1 / (r + 10)."""
    import numpy as np

    share = np.cumsum(1 / (np.arange(VOCABULARY) + 10.0))
    tokens: NDArray[np.int32] = np.searchsorted(share, rng.random(shape) * share[-1]).astype(np.int32)
    return tokens


def _weights(rng: np.random.Generator, drawn: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The distinct tokens of a text with weights like those of bge-m3, mostly under 0.3."""
    import numpy as np

    tokens = np.unique(drawn)
    return tokens, rng.gamma(2, 0.06, len(tokens)).astype(np.float32)


def _named(names: list[str], tokens: NDArray[np.int32], weights: NDArray[np.float32]) -> Mapping[str, float]:
    """The form in which an embedder returns them; making it is part of building an index."""
    return {names[token]: weight for token, weight in zip(tokens.tolist(), weights.tolist(), strict=True)}


def _hits(ids: list[str], found: tuple[NDArray[np.float32], NDArray[np.int64]]) -> list[Hit]:
    """FAISS's result in our form. The conversion is timed too, because a caller needs ids and scores."""
    pairs = zip(found[1][0].tolist(), found[0][0].tolist(), strict=True)
    return [Hit(chunk_id=ids[row], score=score) for row, score in pairs]


def _asked(searches: list[Callable[[int], Any]], questions: int) -> tuple[list[float], float]:
    """The median seconds of each search, and the percentage of questions with the same chunks. One round warms up."""
    times: list[list[float]] = [[] for _ in searches]
    same = 0
    for search in searches:
        search(0)
    for at in range(questions):
        found = []
        for search, taken in zip(searches, times, strict=True):
            start = time.perf_counter()
            found.append(search(at))
            taken.append(time.perf_counter() - start)
        if all(isinstance(answer, list) for answer in found):
            same += len({frozenset(hit.chunk_id for hit in answer) for answer in found}) == 1
    return [statistics.median(taken) for taken in times], 100 * same / questions


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    made = work()
    return made, time.perf_counter() - start


def _made(build: Callable[[], Any]) -> tuple[Any, float, float | None]:
    """The built index, the seconds it took, and its memory in MB (None if the system does not report it)."""
    gc.collect()
    before = _resident()
    made, seconds = _timed(build)
    gc.collect()
    after = _resident()
    return made, seconds, None if before is None or after is None else after - before


def _resident() -> float | None:
    """The anonymous memory of this process, in MB."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("RssAnon")), None)


def _memory_row(name: str, memory: float | None, baseline: str, baseline_memory: float | None) -> list[Row]:
    if not memory or not baseline_memory:
        return []
    return [_row(f"{name}: memory", memory, "MB", baseline, baseline_memory)]


def _row(
    name: str, value: float, unit: str, baseline: str, baseline_value: float, *, more_is_better: bool = False
) -> Row:
    ratio = value / baseline_value if more_is_better else baseline_value / value
    return Row(
        name=name,
        value=round(value, 4),
        unit=unit,
        baseline=baseline,
        baseline_value=round(baseline_value, 4),
        ratio=round(ratio, 2),
    )
