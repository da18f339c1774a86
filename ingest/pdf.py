"""PDF: text page by page. Lines that were broken only by the page's width are joined again.

A table with rules becomes rows, as a sheet does (`ragkv.ingest.text`): pdfplumber finds its cells from the page's
lines, pypdf's text in their area is dropped, and the rows are put where it began. If the two libraries see different
characters there, the page stays running text, so nothing is lost or read twice. How much is searched for tables is
bounded in bytes of the pages' contents, not in time, so that a file gives the same rows on every machine.
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
from bisect import bisect
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import accumulate, groupby, pairwise
from typing import TYPE_CHECKING, Any

from ragkv.errors import install_hint
from ragkv.ingest.parser import Parsed, Unreadable, check_sections, join_sections, limits, silenced
from ragkv.ingest.text import clean, table_rows
from ragkv.types import Box

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
_EDGES = 2000  # of a page
_CELLS = 2000
_LONGEST_CELL = 1000  # characters; more is a column of prose
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
    finder = _TableFinder(data)
    scans = _Scans(data)
    for number, page in enumerate(reader.pages, start=1):
        pieces: list[tuple[str, float, float]] = []

        def keep(text: str, cm: Sequence[float], tm: Sequence[float], *_: object) -> None:
            x, y = tm[4], tm[5]
            pieces.append((text, x * cm[0] + y * cm[2] + cm[4], x * cm[1] + y * cm[3] + cm[5]))  # noqa: B023

        try:
            ruled = finder.may_have_tables(page)
            text = page.extract_text(visitor_text=keep if ruled else None)
            if _runs_together(text):
                spaced = scans.spaced(number, [piece[0] for piece in pieces] or [text])
                text = "".join(spaced)
                pieces = [(new, x, y) for new, (_, x, y) in zip(spaced, pieces, strict=False)]
            parts = finder.parts(number, pieces) if ruled else []
            resources = None if text.strip() else page.get("/Resources")
            if resources is not None and "/XObject" in resources.get_object():
                parts = [scans.read(number)]
        except Unreadable as error:
            left_out.append(f"page {number}: {error}")
            continue
        except broken as error:
            left_out.append(f"page {number}: {_sentence(error)}")
            continue
        for part, fields in parts or [(text, {})]:
            alone = "alone" in fields
            yield part if alone or "lines" in fields else _unwrap(part), {"page": number, **fields}
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

    def read(self, number: int) -> tuple[str, dict[str, Any]]:
        """The text of page `number`, from 1, with the places of its lines."""
        self._count += 1
        if self._count > _MOST_SCANS and not self.reason:
            self.reason = f"only {_MOST_SCANS} are read; split the file"
        if self.reason:
            self.unread.append(number)
            return "", {}
        page = self._page(number)
        width, height = page.get_size()
        scale = min(_DPI / 72, (_PIXELS / max(1.0, width * height)) ** 0.5)
        return recognise(page.render(scale=scale, grayscale=True).to_pil(), round(72 * scale))

    def spaced(self, number: int, pieces: Sequence[str]) -> Sequence[str]:
        """The pieces of a page's text with pdfium's spaces, wherever the two see the same characters."""
        try:
            found = self._page(number).get_textpage().get_text_range()
        except (ImportError, RuntimeError):  # it is missing, or refuses what pypdf reads
            return pieces
        found = clean(found.replace("\ufffe", "-").replace("\x02", "-").translate(_GLYPHS))  # its hyphens at line ends
        text = "".join(pieces := [piece.translate(_GLYPHS) for piece in pieces])
        same = "".join(found.split()) == "".join(text.split())
        lines = {"".join(line.split()): line for line in ([found] if same else found.split("\n"))}
        ends, count = set[int](), 0
        for line in [text] if same else text.split("\n"):
            bare = "".join(line.split())
            at = count
            for each in lines.get(bare, ""):
                if each.isspace():
                    ends.add(at)
                else:
                    at += 1
            count += len(bare)
        spaced, count, last = [], 0, " "
        for piece in pieces:
            new = ""
            for each in piece:
                if not each.isspace():
                    new += " " if count in ends and not last.isspace() else ""
                    count += 1
                last = each
                new += each
            spaced.append(new)
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


def recognise(image: Any, dpi: int) -> tuple[str, dict[str, Any]]:
    """The text of a grey picture (PIL) by tesseract, with its `Section.lines`; empty if it is not sure to see text."""
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
    boxes: dict[tuple[str, ...], Box] = {}
    sure: list[float] = []
    for row in done.stdout.decode("utf-8", "replace").split("\n")[1:]:
        fields = row.split("\t")
        if len(fields) == 12 and fields[11].strip() and float(fields[10]) >= 0:
            sure.append(float(fields[10]))
            line = tuple(fields[1:5])
            lines.setdefault(line, []).append(fields[11].strip())
            x, y, width, height = map(int, fields[6:10])
            left, top, right, bottom = boxes.get(line, (1.0, 1.0, 0.0, 0.0))
            right = max(right, round(min(1.0, (x + width) / image.width), 4))
            bottom = max(bottom, round(min(1.0, (y + height) / image.height), 4))
            boxes[line] = min(left, round(x / image.width, 4)), min(top, round(y / image.height, 4)), right, bottom
    if not sure or sum(sure) / len(sure) < _SURE:
        return "", {}
    read: list[tuple[str, Box | None]] = []
    for _, inside in groupby(lines, lambda line: line[:3]):
        read += [(" ".join(lines[line]), boxes[line]) for line in inside] + [("", None)]
    pieces = _unwrapped([text for text, _ in read])
    starts = list(accumulate(map(len, pieces)))[::2]
    places = [(at, box) for at, (_, box) in zip(starts, read, strict=True) if box]
    return "".join(pieces).strip(), {"lines": places}


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
                text, places = recognise(page, round(_DPI * scale))
                pages.append((text, places | ({"page": number + 1} if count > 1 else {})))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise Unreadable(f"it has more than {_MOST_PIXELS:,} pixels") from None
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        raise Unreadable(f"picture cannot be read: damaged structure ({type(error).__name__})") from error
    text, sections = join_sections(pages)
    return Parsed(text=text, sections=sections, left_out=left_out)


@dataclass(slots=True)
class _Table:
    """`rows` have a text for each column; the box (x0, top, x1, bottom) is in points from the page's upper left."""

    box: tuple[float, float, float, float]
    columns: Sequence[float]
    rows: list[list[str]]
    characters: Counter[str]


