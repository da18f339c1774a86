"""`python -m ragkv.benchmarks.papers.gpu_report`: the papers' headline figures of speed, on one GPU, within minutes.

A model in Llama 3.1 8B's shape with random weights in bfloat16 answers random tokens: the cost of a pass depends on
neither. Each row has ragkv's figure, that of transformers' own sdpa attention over the same tokens in the same run, and
the paper's figure. The shortest sizes come first; a size that would not fit into the remaining time is skipped and
named. Without a GPU everything runs in miniature on the CPU, which shows that the
report works but nothing about speed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ragkv.benchmarks.evaluation.output import markdown_table, write_whole
from ragkv.benchmarks.papers.plots import OTHER_FOLDER
from ragkv.benchmarks.papers.run import notes_path
from ragkv.benchmarks.papers.speed import (
    SHAPES,
    IPPDShape,
    apb_entrants,
    block_lengths,
    measure_shape,
    sequential_seconds,
)
from ragkv.benchmarks.papers.table import commit_of
from ragkv.benchmarks.speed.inference import prefill, random_llama, random_request
from ragkv.benchmarks.speed.report import BenchRow, OnStep, alternating, described, machine, shown, versions
from ragkv.cli.console import note
from ragkv.cli.main import SingleCommand, log_to_stderr, run
from ragkv.engines import Request, make_engine
from ragkv.errors import ConfigError
from ragkv.model.apb.document import lengths_for
from ragkv.model.language_model import LanguageModel
from ragkv.runtime import Generation, Stream, runtime_of
from ragkv.runtime.graphs import PASSES

COMMAND = "python -m ragkv.benchmarks.papers.gpu_report"
_REPOSITORY = Path(__file__).parents[2]
K = 1024
LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "max_position_embeddings": 256 * K,
}
TINY = LLAMA_8B | {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes to measure, in tokens; `experts` are documents of `document` tokens, and `end_to_end` their answers."""

    block: tuple[int, ...] = (50, 512, K, 2 * K, 4 * K, 8 * K, 16 * K, 32 * K)
    ape: tuple[int, ...] = (8 * K, 32 * K, 128 * K)
    generated: int = 256
    document: int = 2 * K
    experts: tuple[int, ...] = (8, 32, 64)
    end_to_end: int = 32
    answer: int = 512
    ippd: tuple[IPPDShape, ...] = SHAPES
    apb: tuple[int, ...] = (32 * K, 64 * K, 128 * K)
    rounds: int = 3


MINIATURE = Sizes(
    block=(50, 512, K, 2 * K),
    ape=(K, 2 * K),
    generated=16,
    document=128,
    experts=(1, 8),
    end_to_end=8,
    answer=16,
    ippd=tuple(shape.shorter() for shape in SHAPES),
    apb=(K, 2 * K),
    rounds=1,
)


WARM_UP = replace(MINIATURE, ippd=())
"""Loads the kernels before they are measured; `measure_shape` does that itself."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A row: our figure beside its baseline's, and the paper's figure."""

    section: str
    size: int
    series: str
    row: BenchRow
    paper: str

    @classmethod
    def of(
        cls, section: str, size: int, series: str, ours: float, unit: str, baseline: str, theirs: float, paper: str
    ) -> Measured:
        return cls(section, size, series, BenchRow.of(f"{series}, {size} tokens", ours, unit, baseline, theirs), paper)


Task = tuple[str, int, Callable[[], list[Measured]]]
"""(section, tokens, function that measures it)."""
_BLOCK = "Block-Attention, Table 2 (Llama 3 8B): first token of a question of 50 tokens over cached passages"
_APE = "APE, Figure 10 (Llama 3.1 8B, H100): a question of 256 tokens over a context"
_PCED = "PCED, Figure 3 (64 documents of 2,048 tokens at most): documents as experts"
_IPPD = "IPPD, Table 5 (Qwen3-8B, L40S): questions about common contexts"
_APB = "APB, Table 11 (Llama 3.1 8B; FlashAttention on one A800, the others on eight): prefill of a long document"
_PLOTTED = "plotted, not printed"
# ms of block and vanilla
_TABLE_2 = {
    50: (26, 26),
    512: (26, 50),
    K: (26, 87),
    2 * K: (26, 167),
    4 * K: (27, 330),
    8 * K: (29, 691),
    16 * K: (34, 1515),
    32 * K: (45, 3638),
}
# questions/s of IPPD, of transformers in batches, of prefix caching in vLLM, in the order of `SHAPES`
_TABLE_5 = ((57.77, 1.75, 26.39), (62.04, 14.25, 50.10), (52.12, 21.18, 25.17), (6.95, 0.71, 11.43))
# seconds of FlashAttention, Star Attention and APB
_TABLE_11 = {32 * K: (3.46, 0.67, 0.33), 64 * K: (9.51, 1.43, 0.50), 128 * K: (30.01, 3.50, 0.94)}


