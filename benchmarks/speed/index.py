"""What do indexes cost as they grow: opening, questions, one changed document, maintenance, ingest and memory?

The baseline is the same index at the first of the sizes, so that a ratio shows how a cost grows. Documents are
generated. Every measurement runs in a fresh process on one thread, and gives the processor time and the wall time of
one call. Libraries are loaded before, so that the first question pays only for what it reads of the index.

Vector indexes are compared with the libraries that they are built on: FAISS's `IndexFlatIP` called directly over the
same vectors, and bm25s over the same tokens (other scores, the same postings). Questions are asked of both in turns.
Vectors are random, as an exact search takes equally long for any. Tokens follow Zipf and Mandelbrot's law, as in
a subword vocabulary, so that a question meets a few tokens that half of all chunks have.
"""

from __future__ import annotations

import gc
import json
import logging
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, TypeVar

import faiss
import numpy as np
import sentence_transformers
import torch
import transformers
import typer
from numpy.typing import NDArray

from ragkv.benchmarks.speed.report import (
    CHUNKS,
    BenchRow,
    Corpus,
    OnStep,
    Progress,
    Quick,
    Report,
    machine,
    make_models,
    own_memory,
    run_fresh,
    seconds_of,
    shown,
    unseen,
    versions,
    zipf_draws,
)
from ragkv.cli.console import print_grid, print_json
from ragkv.cli.options import WorkFolder, given_names, given_numbers
from ragkv.config import CONFIG_FILE
from ragkv.errors import MissingExtraError, UsageError, install_hint
from ragkv.pipeline import RagKV
from ragkv.retrievers import BM25, DenseIndex, Hit, SparseIndex

PARTS = ("open", "ask", "where", "change", "upkeep")
"""What may be measured of an index, besides making it."""

