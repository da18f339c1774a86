"""What the programs of the repository write: results that a stopped run finds again, and tables."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ragkv.errors import RagkvError, UsageError
from ragkv.util.display import one_line
from ragkv.util.files import is_folder, make_folder, open_plain, parse_json, read_plain, refusal, replace_plain

logger = logging.getLogger(__name__)


def digest_of(value: Any) -> str:
    """A short hex digest of plain data; equal data have equal digests."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


class ResultCache:
    """Results by key, one JSON line each, written as soon as they are known.

    If the folder cannot be written, the run still completes but cannot be resumed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writes = True
        self._known: dict[str, Mapping[str, Any]] = {}
        try:
            known = read_plain(path).split(b"\n") if is_folder(path.parent) else []
        except OSError:  # nothing was kept yet, or it is not a plain file
            known = []
        for line in known:
            with suppress(ValueError):  # half a line from a killed run
                row = parse_json(line)
                if isinstance(row, dict) and isinstance(row.get("key"), str):
                    self._known[row["key"]] = row

    def get(self, key: str) -> Mapping[str, Any] | None:
        """The result under `key`, or None if it is not known yet."""
        return self._known.get(key)

    def put(self, key: str, **facts: Any) -> None:
        """Write plain data under `key`. A later line replaces an earlier one."""
        row = {"key": key, **facts}
        self._known[key] = row
        if not self._writes:
            return
        line = json.dumps(row, ensure_ascii=False) + "\n"
        try:
            make_folder(self._path.parent)
            with os.fdopen(open_plain(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT), "a+b") as file:
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    line = line if file.read(1) == b"\n" else "\n" + line  # a killed run may leave half a line
                file.write(line.encode())
        except OSError as error:
            logger.warning("results cannot be kept, so a stopped run would start again: %s", error)
            self._writes = False


def write_whole(path: Path, content: str | bytes, *, instead: str) -> None:
    """Replace a file atomically; until then, readers see the old content.

    Raises RagkvError if it cannot be written. `instead` is the advice for that case, such as "give another --output".
    """
    try:
        replace_plain(path, content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise RagkvError(f"{path} cannot be written ({refusal(error)}); {instead}.") from error


def markdown_table(head: Sequence[str], body: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """A table in Markdown with `left` columns of words, then columns of numbers."""
    rows = [head, ["---"] * left + ["---:"] * (len(head) - left), *body]
    return "".join(f"| {' | '.join(one_line(cell).replace('|', '&#124;') for cell in row)} |\n" for row in rows)


def percent(value: float, ci95: tuple[float, float]) -> str:
    """A share as "93.8 ±4.2": per cent and half the width of the interval."""
    return f"{100 * value:.1f} {_half(ci95)}"


def points(value: float, ci95: tuple[float, float]) -> str:
    """A difference of shares as "-1.7 ±3.3"."""
    return f"{100 * value:+.1f} {_half(ci95)}"


def _half(ci95: tuple[float, float]) -> str:
    low, high = ci95
    return f"±{50 * (high - low):.1f}"


def check_target(option: str, path: Path) -> None:
    """Refuse, before hours of work, a file that cannot be written: UsageError."""
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path} cannot be written: there is no folder {path.parent}; make it.")
    if path.is_dir():
        raise UsageError(f"{option} {path} is a folder; give a file.")
