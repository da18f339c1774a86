"""Load benchmarks: tasks from JSONL files of questions with their chunks, retrieval from BEIR's folders.

- A line of a task has `question`, `chunks` and `answers` (or `answer`), and optionally `id` (default: the line's
  number), `kind`, `needed` and `classes`. A file is read once, and only the examples that will be asked are kept.
- BEIR: `corpus.jsonl` (`_id`, `title`, `text`), `queries.jsonl` (`_id`, `text`), `qrels/SPLIT.tsv` (query-id,
  corpus-id, score, under a header).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from pathlib import Path

from ragkv.benchmarks.evaluation.metrics import Example, Task, metric_of
from ragkv.doctor.questions import FileRow, lines, question_of, rows
from ragkv.doctor.retrieval import RetrievalQuestion, RetrievalTask
from ragkv.errors import ConfigError, RetrievalError, UsageError

_WHAT = 'a JSONL file of lines with "question", "chunks" and "answers" (docs/evaluation.md)'
_BENCHMARK = "the folder of a BEIR benchmark"


def load_task(path: Path, *, metric: str = "contains", limit: int | None = None, seed: int = 0) -> Task:
    """The task of a file. `seed` draws at most `limit` examples; other lines are only checked to be objects.

    Raises ConfigError, which names file and line, if something cannot be read.
    """
    metric_of(metric)
    seen: set[str] = set()
    examples = []
    for ordinal, row in _drawn(enumerate(rows(path, _WHAT), start=1), limit, seed):
        example = _example(ordinal, row)
        if example.example_id in seen:
            raise ConfigError(f"{row.where}: the id {example.example_id!r} occurs twice.")
        seen.add(example.example_id)
        examples.append(example)
    if not examples:
        raise ConfigError(f"{path} holds no question; give {_WHAT}.")
    return Task(name=path.stem, metric=metric, examples=tuple(examples), seed=None if limit is None else seed)


def _example(ordinal: int, row: FileRow) -> Example:
    question = question_of(row)
    if not question.answers:
        raise ConfigError(f'{row.where}: "answers" is missing; a question without a gold answer cannot be judged.')
    chunks = _texts(row, "chunks")
    return Example(
        example_id=row.name("id") if "id" in row.values else str(ordinal),
        question=question.text,
        chunks=chunks,
        answers=question.answers,
        kind=_text(row, "kind", default=""),
        needed=_needed(row, len(chunks)),
        classes=_texts(row, "classes") if "classes" in row.values else (),
    )


def _text(row: FileRow, key: str, *, default: str | None = None) -> str:
    """The text under `key`; `default` also replaces null. Raises ConfigError if there is neither."""
    value = row.values.get(key)
    value = default if value is None else value
    if not isinstance(value, str):
        raise ConfigError(f'{row.where}: "{key}" must be a text.')
    return value


def _texts(row: FileRow, key: str) -> tuple[str, ...]:
    """The list of texts (or numbers) under `key`, which must not be empty."""
    value = row.values.get(key)
    if not isinstance(value, list) or not value or not all(type(item) in (str, int, float) for item in value):
        raise ConfigError(f'{row.where}: "{key}" must be a list of texts that is not empty.')
    texts = tuple(str(item) for item in value)
    if not all(text.strip() for text in texts):
        raise ConfigError(f'{row.where}: a text of "{key}" is blank; leave it out.')
    return texts


def _needed(row: FileRow, chunks: int) -> tuple[int, ...]:
    value = row.values.get("needed", [])
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item < chunks for item in value):
        raise ConfigError(f'{row.where}: "needed" must be a list of places in "chunks", from 0 to {chunks - 1}.')
    return tuple(value)


def _drawn(numbered_rows: Iterable[tuple[int, FileRow]], limit: int | None, seed: int) -> Iterable[tuple[int, FileRow]]:
    """At most `limit` items in their order, each with the same probability, holding no more than that (algorithm R)."""
    if limit is None:
        return numbered_rows
    rng = random.Random(seed)
    drawn: list[tuple[int, FileRow]] = []
    for item in numbered_rows:
        if len(drawn) < limit:
            drawn.append(item)
        elif (place := rng.randrange(item[0])) < limit:
            drawn[place] = item
    return sorted(drawn, key=lambda item: item[0])


def read_benchmark(folder: Path, *, split: str = "test") -> RetrievalTask:
    """Read BEIR's folder. Judged passages that are not in the corpus stay relevant and count as not found.

    Raises ConfigError, which names file and line, if something cannot be read, and RetrievalError if no question has a
    relevant passage.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; give {_BENCHMARK}.")
    passages = _passages(folder / "corpus.jsonl")
    questions: dict[str, str] = {}
    for row in rows(folder / "queries.jsonl", _BENCHMARK):
        text = _text(row, "text")
        if questions.setdefault(row.name("_id"), text) != text:
            raise ConfigError(f"{row.where}: the _id {row.name('_id')!r} occurs twice.")
    path = folder / "qrels" / f"{split}.tsv"
    if not path.exists() and (others := sorted(other.stem for other in path.parent.glob("*.tsv"))):
        raise ConfigError(f"No such file: {path}; choose --split {' or '.join(others)}.")
    grades: dict[str, dict[str, float]] = {}
    for where, query, passage, grade in _qrels(path):
        if query not in questions:
            raise ConfigError(f"{where}: {folder / 'queries.jsonl'} has no query {query!r}.")
        grades.setdefault(query, {})[passage] = grade
    judgements, unjudged, absent = [], [], 0
    for query, graded in grades.items():
        # ArguAna's and Quora's queries are in the corpus under the same id; BEIR takes them out of every ranking
        excluded = query if query in passages else None
        relevant = {passage: grade for passage, grade in graded.items() if grade > 0 and passage != excluded}
        absent += sum(passage not in passages for passage in relevant)
        text = questions[query].strip()
        if relevant and text:
            judgements.append(RetrievalQuestion(question_id=query, question=text, relevant=relevant, excluded=excluded))
        else:
            unjudged.append(query)
    if not judgements:
        raise RetrievalError(f"No question of {folder} has a relevant passage; check its files or choose --split.")
    notes = [f"{absent} relevant passages are not in the corpus and count as not found"] if absent else []
    name = f"beir/{folder.resolve().name}"
    return RetrievalTask(name=name, judgements=judgements, unjudged=unjudged, passages=passages, notes=notes)


def _qrels(path: Path) -> Iterable[tuple[str, str, str, float]]:
    """(where, query id, passage id, grade) of each line except the header."""
    for number, (where, line) in enumerate(lines(path, _BENCHMARK)):
        fields = [field.strip() for field in line.split("\t")]
        try:
            query, passage, grade = fields[0], fields[1], float(fields[2])
            whole = len(fields) == 3 and query and passage and math.isfinite(grade)
        except (IndexError, ValueError):
            whole = False
        if not whole:
            if number == 0 and len(fields) == 3:
                continue
            raise ConfigError(f"{where}: a line is query-id, corpus-id and a number as its score, between tabs.")
        yield where, query, passage, grade


def _passages(path: Path) -> dict[str, str]:
    """The passages of a corpus by id. A passage is its title and text, joined as in BEIR."""
    passages: dict[str, str] = {}
    for row in rows(path, _BENCHMARK):
        name = row.name("_id")
        if name in passages:
            raise ConfigError(f"{row.where}: the _id {name!r} occurs twice.")
        passages[name] = f"{_text(row, 'title', default='')} {_text(row, 'text', default='')}".strip()
    if not passages:
        raise ConfigError(f"{path} holds no passage; give {_BENCHMARK}.")
    return passages
