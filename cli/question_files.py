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
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import typer

from ragkv.cli.console import count, echo, note, percent_bar, print_json
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
    """A question. `options` are the line's options of `RagKV.query`, `context` the texts that it is asked about."""

    number: int
    where: str
    id: str | int | None
    text: str
    options: Mapping[str, Any]
    context: Sequence[str] = ()

    @property
    def engine(self) -> str:
        return str(self.options["engine"])

    @property
    def key(self) -> str:
        return _key(self.id, self.text, self.engine)


def _key(own: Any, text: str, engine: str) -> str:
    """The key of a question and its answer: the id, else the text and the engine; as JSON, where `1` is not `"1"`."""
    return json.dumps([own] if own is not None else [own, text, engine])


def read_questions(path: Path, engine: str) -> tuple[list[QuestionLine], list[dict[str, Any]]]:
    """The questions, and where and why a line is none. `engine` answers the lines that name none.

    Raises ConfigError if the file cannot be read, or if no line is a question.
    """
    lines: list[QuestionLine] = []
    bad: list[dict[str, Any]] = []
    ids: dict[str, str] = {}
    try:
        with path.open("rb") as file:
            rows = [*file]  # bytes, so that a wrong encoding affects one line
    except FileNotFoundError:
        raise ConfigError(f"No such file: {path}; give a JSONL file of questions.") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({refusal(error)}); give a JSONL file of questions.") from error
    for number, row in enumerate(rows, start=1):
        where, text = f"{path}, line {number}", row.removeprefix(b"\xef\xbb\xbf" if number == 1 else b"").strip()
        if not text:
            continue
        try:
            line = _line(text, number, where, engine)
            if line.id is not None and ids.setdefault(line.key, where) != where:
                raise ConfigError(f"the id {line.id!r} is that of {ids[line.key]} too; give each line its own.")
        except UsageError as error:
            bad.append({"where": where, "line": number, "error": str(error)})
        else:
            lines.append(line)
    if not lines:
        why = (
            f". {bad[0]['where']}: {bad[0]['error']}" if bad else '; write one JSON object per line: {"question": "…"}.'
        )
        raise ConfigError(f"{path} holds no question{why}")
    return lines, bad


def _line(row: bytes, number: int, where: str, engine: str) -> QuestionLine:
    try:
        values = parse_json(row.decode("utf-8"))
    except UnicodeDecodeError:
        raise ConfigError("not valid UTF-8.") from None
    except ValueError as error:
        raise ConfigError(f"not valid JSON ({error}).") from None
    if not isinstance(values, dict):
        raise ConfigError("a line is an object in braces.")
    own, text = values.get("id"), values.get("question")
    if not (own is None or isinstance(own, str) or type(own) is int):
        raise ConfigError('"id" is a text or a whole number.')
    if not isinstance(text, str) or not text.strip():
        raise ConfigError('a line is an object with a "question" that is not empty.')
    options: dict[str, Any] = {"engine": engine}
    for option in at_door(question_options(), "file"):
        value = values.get(option.name)
        if value is not None and option.is_list:
            value = _texts(option.name, value)
        elif value is not None and (wanted := option.refusal(value)):
            raise ConfigError(f'"{option.name}" must be {wanted}, not {shortened(value)}.')
        options |= {} if value is None else {option.name: value}
    context = values.get("context")
    context = () if context is None else _texts("context", context)
    return QuestionLine(number=number, where=where, id=own, text=text.strip(), options=options, context=context)