def tasks(lm: LanguageModel, sizes: Sizes, on_step: OnStep) -> list[Task]:
    """Everything to measure, the smallest sizes first."""
    todo: list[Task] = []
    todo += [(_BLOCK, n, partial(_block, lm, n, sizes.rounds if n <= 8 * K else 1)) for n in sizes.block]
    todo += [(_APE, n, partial(_ape, lm, n, sizes.generated)) for n in sizes.ape]
    for tokens in (documents * sizes.document for documents in sizes.experts):
        answer = sizes.answer if tokens == sizes.end_to_end * sizes.document else 1
        todo.append((_PCED, tokens, partial(_pced, lm, tokens, sizes.document, answer)))
    for shape in sizes.ippd:
        tokens = shape.contexts * (shape.instruction + shape.context)
        todo.append((_IPPD, tokens, partial(_ippd, lm, shape, on_step)))
    todo += [(_APB, n, partial(_apb, lm, n)) for n in sizes.apb]
    return sorted(todo, key=lambda task: task[1])


def _block(lm: LanguageModel, total: int, rounds: int) -> list[Measured]:
    context = total - 50
    request = random_request(lm, context, prefix=0)
    works = {
        "block": lambda: Stream(runtime_of(lm), make_engine("block", {}), request).best(),
        "vanilla": lambda: prefill(lm, _prompt(request)),
    }
    times = alternating(works, rounds)
    block, vanilla = _TABLE_2[total]
    own, other = (1000 * times[name] for name in works)
    paper = f"{block} against {vanilla} ms"
    return [Measured.of(_BLOCK, total, "first token", own, "ms", "prefill", other, paper)]


def _prompt(request: Request) -> list[int]:
    return [*request.prefix_ids, *(i for chunk in request.chunks for i in chunk.token_ids), *request.suffix_ids]


def _ours(lm: LanguageModel, name: str, request: Request, answer: int) -> tuple[float, float]:
    """Seconds to the first and to the last token of an answer, after passes of these sizes have been captured."""
    runtime, engine = runtime_of(lm), make_engine(name, {})
    for _ in range(PASSES):
        Stream(runtime, engine, request).best()
    started = time.perf_counter()
    tokens = runtime.tokens(runtime.submit(engine, request, Generation(max_new_tokens=answer)))
    next(tokens)
    first = time.perf_counter() - started
    if 1 + sum(1 for _ in tokens) != answer:
        raise RuntimeError(f"an answer does not have {answer} tokens")
    return first, time.perf_counter() - started


def _ape(lm: LanguageModel, context: int, answer: int) -> list[Measured]:
    request = random_request(lm, context, question=256)
    pairs = zip(_ours(lm, "ape", request, answer), sequential_seconds(lm, _prompt(request), answer), strict=True)
    papers = (_PLOTTED, _PLOTTED)
    if context == 128 * K:
        papers = "28× MInference; sequential prefill 17 s (§1, §5.4)", "4.5× (§5.4)"
    return [
        Measured.of(_APE, context, series, ours, "s", "sequential encoding", theirs, paper)
        for series, (ours, theirs), paper in zip(("first token", f"{answer} tokens"), pairs, papers, strict=True)
    ]


def _pced(lm: LanguageModel, size: int, document: int, answer: int) -> list[Measured]:
    request = random_request(lm, size, chunk=document)
    pairs = zip(_ours(lm, "pced", request, answer), sequential_seconds(lm, _prompt(request), answer), strict=True)
    papers = "0.14 against 25.50 s" if size == 128 * K else _PLOTTED, "1.7× (65k tokens, 512 new)"
    measured = [
        Measured.of(_PCED, size, series, ours, "s", "concatenated", theirs, paper)
        for series, (ours, theirs), paper in zip(("first token", f"{answer} tokens"), pairs, papers, strict=True)
    ]
    return measured if answer > 1 else measured[:1]


def _ippd(lm: LanguageModel, shape: IPPDShape, on_step: OnStep) -> list[Measured]:
    ippd, batched, cached = _TABLE_5[shape.number - 1]
    return [
        Measured(
            _IPPD,
            shape.number,
            shape.name,
            row,
            f"{ippd:g} against {batched if 'generate' in row.baseline else cached:g} questions/s",
        )
        for row in measure_shape(lm, shape, 1, on_step)
    ]


def _apb(lm: LanguageModel, tokens: int) -> list[Measured]:
    ids = random_request(lm, 0, question=tokens, prefix=0).suffix_ids
    runs = apb_entrants(lm, ids, lengths_for(tokens) or block_lengths(tokens))
    seconds = {name: run() for name, run in runs.items()}
    printed = dict(zip(runs, _TABLE_11.get(tokens, ()), strict=False))
    return [
        Measured.of(
            _APB,
            tokens,
            name,
            seconds[name],
            "s",
            "full",
            seconds["full"],
            f"{printed[name]:g} against {printed['full']:g} s" if printed else _PLOTTED,
        )
        for name in ("star", "apb")
    ]


