"""`ragkv query --questions`: answer the questions of a file together.

A bad line is reported with its number, and the other lines are still read. Answers are written in the order of the
questions, so that a stopped run can be resumed; a half-written last line is removed then.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import typer

from ragkv.cli.console import count, echo, note, percent_bar, print_json
from ragkv.doctor.io import FileRow, question_of
from ragkv.errors import ConfigError, RagkvError, UsageError
from ragkv.question import question_options
from ragkv.types import Answer
from ragkv.util.display import json_text
from ragkv.util.files import open_plain, parse_json, read_plain, refusal, replace_plain, shortened
from ragkv.util.options import at_door

if TYPE_CHECKING:
    from ragkv.index.contexts import Contexts
    from ragkv.pipeline import RagKV
    from ragkv.types import Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionLine:
    """A question. `id` is None if the line has none; `engine` is the line's own, or the one for all.

    `options` are the line's options of `RagKV.query`, `context` the texts that it is asked about.
    """

    number: int
    where: str
    id: str | int | None
    text: str
    engine: str
    options: Mapping[str, Any] = field(default_factory=dict)
    context: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The key under which its answer is found again. It is JSON, because `1` and `"1"` are different ids."""
        return answer_key(self.id, self.text, self.engine)


@dataclass(frozen=True, slots=True, kw_only=True)
class BadLine:
    """A line that is not a question, and the reason."""

    number: int
    where: str
    error: str


def answer_key(own: Any, text: str, engine: str) -> str:
    """The key of an answer and its question: the id, else the text and the engine."""
    return json.dumps([own] if own is not None else [own, text, engine])


def read_questions(path: Path, engine: str) -> tuple[list[QuestionLine], list[BadLine]]:
    """The questions and the bad lines, in order. `engine` answers the lines that name none.

    Raises ConfigError if the file cannot be read, or if no line is a question.
    """
    lines: list[QuestionLine] = []
    bad: list[BadLine] = []
    seen: dict[str, str] = {}
    for number, raw in _lines(path):
        where = f"{path}, line {number}"
        try:
            line = _line(FileRow(_values(raw), where), number, engine)
            if line.id is not None and line.key in seen:
                raise ConfigError(f"the id {line.id!r} is that of {seen[line.key]} too; give each line its own.")
        except UsageError as error:
            bad.append(BadLine(number=number, where=where, error=str(error).removeprefix(f"{where}: ")))
            continue
        seen[line.key] = where
        lines.append(line)
    if not lines and bad:
        raise ConfigError(f"{path} holds no question. {bad[0].where}: {bad[0].error}")
    if not lines:
        raise ConfigError(f'{path} holds no question; write one JSON object per line: {{"question": "…"}}.')
    return lines, bad


def questions_of_log(
    rag: RagKV, path: Path, engine: str | None = None, options: Mapping[str, Any] | None = None, *, quiet: bool
) -> list[dict[str, Any]]:
    """The questions of the file with their options; a question with texts of its own reads nothing from the index."""
    lines, bad = read_questions(path, engine or rag.config.default_engine)
    for line in bad if not quiet else ():
        note(f"{line.where}: {line.error}")
    return [{**(options or {}), **line.options, "question": line.text} for line in lines if not line.context]


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, numbered from 1. They stay bytes, so that a wrong encoding affects one line."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                line = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
                if line.strip():
                    yield number, line.strip()
    except FileNotFoundError:
        raise ConfigError(f"No such file: {path}; give a JSONL file of questions.") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({refusal(error)}); give a JSONL file of questions.") from error


def _values(raw: bytes) -> dict[str, Any]:
    try:
        values = parse_json(raw.decode("utf-8"))
    except UnicodeDecodeError:
        raise ConfigError("not valid UTF-8.") from None
    except ValueError as error:
        raise ConfigError(f"not valid JSON ({error}).") from None
    if not isinstance(values, dict):
        raise ConfigError("a line is an object in braces.")
    return values


def _line(row: FileRow, number: int, engine: str) -> QuestionLine:
    own = row.values.get("id")
    if own is not None and (isinstance(own, bool) or not isinstance(own, (str, int))):
        raise ConfigError('"id" is a text or a whole number.')
    text = question_of(row).text
    options: dict[str, Any] = {}
    for option in at_door(question_options(), "file"):
        value = _texts(row, option.name) if option.is_list else row.values.get(option.name)
        if value is not None:
            if wanted := option.refusal(value):
                raise ConfigError(f'"{option.name}" must be {wanted}, not {shortened(value)}.')
            options[option.name] = value
    own_engine = options.setdefault("engine", engine)
    return QuestionLine(
        number=number,
        where=row.where,
        id=own,
        text=text,
        engine=own_engine,
        options=options,
        context=_texts(row, "context") or (),
    )


