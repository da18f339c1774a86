"""What a table consists of: lines (who answers), columns (what is asked), cells, and the orders that the paper claims.

A claimed order holds, does not hold, or is not shown. The interval of the difference decides, never the difference
alone: with few questions, one of two equal methods is ahead by chance. A table also records the commit, versions,
models and seed that it was made with.
"""

from __future__ import annotations

import math
import shlex
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import ragkv
from ragkv.benchmarks.evaluation.answers import GIVEN, RAW, Candidate, ExampleResult, all_candidates
from ragkv.benchmarks.evaluation.files import load_task
from ragkv.benchmarks.evaluation.metrics import Task, bootstrap_mean
from ragkv.benchmarks.evaluation.tasks import make_task
from ragkv.doctor.health import Environment
from ragkv.doctor.questions import Progress
from ragkv.doctor.specs import parse_specs
from ragkv.model.checkpoint import MINI

Scores = Mapping[str, Sequence[tuple[str, float]]]
"""For each column, pairs of question id and score in [0, 1]. A mean over columns has several, any other cell one."""

_REPOSITORY = Path(__file__).parents[2]
_DECIMALS = 9  # means of the same scores in another order differ by less


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A mean in [0, 1] over `n` questions with its 95 % bootstrap interval; None if no prompt fitted the model."""

    value: float | None
    ci95: tuple[float, float] | None
    n: int
    too_long: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """left - right with its 95 % interval over `n` questions. `paired`: both were asked the same questions.

    `identical`: both were asked the same questions and have the same score on each of them.
    """

    value: float
    ci95: tuple[float, float]
    n: int
    paired: bool
    identical: bool = False


def figure_of(scores: Scores, seed: int, *, too_long: int = 0) -> Figure:
    """The mean of the columns' means. The bootstrap resamples the questions within each column."""
    strata = [[score for _, score in column] for column in scores.values()]
    n = sum(map(len, strata))
    if not all(strata) or not strata:
        return Figure(value=None, ci95=None, n=n, too_long=too_long)
    mean = bootstrap_mean(strata, seed)
    return Figure(value=mean.value, ci95=mean.ci95, n=n, too_long=too_long)


def difference_of(left: Scores, right: Scores, seed: int) -> Difference | None:
    """left - right, paired by question if both were asked the same ones; None if one of them has no score.

    Columns are matched by position, so that two cells of one line can be compared too, and questions by id.
    """
    pairs = list(zip(left.values(), right.values(), strict=True)) if len(left) == len(right) else []
    strata = []
    for ours, theirs in pairs:
        known = dict(theirs)
        strata.append([score - known[name] for name, score in ours if name in known])
    if pairs and all(strata) and all(2 * len(s) > max(len(a), len(b)) for s, (a, b) in zip(strata, pairs, strict=True)):
        mean = bootstrap_mean(strata, seed)
        ci95 = with_width(mean.value, mean.ci95, mean.n)
        return Difference(value=mean.value, ci95=ci95, n=mean.n, paired=True, identical=not any(map(any, strata)))
    first, second = figure_of(left, seed), figure_of(right, seed + 1)
    if first.value is None or second.value is None or first.ci95 is None or second.ci95 is None:
        return None
    value = first.value - second.value
    low = math.hypot(first.value - first.ci95[0], second.ci95[1] - second.value)
    high = math.hypot(first.ci95[1] - first.value, second.value - second.ci95[0])
    n = min(first.n, second.n)
    return Difference(value=value, ci95=with_width(value, (value - low, value + high), n), n=n, paired=False)


def with_width(value: float, ci95: tuple[float, float], n: int) -> tuple[float, float]:
    """The interval of a difference in [-1, 1]; if it has no width, the interval that `n` questions support.

    If all questions differ by the same amount, a bootstrap has nothing to resample. When none of `n` questions departs
    from `value`, up to 1 - 0.025^(1/n) of all questions may (Clopper and Pearson), each by the largest possible amount:
    14 points for 24 questions, 6 points for 60.
    """
    low, high = ci95
    if round(high - low, _DECIMALS) > 0:
        return ci95
    depart: float = 1 - 0.025 ** (1 / n)
    return value - depart * (1 + value), value + depart * (1 - value)


COMMAND = "python -m ragkv.benchmarks.papers"
"""The command that fills a table, without the table's name and options."""