def _texts(name: str, value: Any) -> tuple[str, ...]:
    """A text, or a list of texts."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) and t.strip() for t in texts):
        raise ConfigError(f'"{name}" is a text that is not blank, or a list of such texts.')
    return tuple(texts)


def questions_of_log(
    rag: RagKV, path: Path, engine: str | None = None, options: Mapping[str, Any] | None = None, *, quiet: bool
) -> list[dict[str, Any]]:
    """The questions of the file with their options; a question with texts of its own reads nothing from the index."""
    lines, bad = read_questions(path, engine or rag.config.default_engine)
    for line in bad if not quiet else ():
        note(f"{line['where']}: {line['error']}")
    return [{**(options or {}), **line.options, "question": line.text} for line in lines if not line.context]


_BEGINNINGS = (b'{"id": ', b'{"question": ')


class AnswerFile:
    """The answers to `lines` at `path`; a context manager. `answered` are the numbers of lines with an answer already.

    Each answer is appended by one write, so that a kill truncates at most the last line, which the next run removes. If
    a question failed in an earlier run, its answer comes after later ones; at the end the file is sorted. One process
    writes at a time. Raises UsageError, leaving the file unchanged, if it cannot be used or holds something else.
    """

    def __init__(self, path: Path, lines: Sequence[QuestionLine]) -> None:
        self._path = path
        with self._writable():
            self._file = open_plain(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        try:
            with self._writable():
                self._numbers = self._resume(lines)
        except BaseException:
            os.close(self._file)
            raise
        self.answered = frozenset(self._numbers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and self._numbers != sorted(self._numbers):
                with self._writable():
                    rows = read_plain(self._path).split(b"\n")
                    ordered = sorted(zip(self._numbers, rows, strict=False), key=itemgetter(0))
                    replace_plain(self._path, b"".join(row + b"\n" for _, row in ordered))
        finally:
            os.close(self._file)

    @contextmanager
    def _writable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UsageError(f"{self._path} cannot be written ({error.strerror}); choose another --output.") from error

    def add(self, line: QuestionLine, answer: Answer) -> None:
        """Append the answer to a question."""
        own: dict[str, Any] = {} if line.id is None else {"id": line.id}
        with self._writable():
            self._write((json_text(own | answer.to_json()) + "\n").encode())
        self._numbers.append(line.number)

    def _write(self, text: bytes) -> None:
        while text:  # on a nearly full disk, a write may be partial
            text = text[os.write(self._file, text) :]

    def _resume(self, lines: Sequence[QuestionLine]) -> list[int]:
        """Check the answers in the file, cut off a truncated last one, and return the numbers of their lines."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"Another ragkv query is writing to {self._path}; wait until it has finished, or choose another "
                "--output."
            ) from None
        waiting: dict[str, deque[QuestionLine]] = defaultdict(deque)
        for line in lines:
            waiting[line.key].append(line)
        content = read_plain(self._path)
        *rows, tail = content.split(b"\n")
        cut = len(tail) if _is_cut(tail) else 0
        rows += [] if cut or not tail else [tail]
        numbers = [self._answers(f"{self._path}:{at}", row, lines, waiting) for at, row in enumerate(rows, start=1)]
        os.ftruncate(self._file, len(content) - cut)
        if tail and not cut:
            self._write(b"\n")
        return numbers

    def _answers(
        self, where: str, row: bytes, lines: Sequence[QuestionLine], waiting: Mapping[str, deque[QuestionLine]]
    ) -> int:
        """The number of the question that a row answers."""
        try:
            values = parse_json(row.decode())
            own, text, engine = values.get("id"), values["question"], values["engine"]
            asked = waiting.get(_key(own, text, engine))
        except (ValueError, TypeError, KeyError, AttributeError):
            raise UsageError(
                f"{where} is no answer of ragkv query, so nothing is added to it; choose another --output."
            ) from None
        same = asked or [line for line in lines if own is None and line.id is None and line.text == text]
        if not same or same[0].text != text:
            raise UsageError(
                f"{where} answers a question that is not in the file of questions; choose another --output."
            )
        line = same[0]
        if line.engine != engine:
            raise UsageError(
                f"{where} was answered by engine {engine}, not {line.engine}; ask with --engine {engine}, or choose "
                "another --output."
            )
        if asked and len(asked) > 1:
            asked.popleft()
        return line.number


def _is_cut(tail: bytes) -> bool:
    """Whether a last line without a newline is a truncated answer, and nothing else."""
    if not tail or not any(tail[: len(beginning)] == beginning[: len(tail)] for beginning in _BEGINNINGS):
        return False
    try:
        parse_json(tail.decode())
    except ValueError:
        return True
    return False


