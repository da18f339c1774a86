"""Parsers of documents: their result type, their limits, and the registry by suffix and media type.

A parser is a function from a file's bytes to `Parsed`. It is deterministic and raises `Unreadable` with a reason for
the user. Parsers call `check_text` and `check_sections` while they work, which raise `Unreadable` as soon as there is
too much. Memory and time are limited by the operating system instead (`ragkv.ingest.sandbox`), because a parser cannot
be trusted to check those itself.

A package can add parsers under the entry-point group `ragkv.loaders`. The name is a suffix (`.epub`) or a media type
(`application/epub+zip`), the value a function from bytes to `Parsed` (docs/ingest.md). It takes precedence over a
built-in parser, for example to read PDF by OCR. Walking folders imports no parser.
"""

from __future__ import annotations

import logging
import mimetypes
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Self

from ragkv.config import IngestConfig, byte_count
from ragkv.errors import RagkvError
from ragkv.util.plugins import PluginRegistry

logger = logging.getLogger(__name__)


class Unreadable(Exception):  # noqa: N818 - a state, as `Skipped` is
    """Why a document cannot be read, as a phrase for the user. `read_source` adds the document's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParseLimits:
    """`[ingest]` of `ragkv.toml`: bytes of the file, characters of text, bytes of memory, CPU seconds, languages."""

    file: int
    characters: int
    memory: int
    seconds: int
    ocr: str = "auto"

    @classmethod
    def of(cls, config: IngestConfig) -> Self:
        return cls(
            file=byte_count("ingest.max_file", config.max_file),
            characters=config.max_characters,
            memory=byte_count("ingest.max_memory", config.max_memory),
            seconds=config.max_seconds,
            ocr=config.ocr,
        )

    @property
    def sections(self) -> int:
        """The most pages, headings or rows of a document; each costs as much memory as a few words."""
        return max(1000, self.characters // 32)

    def seconds_for(self, size: int) -> int:
        """CPU seconds for a file of `size` bytes: the base limit plus 10 per MiB."""
        return self.seconds + 10 * (size >> 20)

    def check_file(self, size: int) -> None:
        if size > self.file:
            raise Unreadable(f"larger than {self.file:,} bytes, which is ingest.max_file")

    def too_much_memory(self) -> str:
        return f"takes more than {self.memory >> 20:,} MiB of memory to read, which is ingest.max_memory"

    def too_long(self, size: int) -> str:
        return f"takes more than {self.seconds_for(size)} s of computing to read: raise ingest.max_seconds"


_in_force: ContextVar[ParseLimits] = ContextVar("limits")
_DEFAULT = ParseLimits.of(IngestConfig())


def limits() -> ParseLimits:
    """The limits in force: those of the enclosing `limited` block, else the defaults."""
    return _in_force.get(_DEFAULT)


@contextmanager
def limited(to: ParseLimits) -> Iterator[None]:
    """Use these limits inside the `with` block."""
    token = _in_force.set(to)
    try:
        yield
    finally:
        _in_force.reset(token)


def check_text(characters: int) -> None:
    """Raise `Unreadable` if a document's text may not have this many characters."""
    most = limits().characters
    if characters > most:
        raise Unreadable(f"its text is longer than {most:,} characters, which is ingest.max_characters")


def check_sections(count: int) -> None:
    """Raise `Unreadable` if a document may not have this many pages, headings or rows."""
    most = limits().sections
    if count > most:
        raise Unreadable(f"it has more than {most:,} pages, headings or rows: raise ingest.max_characters")


