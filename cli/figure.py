"""How `ragkv eval` shows what it measured: a table with intervals on stdout, or a file of JSON or Markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from ragkv.cli.console import count
from ragkv.errors import RagkvError, UsageError

if TYPE_CHECKING:
    from ragkv.evaluation.judgement import Task
    from ragkv.evaluation.retrieval import Figure

__all__ = ["check_output", "print_figures", "remarks", "write_figures", "write_whole"]

_WIDEST = 1000


def check_output(output: Path | None) -> None:
    """Refuse a file that could not be written, before hours of work."""
    if output is None:
        return
    if output.suffix not in (".json", ".md"):
        raise UsageError(f"--output {output} must end in .json or .md.")
    if not output.parent.is_dir():
        raise UsageError(f"--output {output} cannot be written: there is no folder {output.parent}; make it.")
    if output.is_dir():
        raise UsageError(f"--output {output} is a folder; give a file.")


def print_figures(figures: Sequence[Figure], columns: Sequence[str]) -> None:
    """A row per engine, a column per metric of `columns`."""
    table = Table(box=None, pad_edge=False)
    table.add_column("engine", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for cells in _cells(figures, columns):
        table.add_row(*cells)
    Console(highlight=False, width=_WIDEST).print(table)  # a figure is never cut to fit a pipe's 80 columns


def write_figures(output: Path, task: Task, figures: Sequence[Figure], columns: Sequence[str]) -> None:
    """All figures with what they were measured on as .json, or the table as .md; whole or not at all."""
    if output.suffix == ".json":
        report = {
            "rows": [figure.to_json() for figure in figures],
            "questions": len(task.judgements),
            "unjudged": list(task.unjudged),
            "passages": None if task.passages is None else len(task.passages),
            "notes": list(task.notes),
        }
        text = json.dumps(report, ensure_ascii=False, indent=1) + "\n"
    else:
        rows = [["engine", *columns], ["---"] * (len(columns) + 1), *_cells(figures, columns)]
        table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        text = f"# {task.name}\n\n{table}\n\n" + "".join(f"- {line}\n" for line in remarks(task))
    write_whole(output, text)


def write_whole(output: Path, text: str) -> None:
    """The whole text or nothing: who reads the file meanwhile sees the old one."""
    fresh = output.with_name(f"{output.name}.new")
    try:
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(output)
    except OSError as error:
        raise RagkvError(f"{output} cannot be written ({error}); give another --output.") from error


def remarks(task: Task) -> list[str]:
    """What a reader of the figures must know: how many questions, and which were not measured."""
    corpus = "" if task.passages is None else f", {count(len(task.passages), 'passage')}"
    lines = [f"{task.name}: {count(len(task.judgements), 'question')}{corpus}; ± is half the 95 % bootstrap interval"]
    if task.unjudged:
        some = ", ".join(task.unjudged[:5]) + (", …" if len(task.unjudged) > 5 else "")
        lines.append(f"{count(len(task.unjudged), 'question')} without a relevant passage, not measured: {some}")
    return [*lines, *task.notes]


def _cells(figures: Sequence[Figure], columns: Sequence[str]) -> list[list[str]]:
    """Each engine's name and shown measures, in the order of `figures`."""
    by_engine: dict[str, dict[str, Figure]] = {}
    for figure in figures:
        by_engine.setdefault(figure.engine, {})[figure.metric] = figure
    return [[engine, *(_shown(found[column]) for column in columns)] for engine, found in by_engine.items()]


def _shown(figure: Figure) -> str:
    low, high = figure.ci95
    return f"{figure.value:.3f} ±{(high - low) / 2:.2f}".replace("±0.", "±.")
