"""Results that are kept in files of JSON lines, so that a stopped run continues where it was."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ragkv.boundary.plainfile import is_folder, make_folder, open_plain, parse_json, read_plain

__all__ = ["Journal", "Ledger", "digest_of"]

logger = logging.getLogger(__name__)


def digest_of(value: Any) -> str:
    """A short hex digest of plain data; equal data have equal digests."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


class Ledger:
    """Results by key, one JSON line each, written as soon as they are known.

    `keep=False` reads the file and writes nothing. If the folder cannot be written, the run still completes but cannot
    be resumed.
    """

    def __init__(self, path: Path, *, keep: bool = True) -> None:
        self._path = path
        self._keep = keep
        self._known = _read(path)

    def get(self, key: str) -> Mapping[str, Any] | None:
        """The result under `key`, or None if it is not known yet."""
        return self._known.get(key)

    def put(self, key: str, **facts: Any) -> None:
        """Write plain data under `key`. A later line replaces an earlier one."""
        row = {"key": key, **facts}
        self._known[key] = row
        if not self._keep:
            return
        line = json.dumps(row, ensure_ascii=False) + "\n"
        try:
            make_folder(self._path.parent)
            with os.fdopen(open_plain(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT), "a+b") as file:
                if file.tell() and not _ends_line(file):
                    line = "\n" + line
                file.write(line.encode())
        except OSError as error:
            logger.warning("results cannot be kept, so a stopped run would start again: %s", error)
            self._keep = False


class Journal:
    """Right or wrong by key, in a `Ledger`."""

    def __init__(self, path: Path, *, keep: bool = True) -> None:
        self._ledger = Ledger(path, keep=keep)

    def get(self, key: str) -> bool | None:
        """The result under `key`, or None if it is not known yet."""
        right = (self._ledger.get(key) or {}).get("right")
        return right if isinstance(right, bool) else None

    def put(self, key: str, right: bool, **facts: Any) -> None:
        """Write a result. `facts` are for people who read the file."""
        self._ledger.put(key, right=right, **facts)


def _ends_line(file: Any) -> bool:
    """Whether the last line is complete; a killed run may leave half a line."""
    file.seek(-1, 2)
    return bool(file.read(1) == b"\n")


def _read(path: Path) -> dict[str, Mapping[str, Any]]:
    known: dict[str, Mapping[str, Any]] = {}
    try:
        if not is_folder(path.parent):
            return known
        lines = read_plain(path).split(b"\n")
    except OSError:  # nothing was kept yet, or it is not a plain file
        return known
    for line in lines:
        try:
            row = parse_json(line)
        except ValueError:  # half a line from a killed run
            continue
        if isinstance(row, dict) and isinstance(row.get("key"), str):
            known[row["key"]] = row
    return known