_SHORT = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A checkpoint that answered. `fingerprint` is cut to 12 digits."""

    name: str
    dtype: str
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Everything that a table depends on besides its definition. `models` are by role; "" is the table's own.

    Commit, versions and device are by default those of this process.
    """

    command: str
    commit: str = field(default_factory=lambda: commit_of(Path(ragkv.__file__).parent))
    seed: int
    limit: int | None
    models: Mapping[str, Model]
    embedder: str | None = None
    reranker: str | None = None
    versions: Mapping[str, str] = field(default_factory=lambda: Environment.look().versions)
    device: str = field(default_factory=lambda: Environment.look().devices[0])


def commit_of(folder: Path) -> str:
    """The commit of the checkout that holds `folder`, with "+ changes" if its files differ; "unknown" without git.

    Changes in docs/ do not count, because the commands themselves write there.
    """
    commit = _git(folder, "rev-parse", f"--short={_SHORT}", "HEAD")
    if not commit or _git(folder, "check-ignore", str(folder)):  # installed inside the checkout of another project
        return "unknown"
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ":/", ":(exclude,top)docs")
    return f"{commit} + changes" if changed else commit


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    except OSError:  # no git on this machine
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How tables are filled.

    `models` are checkpoints by role; "" is the one that most lines use (None: mini, or the table's own), and lines
    whose role has none are left out. `limit` caps the questions of each column. Answers are kept in `work`, as
    `benchmarks.evaluation` keeps them, so that a stopped run continues.
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


Relation = Literal[">", ">=", "~"]
"""Better than; at least as good as; within some points of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """A row: an engine with its options, as `benchmarks.evaluation` takes them, and how its chunks are ranked.

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

    def candidate(self, model: str, dtype: str | None) -> Candidate:
        """The candidate that answers this line. Raises UsageError or ConfigError for options that the engine lacks."""
        [spec] = parse_specs(self.engine)
        [candidate] = all_candidates(
            [spec],
            models=[model],
            codecs=[self.codec],
            retrievals=[self.retrieval],
            rerank=self.rerank,
            top_k=self.top_k,
            dtype=dtype,
        )
        return candidate


Ask: TypeAlias = Callable[[Sequence[Task], Sequence[TableRow]], list[list[ExampleResult]]]
"""A function that answers tasks with lines on the table's own model and returns one list of results per line."""


Measure = Literal["score", "same", "gap", "agree", "f1", "charge", "time"]
MEASURES: Mapping[Measure, str] = {
    "same": "answers that are the same",
    "gap": "share of the KL to full attention that is gone",
    "agree": "tokens that full attention chooses too",
    "f1": "token F1",
    "charge": "tokens and layers computed again",
    "time": "share of full attention's processor time",
}
"""What a column shows, in words; a score is named by the task's metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A task, a slice of a task (`kind`), or the mean of other columns (`mean_of`), which all weigh the same.

    `task` is written as for `benchmarks.evaluation`; a .jsonl file is named from the repository's root, and its
    questions bring their chunks. If `limit` is None, the table's limit applies. With `measure` "same",
    the figure is the share of answers that equal, letter by letter, those of the line that `same_as` names. Measures
    other than these two are for tables that `measure` themselves.
    """

    label: str
    task: str = ""
    chunks: int = 8
    kind: str = ""
    limit: int | None = None
    measure: Measure = "score"
    mean_of: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.task) == bool(self.mean_of):
            raise ValueError(f"column {self.label!r} has a task or is a mean of others, one of the two")

    def make(self, seed: int, limit: int) -> Task:
        """The task with at most `limit` questions. Raises UsageError for an unknown one."""
        if self.task.endswith(".jsonl"):
            task = load_task(_REPOSITORY / self.task, limit=limit, seed=seed)
            return replace(task, name=self.task)
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
    """A statement of the paper that one cell is better than another.

    `source` quotes the paper's two numbers and where they are. `within` is the distance, in points, that "~" allows.
    """

    left: Cell
    relation: Relation
    right: Cell
    within: float = 0.0
    source: str

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
        figures = []
        for paper in papers:
            for name in theirs:
                a, b = (paper.value(named.get(line, line), name) for line in (left, right))
                if a is None or b is None:
                    continue
                if not holds(relation, a - b, within):
                    raise ValueError(f"{paper.caption}, {name}: {left} {a:g} is not {relation} {right} {b:g}")
                figures.append(f"{name} {a:g} to {b:g}" + (f" ({paper.model})" if paper.model else ""))
        if not figures:
            raise ValueError(f"the paper has no number for {left} and {right} in {', '.join(theirs)}")
        orders += across([ours], left, relation, right, "; ".join(figures), within=within)
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
    """A table that `python -m ragkv.benchmarks.papers NAME` fills.

    `follows` names the paper's table. `limit` is the number of questions per column, small enough that two cores need
    only minutes. `remarks` tell the reader what differs from the paper. `models` (by role) and `dtype` are used unless
    the user names others.

    `prepare` may ask questions first (a search for settings) and returns the table to be filled. `measure` takes the
    place of asking: it returns figures that it measures itself, or that were measured elsewhere.
    """

    name: str
    title: str
    follows: str
    lines: tuple[TableRow, ...]
    columns: tuple[Column, ...]
    paper: tuple[Paper, ...] = ()
    orders: tuple[Order, ...] = ()
    limit: int = 60
    remarks: tuple[str, ...] = ()
    models: Mapping[str, str] = field(default_factory=dict)
    dtype: str | None = None
    prepare: Callable[[Table, Ask], Table] | None = field(default=None, repr=False)
    measure: Callable[[Table, RunOptions, Progress | None], KnownFigures] | None = field(default=None, repr=False)

    def with_engines(self, engines: Mapping[str, str], remark: str) -> Table:
        """A copy with other engines for some lines, by label, and a remark that says how they were found."""
        return replace(
            self,
            lines=tuple(replace(line, engine=engines.get(line.label, line.engine)) for line in self.lines),
            remarks=(*self.remarks, remark),
        )

    def column(self, label: str) -> Column:
        """The column with that label. Raises KeyError if there is none."""
        return {column.label: column for column in self.columns}[label]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFigures:
    """Figures that were measured elsewhere: the table with the lines and columns they have, and each cell's scores.

    `seed` made the questions and `models` answered them. `tasks` are those of the columns, if they are at hand.
    """

    table: Table
    scores: Mapping[Cell, Scores]
    models: Mapping[str, Model]
    seed: int
    tasks: Mapping[str, Task] = field(default_factory=dict)


