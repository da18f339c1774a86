"""What every format of task files gives the loader, and how it may be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ragkv.evaluation.cutting import Cutter
from ragkv.evaluation.example import Example
from ragkv.evaluation.row import Row

__all__ = ["Reading", "TaskFile"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """`cutter` for long texts; `chunks` of a corpus for each question, drawn by `seed`; `split` of a folder."""

    cutter: Cutter
    chunks: int
    seed: int
    split: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFile:
    """One file of questions, read once: `example(ordinal, row)` makes the example of a row, counted from 1.

    `metric` is None where ragkv lacks the one that the data set is judged with; `seeded` says that chunks were drawn.
    """

    name: str
    metric: str | None
    rows: Iterator[Row]
    example: Callable[[int, Row], Example]
    max_new_tokens: int
    seeded: bool = False