def measure(
    todo: Sequence[Task], seconds: float, on_step: OnStep, clock: Callable[[], float] = time.perf_counter
) -> tuple[list[Measured], list[str]]:
    """The rows, and a sentence about each size that was skipped or failed.

    A size is skipped if it would probably end later than `seconds` from now, judging by the section's last size;
    attention grows faster than its tokens.
    """
    end, rows, notes, last = clock() + seconds, list[Measured](), list[str](), dict[str, tuple[int, float]]()
    for section, tokens, work in todo:
        started = clock()
        before, took = last.get(section, (tokens, 0.0))
        expected = took * (tokens / before) ** 1.2
        if started + expected > end:
            notes.append(f"{section}: {tokens} tokens were skipped, because the time was up.")
            continue
        on_step(f"{section}: {tokens} tokens …")
        try:
            rows += work()
        except RuntimeError as error:  # CUDA's, out of memory too: the other figures are wanted all the same
            notes.append(f"{section}: {tokens} tokens failed: {type(error).__name__}: {str(error).splitlines()[0]}")
        last[section] = tokens, clock() - started
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return sorted(rows, key=lambda one: (one.section, one.size)), notes


def write(folder: Path, rows: Sequence[Measured], facts: Mapping[str, Any], notes: Sequence[str]) -> list[Path]:
    """Write gpu.md, with what a person wrote in gpu.notes.md, and gpu.json. Returns their paths."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"The report cannot be written to {folder}: {error}.") from error
    parts = [
        facts["device"],
        "# The papers' headline figures on one GPU",
        f"Made by `{COMMAND}` in {facts['seconds']:.0f} s; commit {facts['commit']}; {facts['model']}; "
        + ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
        + ".",
    ]
    written = [folder / "gpu.json", folder / "gpu.md"]
    for section, group in groupby(rows, key=lambda measured: measured.section):
        of_section = list(group)
        body = [
            [
                measured.row.name,
                f"{shown(measured.row.value)} {measured.row.unit}",
                measured.row.baseline,
                f"{shown(measured.row.baseline_value)} {measured.row.unit}",
                f"{measured.row.ratio:.2f}×",
                measured.paper,
            ]
            for measured in of_section
        ]
        parts += [f"## {section}", markdown_table(["", "ragkv", "baseline", "", "ratio", "the paper"], body)]
    parts += ["## Not measured", "".join(f"- {measured}\n" for measured in notes)] if notes else []
    if (own := notes_path(folder, "gpu")).exists():
        parts += ["## Notes", own.read_text(encoding="utf-8")]
    data = {**facts, "rows": [asdict(measured) for measured in rows], "notes": list(notes)}
    text = json.dumps(data, ensure_ascii=False, indent=1) + "\n"
    for path, content in zip(written, (text, "\n\n".join(part.rstrip("\n") for part in parts) + "\n"), strict=False):
        write_whole(path, content, instead=OTHER_FOLDER)
    return written


def make_report(folder: Path, sizes: Sizes, shape: Mapping[str, Any], minutes: float, on_step: OnStep) -> list[Path]:
    """Measure and write; returns the paths."""
    started = time.perf_counter()
    gpu = torch.cuda.is_available() and shape is LLAMA_8B
    lm = random_llama("bfloat16" if gpu else "float32", "cuda" if gpu else "cpu", shape)
    lm.eos_ids = frozenset()  # all answers are of one length
    lm.module.generation_config.eos_token_id = None
    place = machine(str(lm.device))
    if gpu:
        device = f"Measured on one GPU: {place}."
    else:
        device = f"No GPU was used: a miniature on a processor, which says nothing about speed ({place})."
    on_step(f"{device} {described(lm)}")
    if gpu:
        for _, _, work in tasks(lm, WARM_UP, on_step):
            work()
    rows, notes = measure(tasks(lm, sizes, on_step), 60 * minutes - (time.perf_counter() - started), on_step)
    facts = {
        "device": device,
        "gpu": gpu,
        "model": described(lm),
        "commit": commit_of(_REPOSITORY),
        "versions": versions(),
        "seconds": time.perf_counter() - started,
    }
    return write(folder, rows, facts, notes)


app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)


@app.command(cls=SingleCommand)
def report(
    out: Annotated[Path, typer.Option(help="Folder for gpu.md and gpu.json.")] = Path("docs/results/gpu"),
    miniature: Annotated[bool, typer.Option("--miniature", help="Small, on the processor; so without a GPU.")] = False,
    minutes: Annotated[float, typer.Option(help="Sizes that would take longer are skipped.", min=0)] = 8.0,
) -> None:
    """The papers' headline figures of speed on one GPU: Block-Attention, APE, PCED, IPPD and APB.

    Example: `python -m ragkv.benchmarks.papers.gpu_report --out results`
    """
    log_to_stderr(debug=False)
    small = miniature or not torch.cuda.is_available()
    sizes, shape = (MINIATURE, TINY) if small else (Sizes(), LLAMA_8B)
    written = make_report(out, sizes, shape, minutes, note)
    note(f"{written[1]} written")


def main() -> None:
    """Entry point of `python -m ragkv.benchmarks.papers.gpu_report`."""
    run(app, COMMAND)


if __name__ == "__main__":
    main()
