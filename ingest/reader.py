"""From a file's bytes to text with sections, the same text for the same bytes, or a plain reason why not.

What is kept is what a chunk needs to be found, prefilled and cited: headings and tables stay in the text, and
every character belongs to a section that knows its page or heading. Navigation and line wraps go.
"""

from __future__ import annotations

import hashlib
import io
import logging
import re
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ragkv.errors import IngestError
from ragkv.ingest.source import MEDIA_TYPES, SourceFile, unsupported

__all__ = ["HEADING_SEPARATOR", "Section", "SourceText", "UnreadableSource", "read_source"]

logger = logging.getLogger(__name__)

HEADING_SEPARATOR = " > "


class UnreadableSource(IngestError):  # noqa: N818 - a state, as `Skipped` is
    """A file yields no text; `reason` is a phrase for people, as in `Skipped`."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"Cannot read {name}: {reason}.")
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Characters `[start, end)` of a text: a page (from 1) or what is under a heading ("Guide > Install")."""

    start: int
    end: int
    page: int | None = None
    heading: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceText:
    """A read file. `sections` tile `text` without a gap; `content_hash` is the file's blake2b-256."""

    text: str
    content_hash: str
    title: str | None
    sections: tuple[Section, ...]

    def __post_init__(self) -> None:
        ends = [0, *(section.end for section in self.sections)]
        if ends[-1] != len(self.text) or [section.start for section in self.sections] != ends[:-1]:
            raise ValueError("The sections of a text must tile it from its first character to its last.")


def read_source(source: SourceFile) -> SourceText:
    """Read one file. Raises `UnreadableSource`, and nothing else, for whatever is wrong with it."""
    try:
        data = source.path.read_bytes()
    except PermissionError:
        raise UnreadableSource(source.name, "permission denied") from None
    except OSError as error:
        raise UnreadableSource(source.name, (error.strerror or str(error)).lower()) from error
    if not data:
        raise UnreadableSource(source.name, "empty file")
    try:
        if source.media_type == "application/pdf":
            title, text, sections = _read_pdf(data)
        elif source.media_type == "text/html":
            title, text, sections = _read_html(data)
        elif source.media_type == "text/markdown":
            title, text, sections = _read_markdown(_decode(data))
        else:
            title, text = None, _decode(data)
            sections = [Section(start=0, end=len(text))]
    except _Unreadable as error:
        known = source.path.suffix.lower() in MEDIA_TYPES
        reason = str(error) if known or str(error) != _BINARY else unsupported(source.path)
        raise UnreadableSource(source.name, reason) from error.__cause__
    if not text.strip():
        raise UnreadableSource(source.name, "no text found")
    content_hash = hashlib.blake2b(data).hexdigest()
    return SourceText(text=text, content_hash=content_hash, title=title, sections=tuple(sections))


class _Unreadable(Exception):  # noqa: N818 - carries a reason up to `read_source`, which knows the name
    pass


_Parsed = tuple[str | None, str, list[Section]]  # title, text, sections

# ---- plain text

_BINARY = "binary file"
_BOMS = (  # UTF-32 first: its little-endian mark begins with UTF-16's
    (b"\xff\xfe\x00\x00", "utf-32"),
    (b"\x00\x00\xfe\xff", "utf-32"),
    (b"\xef\xbb\xbf", "utf-8-sig"),
    (b"\xff\xfe", "utf-16"),
    (b"\xfe\xff", "utf-16"),
)
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")


def _decode(data: bytes) -> str:
    """Bytes to text: by byte order mark, as UTF-16 by its NULs, as UTF-8, else as charset-normalizer says."""
    encoding = next((name for mark, name in _BOMS if data.startswith(mark)), None) or _utf16(data) or "utf-8"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError:
        if b"\x00" in data[:8192]:
            raise _Unreadable(_BINARY) from None
        text = _legacy(data)
    sample = text[:65536]
    if "\x00" in sample or 50 * len(_CONTROL.findall(sample)) > len(sample):
        raise _Unreadable(_BINARY)
    return _clean(text)


