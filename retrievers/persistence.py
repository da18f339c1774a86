"""Retrieval indexes on the disk: replaced in one step when they are saved, checked when they are loaded.

A folder holds `manifest.json` and the data folder that it names, `data-<hex>`. Saving writes a new data folder, syncs
it, and then replaces the manifest by a rename. Whatever happens before the rename leaves the old index in place, and
there is never a moment without an index. Old data folders are deleted afterwards; a process that has mapped their files
can go on using them. One process saves at a time, or it would delete what another is about to name.

Checksums find accidents, but whoever makes an index computes them too. So names in a manifest are only accepted in the
form that `save_index` writes, so that none leads out of the folder, and links, pipes and devices count as damage
(`ragkv.boundary.plainfile`).
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from ragkv.boundary.plainfile import (
    is_folder,
    make_folder,
    open_plain,
    parse_json,
    read_plain,
    remove_tree,
    sync_path,
    write_plain,
)
from ragkv.errors import ConfigError, RetrievalError

__all__ = [
    "MANIFEST",
    "SavedElsewhereError",
    "Stamp",
    "load_index",
    "read_json",
    "save_index",
    "saved_generation",
    "stamp_of",
    "strings",
    "whole_number",
]

MANIFEST = "manifest.json"
_DATA = re.compile(r"data-[0-9a-f]{16}")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_DIGEST = re.compile(r"[0-9a-f]{32}")

Stamp: TypeAlias = tuple[int, int, int, int]
"""Device, inode, size and time of change of a file: while they are the same, so is its content, short of an attack."""

T = TypeVar("T")


class SavedElsewhereError(RetrievalError):
    """Another process, or another object in this one, is saving the same index: it need not be saved twice."""


def save_index(
    folder: Path,
    name: str,
    fields: Mapping[str, Any],
    write: Callable[[Path], Mapping[str, str]],
) -> tuple[Path, dict[str, str]]:
    """Save the files that `write` puts into the folder that it is given; returns the folder and the files' checksums.

    `fields` go into the manifest, among them `format` and `generation`. `write` returns the checksums of the files that
    it took from an older data folder; those of the others are computed. `RetrievalError` names the index by `name`;
    `SavedElsewhereError` when another saves it now.
    """
    data = folder / f"data-{secrets.token_hex(8)}"
    try:
        make_folder(folder)
        with _alone(folder, name):
            return data, _written(folder, data, fields, write)
    except OSError as error:
        with suppress(OSError):
            remove_tree(data)  # on a full disk, the space is needed
        raise RetrievalError(f"The {name} index in {folder} cannot be written: {error}.") from error


@contextmanager
def _alone(folder: Path, name: str) -> Iterator[None]:
    """Save while no other does; `SavedElsewhereError` when one does now."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a file system without locks: then the last one to save wins
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SavedElsewhereError(f"The {name} index in {folder} is being saved by another process.") from None
        yield
    finally:
        os.close(descriptor)


def _written(
    folder: Path, data: Path, fields: Mapping[str, Any], write: Callable[[Path], Mapping[str, str]]
) -> dict[str, str]:
    """Write the data folder, make it the one of the index, and delete the others; returns its files' checksums."""
    data.mkdir()
    known = write(data)
    files = {path.name: known.get(path.name) or _digest(path) for path in sorted(data.iterdir())}
    temporary = data / MANIFEST
    manifest = {**fields, "data": data.name, "files": files}
    write_plain(temporary, json.dumps(manifest, indent=1).encode())
    for path in (*data.iterdir(), data):
        sync_path(path)
    temporary.replace(folder / MANIFEST)
    sync_path(folder)
    for old in folder.glob("data-*"):
        if old != data:
            with suppress(OSError):  # if it stays, it takes space until the next save
                remove_tree(old)
    return files


def load_index(
    folder: Path,
    name: str,
    form: int,
    read: Callable[[Path, dict[str, Any]], T],
    checked: Mapping[Stamp, str],
) -> T:
    """Check every file, then return what `read` makes of the data folder and the manifest.

    `form` is the format that the manifest must have. A file that has been `checked`, by its stamp, and found to have
    the checksum that the manifest says, is not read again. `RetrievalError` for any damage.
    """
    try:
        manifest = _manifest(folder, form)
        while True:
            try:
                data = folder / manifest["data"]
                if not is_folder(data):
                    raise FileNotFoundError(f"{data.name} is not there")
                if {path.name for path in data.iterdir()} - manifest["files"].keys():
                    raise ValueError(f"{data.name} holds files that its manifest does not name")
                for file, digest in manifest["files"].items():
                    if checked.get(stamp_of(data / file)) != digest and _digest(data / file) != digest:
                        raise ValueError(f"{file} does not match its checksum")
                return read(data, manifest)
            except FileNotFoundError:
                # Another process may have replaced the index since the manifest was read. Then read the new one.
                if (newer := _manifest(folder, form)) == manifest:
                    raise
                manifest = newer
    except (
        OSError,
        ArithmeticError,
        AttributeError,
        ConfigError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise RetrievalError(
            f"The {name} index in {folder} is missing or damaged ({error}); rebuild it from the store."
        ) from error


def saved_generation(folder: Path) -> int | None:
    """The generation that the saved index has by its manifest, which is not checked further; None if it names none."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        return whole_number(read_json(folder / MANIFEST)["generation"])
    return None


def stamp_of(path: Path) -> Stamp:
    """The stamp of a regular file. What is no file has one that no checked file has, so that it is looked at again."""
    found = path.lstat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _manifest(folder: Path, form: int) -> dict[str, Any]:
    """The manifest. Every name in it has the form that `save_index` writes, so that none leads out of the folder."""
    if not is_folder(folder):
        raise FileNotFoundError(f"{folder} is not a folder")
    manifest = read_json(folder / MANIFEST)
    if not isinstance(manifest, dict) or manifest["format"] != form:
        raise ValueError(f"it is not of format {form}")
    data, files = manifest["data"], manifest["files"]
    if not isinstance(data, str) or not _DATA.fullmatch(data) or not isinstance(files, dict):
        raise ValueError("its manifest does not name a folder of its own")
    for file, digest in files.items():
        if not (_FILE.fullmatch(file) and isinstance(digest, str) and _DIGEST.fullmatch(digest)):
            raise ValueError("its manifest names files that no index has")
    return manifest


def read_json(path: Path) -> Any:
    """The content of a JSON file of the index; `ValueError` or `OSError` when it cannot be read."""
    return parse_json(read_plain(path))


def strings(found: Any, *, unique: bool = True) -> list[str]:
    """`found`; `ValueError` unless it is a list of texts, of which with `unique` none occurs twice."""
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise ValueError("it has something else where a list of texts should be")
    if unique and len(set(found)) != len(found):
        raise ValueError("a list has an entry twice")
    return found


def whole_number(found: Any) -> int:
    """`found`; `ValueError` unless it is a number as `Store.generation` gives it."""
    if type(found) is not int or not 0 <= found < 1 << 64:
        raise ValueError("it has something else where a number should be")
    return found


def _digest(path: Path) -> str:
    """The xxh3 of a file, read through a map: its pages are then cached for the index that maps it next."""
    import xxhash

    with os.fdopen(open_plain(path), "rb") as file:
        if not os.fstat(file.fileno()).st_size:  # nothing to map
            return xxhash.xxh3_128(b"").hexdigest()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return xxhash.xxh3_128(content).hexdigest()
