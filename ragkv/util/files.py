"""Open the files of an index safely, read and write TOML, and mark the files that this user's ragkv has written.

An index may be copied, mailed and unpacked, so all names and bytes in it are untrusted. The files in it (and in the
folders of evaluation and fine-tuning) are opened by these functions only. They refuse a link, a pipe or a device before
anything is read or written, and deleting removes a link, not its target. The path of the index itself comes from the
user and may contain links. Errors are `NotPlainError`, an `OSError`. Nothing here defends against a process of the same
user that swaps files at the same time.

The `ragkv.toml` of a foreign index may be gigabytes long, a pipe that never ends, or nested so deeply that the parser
overflows the stack. Each of these raises a `ConfigError` of one sentence. TOML is written so that it reads back the
same.

A checksum detects accidents, but the author of a file can compute it too. Some files are read by a library that trusts
them (FAISS's approximate indexes). So ragkv stores a keyed checksum beside such a file, and gives the library only
files whose keyed checksum is valid. The key belongs to this user: it is random and stored outside of all indexes.
"""

from __future__ import annotations

import datetime
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import stat
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from ragkv.errors import ConfigError

logger = logging.getLogger(__name__)

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Error numbers that mean that a file cannot grow."""
_SOLID = 64 << 20
_HOLLOW = 64
"""At least 1/`_HOLLOW` of a file of more than `_SOLID` bytes must be on the disk. A sparse file, which takes hardly any
space, could otherwise fill the memory or be read for hours."""
_PAGE = 4096  # one `pwrite` of at most this size is atomic


class NotPlainError(OSError):
    """A path is a link, a pipe, a folder or a device instead of a file, or the file is nearly all holes."""


def user_folder(variable: str, otherwise: str) -> Path:
    """The user folder that an XDG variable names, else `otherwise` in the home; RuntimeError without a home.

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


def exists(path: Path) -> bool:
    """Whether there is something at `path`; `OSError` if the system does not say (Python 3.14's method answers no)."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: no system has such a name
        return False
    return True


def is_folder(path: Path) -> bool:
    """Whether there is a folder at `path`, and not a link to one."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