Step = Callable[[int, int, str], None]
Run = Callable[..., "list[IndexMeasurement]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """The figures of one run by size, in the order of the sizes."""

    figures: dict[int, list[IndexMeasurement]]
    report: Report

    def growth(self, name: str) -> str:
        """How many times more a figure is at the last size than at the first, as people read it."""
        ends = [next((f.value for f in found if f.name == name), 0.0) for found in self.figures.values()]
        return f"{ends[-1] / ends[0]:,.1f}x" if ends[0] and ends[-1] else "-"

    def show(self, *, as_json: bool, quiet: bool) -> None:
        """Print the report as JSON, or a column for each size, and how much more the last one costs than the first."""
        if as_json:
            print_json(self.report.to_json())
            return
        rows: dict[str, list[str]] = {}
        for at, found in enumerate(self.figures.values()):
            for one in found:
                cells = rows.setdefault(f"{one.name} ({one.unit})", ["-"] * len(self.figures))
                cells[at] = shown(one.value) + ("" if one.wall is None else f" ({shown(one.wall)})")
        print_grid(
            ["", *(f"{size:,} chunks" for size in self.figures), "growth"],
            [[name, *cells, self.growth(name.rsplit(" (", 1)[0])] for name, cells in rows.items()],
        )
        self.report.note_machine(quiet=quiet)


def measure_index(
    sizes: Annotated[str, typer.Option(help="Sizes of the indexes, in chunks.")] = "1000,20000,100000",
    only: Annotated[str, typer.Option(help="What to measure of each, besides making it.")] = ",".join(PARTS),
    rounds: Annotated[int, typer.Option(help="Documents that are changed and deleted; medians are shown.", min=1)] = 3,
    folder: Annotated[
        Path | None,
        typer.Option(help="Keep the indexes here, so that the same command finds them again.", show_default="none"),
    ] = None,
    quick: Quick = False,
    on_step: Step = unseen,
    run: Run = run_fresh,
) -> Growth:
    """Costs of indexes of several sizes: ingest, opening, questions, --where, one changed document, upkeep, memory.

    Processor time on one thread (in brackets: on the clock), compared with the first size. The documents are generated,
    and the models tiny. Example: `ragkv bench index --sizes 1000,100000 --folder /var/tmp/bench --only open,ask`
    """
    least, *more = [1000, 4000] if quick else given_numbers("--sizes", sizes)
    parts = given_names("--only", only)
    if unknown := set(parts) - set(PARTS):
        raise UsageError(f"--only knows {', '.join(PARTS)}, not {', '.join(sorted(unknown))}.")
    rounds = 1 if quick else rounds
    with tempfile.TemporaryDirectory(prefix="ragkv-bench-") if folder is None else nullcontext(str(folder)) as name:
        figures = {size: _measured(Path(name), size, parts, rounds, on_step, run) for size in (least, *more)}
    rows = tuple(row for size, each in figures.items() for row in _rows(size, each, least, figures[least]))
    packages = versions("lmdb", "numpy", "faiss-cpu", "bm25s", "sentence-transformers")
    report = Report(bench="index", machine=machine("cpu"), versions=packages, rows=rows)
    return Growth(figures=figures, report=report)


def _measured(
    folder: Path, size: int, parts: Sequence[str], rounds: int, show: Step, run: Run
) -> list[IndexMeasurement]:
    def measured(what: str, stage: Callable[..., list[IndexMeasurement]], *arguments: Any) -> list[IndexMeasurement]:
        show(0, 0, f"{size:,} chunks: {what}")
        return run(
            stage, folder, size, *arguments, on_progress=lambda done, of: show(done, of, f"{size:,} chunks: {what}")
        )

    found = measured("make", make)
    if "open" in parts:
        found += measured("open", open_index, "open after the ingest")
        found += measured("open", open_index, "open")
    for mode in MODES:
        if not is_built(folder, size, mode) and {"ask", "where", "change"} & set(parts):
            built = measured(f"build {mode}", build, mode)
            found += built if "ask" in parts else []
        if "ask" in parts:
            found += measured(f"ask {mode}", ask, mode)
        if "where" in parts:
            found += measured(f"ask {mode} --where", filter_by, mode)
    if "change" in parts:
        found += measured("change", change, MODES, rounds)
    for what in ("stats", "verify --quick", "gc --dry-run"):
        if "upkeep" in parts:
            found += measured(what, check, what)
    return found


def _rows(
    size: int, figures: Sequence[IndexMeasurement], least: int, baseline: Sequence[IndexMeasurement]
) -> list[BenchRow]:
    """Times as two rows, processor and clock. A figure that the baseline's size lacks is its own baseline."""
    rows = []
    known = {one.name: one for one in baseline}
    for one in figures:
        before, base = (known[one.name], least) if one.name in known else (one, size)
        kinds = [("", one.value, before.value)]
        if one.wall is not None and before.wall is not None:
            kinds = [(", processor", one.value, before.value), (", clock", one.wall, before.wall)]
        for kind, value, reference in kinds:
            better, worse = (value, reference) if one.more_is_better else (reference, value)
            name, ratio = f"{size} chunks: {one.name}{kind}", better / worse if worse else 1.0
            rows.append(BenchRow.of(name, value, one.unit, f"{base} chunks", reference, ratio, ratio_digits=3))
    return rows


MODES = ("bm25", "dense", "hybrid")
BATCH = 1000 // CHUNKS
"""Documents per call of an ingest."""
_LOADED = (faiss, sentence_transformers, transformers)  # imported for the server that processes fork from

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexMeasurement:
    """One figure of one size. `wall` is set for times, whose `value` is processor time; both in `unit`."""

    name: str
    value: float
    unit: str = "ms"
    wall: float | None = None
    more_is_better: bool = False


def make(folder: Path, size: int, progress: Progress) -> list[IndexMeasurement]:
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
            report, cpu, wall = _stage_seconds(lambda documents=documents: rag.add_chunks(documents))  # type: ignore[misc]
            if report.chunks:
                times.append((report.chunks, cpu, wall))
                added += report.chunks
            own = max(own, own_memory())
            progress(min(size, (start + BATCH) * CHUNKS), size)
        used = rag.store.sizes()[0]
    if not added and note.exists():
        return [IndexMeasurement(**one) for one in json.loads(note.read_text(encoding="utf-8"))]
    if not times:
        return []
    tenth = max(1, len(times) // 10)
    figures = [
        _rate("ingest", times),
        _rate("ingest, first tenth", times[:tenth]),
        _rate("ingest, last tenth", times[-tenth:]),
        IndexMeasurement(name="ingest, peak memory", value=peak_memory(), unit="MB"),
        IndexMeasurement(name="ingest, peak memory of its own", value=own, unit="MB"),
        IndexMeasurement(name="disk per chunk", value=used / size / 1000, unit="kB"),
    ]
    if added == size:  # a run that was continued has measured a part
        note.write_text(json.dumps([asdict(one) for one in figures]), encoding="utf-8")
    return figures


def open_index(folder: Path, size: int, name: str, progress: Progress) -> list[IndexMeasurement]:
    """Open the index: for the first time in this process, then again."""
    index, again = index_folder(folder, size), []
    first = _opening(name, index)
    for _ in range(5):
        again.append(_opening(f"{name}, again", index))
    return [first, _median(again)]


def build(folder: Path, size: int, mode: str, progress: Progress) -> list[IndexMeasurement]:
    """The first question of an index whose retrieval index for this mode does not exist yet."""
    index = index_folder(folder, size)
    with _opened(index) as rag:
        _prepare(rag)
        asked = _asking(rag, f"{mode}: first question ever", size, 0, mode)
        return [asked, _memory(f"{mode}: peak memory of building")]


def ask(folder: Path, size: int, mode: str, progress: Progress) -> list[IndexMeasurement]:
    """The first question of a process, and those after it."""
    with _opened(index_folder(folder, size)) as rag:
        _prepare(rag)
        before = own_memory()
        first = _asking(rag, f"{mode}: first question", size, 0, mode)
        warm = [_asking(rag, f"{mode}: warm question", size, number, mode) for number in range(1, 21)]
        held = IndexMeasurement(name=f"{mode}: memory of its own", value=own_memory() - before, unit="MB")
        return [first, _median(warm), held]


def filter_by(folder: Path, size: int, mode: str, progress: Progress) -> list[IndexMeasurement]:
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


def change(folder: Path, size: int, modes: Sequence[str], rounds: int, progress: Progress) -> list[IndexMeasurement]:
    """Change one document, or delete it, and ask; after each round the index is as it was."""
    corpus, found = Corpus(size), dict[str, list[IndexMeasurement]]()
    where = [f"source={corpus.document_id(0)}.txt"]

    def asked(name: str, mode: str, number: int, **options: Any) -> None:
        found.setdefault(name, []).append(_asking(rag, name, size, number, mode, **options))

    def written(name: str, write: Callable[[], object]) -> None:
        found.setdefault(name, []).append(_timing(name, write))

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


def check(folder: Path, size: int, what: str, progress: Progress) -> list[IndexMeasurement]:
    """`stats`, `verify --quick` or `gc --dry-run`."""
    with _opened(index_folder(folder, size)) as rag:
        calls: dict[str, Callable[[], object]] = {
            "stats": rag.stats,
            "verify --quick": lambda: rag.verify(quick=True),
            "gc --dry-run": lambda: rag.gc(dry_run=True),
        }
        return [_timing(what, calls[what]), _memory(f"{what}: peak memory")]


def index_folder(folder: Path, size: int) -> Path:
    """The folder of the index of this size."""
    return folder / f"index-{size}"


def is_built(folder: Path, size: int, mode: str) -> bool:
    """Whether the retrieval index that questions of this mode need exists; hybrid uses those of the other modes."""
    return mode == "hybrid" or (index_folder(folder, size) / "derived" / mode).exists()


def peak_memory() -> float:
    """The process's peak memory in MB, including mapped files."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / 1e6 if sys.platform == "darwin" else most * 1024 / 1e6


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


def _opening(name: str, index: Path) -> IndexMeasurement:
    opened: list[RagKV] = []
    found = _timing(name, lambda: opened.append(RagKV.open(index, device="cpu")))
    opened[0].close()
    return found


def _asking(rag: RagKV, name: str, size: int, number: int, mode: str, **options: Any) -> IndexMeasurement:
    question = Corpus(size).question(number)
    return _timing(name, lambda: rag.retrieve(question, retrieval=mode, rerank=False, top_k=8, **options))


def _timing(name: str, work: Callable[[], object]) -> IndexMeasurement:
    _, cpu, wall = _stage_seconds(work)
    return IndexMeasurement(name=name, value=cpu * 1000, wall=wall * 1000)


def _stage_seconds(work: Callable[[], T]) -> tuple[T, float, float]:
    """The result of `work`, and its seconds of processor time and of wall time."""
    start, clock = time.process_time(), time.perf_counter()
    made = work()
    return made, time.process_time() - start, time.perf_counter() - clock


def _median(figures: Sequence[IndexMeasurement]) -> IndexMeasurement:
    walls = [one.wall for one in figures if one.wall is not None]
    value = statistics.median(one.value for one in figures)
    return IndexMeasurement(name=figures[0].name, value=value, wall=statistics.median(walls))


def _rate(name: str, times: Sequence[tuple[int, float, float]]) -> IndexMeasurement:
    chunks, cpu, wall = map(sum, zip(*times, strict=True))
    return IndexMeasurement(name=name, value=chunks / cpu, wall=chunks / wall, unit="chunks/s", more_is_better=True)


def _memory(name: str) -> IndexMeasurement:
    return IndexMeasurement(name=name, value=peak_memory(), unit="MB")


DIMENSION = 1024  # bge-m3's
VOCABULARY = 50_000
CHUNK_TOKENS = 200  # drawn; about 160 of them differ
QUESTION_TOKENS = 14
TOP_K = 10
UPDATE = 20  # chunks: a document


def measure_retrieval(
    chunks: Annotated[int, typer.Option(help="Chunks in each index.", min=100)] = 100_000,
    questions: Annotated[int, typer.Option(help="Questions; medians are shown.", min=1)] = 50,
    folder: WorkFolder = None,
    quick: Quick = False,
    on_step: OnStep = unseen,
) -> Report:
    """Dense and sparse indexes of synthetic chunks, compared with FAISS called directly and with bm25s.

    Measures queries, building, opening and memory. Example: `ragkv bench retrieval --quick`
    """
    if find_spec("bm25s") is None:
        raise MissingExtraError(f"The baseline of sparse search is bm25s; {install_hint('bench')}.")
    if quick:
        chunks, questions = min(chunks, 20_000), min(questions, 20)
    rows = []
    for part in (_dense, _sparse):
        with tempfile.TemporaryDirectory(dir=folder) as place:
            rows += part(chunks, questions, Path(place), on_step)
        gc.collect()
    return Report(
        bench="retrieval", machine=machine("cpu"), versions=versions("faiss-cpu", "bm25s", "numpy"), rows=tuple(rows)
    )


def _dense(chunks: int, questions: int, folder: Path, on_step: OnStep) -> list[BenchRow]:
    on_step(f"dense: {chunks} vectors of {DIMENSION} numbers …")
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
    raw_open = seconds_of(lambda: faiss.read_index(str(folder / "raw")))
    loaded, _, opened = _stage_seconds(lambda: DenseIndex.load(folder / "index"))
    on_step("dense: questions …")
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
        BenchRow.of(f"{name}: query p50", times[1] * 1000, "ms", flat, times[0] * 1000, digits=4),
        BenchRow.of(f"{name}: query p50, mapped", times[2] * 1000, "ms", flat, times[0] * 1000, digits=4),
        BenchRow.of(f"{name}: same hits", same, "%", flat, 100.0, same / 100, digits=4),
        BenchRow.of(f"{name}: build", seconds, "s", flat, raw_seconds, digits=4),
        BenchRow.of(f"{name}: open", opened, "s", f"{flat}, read", raw_open, digits=4),
        *_memory_row(name, memory, flat, raw_memory),
    ]
    fresh = _units(rng, UPDATE)
    added = [(f"new-{at}", vector) for at, vector in enumerate(fresh)]
    update = seconds_of(lambda: loaded.update(added, ids[:UPDATE], generation=2, embedder="bench"))
    mutable = faiss.index_factory(DIMENSION, "IDMap2,Flat", faiss.METRIC_INNER_PRODUCT)
    mutable.add_with_ids(vectors, np.arange(chunks))

    def change() -> None:
        mutable.remove_ids(np.arange(UPDATE))
        mutable.add_with_ids(fresh, np.arange(chunks, chunks + UPDATE))

    raw_update = seconds_of(change)
    return [
        *rows,
        BenchRow.of(f"{name}: replace {UPDATE}", update * 1000, "ms", "FAISS IDMap2,Flat", raw_update * 1000, digits=4),
    ]


def _sparse(chunks: int, questions: int, folder: Path, on_step: OnStep) -> list[BenchRow]:
    import bm25s

    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it reports every step to any handler there is
    on_step(f"sparse: {chunks} chunks of {CHUNK_TOKENS} tokens …")
    rng = np.random.default_rng(0)
    names = [str(token) for token in range(VOCABULARY)]
    drawn = zipf_draws(rng, (chunks, CHUNK_TOKENS), VOCABULARY).astype(np.int32)
    ids = [f"chunk-{at:06}" for at in range(chunks)]
    asked = [_named(names, *_weights(rng, row)) for row in zipf_draws(rng, (questions, QUESTION_TOKENS), VOCABULARY)]

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
    on_step("sparse: questions …")
    tokens = [[list(question)] for question in asked]

    def ask_raw(at: int) -> Any:
        return raw.retrieve(tokens[at], k=TOP_K, show_progress=False)

    times, _ = _asked([ask_raw, lambda at: index.search(asked[at], TOP_K)], questions)
    raw.save(folder / "raw", show_progress=False)
    index.save(folder / "index")
    raw_open = seconds_of(lambda: bm25s.BM25.load(folder / "raw", mmap=True, show_progress=False))
    opened = seconds_of(lambda: SparseIndex.load(folder / "index"))
    name = f"sparse, {chunks} chunks"
    return [
        BenchRow.of(f"{name}: query p50", times[1] * 1000, "ms", "bm25s", times[0] * 1000, digits=4),
        BenchRow.of(f"{name}: build", seconds, "s", "bm25s", raw_seconds, digits=4),
        BenchRow.of(f"{name}: open", opened, "s", "bm25s, mapped", raw_open, digits=4),
        *_memory_row(name, memory, "bm25s", raw_memory),
    ]


def _units(rng: np.random.Generator, rows: int) -> NDArray[np.float32]:
    made = rng.standard_normal((rows, DIMENSION), dtype=np.float32)
    made /= np.linalg.norm(made, axis=1, keepdims=True)
    return made


def _weights(rng: np.random.Generator, drawn: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """The distinct tokens of a text with weights like those of bge-m3, mostly under 0.3."""
    tokens = np.unique(drawn)
    return tokens, rng.gamma(2, 0.06, len(tokens)).astype(np.float32)


def _named(names: list[str], tokens: NDArray[Any], weights: NDArray[np.float32]) -> Mapping[str, float]:
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


def _made(build: Callable[[], Any]) -> tuple[Any, float, float]:
    """The built index, the seconds it took, and its memory in MB (0 if the system does not report it)."""
    gc.collect()
    before = own_memory()
    made, _, seconds = _stage_seconds(build)
    gc.collect()
    return made, seconds, own_memory() - before


def _memory_row(name: str, memory: float, baseline: str, baseline_memory: float) -> list[BenchRow]:
    if not memory or not baseline_memory:
        return []
    return [BenchRow.of(f"{name}: memory", memory, "MB", baseline, baseline_memory, digits=4)]