HEADING_SEPARATOR = " > "
_LONGEST_HEADING = 300  # characters; a heading is repeated in the paths of all sections below it


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Characters `[start, end)` of a text: a page (counted from 1), the text under a heading, or a row.

    `heading` is a path ("Guide > Install"). A section that is `alone` never shares a chunk with its neighbours.
    """

    start: int
    end: int
    page: int | None = None
    heading: str | None = None
    alone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """The result of a parser. `sections` cover `text` without a gap; without any, the whole text is one section.

    `left_out` names each part that could not be read, with the reason ("page 3: damaged structure").
    """

    text: str
    sections: Sequence[Section] = ()
    title: str | None = None
    left_out: Sequence[str] = ()


LIBRARY_LOCK = threading.Lock()
"""Held while a parser changes a process-wide setting of a library."""


@contextmanager
def silenced(*names: str) -> Iterator[None]:
    """Silence the warnings of libraries about bad input, which `Unreadable` reports. One thread at a time."""
    noisy = [logging.getLogger(name) for name in names]
    with LIBRARY_LOCK:
        levels = [library.level for library in noisy]
        for library in noisy:
            library.setLevel(logging.CRITICAL + 1)
        try:
            yield
        finally:
            for library, level in zip(noisy, levels, strict=True):
                library.setLevel(level)


def heading_path(path: Sequence[tuple[int, str]], level: int, words: str) -> list[tuple[int, str]]:
    """The path of (level, words) below a heading: what stood above it at lower levels, and itself."""
    if len(words) > _LONGEST_HEADING:
        words = words[: _LONGEST_HEADING - 1] + "…"
    return [*(above for above in path if above[0] < level), (level, words)]


def sections_under(text: str, headings: Iterable[tuple[int, int, str]]) -> list[Section]:
    """Cut a text at its headings, given in order as (offset, level, words). A section's heading is its full path."""
    sections: list[Section] = []
    path: list[tuple[int, str]] = []
    start = named = 0

    def close(end: int) -> None:
        nonlocal named
        name = HEADING_SEPARATOR.join(words for _, words in path if words) or None
        named += len(name or "")
        check_text(named)
        check_sections(len(sections) + 1)
        sections.append(Section(start=start, end=end, heading=name))

    for position, level, name in headings:
        if position > start:
            close(position)
        path = heading_path(path, level, name)
        start = position
    if start < len(text) or not sections:
        close(len(text))
    return sections


def join_rows(rows: Iterable[tuple[str, str]]) -> tuple[str, list[Section]]:
    """One text of many records, given as (place, text), with a section for each; blank records are dropped.

    Rows never share a chunk. A row is the citation, as a page is. Neighbouring rows may be unrelated, so retrieval
    finds a chunk of several rows less well. And a separate row keeps its tokens, and so its stored KV, when other
    rows are inserted or removed.
    """
    return join_sections((text, {"heading": place, "alone": True}) for place, text in rows)


def join_sections(parts: Iterable[tuple[str, dict[str, Any]]]) -> tuple[str, list[Section]]:
    """One text of several, joined by blank lines, with a section for each; blank ones are dropped.

    `parts` are (text, further fields of the section). Raises `Unreadable` as soon as a limit is exceeded.
    """
    filled: list[tuple[str, dict[str, Any]]] = []
    size = 0
    for text, fields in parts:
        if stripped := text.strip():
            filled.append((stripped, fields))
            size += len(stripped) + 2
            check_text(size)
            check_sections(len(filled))
    sections: list[Section] = []
    start = 0
    for number, (text, fields) in enumerate(filled, start=1):
        end = start + len(text) + (0 if number == len(filled) else 2)
        sections.append(Section(start=start, end=end, **fields))
        start = end
    return "\n\n".join(text for text, _ in filled), sections


def require_tiling(text: str, sections: Sequence[Section]) -> None:
    """ValueError unless the sections cover the text from its first character to its last, one after the other."""
    ends = [0, *(section.end for section in sections)]
    if ends[-1] != len(text) or [section.start for section in sections] != ends[:-1]:
        raise ValueError("its sections do not tile the text")


TEXT = "text/plain"

_TYPES = {
    ".txt": TEXT,
    ".rst": "text/x-rst",
    ".md": "text/markdown",
    ".markdown": "text/markdown",
    ".html": "text/html",
    ".htm": "text/html",
    ".xhtml": "text/html",
    ".pdf": "application/pdf",
    ".docx": "application/vnd.openxmlformats-officedocument.wordprocessingml.document",
    ".xlsx": "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet",
    ".pptx": "application/vnd.openxmlformats-officedocument.presentationml.presentation",
    ".epub": "application/epub+zip",
    ".odt": "application/vnd.oasis.opendocument.text",
    ".ods": "application/vnd.oasis.opendocument.spreadsheet",
    ".odp": "application/vnd.oasis.opendocument.presentation",
    ".eml": "message/rfc822",
    ".mbox": "application/mbox",
    ".csv": "text/csv",
    ".tsv": "text/tab-separated-values",
    ".jsonl": "application/jsonl",
    ".ndjson": "application/jsonl",
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".tif": "image/tiff",
    ".tiff": "image/tiff",
    ".json": "application/json",
}
_VARIANTS = {"docx": ("docm", "dotx", "dotm"), "xlsx": ("xlsm", "xltx", "xltm"), "pptx": ("pptm", "ppsx", "potx")}
_TYPES |= {f".{suffix}": _TYPES[f".{kind}"] for kind, suffixes in _VARIANTS.items() for suffix in suffixes}
_PARSERS = {
    TEXT: "text:read_plain",
    "text/x-rst": "text:read_plain",
    "text/markdown": "text:read_markdown",
    "text/html": "html:read_html",
    "application/pdf": "pdf:read_pdf",
    **{f"image/{kind}": "ocr:read_image" for kind in ("png", "jpeg", "tiff")},
    "application/sitemap+xml": "web:read_sitemap",
    **{_TYPES[f".{kind}"]: f"office:read_{kind}" for kind in ["docx", "xlsx", "pptx", "epub", "odt", "ods", "odp"]},
    **{_TYPES[f".{kind}"]: f"mail:read_{kind}" for kind in ("eml", "mbox")},
    "text/csv": "text:read_csv",
    "text/tab-separated-values": "text:read_tsv",
    "application/jsonl": "text:read_jsonl",
    "application/json": "text:read_json",
}


