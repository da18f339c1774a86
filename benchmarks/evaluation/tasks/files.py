"""Load benchmarks: tasks from files of LOFT, LongBench v1, RULER and ragkv's own, retrieval from BEIR's and LOFT's.

A file is read once, line by line, and only the examples that will be asked are kept. Long texts are cut into chunks at
the benchmark's own marks, else like an ingested file.

- LOFT (RAG tasks): a LOFT prompt holds the whole corpus (32k, 128k or 1M tokens). Here a question has its gold passages
  and a seeded sample of the others in random order, so that any model can be asked. The metrics are those in the table
  of data sets in google-deepmind/loft's README ("multi_value_rag" is `loft_multi`).
- LongBench v1 (`hotpotqa.jsonl`, `hotpotqa_e.jsonl`): metrics, answer lengths and marks are those of THUDM/LongBench
  `LongBench/eval.py` (dataset2metric), `config/dataset2maxlen.json` and `config/dataset2prompt.json`. Instructions are
  shortened, and the text comes first, as in every prompt of ragkv. LongBench cuts out the middle for models with a
  short context; here texts are not truncated, because chunks can be retrieved. The kind of a LongBench-E example is
  its class of length.
- RULER (`niah_single_1/validation.jsonl`): the haystack is cut out of the prompt's template. A file does not name its
  task, so the family is recognised by its template; `index` is not an id (niah writes the place of its answer there),
  so examples are numbered. The templates are those of NVIDIA/RULER `scripts/data/synthetic/constants.py` with
  `--model_template_type base`, the metrics those of `scripts/eval/synthetic/constants.py`. The head of the template,
  which announces the question, is left out. A worked example before it (vt, cwe) and the beginning of the answer
  become part of the question.
- BEIR, for retrieval: `corpus.jsonl` (`_id`, `title`, `text`), `queries.jsonl` (`_id`, `text`), `qrels/SPLIT.tsv`
  (query-id, corpus-id, score, under a header). A LOFT folder is read for retrieval too: `corpus.jsonl` (`pid`,
  `title_text`, `passage_text`), `SPLIT_queries.jsonl` (`qid`, `query_text`, and `answers` or `metadata.qrels` as lists
  of [pid, score]).
"""

from __future__ import annotations

import logging
import math
import random
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from ragkv.doctor.io import FileRow, lines, question_of, rows
from ragkv.doctor.metrics import (
    Example,
    Passage,
    RetrievalQuestion,
    RetrievalTask,
    Task,
    metric_of,
    paragraph_number,
)
from ragkv.errors import ConfigError, RetrievalError, UsageError
from ragkv.util import batches


