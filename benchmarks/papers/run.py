"""Fill a paper's table: ask every line the questions of every column, check the paper's orders, write and plot it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ragkv.benchmarks.evaluation.answers import ExampleResult, TaskSource, run_candidates
from ragkv.benchmarks.evaluation.metrics import Task
from ragkv.benchmarks.evaluation.output import markdown_table, percent, write_whole
from ragkv.benchmarks.papers.ape import APE_3, APE_5
from ragkv.benchmarks.papers.blend import BLEND_1, BLEND_2
from ragkv.benchmarks.papers.block import APB_3, BLOCK_1, BLOCK_4, REAL_1
from ragkv.benchmarks.papers.pced import (
    CODECS,
    PCED_1,
    PCED_2,
    PCED_3,
    PCED_4,
    PCED_5,
    PCED_6,
    PCED_7,
    traced,
)
from ragkv.benchmarks.papers.plots import OTHER_FOLDER, Picture, Point, bar_picture, curve_picture, save
from ragkv.benchmarks.papers.table import (
    MEASURES,
    Cell,
    Column,
    Figure,
    KnownFigures,
    Model,
    Origin,
    Paper,
    RunOptions,
    Scores,
    Table,
    TableRow,
    Verdict,
    count_verdicts,
    figure_of,
    judge,
)
from ragkv.doctor.questions import Progress
from ragkv.errors import ConfigError, UsageError
from ragkv.model.checkpoint import MINI


@dataclass(frozen=True, slots=True, kw_only=True)
class TableResult:
    """A filled table. `lines` are the measured ones; `results` holds every answer, for the pictures."""

    table: Table
    lines: tuple[TableRow, ...]
    cells: Mapping[Cell, Figure]
    verdicts: tuple[Verdict, ...]
    tasks: Mapping[str, Task]
    origin: Origin
    results: Mapping[Cell, Sequence[ExampleResult]]

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
    if table.measure is not None:
        return _known(table.measure(table, options, on_progress), options)
    source = TaskSource(embedder=options.embedder, reranker=options.reranker, device=options.device)
    if table.prepare is not None:

        def ask(tasks: Sequence[Task], lines: Sequence[TableRow]) -> list[list[ExampleResult]]:
            own = [line.candidate(models[""], dtype) for line in lines]
            cell_scores = run_candidates(tasks, own, source=source, work=work, on_progress=on_progress)
            return [[result for result in cell_scores if result.candidate == candidate] for candidate in own]

        table = table.prepare(table, ask)
    lines = tuple(line for line in table.lines if line.role in models)
    asked = [line.candidate(models[line.role], dtype) for line in lines]
    tasks = _tasks(table, seed, limit)
    answers = run_candidates(
        list({task.name: task for task in tasks.values()}.values()),
        [candidate for at, candidate in enumerate(asked) if candidate not in asked[:at]],
        source=source,
        max_new_tokens=options.max_new_tokens,
        work=work,
        on_progress=on_progress,
    )
    results = {
        Cell(line.label, column.label): [
            result
            for result in answers
            if result.candidate == candidate
            and result.task == tasks[column.label].name
            and column.kind in ("", result.example.kind)
        ]
        for line, candidate in zip(lines, asked, strict=True)
        for column in table.columns
        if not column.mean_of
    }
    scores = {
        cell: cell_scores
        for line in lines
        for column in table.columns
        if (cell_scores := _scores(table, line, column, results, cell := Cell(line.label, column.label))) is not None
    }
    cells = {
        cell: figure_of(cell_scores, seed, too_long=_too_long(table, cell, results))
        for cell, cell_scores in scores.items()
    }
    used = {role: source.model(model, dtype) for role, model in models.items()}
    ranked = any(line.retrieval not in ("given", "bm25") for line in lines)
    return TableResult(
        table=table,
        lines=lines,
        cells=cells,
        verdicts=tuple(judge(order, scores, seed) for order in table.orders),
        tasks=tasks,
        origin=Origin(
            command=options.command(table.name),
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


def _known(known: KnownFigures, options: RunOptions) -> TableResult:
    """A table whose figures were measured elsewhere. Unless its tasks are known, they are made again to count them."""
    table = known.table
    return TableResult(
        table=table,
        lines=table.lines,
        cells={cell: figure_of(scores, known.seed) for cell, scores in known.scores.items()},
        verdicts=tuple(judge(order, known.scores, known.seed) for order in table.orders),
        tasks=known.tasks or _tasks(table, known.seed, None),
        origin=Origin(command=options.command(table.name), seed=known.seed, limit=options.limit, models=known.models),
        results={},
    )


def _tasks(table: Table, seed: int, limit: int | None) -> dict[str, Task]:
    """The task of each column. Columns with the same task, chunks and limit share one."""
    tasks: dict[tuple[str, int, int], Task] = {}
    by_column = {}
    for column in table.columns:
        if column.mean_of:
            continue
        count = column.limit or table.limit
        count = count if limit is None else min(count, limit)
        key = (column.task, column.chunks, count)
        if key not in tasks:
            tasks[key] = column.make(seed, count)
        by_column[column.label] = tasks[key]
    return by_column


def _scores(
    table: Table, line: TableRow, column: Column, results: Mapping[Cell, Sequence[ExampleResult]], cell: Cell
) -> Scores | None:
    """The scores of a cell; None if its line is compared with no other line, or with one that was not measured."""
    if column.mean_of:
        parts = [_scores(table, line, table.column(at), results, Cell(line.label, at)) for at in column.mean_of]
        return None if None in parts else {at: score for part in parts if part for at, score in part.items()}
    own = results[cell]
    if column.measure == "score":
        return {column.label: [(answer.example.example_id, answer.score) for answer in own if answer.score is not None]}
    if not line.same_as or Cell(line.same_as, column.label) not in results:
        return None
    theirs = {answer.example.example_id: answer for answer in results[Cell(line.same_as, column.label)]}
    return {
        column.label: [
            (answer.example.example_id, float(answer.text == other.text))
            for answer in own
            if answer.score is not None and (other := theirs[answer.example.example_id]).score is not None
        ]
    }


def _too_long(table: Table, cell: Cell, results: Mapping[Cell, Sequence[ExampleResult]]) -> int:
    columns = table.column(cell.column).mean_of or (cell.column,)
    return sum(result.score is None for column in columns for result in results[Cell(cell.line, column)])


def illustrate(result: TableResult) -> Picture | None:
    """The picture of a filled table; None if it has none, or if nothing was measured."""
    make = ILLUSTRATIONS.get(result.table.name)
    return (
        None if make is None or not any(figure.value is not None for figure in result.cells.values()) else make(result)
    )


def bars(result: TableResult) -> Picture:
    """A group of bars for each column, a bar for each line."""
    columns = [column.label for column in result.table.columns]
    lines = {line.label: [_point(result, Cell(line.label, column)) for column in columns] for line in result.lines}
    return bar_picture(result.table.title, columns, lines)


def curves(
    over: Literal["columns", "lines"], pattern: str, x_label: str, *, even: bool = False
) -> Callable[[TableResult], Picture]:
    """Draw curves over the number that `pattern` finds in the labels of columns or of lines, one for each of the other
    kind. Those whose label has no number are only in the table. Each value of the pattern's group "of" has its curve.
    """

    def make(result: TableResult) -> Picture:
        curve_points: dict[tuple[str, str], dict[float, Point]] = {}
        for column in result.table.columns:
            for line in result.lines:
                label, other = (column.label, line.label) if over == "columns" else (line.label, column.label)
                if (matched := re.fullmatch(pattern, label)) is not None:
                    points = curve_points.setdefault((matched.groupdict().get("of") or "", other), {})
                    if (point := _point(result, Cell(line.label, column.label))) is not None:
                        points[float(matched["x"])] = point
        several = len({of for of, _ in curve_points}) > 1
        named = {f"{name}, {of}" if several else name: points for (of, name), points in curve_points.items() if points}
        return curve_picture(result.table.title, x_label, named, even=even)

    return make


def _point(result: TableResult, cell: Cell) -> Point | None:
    """A measured cell's value and interval."""
    figure = result.cells.get(cell)
    if figure is None or figure.value is None or figure.ci95 is None:
        return None
    return figure.value, *figure.ci95


