"""Load tasks from files of LOFT, LongBench v1, RULER, and ragkv's own JSON Lines.

A file is read once, line by line. Only the examples that will be asked are kept in memory.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

from ragkv.errors import ConfigError, UsageError
from ragkv.evaluation.cutting import Cutter, estimated_tokens
from ragkv.evaluation.example import Example, Task
from ragkv.evaluation.filerow import Row, rows
from ragkv.evaluation.loftfile import loft_file
from ragkv.evaluation.longbenchfile import longbench_file
from ragkv.evaluation.metric import metric_of
from ragkv.evaluation.ownfile import own_file
from ragkv.evaluation.rulerfile import ruler_file
from ragkv.evaluation.taskfile import Reading, TaskFile

__all__ = ["FORMATS", "load_tasks"]

FORMATS = ("loft", "longbench", "ruler", "ragkv")
_READERS: dict[str, Callable[[Path, Iterator[Row], Reading], TaskFile]] = {
    "longbench": longbench_file,
    "ruler": ruler_file,
    "ragkv": own_file,
}
_KEYS = {  # keys in the first line of a file of each format
    "ruler": {"input", "outputs"},
    "longbench": {"input", "context", "answers"},
    "ragkv": {"question", "chunks"},
    "loft": {"query_text"},
}
_WHAT = "a LOFT folder, a file of LongBench v1 or RULER, or one of your own (docs/evaluation.md)"
_LOG = logging.getLogger(__name__)


def load_tasks(
    path: Path,
    *,
    format: str | None = None,
    metric: str | None = None,
    split: str | None = None,
    limit: int | None = None,
    chunk_tokens: int = 512,
    chunks: int = 32,
    seed: int = 0,
    count_tokens: Callable[[str], int] = estimated_tokens,
) -> list[Task]:
    """The tasks of a file, of a LOFT folder, or of all files in a folder of LongBench or RULER.

    `format` is one of FORMATS; None derives it from the files. `metric` replaces the data set's own. `seed` draws at
    most `limit` examples of each task (other lines are only checked to be objects). Long texts are cut into chunks of
    `chunk_tokens`, counted by `count_tokens`. A LOFT question of the folder's `split` gets `chunks` passages of its
    corpus. Raises ConfigError, which names file and line, if something cannot be read, and UsageError for invalid
    options.
    """
    if format is not None and format not in FORMATS:
        raise UsageError(f"--format must be one of {', '.join(FORMATS)}, not {format!r}.")
    for name, value in (("limit", limit), ("chunk tokens", chunk_tokens), ("chunks", chunks)):
        if value is not None and value < 1:
            raise UsageError(f"The {name} must be at least 1, not {value}.")
    if metric is not None:
        metric_of(metric)
    cutter = Cutter(chunk_tokens=chunk_tokens, count_tokens=count_tokens)
    reading = Reading(cutter=cutter, chunks=chunks, seed=seed, split=split)
    files = _files(path, format, reading)
    tasks = []
    for file in files:
        judge = metric or file.metric
        if judge is None and path.is_dir():
            _LOG.warning(
                "%s is left out: its metric needs Chinese words, which ragkv does not have.",
                file.name,
            )
            continue
        if judge is None:
            raise ConfigError(
                f"{file.name} is judged by Chinese words, which ragkv does not have; give another --metric."
            )
        tasks.append(_task(file, judge, reading, limit))
    return tasks


def _files(path: Path, format: str | None, reading: Reading) -> Iterator[TaskFile]:
    if path.is_dir():
        if format == "loft" or (format is None and (path / "corpus.jsonl").exists()):
            yield loft_file(path, reading)
            return
        paths = sorted(path.glob("*.jsonl")) or sorted(
            found for name in ("validation", "test") for found in path.glob(f"*/{name}.jsonl")
        )
        if not paths:
            raise UsageError(f"{path} holds no task file; give {_WHAT}.")
    else:
        paths = [path]
    if reading.split is not None:
        raise UsageError(f"--split chooses the questions of a LOFT folder, which {path} is not; leave it out.")
    for found in paths:
        yield _file(found, format, reading)


def _file(path: Path, format: str | None, reading: Reading) -> TaskFile:
    lines = rows(path, _WHAT)
    first = next(lines, None)
    if first is None:
        raise ConfigError(f"{path} holds no line; give {_WHAT}.")
    known = format or next((name for name, keys in _KEYS.items() if keys <= first.values.keys()), None)
    if known is None:
        raise ConfigError(f"{first.where}: this is a line of no known format ({', '.join(FORMATS)}); give {_WHAT}.")
    if known == "loft":
        raise UsageError(f"{path} is a part of a LOFT folder; give the folder, {path.parent}, and --split.")
    return _READERS[known](path, chain([first], lines), reading)


def _task(file: TaskFile, metric: str, reading: Reading, limit: int | None) -> Task:
    seen: set[str] = set()
    examples = []
    for ordinal, row in _drawn(enumerate(file.rows, start=1), limit, reading.seed):
        example = file.example(ordinal, row)
        _check(example, row, seen)
        examples.append(example)
    if not examples:
        raise ConfigError(f"{file.name} holds no question; give {_WHAT}.")
    return Task(
        name=file.name,
        metric=metric,
        examples=tuple(examples),
        max_new_tokens=file.max_new_tokens,
        seed=reading.seed if file.seeded or limit is not None else None,
    )


def _check(example: Example, row: Row, seen: set[str]) -> None:
    if not example.question:
        raise ConfigError(f"{row.where}: the question is blank.")
    if not example.chunks:
        raise ConfigError(f"{row.where}: there is no text to read; give at least one chunk.")
    if example.example_id in seen:
        raise ConfigError(f"{row.where}: the id {example.example_id!r} occurs twice.")
    seen.add(example.example_id)


def _drawn(found: Iterable[tuple[int, Row]], limit: int | None, seed: int) -> Iterable[tuple[int, Row]]:
    """At most `limit` items in their order, each with the same probability, holding no more than that (algorithm R)."""
    if limit is None:
        return found
    rng = random.Random(seed)
    held: list[tuple[int, Row]] = []
    for item in found:
        if len(held) < limit:
            held.append(item)
        elif (place := rng.randrange(item[0])) < limit:
            held[place] = item
    return sorted(held, key=lambda item: item[0])
