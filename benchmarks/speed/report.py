"""Shared code of the benchmarks: the form of a result (each figure beside its baseline), documents, and processes.

Each generated document has one word that no other has, so that a question about it has one right answer; all other
words follow Zipf and Mandelbrot's law. The models are real ones with random weights: a Llama of one layer, whose KV
takes a kilobyte per chunk, and a table of static vectors. So the benchmarks measure ragkv's work around the models.

Work in a fresh process is forked from a server that has only imported its module, so a process costs milliseconds
instead of the seconds of importing torch.
"""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import typer
from numpy.typing import NDArray

from ragkv.cli.console import draw, note, plain, print_json
from ragkv.distributed.group import Handshake, Peers, RankGroup
from ragkv.distributed.sharding import RankExecutor
from ragkv.errors import RagkvError
from ragkv.ingest import ReadyDocument
from ragkv.ingest.ingester import ReadyChunk
from ragkv.model.apb.document import LongDocument
from ragkv.model.checkpoint import processor_units
from ragkv.types import Document

if TYPE_CHECKING:
    from ragkv.model.language_model import LanguageModel


OnStep = Callable[[str], None]
"""Called with a line about each step of a benchmark."""
Quick = Annotated[bool, typer.Option("--quick", help="Fewer sizes and rounds: at most a minute on two cores.")]
Lengths = Annotated[str, typer.Option(help="Context lengths.")]
Rounds = Annotated[int, typer.Option(help="Rounds per length; medians are shown.", min=1)]
AutoDtype = Annotated[
    str, typer.Option(help="auto (bfloat16 if the processor supports it), float32, bfloat16, float16 or int8.")
]


def unseen(*_: object) -> None:
    """An `on_step` that shows nothing."""


def described(lm: LanguageModel) -> str:
    """The model's name, size and data type."""
    return f"{lm.checkpoint.name}: {lm.parameters / 1e6:.0f}M parameters, {lm.precision}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """One figure. `ratio` > 1 means better than the baseline."""

    name: str
    value: float
    unit: str
    baseline: str
    baseline_value: float
    ratio: float

    @classmethod
    def of(
        cls,
        name: str,
        value: float,
        unit: str,
        baseline: str,
        other: float,
        ratio: float | None = None,
        *,
        digits: int = 3,
        ratio_digits: int = 2,
    ) -> BenchRow:
        """`value` beside `other`; without a `ratio`, less is better.

        Rounded to `digits` decimals, or to three significant digits if those would show less.
        """
        return cls(
            name=name,
            value=_rounded(value, digits),
            unit=unit,
            baseline=baseline,
            baseline_value=_rounded(other, digits),
            ratio=_rounded(other / value if ratio is None else ratio, ratio_digits),
        )


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.3g}") if abs(value) < 10 ** (2 - digits) else round(value, digits)


def seconds_of(work: Callable[[], object], *, processor: bool = False) -> float:
    """How long `work` takes, or its processor time; freeing its result is not part of it."""
    now = time.process_time if processor else time.perf_counter
    start = now()
    result = work()
    end = now()
    del result
    return end - start


def alternating(
    works: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    before: Mapping[str, Callable[[], object]] | None = None,
    processor: bool = False,
) -> dict[str, float]:
    """The median seconds of each work, or its `processor` time; they take turns in every round.

    The first round warms up; `before` runs before each work and is not timed.
    """
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds + 1):
        for name, work in works.items():
            if before is not None and name in before:
                before[name]()
            times[name].append(seconds_of(work, processor=processor))
    return {name: statistics.median(found[1:]) for name, found in times.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All figures of one run."""

    bench: str
    machine: str
    versions: dict[str, str]
    rows: tuple[BenchRow, ...]

    def to_json(self) -> dict[str, Any]:
        """The object that `ragkv bench NAME --json` prints."""
        return asdict(self)

    def show(self, *, as_json: bool, quiet: bool) -> None:
        """Print the report as JSON, or as a table with the machine below it."""
        if as_json:
            print_json(self.to_json())
            return
        table = plain("what", "value", "baseline", "", "ratio")
        for row in self.rows:
            table.add_row(
                row.name,
                f"{shown(row.value)} {row.unit}",
                row.baseline,
                f"{shown(row.baseline_value)} {row.unit}",
                f"{row.ratio:,.{1 if row.ratio >= 10 else 2}f}x",
            )
        draw(table)
        self.note_machine(quiet=quiet)

    def note_machine(self, *, quiet: bool) -> None:
        if not quiet:
            note(f"{self.machine}; " + ", ".join(f"{name} {version}" for name, version in self.versions.items()))


