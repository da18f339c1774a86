"""Marks that tell which files this user's ragkv has written, and that nobody else can make.

A checksum finds accidents, but whoever makes a file can compute it too. Some files are read by a library that believes
them (FAISS's approximate indexes), and checking their bytes cannot tell what the library will do. So ragkv writes a
keyed checksum beside such a file, and only lets the library read a file with a valid one. The key belongs to this user.
It is made at random for the first such file, and is stored outside of all indexes.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from contextlib import suppress
from functools import cache
from pathlib import Path

from ragkv.boundary.plainfile import open_plain, read_plain, require_plain, write_plain

__all__ = ["has_mark", "key_file", "mark_of"]

logger = logging.getLogger(__name__)

_BYTES = 32
_BLOCK = 1 << 20


def key_file() -> Path:
    """The key's path: `$XDG_STATE_HOME/ragkv/key`, else `~/.local/state/ragkv/key`. RuntimeError without a home."""
    base = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".local" / "state") / "ragkv" / "key"


def mark_of(path: Path) -> bytes:
    """The mark of a file that ragkv has just written. `OSError` when the file cannot be read."""
    digest = hashlib.blake2b(key=_key(), digest_size=_BYTES)
    with os.fdopen(open_plain(path), "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest().encode()


def has_mark(path: Path, mark: Path) -> bool:
    """Whether `mark` holds the mark of `path`. `OSError` when either cannot be read."""
    return secrets.compare_digest(read_plain(mark, limit=2 * _BYTES), mark_of(path))


@cache
def _key() -> bytes:
    """The user's key; where it cannot be stored, a key for this process alone."""
    try:
        return _kept_key(key_file())
    except (OSError, RuntimeError) as error:
        logger.warning(
            "the key that marks approximate indexes cannot be kept (%s), so that every process builds them again: let "
            "XDG_STATE_HOME name a folder that you may write to",
            error,
        )
        return secrets.token_bytes(_BYTES)


def _kept_key(path: Path) -> bytes:
    """The key at `path`, which is made if there is none. It is written in full before it gets its name, and the first
    process to name one decides for all."""
    if not require_plain(path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
        try:
            write_plain(fresh, secrets.token_bytes(_BYTES), mode=0o600)
            with suppress(FileExistsError):  # another process has made the key meanwhile
                os.link(fresh, path)
        finally:
            fresh.unlink(missing_ok=True)
    found = read_plain(path, limit=_BYTES)
    if len(found) < _BYTES:
        raise OSError(f"{path} holds no key: delete it")
    return found
