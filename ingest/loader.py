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
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ragkv.errors import RagkvError
from ragkv.ingest.limit import Unreadable, check_sections, check_text, limits
from ragkv.ingest.parser import Parsed

__all__ = ["GROUP", "TEXT", "is_foreign", "media_type_of", "parse", "type_names"]

GROUP = "ragkv.loaders"
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


@cache
def _plugins() -> tuple[dict[str, str], dict[str, EntryPoint]]:
    """Suffix to media type and media type to entry point; reading them walks every installed package, once."""
    types: dict[str, str] = {}
    parsers: dict[str, EntryPoint] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value)):
        name = entry.name.lower()
        if "/" in name:
            media_type, suffixes = name, mimetypes.guess_all_extensions(name, strict=False)
        else:
            suffix = name if name.startswith(".") else f".{name}"
            media_type, suffixes = _TYPES.get(suffix) or _type_by_name(suffix), [suffix]
        if media_type in parsers:
            logger.warning("two loaders for %s: %s is used, not %s", name, parsers[media_type].value, entry.value)
            continue
        parsers[media_type] = entry
        types |= dict.fromkeys(suffixes, media_type)
    return types, parsers


def _type_by_name(suffix: str) -> str:
    """What the system calls it, unless that is a type of ours: then a loader for `.log` would get every `.txt`."""
    known = mimetypes.guess_type(f"a{suffix}", strict=False)[0]
    return known if known and known not in _PARSERS else f"application/x-{suffix[1:]}"


def media_type_of(name: str) -> str | None:
    """The media type of a suffix (`.md`, or `md`) or of its own name; None when nothing here reads it."""
    types, parsers = _plugins()
    name = name.lower()
    if "/" in name:
        return name if name in _PARSERS or name in parsers else None
    suffix = name if name.startswith(".") else f".{name}"
    return _TYPES.get(suffix) or types.get(suffix)


def type_names() -> list[str]:
    """Every suffix that is read, without its dot."""
    return sorted(suffix[1:] for suffix in {*_TYPES, *_plugins()[0]})


def is_foreign(media_type: str) -> bool:
    """Whether another package's loader reads it."""
    return media_type in _plugins()[1]


def parse(media_type: str, data: bytes) -> Parsed:
    """The bytes of one file as `Parsed`. Raises `Unreadable`, and nothing else, for whatever is wrong with them.

    That holds for whatever a loader or the library under it does: its fault costs one file, not the ingest.
    """
    parsed = _parsed(media_type, data)
    check_text(len(parsed.text))
    check_sections(len(parsed.sections))
    return parsed


def _parsed(media_type: str, data: bytes) -> Parsed:
    entry = _plugins()[1].get(media_type)
    if entry is None:
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
    try:
        return _checked(entry.load()(data))
    except Unreadable:
        raise
    except RagkvError as error:  # made to be read: a missing extra, say
        raise Unreadable(str(error).rstrip(".")) from error
    except ImportError as error:
        raise Unreadable(f"its loader {entry.value} lacks something ({error}); install it") from error
    except Exception as error:
        logger.debug("loader %s", entry.value, exc_info=True)
        raise Unreadable(f"its loader {entry.value} failed ({type(error).__name__}: {error})") from error


def _checked(found: Any) -> Parsed:
    if not isinstance(found, Parsed):
        raise TypeError(f"it gave {type(found).__name__}, not ragkv.ingest.Parsed")
    ends = [0, *(section.end for section in found.sections)]
    if found.sections and (ends[-1] != len(found.text) or [s.start for s in found.sections] != ends[:-1]):
        raise ValueError("its sections do not tile the text")
    return found