def expert_trace(result: TableResult) -> Picture:
    """PCED Figure 2: the expert that proposed each token of one answer."""
    [answers] = result.results.values()
    return traced([answer for answer in answers if answer.score is not None])


ILLUSTRATIONS: Mapping[str, Callable[[TableResult], Picture]] = {
    "block-1": bars,
    "block-4": curves("columns", r"(?P<of>.*), step (?P<x>\d+)", "fine-tuning steps"),
    "ape-3": curves("columns", r"(?P<x>\d+) shots", "shots in the context", even=True),
    "ape-5": bars,
    "apb-3": bars,
    "pced-1": bars,
    "pced-2": expert_trace,
    "pced-3": bars,
    "pced-4": curves("lines", r"β=(?P<x>[\d.]+)", "strength of the contrast, β"),
    "pced-5": curves("lines", r"γ=(?P<x>[\d.]+)", "weight of the retrieval prior, γ"),
    "pced-6": curves("columns", r"(?P<of>.*), k=(?P<x>\d+)", "chunks read, k", even=True),
    "pced-7": bars,
}
"""By the table's name."""


ORDER, NOTES = "## Order", "## What differs, and why"
"""The headings of the last two parts of a page."""


def write_table(result: TableResult, folder: Path, *, pictures: bool = True) -> tuple[Path, ...]:
    """Write NAME.json and NAME.md to `folder`, which is made if it is missing, and return the files' paths.

    NAME.md includes what a person wrote in NAME.notes.md. With `pictures`, a table that has a picture is also drawn
    into NAME.svg and NAME.png. Raises ConfigError if the folder cannot be made, RagkvError if a file cannot be written,
    and MissingExtraError if a picture needs matplotlib.
    """
    name = result.table.name
    shown = illustrate(result) if pictures else None
    written_paths = folder / f"{name}.json", folder / f"{name}.md"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        notes = notes_path(folder, name)
        written = notes.read_text(encoding="utf-8") if notes.exists() else ""
    except OSError as error:
        raise ConfigError(f"The table cannot be written to {folder}: {error}.") from error
    text = json.dumps(to_json(result), ensure_ascii=False, indent=1) + "\n"
    for path, content in zip(written_paths, (text, to_markdown(result, written, shown)), strict=True):
        write_whole(path, content, instead=OTHER_FOLDER)
    return written_paths if shown is None else (*written_paths, *save(shown, folder / name, **_caption(result)))


