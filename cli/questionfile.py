"""The file of `ragkv query --questions`: one question on each line; a bad line is named, and the others are read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ragkv.boundary.plainfile import parse_json
from ragkv.errors import ConfigError, UsageError
from ragkv.evaluation.filerow import Row
from ragkv.evaluation.question import question_of

__all__ = ["BadLine", "Line", "read_questions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A question. `id` is None if the line has none; `engine` is the line's own, or the one for all.

    `options` are those of `RagKV.query` that the line has, `context` the texts that it is asked about.
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
    """A line that is no question, and why."""

    number: int
    where: str
    error: str


def answer_key(own: Any, text: str, engine: str) -> str:
    """What an answer has in common with its question: the id, else the text and the engine."""
    return json.dumps([own] if own is not None else [own, text, engine])


def read_questions(path: Path, engine: str) -> tuple[list[Line], list[BadLine]]:
    """The questions and the bad lines, in order. `engine` answers the lines that name none.

    Raises ConfigError if the file cannot be read, or if no line is a question.
    """
    found: list[Line] = []
    bad: list[BadLine] = []
    seen: dict[str, str] = {}
    for number, raw in _lines(path):
        where = f"{path}, line {number}"
        try:
            line = _line(Row(_values(raw), where), number, engine)
            if line.id is not None and line.key in seen:
                raise ConfigError(f"the id {line.id!r} is that of {seen[line.key]} too; give each line its own.")
        except UsageError as error:
            bad.append(BadLine(number=number, where=where, error=str(error).removeprefix(f"{where}: ")))
            continue
        seen[line.key] = where
        found.append(line)
    if not found and bad:
        raise ConfigError(f"{path} holds no question. {bad[0].where}: {bad[0].error}")
    if not found:
        raise ConfigError(f'{path} holds no question; write one JSON object per line: {{"question": "…"}}.')
    return found, bad


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines with something on them, counted from 1. They stay bytes, so that a wrong one is wrong alone."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                line = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
                if line.strip():
                    yield number, line.strip()
    except FileNotFoundError:
        raise ConfigError(f"No such file: {path}; give a JSONL file of questions.") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error}); give a JSONL file of questions.") from error


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


def _line(row: Row, number: int, engine: str) -> Line:
    own = row.values.get("id")
    if own is not None and (isinstance(own, bool) or not isinstance(own, (str, int))):
        raise ConfigError('"id" is a text or a whole number.')
    text = question_of(row).text
    own_engine = row.text("engine", default=engine)
    options: dict[str, Any] = {"engine": own_engine}
    for name in ("top_k", "max_new_tokens"):
        value = row.values.get(name)
        if value is not None:
            if type(value) is not int or value < 1:
                raise ConfigError(f'"{name}" is a whole number from 1 up.')
            options[name] = value
    if (where := _texts(row, "where")) is not None:
        options["where"] = where
    return Line(
        number=number,
        where=row.where,
        id=own,
        text=text,
        engine=own_engine,
        options=options,
        context=_texts(row, "context") or (),
    )


def _texts(row: Row, name: str) -> tuple[str, ...] | None:
    """A text or a list of texts; None if the line has none."""
    value = row.values.get(name)
    if value is None:
        return None
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) and t.strip() for t in texts):
        raise ConfigError(f'"{name}" is a text that is not blank, or a list of such texts.')
    return tuple(texts)
