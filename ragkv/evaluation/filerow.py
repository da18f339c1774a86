"""Read a user's JSON Lines file row by row. Errors name the file and the line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ragkv.errors import ConfigError

__all__ = ["Row", "lines", "rows"]


class Row:
    """One object of a JSONL file; `where` is "FILE, line N"."""

    __slots__ = ("values", "where")

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def text(self, key: str, *, default: str | None = None) -> str:
        """The text under `key`; `default` also replaces null. Raises ConfigError if there is neither."""
        value = self.values.get(key, default)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise ConfigError(f'{self.where}: "{key}" must be a text.')
        return value

    def texts(self, key: str, *, blank: bool = False) -> tuple[str, ...]:
        """The list of texts (or numbers) under `key`, which must not be empty. With `blank`, a text may be blank."""
        value = self.values.get(key)
        if not isinstance(value, list) or not value or not all(type(item) in (str, int, float) for item in value):
            raise ConfigError(f'{self.where}: "{key}" must be a list of texts that is not empty.')
        texts = tuple(str(item) for item in value)
        if not blank and not all(text.strip() for text in texts):
            raise ConfigError(f'{self.where}: a text of "{key}" is blank; leave it out.')
        return texts

    def name(self, key: str) -> str:
        """The id under `key`: a string that is not empty, or a whole number."""
        value = self.values.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if not isinstance(value, str) or not value:
            raise ConfigError(f'{self.where}: "{key}" must be an id that is not empty.')
        return value


def lines(path: Path, what: str) -> Iterator[tuple[str, str]]:
    """(where, line) of each line that is not blank. `what` says in errors what the file should be."""
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}, line {number}", line
    except FileNotFoundError:
        raise ConfigError(f"No such file: {path}; give {what}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); give {what} in UTF-8.") from error


def rows(path: Path, what: str) -> Iterator[Row]:
    """The objects of a JSONL file, one at a time, so that a file of any size can be read."""
    for where, line in lines(path, what):
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: not valid JSON ({error}).") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{where}: a line is an object in braces.")
        yield Row(values, where)
