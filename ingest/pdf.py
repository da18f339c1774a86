"""PDF: text page by page. Lines that were broken only by the page's width are joined again."""

from __future__ import annotations

import io
import re
import struct
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ragkv.errors import install_hint
from ragkv.ingest.parser import Parsed, Unreadable, check_sections, join_sections, limits, silenced
from ragkv.ingest.text import clean

if TYPE_CHECKING:
    from pypdf import PdfReader

# What pypdf raises for damaged files besides its own errors. Its errors.py says that "broken PDF files might cause
# other Exceptions": a bad reference, operand or stream surfaces as one of these.
_PDF_LEAKS = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, OSError),
    *(RuntimeError, TypeError, ValueError, struct.error, zlib.error),
)
_LOCKED = "PDF is protected with a password; save it without one"
_GLYPHS = {0xFB00 + i: s for i, s in enumerate(("ff", "fi", "fl", "ffi", "ffl", "st", "st"))} | {0xAD: ""}
_LIST_ITEM = re.compile(r"[•▪◦‣·*–-]\s|\(?(?:\d{1,3}|[A-Za-z])[.)]\s")


def read_pdf(data: bytes) -> Parsed:
    """A section for each page that has text. A page that cannot be read is named in `left_out`; others are kept."""
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, FileNotDecryptedError, PyPdfError

    broken = (PyPdfError, *_PDF_LEAKS)
    left_out: list[str] = []
    with silenced("pypdf"):
        try:
            reader = PdfReader(io.BytesIO(data))
            if reader.is_encrypted and not reader.decrypt(""):
                raise Unreadable(_LOCKED)
            count = len(reader.pages)
        except DependencyError as error:  # AES: most such files need no password, but they need a library to open
            raise Unreadable(f"PDF is encrypted with AES; to read it, {install_hint('pdf')}") from error
        except FileNotDecryptedError as error:
            raise Unreadable(_LOCKED) from error
        except broken as error:
            raise Unreadable(f"PDF cannot be read: {_sentence(error)}") from error
        try:
            title = str((reader.metadata and reader.metadata.title) or "").strip() or None
        except broken:
            title = None  # the pages may be intact although the metadata is damaged
        check_sections(count)
        text, sections = join_sections(_pages(reader, count, broken, left_out))
    if not sections:
        if left_out:
            raise Unreadable(f"PDF cannot be read: {left_out[0]}")
        raise Unreadable("no text found (scanned pages need OCR first)")
    return Parsed(text=text, sections=sections, title=title, left_out=tuple(left_out))


def _pages(
    reader: PdfReader, count: int, broken: tuple[type[Exception], ...], left_out: list[str]
) -> Iterator[tuple[str, dict[str, int]]]:
    """The text of each page with its number; a page that raises one of `broken` goes into `left_out`."""
    for number in range(count):
        try:
            text = _unwrap(clean(reader.pages[number].extract_text().translate(_GLYPHS)))
        except broken as error:
            left_out.append(f"page {number + 1}: {_sentence(error)}")
        else:
            yield text, {"page": number + 1}


def _sentence(error: BaseException) -> str:
    """pypdf's message without memory addresses; messages of other errors mean nothing to a user."""
    if isinstance(error, MemoryError):
        return limits().too_much_memory()
    if not type(error).__module__.startswith("pypdf"):
        return f"damaged structure ({type(error).__name__})"
    words = re.sub(r"IndirectObject\((\d+), (\d+), \d+\)|0x[0-9a-f]{6,}", r"object \1 \2", str(error))
    return " ".join(words.split()).rstrip(".")[:200] or type(error).__name__


def _unwrap(text: str) -> str:
    """Join lines broken by the page's width: a full line continues, a short one ends its paragraph."""
    lines = [" ".join(line.split()) for line in text.split("\n")]
    lengths = sorted(len(line) for line in lines if line)
    if not lengths:
        return ""
    full = 0.75 * lengths[int(0.9 * (len(lengths) - 1))]  # the 90th percentile approximates the column's width
    parts: list[str] = []
    previous = ""
    for line in lines:
        if not line or not previous or _LIST_ITEM.match(line):
            separator = "\n" if line and previous else ""
            if not line and previous:
                separator = "\n\n"
        elif re.search(r"[^\W\d_]-$", previous) and line[0].islower():
            parts[-1] = parts[-1][:-1]  # a word hyphenated at the line's end
            separator = ""
        elif len(previous) >= full:
            separator = " "
        else:
            separator = "\n\n" if previous[-1] in ".!?:。！？" else "\n"
        parts += [separator, line]
        previous = line
    return re.sub(r"\n{3,}", "\n\n", "".join(parts)).strip()
