"""Fill a table: every line answers every column, and the paper's statements of order are judged."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ragkv.benchmarks.papers.definition import Cell, Column, Known, Line, Table
from ragkv.benchmarks.papers.figure import Figure, Scores, figure_of
from ragkv.benchmarks.papers.origin import COMMAND, Model, Origin
from ragkv.benchmarks.papers.verdict import Verdict, judge
from ragkv.errors import UsageError
from ragkv.evaluation.answerer import Contender
from ragkv.evaluation.examination import examine
from ragkv.evaluation.example import Task
from ragkv.evaluation.progress import Progress
from ragkv.evaluation.result import Result
from ragkv.evaluation.scorer import Scorer
from ragkv.evaluation.source import OwnSource
from ragkv.model.checkpoint import MINI

__all__ = ["RunOptions", "TableResult", "run_table"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How tables are filled.

    `models` are checkpoints by role; "" is the one that most lines use (None: mini, or the table's own), and lines
    whose role has none are left out. `limit` caps the questions of each column. Answers are kept in `work`, as
    `ragkv eval answers` keeps them, so that a stopped run continues.
    """

    models: Mapping[str, str] = field(default_factory=dict)
    limit: int | None = None
    seed: int = 0
    dtype: str | None = None
    embedder: str | None = MINI
    reranker: str | None = MINI
    device: str | None = None
    max_new_tokens: int | None = None
    work: Path | None = None

    def command(self, name: str) -> str:
        """The command line that fills the table `name` with these options, on any machine and device."""
        words = [*COMMAND.split(), name]
        for role, folder in self.models.items():
            words += ["--model", f"{role}={folder}" if role else folder]
        for option, value in (
            ("--limit", self.limit),
            ("--seed", self.seed or None),
            ("--dtype", self.dtype),
            ("--embedder", None if self.embedder == MINI else self.embedder),
            ("--reranker", None if self.reranker == MINI else self.reranker),
        ):
            words += [] if value is None else [option, str(value)]
        return shlex.join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableResult:
    """A filled table. `lines` are the measured ones; `results` holds every answer, for the pictures."""

    table: Table
    lines: tuple[Line, ...]
    cells: Mapping[Cell, Figure]
    verdicts: tuple[Verdict, ...]
    tasks: Mapping[str, Task]
    origin: Origin
    results: Mapping[Cell, Sequence[Result]]

    def figure(self, line: str, column: str) -> Figure:
        """The figure of a cell. Raises KeyError if there is no such cell, or if its line had no model."""
        return self.cells[Cell(line, column)]


def run_table(table: Table, options: RunOptions | None = None, *, on_progress: Progress | None = None) -> TableResult:
    """Fill the table. Raises UsageError for a role that it does not have."""
    options = options or RunOptions()
    seed, limit, work = options.seed, options.limit, options.work
    models = {"": MINI, **table.models, **options.models}
    dtype = options.dtype or table.dtype
    if strange := sorted(set(models) - {"", *(line.role for line in table.lines)}):
        roles = ", ".join(sorted({line.role for line in table.lines} - {""})) or "none"
        raise UsageError(f"--model {strange[0]}=…: table {table.name} has no such role; it has {roles}.")
    if table.read is not None:
        return _known(table.read(table, models[""]), options.command(table.name))
    scorer = Scorer(embedder=options.embedder, reranker=options.reranker, device=options.device)
    source = OwnSource(scorer, device=options.device)
    if table.prepare is not None:

        def ask(tasks: Sequence[Task], lines: Sequence[Line]) -> list[list[Result]]:
            own = [line.contender(models[""], dtype) for line in lines]
            found = examine(tasks, own, source=source, work=work, on_progress=on_progress)
            return [[result for result in found if result.contender is one] for one in own]

        table = table.prepare(table, ask)
    lines = tuple(line for line in table.lines if line.role in models)
    asked: list[Contender] = []  # one per line; equal lines share one object
    for line in lines:
        one = line.contender(models[line.role], dtype)
        asked.append(next((known for known in asked if known == one), one))
    tasks = _tasks(table, seed, limit)
    distinct = {task.name: task for task in tasks.values()}
    once = list({id(one): one for one in asked}.values())
    answers = examine(
        list(distinct.values()),
        once,
        source=source,
        max_new_tokens=options.max_new_tokens,
        work=work,
        on_progress=on_progress,
    )
    results = _results(table, lines, [id(one) for one in asked], tasks, answers)
    scores = {
        cell: found
        for line in lines
        for column in table.columns
        if (found := _scores(table, line, column, results, cell := Cell(line.label, column.label))) is not None
    }
    cells = {cell: figure_of(found, seed, too_long=_too_long(table, cell, results)) for cell, found in scores.items()}
    used = {role: source.model(model, dtype) for role, model in models.items()}
    ranked = any(line.retrieval not in ("given", "bm25") for line in lines)
    return TableResult(
        table=table,
        lines=lines,
        cells=cells,
        verdicts=tuple(judge(order, scores, seed) for order in table.orders),
        tasks=tasks,
        origin=Origin.of(
            options.command(table.name),
            seed=seed,
            limit=limit,
            models={
                role: Model(name=loaded.name, dtype=loaded.dtype, fingerprint=loaded.fingerprint[:12])
                for role, loaded in used.items()
            },
            embedder=options.embedder if ranked else None,
            reranker=options.reranker if any(line.rerank for line in lines) else None,
        ),
        results=results,
    )