class _TableFinder:
    """Finds the tables of a document's pages; keeps the first row of a table that may continue on the next page."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._left = limits().seconds_for(len(data)) * _BYTES_PER_SECOND
        self._document: Any = None
        self._above: _Table | None = None

    def may_have_tables(self, page: PageObject) -> bool:
        """Whether a page draws enough lines or boxes, and the document's budget is not used up."""
        above, self._above = self._above, None
        content = page.get_contents()
        drawn = b"" if content is None else content.get_data()
        if len(drawn) > min(_LARGEST, self._left) or len(_DRAWN.findall(drawn)) < _RULES:
            return False
        if self._document is None:
            try:
                import pdfplumber

                self._document = pdfplumber.open(io.BytesIO(self._data))
            except Exception:  # pdfplumber is missing, or refuses what pypdf reads
                self._left = 0
                return False
        self._left -= len(drawn)
        self._above = above
        return True

    def parts(self, number: int, pieces: Sequence[tuple[str, float, float]]) -> list[tuple[str, dict[str, Any]]]:
        """The texts between the tables of page `number` (from 1) and their rows, in the order of `pieces`.

        `pieces` are the page's texts with their origins in the PDF's coordinates. Empty if there is no table.
        """
        above, self._above = self._above, None
        try:
            page = self._document.pages[number - 1]
            tables = _tables(page)
            places = [_place(page, x, y) for _, x, y in pieces]
            page.close()
        except MemoryError:
            raise
        except Exception:  # of pdfplumber or pdfminer, for a page that pypdf can read
            logger.debug("tables of page %d", number, exc_info=True)
            return []
        within = [next((i for i, t in enumerate(tables) if _inside(t.box, *at)), None) for at in places]
        for index, one in enumerate(tables):
            seen = _characters("".join(text for (text, _, _), i in zip(pieces, within, strict=True) if i == index))
            differ = (seen - one.characters).total() + (one.characters - seen).total()
            if differ > 2 + 0.03 * seen.total():
                within = [None if i == index else i for i in within]
        found: list[tuple[str, dict[str, Any]]] = [("", {})]
        done: set[int] = set()
        for (text, _, _), i in zip(pieces, within, strict=True):
            if i is None:
                found[-1] = (found[-1][0] + text, {})
            elif i not in done:
                done.add(i)
                found += [*self._rows(tables[i], len(done), above if len(done) == 1 else None), ("", {})]
        self._above = tables[-1] if tables else None
        return found if done else []

    def _rows(self, one: _Table, number: int, above: _Table | None) -> Iterator[tuple[str, dict[str, Any]]]:
        rows = list(enumerate(one.rows, start=1))
        if above is not None and len(above.columns) == len(one.columns):
            alike = all(abs(a - b) < 3 for a, b in zip(above.columns, one.columns, strict=True))
            if alike and above.rows[0] != one.rows[0]:  # the table continues, without its head
                rows.insert(0, (0, above.rows[0]))
                one.rows = [above.rows[0]]
        for place, text in table_rows(rows):
            yield text, {"heading": f"table {number}, {place}", "alone": True}