def _media_type(name: str) -> str:
    """The media type for an entry point's name."""
    if "/" in name:
        return name.lower()
    suffix = _suffix(name)
    if suffix in _TYPES:
        return _TYPES[suffix]
    # Not the system's type if it is one of ours: a loader for `.log` would get every `.txt`.
    known = mimetypes.guess_type(f"a{suffix}", strict=False)[0]
    return known if known and known not in _PARSERS else f"application/x-{suffix[1:]}"


def _suffix(name: str) -> str:
    return name.lower() if name.startswith(".") else f".{name.lower()}"


LOADERS = PluginRegistry("ragkv.loaders", key=_media_type)


@cache
def _added_types() -> dict[str, str]:
    """Suffix to media type, for loaders of other packages."""
    types: dict[str, str] = {}
    for media_type, entry in LOADERS.added.items():
        by_type = "/" in entry.name
        suffixes = mimetypes.guess_all_extensions(media_type, strict=False) if by_type else [_suffix(entry.name)]
        types |= dict.fromkeys(suffixes, media_type)
    return types


def media_type_of(name: str) -> str | None:
    """The media type of a suffix (`.md` or `md`) or of its own name; None if no loader reads it."""
    if "/" in name:
        name = name.lower()
        return name if name in _PARSERS or name in LOADERS else None
    return _TYPES.get(_suffix(name)) or _added_types().get(_suffix(name))


def type_names() -> list[str]:
    """All supported suffixes, without the dot."""
    return sorted(suffix[1:] for suffix in {*_TYPES, *_added_types()})


def is_foreign(media_type: str) -> bool:
    """Whether the loader comes from another package."""
    return media_type in LOADERS


def parse(media_type: str, data: bytes) -> Parsed:
    """Parse the bytes of one file.

    Every error of a loader or its libraries becomes `Unreadable`, so a fault costs one file and not the ingest.
    """
    parsed = _parsed(media_type, data)
    check_text(len(parsed.text))
    check_sections(len(parsed.sections))
    return parsed


def _parsed(media_type: str, data: bytes) -> Parsed:
    if media_type not in LOADERS:
        module, _, function = _PARSERS[media_type].partition(":")
        read = getattr(import_module(f"ragkv.ingest.{module}"), function)
        try:
            parsed = read(data)
        except Unreadable:
            raise
        except MemoryError as error:
            raise Unreadable(limits().too_much_memory()) from error
        except RecursionError as error:
            raise Unreadable("cannot be read: it is nested too deeply") from error
        except Exception as error:
            logger.debug("reading %s", media_type, exc_info=True)
            raise Unreadable(f"cannot be read: damaged structure ({type(error).__name__})") from error
        assert isinstance(parsed, Parsed)
        return parsed
    source = LOADERS.added[media_type].value
    try:
        return _checked(LOADERS.load(media_type)(data))
    except Unreadable:
        raise
    except RagkvError as error:  # made to be read: a missing extra, say
        raise Unreadable(str(error).rstrip(".")) from error
    except ImportError as error:
        raise Unreadable(f"its loader {source} lacks something ({error}); install it") from error
    except Exception as error:
        logger.debug("loader %s", source, exc_info=True)
        raise Unreadable(f"its loader {source} failed ({type(error).__name__}: {error})") from error


def _checked(result: Any) -> Parsed:
    if not isinstance(result, Parsed):
        raise TypeError(f"it gave {type(result).__name__}, not ragkv.ingest.Parsed")
    if result.sections:
        require_tiling(result.text, result.sections)
    return result