def shown(number: float) -> str:
    """One decimal, or two significant digits below one."""
    return f"{number:,.1f}" if abs(number) >= 1 or number == 0 else f"{number:.2g}"


def machine(device: str) -> str:
    """A line that names the processor, its units for half types, its cores and the device."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as stream:  # noqa: PTH123 - not a file of ours
            name = next((line.split(":", 1)[1].strip() for line in stream if line.startswith("model name")), name)
    except OSError:
        name = platform.machine()
    gpu = f", {torch.cuda.get_device_name(device)}" if device.startswith("cuda") else ""
    units = " ".join(sorted(processor_units())) or "no units for half types"
    return f"{name} ({units}), {os.cpu_count()} cores, {torch.get_num_threads()} threads{gpu}"


def own_memory(process: int | str = "self") -> float:
    """A process's memory in MB, without mapped files; 0 where the system does not report it."""
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0.0
    return next((int(row.split()[1]) * 1024 / 1e6 for row in status.splitlines() if row.startswith("RssAnon")), 0.0)


def versions(*packages: str) -> dict[str, str]:
    """The versions of the packages that a figure depends on."""
    return {package: version(package) for package in ("ragkv", "torch", "transformers", *packages)}


CHUNKS = 8
"""Chunks of a document."""
WORDS = 64
"""Words of a chunk."""
TOPICS = 10
"""Values of the documents' metadata `topic`."""
VOCABULARY = 20_000
WIDTH = 64
"""Dimensions of a chunk's vector."""
_ONSETS = ("b", "br", "d", "f", "g", "gr", "h", "k", "l", "m", "n", "p", "pr", "r", "s", "st", "t", "v", "w", "z")
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ei", "ou")