def estimated_tokens(text: str) -> int:
    """Four bytes of UTF-8 per token, which is good enough to cut English, code and Chinese without a tokenizer."""
    return -(-len(text.encode("utf-8", "replace")) // 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutter:
    """Cuts texts into chunks of about `chunk_tokens`, counted by `count_tokens`."""

    chunk_tokens: int
    count_tokens: Callable[[str], int] = estimated_tokens

    def prose(self, text: str) -> tuple[str, ...]:
        """Chunks of at most `chunk_tokens`, cut at paragraphs, lines, sentences and words, in that order."""
        from ragkv.ingest.chunker import split_text
        from ragkv.ingest.parser import Section
        from ragkv.ingest.sandbox import SourceText

        if not text.strip():
            return ()
        whole = Section(start=0, end=len(text))
        source = SourceText(text=text, content_hash="", title=None, sections=(whole,))
        chunks = split_text(source, count_tokens=self.count_tokens, max_tokens=self.chunk_tokens)
        return tuple(chunk.text for chunk in chunks)

    def code(self, text: str) -> tuple[str, ...]:
        """Chunks of whole lines up to `chunk_tokens`, which join to the text with its indentation."""
        return tuple(chunk for chunk in self._packed(text.splitlines(keepends=True)) if chunk.strip())

    def passages(self, text: str, mark: re.Pattern[str]) -> tuple[str, ...]:
        """A chunk of any size from each `mark` to the next; cut as prose if the text has no mark."""
        parts = _marked(text, mark)
        return tuple(part.strip() for part in parts) if parts else self.prose(text)

    def examples(self, text: str, mark: re.Pattern[str]) -> tuple[str, ...]:
        """Like `passages` for a prompt's worked examples, but short ones share a chunk."""
        parts = _marked(text, mark)
        return tuple(chunk.strip() for chunk in self._packed(parts)) if parts else self.prose(text)

    def _packed(self, units: Iterable[str]) -> Iterator[str]:
        """Join neighbours up to `chunk_tokens`. A longer unit stays whole."""
        return map("".join, batches(units, self.count_tokens, self.chunk_tokens))


def _marked(text: str, mark: re.Pattern[str]) -> list[str]:
    """The text cut before each mark, without blank parts; [] if there is no mark."""
    starts = [found.start() for found in mark.finditer(text)]
    if not starts:
        return []
    edges = [0, *starts, len(text)]
    parts = [text[start:end] for start, end in pairwise(edges)]
    return [part for part in parts if part.strip()]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
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
    rows: Iterator[FileRow]
    example: Callable[[int, FileRow], Example]
    max_new_tokens: int
    seeded: bool = False


LOFT_METRICS = {
    "nq": "subspan_em",
    "topiocqa": "subspan_em",
    "hotpotqa": "subspan_em",
    "musique": "subspan_em",
    "qampari": "loft_multi",
    "quest": "loft_multi",
    "romqa": "loft_multi",
}
"""By data set; others use `subspan_em`."""

_TOKENS = {"subspan_em": 64, "loft_multi": 256}
_LOFT_FOLDER = "the folder of a LOFT RAG task"


def loft_file(folder: Path, reading: ReadOptions) -> TaskFile:
    """`corpus.jsonl` and `SPLIT_queries.jsonl`; the split is "test", or "dev" where there is none."""
    passages = passages_of(folder / "corpus.jsonl", "pid", "title_text", "passage_text")
    texts = {passage.passage_id: passage.text for passage in passages}
    ids = list(texts)

    def example(ordinal: int, row: FileRow) -> Example:
        query = row.name("qid")
        answers = _answers(row)
        relevant = [passage for passage, grade in graded(row).items() if grade > 0]
        for passage in relevant:
            if passage not in texts:
                raise ConfigError(
                    f'{row.where}: "metadata.qrels" names the passage {passage!r}, which corpus.jsonl does not have.'
                )
        if not relevant:
            raise ConfigError(f'{row.where}: "metadata.qrels" names no passage with a score above 0.')
        # The seed includes the question's id, so the draw does not depend on which other questions are asked.
        rng = random.Random(f"{reading.seed}/{query}")
        wanted = min(max(reading.chunks, len(relevant)), len(ids))
        gold = set(relevant)
        drawn = rng.sample(ids, wanted)  # at least wanted - len(gold) of these are not gold
        chosen = relevant + [passage for passage in drawn if passage not in gold][: wanted - len(relevant)]
        rng.shuffle(chosen)
        return Example(
            example_id=query,
            question=row.text("query_text").strip(),
            chunks=tuple(texts[passage] for passage in chosen),
            answers=answers,
            needed=tuple(i for i, passage in enumerate(chosen) if passage in gold),
        )

    name = loft_name(folder)
    metric = next((LOFT_METRICS[part] for part in reversed(name.split("/")) if part in LOFT_METRICS), "subspan_em")
    return TaskFile(
        name=f"loft/{name}",
        metric=metric,
        rows=rows(loft_queries(folder, reading.split), _LOFT_FOLDER),
        example=example,
        max_new_tokens=_TOKENS[metric],
        seeded=True,
    )


def _answers(row: FileRow) -> tuple[str, ...]:
    value = row.values.get("answers")
    if isinstance(value, list) and any(isinstance(item, list) for item in value):
        raise ConfigError(
            f'{row.where}: "answers" holds lists, as LOFT\'s retrieval and conversation tasks do; '
            "give a RAG task of one turn, or measure retrieval with `python -m ragkv.benchmarks.evaluation retrieval`."
        )
    return row.texts("answers")


_TABLES = tomllib.loads(Path(__file__).with_name("files.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """How the questions of a data set are asked and judged. `metric` is None if ragkv does not have it.

    The pattern `mark` begins a passage, or with `shots` a worked example. `code` is cut at lines.
    """

    metric: str | None = None
    tokens: int
    ask: str
    mark: str | None = None
    shots: bool = False
    code: bool = False

    def chunks(self, text: str, cutter: Cutter) -> tuple[str, ...]:
        if self.code:
            return cutter.code(text)
        if self.mark is None:
            return cutter.prose(text)
        return (cutter.examples if self.shots else cutter.passages)(text, re.compile(self.mark, re.MULTILINE))


LONGBENCH = {name: DataSet(**fields) for name, fields in _TABLES["longbench"].items()}


def longbench_file(path: Path, found: Iterator[FileRow], reading: ReadOptions) -> TaskFile:
    """Read a file. Its data set is the "dataset" of its first line, or else the file's name."""
    first = next(found)
    named = first.text("dataset", default="") or path.stem
    data_set = LONGBENCH.get(named.removesuffix("_e"))
    if data_set is None:
        raise ConfigError(
            f"{first.where}: {named!r} is no data set of LongBench v1; these are: {', '.join(LONGBENCH)}."
        )
    by_length = path.stem.endswith("_e") or named.endswith("_e")

    def example(ordinal: int, row: FileRow) -> Example:
        answers = row.texts("answers", blank=True)
        if data_set.metric == "retrieval":
            for answer in answers:
                if paragraph_number(answer) is None:
                    raise ConfigError(f'{row.where}: an answer must be as "Paragraph 7", not {answer!r}.')
        classes = row.texts("all_classes") if data_set.metric == "classification" else ()
        chunks = data_set.chunks(row.text("context"), reading.cutter)
        return Example(
            example_id=row.name("_id"),
            question=data_set.ask.replace("{input}", row.text("input", default="")).strip(),
            chunks=chunks,
            answers=answers,
            kind=_length_class(row) if by_length else "",
            needed=_gold_paragraphs(chunks, answers) if data_set.metric == "retrieval" else (),
            classes=classes,
        )

    name = f"{named.removesuffix('_e')}{'_e' if by_length else ''}"
    return TaskFile(
        name=f"longbench/{name}",
        metric=data_set.metric,
        rows=chain([first], found),
        example=example,
        max_new_tokens=data_set.tokens,
    )


def _gold_paragraphs(chunks: tuple[str, ...], answers: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(i for i, chunk in enumerate(chunks) if chunk.split(":")[0].split("：")[0] in answers)


def _length_class(row: FileRow) -> str:
    """The class of length as in LongBench-E's scorer, by the file's own count of words."""
    length = row.values.get("length")
    if not isinstance(length, int) or isinstance(length, bool):
        raise ConfigError(f'{row.where}: "length" must be a whole number in a LongBench-E file.')
    return "0-4k" if length < 4000 else "4-8k" if length < 8000 else "8k+"


_DOCUMENT = re.compile(r"^Document \d+:", re.MULTILINE)
_SPLITS = ("validation", "test")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTemplate:
    """The tasks of one template: the pattern `head` precedes the haystack, `tail` follows it.

    `found`: the haystack contains the answers.
    """

    metric: str
    tokens: int
    head: str
    tail: str
    found: bool = False


RULER = {name: TaskTemplate(**fields) for name, fields in _TABLES["ruler"].items()}


def ruler_file(path: Path, found: Iterator[FileRow], reading: ReadOptions) -> TaskFile:
    """Read a file. Its family is that of its first prompt."""
    first = next(found)
    family_name, family = _family_of(first)

    def example(ordinal: int, row: FileRow) -> Example:
        text = row.text("input")
        tail = _last(family.tail, text)
        if tail is None:
            raise ConfigError(f'{row.where}: "input" does not end with the question of a {family_name} prompt.')
        head = _last(family.head, text[: tail.start()])
        shot = text[: head.start()].strip() if head else ""
        haystack = text[head.end() if head else 0 : tail.start()]
        outputs = row.texts("outputs")
        cutter = reading.cutter
        chunks = cutter.passages(haystack, _DOCUMENT) if family_name == "qa" else cutter.prose(haystack)
        ending = f"{text[tail.start() :].strip()} {row.text('answer_prefix', default='').strip()}".strip()
        return Example(
            example_id=str(ordinal),
            question=f"{shot}\n\n{ending}".strip(),
            chunks=chunks,
            answers=outputs,
            needed=tuple(i for i, chunk in enumerate(chunks) if any(output in chunk for output in outputs))
            if family.found
            else (),
        )

    name = path.parent.resolve().name if path.stem in _SPLITS else path.stem
    return TaskFile(
        name=f"ruler/{name}",
        metric=family.metric,
        rows=chain([first], found),
        example=example,
        max_new_tokens=family.tokens,
    )


def _family_of(row: FileRow) -> tuple[str, TaskTemplate]:
    """The family whose question comes last in the prompt, because a haystack may contain the words of others."""
    text = row.text("input")
    ends = [(found.start(), name) for name, family in RULER.items() if (found := _last(family.tail, text))]
    if not ends:
        raise ConfigError(
            f'{row.where}: "input" has no question of a RULER template ({", ".join(RULER)}); '
            "write other prompts as --format ragkv."
        )
    name = max(ends)[1]
    return name, RULER[name]


def _last(pattern: str, text: str) -> re.Match[str] | None:
    last = None
    for last in re.finditer(pattern, text):  # noqa: B007 - the last one is what is wanted
        pass
    return last


_OWN_TOKENS = 64


def own_file(path: Path, found: Iterator[FileRow], reading: ReadOptions) -> TaskFile:
    """Read a file with the keys `question`, `chunks` and `answers` (or `answer`), and optionally `id` (default: the
    line's number), `kind`, `needed` and `classes`. Chunks are not cut."""

    def example(ordinal: int, row: FileRow) -> Example:
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

    return TaskFile(name=path.stem, metric="contains", rows=found, example=example, max_new_tokens=_OWN_TOKENS)


def _needed(row: FileRow, chunks: int) -> tuple[int, ...]:
    value = row.values.get("needed", [])
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item < chunks for item in value):
        raise ConfigError(f'{row.where}: "needed" must be a list of places in "chunks", from 0 to {chunks - 1}.')
    return tuple(value)


FORMATS = ("loft", "longbench", "ruler", "ragkv")
_READERS: dict[str, Callable[[Path, Iterator[FileRow], ReadOptions], TaskFile]] = {
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
    reading = ReadOptions(cutter=cutter, chunks=chunks, seed=seed, split=split)
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


def _files(path: Path, format: str | None, reading: ReadOptions) -> Iterator[TaskFile]:
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


def _file(path: Path, format: str | None, reading: ReadOptions) -> TaskFile:
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


def _task(file: TaskFile, metric: str, reading: ReadOptions, limit: int | None) -> Task:
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


def _check(example: Example, row: FileRow, seen: set[str]) -> None:
    if not example.question:
        raise ConfigError(f"{row.where}: the question is blank.")
    if not example.chunks:
        raise ConfigError(f"{row.where}: there is no text to read; give at least one chunk.")
    if example.example_id in seen:
        raise ConfigError(f"{row.where}: the id {example.example_id!r} occurs twice.")
    seen.add(example.example_id)


def _drawn(found: Iterable[tuple[int, FileRow]], limit: int | None, seed: int) -> Iterable[tuple[int, FileRow]]:
    """At most `limit` items in their order, each with the same probability, holding no more than that (algorithm R)."""
    if limit is None:
        return found
    rng = random.Random(seed)
    held: list[tuple[int, FileRow]] = []
    for item in found:
        if len(held) < limit:
            held.append(item)
        elif (place := rng.randrange(item[0])) < limit:
            held[place] = item
    return sorted(held, key=lambda item: item[0])


_SPLIT = "test"
_CORPUS = "corpus.jsonl"
_BENCHMARK = "the folder of a BEIR or LOFT benchmark"


def read_benchmark(folder: Path, *, layout: str | None = None, split: str | None = None) -> RetrievalTask:
    """Read the folder of a benchmark. `layout` is "beir" or "loft"; None derives it from the files.

    The default `split` is "test", or "dev" if a LOFT folder has no test. Raises ConfigError, which names file and line,
    if something cannot be read, and RetrievalError if no question has a relevant passage.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; give {_BENCHMARK}.")
    name = layout or _layout(folder)
    if name not in _LAYOUTS:
        raise UsageError(f"--format must be one of {', '.join(_LAYOUTS)} for a folder, not {name!r}.")
    task = _LAYOUTS[name](folder, split)
    if not task.judgements:
        raise RetrievalError(f"No question of {folder} has a relevant passage; check its files or choose --split.")
    return task


def _layout(folder: Path) -> str:
    if (folder / "queries.jsonl").exists() or (folder / "qrels").is_dir():
        return "beir"
    if loft_queries(folder, None).exists():
        return "loft"
    raise UsageError(
        f"{folder} looks like no benchmark; BEIR has {_CORPUS}, queries.jsonl and qrels/{_SPLIT}.tsv, "
        f"LOFT has {_CORPUS} and {_SPLIT}_queries.jsonl."
    )


def _beir(folder: Path, split: str | None) -> RetrievalTask:
    passages = passages_of(folder / _CORPUS, "_id", "title", "text")
    known = {passage.passage_id for passage in passages}
    questions: dict[str, str] = {}
    for row in rows(folder / "queries.jsonl", _BENCHMARK):
        if questions.setdefault(row.name("_id"), row.text("text")) != row.text("text"):
            raise ConfigError(f"{row.where}: the _id {row.name('_id')!r} occurs twice.")
    path = folder / "qrels" / f"{split or _SPLIT}.tsv"
    if not path.exists() and (others := sorted(other.stem for other in path.parent.glob("*.tsv"))):
        raise ConfigError(f"No such file: {path}; choose --split {' or '.join(others)}.")
    grades: dict[str, dict[str, float]] = {}
    for where, query, passage, grade in _qrels(path):
        if query not in questions:
            raise ConfigError(f"{where}: {folder / 'queries.jsonl'} has no query {query!r}.")
        grades.setdefault(query, {})[passage] = grade
    # ArguAna's and Quora's queries are in the corpus under the same id; BEIR takes them out of every ranking.
    judged = ((query, questions[query], found, query if query in known else None) for query, found in grades.items())
    return _retrieval_task(f"beir/{folder.resolve().name}", judged, passages, known)


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


def _loft(folder: Path, split: str | None) -> RetrievalTask:
    passages = passages_of(folder / _CORPUS, "pid", "title_text", "passage_text")
    path = loft_queries(folder, split)
    seen: set[str] = set()
    judged: list[tuple[str, str, dict[str, float], None]] = []
    for row in rows(path, _BENCHMARK):
        query = row.name("qid")
        if query in seen:
            raise ConfigError(f"{row.where}: the qid {query!r} occurs twice.")
        seen.add(query)
        judged.append((query, row.text("query_text"), graded(row), None))
    if not judged:
        raise ConfigError(f"{path} holds no question; give {_BENCHMARK}.")
    return _retrieval_task(f"loft/{loft_name(folder)}", judged, passages, {passage.passage_id for passage in passages})


def loft_name(folder: Path) -> str:
    """The last two parts of the path: a LOFT folder is named by its length, its parent by the data set (nq/128k)."""
    return "/".join(folder.resolve().parts[-2:])


def loft_queries(folder: Path, split: str | None) -> Path:
    """The file of queries. LOFT calls it `test_queries.jsonl`; `test.jsonl` is accepted too."""
    wanted = [split] if split else [_SPLIT, "dev"]
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
    for row in rows(path, _BENCHMARK):
        passage_id = row.name(name)
        if passage_id in found:
            raise ConfigError(f"{row.where}: the {name} {passage_id!r} occurs twice.")
        whole = f"{row.text(title, default='')} {row.text(text, default='')}".strip()
        found[passage_id] = Passage(passage_id=passage_id, text=whole)
    if not found:
        raise ConfigError(f"{path} holds no passage; give {_BENCHMARK}.")
    return list(found.values())


def _retrieval_task(
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


_LAYOUTS: dict[str, Callable[[Path, str | None], RetrievalTask]] = {"beir": _beir, "loft": _loft}
