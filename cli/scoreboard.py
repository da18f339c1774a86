"""How `ragkv eval answers` shows accuracies in per cent: a row per engine and model, a column per task and slice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ragkv.boundary.visible import json_text
from ragkv.cli.console import count, say
from ragkv.cli.figure import OTHER_OUTPUT
from ragkv.cli.grid import print_grid
from ragkv.evaluation.writing import markdown_table, percent, points, write_whole

if TYPE_CHECKING:
    from ragkv.evaluation.example import Task
    from ragkv.evaluation.result import Row

__all__ = ["print_rows", "row_remarks", "write_rows"]

_VARIED = ("model", "codec", "retrieval", "top_k")
"""These get a column if the rows differ in them."""


def print_rows(rows: Sequence[Row]) -> None:
    """Print the accuracies, then the differences from the baseline."""
    for number, (title, head, body) in enumerate(_tables(rows)):
        if number:
            say()
            say(title)
        print_grid(head, body)


def write_rows(output: Path, tasks: Sequence[Task], rows: Sequence[Row], seed: int) -> None:
    """Write all rows and what they were measured on as .json, or the tables as .md; whole or not at all."""
    if output.suffix == ".json":
        import ragkv

        report = {
            "ragkv": ragkv.__version__,
            "seed": seed,
            "tasks": [
                {
                    "task": task.name,
                    "metric": task.metric,
                    "examples": len(task.examples),
                    "max_new_tokens": task.max_new_tokens,
                    "seed": task.seed,
                }
                for task in tasks
            ],
            "rows": [row.to_json() for row in rows],
        }
        write_whole(output, json_text(report, indent=1) + "\n", instead=OTHER_OUTPUT)
        return
    text = "".join(f"# {title}\n\n{markdown_table(head, body)}\n" for title, head, body in _tables(rows))
    text += "".join(f"- {line}\n" for line in row_remarks(tasks, rows))
    write_whole(output, text, instead=OTHER_OUTPUT)


def row_remarks(tasks: Sequence[Task], rows: Sequence[Row]) -> list[str]:
    """What a reader of the figures must know: the questions of each task, and which were not counted."""
    lines = [
        f"{task.name}: {count(len(task.examples), 'question')}, {task.metric}, at most {task.max_new_tokens} tokens"
        + ("" if task.seed is None else f", seed {task.seed}")
        for task in tasks
    ]
    for row in rows:
        if row.too_long and not row.kind:
            missing = count(row.too_long, "question")
            lines.append(f"{row.task}, {row.engine}, {row.model}: no room in the model for {missing}, not counted")
    return [*lines, "± is half the 95 % bootstrap interval over questions"]


Cells = list[str]


def _tables(rows: Sequence[Row]) -> list[tuple[str, Cells, list[Cells]]]:
    """(title, head, body) of each table."""
    tables = [("Accuracy, %", *_table(rows, _value))]
    if any(row.difference is not None for row in rows):
        names = ", ".join(dict.fromkeys(row.baseline for row in rows if row.baseline))
        tables.append((f"Difference from {names}, points", *_table([row for row in rows if row.baseline], _difference)))
    return tables


def _table(rows: Sequence[Row], shown: Callable[[Row], str]) -> tuple[Cells, list[Cells]]:
    columns = list(dict.fromkeys((row.task, row.kind) for row in rows))
    varied = [name for name in _VARIED if len({_setting(row, name) for row in rows}) > 1]
    lines: dict[int, dict[tuple[str, str], Row]] = {}
    for row in rows:
        lines.setdefault(id(row.contender), {})[row.task, row.kind] = row
    head = ["engine", *varied, *(f"{task}: {kind}" if kind else task for task, kind in columns)]
    body = []
    for found in lines.values():
        first = next(iter(found.values()))
        cells = [first.engine, *(_setting(first, name) for name in varied)]
        body.append(cells + [shown(found[column]) if column in found else "" for column in columns])
    return head, body


def _setting(row: Row, name: str) -> str:
    if name == "retrieval":
        return row.contender.scoring
    value = getattr(row, name)
    return "all" if value is None else str(value)


def _value(row: Row) -> str:
    if row.value is None or row.ci95 is None:
        return "no room" if row.too_long else "-"
    return percent(row.value, row.ci95)


def _difference(row: Row) -> str:
    if row.difference is None or row.difference_ci95 is None:
        return ""
    return points(row.difference, row.difference_ci95)
