"""Read retrieval benchmarks in the file layouts of BEIR and LOFT.

BEIR: `corpus.jsonl` (`_id`, `title`, `text`), `queries.jsonl` (`_id`, `text`), `qrels/SPLIT.tsv` (query-id, corpus-id,
score, under a header). LOFT: `corpus.jsonl` (`pid`, `title_text`, `passage_text`), `SPLIT_queries.jsonl` (`qid`,
`query_text`, and `answers` or `metadata.qrels` as lists of [pid, score]).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ragkv.errors import ConfigError, RetrievalError, UsageError
from ragkv.evaluation.io import FileRow, lines, rows
from ragkv.evaluation.ranking import Passage, RetrievalQuestion, RetrievalTask

SPLIT = "test"
CORPUS = "corpus.jsonl"
_WHAT = "the folder of a BEIR or LOFT benchmark"


def read_benchmark(folder: Path, *, layout: str | None = None, split: str | None = None) -> RetrievalTask:
    """Read the folder of a benchmark. `layout` is "beir" or "loft"; None derives it from the files.

    The default `split` is "test", or "dev" if a LOFT folder has no test. Raises ConfigError, which names file and line,
    if something cannot be read, and RetrievalError if no question has a relevant passage.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; give {_WHAT}.")
    name = layout or _layout(folder)
    if name not in FORMATS:
        raise UsageError(f"--format must be one of {', '.join(FORMATS)} for a folder, not {name!r}.")
    task = FORMATS[name](folder, split)
    if not task.judgements:
        raise RetrievalError(f"No question of {folder} has a relevant passage; check its files or choose --split.")
    return task


def _layout(folder: Path) -> str:
    if (folder / "queries.jsonl").exists() or (folder / "qrels").is_dir():
        return "beir"
    if loft_queries(folder, None).exists():
        return "loft"
    raise UsageError(
        f"{folder} looks like no benchmark; BEIR has {CORPUS}, queries.jsonl and qrels/{SPLIT}.tsv, "
        f"LOFT has {CORPUS} and {SPLIT}_queries.jsonl."
    )


def _beir(folder: Path, split: str | None) -> RetrievalTask:
    passages = passages_of(folder / CORPUS, "_id", "title", "text")
    known = {passage.passage_id for passage in passages}
    questions: dict[str, str] = {}
    for row in rows(folder / "queries.jsonl", _WHAT):
        if questions.setdefault(row.name("_id"), row.text("text")) != row.text("text"):
            raise ConfigError(f"{row.where}: the _id {row.name('_id')!r} occurs twice.")
    path = folder / "qrels" / f"{split or SPLIT}.tsv"
    if not path.exists() and (others := sorted(other.stem for other in path.parent.glob("*.tsv"))):
        raise ConfigError(f"No such file: {path}; choose --split {' or '.join(others)}.")
    grades: dict[str, dict[str, float]] = {}
    for where, query, passage, grade in _qrels(path):
        if query not in questions:
            raise ConfigError(f"{where}: {folder / 'queries.jsonl'} has no query {query!r}.")
        grades.setdefault(query, {})[passage] = grade
    # ArguAna's and Quora's queries are in the corpus under the same id; BEIR takes them out of every ranking.
    judged = ((query, questions[query], found, query if query in known else None) for query, found in grades.items())
    return _task(f"beir/{folder.resolve().name}", judged, passages, known)


def _qrels(path: Path) -> Iterable[tuple[str, str, str, float]]:
    """(where, query id, passage id, grade) of each line except the header."""
    for number, (where, line) in enumerate(lines(path, _WHAT)):
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


def _loft(folder: Path, split: str | None) -> RetrievalTask:
    passages = passages_of(folder / CORPUS, "pid", "title_text", "passage_text")
    path = loft_queries(folder, split)
    seen: set[str] = set()
    judged: list[tuple[str, str, dict[str, float], None]] = []
    for row in rows(path, _WHAT):
        query = row.name("qid")
        if query in seen:
            raise ConfigError(f"{row.where}: the qid {query!r} occurs twice.")
        seen.add(query)
        judged.append((query, row.text("query_text"), graded(row), None))
    if not judged:
        raise ConfigError(f"{path} holds no question; give {_WHAT}.")
    return _task(f"loft/{loft_name(folder)}", judged, passages, {passage.passage_id for passage in passages})


def loft_name(folder: Path) -> str:
    """The last two parts of the path: a LOFT folder is named by its length, its parent by the data set (nq/128k)."""
    return "/".join(folder.resolve().parts[-2:])


def loft_queries(folder: Path, split: str | None) -> Path:
    """The file of queries. LOFT calls it `test_queries.jsonl`; `test.jsonl` is accepted too."""
    wanted = [split] if split else [SPLIT, "dev"]
    choices = [folder / name for part in wanted for name in (f"{part}_queries.jsonl", f"{part}.jsonl")]
    return next((path for path in choices if path.exists()), choices[0])


def graded(row: FileRow) -> dict[str, float]:
    """The grades, from pairs of [pid, score] in `answers` (retrieval tasks) or `metadata.qrels` (RAG tasks)."""
    metadata = row.values.get("metadata")
    for found in (row.values.get("answers"), metadata.get("qrels") if isinstance(metadata, dict) else None):
        if isinstance(found, list) and all(map(_is_pair, found)):
            return {str(pair[0]): float(pair[1]) for pair in found}
    raise ConfigError(f'{row.where}: "answers" (or "metadata.qrels") must be a list of [pid, score].')


def _is_pair(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and isinstance(value[0], (str, int))
        and isinstance(value[1], (int, float))
        and math.isfinite(value[1])
    )


def passages_of(path: Path, name: str, title: str, text: str) -> list[Passage]:
    """The passages of a corpus. A passage is its title and text, joined as in BEIR."""
    found: dict[str, Passage] = {}
    for row in rows(path, _WHAT):
        passage_id = row.name(name)
        if passage_id in found:
            raise ConfigError(f"{row.where}: the {name} {passage_id!r} occurs twice.")
        whole = f"{row.text(title, default='')} {row.text(text, default='')}".strip()
        found[passage_id] = Passage(passage_id=passage_id, text=whole)
    if not found:
        raise ConfigError(f"{path} holds no passage; give {_WHAT}.")
    return list(found.values())


def _task(
    name: str,
    judged: Iterable[tuple[str, str, dict[str, float], str | None]],
    passages: list[Passage],
    known: set[str],
) -> RetrievalTask:
    """Judged passages that are not in the corpus stay relevant and count as not found, as in trec_eval."""
    judgements, unjudged, absent = [], [], 0
    for query, question, grades, excluded in judged:
        relevant = {passage: grade for passage, grade in grades.items() if grade > 0 and passage != excluded}
        absent += sum(passage not in known for passage in relevant)
        if not relevant or not question.strip():
            unjudged.append(query)
            continue
        judgements.append(
            RetrievalQuestion(question_id=query, question=question.strip(), relevant=relevant, excluded=excluded)
        )
    notes = [f"{absent} relevant passages are not in the corpus and count as not found"] if absent else []
    return RetrievalTask(name=name, judgements=judgements, unjudged=unjudged, passages=passages, notes=notes)


FORMATS: dict[str, Callable[[Path, str | None], RetrievalTask]] = {"beir": _beir, "loft": _loft}
