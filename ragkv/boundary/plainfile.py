"""Open files in a folder that somebody else may have made, without following links.

An index is copied, mailed and unpacked, and whoever made it chose every name and every byte in it. So files within an
index (and within the folders of evaluation and fine-tuning) are only opened by these functions. A link, a pipe or a
device in place of a file is refused before anything is read from it or written through it, and deleting removes the
link, not its target. The path of the index itself is the user's own, and may lead through links.

`NotPlainError` is an `OSError`, so that callers report it as they report other errors of the file. Nothing here defends
against a process of the same user that swaps files at the same time.
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
"""Of a file that is larger than `_SOLID` bytes, at least one part in `_HOLLOW` must be on the disk. Otherwise a sparse
file, which takes nearly no space, could fill the memory."""
_HOLLOW = 64


class NotPlainError(OSError):
    """In place of a file there is a link, a pipe, a folder or a device, or the file is nearly all holes."""


def require_plain(path: Path) -> bool:
    """Whether there is a file at `path`; `NotPlainError` when it is a link, or anything else than a regular file."""
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    if not stat.S_ISREG(mode):
        kind = "a link" if stat.S_ISLNK(mode) else "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
        raise NotPlainError(errno.EINVAL, f"it is {kind}, and must be a regular file", str(path))
    return True


def is_folder(path: Path) -> bool:
    """Whether there is a folder at `path`, and not a link to one."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def open_plain(path: Path, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """Open a regular file and return its descriptor. Links are not followed, and a pipe is not waited for."""
    require_plain(path)
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotPlainError(errno.EINVAL, "it must be a regular file", str(path))
    return descriptor


def read_plain(path: Path, *, limit: int | None = None) -> bytes:
    """The content of a file; `NotPlainError` when it has more than `limit` bytes, or is nearly all holes."""
    with os.fdopen(open_plain(path), "rb") as file:
        found = os.fstat(file.fileno())
        if limit is not None and found.st_size > limit:
            raise NotPlainError(errno.EFBIG, f"it holds {found.st_size} bytes, where {limit} is the most", str(path))
        if found.st_size > _SOLID and found.st_blocks * 512 * _HOLLOW < found.st_size:
            raise NotPlainError(errno.EFBIG, f"nearly all of its {found.st_size} bytes are holes", str(path))
        return file.read()


def write_plain(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Write a new file and sync it to the disk. A link with its name is removed, not written through."""
    path.unlink(missing_ok=True)
    with os.fdopen(open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_plain(path: Path, content: bytes) -> None:
    """Replace a file's content as a whole or not at all: who reads it meanwhile sees the old content."""
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    try:
        write_plain(fresh, content)
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def make_folder(path: Path) -> None:
    """Make a folder at `path` unless there is one. A link with its name is removed, not written through."""
    if path.is_symlink():
        path.unlink()
    path.mkdir(parents=True, exist_ok=True)


def remove_tree(path: Path) -> None:
    """Delete a folder with its content, or a file or a link. The targets of links are not deleted."""
    if is_folder(path):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_path(path: Path) -> None:
    """Sync a file's bytes, or a folder's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def parse_json(text: str | bytes) -> Any:
    """As `json.loads`, but whatever is wrong with the text is a ValueError, also when it is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