def answer_all(
    rag: RagKV | Contexts, questions: Path, output: Path, *, engine: str, options: Mapping[str, Any], silent: bool
) -> dict[str, Any]:
    """Answer every question of a JSONL file that has no answer in `output` yet; the counts, as `--json` prints them.

    They are answered together; each answer is written, in order, once those before it are written. A bad line or a
    failed question is listed in `failed`, and the others continue. Raises ConfigError if no line is a question, and
    UsageError if `output` cannot be written, or holds answers of another engine or to other questions.
    """
    lines, failed = read_questions(questions, engine)
    total, kv, tokens, seconds = len(lines) + len(failed), Counter[str](), 0, 0.0
    with AnswerFile(output, lines) as file, percent_bar(silent) as show:
        waiting = [line for line in lines if line.number not in file.answered]
        before, answered = len(lines) - len(waiting), 0
        with rag.query_each(_asked(rag, waiting), **options) as results:
            if waiting:
                _ = rag.model  # loading is not part of the answers' time
            started = time.perf_counter()
            ready: dict[int, Any] = {}
            following = 0
            for result in results:
                ready[result.number] = result
                tokens += result.tokens
                while (finished := ready.pop(following, None)) is not None:
                    line = waiting[following]
                    following += 1
                    if finished.answer is None:
                        error = finished.error
                        why = str(error) if isinstance(error, RagkvError) else f"{type(error).__name__}: {error}"
                        failed.append({"where": line.where, "line": line.number, "question": line.text, "error": why})
                        continue
                    file.add(line, finished.answer)
                    answered += 1
                    kv.update(asdict(finished.answer.kv))
                seconds = time.perf_counter() - started
                if show is not None:
                    show("query", before + len(failed) + answered, total, _rate(answered, tokens, seconds))
    return {
        "output": str(output),
        "questions": total,
        "kept": before,
        "answered": answered,
        "failed": sorted(failed, key=itemgetter("line")),
        "kv": {name: kv[name] for name in ("hits", "misses", "bytes", "tokens", "memory_hits")},
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "questions_per_second": round(answered / max(seconds, 1e-9), 3),
        "tokens_per_second": round(tokens / max(seconds, 1e-9), 3),
    }


def _rate(answered: int, tokens: int, seconds: float) -> str:
    seconds = max(seconds, 1e-9)
    return f"{answered / seconds:,.1f} questions/s, {tokens / seconds:,.0f} tokens/s"


def show_counts(counts: Mapping[str, Any], *, as_json: bool, quiet: bool) -> None:
    """Print the counts of `answer_all`; exit with 1 if a line has no answer."""
    failed, answered, seconds, kv = (counts[name] for name in ("failed", "answered", "seconds", "kv"))
    if as_json:
        print_json(counts)
    else:
        for line in failed:
            note(f"{line['where']}: {line['error']}")
    if not (as_json or quiet):
        parts = [
            f"{counts['output']}: {count(answered, 'answer')} in {seconds:.1f} s"
            + (f" ({_rate(answered, counts['tokens'], seconds)})" if answered else ""),
            f"{counts['kept']} answered before" if counts["kept"] else "",
            f"{len(failed)} failed" if failed else "",
        ]
        used = f"KV of {count(kv['hits'], 'chunk')} used, {kv['hits'] - kv['memory_hits']} read from the store"
        echo(", ".join(filter(None, parts)) + (f"; {used}." if kv["hits"] else "."))
    if failed:
        raise typer.Exit(1)


def _asked(rag: RagKV | Contexts, lines: Iterable[QuestionLine]) -> Iterator[dict[str, Any]]:
    """The questions as `query_each` takes them; a line's own context is tokenised when its turn comes."""
    from ragkv.index.contexts import given_chunk

    @lru_cache(64)  # lines about the same text are often adjacent
    def chunk(text: str) -> Chunk:
        return rag.chunk(text, chunk_id=f"context-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}")

    for line in lines:
        asked: dict[str, Any] = {"question": line.text, **line.options}
        if line.context:
            own = [given_chunk(chunk(text), f"context {number}") for number, text in enumerate(line.context, start=1)]
            asked |= {"steps": 1, "chunks": own[::-1]}  # best first: the engine puts the last one next to the question
        yield asked
