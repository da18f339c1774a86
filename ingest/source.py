"""Which files an ingest reads: a deterministic walk that gives a reason for everything it leaves out.

A document's id is an absolute path: links in the path of the given root are resolved, links *inside* the root are
kept. So an ingest from another working directory, or through a link to the folder, finds the same documents, and a
file behind a link that every deployment replaces (`..data` in Kubernetes) keeps its id.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ragkv.errors import UsageError
from ragkv.ingest.loader import TEXT, media_type_of

__all__ = ["Skipped", "SourceFile", "find_sources", "os_reason", "require_existing", "unsupported"]

_PIECE = 1 << 20  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A file to read, or bytes that are already here (`data`) or in another file (`held`), for which `path` is only a
    name.

    `document_id` is the absolute POSIX path. `name` is what a citation shows: the path below the given folder, or the
    file's own name, with more leading folders where two sources would have the same name. `size` is in bytes.
    """

    path: Path
    document_id: str
    name: str
    media_type: str
    size: int
    data: bytes | None = field(default=None, repr=False)
    held: Path | None = field(default=None, repr=False)

    @property
    def place(self) -> Path:
        """The file that holds the bytes, if they are not in `data`."""
        return self.held or self.path

    def read(self, most: int = -1) -> bytes:
        """The bytes, at most `most` of them; raises OSError as `Path.read_bytes` does."""
        if self.data is not None:
            return self.data
        with self.place.open("rb") as stream:
            if most < 0:
                return stream.read()
            # `read(n)` allocates n bytes before it reads, and `most` is far above the size of most files.
            found = stream.read(min(most, os.fstat(stream.fileno()).st_size + 1))
            while len(found) < most and (piece := stream.read(min(most - len(found), _PIECE))):
                found += piece  # the file has grown, or it reports no size, as files of /proc do
            return found

    def digest(self) -> str:
        """The blake2b of the bytes, which are read in pieces; raises OSError like `read`."""
        if self.data is not None:
            return hashlib.blake2b(self.data).hexdigest()
        with self.place.open("rb") as stream:
            return hashlib.file_digest(stream, "blake2b").hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A path that was left out; `reason` is a phrase for people ("empty file", "unsupported type .docx")."""

    path: Path
    reason: str


def find_sources(paths: Sequence[Path | SourceFile]) -> tuple[list[SourceFile], list[Skipped]]:
    """Walk files and folders in sorted order; a real file is listed once, under its first name.

    Hidden files and folders below a given folder are left out. A file that is named explicitly is taken whatever its
    suffix: as text, and the reader finds out whether it is text. A `SourceFile` is taken as it is. Raises `UsageError`
    for a missing path, before anything is walked.
    """
    require_existing(paths)
    sources: list[SourceFile] = []
    skipped: list[Skipped] = []
    seen: set[str] = set()
    for path in paths:
        if isinstance(path, SourceFile):
            sources.append(path)
            continue
        explicit = not path.is_dir()
        root = path.parent.resolve() / path.name if explicit else path.resolve()
        for found in [root] if explicit else _walk(root, seen, skipped):
            if (real := os.path.realpath(found)) in seen:
                continue
            entry = _examine(found, found.name if explicit else found.relative_to(root).as_posix(), explicit)
            if isinstance(entry, SourceFile):
                sources.append(entry)
                seen.add(real)
            else:
                skipped.append(entry)
    return _distinguish(sources), skipped


def require_existing(paths: Sequence[Path | SourceFile]) -> None:
    """`UsageError` for the first path that does not exist."""
    for path in paths:
        if isinstance(path, Path) and not path.exists():
            raise UsageError(f"No such file or folder: {path}.")


def _walk(folder: Path, seen: set[str], skipped: list[Skipped]) -> Iterator[Path]:
    """Yield what is below `folder`, sorted by name; a real folder is entered once, so loops of links end."""
    if (real := os.path.realpath(folder)) in seen:
        return
    seen.add(real)
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        skipped.append(Skipped(path=folder, reason=os_reason(error)))
        return
    for path in entries:
        if path.name.startswith("."):
            continue
        if path.is_dir():
            yield from _walk(path, seen, skipped)
        else:
            yield path


def _examine(path: Path, name: str, explicit: bool) -> SourceFile | Skipped:
    try:
        status = path.stat()
        path.as_posix().encode()
    except UnicodeEncodeError:
        return Skipped(path=path, reason="file name is not valid UTF-8")
    except FileNotFoundError:  # its folder lists it, so it is a link
        return Skipped(path=path, reason="broken link")
    except OSError as error:
        return Skipped(path=path, reason=os_reason(error))
    if not stat.S_ISREG(status.st_mode):
        return Skipped(path=path, reason="not a regular file")
    media_type = (media_type_of(path.suffix) if path.suffix else None) or (TEXT if explicit else None)
    if media_type is None:
        return Skipped(path=path, reason=unsupported(path))
    if status.st_size == 0:
        return Skipped(path=path, reason="empty file")
    return SourceFile(path=path, document_id=path.as_posix(), name=name, media_type=media_type, size=status.st_size)


def unsupported(path: Path) -> str:
    """The reason for a file that no loader reads and, if named explicitly, not text either."""
    return f"unsupported type {path.suffix.lower()}" if path.suffix else "unsupported type (no suffix)"


def os_reason(error: OSError) -> str:
    """Why the system refused a file, as a phrase for `Skipped`."""
    return "permission denied" if isinstance(error, PermissionError) else (error.strerror or str(error)).lower()


def _distinguish(sources: list[SourceFile]) -> list[SourceFile]:
    """Lengthen equal names by the folders above until they differ; whole paths differ, so this ends."""
    while True:
        groups: dict[str, list[int]] = {}
        for index, source in enumerate(sources):
            groups.setdefault(source.name, []).append(index)
        clashes = [index for group in groups.values() if len(group) > 1 for index in group]
        if not clashes:
            return sources
        for index in clashes:
            source = sources[index]
            if source.data is not None or source.held is not None:  # the user chose it, and may have chosen a file's
                continue
            # One more trailing part of the absolute path than the name has now.
            parts = Path(source.document_id).parts[-len(Path(source.name).parts) - 1 :]
            sources[index] = replace(source, name=Path(*parts).as_posix())