def _caption(result: TableResult) -> dict[str, Any]:
    """The caption below a picture."""
    counts = sorted({figure.n for figure in result.cells.values()})
    asked = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    origin = result.origin
    models = ", ".join(sorted({f"{model.name} {model.fingerprint}" for model in origin.models.values()}))
    note = f"{asked} questions a figure, 95 % bootstrap intervals; model {models}; commit {origin.commit}"
    return {"command": origin.command, "notes": [f"{note}, seed {origin.seed}."]}


def notes_path(folder: Path, name: str) -> Path:
    """The file in which a person explains what differs from the paper. No command writes it."""
    return folder / f"{name}.notes.md"


def to_json(result: TableResult) -> dict[str, Any]:
    """The filled table as plain data, with one flat row per cell."""
    table = result.table
    return {
        "table": table.name,
        "title": table.title,
        "follows": table.follows,
        "origin": asdict(result.origin),
        "columns": [
            {
                **asdict(column),
                "task": result.tasks[column.label].name if column.task else "",
                "metric": result.tasks[column.label].metric if column.task else "",
                "questions": len(result.tasks[column.label].examples) if column.task else 0,
            }
            for column in table.columns
        ],
        "lines": [asdict(line) for line in result.lines],
        "rows": [_row(result, cell, figure) for cell, figure in result.cells.items()],
        "paper": [asdict(paper) for paper in table.paper],
        "orders": [order_json(verdict) for verdict in result.verdicts],
        "remarks": list(table.remarks),
    }


def _row(result: TableResult, cell: Cell, figure: Figure) -> dict[str, Any]:
    column = result.table.column(cell.column)
    task = result.tasks.get(cell.column)
    return {
        "task": task.name if task else "",
        "engine": next(line.engine for line in result.lines if line.label == cell.line),
        "metric": (task.metric if task else "mean") if column.measure == "score" else column.measure,
        "value": figure.value,
        "n": figure.n,
        "ci95": figure.ci95,
        "seed": result.origin.seed,
        "line": cell.line,
        "column": cell.column,
        "too_long": figure.too_long,
    }


def order_json(verdict: Verdict) -> dict[str, Any]:
    """A statement of order in the form of NAME.json."""
    fields = asdict(verdict)
    order: dict[str, Any] = fields["order"] | {"within": float(verdict.order.within)}
    return order | {"verdict": verdict.word, "difference": fields["difference"]}


def to_markdown(result: TableResult, notes: str = "", shown: Picture | None = None) -> str:
    """The page: the figures, their origin, the paper's figures, and which statements of order hold."""
    table = result.table
    parts = [
        f"# {table.title}",
        f"Follows {table.follows}. Made by `{result.origin.command}`.",
        markdown_table(*grid(result)),
    ]
    if shown is not None:
        parts += [f"![{table.title}]({table.name}.svg)", *([shown.text] if shown.text else [])]
    parts.append("".join(f"- {line}\n" for line in _facts(result)))
    if table.paper:
        parts.append("## The paper's numbers")
        parts += [f"{paper.caption}\n\n{markdown_table(*_printed(paper))}" for paper in table.paper]
    parts += end_of_page(table.name, result.verdicts, notes)
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def end_of_page(name: str, verdicts: Sequence[Verdict], notes: str) -> list[str]:
    """The parts after the figures: the statements of order, and what a person wrote about them."""
    parts = []
    if verdicts:
        parts.append(f"{ORDER}\n\n{count_verdicts(verdicts)}")
        parts.append(markdown_table(*_orders(verdicts), left=4))
    if notes.strip() or any(verdict.held is False for verdict in verdicts):
        asked = f"The differences have not been explained yet: write `{notes_path(Path(), name)}` beside this page."
        parts.append(f"{NOTES}\n\n{notes.strip() or asked}")
    return parts


