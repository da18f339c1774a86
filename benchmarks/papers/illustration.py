"""Which picture each table has, and which figures it shows."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ragkv.benchmarks.papers import experttrace
from ragkv.benchmarks.papers.definition import Cell
from ragkv.benchmarks.papers.plot import Bar, Bars, Curve, Curves, Picture

if TYPE_CHECKING:
    from ragkv.benchmarks.papers.filling import TableResult

__all__ = ["ILLUSTRATIONS", "Illustration", "illustrate"]

_RIGHT = "right answers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Illustration:
    """A picture, and Markdown text to read beside it."""

    picture: Picture
    text: str = ""


def illustrate(result: TableResult) -> Illustration | None:
    """The picture of a filled table; None if it has none, or if nothing was measured."""
    make = ILLUSTRATIONS.get(result.table.name)
    return (
        None if make is None or not any(figure.value is not None for figure in result.cells.values()) else make(result)
    )


def bars(result: TableResult) -> Illustration:
    """A group of bars for each column, a bar for each line."""
    columns = [column.label for column in result.table.columns]
    found = []
    for line in result.lines:
        figures = [result.cells.get(Cell(line.label, column)) for column in columns]
        found.append(
            Bar(
                label=line.label,
                values=[figure.value if figure else None for figure in figures],
                intervals=[figure.ci95 if figure else None for figure in figures],
            )
        )
    return Illustration(picture=Bars(title=result.table.title, y_label=_RIGHT, groups=columns, bars=found))


def over_columns(pattern: str, x_label: str, *, even: bool = False) -> Callable[[TableResult], Illustration]:
    """Draw curves over the number that `pattern` finds in a column's label. Columns that share the pattern's group "of"
    form one curve."""

    def make(result: TableResult) -> Illustration:
        points: dict[tuple[str, str], list[tuple[float, Cell]]] = {}
        for column in result.table.columns:
            if (matched := re.fullmatch(pattern, column.label)) is None:
                continue
            of = matched.groupdict().get("of") or ""
            for line in result.lines:
                points.setdefault((of, line.label), []).append((float(matched["x"]), Cell(line.label, column.label)))
        several = len({of for of, _ in points}) > 1
        curves = [_curve(f"{line}, {of}" if several else line, cells, result) for (of, line), cells in points.items()]
        return _curves(result, x_label, [curve for curve in curves if curve.x], even=even)

    return make


def over_lines(pattern: str, x_label: str) -> Callable[[TableResult], Illustration]:
    """Draw a curve for each column over the number that `pattern` finds in a line's label. Lines without such a number
    are only in the table."""

    def make(result: TableResult) -> Illustration:
        places = [
            (float(matched["x"]), line.label)
            for line in result.lines
            if (matched := re.fullmatch(pattern, line.label)) is not None
        ]
        curves = [
            _curve(column.label, [(x, Cell(line, column.label)) for x, line in places], result)
            for column in result.table.columns
        ]
        return _curves(result, x_label, [curve for curve in curves if curve.x], even=False)

    return make


def expert_trace(result: TableResult) -> Illustration:
    """PCED Figure 2: the expert that proposed each token of one answer."""
    [answers] = result.results.values()
    answered = [answer for answer in answers if answer.score is not None]
    return Illustration(picture=experttrace.traced(experttrace.chosen(answered)), text=experttrace.told(answered))


def _curve(label: str, cells: list[tuple[float, Cell]], result: TableResult) -> Curve:
    """A curve through the measured cells, in the order of x."""
    found = []
    for at, cell in sorted(cells, key=lambda pair: pair[0]):
        figure = result.cells.get(cell)
        if figure is not None and figure.value is not None and figure.ci95 is not None:
            found.append((at, figure.value, *figure.ci95))
    x, y, low, high = ([point[column] for point in found] for column in range(4))
    return Curve(label=label, x=x, y=y, low=low, high=high)


def _curves(result: TableResult, x_label: str, curves: list[Curve], *, even: bool) -> Illustration:
    picture = Curves(title=result.table.title, x_label=x_label, y_label=_RIGHT, curves=curves, even=even)
    return Illustration(picture=picture)


ILLUSTRATIONS: Mapping[str, Callable[[TableResult], Illustration]] = {
    "block-1": bars,
    "block-4": over_columns(r"(?P<of>.*), step (?P<x>\d+)", "fine-tuning steps"),
    "ape-3": over_columns(r"(?P<x>\d+) shots", "shots in the context", even=True),
    "ape-5": bars,
    "apb-3": bars,
    "pced-1": bars,
    "pced-2": expert_trace,
    "pced-3": bars,
    "pced-4": over_lines(r"β=(?P<x>[\d.]+)", "strength of the contrast, β"),
    "pced-5": over_lines(r"γ=(?P<x>[\d.]+)", "weight of the retrieval prior, γ"),
    "pced-6": over_columns(r"(?P<of>.*), k=(?P<x>\d+)", "chunks read, k", even=True),
    "pced-7": bars,
}
"""By the table's name."""
