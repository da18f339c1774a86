"""PDF: text page by page. Lines that were broken only by the page's width are joined again.

A table with lines around its cells becomes rows, as a sheet does (`ragkv.ingest.text`): pdfplumber finds it. If the two
libraries see different characters, the page stays running text, so nothing is lost or read twice. How much is searched
for tables is bounded in bytes of the pages' contents, not in time, so that a file gives the same rows on every machine.
Pages without text, and images, are read by the program tesseract, if it is installed. It is a process of its own that
inherits the limits of the process that reads the file (`ragkv.ingest.sandbox`).
"""

from __future__ import annotations

import io
import logging
import os
import re
import struct
import subprocess
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ragkv.errors import install_hint
from ragkv.ingest.charset import clean
from ragkv.ingest.parser import Parsed, Unreadable, check_sections, join_sections, limits, silenced
from ragkv.ingest.text import table_rows

if TYPE_CHECKING:
    from pypdf import PageObject, PdfReader

logger = logging.getLogger(__name__)

# What pypdf raises for damaged files besides its own errors. Its errors.py says that "broken PDF files might cause
# other Exceptions": a bad reference, operand or stream surfaces as one of these.
_PDF_LEAKS = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, OSError),
    *(RuntimeError, TypeError, ValueError, struct.error, zlib.error),
)
_LOCKED = "PDF is protected with a password; save it without one"
_DRAWN = re.compile(rb"(?<=[\d\s])(?:re|l)\s")  # operators of a content stream: draw a box, draw a line
_RULES = 3  # the fewest of these that make a table
_BYTES_PER_SECOND = 50_000  # of contents that are searched for tables, per second that reading may take
_LARGEST = 1 << 20  # bytes of a page's content; more is a drawing
_MAX_EDGES = 2000  # of a page
_MAX_CELL_CHARACTERS = 1000  # characters; more is a column of prose
_SCANNED = "scanned pages"
_MOST_SCANS = 500  # pages of a document that are read by OCR
_DPI = 300
_PIXELS = 12_000_000  # of a page for OCR; A4 at 300 dpi has 9
_MOST_PIXELS = 80_000_000  # of an image
_MOST_LANGUAGES = 4
_SURE = 50.0  # the mean confidence of a page's words, of 100, below which it is taken for a photo
_GLYPHS = {0xFB00 + i: s for i, s in enumerate(("ff", "fi", "fl", "ffi", "ffl", "st", "st"))} | {0xAD: ""}
_LONG_WORD = re.compile(r"[A-Za-z\u00c0-\u04ff]{21,}")
_LIST_ITEM = re.compile(r"[•▪◦‣·*–-]\s|\(?(?:\d{1,3}|[A-Za-z])[.)]\s")


def read_pdf(data: bytes) -> Parsed:
    """A section for each page that has text, and one for each row of its tables; pages without text by OCR.

    A page that cannot be read is named in `left_out`; others are kept.
    """
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, FileNotDecryptedError, PyPdfError

    broken = (PyPdfError, *_PDF_LEAKS)
    left_out: list[str] = []
    with silenced("pypdf", "pdfminer"):
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
        text, sections = join_sections(_pages(reader, data, broken, left_out))
    if not sections:
        scanned = left_out and left_out[-1].startswith(_SCANNED)
        reason = (
            f"no text found; {left_out[-1]}" if scanned else f"PDF cannot be read: {left_out[0]}" if left_out else ""
        )
        raise Unreadable(reason or "no text found")
    return Parsed(text=text, sections=sections, title=title, left_out=tuple(left_out))