Word = Literal["holds", "does not hold", "not shown", "not measured"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A judged order. `held` is None if it is not shown, or if a cell was not measured and `difference` is None too."""

    order: Order
    held: bool | None
    difference: Difference | None

    @property
    def word(self) -> Word:
        if self.difference is None:
            return "not measured"
        return "not shown" if self.held is None else "holds" if self.held else "does not hold"


def judge(order: Order, scores: Mapping[Cell, Scores], seed: int) -> Verdict:
    """Compare the two cells of `order`. `scores` has the cells that were measured."""
    left, right = scores.get(order.left), scores.get(order.right)
    difference = None if left is None or right is None else difference_of(left, right, seed)
    return decide(order, difference)


def decide(order: Order, difference: Difference | None) -> Verdict:
    """Judge `order` by the interval of `difference`.

    ">" and ">=" hold if the whole interval lies above 0, and do not hold if it lies below 0. "~" holds if the whole
    interval lies within the allowed points, and does not hold if it lies beyond them. Anything else is not shown. "~"
    within 0 points is a claim about every question: it holds if no question is scored differently, and one that is
    refutes it.
    """
    if difference is None:
        return Verdict(order=order, held=None, difference=None)
    if order.relation == "~" and not order.within and difference.paired:
        return Verdict(order=order, held=difference.identical, difference=difference)
    low, high = (round(100 * bound, _DECIMALS) for bound in difference.ci95)
    if order.relation == "~":
        holds, fails = -order.within <= low and high <= order.within, low > order.within or high < -order.within
    else:
        holds, fails = low > 0, high < 0
    return Verdict(order=order, held=True if holds else False if fails else None, difference=difference)


def count_verdicts(verdicts: Iterable[Verdict]) -> str:
    """A sentence that says how many statements hold; "" if there are none."""
    words = Counter(verdict.word for verdict in verdicts)
    if not words:
        return ""
    parts = [f"{words['holds']} of {words.total()} statements of order hold here"]
    if fail := words["does not hold"]:
        parts.append(f"{fail} {'does' if fail == 1 else 'do'} not hold")
    if unshown := words["not shown"]:
        parts.append(f"{unshown} {'is' if unshown == 1 else 'are'} not shown (the interval leaves it open)")
    if absent := words["not measured"]:
        parts.append(f"{absent} {'was' if absent == 1 else 'were'} not measured")
    return ", ".join(parts) + "."