def _legacy(data: bytes) -> str:
    """An 8-bit or East Asian encoding: the best guess, or Windows-1252 where it is no worse."""
    from charset_normalizer import from_bytes

    guesses = from_bytes(data)
    best = guesses.best()
    if best is None:
        raise _Unreadable(_BINARY)
    for guess in guesses:
        as_good = guess.chaos <= best.chaos and guess.coherence >= best.coherence
        if as_good and "cp1252" in guess.could_be_from_charset:
            return str(guess)
    return str(best)


def _utf16(data: bytes) -> str | None:
    """UTF-16 without a mark: in most scripts' text every other byte is nearly always, or never, NUL."""
    sample = data[: 4096 & ~1]
    even, odd = sample[::2].count(0), sample[1::2].count(0)
    if odd > 0.4 * len(sample) / 2 and even == 0:
        return "utf-16-le"
    if even > 0.4 * len(sample) / 2 and odd == 0:
        return "utf-16-be"
    return None


def _clean(text: str) -> str:
    """One kind of line end, no NUL, nothing that UTF-8 cannot hold (lone surrogates, which PDFs produce)."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\x00", "")
    return text.encode("utf-8", "replace").decode("utf-8")


# ---- Markdown

_FRONT_MATTER = re.compile(
    r"\A(---|\+\+\+)[ \t]*\n(?=\s*[\w-]+[ \t]*[:=])(.*?\n)(?:\1|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL
)
_TITLE = re.compile(r"^title[ \t]*[:=][ \t]*(.+?)[ \t]*$", re.MULTILINE | re.IGNORECASE)
_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})(.*)")
_ATX = re.compile(r" {0,3}(#{1,6})(?:[ \t]+(.*?))??(?:[ \t]+#+)?[ \t]*$")
_SETEXT = re.compile(r" {0,3}(=+|-+)[ \t]*$")


def _read_markdown(text: str) -> _Parsed:
    """A section per heading, named by its path; the title is the front matter's or the first top heading."""
    title = None
    if front := _FRONT_MATTER.match(text):
        text = text[front.end() :]
        if found := _TITLE.search(front[2]):
            title = found[1].strip("\"'") or None
    sections: list[Section] = []
    path: list[tuple[int, str]] = []
    start = 0
    for position, level, name in _headings(text):
        if position > start:
            sections.append(Section(start=start, end=position, heading=_heading(path)))
        path = [(above, heading) for above, heading in path if above < level] + [(level, name)]
        start = position
        if title is None and level == 1:
            title = name or None
    if start < len(text) or not sections:
        sections.append(Section(start=start, end=len(text), heading=_heading(path)))
    return title, text, sections


def _heading(path: list[tuple[int, str]]) -> str | None:
    return HEADING_SEPARATOR.join(name for _, name in path if name) or None


def _headings(text: str) -> Iterator[tuple[int, int, str]]:
    """(offset of its first line, level, words) of every heading outside fenced code."""
    fence = ""
    paragraph = 0  # lines of the paragraph that is open; an underline makes a heading of a single one
    position = previous = 0
    words = ""
    for line in text.splitlines(keepends=True):
        bare = line.rstrip("\n")
        if mark := _FENCE.match(bare):
            if not fence:
                fence = mark[1]
            elif mark[1].startswith(fence) and not mark[2].strip():
                fence = ""
            paragraph = 0
        elif not fence:
            if atx := _ATX.match(bare):
                yield position, len(atx[1]), (atx[2] or "").strip()
                paragraph = 0
            elif paragraph == 1 and (setext := _SETEXT.match(bare)):
                yield previous, 1 if setext[1][0] == "=" else 2, words
                paragraph = 0
            elif bare.strip() and not bare.startswith(("    ", "\t", ">", "|", "- ", "* ", "+ ")):
                paragraph, previous, words = paragraph + 1, position, bare.strip()
            else:
                paragraph = 0 if not bare.strip() else 2
        position += len(line)


# ---- HTML

_LIBRARY_LOCK = threading.Lock()


