"""Read ragkv's own task files: each line is a JSON object with a question, its chunks and its gold answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ragkv.errors import ConfigError
from ragkv.evaluation.example import Example
from ragkv.evaluation.filerow import Row
from ragkv.evaluation.question import question_of
from ragkv.evaluation.taskfile import Reading, TaskFile

__all__ = ["own_file"]

_TOKENS = 64


def own_file(path: Path, found: Iterator[Row], reading: Reading) -> TaskFile:
    """Read a file with the keys `question`, `chunks` and `answers` (or `answer`), and optionally `id` (default: the
    line's number), `kind`, `needed` and `classes`. Chunks are not cut."""

    def example(ordinal: int, row: Row) -> Example:
        asked = question_of(row)
        if not asked.answers:
            raise ConfigError(f'{row.where}: "answers" is missing; a question without a gold answer cannot be judged.')
        chunks = row.texts("chunks")
        return Example(
            example_id=row.name("id") if "id" in row.values else str(ordinal),
            question=asked.text,
            chunks=chunks,
            answers=asked.answers,
            kind=row.text("kind", default=""),
            needed=_needed(row, len(chunks)),
            classes=row.texts("classes") if "classes" in row.values else (),
        )

    return TaskFile(name=path.stem, metric="contains", rows=found, example=example, max_new_tokens=_TOKENS)


def _needed(row: Row, chunks: int) -> tuple[int, ...]:
    value = row.values.get("needed", [])
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item < chunks for item in value):
        raise ConfigError(f'{row.where}: "needed" must be a list of places in "chunks", from 0 to {chunks - 1}.')
    return tuple(value)
