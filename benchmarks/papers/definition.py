"""What a table is: lines (who answers), columns (what is asked), and the order that the paper's table has them in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from ragkv.benchmarks.papers.figure import Scores
from ragkv.benchmarks.papers.origin import Model
from ragkv.evaluation.answerer import GIVEN, RAW, Contender, contenders
from ragkv.evaluation.catalog import make_task
from ragkv.evaluation.example import Task
from ragkv.evaluation.result import Result
from ragkv.evaluation.spec import parse_specs

__all__ = [
    "Ask",
    "Cell",
    "Column",
    "Known",
    "Line",
    "Order",
    "Paper",
    "Relation",
    "Table",
    "across",
    "along",
    "holds",
    "printed",
]

Relation = Literal[">", ">=", "~"]
"""Better; at least as good; within some points of each other."""

_ONE_NAME = "a table's {} have names of their own; {!r} stands twice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A row: an engine with its options as `ragkv eval answers` takes them, and how chunks come to it.

    `role` says which checkpoint answers: "" the model that the table is made with, any other word one that the user
    names for it (`--model tuned=FOLDER`), without which the line is left out. `same_as` is the label of the line whose
    answers a column of `measure="same"` compares with.
    """

    label: str
    engine: str
    codec: str = RAW
    retrieval: str = GIVEN
    rerank: bool = False
    top_k: int | None = None
    role: str = ""
    same_as: str = ""

    def contender(self, model: str, dtype: str | None) -> Contender:
        """The line at work. Raises UsageError or ConfigError for what the engine does not have."""
        [spec] = parse_specs(self.engine)
        [found] = contenders(
            [spec],
            models=[model],
            codecs=[self.codec],
            retrievals=[self.retrieval],
            rerank=[self.rerank],
            top_k=self.top_k,
            dtype=dtype,
        )
        return found


Ask: TypeAlias = Callable[[Sequence[Task], Sequence[Line]], list[list[Result]]]
"""Answers of lines, read by the table's own model: a list for each line, over all tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One task, or a slice of it, or the mean of other columns (`mean_of`, each of equal weight).

    `task` is written as for `ragkv eval answers`; `limit` None is the table's. `measure` "same" is the share of answers
    that are, letter by letter, those of the line's `same_as`.
    """

    label: str
    task: str = ""
    chunks: int = 8
    kind: str = ""
    limit: int | None = None
    measure: Literal["score", "same"] = "score"
    mean_of: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.task) == bool(self.mean_of):
            raise ValueError(f"column {self.label!r} has a task or is a mean of others, one of the two")

    def make(self, seed: int, limit: int) -> Task:
        """The task with at most `limit` questions. Raises UsageError for an unknown one."""
        [spec] = parse_specs(self.task)
        return make_task(spec, seed=seed, limit=limit, chunks=self.chunks)