def _characters(text: str) -> Counter[str]:
    return Counter(each for each in text.translate(_GLYPHS) if each.isalnum())


def _inside(box: Sequence[float], x: float, y: float) -> bool:
    return box[0] - 1 <= x <= box[2] + 1 and box[1] - 1 <= y <= box[3] + 1


def _place(page: Any, x: float, y: float) -> tuple[float, float]:
    """A point of the PDF as (x, top) of pdfplumber, with the page rotation of pdfminer."""
    x0, y0, x1, y1 = page.page_obj.mediabox
    x, y = {
        90: (y - y0, x1 - x),
        180: (x1 - x, y1 - y),
        270: (y1 - y, x - x0),
    }.get(page.rotation, (x - x0, y - y0))
    return page.mediabox[0] + x, page.mediabox[1] + page.height - y


def _tables(page: Any) -> list[_Table]:
    """The tables of a page from top to bottom: from lines around cells, or from rules over aligned words."""
    from pdfplumber.table import cells_to_tables, edges_to_intersections, intersections_to_cells, merge_edges

    if len(page.edges) > _EDGES:
        return []
    straight = [_straight(edge) for edge in page.edges if min(edge["width"], edge["height"]) < 0.5]
    edges = merge_edges(straight, 3, 3, 3, 3)
    words = page.extract_words(x_tolerance_ratio=0.15)
    added = list(_open_sides(edges, words))
    for left in (line for line in added if "head" in line):  # a head may have shorter rules between its lines
        edges = [e for e in edges if not (e["x0"] > left["x0"] - 3 and left["top"] + 3 < e["top"] < left["head"] - 3)]
    edges = merge_edges([*edges, *added], 3, 3, 3, 3)
    points = edges_to_intersections(edges, 3, 3)
    if len(points) > _CELLS:
        return []
    cells = intersections_to_cells(points)
    if len(cells) * len(words) > _CELLS * 2000:
        return []
    found = [_table(each, words) for each in cells_to_tables(cells)]
    return [each for each in found if each is not None]


