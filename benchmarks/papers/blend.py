"""How much of full attention's quality `blend`'s selectors, and chunks that saw their document, restore untrained.

These tables are ragkv's own: each paper compares its own selectors, at a nominal ratio of tokens. Here every selector
may spend the same charge (`Engine.charge`), which includes the cost of choosing, and is compared with random tokens.
Each engine is run along the answer of full attention; the gap to close is the KL divergence of plain block placement.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ragkv.benchmarks.evaluation.answers import GIVEN, SCHEME, ChunkSource, IndexSource, LoadedModel, TaskSource
from ragkv.benchmarks.evaluation.files import load_task
from ragkv.benchmarks.evaluation.metrics import Example, Task, score
from ragkv.benchmarks.evaluation.output import ResultCache, digest_of
from ragkv.benchmarks.papers.table import (
    Cell,
    Column,
    KnownFigures,
    Measure,
    Model,
    RunOptions,
    Table,
    TableRow,
    across,
)
from ragkv.config import EncodingConfig
from ragkv.doctor.compare import greedy, next_token_kl
from ragkv.doctor.questions import Progress
from ragkv.doctor.verdicts import mean_interval
from ragkv.engines import Engine, Request
from ragkv.index.kv_source import After
from ragkv.model.checkpoint import MINI
from ragkv.pipeline import RagKV
from ragkv.runtime import Generation, Stream, runtime_of

DOCUMENTATION = Path(__file__).parents[1] / "training" / "debian"
FORCED, WRITTEN = 12, 24
"""Tokens of full attention's answer that all lines are forced along, and tokens of a line's own answer."""
FULL, NONE = "full", "block"


def measure(table: Table, options: RunOptions, on_progress: Progress | None) -> KnownFigures:
    """Ask each question of the table's one task. Questions that were asked before are taken from `options.work`."""
    name = options.models.get("", table.models[""])
    model = LoadedModel(name, options.dtype, options.device)  # its fingerprint needs no weights
    task = _task(table, options)
    cache = None if options.work is None else ResultCache(options.work / "answers" / f"{table.name}.jsonl")
    lines = [asdict(line) for line in table.lines]
    answers, source = [], None
    with ExitStack() as stack:
        for at, example in enumerate(task.examples):
            if on_progress is not None:
                on_progress(at, len(task.examples), table.name)
            key = digest_of([SCHEME, FORCED, WRITTEN, model.fingerprint, asdict(example), lines])
            known = None if cache is None else cache.get(key)
            if known is None:
                source = source or _source(table, options, name, stack)
                known = {"lines": _ask(table, source, name, example, options.dtype)}
                if cache is not None:
                    cache.put(key, **known)
            answers.append(known["lines"])
    return KnownFigures(
        table=replace(table, remarks=(*table.remarks, *_remarks(answers))),
        scores=dict(_scores(table, task, answers)),
        models={"": Model(name=name, dtype=model.dtype, fingerprint=model.fingerprint[:12])},
        seed=options.seed,
        tasks={column.label: task for column in table.columns},
    )


def _task(table: Table, options: RunOptions) -> Task:
    """The questions; a smaller limit takes the first of them."""
    count = table.limit if options.limit is None else min(options.limit, table.limit)
    if table.lines[0].retrieval == GIVEN:
        return table.columns[0].make(options.seed, count)
    task = load_task(DOCUMENTATION / "questions.jsonl")
    asked = [example for example in task.examples if example.kind != "unanswerable"]
    random.Random(options.seed).shuffle(asked)
    return replace(task, examples=asked[:count])


def _source(table: Table, options: RunOptions, model: str, stack: ExitStack) -> ChunkSource:
    """Where chunks come from. Only an index knows the document of a chunk, so the documentation is ingested."""
    if table.lines[0].retrieval == GIVEN:
        return TaskSource(device=options.device)
    folder = stack.enter_context(TemporaryDirectory())
    settings: dict[str, Any] = {} if options.dtype is None else {"dtype": options.dtype}
    rag = stack.enter_context(
        RagKV.create(
            Path(folder) / "index",
            device=options.device,
            model=model,
            embedder="none",
            reranker="none",
            engines=(FULL,),
            default_engine=FULL,
            encoding=EncodingConfig(context=_CONTEXT),
            **settings,
        )
    )
    rag.ingest(DOCUMENTATION / "documents")
    return IndexSource(rag)