@contextmanager
def closing_descriptor(descriptor: int) -> Iterator[int]:
    """Close a file descriptor at the end of the block."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_regular(path: Path, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """Open a regular file, or a link to one, and return its descriptor; `NotPlainError` for anything else.

    A pipe is not waited for.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotPlainError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def open_plain(path: Path, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """`open_regular`, without following a link."""
    require_plain(path)
    return open_regular(path, flags | os.O_NOFOLLOW, mode)


def read_plain(path: Path, *, limit: int | None = None) -> bytes:
    """The content of a file; `NotPlainError` if it has more than `limit` bytes or is nearly all holes."""
    with os.fdopen(open_plain(path), "rb") as file:
        found = os.fstat(file.fileno())
        if limit is not None and found.st_size > limit:
            raise NotPlainError(errno.EFBIG, f"it holds {found.st_size} bytes, where {limit} is the most", str(path))
        require_solid(path, found)
        return file.read()


def require_solid(path: Path, status: os.stat_result) -> os.stat_result:
    """`status`, the `os.fstat` result of the file at `path`; `NotPlainError` if the file is nearly all holes."""
    if status.st_size > _SOLID and status.st_blocks * 512 * _HOLLOW < status.st_size:
        raise NotPlainError(errno.EFBIG, f"nearly all of its {status.st_size} bytes are holes", str(path))
    return status


def write_plain(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Write a new file and sync it to the disk. A link with its name is removed, not followed.

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
    """Overwrite a small file in place, for a disk that has no room for a second one.

    One call writes the content, padded with newlines to the old length, within the file's first block. So a
    process that reads meanwhile sees the old content or the new one.
    """
    with os.fdopen(open_plain(path, os.O_WRONLY), "wb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if max(size, len(content)) > _PAGE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.pwrite(file.fileno(), content.ljust(size, b"\n"), 0)
        os.ftruncate(file.fileno(), len(content))
        os.fsync(file.fileno())


def replace_plain(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Replace a file's content atomically: a reader sees the old content or the new one."""
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    write_plain(fresh, content, mode=mode)
    try:
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def make_folder(path: Path, *, parents: bool = True) -> None:
    """Make a folder at `path` and its parents, unless it exists. A link with its name is removed, not followed."""
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
    with closing_descriptor(os.open(path, os.O_RDONLY)) as descriptor:
        os.fsync(descriptor)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock (flock) of a folder, for which other threads and processes wait."""
    with closing_descriptor(os.open(folder, os.O_RDONLY | os.O_CLOEXEC)) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def refusal(error: Exception) -> str:
    """Why the system refused a file or an address, without the number and the path that its errors have."""
    return getattr(error, "strerror", None) or str(error)


def parse_json(text: str | bytes) -> Any:
    """As `json.loads`, with ValueError for every invalid text, including one that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


_BYTES = 32


def key_file() -> Path:
    """The key's path: `$XDG_STATE_HOME/ragkv/key`, else `~/.local/state/ragkv/key`. RuntimeError without a home."""
    return user_folder("XDG_STATE_HOME", ".local/state") / "ragkv" / "key"


def keyed_checksum(path: Path) -> bytes:
    """The keyed checksum of a file that ragkv has just written, in hex. `OSError` if the file cannot be read."""
    with os.fdopen(open_plain(path), "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(key=_key(), digest_size=_BYTES)).hexdigest().encode()


def keyed_digest(content: bytes) -> bytes:
    """The keyed checksum of some bytes, 64 hex digits."""
    return hashlib.blake2b(content, key=_key(), digest_size=_BYTES).hexdigest().encode()


def has_keyed_checksum(path: Path, mark: Path) -> bool:
    """Whether the file `mark` holds the keyed checksum of `path`. `OSError` if either cannot be read."""
    return secrets.compare_digest(read_plain(mark, limit=2 * _BYTES), keyed_checksum(path))


@cache
def _key() -> bytes:
    """The user's key; if it cannot be stored, a key for this process alone."""
    try:
        return _kept_key(key_file())
    except (OSError, RuntimeError) as error:
        logger.warning(
            "the key for derived files cannot be stored (%s), so every process makes them again: let "
            "XDG_STATE_HOME name a folder that you may write to",
            error,
        )
        return secrets.token_bytes(_BYTES)


def _kept_key(path: Path) -> bytes:
    """The key at `path`, created if it is missing. The file gets its name when it is complete; the first process to
    name it wins."""
    if not require_plain(path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
        try:
            write_plain(fresh, secrets.token_bytes(_BYTES), mode=0o600)
            with suppress(FileExistsError):  # another process has created the key in the meantime
                os.link(fresh, path)
        finally:
            fresh.unlink(missing_ok=True)
    found = read_plain(path, limit=_BYTES)
    if len(found) < _BYTES:
        raise OSError(f"{path} holds no key: delete it")
    return found


LONGEST = 1 << 20
"""The largest file, in bytes; a prompt with many examples takes some ten thousand."""
DEEPEST = 32
_DOTS = 1024
"""The most dots outside strings: the parser takes quadratic time in the dots of a dotted key."""
_STRINGS = re.compile(
    r'"""(?:[^\\]|\\.)*?"""|' + r"'''.*?'''|" + r'"(?:[^"\\\n]|\\.)*"|' + r"'[^'\n]*'",
    re.DOTALL,
)
_DATES = (datetime.datetime, datetime.date, datetime.time)


def read_toml(path: Path) -> dict[str, Any]:
    """The table in a file. FileNotFoundError or NotADirectoryError if there is none, ConfigError for anything else."""
    return parse_toml(read_text(path), source=str(path))


def read_text(path: Path) -> str:
    """The text of a TOML file, with its own line endings. Errors are those of `read_toml`."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe would wait for ever
            raise ConfigError(f"{path} cannot be read: it is not a file.")
        with path.open("rb") as file:
            data = file.read(LONGEST + 1)
        text = data.decode("utf-8-sig")  # editors on Windows begin a file with a byte order mark
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {refusal(error)}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} cannot be read: it is not UTF-8 text ({error.reason}).") from error
    if len(data) > LONGEST:
        raise ConfigError(f"{path} cannot be read: it is larger than {LONGEST >> 20} MiB, which no configuration is.")
    return text


def parse_toml(text: str, *, source: str) -> dict[str, Any]:
    """The table in a TOML text. ConfigError, which names `source`, for invalid TOML or too deep nesting."""
    too_deep = ConfigError(f"{source} is nested too deeply; write it with fewer tables in tables.")
    if _STRINGS.sub("", text).count(".") > _DOTS:
        raise too_deep
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise too_deep from None
    except ValueError as error:  # the parser's own error is one; a number of thousands of digits raises another
        raise ConfigError(f"{source} is not valid TOML: {error}.") from error
    level: list[Any] = [table]
    for _ in range(DEEPEST):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return table
    raise too_deep


def dump_toml(table: Mapping[str, Any]) -> str:
    """The TOML text of a table. `parse_toml` reads the same table from it, with lists for tuples."""
    import tomli_w

    return tomli_w.dumps(table)


def edit_toml(text: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Change in `text` each value that differs between two tables: it gets the value of `after`, or is removed.

    Comments, order and formatting of everything else stay, also of keys that the tables do not have. The caller must
    parse the result to check it. ValueError if the text cannot be edited.
    """
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    try:
        document = tomlkit.parse(text)
        _edit(document, before, after)
        return tomlkit.dumps(document)
    except (TOMLKitError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error  # tomlkit does not support all of TOML


def _edit(there: Any, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    import tomlkit

    for key in before.keys() - after.keys():
        there.pop(key, None)
    for key, value in after.items():
        was = before.get(key)
        if key in before and dump_toml({key: was}) == dump_toml({key: value}):  # 1 is not true, and NaN is NaN
            continue
        if isinstance(was, Mapping) and isinstance(value, Mapping):
            if key not in there:
                there[key] = tomlkit.table()
            _edit(there[key], was, value)
        else:
            there[key] = value


def plain(name: str, value: Any) -> Any:
    """A value as TOML would read it back: with lists for tuples and dicts for mappings.

    ConfigError names a value that TOML cannot store: None, a text with lone surrogates (as in a file name that is not
    UTF-8), or an integer of more than 64 bits.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"{name} = {shortened(value)} is not valid Unicode text, so it cannot be kept; give it another name."
            ) from None
    elif isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 63:
            raise ConfigError(f"{name} is a number of more than 64 bits; give a smaller one.")
    elif isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(f"{name} has the key {shortened(key)}; name its values by strings.")
            plain(f"a key of {name}", key)
        return {key: plain(f"{name}.{key}", inner) for key, inner in value.items()}
    elif isinstance(value, (list, tuple)):
        return [plain(name, inner) for inner in value]
    elif not isinstance(value, (float, *_DATES)):
        raise ConfigError(
            f"{name} = {shortened(value)} cannot be kept; give a text, a number, true or false, a list or a table."
        )
    return value


def shortened(value: object) -> str:
    """A value's repr, shortened to fit into a sentence."""
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:79]}…"


def _inside(value: Any) -> list[Any]:
    """The tables and lists that are directly within a table or a list."""
    inner = value.values() if isinstance(value, dict) else value
    return [one for one in inner if isinstance(one, (dict, list))]