def grid(result: TableResult) -> tuple[list[str], list[list[str]]]:
    """The table's head and body, in per cent."""
    columns = [column.label for column in result.table.columns]
    body = [
        [line.label, *(_value(result.cells.get(Cell(line.label, column))) for column in columns)]
        for line in result.lines
    ]
    return ["", *columns], body


def verdict_line(verdict: Verdict) -> str:
    """One statement with the measured difference."""
    return f"{verdict.word}: {verdict.order}" + (f", {points}" if (points := _points(verdict)) else "")


def _points(verdict: Verdict) -> str:
    difference = verdict.difference
    if difference is None:
        return ""
    low, high = (100 * bound for bound in difference.ci95)
    return f"{100 * difference.value:+.1f} points ({low:+.1f} to {high:+.1f})"


def _orders(verdicts: Sequence[Verdict]) -> tuple[list[str], list[list[str]]]:
    body = [[str(one.order), one.word, _points(one), one.order.source] for one in verdicts]
    return ["order", "here", "difference", "stated by"], body


def _value(figure: Figure | None) -> str:
    if figure is None:
        return ""
    if figure.value is None or figure.ci95 is None:
        return "no room"
    return percent(figure.value, figure.ci95)


def _printed(paper: Paper) -> tuple[list[str], list[list[str]]]:
    body = [
        [line, *("" if value is None else f"{value:g}" for value in values)] for line, values in paper.values.items()
    ]
    return ["", *paper.columns], body


def _facts(result: TableResult) -> list[str]:
    """Sentences that a reader needs in order to interpret the figures."""
    table, origin = result.table, result.origin
    lines = ["Per cent; ± is half the 95 % bootstrap interval over questions."]
    for column in table.columns:
        if column.mean_of:
            lines.append(f"{column.label}: the mean of {', '.join(column.mean_of)}.")
            continue
        task = result.tasks[column.label]
        count = sum(column.kind in ("", example.kind) for example in task.examples)
        metric = MEASURES.get(column.measure, task.metric)
        chunks = max((len(example.chunks) for example in task.examples), default=0)
        asked = "1 question" if count == 1 else f"{count} questions"
        lines.append(f"{column.label}: {asked} of `{column.task}`, {chunks} chunks, {metric}.")
    if missing := [line for line in table.lines if line not in result.lines]:
        names = ", ".join(f"{line.label} (`--model {line.role}=FOLDER`)" for line in missing)
        lines.append(f"Left out for want of a checkpoint: {names}.")
    for cell, figure in result.cells.items():
        if figure.too_long:
            lines.append(f"{cell}: {figure.too_long} prompts had no room in the model and are not counted.")
    lines += table.remarks
    models = [
        f"{role + ': ' if role else ''}{model.name} {model.fingerprint} in {model.dtype}"
        for role, model in origin.models.items()
    ]
    helpers = f"embedder {origin.embedder or 'none'}, reranker {origin.reranker or 'none'}"
    lines.append(f"Model {', '.join(models)}; {helpers}; greedy decoding.")
    versions = ", ".join(f"{package} {version}" for package, version in origin.versions.items())
    lines.append(f"Commit {origin.commit}, seed {origin.seed}; {versions}; {origin.device}.")
    return lines


TABLES: dict[str, Table] = {
    table.name: table
    for table in (
        *(PCED_1, PCED_2, PCED_3, PCED_4, PCED_5, PCED_6, PCED_7),
        *(CODECS, BLEND_1, BLEND_2),
        *(APE_3, APE_5),
        REAL_1,
        *(APB_3, BLOCK_1, BLOCK_4),  # last, because they need checkpoints of their own
    )
}
"""In the order of `--list`."""


def find_table(name: str) -> Table:
    """The table `name`. Raises UsageError, which lists the tables, if there is none."""
    if name not in TABLES:
        raise UsageError(f"Unknown table {name!r}; choose one of {', '.join(TABLES)}, or all.")
    return TABLES[name]