def _open_sides(edges: Sequence[Any], words: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """The missing lines of a table whose rules all have the same ends: its sides, or all lines between its columns."""
    groups: dict[tuple[int, int], list[Any]] = {}
    for edge in sorted((e for e in edges if e["orientation"] == "h"), key=lambda e: e["top"]):
        groups.setdefault((round(edge["x0"] / 2), round(edge["x1"] / 2)), []).append(edge)
    uprights = [edge for edge in edges if edge["orientation"] == "v"]
    for rules in groups.values():
        x0, x1 = rules[0]["x0"], rules[0]["x1"]
        crossing = [v for v in uprights if x0 - 3 < v["x0"] < x1 + 3 and v["bottom"] > rules[0]["top"] - 3]
        crossing = [v for v in crossing if v["top"] < rules[-1]["top"] + 3]
        if len(rules) > 1 and crossing:  # an open top or bottom ends with the vertical lines
            ends = min(v["top"] for v in crossing), max(v["bottom"] for v in crossing)
            added = [_line(x0, x1, y, y) for y in ends if not any(abs(rule["top"] - y) < 5 for rule in rules)]
            yield from added
            rules = sorted([*rules, *added], key=lambda rule: rule["top"])
        bare = [rules[0]]
        for upper, lower in pairwise(rules):
            top, bottom = upper["top"], lower["top"]
            if any(v["top"] < top + 3 and v["bottom"] > bottom - 3 for v in crossing):
                yield from (_line(x, x, top, bottom) for x in (x0, x1))
                yield from _aligned(bare, words)
                bare = []
            elif any(_sticks_out(w, x0, x1) for w in words if top < _middle(w) < bottom):  # the text between two tables
                yield from _aligned(bare, words)
                bare = []
            bare.append(lower)
        yield from _aligned(bare, words)


def _line(x0: float, x1: float, top: float, bottom: float) -> dict[str, Any]:
    line = {"x0": x0, "x1": x1, "top": top, "bottom": bottom, "width": x1 - x0, "height": bottom - top}
    return {**line, "orientation": "v" if x0 == x1 else "h"}


def _aligned(rules: Sequence[Any], words: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """The lines of a table that has rules below its head and at its ends, or below each row, and no vertical lines.

    Its columns are separated by gaps where no line has a word. Prose fills its lines and has no such gaps; two columns
    of prose have one, and are recognised by their many words.
    """
    if len(rules) < 3:
        return
    x0, x1, top, bottom = rules[0]["x0"], rules[0]["x1"], rules[0]["top"], rules[-1]["top"]
    height = min(lower["top"] - upper["top"] for upper, lower in pairwise(rules))
    body = [w for w in words if w["x1"] > x0 and w["x0"] < x1 and top < _middle(w) < bottom]
    if not body:
        return
    # Only the last line of the head: a name above it may span several columns.
    last = max((_middle(w) for w in body if _middle(w) < rules[1]["top"]), default=top)
    cuts, end = [], x0
    for word in sorted((w for w in body if _middle(w) > last - 3), key=lambda w: w["x0"]):
        if word["x0"] - end > 5 and end > x0:
            cuts.append((word["x0"] + end) / 2)
        end = max(end, word["x1"])
    if not cuts:
        return
    columns = set(range(len(cuts) + 1))
    ends = [rule["top"] for rule in rules]
    # With a rule below each row, or between rows, the first or last row may have none on its other side.
    for at, beyond in ((len(ends), bottom + height), (0, top - height)):
        outside = [w for w in words if min(beyond, top) < _middle(w) < top or bottom < _middle(w) < max(beyond, bottom)]
        crosses = any(w["x0"] < cut < w["x1"] for w in outside for cut in cuts)
        crosses = crosses or any(_sticks_out(w, x0, x1) for w in outside)
        outside = [w for w in outside if w["x1"] > x0 and w["x0"] < x1]
        filled = {bisect(cuts, w["x0"]) for w in outside}
        # A head has a name for each column but the first.
        whole = filled >= columns - {0} if at == 0 else 0 in filled and len(filled) > 1
        if whole and not crosses and len(_lines_between(outside, cuts, -1e9, 1e9)) == 1:
            ends.insert(at, beyond)
            body += outside
    gaps = [_lines_between(body, cuts, upper, lower) for upper, lower in pairwise(ends)]
    heads = {column for _, filled in gaps[0] for column in filled}
    if len(gaps[0]) > 3 or len(body) > 5 * len(columns) * sum(map(len, gaps)) or not heads >= columns - {0}:
        return
    yield {**_line(x0, x0, ends[0], ends[-1]), "head": ends[1]}
    yield from (_line(x, x, ends[0], ends[-1]) for x in (*cuts, x1))
    yield from (_line(x0, x1, y, y) for y in (ends[0], ends[-1]))
    for gap in gaps[1:]:
        whole = all(0 in filled and len(filled) > 1 for _, filled in gap)
        starts = [at for at, filled in gap if 0 in filled or len(filled) > 1] if whole or len(gaps) == 2 else []
        yield from (_line(x0, x1, at - 1, at - 1) for at in starts[1:])


def _straight(edge: Any) -> dict[str, Any]:
    """An edge without the slant that the arithmetic of a rotated page leaves."""
    x0, x1, top, bottom = edge["x0"], edge["x1"], edge["top"], edge["bottom"]
    return _line(x0, x0, top, bottom) if edge["width"] < edge["height"] else _line(x0, x1, top, top)


def _sticks_out(word: Any, x0: float, x1: float) -> bool:
    """Whether a word crosses one of these sides or touches it from outside, as in a line of text that continues."""
    return bool((word["x0"] < x0 - 3 and word["x1"] > x0 - 10) or (word["x0"] < x1 + 10 and word["x1"] > x1 + 3))


def _middle(word: Any) -> float:
    return float(word["top"] + word["bottom"]) / 2


def _lines_between(
    words: Sequence[Any], cuts: Sequence[float], top: float, bottom: float
) -> list[tuple[float, set[int]]]:
    """(top, columns that have a word) of each line of words between two rules."""
    lines: list[tuple[float, set[int]]] = []
    last = top
    for word in sorted(words, key=_middle):
        middle = _middle(word)
        if top < middle < bottom:
            if not lines or middle - last > 0.5 * (word["bottom"] - word["top"]):
                lines.append((word["top"], set()))
            last = middle
            lines[-1][1].add(bisect(cuts, word["x0"]))
    return lines


def _table(cells: Sequence[tuple[float, float, float, float]], words: Sequence[Any]) -> _Table | None:
    """The table of these cells; None for frames and drawings. A cell that spans several rows is repeated in each."""
    box = (min(c[0] for c in cells), min(c[1] for c in cells), max(c[2] for c in cells), max(c[3] for c in cells))
    texts: list[list[Any]] = [[] for _ in cells]
    for word in words:
        x, y = (word["x0"] + word["x1"]) / 2, _middle(word)
        if _inside(box, x, y):
            at = next((i for i, c in enumerate(cells) if c[0] <= x < c[2] and c[1] <= y < c[3]), None)
            if at is not None:
                texts[at].append(word)
    columns, tops = sorted({cell[0] for cell in cells}), sorted({cell[1] for cell in cells})
    grid = [[""] * len(columns) for _ in tops]
    for cell, inside in zip(cells, texts, strict=True):
        column, first = columns.index(cell[0]), tops.index(cell[1])
        for row in range(first, len(tops)):
            if tops[row] < cell[3] - 1:
                grid[row][column] = _cell_text(inside)
    kept = [i for i in range(len(columns)) if any(row[i] for row in grid)]
    rows = [[row[i] for i in kept] for row in grid if any(row)]
    filled = [text for row in rows for text in row if text]
    if len(rows) < 2 or len(kept) < 2 or 3 * len(filled) < len(rows) * len(kept):
        return None
    if max(map(len, filled)) > _LONGEST_CELL or sum(sum(map(bool, row)) > 1 for row in rows) < 2:
        return None
    return _Table(box, [columns[i] for i in kept], rows, _characters("".join(w["text"] for t in texts for w in t)))


def _cell_text(words: Sequence[Any]) -> str:
    """The words of a cell on one line. A word that was hyphenated at a line's end is joined; "x-ray-" keeps its
    hyphens."""
    text, last = "", 0.0
    for word in words:
        if word["top"] > last + 2 and word["text"][:1].islower() and (cut := re.search(r"(\S*[^\W\d_])-$", text)):
            text = (text if "-" in cut[1] else text[:-1]) + word["text"]
        else:
            text += f" {word['text']}"
        last = word["top"]
    return " ".join(clean(text.translate(_GLYPHS)).split())


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
    return "".join(_unwrapped(clean(text).split("\n"))).strip()


def _unwrapped(lines: Sequence[str]) -> list[str]:
    """Each line, and before it what separates it from the one above."""
    lines = [" ".join(line.translate(_GLYPHS).split()) for line in lines]
    lengths = sorted(len(line) for line in lines if line)
    if not lengths:
        return []
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
    return parts