def _texts(row: FileRow, name: str) -> tuple[str, ...] | None:
    """A text or a list of texts; None if the line has none."""
    value = row.values.get(name)
    if value is None:
        return None
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) and t.strip() for t in texts):
        raise ConfigError(f'"{name}" is a text that is not blank, or a list of such texts.')
    return tuple(texts)


_BEGINNINGS = (b'{"id": ', b'{"question": ')


class AnswerFile:
    """The answers to `lines` at `path`; a context manager. `kept` are the questions that have an answer already.

    Each answer is appended by one write, so that a kill truncates at most the last line, which the next run removes. If
    a question failed in an earlier run, its answer comes after later ones; at the end the file is sorted. One process
    writes at a time. Raises UsageError, leaving the file unchanged, if it cannot be used or holds something else.
    """

    def __init__(self, path: Path, lines: Sequence[QuestionLine]) -> None:
        self._path = path
        self._places: list[int] = []  # for each answer in the file, the number of its line
        try:
            self._file = open_plain(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            self._lock()
            whole = self._read(lines)
            os.ftruncate(self._file, len(whole))
            if whole and not whole.endswith(b"\n"):
                self._write(b"\n")
        except OSError as error:
            os.close(self._file)
            raise self._unwritable(error) from error
        except BaseException:
            os.close(self._file)
            raise
        self.kept = frozenset(self._places)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._sort()
        finally:
            os.close(self._file)

    def add(self, line: QuestionLine, answer: Answer) -> None:
        """Append the answer to a question."""
        given: dict[str, Any] = {} if line.id is None else {"id": line.id}
        try:
            self._write((json_text(given | answer.to_json()) + "\n").encode())
        except OSError as error:
            raise self._unwritable(error) from error
        self._places.append(line.number)

    def _write(self, text: bytes) -> None:
        while text:  # on a nearly full disk, a write may be partial
            text = text[os.write(self._file, text) :]

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"Another ragkv query is writing to {self._path}; wait until it has finished, or choose another "
                "--output."
            ) from None

    def _read(self, lines: Sequence[QuestionLine]) -> bytes:
        """The complete answers in the file, checked; a truncated last line is left out."""
        waiting: dict[str, deque[QuestionLine]] = defaultdict(deque)
        for line in lines:
            waiting[line.key].append(line)
        texts = {line.text: line for line in lines if line.id is None}
        content = read_plain(self._path)
        *rows, tail = content.split(b"\n")
        cut = bool(tail) and _is_cut(tail)
        if tail and not cut:
            rows.append(tail)
        for number, row in enumerate(rows, start=1):
            self._places.append(self._place(number, row, waiting, texts))
        return content[: len(content) - len(tail)] if cut else content

    def _place(
        self, number: int, row: bytes, waiting: dict[str, deque[QuestionLine]], texts: dict[str, QuestionLine]
    ) -> int:
        """The number of the question that a row answers."""
        where = f"{self._path}:{number}"
        try:
            values = parse_json(row.decode())
            own, text, engine = values.get("id"), values["question"], values["engine"]
            key = answer_key(own, text, engine)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise UsageError(
                f"{where} is no answer of ragkv query, so nothing is added to it; choose another --output."
            ) from None
        asked = waiting.get(key)
        line = asked[0] if asked else texts.get(text) if isinstance(text, str) else None
        if line is None or line.text != text or line.id != own:
            raise UsageError(
                f"{where} answers a question that is not in the file of questions; choose another --output."
            )
        if line.engine != engine:
            raise UsageError(
                f"{where} was answered by engine {engine}, not {line.engine}; ask with --engine {engine}, or choose "
                "another --output."
            )
        if asked is not None and len(asked) > 1:
            asked.popleft()
        return line.number

    def _sort(self) -> None:
        """Put the answers into the order of their questions, if they are not."""
        if self._places == sorted(self._places):
            return
        try:
            rows = read_plain(self._path).split(b"\n")
            order = sorted(range(len(self._places)), key=self._places.__getitem__)
            replace_plain(self._path, b"".join(rows[at] + b"\n" for at in order))
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> UsageError:
        return UsageError(f"{self._path} cannot be written ({error.strerror}); choose another --output.")


def _is_cut(tail: bytes) -> bool:
    """Whether a last line without a newline is a truncated answer, and nothing else."""
    if not any(tail[: len(beginning)] == beginning[: len(tail)] for beginning in _BEGINNINGS):
        return False
    try:
        parse_json(tail.decode())
    except ValueError:
        return True
    return False


_RECENT = 64  # texts of "context" whose tokens are cached, because lines about the same text are often adjacent


