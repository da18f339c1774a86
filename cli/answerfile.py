"""The file of answers of `ragkv query --output`: in the order of the questions, never with half an answer for good."""

from __future__ import annotations

import fcntl
import os
from collections import defaultdict, deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ragkv.boundary.plainfile import open_plain, parse_json, read_plain, replace_plain
from ragkv.boundary.visible import json_text
from ragkv.cli.questionfile import Line, answer_key
from ragkv.errors import UsageError
from ragkv.types import Answer

__all__ = ["AnswerFile"]

_BEGINNINGS = (b'{"id": ', b'{"question": ')


class AnswerFile:
    """The answers to `lines` at `path`; a context manager. `kept` are the questions that have an answer already.

    Answers are appended, each by one write, so that a kill cuts off at most the last line, which the next run takes
    out. An answer that comes later than one behind it (its question failed in an earlier run) is put into its place
    at the end. One process writes at a time. Raises UsageError if the file cannot be used, or holds something else;
    then it is as it was.
    """

    def __init__(self, path: Path, lines: Sequence[Line]) -> None:
        self._path = path
        self._places: list[int] = []  # of all answers in the file: the number of their line
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._sort()
        finally:
            os.close(self._file)

    def add(self, line: Line, answer: Answer) -> None:
        """Append the answer to a question."""
        given: dict[str, Any] = {} if line.id is None else {"id": line.id}
        try:
            self._write((json_text(given | answer.to_json()) + "\n").encode())
        except OSError as error:
            raise self._unwritable(error) from error
        self._places.append(line.number)

    def _write(self, text: bytes) -> None:
        while text:  # a disk that is nearly full takes a part
            text = text[os.write(self._file, text) :]

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"Another ragkv query is writing to {self._path}; wait until it has finished, or choose another "
                "--output."
            ) from None

    def _read(self, lines: Sequence[Line]) -> bytes:
        """The whole answers that are there, checked, without what a kill left of another."""
        waiting: dict[str, deque[Line]] = defaultdict(deque)
        for line in lines:
            waiting[line.key].append(line)
        texts = {line.text: line for line in lines if line.id is None}
        content = read_plain(self._path)
        *found, tail = content.split(b"\n")
        cut = bool(tail) and _is_cut(tail)
        if tail and not cut:
            found.append(tail)
        for number, row in enumerate(found, start=1):
            self._places.append(self._place(number, row, waiting, texts))
        return content[: len(content) - len(tail)] if cut else content

    def _place(self, number: int, row: bytes, waiting: dict[str, deque[Line]], texts: dict[str, Line]) -> int:
        """The number of the line that a row answers."""
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
    """Whether a last line without its end is the beginning of an answer: not all of one, and nothing else."""
    if not any(tail[: len(beginning)] == beginning[: len(tail)] for beginning in _BEGINNINGS):
        return False
    try:
        parse_json(tail.decode())
    except ValueError:
        return True
    return False