def _ask(
    table: Table, source: ChunkSource, model_name: str, example: Example, dtype: str | None
) -> dict[str, dict[str, Any]]:
    """The results of each line for one question, by label; the first line is full attention.

    Chunk KV is in memory before a clock starts. Lines are run together, so that they share the passes of a step.
    """
    figures: dict[str, dict[str, Any]] = {}
    asked: list[tuple[TableRow, Engine, Request]] = []
    streams: list[Stream] = []
    for line in table.lines:
        backend, task = source.ask(line.candidate(model_name, dtype), example)
        model, engine, writes = backend.owner.model, task.engine, After()
        scored = backend.find(task, lambda _: None)[: engine.most_chunks]
        request, _ = backend.request(task, backend.plan(engine, scored[::-1]), None, writes)
        backend.store(writes)
        runtime = runtime_of(model)
        asked.append((line, engine, request))
        started = time.process_time()
        streams.append(Stream(runtime, engine, request))
        seconds = time.process_time() - started
        held = {id(chunk.kv): chunk.kv.nbytes for chunk in request.chunks if chunk.kv is not None}
        figures[line.label] = {
            "seconds": seconds,
            "charge": engine.charge(request, model),
            "bytes": sum(held.values()),
            "kl": [],
            "agreed": [],
        }
    reference = greedy(model, streams[0], max_new_tokens=FORCED)
    for step, token_id in enumerate(reference.ids):
        for line, stream in zip(table.lines[1:], streams[1:], strict=True):
            log_probs = torch.log_softmax(stream.scores, -1)
            figures[line.label]["kl"].append(next_token_kl(reference.log_probs[step], log_probs))
            figures[line.label]["agreed"].append(stream.best() == token_id)
        if step + 1 < len(reference.ids):
            for stream in streams[1:]:
                stream.advance(token_id, wait=False)
    figures[FULL] |= {"kl": [0.0], "agreed": [True]}
    streams.clear()
    answers = [
        (line, runtime.decode(engine, request, Generation(max_new_tokens=WRITTEN)))
        for line, engine, request in asked
        if _answers(line)
    ]
    for line, tokens in answers:
        figures[line.label]["text"] = "".join(token.text for token in tokens).strip()
    return figures


def _answers(line: TableRow) -> bool:
    """Whether it also generates an answer of its own, which is slow: placement, and `question` beside `random`."""
    return "charge" not in line.engine or line.label.startswith(_WRITERS)


def _scores(
    table: Table, task: Task, answers: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Cell, dict[str, list[tuple[str, float]]]]]:
    for line in table.lines:
        for column in table.columns:
            own, measured = [row[line.label] for row in answers], column.measure
            if measured in ("score", "f1"):
                if not _answers(line):
                    continue
                metric = task.metric if measured == "score" else "f1"
                values = [score(metric, row["text"], one) for row, one in zip(own, task.examples, strict=True)]
            elif measured == "gap":
                none = [fmean(row[NONE]["kl"]) for row in answers]
                values = _shares([b - fmean(row["kl"]) for row, b in zip(own, none, strict=True)], none)
            elif measured == "time":
                values = _shares([row["seconds"] for row in own], [row[FULL]["seconds"] for row in answers])
            elif measured == "charge":
                if any(row["charge"] is None for row in own):
                    continue
                values = [row["charge"] for row in own]
            else:
                values = [fmean(row["agreed"]) for row in own]
            ids = (example.example_id for example in task.examples)
            yield Cell(line.label, column.label), {column.label: list(zip(ids, values, strict=True))}


def _shares(parts: Sequence[float], wholes: Sequence[float]) -> list[float]:
    """A number for each question. Their mean is sum(parts) / sum(wholes), and their spread is that of this ratio.

    (Taylor linearisation, as in `ragkv.doctor.verdicts`.)
    """
    mean, ratio = fmean(wholes), sum(parts) / sum(wholes)
    return [ratio + (part - ratio * whole) / mean for part, whole in zip(parts, wholes, strict=True)]


