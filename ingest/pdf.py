"""PDF: text page by page, lines joined that only the page width broke."""

from __future__ import annotations

import io
import re
import struct
import zlib

from ragkv.ingest.limit import check_sections, check_text, limits
from ragkv.ingest.parser import Parsed, Section, Unreadable, silenced
from ragkv.ingest.plain import clean

__all__ = ["read_pdf"]

# What pypdf raises on damaged files besides its own errors (its errors.py: "broken PDF files might cause
# other Exceptions"): a bad reference, operand or stream surfaces as one of these.
_PDF_LEAKS = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, OSError),
    *(RuntimeError, TypeError, ValueError, struct.error, zlib.error),
)
_LOCKED = "PDF is protected with a password; save it without one"
_GLYPHS = {0xFB00 + i: s for i, s in enumerate(("ff", "fi", "fl", "ffi", "ffl", "st", "st"))} | {0xAD: ""}
_LIST_ITEM = re.compile(r"[•▪◦‣·*–-]\s|\(?(?:\d{1,3}|[A-Za-z])[.)]\s")


def read_pdf(data: bytes) -> Parsed:
    """A section per page that has text. A page that cannot be read is left out and named, not the others."""
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, FileNotDecryptedError, PyPdfError

    broken = (PyPdfError, *_PDF_LEAKS)
    pages: list[tuple[int, str]] = []
    left_out: list[str] = []
    with silenced("pypdf"):
        try:
            reader = PdfReader(io.BytesIO(data))
            if reader.is_encrypted and not reader.decrypt(""):
                raise Unreadable(_LOCKED)
            count = len(reader.pages)
        except DependencyError as error:  # AES; most such files open without a password, but not without the library
            raise Unreadable("PDF is encrypted with AES; pip install 'ragkv[pdf]' reads it") from error
        except FileNotDecryptedError as error:
            raise Unreadable(_LOCKED) from error
        except broken as error:
            raise Unreadable(f"PDF cannot be read: {_sentence(error)}") from error
        try:
            title = str((reader.metadata and reader.metadata.title) or "").strip() or None
        except broken:
            title = None  # damaged metadata says nothing of the pages
        check_sections(count)
        found = 0
        for number in range(count):
            try:
                text = _unwrap(clean(reader.pages[number].extract_text().translate(_GLYPHS)))
            except broken as error:
                left_out.append(f"page {number + 1}: {_sentence(error)}")
                continue
            if text:
                pages.append((number + 1, text))
                found += len(text) + 2
                check_text(found)
    if not pages:
        if left_out:
            raise Unreadable(f"PDF cannot be read: {left_out[0]}")
        raise Unreadable("no text found (scanned pages need OCR first)")
    sections: list[Section] = []
    position = 0
    for number, text in pages:
        end = position + len(text) + (0 if number == pages[-1][0] else 2)
        sections.append(Section(start=position, end=end, page=number))
        position = end
    return Parsed(text="\n\n".join(text for _, text in pages), sections=sections, title=title, left_out=tuple(left_out))


def _sentence(error: BaseException) -> str:
    """What pypdf says, without its objects' addresses; a leaked error's words mean nothing to people."""
    if isinstance(error, MemoryError):
        return limits().too_much_memory()
    if not type(error).__module__.startswith("pypdf"):
        return f"damaged structure ({type(error).__name__})"
    words = re.sub(r"IndirectObject\((\d+), (\d+), \d+\)|0x[0-9a-f]{6,}", r"object \1 \2", str(error))
    return " ".join(words.split()).rstrip(".")[:200] or type(error).__name__


def _unwrap(text: str) -> str:
    """Join lines that only the page width broke: a full line runs on, a short one ends a paragraph."""
    lines = [" ".join(line.split()) for line in text.split("\n")]
    lengths = sorted(len(line) for line in lines if line)
    if not lengths:
        return ""
    full = 0.75 * lengths[int(0.9 * (len(lengths) - 1))]  # against the long lines, the column's width
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
