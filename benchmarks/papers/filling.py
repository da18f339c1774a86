"""A table filled: every line answers every column, and the paper's order is checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ragkv.benchmarks.papers.catalog import find_table
from ragkv.benchmarks.papers.definition import Cell, Column, Known, Line, Table
from ragkv.benchmarks.papers.figure import Figure, Scores, figure_of
from ragkv.benchmarks.papers.origin import Model, Origin
from ragkv.benchmarks.papers.verdict import Verdict, judge
from ragkv.errors import UsageError
from ragkv.evaluation.answerer import Contender
from ragkv.evaluation.examination import Progress, examine
from ragkv.evaluation.example import Task
from ragkv.evaluation.result import Result
from ragkv.evaluation.scorer import Scorer
from ragkv.evaluation.source import OwnSource
from ragkv.model.checkpoint import MINI

__all__ = ["TableResult", "run_table"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableResult:
    """A table with its figures. `lines` are those that were measured, `results` every answer (for plots)."""

    table: Table
    lines: tuple[Line, ...]
    cells: Mapping[Cell, Figure]
    verdicts: tuple[Verdict, ...]
    tasks: Mapping[str, Task]
    origin: Origin
    results: Mapping[Cell, Sequence[Result]]

    def figure(self, line: str, column: str) -> Figure:
        """KeyError for a cell that the table does not have, or whose line had no model."""
        return self.cells[Cell(line, column)]


def run_table(
    name: str | Table,
    *,
    models: Mapping[str, str] | None = None,
    limit: int | None = None,
    seed: int = 0,
    dtype: str | None = None,
    embedder: str | None = MINI,
    reranker: str | None = MINI,
    device: str | None = None,
    max_new_tokens: int | None = None,
    work: Path | None = None,
    command: str = "",
    on_progress: Progress | None = None,
) -> TableResult:
    """Fill the table. `models` by role, "" (mini, or the table's own) the one that most lines use; lines of a role
    that has none are left out.

    `limit` caps the questions of each column; answers are kept in `work` as `ragkv eval answers` keeps them, so that
    a stopped run goes on. Raises UsageError for an unknown table or role.
    """
    table = name if isinstance(name, Table) else find_table(name)
    models = {"": MINI, **table.models, **(models or {})}
    dtype = dtype or table.dtype
    if strange := sorted(set(models) - {"", *(line.role for line in table.lines)}):
        roles = ", ".join(sorted({line.role for line in table.lines} - {""})) or "none"
        raise UsageError(f"--model {strange[0]}=…: table {table.name} has no such role; it has {roles}.")
    if table.read is not None:
        return _known(table.read(table, models[""]), command)
    source = OwnSource(Scorer(embedder=embedder, reranker=reranker, device=device), device=device)
    if table.prepare is not None:

        def ask(tasks: Sequence[Task], lines: Sequence[Line]) -> list[list[Result]]:
            own = [line.contender(models[""], dtype) for line in lines]
            found = examine(tasks, own, source=source, work=work, on_progress=on_progress)
            return [[result for result in found if result.contender is one] for one in own]

        table = table.prepare(table, ask)
    lines = tuple(line for line in table.lines if line.role in models)
    asked: list[Contender] = []  # by line; lines that ask the same have one and the same
    for line in lines:
        one = line.contender(models[line.role], dtype)
        asked.append(next((known for known in asked if known == one), one))
    tasks = _tasks(table, seed, limit)
    distinct = {task.name: task for task in tasks.values()}
    once = list({id(one): one for one in asked}.values())
    answers = examine(
        list(distinct.values()), once, source=source, max_new_tokens=max_new_tokens, work=work, on_progress=on_progress
    )
    results = _results(table, lines, [id(one) for one in asked], tasks, answers)
    scores = {
        cell: found
        for line in lines
        for column in table.columns
        if (found := _scores(table, line, column, results, cell := Cell(line.label, column.label))) is not None
    }
    cells = {cell: figure_of(found, seed, too_long=_too_long(table, cell, results)) for cell, found in scores.items()}
    used = {role: source.room(model, dtype) for role, model in models.items()}
    ranked = any(line.retrieval not in ("given", "bm25") for line in lines)
    return TableResult(
        table=table,
        lines=lines,
        cells=cells,
        verdicts=tuple(judge(order, scores, seed) for order in table.orders),
        tasks=tasks,
        origin=Origin.of(
            command,
            seed=seed,
            limit=limit,
            models={
                role: Model(name=room.name, dtype=room.dtype, fingerprint=room.fingerprint[:12])
                for role, room in used.items()
            },
            embedder=embedder if ranked else None,
            reranker=reranker if any(line.rerank for line in lines) else None,
        ),
        results=results,
    )


def _known(known: Known, command: str) -> TableResult:
    """A table whose figures were measured elsewhere; the questions are made again, to be counted and named."""
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
    """By column; columns that ask the same of as many share a task."""
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
    """The answers of each cell, means left out."""
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
    """None where a cell means nothing: a line that is compared with no other, or with one that was not measured."""
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
