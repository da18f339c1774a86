"""Keys that clients show: a file has their hashes, and whoever reads it learns none."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from ragkv.boundary.plainfile import read_plain
from ragkv.errors import ConfigError, UsageError

__all__ = ["Keys", "add_key"]

_LINE = re.compile(r"([A-Za-z0-9._-]{1,64})\s+sha256:([0-9a-f]{64})")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Keys:
    """The keys of a file, one in a line: `NAME sha256:HASH`. Lines that begin with `#` are comments."""

    def __init__(self, hashes: Mapping[str, str]) -> None:
        self._hashes = dict(hashes)

    @classmethod
    def read(cls, path: Path) -> Keys:
        """ConfigError when the file cannot be read, holds another line, or no key at all."""
        try:
            lines = read_plain(path).decode().splitlines()
        except (OSError, ValueError) as error:
            raise ConfigError(f"The keys in {path} cannot be read: {error}.") from error
        found = {}
        for number, line in enumerate(lines, start=1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            match = _LINE.fullmatch(line.strip())
            if match is None:
                raise ConfigError(f"{path}, line {number}: a key is NAME sha256:HASH; make one with --new-key NAME.")
            found[match[1]] = match[2]
        if not found:
            raise ConfigError(f"{path} holds no key; make one with --new-key NAME.")
        return cls(found)

    def owner(self, key: str) -> str | None:
        """The name of the one whose key this is. It takes as long whether there is one or not."""
        given, owner = _hash(key), None
        for name, known in self._hashes.items():
            if hmac.compare_digest(given, known):
                owner = name
        return owner


def add_key(path: Path, name: str) -> str:
    """Make a key for `name`, add its hash to the file, which only its owner may read, and return the key.

    UsageError for a bad name and for one that has a key.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"A key's name has letters, digits, '.', '_' and '-', 64 at most, unlike {name!r}.")
    if path.exists() and path.stat().st_size and name in Keys.read(path)._hashes:
        raise UsageError(f"{path} has a key for {name!r} already; delete its line to make a new one.")
    key = f"rk-{secrets.token_urlsafe(32)}"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600), "a") as file:
        file.write(f"{name} sha256:{_hash(key)}\n")
    return key


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
