"""Tasks: questions with their own chunks and gold answers, and the metric that judges the answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["Example", "Metric", "Task"]

Metric: TypeAlias = Callable[[str, "Example"], float]
"""A function from (the engine's answer, the example) to a score in [0, 1]; higher is better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One question of a task, and the chunks that may be read to answer it.

    `chunks` are texts in the task's order; the pieces of a long text are in order. `answers` are the gold answers; the
    metric decides whether one of them or all must be given. `kind` is a slice that is reported separately ("one hop").
    `needed` are the indices of the chunks with the evidence, if the task knows them, and `classes` the labels of a
    classification (LongBench's `all_classes`).
    """

    example_id: str
    question: str
    chunks: tuple[str, ...]
    answers: tuple[str, ...]
    kind: str = ""
    needed: tuple[int, ...] = ()
    classes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Examples with one metric. `seed` made or drew them; it is None for the complete examples of a file."""

    name: str
    metric: str
    examples: Sequence[Example]
    max_new_tokens: int = 64
    seed: int | None = None

    def __post_init__(self) -> None:
        if len({example.example_id for example in self.examples}) != len(self.examples):
            raise ValueError(f"task {self.name!r}: two examples have the same example_id")
        if self.max_new_tokens < 1:
            raise ValueError(f"task {self.name!r}: max_new_tokens must be at least 1")