def _remarks(answers: Sequence[Mapping[str, Any]]) -> list[str]:
    none = [fmean(each[NONE]["kl"]) for each in answers]
    low, high = mean_interval(none, [1.0] * len(none))
    full = sorted(each[FULL]["seconds"] for each in answers)[len(answers) // 2]
    size = fmean(each[NONE]["bytes"] for each in answers) / 2**20
    return [
        f"The gap is KL(full ‖ {NONE}), {fmean(none):.3f} nats per token ({low:.3f} to {high:.3f}).",
        f"Every line but {FULL} reads the same bytes of chunk KV, {size:.1f} MiB a question; {FULL} reads none. The "
        f"first token of {FULL} takes {full:.2f} processor seconds (median).",
    ]


CHARGES = (0.05, 0.15, 0.3)
_SELECTORS = ("question", "deviation", "first", "random")
_CONTEXT = 256


def _blend(select: str, charge: float, context: str = "") -> tuple[str, str]:
    """The label and the engine of a line."""
    chosen = "preset=prophet" if select == "prophet" else f"select={select}"
    more = f", context={_CONTEXT}" if context else ""
    return f"{select}, {charge:.2f}{context}", f"blend({chosen}, charge={charge}{more})"


_SEEN = ", context"
_WRITERS = tuple(_blend(select, CHARGES[1])[0] for select in ("question", "random"))
_ALONE = {
    FULL: "full",
    "block over standalone": "block(over=standalone)",
    NONE: "block(over=prefixed)",
    **dict(
        _blend(select, charge)
        for select in _SELECTORS
        for charge in CHARGES
        if (select, charge) != ("deviation", CHARGES[0])  # choosing alone costs more
    ),
    **dict([_blend("prophet", CHARGES[1])]),
}
_CONTEXTS = {
    f"{NONE}{_SEEN}": f"block(over=prefixed, context={_CONTEXT})",
    **dict(_blend(select, charge, _SEEN) for select in ("question", "random") for charge in CHARGES),
    **dict(_blend(select, CHARGES[1], _SEEN) for select in ("deviation", "first")),
}


def _table(name: str, title: str, task: str, chunks: int, retrieval: str, engines: Mapping[str, str]) -> Table:
    labels: dict[str, Measure] = {
        "gap recovered": "gap",
        "same choice": "agree",
        "right": "score",
        "F1": "f1",
        "charge": "charge",
        "first token": "time",
    }
    top_k = None if retrieval == GIVEN else chunks
    pairs = [("block", "block over standalone", "issue 30, 1: the prefix is a sink for every chunk")]
    pairs += [(f"{NONE}{_SEEN}", NONE, "FusionRAG, Table 2: preprocessing lifts every selector")]
    for mark in ("", _SEEN):
        for charge in CHARGES:
            for select in ("question", "deviation", "first", "prophet"):
                source = "InfoFlow, ProphetKV, CacheBlend, EPIC: better than chance"
                pairs.append((_blend(select, charge, mark)[0], _blend("random", charge, mark)[0], source))
    return Table(
        name=name,
        title=title,
        follows="no table of a paper: each has its own selectors, at a nominal ratio",
        lines=tuple(
            TableRow(label=label, engine=engine, retrieval=retrieval, top_k=top_k) for label, engine in engines.items()
        ),
        columns=tuple(Column(label=label, task=task, chunks=chunks, measure=kind) for label, kind in labels.items()),
        orders=tuple(
            order
            for left, right, source in pairs
            if left in engines and right in engines
            for order in across(["gap recovered"], left, ">", right, source)
        ),
        models={"": MINI},
        measure=measure,
        limit=40,
        remarks=(
            f"Lines are led along the first {FORCED} tokens of full attention's answer. gap recovered: "
            f"1 - KL(full ‖ line) / KL(full ‖ {NONE}), means over questions; {NONE} reads chunks that were encoded "
            "after the prompt's prefix. same choice: tokens that the line would have chosen too.",
            f"right and F1: a line's own answer of at most {WRITTEN} tokens. charge: the share of recomputing all "
            "tokens in all layers. first token: the share of full attention's processor time, with chunk KV in memory.",
            "A number in a label is the charge that may be spent, choosing included; context: chunks that saw up to "
            f"{_CONTEXT} tokens of their document.",
        ),
    )


BLEND_1 = _table(
    "blend-1",
    "Quality without training: documentation",
    "benchmarks/training/debian/questions.jsonl",
    4,
    "bm25",
    _ALONE | _CONTEXTS,
)
BLEND_2 = _table(
    "blend-2", "Quality without training: passages of generated worlds", 'passages(kind="two hops")', 8, GIVEN, _ALONE
)