def vocabulary() -> list[str]:
    """The words, the most frequent first: numbers written in syllables, each word its own."""
    syllables = [onset + vowel for onset in _ONSETS for vowel in _VOWELS]
    base = len(syllables)
    return [syllables[at % base] + "n" + syllables[at // base % base] for at in range(VOCABULARY)]


@cache
def _words() -> NDArray[np.str_]:
    return np.array(vocabulary())


@cache
def _shares(tokens: int) -> NDArray[np.float64]:
    weights = 1 / (np.arange(tokens) + 10.0)
    shares: NDArray[np.float64] = np.cumsum(weights) / weights.sum()
    return shares


def zipf_draws(rng: np.random.Generator, shape: tuple[int, ...], tokens: int = VOCABULARY) -> NDArray[np.intp]:
    """Numbers of tokens; the r-th most frequent of them has a share proportional to 1 / (r + 10)."""
    drawn: NDArray[np.intp] = np.searchsorted(_shares(tokens), rng.random(shape)) % tokens
    return drawn


@dataclass(frozen=True)
class Corpus:
    """`size` chunks in documents of `CHUNKS`; the last document has the rest. Equal numbers give equal texts."""

    size: int

    @property
    def documents(self) -> int:
        """How many documents there are."""
        return -(-self.size // CHUNKS)

    def document(self, number: int, version: int = 0) -> ReadyDocument:
        """The document with this number; another version has other texts, and other chunk ids."""
        count = min(CHUNKS, self.size - number * CHUNKS)
        rng = np.random.default_rng([number, version])
        drawn = _words()[zipf_draws(rng, (count, WORDS - 1))]
        texts = [f"{self.name(number)} {' '.join(row)}." for row in drawn.tolist()]
        starts = [sum(len(text) + 2 for text in texts[:at]) for at in range(count)]
        return ReadyDocument(
            document=Document(
                document_id=self.document_id(number),
                source=f"{self.document_id(number)}.txt",
                content_hash=f"{number}-{version}",
                metadata={"topic": f"t{number % TOPICS}"},
            ),
            text="\n\n".join(texts),
            chunks=[
                ReadyChunk(chunk_id=f"{self.document_id(number)}-{version}-{at}", text=text, start=start)
                for at, (text, start) in enumerate(zip(texts, starts, strict=True))
            ],
        )

    def document_id(self, number: int) -> str:
        return f"doc-{number:07}"

    def name(self, number: int) -> str:
        """The word that only this document has."""
        return f"zed{number:07}"

    def question(self, number: int) -> str:
        """A question about the document with this number, in eight words."""
        words = _words()[zipf_draws(np.random.default_rng([number, 1 << 31]), (7,))]
        return f"{' '.join(words.tolist())} {self.name(number)}?"


def make_models(folder: Path) -> tuple[Path, Path]:
    """The checkpoints of the language model and of the embedder under `folder`, which are made if they are missing.

    Each is made in one step and from a seed, so it always has the same fingerprint.
    """
    made = folder / "model", folder / "embedder"
    for path, make in zip(made, (make_language_model, _embedder), strict=True):
        if not path.exists():
            unfinished = path.with_suffix(".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            make(unfinished)
            unfinished.rename(path)
    return made


def _tokenizer() -> Any:
    """One token per word; words that only one document has are unknown to it."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = ["<unk>", "<s>", "</s>", *vocabulary()]
    tokenizer = Tokenizer(models.WordLevel({name: at for at, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def make_language_model(folder: Path, **shape: float) -> None:
    """A Llama with random weights and a token per word of a corpus; by default, the smallest possible one."""
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from ragkv.model.loading import quiet_loading

    torch.manual_seed(0)
    least: dict[str, Any] = {
        "hidden_size": 4,
        "intermediate_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    }
    config = LlamaConfig(
        vocab_size=VOCABULARY + 3,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
        **{**least, **shape},
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    with quiet_loading(reports=False):
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=_tokenizer(), model_max_length=4096, **names).save_pretrained(folder)


def _embedder(folder: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    weights = np.random.default_rng(0).standard_normal((VOCABULARY + 3, WIDTH), dtype=np.float32)
    table = StaticEmbedding(_tokenizer(), embedding_weights=weights)
    SentenceTransformer(modules=[table], device="cpu").save(str(folder), create_model_card=False)


T = TypeVar("T")
Progress = Callable[[int, int], None]
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
"""Libraries read these variables when they are loaded, before our code could set a number."""


def run_fresh(work: Callable[..., T], *arguments: Any, on_progress: Progress | None = None) -> T:
    """The result of `work(*arguments, progress)`, which may call `progress(done, total)`. One thread computes.

    An error of ragkv is raised here; any other becomes a RagkvError with its traceback.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload([work.__module__])
    here, there = context.Pipe(duplex=False)
    with patch.dict(os.environ, dict.fromkeys(_ONE_THREAD, "1")):
        process = context.Process(target=_work, args=(there, work, arguments), daemon=True)
        process.start()
    there.close()
    try:
        while True:
            kind, *payload = here.recv()
            if kind == "progress":
                if on_progress is not None:
                    on_progress(*payload)
            elif kind == "error":
                raise payload[0]
            else:
                result: T = payload[0]
                return result
    except EOFError:
        process.join()
        code = process.exitcode or 0
        how = f"by signal {-code}" if code < 0 else f"with status {code}"
        raise RagkvError(f"The process that measured {work.__name__} ended {how}; is there enough memory?") from None
    finally:
        here.close()
        process.join(timeout=5)
        process.kill()
        process.join()


def _work(there: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        there.send(("result", work(*arguments, lambda done, total: there.send(("progress", done, total)))))
    except RagkvError as error:
        there.send(("error", error))
    except KeyboardInterrupt:
        os._exit(130)  # the parent was interrupted too
    except Exception:
        there.send(("error", RagkvError(f"{work.__name__} failed:\n{traceback.format_exc()}")))


_PATIENCE = 3600.0
"""Seconds: ranks that share cores with other work wait long for each other; waiting is not counted."""


def rank_seconds(long_document: LongDocument, ranks: int) -> list[float]:
    """For each rank, the time of its own thread, which does all its computation; waiting for other ranks is excluded.

    They use gloo, on a CPU only, with one torch thread per rank.
    """
    store = dist.HashStore()  # type: ignore[attr-defined]
    seconds = [0.0] * ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        peers: Peers | None = None
        try:
            torch.set_num_threads(1)  # only this thread: the time of others would not be counted
            peers = Peers.meet(store, rank, ranks, Handshake(same={}), timeout=_PATIENCE)
            group = RankGroup(store, rank, ranks, peers, timeout=_PATIENCE, device=long_document.model.device)
            started = time.thread_time()
            for _ in RankExecutor(group).run(long_document):
                continue
            seconds[rank] = time.thread_time() - started
            group.gather(torch.zeros(1))  # no rank leaves while another one works
        except BaseException as error:
            errors.append(error)
            if peers is not None:
                peers.notify(str(error))

    threads = [threading.Thread(target=run, args=(rank,), name=f"ragkv-bench-rank-{rank}") for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return seconds
