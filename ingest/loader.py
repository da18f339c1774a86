"""Which parser a file gets: by its suffix, from those here and those that other packages add.

A package of yours adds one under the entry-point group `ragkv.loaders`: the entry's name is a suffix (`.epub`) or a
media type (`application/epub+zip`), its value a function from bytes to `Parsed` (docs/ingest.md). One for a type that
is known here takes the place of ours, so that a PDF can be read by OCR; a walk of folders imports none of them.
"""

from __future__ import annotations

import logging
import mimetypes
from functools import cache
from importlib import import_module
from typing import Any

from ragkv.boundary.plugin import PluginRegistry
from ragkv.errors import RagkvError
from ragkv.ingest.limit import Unreadable, check_sections, check_text, limits
from ragkv.ingest.parser import Parsed, require_tiling

__all__ = ["TEXT", "is_foreign", "media_type_of", "parse", "type_names"]

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
    ".csv": "text/csv",
    ".tsv": "text/tab-separated-values",
    ".jsonl": "application/jsonl",
    ".ndjson": "application/jsonl",
    ".json": "application/json",
}
_PARSERS = {
    TEXT: "plain:read_plain",
    "text/x-rst": "plain:read_plain",
    "text/markdown": "markdown:read_markdown",
    "text/html": "html:read_html",
    "application/pdf": "pdf:read_pdf",
    _TYPES[".docx"]: "word:read_docx",
    "text/csv": "table:read_csv",
    "text/tab-separated-values": "table:read_tsv",
    "application/jsonl": "record:read_jsonl",
    "application/json": "record:read_json",
}

logger = logging.getLogger(__name__)


def _media_type(name: str) -> str:
    """The media type that an entry's name stands for."""
    if "/" in name:
        return name.lower()
    suffix = _suffix(name)
    if suffix in _TYPES:
        return _TYPES[suffix]
    # Not what the system calls it if that is a type of ours: a loader for `.log` would get every `.txt`.
    known = mimetypes.guess_type(f"a{suffix}", strict=False)[0]
    return known if known and known not in _PARSERS else f"application/x-{suffix[1:]}"


def _suffix(name: str) -> str:
    return name.lower() if name.startswith(".") else f".{name.lower()}"


LOADERS = PluginRegistry("ragkv.loaders", key=_media_type)


@cache
def _added_types() -> dict[str, str]:
    """Suffix to media type, of what other packages read."""
    types: dict[str, str] = {}
    for media_type, entry in LOADERS.added.items():
        by_type = "/" in entry.name
        suffixes = mimetypes.guess_all_extensions(media_type, strict=False) if by_type else [_suffix(entry.name)]
        types |= dict.fromkeys(suffixes, media_type)
    return types


def media_type_of(name: str) -> str | None:
    """The media type of a suffix (`.md`, or `md`) or of its own name; None when nothing here reads it."""
    if "/" in name:
        name = name.lower()
        return name if name in _PARSERS or name in LOADERS else None
    return _TYPES.get(_suffix(name)) or _added_types().get(_suffix(name))


def type_names() -> list[str]:
    """Every suffix that is read, without its dot."""
    return sorted(suffix[1:] for suffix in {*_TYPES, *_added_types()})


def is_foreign(media_type: str) -> bool:
    """Whether another package's loader reads it."""
    return media_type in LOADERS


def parse(media_type: str, data: bytes) -> Parsed:
    """Parse the bytes of one file. Whatever goes wrong in a loader or a library under it, the error is `Unreadable`.

    So a fault costs one file and not the ingest.
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
            found = read(data)
        except Unreadable:
            raise
        except MemoryError as error:
            raise Unreadable(limits().too_much_memory()) from error
        except RecursionError as error:
            raise Unreadable("cannot be read: it is nested too deeply") from error
        except Exception as error:
            logger.debug("reading %s", media_type, exc_info=True)
            raise Unreadable(f"cannot be read: damaged structure ({type(error).__name__})") from error
        assert isinstance(found, Parsed)
        return found
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


def _checked(found: Any) -> Parsed:
    if not isinstance(found, Parsed):
        raise TypeError(f"it gave {type(found).__name__}, not ragkv.ingest.Parsed")
    if found.sections:
        require_tiling(found.text, found.sections)
    return found
