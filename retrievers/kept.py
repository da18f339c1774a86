"""How a retrieval index is kept on disk: replaced in one step, checked when it is read.

A folder holds `manifest.json` and the data folder that it names, `data-<hex>`. Saving writes a new data folder, syncs
it, and then replaces the manifest by rename, which is the one step that counts: whatever happens before it leaves the
old index in place, and there is never a moment without one. Old data folders go afterwards; who has mapped their
files keeps them until it lets go.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ragkv.errors import ConfigError, RetrievalError

__all__ = ["load_kept", "save_kept"]

_MANIFEST = "manifest.json"

T = TypeVar("T")


def save_kept(
    folder: Path,
    name: str,
    fields: Mapping[str, Any],
    write: Callable[[Path], Mapping[str, str]],
) -> tuple[Path, dict[str, str]]:
    """Keep what `write` puts into the folder that it is given; (that folder, checksum by file name).

    `fields` go into the manifest, `format` and `generation` among them. `write` returns the checksums of files that
    it took over from an older data folder; the others are computed here. `RetrievalError` says what `name` failed.
    """
    data = folder / f"data-{secrets.token_hex(8)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        data.mkdir()
        known = write(data)
        files = {path.name: known.get(path.name) or _digest(path) for path in sorted(data.iterdir())}
        temporary = data / _MANIFEST
        manifest = {**fields, "data": data.name, "files": files}
        temporary.write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        for path in (*data.iterdir(), data):
            _sync(path)
        temporary.replace(folder / _MANIFEST)
        _sync(folder)
        for old in folder.glob("data-*"):
            if old != data:
                shutil.rmtree(old, ignore_errors=True)  # left over, it costs space and goes next time
    except OSError as error:
        shutil.rmtree(data, ignore_errors=True)  # of a full disk, half an index is room
        raise RetrievalError(f"The {name} index in {folder} cannot be written: {error}.") from error
    return data, files


def load_kept(folder: Path, name: str, form: int, read: Callable[[Path, dict[str, Any]], T]) -> T:
    """What `read` makes of (data folder, manifest), after every file was checked; `RetrievalError` for any damage.

    `form` is the format that the manifest must have.
    """
    try:
        manifest = _manifest(folder, form)
        while True:
            try:
                data = folder / manifest["data"]
                for file, digest in manifest["files"].items():
                    if _digest(data / file) != digest:
                        raise ValueError(f"{file} does not match its checksum")
                return read(data, manifest)
            except FileNotFoundError:
                # Replaced by another process since the manifest was read? Then the new one is whole.
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


def _manifest(folder: Path, form: int) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
    if manifest["format"] != form:
        raise ValueError(f"format {manifest['format']}, not {form}")
    return manifest


def _digest(path: Path) -> str:
    """xxh3 of the file through a map: what is checked stays in the page cache for the index that maps it next."""
    import xxhash

    with path.open("rb") as file:
        if not path.stat().st_size:  # nothing to map
            return xxhash.xxh3_128(b"").hexdigest()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return xxhash.xxh3_128(content).hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