def _known(known: Known, command: str) -> TableResult:
    """A table whose figures were measured elsewhere. The questions are made again to count and name them."""
    return TableResult(
        table=known.table,
        lines=known.table.lines,
        cells={cell: figure_of(scores, known.seed) for cell, scores in known.scores.items()},
        verdicts=tuple(judge(order, known.scores, known.seed) for order in known.table.orders),
        tasks=_tasks(known.table, known.seed, None),
        origin=Origin.of(command, seed=known.seed, limit=None, models=known.models, embedder=None, reranker=None),
        results={},
    )


def _tasks(table: Table, seed: int, limit: int | None) -> dict[str, Task]:
    """The task of each column. Columns with the same task, chunks and limit share one."""
    made: dict[tuple[str, int, int], Task] = {}
    found = {}
    for column in table.columns:
        if column.mean_of:
            continue
        count = column.limit or table.limit
        count = count if limit is None else min(count, limit)
        key = (column.task, column.chunks, count)
        if key not in made:
            made[key] = column.make(seed, count)
        found[column.label] = made[key]
    return found


def _results(
    table: Table, lines: Sequence[Line], asked: Sequence[int], tasks: Mapping[str, Task], answers: Sequence[Result]
) -> dict[Cell, list[Result]]:
    """The answers of each cell that is not a mean."""
    by: dict[tuple[int, str], list[Result]] = {}
    for result in answers:
        by.setdefault((id(result.contender), result.task), []).append(result)
    return {
        Cell(line.label, column.label): [
            result
            for result in by.get((contender, tasks[column.label].name), ())
            if column.kind in ("", result.example.kind)
        ]
        for line, contender in zip(lines, asked, strict=True)
        for column in table.columns
        if not column.mean_of
    }


def _scores(
    table: Table, line: Line, column: Column, results: Mapping[Cell, Sequence[Result]], cell: Cell
) -> Scores | None:
    """The scores of a cell; None if its line is compared with no other line, or with one that was not measured."""
    if column.mean_of:
        parts = [_scores(table, line, table.column(at), results, Cell(line.label, at)) for at in column.mean_of]
        return None if None in parts else {at: score for part in parts if part for at, score in part.items()}
    own = results[cell]
    if column.measure == "score":
        return {column.label: [(each.example.example_id, each.score) for each in own if each.score is not None]}
    if not line.same_as or Cell(line.same_as, column.label) not in results:
        return None
    theirs = {each.example.example_id: each for each in results[Cell(line.same_as, column.label)]}
    return {
        column.label: [
            (each.example.example_id, float(each.text == other.text))
            for each in own
            if each.score is not None and (other := theirs[each.example.example_id]).score is not None
        ]
    }


def _too_long(table: Table, cell: Cell, results: Mapping[Cell, Sequence[Result]]) -> int:
    columns = table.column(cell.column).mean_of or (cell.column,)
    return sum(result.score is None for column in columns for result in results[Cell(cell.line, column)])
