"""The stages of `ragkv bench index`, each for a fresh process: make an index, open it, ask it, change it, check it.

A figure is what one call costs in processor time and on the clock. What libraries load at their first use is loaded
before, so that the first question of a process is charged with what it reads of the index.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import faiss
import sentence_transformers
import torch
import transformers

from ragkv.benchmarks.speed.corpus import CHUNKS, Corpus, make_models
from ragkv.config import CONFIG_FILE
from ragkv.pipeline import RagKV
from ragkv.retrievers import BM25

__all__ = ["MODES", "Figure", "ask", "build", "change", "check", "filter_by", "make", "open_index"]

MODES = ("bm25", "dense", "hybrid")
BATCH = 1000 // CHUNKS
"""Documents that are given to an ingest at a time."""
_LOADED = (faiss, sentence_transformers, transformers)  # imported for the server that processes fork from

Progress = Callable[[int, int], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of one size. `wall` is set for times, whose `value` is processor time; both in `unit`."""

    name: str
    value: float
    unit: str = "ms"
    wall: float | None = None
    more_is_better: bool = False


def make(folder: Path, size: int, progress: Progress) -> list[Figure]:
    """Make the index of `size` chunks, or finish it, with all documents as they were generated.

    An index that is complete already keeps the figures of when it was made.
    """
    corpus, index = Corpus(size), index_folder(folder, size)
    note = folder / f"made-{size}.json"
    model, embedder = make_models(folder)
    if not (index / CONFIG_FILE).exists():
        engine = {"engines": ("block",), "default_engine": "block"}
        RagKV.create(index, device="cpu", model=model, embedder=embedder, **engine).close()  # type: ignore[arg-type]
    times, added, own = [], 0, 0.0
    with _opened(index) as rag:
        _ = rag.model, rag.embedder  # loading is not part of the first batch
        for start in range(0, corpus.documents, BATCH):
            documents = [corpus.document(n) for n in range(start, min(start + BATCH, corpus.documents))]
            report, cpu, wall = _timed(lambda documents=documents: rag.add_chunks(documents))  # type: ignore[misc]
            if report.chunks:
                times.append((report.chunks, cpu, wall))
                added += report.chunks
            own = max(own, own_memory())
            progress(min(size, (start + BATCH) * CHUNKS), size)
        used = rag.store.sizes()[0]
    if not added and note.exists():
        return [Figure(**one) for one in json.loads(note.read_text(encoding="utf-8"))]
    if not times:
        return []
    tenth = max(1, len(times) // 10)
    figures = [
        _rate("ingest", times),
        _rate("ingest, first tenth", times[:tenth]),
        _rate("ingest, last tenth", times[-tenth:]),
        Figure(name="ingest, peak memory", value=peak_memory(), unit="MB"),
        Figure(name="ingest, peak memory of its own", value=own, unit="MB"),
        Figure(name="disk per chunk", value=used / size / 1000, unit="kB"),
    ]
    if added == size:  # a run that was continued has measured a part
        note.write_text(json.dumps([asdict(one) for one in figures]), encoding="utf-8")
    return figures


def open_index(folder: Path, size: int, name: str, progress: Progress) -> list[Figure]:
    """Open the index: the first time in this process, then again."""
    index, again = index_folder(folder, size), []
    first = _opening(name, index)
    for _ in range(5):
        again.append(_opening(f"{name}, again", index))
    return [first, _median(again)]


def build(folder: Path, size: int, mode: str, progress: Progress) -> list[Figure]:
    """The first question of an index whose retrieval index of this mode is not there yet."""
    index = index_folder(folder, size)
    with _opened(index) as rag:
        _prepare(rag)
        asked = _asking(rag, f"{mode}: first question ever", size, 0, mode)
        return [asked, _memory(f"{mode}: peak memory of building")]


def ask(folder: Path, size: int, mode: str, progress: Progress) -> list[Figure]:
    """The first question of a process, and those after it."""
    with _opened(index_folder(folder, size)) as rag:
        _prepare(rag)
        before = own_memory()
        first = _asking(rag, f"{mode}: first question", size, 0, mode)
        warm = [_asking(rag, f"{mode}: warm question", size, number, mode) for number in range(1, 21)]
        held = Figure(name=f"{mode}: memory of its own", value=own_memory() - before, unit="MB")
        return [first, _median(warm), held]


def filter_by(folder: Path, size: int, mode: str, progress: Progress) -> list[Figure]:
    """Questions with a condition that one document meets, a tenth of them by metadata, or all."""
    corpus, found = Corpus(size), []
    with _opened(index_folder(folder, size)) as rag:
        _prepare(rag)
        for number in range(3):
            rag.retrieve(corpus.question(number), retrieval=mode, rerank=False)
        middle = corpus.documents // 2
        for what, where in (
            ("one document", f"source={corpus.document_id(middle)}.txt"),
            ("a tenth", "topic=t0"),
            ("all", "source=*.txt"),
        ):
            name = f"{mode}, --where of {what}"
            found.append(_asking(rag, f"{name}: first question", size, middle, mode, where=[where]))
            name += ": warm question"
            found.append(_median([_asking(rag, name, size, number, mode, where=[where]) for number in range(1, 8)]))
        return found


def change(folder: Path, size: int, modes: Sequence[str], rounds: int, progress: Progress) -> list[Figure]:
    """Change one document, or delete it, and ask; after each round the index is as it was."""
    corpus, found = Corpus(size), dict[str, list[Figure]]()
    where = [f"source={corpus.document_id(0)}.txt"]

    def asked(name: str, mode: str, number: int, **options: Any) -> None:
        found.setdefault(name, []).append(_asking(rag, name, size, number, mode, **options))

    def written(name: str, write: Callable[[], object]) -> None:
        _, cpu, wall = _timed(write)
        found.setdefault(name, []).append(Figure(name=name, value=cpu * 1000, wall=wall * 1000))

    with _opened(index_folder(folder, size)) as rag:
        _prepare(rag)
        _ = rag.model
        rag.add_chunks([corpus.document(0, version=1)])  # what a first write loads
        for mode in modes:
            asked(f"{mode}: first question", mode, 0)
            asked(f"{mode}, --where of one document: first question", mode, 0, where=where)
        for number in range(rounds):
            for mode in modes:
                target = (1 + number) % corpus.documents
                name = corpus.document_id(target)
                again = [corpus.document(target, version=1)]
                written("change one document", lambda again=again: rag.add_chunks(again))  # type: ignore[misc]
                asked(f"{mode}: question after a change", mode, target)
                asked(f"{mode}: question after that", mode, target)
                asked(f"{mode}, --where of one document: question after a change", mode, 0, where=where)
                written("delete one document", lambda name=name: rag.delete(name))  # type: ignore[misc]
                asked(f"{mode}: question after a delete", mode, target)
                rag.add_chunks([corpus.document(target)])
                rag.retrieve(corpus.question(0), retrieval=mode, rerank=False)
        rag.add_chunks([corpus.document(0)])
    return [_median(figures) for name, figures in found.items() if not name.endswith(": first question")]


def check(folder: Path, size: int, what: str, progress: Progress) -> list[Figure]:
    """`stats`, `verify --quick` or `gc --dry-run`."""
    with _opened(index_folder(folder, size)) as rag:
        calls: dict[str, Callable[[], object]] = {
            "stats": rag.stats,
            "verify --quick": lambda: rag.verify(quick=True),
            "gc --dry-run": lambda: rag.gc(dry_run=True),
        }
        _, cpu, wall = _timed(calls[what])
        return [Figure(name=what, value=cpu * 1000, wall=wall * 1000), _memory(f"{what}: peak memory")]


def index_folder(folder: Path, size: int) -> Path:
    """Where the index of this size lies."""
    return folder / f"index-{size}"


def is_built(folder: Path, size: int, mode: str) -> bool:
    """Whether a question of this mode finds the retrieval index that it needs; hybrid searches those of the others."""
    return mode == "hybrid" or (index_folder(folder, size) / "derived" / mode).exists()


def peak_memory() -> float:
    """The most memory that this process has had, with what it maps of files, in MB."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / 1e6 if sys.platform == "darwin" else most * 1024 / 1e6


def own_memory() -> float:
    """The memory of this process without what it maps of files, in MB; 0 where the system does not tell."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return 0.0
    return next((int(row.split()[1]) * 1024 / 1e6 for row in status.splitlines() if row.startswith("RssAnon")), 0.0)


@contextmanager
def _opened(index: Path) -> Iterator[RagKV]:
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    with RagKV.open(index, device="cpu") as rag:
        yield rag


def _prepare(rag: RagKV) -> None:
    """Load what the first question of any index would load."""
    embedder = rag.embedder
    assert embedder is not None
    vector = embedder.embed_query("one").dense
    assert vector is not None
    table = faiss.IndexFlatIP(vector.shape[1])
    table.add(vector)
    table.search(vector, 1)
    words = BM25()
    words.build([("1", "one")], 1)
    words.search("one", 1)


def _opening(name: str, index: Path) -> Figure:
    rag, cpu, wall = _timed(lambda: RagKV.open(index, device="cpu"))
    rag.close()
    return Figure(name=name, value=cpu * 1000, wall=wall * 1000)


def _asking(rag: RagKV, name: str, size: int, number: int, mode: str, **options: Any) -> Figure:
    question = Corpus(size).question(number)
    _, cpu, wall = _timed(lambda: rag.retrieve(question, retrieval=mode, rerank=False, top_k=8, **options))
    return Figure(name=name, value=cpu * 1000, wall=wall * 1000)


def _timed(work: Callable[[], T]) -> tuple[T, float, float]:
    """What `work` returns, the seconds of the processor, and those of the clock."""
    start, clock = time.process_time(), time.perf_counter()
    made = work()
    return made, time.process_time() - start, time.perf_counter() - clock


def _median(figures: Sequence[Figure]) -> Figure:
    walls = [one.wall for one in figures if one.wall is not None]
    value = statistics.median(one.value for one in figures)
    return Figure(name=figures[0].name, value=value, wall=statistics.median(walls))


def _rate(name: str, times: Sequence[tuple[int, float, float]]) -> Figure:
    chunks, cpu, wall = map(sum, zip(*times, strict=True))
    return Figure(name=name, value=chunks / cpu, wall=chunks / wall, unit="chunks/s", more_is_better=True)


def _memory(name: str) -> Figure:
    return Figure(name=name, value=peak_memory(), unit="MB")