@dataclass(frozen=True, slots=True)
class Cell:
    """A place in the table."""

    line: str
    column: str

    def __str__(self) -> str:
        return f"{self.line} ({self.column})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """That one cell is better than another, as the paper's table has it.

    `source` says where, with the paper's two numbers; `within` are the points that "~" allows between them.
    """

    left: Cell
    relation: Relation
    right: Cell
    source: str
    within: float = 0.0

    def __str__(self) -> str:
        sign = f"within {self.within:g} points of" if self.relation == "~" else self.relation
        return f"{self.left} {sign} {self.right}"


def across(columns: Iterable[str], left: str, relation: Relation, right: str, source: str, **more: Any) -> list[Order]:
    """Two lines compared in each of some columns."""
    return [
        Order(left=Cell(left, column), relation=relation, right=Cell(right, column), source=source, **more)
        for column in columns
    ]


def along(lines: Iterable[str], left: str, relation: Relation, right: str, source: str, **more: Any) -> list[Order]:
    """Two columns compared in each of some lines."""
    return [
        Order(left=Cell(line, left), relation=relation, right=Cell(line, right), source=source, **more)
        for line in lines
    ]


def printed(
    papers: Iterable[Paper],
    left: str,
    relation: Relation,
    right: str,
    columns: Mapping[str, Sequence[str]],
    *,
    within: float = 0.0,
    called: Mapping[str, str] | None = None,
) -> list[Order]:
    """Two lines compared in each of some columns, as the paper's own numbers have it.

    `columns` says which of the paper's columns each of ours stands for, `called` what the paper calls a line of ours
    that has another name there. Raises ValueError when a number of the paper says otherwise: no order is stated that
    the paper does not have.
    """
    named = called or {}
    orders = []
    for ours, theirs in columns.items():
        said = []
        for paper in papers:
            for name in theirs:
                a, b = (paper.value(named.get(line, line), name) for line in (left, right))
                if a is None or b is None:
                    continue
                if not holds(relation, a - b, within):
                    raise ValueError(f"{paper.caption}, {name}: {left} {a:g} is not {relation} {right} {b:g}")
                said.append(f"{name} {a:g} to {b:g}" + (f" ({paper.model})" if paper.model else ""))
        if not said:
            raise ValueError(f"the paper has no number for {left} and {right} in {', '.join(theirs)}")
        orders += across([ours], left, relation, right, "; ".join(said), within=within)
    return orders


def holds(relation: Relation, difference: float, within: float) -> bool:
    """Whether left - right, both in per cent, is as `relation` says."""
    if relation == "~":
        return abs(difference) <= within
    return difference > 0 if relation == ">" else difference >= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Paper:
    """The table as printed: `columns` and, by line, one value for each (None: not printed), under a `caption`.

    `values` has the lines' labels where ours are among them; a line of ours that is one way of doing what the paper has
    one line for is called after it, "APE, T = S = 1" after "APE". `model` is whom the numbers are of.
    """

    caption: str
    model: str = ""
    columns: tuple[str, ...]
    values: Mapping[str, Sequence[float | None]]

    def __post_init__(self) -> None:
        for line, values in self.values.items():
            if len(values) != len(self.columns):
                raise ValueError(f"{self.caption}: {line!r} has {len(values)} values for {len(self.columns)} columns")

    def value(self, line: str, column: str) -> float | None:
        """A printed number, None where there is none; KeyError for a line or column that the paper does not have."""
        return dict(zip(self.columns, self.values[line], strict=True))[column]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table by one command: `python -m ragkv.benchmarks.papers NAME`.

    `follows` names the paper's table; `limit` is questions per column, few enough for minutes on two cores. `remarks`
    tell a reader what differs from the paper. Raises ValueError for a definition that is not consistent.

    `models` are the checkpoints by role that are read unless others are named, `dtype` is what they compute in unless
    another is. `prepare` gives the table as it is to be filled, after what it asks for itself (a search for settings).
    `read` gives figures that were measured elsewhere, of the folder that stands for the model.
    """

    name: str
    title: str
    follows: str
    lines: tuple[Line, ...]
    columns: tuple[Column, ...]
    paper: tuple[Paper, ...] = ()
    orders: tuple[Order, ...] = ()
    limit: int = 60
    remarks: tuple[str, ...] = ()
    models: Mapping[str, str] = field(default_factory=dict)
    dtype: str | None = None
    prepare: Callable[[Table, Ask], Table] | None = field(default=None, repr=False)
    read: Callable[[Table, str], Known] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        lines, columns = [line.label for line in self.lines], [column.label for column in self.columns]
        for what, labels in (("lines", lines), ("columns", columns)):
            if twice := [label for label in labels if labels.count(label) > 1]:
                raise ValueError(f"{self.name}: " + _ONE_NAME.format(what, twice[0]))
        for line in self.lines:
            if line.same_as and line.same_as not in lines:
                raise ValueError(f"{self.name}: {line.label!r} is compared with {line.same_as!r}, which is no line")
        for column in self.columns:
            if strange := [label for label in column.mean_of if label not in columns or self.column(label).mean_of]:
                raise ValueError(f"{self.name}: {column.label!r} is a mean of {strange[0]!r}, which has no task")
        asked: dict[tuple[str, int], int] = {}
        for column in self.columns:
            count = column.limit or self.limit
            if column.task and asked.setdefault((column.task, column.chunks), count) != count:
                raise ValueError(f"{self.name}: columns ask {column.task} with two limits; give each the same")
        for order in self.orders:
            for cell in (order.left, order.right):
                if cell.line not in lines or cell.column not in columns:
                    raise ValueError(f"{self.name}: an order names {cell}, which is no cell")

    def with_engines(self, engines: Mapping[str, str], told: str) -> Table:
        """The table with other engines for some lines, by label, and a remark on how they were found."""
        return replace(
            self,
            lines=tuple(replace(line, engine=engines.get(line.label, line.engine)) for line in self.lines),
            remarks=(*self.remarks, told),
        )

    def column(self, label: str) -> Column:
        """The column of that label; KeyError when there is none."""
        for column in self.columns:
            if column.label == label:
                return column
        raise KeyError(label)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Figures that were measured elsewhere: the table as it is then, and the scores of every cell.

    `seed` made the questions, `models` answered them.
    """

    table: Table
    scores: Mapping[Cell, Scores]
    models: Mapping[str, Model]
    seed: int
