"""What a table consists of: lines (who answers), columns (what is asked), and the order of the paper's figures."""

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
"""Better than; at least as good as; within some points of."""

_ONE_NAME = "a table's {} have names of their own; {!r} stands twice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A row: an engine with its options, as `ragkv eval answers` takes them, and how its chunks are ranked.

    `role` says which checkpoint answers. "" is the model that the table is made with. Any other word is a checkpoint
    that the user names with `--model tuned=FOLDER`; without it, the line is left out. `same_as` is the label of the
    line that a column with `measure="same"` compares this line's answers with.
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
        """The contender that answers this line. Raises UsageError or ConfigError for options that the engine lacks."""
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
"""A function that answers tasks with lines on the table's own model and returns one list of results per line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A task, a slice of a task (`kind`), or the mean of other columns (`mean_of`), which all weigh the same.

    `task` is written as for `ragkv eval answers`. If `limit` is None, the table's limit applies. With `measure` "same",
    the figure is the share of answers that equal, letter by letter, those of the line that `same_as` names.
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
    """A cell of the table, named by its line and column."""

    line: str
    column: str

    def __str__(self) -> str:
        return f"{self.line} ({self.column})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A statement that one cell is better than another, as it is in the paper.

    `source` quotes the paper's two numbers and where they are. `within` is the distance, in points, that "~" allows.
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
    """Compare two lines in each of `columns`."""
    return [
        Order(left=Cell(left, column), relation=relation, right=Cell(right, column), source=source, **more)
        for column in columns
    ]


def along(lines: Iterable[str], left: str, relation: Relation, right: str, source: str, **more: Any) -> list[Order]:
    """Compare two columns in each of `lines`."""
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
    """Compare two lines in each of some columns, and check that the paper's numbers are in that order.

    `columns` maps our columns to the paper's columns that they stand for. `called` maps our lines to the paper's name
    where the two differ. Raises ValueError if a number of the paper contradicts the order, so that a table never states
    an order that the paper does not have.
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
    """Whether the difference left - right, in points, satisfies `relation`."""
    if relation == "~":
        return abs(difference) <= within
    return difference > 0 if relation == ">" else difference >= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Paper:
    """The table as the paper prints it: for each line, one value per column (None where the paper has none).

    The keys of `values` are our lines' labels where both tables have the line. If the paper has one line for several of
    ours, ours begin with its name: "APE, T = S = 1" belongs to "APE". `model` is the model that the paper measured.
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
        """A number of the paper, or None. Raises KeyError if the paper has no such line or column."""
        return dict(zip(self.columns, self.values[line], strict=True))[column]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table that `python -m ragkv.benchmarks.papers NAME` fills. Raises ValueError if it contradicts itself.

    `follows` names the paper's table. `limit` is the number of questions per column, small enough that two cores need
    only minutes. `remarks` tell the reader what differs from the paper. `models` (by role) and `dtype` are used unless
    the user names others.

    `prepare` may ask questions first (a search for settings) and returns the table to be filled. `read` returns figures
    that were measured elsewhere; it gets the folder that the user named in place of a model.
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
        """A copy with other engines for some lines, by label, and a remark that says how they were found."""
        return replace(
            self,
            lines=tuple(replace(line, engine=engines.get(line.label, line.engine)) for line in self.lines),
            remarks=(*self.remarks, told),
        )

    def column(self, label: str) -> Column:
        """The column with that label. Raises KeyError if there is none."""
        for column in self.columns:
            if column.label == label:
                return column
        raise KeyError(label)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Figures that were measured elsewhere: the table with the lines and columns they have, and each cell's scores.

    `seed` made the questions and `models` answered them.
    """

    table: Table
    scores: Mapping[Cell, Scores]
    models: Mapping[str, Model]
    seed: int