def _pages(
    reader: PdfReader, data: bytes, broken: tuple[type[Exception], ...], left_out: list[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The text of each page with its number, and the rows of its tables."""
    tables, scans = _Tables(data), _Scans(data)
    for number, page in enumerate(reader.pages, start=1):
        try:
            text = page.extract_text()
            if _runs_together(text):
                text = scans.spaced(number, text)
            parts = tables.parts(number, page, text) or [(text, {})]
            resources = None if text.strip() else page.get("/Resources")
            if resources is not None and "/XObject" in resources.get_object():
                parts = [(scans.read(number), {})]
        except Unreadable as error:
            left_out.append(f"page {number}: {error}")
            continue
        except broken as error:
            left_out.append(f"page {number}: {_sentence(error)}")
            continue
        for part, fields in parts:
            yield part if fields else _unwrap(part), {"page": number, **fields}
    if scans.unread:
        left_out.append(f"{_SCANNED} ({_numbers(scans.unread)}): {scans.reason}")


class _Scans:
    """pdfium, which renders pages for OCR and restores spaces that pypdf loses (in a font without a glyph for them,
    pypdf guesses their width). `unread` are the pages without text that were not read, for `reason`.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._document: Any = None
        self._count = 0
        self.unread: list[int] = []
        self.reason = ocr_missing()

    def read(self, number: int) -> str:
        """The text of page `number`, from 1."""
        self._count += 1
        if self._count > _MOST_SCANS and not self.reason:
            self.reason = f"only {_MOST_SCANS} are read; split the file"
        if self.reason:
            self.unread.append(number)
            return ""
        page = self._page(number)
        width, height = page.get_size()
        scale = min(_DPI / 72, (_PIXELS / max(1.0, width * height)) ** 0.5)
        return recognise(page.render(scale=scale, grayscale=True).to_pil(), round(72 * scale))

    def spaced(self, number: int, text: str) -> str:
        """A page's text with pdfium's spaces, wherever the two see the same characters."""
        try:
            pdfium_text = self._page(number).get_textpage().get_text_range()
        except (ImportError, RuntimeError):  # it is missing, or refuses what pypdf reads
            return text
        pdfium_text = clean(
            pdfium_text.replace("\ufffe", "-").replace("\x02", "-").translate(_GLYPHS)
        )  # its hyphens at line ends
        text = text.translate(_GLYPHS)
        same = "".join(pdfium_text.split()) == "".join(text.split())
        lines = {"".join(line.split()): line for line in ([pdfium_text] if same else pdfium_text.split("\n"))}
        ends, count = set[int](), 0
        for line in [text] if same else text.split("\n"):
            bare = "".join(line.split())
            position = count
            for each in lines.get(bare, ""):
                if each.isspace():
                    ends.add(position)
                else:
                    position += 1
            count += len(bare)
        spaced, count, last = "", 0, " "
        for character in text:
            if not character.isspace():
                spaced += " " if count in ends and not last.isspace() else ""
                count += 1
            last = character
            spaced += character
        return spaced

    def _page(self, number: int) -> Any:
        if self._document is None:
            import pypdfium2

            self._document = pypdfium2.PdfDocument(self._data)
        return self._document[number - 1]


def _runs_together(text: str) -> bool:
    """Whether much of a text is in words that are too long for any language with spaces."""
    return 20 * sum(map(len, _LONG_WORD.findall(text))) > len(text)


def _numbers(pages: Sequence[int]) -> str:
    """ "3, 5-9" for pages in order."""
    runs: list[list[int]] = []
    for page in pages:
        if runs and page == runs[-1][-1] + 1:
            runs[-1][1:] = [page]
        else:
            runs.append([page])
    shown = ", ".join("-".join(map(str, run)) for run in runs[:20])
    return f"page{'s' if len(pages) > 1 else ''} {shown}{', …' if len(runs) > 20 else ''}"


@cache
def _languages() -> frozenset[str]:
    """The languages of the installed tesseract; empty without one."""
    try:
        found = subprocess.run(["tesseract", "--list-langs"], stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return frozenset()
    return frozenset(found.stdout.decode("utf-8", "replace").split("\n")[1:]) - {""}  # the first line is a heading


def ocr_missing() -> str:
    """What to install before pictures can be read; empty if nothing is missing."""
    wanted = limits().ocr
    if wanted == "none":
        return 'ingest.ocr is "none"'
    steps = [] if _languages() - {"osd"} else ["install tesseract (apt-get install tesseract-ocr)"]
    if not all(map(find_spec, ("PIL", "pypdfium2"))):
        steps.append(install_hint("pdf"))
    if steps:
        return f"to read them, {' and '.join(steps)}"
    lacking = set() if wanted == "auto" else set(wanted.split("+")) - _languages()
    return f"tesseract lacks the language {', '.join(sorted(lacking))} of ingest.ocr" if lacking else ""


def recognise(image: Any, dpi: int) -> str:
    """The lines of a grey picture (PIL) by tesseract; empty if it is not sure to see text."""
    wanted = limits().ocr
    if wanted == "auto":  # all that are installed, unless those are all that exist
        found = sorted(name for name in _languages() if name != "osd" and "/" not in name)
        wanted = "+".join(found if len(found) <= _MOST_LANGUAGES or "eng" not in found else ["eng"])
    turned = "1" if "osd" in _languages() else "3"  # page segmentation that also detects rotated pages
    picture = b"P5 %d %d 255 " % image.size + image.tobytes()
    done = subprocess.run(
        ["tesseract", "stdin", "stdout", "-l", wanted, "--dpi", str(max(70, dpi)), "--psm", turned, "tsv"],
        input=picture,
        capture_output=True,
        env={**os.environ, "OMP_THREAD_LIMIT": "1"},
    )
    if done.returncode:
        raise Unreadable(f"OCR failed (tesseract ended with {done.returncode})")
    lines: dict[tuple[str, ...], list[str]] = {}
    sure: list[float] = []
    for row in done.stdout.decode("utf-8", "replace").split("\n")[1:]:
        fields = row.split("\t")
        if len(fields) == 12 and fields[11].strip() and float(fields[10]) >= 0:
            sure.append(float(fields[10]))
            lines.setdefault(tuple(fields[1:5]), []).append(fields[11].strip())
    if not sure or sum(sure) / len(sure) < _SURE:
        return ""
    paragraphs = groupby(lines, lambda line: line[:3])
    return "\n\n".join("\n".join(" ".join(lines[line]) for line in inside) for _, inside in paragraphs)


def read_image(data: bytes) -> Parsed:
    """The text of a picture, or of each page of a TIFF, by OCR."""
    if missing := ocr_missing():
        raise Unreadable(f"it is a picture; {missing}")
    from PIL import Image, ImageOps, UnidentifiedImageError

    pages: list[tuple[str, dict[str, Any]]] = []
    left_out: list[str] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=("PNG", "JPEG", "TIFF"))
            count = getattr(image, "n_frames", 1)
            if count > _MOST_SCANS:
                left_out.append(f"pages {_MOST_SCANS + 1}-{count}: only {_MOST_SCANS} are read; split the file")
            for number in range(min(count, _MOST_SCANS)):
                image.seek(number)
                if image.width * image.height > _MOST_PIXELS:
                    raise Unreadable(f"it has more than {_MOST_PIXELS:,} pixels")
                page = ImageOps.exif_transpose(image).convert("L")
                scale = min(1.0, (_PIXELS / (page.width * page.height)) ** 0.5)
                page = page.resize((max(1, int(page.width * scale)), max(1, int(page.height * scale))))
                text = _unwrap(recognise(page, round(_DPI * scale)))
                pages.append((text, {"page": number + 1} if count > 1 else {}))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise Unreadable(f"it has more than {_MOST_PIXELS:,} pixels") from None
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        raise Unreadable(f"picture cannot be read: damaged structure ({type(error).__name__})") from error
    text, sections = join_sections(pages)
    return Parsed(text=text, sections=sections, left_out=left_out)


class _Tables:
    """The tables of a document's pages, which pdfplumber finds by the lines around their cells."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._left = limits().seconds_for(len(data)) * _BYTES_PER_SECOND
        self._document: Any = None

    def parts(self, number: int, page: PageObject, text: str) -> list[tuple[str, dict[str, Any]]]:
        """The texts between the tables of page `number` (from 1) and their rows.

        Empty if there is no table, or if pdfplumber reads other characters than `text`, so that nothing is lost.
        """
        content = page.get_contents()
        drawn = b"" if content is None else content.get_data()
        if len(drawn) > min(_LARGEST, self._left) or len(_DRAWN.findall(drawn)) < _RULES:
            return []
        self._left -= len(drawn)
        try:
            import pdfplumber

            self._document = self._document or pdfplumber.open(io.BytesIO(self._data))
            plumbed = self._document.pages[number - 1]
            for curve in plumbed.curves:  # a rotated page's rectangles slant in the last digits
                curve["pts"] = [(round(x, 1), round(y, 1)) for x, y in curve["pts"]]
            own: Counter[str] = Counter()
            parts = list(_between_tables(plumbed, own)) if len(plumbed.edges) <= _MAX_EDGES else []
            plumbed.close()
        except MemoryError:
            raise
        except Exception:  # pdfplumber is missing, or refuses what pypdf reads
            logger.debug("tables of page %d", number, exc_info=True)
            return []
        seen = _characters(text)
        differ = (seen - own).total() + (own - seen).total()
        return parts if any(fields for _, fields in parts) and differ <= 2 + 0.03 * seen.total() else []


def _between_tables(page: Any, characters: Counter[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The texts between the tables of a page of pdfplumber, from top to bottom, and the rows of the tables. The letters
    and digits that were read are added to `characters`; a row repeats those of its head."""
    top, number = page.bbox[1], 0
    for table in sorted(page.find_tables(), key=lambda table: table.bbox[1]):
        rows = [[_flat(cell or "") for cell in row] for row in table.extract(x_tolerance_ratio=0.15)]
        filled = [text for row in rows for text in row if text]
        full_rows = sum(sum(map(bool, row)) > 1 for row in rows)
        if full_rows < 2 or 3 * len(filled) < sum(map(len, rows)) or max(map(len, filled)) > _MAX_CELL_CHARACTERS:
            continue  # a frame or a drawing
        number += 1
        yield _text_between(page, top, table.bbox[1], characters), {}
        characters.update(_characters("".join(filled)))
        for place, text in table_rows(list(enumerate(rows, start=1))):
            yield text, {"heading": f"table {number}, {place}", "alone": True}
        top = table.bbox[3]
    yield _text_between(page, top, page.bbox[3], characters), {}


def _text_between(page: Any, top: float, bottom: float, characters: Counter[str]) -> str:
    def within(thing: Any) -> bool:
        return bool(thing["object_type"] == "char" and top <= (thing["top"] + thing["bottom"]) / 2 < bottom)

    text = str(page.filter(within).extract_text(x_tolerance_ratio=0.15))
    characters.update(_characters(text))
    return text


def _flat(cell: str) -> str:
    """A cell's text on one line; a word that was hyphenated at a line's end is joined."""
    return " ".join(_unwrap(cell).split())


def _characters(text: str) -> Counter[str]:
    return Counter(each for each in text.translate(_GLYPHS) if each.isalnum())


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
    lines = [" ".join(line.translate(_GLYPHS).split()) for line in clean(text).split("\n")]
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
    return "".join(parts).strip()
