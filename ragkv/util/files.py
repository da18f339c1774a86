"""Open the files of an index safely, and mark those that this user's ragkv has written.

An index may be copied, mailed and unpacked, so all names and bytes in it are untrusted. The files in it (and in the
folders of evaluation and fine-tuning) are opened by these functions only. They refuse a link, a pipe or a device before
anything is read or written, and deleting removes a link, not its target. The path of the index itself comes from the
user and may contain links. Errors are `NotPlainError`, an `OSError`. Nothing here defends against a process of the same
user that swaps files at the same time.

A checksum finds accidents, but whoever makes a file can compute it too. Some files are read by a library that trusts
them (FAISS's approximate indexes). So ragkv stores a keyed checksum beside such a file, and the library only reads a
file whose keyed checksum is valid. The key belongs to this user: it is random and is stored outside of all indexes.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import secrets
import shutil
import stat
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

_SOLID = 64 << 20
_HOLLOW = 64
"""At least 1/`_HOLLOW` of a file of more than `_SOLID` bytes must be on the disk. A sparse file, which takes hardly any
space, could otherwise fill the memory or be read for hours."""
_PAGE = 4096  # one `pwrite` of at most this size is atomic


class NotPlainError(OSError):
    """A path is a link, a pipe, a folder or a device instead of a file, or the file is nearly all holes."""


def user_folder(variable: str, otherwise: str) -> Path:
    """The folder of the user that an XDG variable names, else `otherwise` in the home; RuntimeError without a home.

    The XDG specification says to ignore a relative path.
    """
    base = Path(os.environ.get(variable, ""))
    return base if base.is_absolute() else Path.home() / otherwise


def require_plain(path: Path) -> bool:
    """Whether there is a file at `path`; `NotPlainError` if it is a link or another kind of file."""
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
        require_solid(path, found)
        return file.read()


def require_solid(path: Path, found: os.stat_result) -> os.stat_result:
    """`found`, the `os.fstat` result of the file at `path`; `NotPlainError` if the file is nearly all holes."""
    if found.st_size > _SOLID and found.st_blocks * 512 * _HOLLOW < found.st_size:
        raise NotPlainError(errno.EFBIG, f"nearly all of its {found.st_size} bytes are holes", str(path))
    return found


def write_plain(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Write a new file and sync it to the disk. A link with its name is removed, not written through.

    If writing fails, for example because the disk is full, the file is removed.
    """
    path.unlink(missing_ok=True)
    try:
        with os.fdopen(open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        path.unlink(missing_ok=True)
        raise


def overwrite_plain(path: Path, content: bytes) -> None:
    """Overwrite a small file in place, on a disk that has no room for a second one.

    One call writes the content, padded with line ends to the old length, within the file's first block. So a process
    that is killed leaves the old content or the new one. `OSError` if the content does not fit there.
    """
    with os.fdopen(open_plain(path, os.O_WRONLY), "wb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if max(size, len(content)) > _PAGE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.pwrite(file.fileno(), content.ljust(size, b"\n"), 0)
        os.ftruncate(file.fileno(), len(content))
        os.fsync(file.fileno())


def replace_plain(path: Path, content: bytes) -> None:
    """Replace a file's content atomically: a reader sees the old content or the new one."""
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    write_plain(fresh, content)
    try:
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def make_folder(path: Path, *, parents: bool = True) -> None:
    """Make a folder at `path` and its parents, unless it exists. A link with its name is removed, not written
    through."""
    if path.is_symlink():
        path.unlink()
    path.mkdir(parents=parents, exist_ok=True)


def remove_tree(path: Path) -> None:
    """Delete a folder with its content, a file, or a link (but not its target)."""
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
    """As `json.loads`, with ValueError for every invalid text, including one that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


logger = logging.getLogger(__name__)

_BYTES = 32
_BLOCK = 1 << 20


def key_file() -> Path:
    """The key's path: `$XDG_STATE_HOME/ragkv/key`, else `~/.local/state/ragkv/key`. RuntimeError without a home."""
    base = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".local" / "state") / "ragkv" / "key"


def keyed_checksum(path: Path) -> bytes:
    """The keyed checksum of a file that ragkv has just written, in hex. `OSError` if the file cannot be read."""
    digest = hashlib.blake2b(key=_key(), digest_size=_BYTES)
    with os.fdopen(open_plain(path), "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest().encode()


def has_keyed_checksum(path: Path, mark: Path) -> bool:
    """Whether the file `mark` holds the keyed checksum of `path`. `OSError` if either cannot be read."""
    return secrets.compare_digest(read_plain(mark, limit=2 * _BYTES), keyed_checksum(path))


@cache
def _key() -> bytes:
    """The user's key; where it cannot be stored, a key for this process alone."""
    try:
        return _kept_key(key_file())
    except (OSError, RuntimeError) as error:
        logger.warning(
            "the key for approximate indexes cannot be stored (%s), so every process builds them again: let "
            "XDG_STATE_HOME name a folder that you may write to",
            error,
        )
        return secrets.token_bytes(_BYTES)


def _kept_key(path: Path) -> bytes:
    """The key at `path`; it is made if there is none. The file is complete before it gets its name, and the first
    process to name it wins."""
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
