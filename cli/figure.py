"""How `ragkv eval retrieval` shows its figures: a table with intervals on stdout, or a file of JSON or Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ragkv.boundary.visible import json_text
from ragkv.cli.console import count
from ragkv.cli.grid import print_grid
from ragkv.errors import UsageError
from ragkv.evaluation.writing import markdown_table, write_whole

if TYPE_CHECKING:
    from ragkv.evaluation.judgement import Task
    from ragkv.evaluation.retrieval import Figure

__all__ = ["OTHER_OUTPUT", "check_output", "print_figures", "remarks", "write_figures"]

OTHER_OUTPUT = "give another --output"


def check_output(output: Path | None) -> None:
    """Refuse a file that cannot be written, before hours of work."""
    if output is None:
        return
    if output.suffix not in (".json", ".md"):
        raise UsageError(f"--output {output} must end in .json or .md.")
    if not output.parent.is_dir():
        raise UsageError(f"--output {output} cannot be written: there is no folder {output.parent}; make it.")
    if output.is_dir():
        raise UsageError(f"--output {output} is a folder; give a file.")


def print_figures(figures: Sequence[Figure], columns: Sequence[str]) -> None:
    """Print a row per engine and a column per metric."""
    print_grid(["engine", *columns], _cells(figures, columns))


def write_figures(output: Path, task: Task, figures: Sequence[Figure], columns: Sequence[str]) -> None:
    """Write all figures and what they were measured on as .json, or the table as .md; whole or not at all."""
    if output.suffix == ".json":
        report = {
            "rows": [figure.to_json() for figure in figures],
            "questions": len(task.judgements),
            "unjudged": list(task.unjudged),
            "passages": None if task.passages is None else len(task.passages),
            "notes": list(task.notes),
        }
        text = json_text(report, indent=1) + "\n"
    else:
        table = markdown_table(["engine", *columns], _cells(figures, columns))
        text = f"# {task.name}\n\n{table}\n" + "".join(f"- {line}\n" for line in remarks(task))
    write_whole(output, text, instead=OTHER_OUTPUT)


def remarks(task: Task) -> list[str]:
    """What a reader of the figures must know: the number of questions, and which were not measured."""
    corpus = "" if task.passages is None else f", {count(len(task.passages), 'passage')}"
    lines = [f"{task.name}: {count(len(task.judgements), 'question')}{corpus}; ± is half the 95 % bootstrap interval"]
    if task.unjudged:
        some = ", ".join(task.unjudged[:5]) + (", …" if len(task.unjudged) > 5 else "")
        lines.append(f"{count(len(task.unjudged), 'question')} without a relevant passage, not measured: {some}")
    return [*lines, *task.notes]


def _cells(figures: Sequence[Figure], columns: Sequence[str]) -> list[list[str]]:
    """The name and the figures of each engine, in the order of `figures`."""
    by_engine: dict[str, dict[str, Figure]] = {}
    for figure in figures:
        by_engine.setdefault(figure.engine, {})[figure.metric] = figure
    return [[engine, *(_shown(found[column]) for column in columns)] for engine, found in by_engine.items()]


def _shown(figure: Figure) -> str:
    low, high = figure.ci95
    return f"{figure.value:.3f} ±{(high - low) / 2:.2f}".replace("±0.", "±.")