@dataclass(slots=True)
class QuestionBatch:
    """The result for a file of questions; `failed` holds the lines without an answer."""

    output: Path
    questions: int
    answered_before: int
    """Questions answered by an earlier run."""
    answered: int = 0
    failed: list[dict[str, Any]] = field(default_factory=list)
    kv: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    """Tokens generated by this run."""
    seconds: float = 0.0

    @property
    def rates(self) -> dict[str, float]:
        """Questions and generated tokens for each second of this run."""
        seconds = max(self.seconds, 1e-9)
        return {
            "questions_per_second": round(self.answered / seconds, 3),
            "tokens_per_second": round(self.tokens / seconds, 3),
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "output": str(self.output),
            "questions": self.questions,
            "kept": self.answered_before,
            "answered": self.answered,
            "failed": self.failed,
            "kv": {name: self.kv[name] for name in ("hits", "misses", "bytes", "tokens", "memory_hits")},
            "tokens": self.tokens,
            "seconds": round(self.seconds, 3),
            **self.rates,
        }

    @property
    def rate(self) -> str:
        """The rates in readable form."""
        rates = self.rates
        return f"{rates['questions_per_second']:,.1f} questions/s, {rates['tokens_per_second']:,.0f} tokens/s"


def answer_all(
    rag: RagKV | Contexts, questions: Path, output: Path, *, engine: str, options: Mapping[str, Any], silent: bool
) -> QuestionBatch:
    """Answer every question of a JSONL file that has no answer in `output` yet.

    They are answered together; each answer is written, in order, once those before it are written. A bad line or a
    failed question is listed in `failed`, and the others continue. Raises ConfigError if no line is a question, and
    UsageError if `output` cannot be written, or holds answers of another engine or to other questions.
    """
    lines, bad = read_questions(questions, engine)
    with AnswerFile(output, lines) as file, percent_bar(silent) as show:
        waiting = [line for line in lines if line.number not in file.kept]
        batch = QuestionBatch(output=output, questions=len(lines) + len(bad), answered_before=len(lines) - len(waiting))
        batch.failed = [{"where": each.where, "line": each.number, "error": each.error} for each in bad]
        with rag.query_each(_asked(rag, waiting), **options) as results:
            if waiting:
                _ = rag.model  # loading is not part of the answers' time
            started = time.perf_counter()
            ready: dict[int, Any] = {}
            following = 0
            for result in results:
                ready[result.number] = result
                batch.tokens += result.tokens
                while (finished := ready.pop(following, None)) is not None:
                    line = waiting[following]
                    following += 1
                    if finished.answer is None:
                        entry = {"where": line.where, "line": line.number, "question": line.text}
                        batch.failed.append(entry | {"error": _payload(finished.error)})
                        continue
                    file.add(line, finished.answer)
                    batch.answered += 1
                    batch.kv.update(asdict(finished.answer.kv))
                batch.seconds = time.perf_counter() - started
                if show is not None:
                    show(
                        "query", batch.answered_before + len(batch.failed) + batch.answered, batch.questions, batch.rate
                    )
    batch.failed.sort(key=itemgetter("line"))
    return batch


def show_batch(batch: QuestionBatch, *, as_json: bool, quiet: bool) -> None:
    """Print the totals; exit with 1 if a line has no answer."""
    if as_json:
        print_json(batch.to_json())
    else:
        for failed in batch.failed:
            note(f"{failed['where']}: {failed['error']}")
        if not quiet:
            read = batch.kv["hits"] - batch.kv["memory_hits"]
            parts = [
                f"{batch.output}: {count(batch.answered, 'answer')} in {batch.seconds:.1f} s"
                + (f" ({batch.rate})" if batch.answered else ""),
                f"{batch.answered_before} answered before" if batch.answered_before else "",
                f"{len(batch.failed)} failed" if batch.failed else "",
            ]
            used = f"KV of {count(batch.kv['hits'], 'chunk')} used, {read} read from the store"
            echo(", ".join(filter(None, parts)) + (f"; {used}." if batch.kv["hits"] else "."))
    if batch.failed:
        raise typer.Exit(1)


def _asked(rag: RagKV | Contexts, lines: Iterable[QuestionLine]) -> Iterator[dict[str, Any]]:
    """The questions as `query_each` takes them; a line's own context is tokenised when its turn comes."""
    from ragkv.index.contexts import given_chunk

    @lru_cache(_RECENT)
    def chunk(text: str) -> Chunk:
        return rag.chunk(text, chunk_id=f"context-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}")

    for line in lines:
        asked: dict[str, Any] = {"question": line.text, **line.options}
        if line.context:
            given = [given_chunk(chunk(text), f"context {at}") for at, text in enumerate(line.context, start=1)]
            asked["steps"] = 1
            asked["chunks"] = given[::-1]  # best first: the engine puts the last one next to the question
        yield asked


def _payload(error: Exception | None) -> str:
    return str(error) if isinstance(error, RagkvError) else f"{type(error).__name__}: {error}"
