"""`ragkv query --questions`: answer the questions of a file, one line each; a run that was stopped can be resumed."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ragkv.boundary.plainfile import open_plain, parse_json, read_plain, require_plain
from ragkv.boundary.visible import json_text
from ragkv.cli.progress import steps
from ragkv.errors import ConfigError, RetrievalError, UsageError
from ragkv.types import Answer

__all__ = ["Batch", "ask_all"]

_BEGINNINGS = ('{"id": ', '{"question": ')


@dataclass(slots=True)
class Batch:
    """The result for a file of questions; `failed` holds the questions without an answer, with their lines."""

    output: Path
    questions: int
    kept: int
    """Answered by an earlier run."""
    answered: int = 0
    failed: list[dict[str, str]] = field(default_factory=list)
    kv: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "output": str(self.output),
            "questions": self.questions,
            "kept": self.kept,
            "answered": self.answered,
            "failed": self.failed,
            "kv": {name: self.kv[name] for name in ("hits", "misses", "bytes", "tokens", "memory_hits")},
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True, slots=True)
class _Asked:
    """A line of the file; `id` is None if the line has none."""

    id: str | int | None
    text: str
    where: str

    @property
    def key(self) -> str:
        """The key under which its answer is found again. It is JSON, because `1` and `"1"` are different ids."""
        return json.dumps([self.id, self.text] if self.id is None else [self.id])


def ask_all(ask: Callable[[str], Answer], questions: Path, output: Path, *, engine: str, silent: bool) -> Batch:
    """Answer every question of a JSONL file that has no answer in `output` yet; each answer is written at once.

    KV that several questions need is read from the store once, as far as `memory_budget` allows. If no chunk matches
    a question, only that question fails. Raises ConfigError for a bad line of the questions, and UsageError if
    `output` cannot be written, or holds answers of another engine or to other questions.
    """
    asked = _read(questions)
    done = _answered(output, {line.key: line for line in asked}, engine)
    waiting = []
    for line in asked:
        if done[line.key]:
            done[line.key] -= 1
        else:
            waiting.append(line)
    batch = Batch(output=output, questions=len(asked), kept=len(asked) - len(waiting))
    started = time.perf_counter()
    try:
        with (
            os.fdopen(open_plain(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a", encoding="utf-8") as file,
            steps("query", silent=silent) as show,
        ):
            for number, line in enumerate(waiting):
                show(batch.kept + number, len(asked), line.text)
                try:
                    answer = ask(line.text)
                except RetrievalError as error:
                    batch.failed.append({"where": line.where, "question": line.text, "error": str(error)})
                    continue
                given = {} if line.id is None else {"id": line.id}
                file.write(json_text(given | answer.to_json()) + "\n")
                file.flush()  # so that an interrupt loses at most the answer in progress
                batch.answered += 1
                batch.kv.update(asdict(answer.kv))
    except OSError as error:
        raise UsageError(f"{output} cannot be written ({error.strerror}); choose another --output.") from error
    batch.seconds = time.perf_counter() - started
    return batch


def _read(path: Path) -> list[_Asked]:
    from ragkv.evaluation.filerow import rows
    from ragkv.evaluation.question import question_of

    found: list[_Asked] = []
    seen: dict[str, str] = {}
    for row in rows(path, "a JSONL file of questions"):
        own = row.values.get("id")
        if own is not None and (isinstance(own, bool) or not isinstance(own, (str, int))):
            raise ConfigError(f'{row.where}: "id" is a text or a whole number.')
        line = _Asked(own, question_of(row).text, row.where)
        if own is not None and line.key in seen:
            raise ConfigError(f"{row.where}: the id {own!r} is that of {seen[line.key]} too; give each line its own.")
        seen[line.key] = row.where
        found.append(line)
    if not found:
        raise ConfigError(f'{path} holds no question; write one JSON object per line: {{"question": "…"}}.')
    return found


def _answered(output: Path, asked: dict[str, _Asked], engine: str) -> Counter[str]:
    """How often each question is already answered in `output`. A last line that a kill cut short is removed."""
    try:
        if not require_plain(output):
            return Counter()
        *lines, tail = read_plain(output).decode("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{output} cannot be read ({error}); choose another --output.") from error
    cut = tail.startswith(_BEGINNINGS) and not _whole(tail)
    found: Counter[str] = Counter()
    for number, line in enumerate([*lines, *([tail] if tail and not cut else [])], start=1):
        try:
            row = parse_json(line)
            own, text, by = row.get("id"), row["question"], row["engine"]
        except (ValueError, TypeError, KeyError, AttributeError):
            raise UsageError(
                f"{output}:{number} is no answer of ragkv query, so nothing is added to it; choose another --output."
            ) from None
        key = _Asked(own, text, "").key
        if key not in asked or asked[key].text != text:
            raise UsageError(
                f"{output}:{number} answers a question that is not in the file of questions; choose another --output."
            )
        if by != engine:
            raise UsageError(
                f"{output}:{number} was answered by engine {by}, not {engine}; ask with --engine {by}, or choose "
                "another --output."
            )
        found[key] += 1
    if tail:  # the file is changed only after every line has proved to be an answer of ragkv
        with os.fdopen(open_plain(output, os.O_RDWR), "r+b") as file:
            file.seek(-len(tail.encode()) if cut else 0, 2)
            file.truncate()
            file.write(b"" if cut else b"\n")
    return found


def _whole(line: str) -> bool:
    try:
        parse_json(line)
    except ValueError:
        return False
    return True
