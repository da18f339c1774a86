"""Files of a folder that somebody else may have made: opened for what they are, never for where a name leads.

An index is copied, mailed and unpacked, and whoever made it chose every name and every byte in it. So what lies
inside an index (and in the folders that evaluation and fine-tuning keep) is opened by these functions alone: a
link, a pipe or a device in place of a file is refused before anything is read from it or written through it, and
deleting takes the link, not what it leads to. The path of the index itself is the user's, and may lead over links.

`NotPlainError` is an `OSError`, so that it ends as the sentence of whoever handles the file. What a folder holds is
taken as it lies: nothing here defends against a process that swaps files meanwhile under the same user's rights.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import stat
from pathlib import Path
from typing import Any

__all__ = [
    "NotPlainError",
    "is_folder",
    "make_folder",
    "open_plain",
    "parse_json",
    "read_plain",
    "remove_tree",
    "replace_plain",
    "require_plain",
    "sync_path",
    "write_plain",
]

_SOLID = 64 << 20
"""Smaller files are read as they are; of larger ones, this share at least has to lie on the disk: a file of holes
would become gigabytes in memory that nobody ever sent."""
_HOLLOW = 64


class NotPlainError(OSError):
    """A link, a pipe, a folder or a device lies where a file has to be, or a file that is all holes."""


def require_plain(path: Path) -> bool:
    """Whether there is a file at `path`; `NotPlainError` for anything else than a regular file of its own."""
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    if not stat.S_ISREG(mode):
        kind = "a link" if stat.S_ISLNK(mode) else "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
        raise NotPlainError(errno.EINVAL, f"it is {kind}, and must be a regular file", str(path))
    return True


def is_folder(path: Path) -> bool:
    """Whether a real folder lies at `path`, not a link to one."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def open_plain(path: Path, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """A descriptor of a regular file; neither follows a link nor waits for the other end of a pipe."""
    require_plain(path)
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotPlainError(errno.EINVAL, "it must be a regular file", str(path))
    return descriptor


def read_plain(path: Path, *, limit: int | None = None) -> bytes:
    """All of a file; `NotPlainError` when it has more than `limit` bytes, or is mostly holes."""
    with os.fdopen(open_plain(path), "rb") as file:
        found = os.fstat(file.fileno())
        if limit is not None and found.st_size > limit:
            raise NotPlainError(errno.EFBIG, f"it holds {found.st_size} bytes, where {limit} is the most", str(path))
        if found.st_size > _SOLID and found.st_blocks * 512 * _HOLLOW < found.st_size:
            raise NotPlainError(errno.EFBIG, f"nearly all of its {found.st_size} bytes are holes", str(path))
        return file.read()


def write_plain(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """A new file on the disk, in place of whatever has its name: a link is taken away, not written through."""
    path.unlink(missing_ok=True)
    with os.fdopen(open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_plain(path: Path, content: bytes) -> None:
    """A file's new content, whole or not at all: who reads it meanwhile sees the old one."""
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    try:
        write_plain(fresh, content)
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def make_folder(path: Path) -> None:
    """A real folder at `path`: a link of that name is taken away, so that nothing is written through it."""
    if path.is_symlink():
        path.unlink()
    path.mkdir(parents=True, exist_ok=True)


def remove_tree(path: Path) -> None:
    """Delete a folder with all in it, or the one link or file of that name; links inside go, and not what they
    lead to."""
    if is_folder(path):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_path(path: Path) -> None:
    """Have a file's bytes, or a folder's names, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def parse_json(text: str | bytes) -> Any:
    """As `json.loads`; whatever is wrong with the text is a ValueError, thousands of brackets included."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
