"""A document that comes as bytes, from a pipe or a program, and not as a file of the user's."""

from __future__ import annotations

import csv
import json
import re
from itertools import islice
from pathlib import Path

from ragkv.errors import UsageError
from ragkv.ingest.loader import TEXT, media_type_of, type_names
from ragkv.ingest.parser import Unreadable
from ragkv.ingest.plain import decode
from ragkv.ingest.source import SourceFile
from ragkv.ingest.table import sniff_delimiter

__all__ = ["sniff", "supplied"]

_SAMPLE = 1 << 16  # bytes from which the type is guessed


def supplied(data: bytes | Path, *, name: str = "stdin", media_type: str | None = None) -> SourceFile:
    """A source for `RagKV.ingest`. The name is its identity: the next document of that name replaces it.

    `data` may be a file, under any name, which holds the bytes until the ingest reads them; it must not change.

    `media_type` is a suffix ("md") or a media type; without it, the name's suffix decides, else the bytes. Raises
    UsageError for a name that is blank, too long or not printable, and for a type that no loader reads.
    """
    if not name.strip() or len(name) > 500 or not name.isprintable():
        raise UsageError("A document's name must be 1 to 500 printable characters; choose another --name.")
    found = media_type_of(media_type) if media_type is not None else None
    if media_type is not None and found is None:
        raise UsageError(f"No loader reads the type {media_type!r}; choose one of {', '.join(type_names())}.")
    suffix = Path(name).suffix
    held = data if isinstance(data, Path) else None
    found = found or (media_type_of(suffix) if suffix else None)
    found = found or sniff(data.read_bytes() if isinstance(data, Path) else data)
    return SourceFile(
        path=Path(name),
        document_id=f"stdin:{name}",
        name=name,
        media_type=found,
        size=data.stat().st_size if isinstance(data, Path) else len(data),
        data=None if isinstance(data, Path) else data,
        held=held,
    )


def sniff(data: bytes) -> str:
    """Guess the media type of bytes. In doubt it is plain text, because that loader reads anything readable."""
    if b"%PDF-" in data[:1024]:
        return _type("pdf")
    if data.startswith(b"PK\x03\x04"):
        return _type("docx") if _is_docx(data) else TEXT
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


def _is_docx(data: bytes) -> bool:
    """Look for the name of a member, which a ZIP holds uncompressed. Its directory is not read: it may be huge."""
    return b"word/" in data


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
    """At least three rows with the same number of short fields: prose has commas too, but not so regularly."""
    delimiter = sniff_delimiter(text)
    if delimiter is None:
        return False
    rows = list(islice(csv.reader(text.splitlines(), delimiter=delimiter), 50))
    widths = {len(row) for row in rows}
    few = 3 if delimiter == "," else 2
    short = all(len(field) < 80 and not field.startswith(" ") for row in rows for field in row)
    return len(rows) > 2 and len(widths) == 1 and min(widths) >= few and short