@contextmanager
def _silenced(name: str) -> Iterator[None]:
    """Keep a parser's remarks on bad input out of the log; our reasons say it. One thread at a time."""
    noisy = logging.getLogger(name)
    with _LIBRARY_LOCK:
        level = noisy.level
        noisy.setLevel(logging.CRITICAL + 1)
        try:
            yield
        finally:
            noisy.setLevel(level)


def _read_html(data: bytes) -> _Parsed:
    """The main text as Markdown (headings, lists and tables kept, navigation dropped), else all text.

    Extraction accepts a short page; only when it finds little of a page that has much more is the rest taken.
    """
    import trafilatura
    from trafilatura.settings import use_config

    with _silenced("trafilatura"):
        tree = trafilatura.load_html(data)
        if tree is None:  # the library wants a whole page; a fragment is made one
            tree = trafilatura.load_html(f"<html><body>{_decode(data)}</body></html>")
        if tree is None:
            raise _Unreadable("no text found")
        config = use_config()
        config.set("DEFAULT", "MIN_EXTRACTED_SIZE", "1")
        title = " ".join((tree.findtext(".//title") or "").split()) or None
        everything = trafilatura.html2txt(tree)
        text = trafilatura.extract(tree, output_format="markdown", include_comments=False, config=config) or ""
        if len(text) < 250 and len(everything) > 4 * len(text):
            text = trafilatura.baseline(tree)[1] or everything
    heading, text, sections = _read_markdown(_clean(text))
    return title or heading, text, sections


# ---- PDF

# What pypdf raises on damaged files besides its own errors (its errors.py: "broken PDF files might cause
# other Exceptions"): a bad reference, operand or stream surfaces as one of these.
_PDF_LEAKS = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, OSError),
    *(RuntimeError, TypeError, ValueError, struct.error, zlib.error),
)
_GLYPHS = {0xFB00 + i: s for i, s in enumerate(("ff", "fi", "fl", "ffi", "ffl", "st", "st"))} | {0xAD: ""}
_LIST_ITEM = re.compile(r"[•▪◦‣·*–-]\s|\(?(?:\d{1,3}|[A-Za-z])[.)]\s")


def _read_pdf(data: bytes) -> _Parsed:
    """A section per page that has text. A page that cannot be read is logged and left out, not the others."""
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, FileNotDecryptedError, PyPdfError

    broken = (PyPdfError, *_PDF_LEAKS)
    pages: list[tuple[int, str]] = []
    damage: BaseException | None = None
    with _silenced("pypdf"):
        try:
            reader = PdfReader(io.BytesIO(data))
            if reader.is_encrypted and not reader.decrypt(""):
                raise _Unreadable("PDF is encrypted")
            count = len(reader.pages)
        except (FileNotDecryptedError, DependencyError) as error:  # the latter: AES without its library
            raise _Unreadable("PDF is encrypted") from error
        except broken as error:
            raise _Unreadable(f"PDF cannot be read: {_sentence(error)}") from error
        try:
            title = str((reader.metadata and reader.metadata.title) or "").strip() or None
        except broken:
            title = None  # damaged metadata says nothing of the pages
        for number in range(count):
            try:
                text = _unwrap(_clean(reader.pages[number].extract_text().translate(_GLYPHS)))
            except broken as error:
                damage = error
                logger.warning("Page %d of a PDF cannot be read and is left out: %s", number + 1, _sentence(error))
                continue
            if text:
                pages.append((number + 1, text))
    if not pages:
        if damage is not None:
            raise _Unreadable(f"PDF cannot be read: {_sentence(damage)}") from damage
        raise _Unreadable("no text found (scanned pages need OCR first)")
    sections: list[Section] = []
    position = 0
    for number, text in pages:
        end = position + len(text) + (0 if number == pages[-1][0] else 2)
        sections.append(Section(start=position, end=end, page=number))
        position = end
    return title, "\n\n".join(text for _, text in pages), sections


def _sentence(error: BaseException) -> str:
    """What pypdf says, without its objects' addresses; a leaked error's words mean nothing to people."""
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
