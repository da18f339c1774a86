"""Write a filled table: NAME.json for programs, NAME.md for people, and the pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ragkv.benchmarks.papers.definition import Cell, Paper
from ragkv.benchmarks.papers.figure import Figure
from ragkv.benchmarks.papers.filling import TableResult
from ragkv.benchmarks.papers.illustration import Illustration, illustrate
from ragkv.benchmarks.papers.plot import OTHER_FOLDER, save
from ragkv.benchmarks.papers.verdict import Verdict, tally
from ragkv.errors import ConfigError
from ragkv.evaluation.writing import markdown_table, percent, write_whole

__all__ = [
    "NOTES",
    "ORDER",
    "end_of_page",
    "grid",
    "notes_path",
    "order_json",
    "to_json",
    "to_markdown",
    "verdict_line",
    "write_table",
]

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
    found = folder / f"{name}.json", folder / f"{name}.md"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        notes = notes_path(folder, name)
        written = notes.read_text(encoding="utf-8") if notes.exists() else ""
    except OSError as error:
        raise ConfigError(f"The table cannot be written to {folder}: {error}.") from error
    text = json.dumps(to_json(result), ensure_ascii=False, indent=1) + "\n"
    for path, content in zip(found, (text, to_markdown(result, written, shown)), strict=True):
        write_whole(path, content, instead=OTHER_FOLDER)
    return found if shown is None else (*found, *save(shown.picture, folder / name, **_caption(result)))


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
        "metric": "same" if column.measure == "same" else task.metric if task else "mean",
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
    order, difference = verdict.order, verdict.difference
    return {
        "left": asdict(order.left),
        "relation": order.relation,
        "right": asdict(order.right),
        "within": order.within,
        "source": order.source,
        "verdict": verdict.word,
        "difference": None if difference is None else asdict(difference),
    }


def to_markdown(result: TableResult, notes: str = "", shown: Illustration | None = None) -> str:
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
        parts.append(f"{ORDER}\n\n{tally(verdicts)}")
        parts.append(markdown_table(*_orders(verdicts), left=4))
    if notes.strip() or any(verdict.held is False for verdict in verdicts):
        asked = f"Nobody has explained the differences yet: write `{notes_path(Path(), name)}` beside this page."
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
        metric = "answers that are the same" if column.measure == "same" else task.metric
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
