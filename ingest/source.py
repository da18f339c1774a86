"""The sources of an ingest: a deterministic walk over files with a reason for each one left out, or bytes.

A document's id is an absolute path. Links in the path of the given root are resolved, links *inside* the root are kept.
So an ingest from another working directory, or through a link to the folder, finds the same documents, and a file
behind a link that every deployment replaces (`..data` in Kubernetes) keeps its id.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Protocol, TypeAlias

from ragkv.errors import UsageError
from ragkv.ingest.charset import decode
from ragkv.ingest.parser import TEXT, Unreadable, is_foreign, media_type_of, type_names
from ragkv.ingest.text import sniff_delimiter
from ragkv.util.display import one_line
from ragkv.util.files import exists, open_regular, refusal

_READ_BYTES = 1 << 20  # bytes
_ADDRESS = re.compile(r"(https?|ftps?|s3|gs|file):/{1,2}(.*)", re.IGNORECASE | re.DOTALL)
"""A URL where a path was expected; `Path` turns two slashes into one."""


class Remote(Protocol):
    """Fetches sources that are not on this machine (`ragkv.ingest.web`)."""

    skipped: list[Skipped]

    def get(self, source: SourceFile) -> SourceFile:
        """The source with its bytes, type and size; raises UnreadableSource."""
        ...

    def is_gone(self, document_id: str) -> bool:
        """Whether a document from this place no longer exists there."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A file to read, or bytes in memory (`data`) or in another file (`held`), for which `path` is only a name. With a
    `remote`, `fetched` gets its bytes.

    `document_id` is the absolute POSIX path. `name` is for citations: the path below the given folder, or the file's
    name, with more leading folders if two sources would share it. `size` is in bytes.
    """

    path: Path
    document_id: str
    name: str
    media_type: str
    size: int
    data: bytes | None = field(default=None, repr=False)
    held: Path | None = field(default=None, repr=False)
    remote: Remote | None = field(default=None, repr=False)

    @property
    def shown(self) -> Path | str:
        """The source's name in lists: its path, or its URL."""
        return self.document_id if "://" in self.document_id else self.path

    def fetched(self) -> SourceFile:
        """This source with its bytes, if it is remote."""
        return self if self.remote is None else self.remote.get(self)

    @property
    def place(self) -> Path:
        """The file with the bytes, unless they are in `data`."""
        return self.held or self.path

    def read(self, most: int = -1) -> bytes:
        """The bytes, at most `most` of them; OSError as of `Path.read_bytes`, or if it is no regular file any more."""
        if self.data is not None:
            return self.data
        with os.fdopen(open_regular(self.place), "rb") as stream:
            if most < 0:
                return stream.read()
            # `read(n)` allocates n bytes before it reads, and `most` is far above the size of most files.
            found = stream.read(min(most, os.fstat(stream.fileno()).st_size + 1))
            while len(found) < most and (data := stream.read(min(most - len(found), _READ_BYTES))):
                found += data  # the file has grown, or reports no size, like files in /proc
            return found

    def digest(self) -> str:
        """The blake2b of the bytes, read in blocks; raises OSError like `read`.

        A file that has grown beyond `size` is another one, whatever it is, so one byte more is read and not all of it.
        """
        if self.data is not None:
            return hashlib.blake2b(self.data).hexdigest()
        hashed, left = hashlib.blake2b(), self.size + 1
        with os.fdopen(open_regular(self.place), "rb") as stream:
            while left and (data := stream.read(min(left, _READ_BYTES))):
                hashed.update(data)
                left -= len(data)
        return hashed.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A path or URL that was left out; `reason` is a phrase for the user ("empty file", "unsupported type .docx")."""

    path: Path | str
    reason: str


GivenPath: TypeAlias = "str | os.PathLike[str] | SourceFile"
"""A file or a folder."""


def flat_paths(given: Iterable[object]) -> list[Path | SourceFile]:
    """Paths and lists of paths as one list; UsageError for anything else."""
    paths: list[Path | SourceFile] = []
    for item in given:
        if isinstance(item, SourceFile):
            paths.append(item)
        elif isinstance(item, (str, os.PathLike)):
            if not (path := os.fspath(item)):
                raise UsageError('An empty path names no file; for the working directory, give ".".')
            paths.append(Path(os.fsdecode(path)))
        elif isinstance(item, Iterable) and not isinstance(item, (bytes, bytearray)):
            paths += flat_paths(item)
        else:
            raise UsageError(f"Give files and folders as paths, or as lists of paths, not as {type(item).__name__}.")
    return paths


def find_sources(paths: Sequence[Path | SourceFile]) -> tuple[list[SourceFile], list[Skipped]]:
    """Walk files and folders in sorted order; a real file is listed once, under its first name.

    Hidden files and folders, and indexes, below a given folder are left out. A file that is named explicitly is
    accepted with any suffix and read as text if possible. A `SourceFile` is returned unchanged. Raises `UsageError` for
    a missing path before the walk.
    """
    require_existing(paths)
    sources: list[SourceFile] = []
    skipped: list[Skipped] = []
    seen: set[str] = set()
    for path in paths:
        if isinstance(path, SourceFile):
            sources.append(path)
            if path.remote is not None and not any(path.remote is each.remote for each in sources[:-1]):
                skipped += path.remote.skipped
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
        if isinstance(path, Path) and not exists(path):
            if address := _ADDRESS.fullmatch(str(path)):
                raise UsageError(
                    f"{address[1]}://{address[2]} is an address, and only files and folders are read here. `ragkv "
                    "ingest` reads http and https, as does ragkv.ingest.from_web; else download it, and name the file."
                )
            raise UsageError(f"No such file or folder: {path}.")


def _walk(root: Path, seen: set[str], skipped: list[Skipped]) -> Iterator[Path]:
    """Yield what is below `root`, sorted by name; a real folder is entered once, so loops of links end."""
    waiting = [root]
    while waiting:  # not by recursion: folders may be nested more deeply than that goes
        path = waiting.pop()
        try:
            if not path.is_dir():
                yield path
                continue
            is_index = path != root and (path / "store" / "data.mdb").is_file()  # perhaps the one that is made
            if not is_index and (real := os.path.realpath(path)) not in seen:
                seen.add(real)
                waiting += sorted((each for each in path.iterdir() if not each.name.startswith(".")), reverse=True)
        except OSError as error:
            skipped.append(Skipped(path=path, reason=os_reason(error)))


def leads_to_folder(path: Path, *, denied: bool) -> bool:
    """Whether there is a folder, perhaps behind a link; `denied` if the system does not say."""
    try:
        return path.is_dir()
    except OSError:
        return denied


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
    # A folder's pictures are seldom documents: those that are named are read, by OCR.
    if media_type is None or (media_type.startswith("image/") and not explicit and not is_foreign(media_type)):
        return Skipped(path=path, reason=unsupported(path))
    if status.st_size == 0:
        return Skipped(path=path, reason="empty file")
    return SourceFile(path=path, document_id=path.as_posix(), name=name, media_type=media_type, size=status.st_size)


def unsupported(path: Path) -> str:
    """The reason for a file without a loader; if named explicitly, it is no text either."""
    return f"unsupported type {path.suffix.lower()}" if path.suffix else "unsupported type (no suffix)"


def os_reason(error: OSError) -> str:
    """Why the system refused a file, as a phrase for `Skipped`."""
    return "permission denied" if isinstance(error, PermissionError) else refusal(error).lower()


def _distinguish(sources: list[SourceFile]) -> list[SourceFile]:
    """Lengthen equal names by parent folders until they differ; whole paths differ, so this ends."""
    while True:
        groups: dict[str, list[int]] = {}
        for index, source in enumerate(sources):
            groups.setdefault(source.name, []).append(index)
        clashes = [index for group in groups.values() if len(group) > 1 for index in group]
        if not clashes:
            return sources
        for index in clashes:
            source = sources[index]
            if source.data is None and source.held is None and source.remote is None:  # else the user chose its name
                # One more trailing part of the absolute path than the current name has.
                parts = Path(source.document_id).parts[-len(Path(source.name).parts) - 1 :]
                sources[index] = replace(source, name=Path(*parts).as_posix())


_SAMPLE = 1 << 16  # bytes from which the type is guessed


def from_bytes(data: bytes | Path, *, name: str = "stdin", media_type: str | None = None) -> SourceFile:
    """A source for `RagKV.ingest`. The name is its identity: the next document with that name replaces it.

    `data` may be the path of a file with the bytes, which must not change until the ingest has read it.

    `media_type` is a suffix ("md") or a media type; without it, the name's suffix decides, else the bytes. Raises
    UsageError for a name that is blank, too long or holds control characters, and for a type that no loader reads.
    """
    if not name.strip() or len(name) > 500 or one_line(name) != name:
        raise UsageError("A document's name must be 1 to 500 printable characters; choose another --name.")
    kind = media_type_of(media_type) if media_type is not None else None
    if media_type is not None and kind is None:
        raise UsageError(f"No loader reads the type {media_type!r}; choose one of {', '.join(type_names())}.")
    suffix = Path(name).suffix
    kind = kind or (media_type_of(suffix) if suffix else None)
    kind = kind or sniff(data.read_bytes() if isinstance(data, Path) else data)
    document = SourceFile(path=Path(name), document_id=f"stdin:{name}", name=name, media_type=kind, size=0)
    if isinstance(data, Path):
        return replace(document, held=data, size=data.stat().st_size)
    return replace(document, data=data, size=len(data))


def sniff(data: bytes) -> str:
    """Guess the media type of bytes. The fallback is plain text, whose loader reads anything readable."""
    if b"%PDF-" in data[:1024]:
        return _type("pdf")
    pictures = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpg", b"II*\0": "tif", b"MM\0*": "tif"}
    if kind := next((kind for mark, kind in pictures.items() if data.startswith(mark)), None):
        return _type(kind)
    if data.startswith(b"PK\x03\x04"):
        # a ZIP stores its members' names uncompressed; its directory, which may be huge, is not read
        kinds = {b"word/": "docx", b"xl/": "xlsx", b"ppt/": "pptx", b"epub+zip": "epub"}
        kinds |= {b"opendocument.text": "odt", b"opendocument.spr": "ods", b"opendocument.pre": "odp"}
        return next((_type(kind) for mark, kind in kinds.items() if mark in data), TEXT)
    sample = data[:_SAMPLE] if len(data) <= _SAMPLE else data[:_SAMPLE].rpartition(b"\n")[0] or data[:_SAMPLE]
    try:
        text = decode(sample[: len(sample) & ~1] if sample[:2] in (b"\xff\xfe", b"\xfe\xff") else sample)
    except Unreadable:
        return TEXT
    text = text.lstrip("\ufeff \t\n")
    if _is_html(text):
        return _type("html")
    if text[:1] in ("{", "["):
        return _type("jsonl") if _is_json(text.partition("\n")[0]) else _type("json")
    if re.search(r"(?m)^#{1,6} \S|^(```|~~~)|^\|?[ :]*---+[ :]*\|", text):
        return _type("md")
    return _type("csv") if _is_table(text) else TEXT


def _type(suffix: str) -> str:
    found = media_type_of(suffix)
    assert found is not None  # all types that `sniff` names are built in
    return found


def _is_html(text: str) -> bool:
    """Look at the first tag, after an XML declaration and comments."""
    if text[:5].lower() == "<?xml":
        text = text.partition(">")[2].lstrip()
    while text.startswith("<!--"):  # a regular expression for the comments could take exponential time
        text = text.partition("-->")[2].lstrip()
    return re.match(r"(?i)<(!doctype html|html|head|body)\b", text) is not None


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _is_table(text: str) -> bool:
    """At least three rows with the same number of short fields; prose has commas too, but less regularly."""
    delimiter = sniff_delimiter(text)
    if delimiter is None:
        return False
    rows = list(islice(csv.reader(text.splitlines(), delimiter=delimiter), 50))
    widths = {len(row) for row in rows}
    few = 3 if delimiter == "," else 2
    short = all(len(field) < 80 and not field.startswith(" ") for row in rows for field in row)
    return len(rows) > 2 and len(widths) == 1 and min(widths) >= few and short
