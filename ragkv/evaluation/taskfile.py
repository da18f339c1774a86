"""What the readers of all file formats get from the loader, and what they return."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ragkv.evaluation.cutting import Cutter
from ragkv.evaluation.example import Example
from ragkv.evaluation.filerow import Row

__all__ = ["Reading", "TaskFile"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """`cutter` cuts long texts. Each question of a LOFT folder's `split` gets `chunks` passages, drawn by `seed`."""

    cutter: Cutter
    chunks: int
    seed: int
    split: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFile:
    """A file of questions that is read once. `example(ordinal, row)` makes the example of a row, counted from 1.

    `metric` is None if ragkv does not have the data set's metric. `seeded`: chunks are drawn at random.
    """

    name: str
    metric: str | None
    rows: Iterator[Row]
    example: Callable[[int, Row], Example]
    max_new_tokens: int
    seeded: bool = False
