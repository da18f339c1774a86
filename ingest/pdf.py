"""PDF: text page by page, under the headings of its outline or of its font sizes.

pdfium reads it. Its characters become lines by their places: a superscript stays in its line, columns that are drawn
across are read one after the other, and a gap is the end of a paragraph. Lines that were broken only by the page's
width are joined again. A table with lines around its cells becomes rows, as a sheet does (`ragkv.ingest.text`):
pdfplumber finds it. If the two libraries see different characters, the page stays running text, so nothing is lost or
read twice. How much is searched for tables is bounded in objects of the pages, not in time, so that a file gives the
same rows on every machine. Pages without text are read by OCR (`ragkv.ingest.ocr`).
"""

from __future__ import annotations

import io
import logging
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from ctypes import c_float
from dataclasses import dataclass, field
from itertools import groupby, islice, pairwise
from math import hypot
from statistics import median
from typing import TYPE_CHECKING, Any, Self

from ragkv.errors import install_hint
from ragkv.ingest.charset import clean
from ragkv.ingest.ocr import DPI, MAX_SCAN_PIXELS, MAX_SCANS, ocr_missing, recognise
from ragkv.ingest.parser import (
    HEADING_SEPARATOR,
    Parsed,
    Unreadable,
    check_sections,
    check_text,
    heading_path,
    join_sections,
    limits,
    silenced,
)
from ragkv.ingest.text import table_rows
from ragkv.ingest.unwrap import bare_characters, unwrap, words_of

if TYPE_CHECKING:
    from pypdfium2 import PdfDocument, PdfObject, PdfPage, PdfTextPage

logger = logging.getLogger(__name__)

_LOCKED = "PDF is protected with a password; save it without one"
_DAMAGED = "damaged structure"
_MIN_RULES = 3  # places of lines, each way, that make a table of two columns and two rows
_OBJECTS_PER_SECOND = 20_000  # characters and paths that are searched for tables, per second that reading may take
_MAX_PAGE_OBJECTS = 100_000  # more is a drawing
_MIN_ALPHABET = 20  # different letters of a page that is surely read
_MAX_EDGES = 2000  # of a page
_MAX_CELL_CHARACTERS = 1000  # more is a column of prose
_MAX_HEADING_CHARACTERS = 200
_GAP = 0.8  # the widest space between words, in heights of the line
_MIN_COLUMN_CHARACTERS = 20  # of its lines; a table's cells are shorter
_LARGER = 1.08  # a heading's size in sizes of the text: 12 points over 11 are one
_PICTURE = 0.05, 0.8  # shares of a page: a smaller picture is an ornament, a larger one is under the text
_HYPHENS = frozenset({0x02, 0xFFFE})  # as pdfium writes them at the ends of lines


def read_pdf(data: bytes) -> Parsed:
    """A section for each heading of each page that has text, and one for each row of its tables.

    A page that cannot be read, and pictures and attachments, are named in `left_out`.
    """
    from pypdfium2 import PdfDocument, PdfiumError
    from pypdfium2.raw import FPDF_ERR_PASSWORD

    try:
        document = PdfDocument(data)
        check_sections(len(document))
    except PdfiumError as error:
        if getattr(error, "err_code", None) == FPDF_ERR_PASSWORD:
            raise Unreadable(_LOCKED) from error
        raise Unreadable(f"PDF cannot be read: {_DAMAGED}") from error
    left_out: list[str] = []
    with silenced("pdfminer"):
        text, sections = join_sections(_parts(document, data, left_out))
    if not sections:
        raise Unreadable("; ".join(["no text found", *left_out[:1]]))
    title = document.get_metadata_dict(skip_empty=True).get("Title", "").strip()
    return Parsed(text=text, sections=sections, title=clean(title) or None, left_out=left_out)


class _Line:
    """A line, or a part of one before or after a gap, in points from the left and from the top.

    `follows` says that it goes on with the line before it.
    """

    def __init__(self, left: float, right: float, top: float, bottom: float, *, follows: bool) -> None:
        self.text = ""
        self.left, self.right, self.top, self.bottom = left, right, top, bottom
        self.follows = follows
        self.last = 0.0, 0.0
        self.sizes: Counter[float] = Counter()  # of the font, by characters

    @property
    def size(self) -> float:
        return max(self.sizes, key=self.sizes.__getitem__)

    @property
    def height(self) -> float:
        return self.bottom - self.top

    def add(self, character: str, left: float, right: float, top: float, bottom: float, size: float) -> None:
        if (left, right) == self.last and unicodedata.bidirectional(character) == "AL":
            self.text = self.text[:-1] + character + self.text[-1]  # of an Arabic ligature, which pdfium turns round
        else:
            self.text += character
        self.last = left, right
        self.left, self.right = min(self.left, left), max(self.right, right)
        self.top, self.bottom = min(self.top, top), max(self.bottom, bottom)
        self.sizes[round(size, 1)] += 1 if character.isalnum() else 0


@dataclass(slots=True)
class _Page:
    """`text` has a blank line where there is a gap. `sizes` are the font sizes of its lines, 0 for blank ones, and
    `picture` is the share of the page that the largest one takes. It may be `unnamed`: in fonts that are not in
    the file and whose characters pdfium does not know, as old Chinese and Japanese ones."""

    text: str = ""
    sizes: list[float] = field(default_factory=list)
    objects: int = 0
    ruled: bool = False
    unnamed: bool = False
    picture: float = 0.0
    commented: bool = False


@dataclass(frozen=True, slots=True)
class _Heading:
    level: int
    words: str
    key: str  # the words' letters and digits

    @classmethod
    def of(cls, level: int, words: str) -> Self:
        return cls(level, words, bare_characters(words))

    def begins(self, bare_lines: Sequence[str], start: int) -> bool:
        """Whether it stands at this line, perhaps with a number before it or broken into several lines."""
        seen = ""
        for line in bare_lines[start : start + 4]:
            if not (line or seen):
                return False
            seen += line
            number = len(seen) - len(self.key)
            if number == 0 or (len(self.key) > 3 and 0 < number < min(13, len(bare_lines[start]))):
                return seen.endswith(self.key)
            if number > 0:
                return False
        return False


def _parts(document: PdfDocument, data: bytes, left_out: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The text under each heading of each page, and the rows of tables; what is not read is added to `left_out`.

    All pages are read first, because the words and font sizes of all decide about each.
    """
    pages = list(_pages(document, left_out))
    words = words_of(page.text for page in pages)
    headings = _outline(document) or _large_lines(pages)
    plumber, path = _Plumber(data), list[tuple[int, str]]()
    scans = list[int]()
    missing = ocr_missing() if any(page.picture and not page.text for page in pages) else ""
    for number, page in enumerate(pages, start=1):
        parts = [(page.text, dict[str, Any]())]
        try:
            if page.unnamed and (text := plumber.text(number, page)):
                parts = [(text, {})]
            elif page.text:
                parts = plumber.parts(number, page) or parts
            elif page.picture:
                scans.append(number)
                if not missing and len(scans) <= MAX_SCANS:
                    parts = [(_scanned(document[number - 1]), {})]
        except Unreadable as error:
            left_out.append(f"page {number}: {error}")
        pending = headings.get(number, [])
        for absent in _absent(pending, page.text):
            path = heading_path(path, absent.level, absent.words)
            pending.remove(absent)
        for text, fields in parts:
            for heading, under in [(None, text)] if fields else _under(text, pending):
                path = heading_path(path, heading.level, heading.words) if heading else path
                name = HEADING_SEPARATOR.join(filter(None, [*(words for _, words in path), fields.get("heading")]))
                yield under if fields else unwrap(under, words), {"page": number, **fields, "heading": name or None}
        for left in pending:
            path = heading_path(path, left.level, left.words)
    if missing or len(scans) > MAX_SCANS:
        reason = missing or f"only {MAX_SCANS} are read; split the file"
        left_out += _named("scanned pages", scans if missing else scans[MAX_SCANS:], reason)
    numbered = list(enumerate(pages, start=1))
    pictured = [number for number, page in numbered if page.text and _PICTURE[0] < page.picture < _PICTURE[1]]
    left_out += _named("pictures", pictured, "not read")
    left_out += _named("comments", [number for number, page in numbered if page.commented], "not read")
    left_out += [f"attachment {document.get_attachment(i).get_name()}" for i in range(document.count_attachments())]


def _named(what: str, pages: Sequence[int], reason: str) -> list[str]:
    """ "scanned pages (pages 3, 5-9): reason"; nothing without pages."""
    runs: list[list[int]] = []
    for page in pages:
        if runs and page == runs[-1][-1] + 1:
            runs[-1][1:] = [page]
        else:
            runs.append([page])
    numbers = ", ".join("-".join(map(str, run)) for run in runs[:20]) + (", …" if len(runs) > 20 else "")
    return [f"{what} (page{'s' if len(pages) > 1 else ''} {numbers}): {reason}"] if pages else []


def _pages(document: PdfDocument, left_out: list[str]) -> Iterator[_Page]:
    from pypdfium2 import PdfiumError

    size = 0
    for index in range(len(document)):
        try:
            page = _page(document, index)
        except PdfiumError:
            left_out.append(f"page {index + 1}: {_DAMAGED}")
            page = _Page()
        size += len(page.text)
        check_text(size)
        yield page


def _page(document: PdfDocument, index: int) -> _Page:
    import pypdfium2.raw as pdfium

    page, result = document[index], _Page()
    for number in range(pdfium.FPDFPage_GetAnnotCount(page)):
        note = pdfium.FPDFPage_GetAnnot(page, number)
        kind = pdfium.FPDFAnnot_GetSubtype(note)
        drawn_text = kind == pdfium.FPDF_ANNOT_FREETEXT and pdfium.FPDFAnnot_HasKey(note, b"AP")
        result.commented |= kind in (pdfium.FPDF_ANNOT_TEXT, pdfium.FPDF_ANNOT_FREETEXT) and not drawn_text
        pdfium.FPDFPage_CloseAnnot(note)
    # What is written into a form becomes text of the page.
    if pdfium.FPDFPage_Flatten(page, pdfium.FLAT_NORMALDISPLAY) == pdfium.FLATTEN_SUCCESS:
        page = document[index]
    textpage = page.get_textpage()
    result.text, result.sizes = _joined(_in_reading_order([*_lines(textpage, page.get_rotation())]))
    whole = max(1.0, page.get_width() * page.get_height())
    kinds = [pdfium.FPDF_PAGEOBJ_IMAGE, pdfium.FPDF_PAGEOBJ_PATH, pdfium.FPDF_PAGEOBJ_TEXT]
    texts_drawn, columns, rows = Counter[bool](), set[int](), set[int]()
    for drawn in islice(page.get_objects(kinds), _MAX_PAGE_OBJECTS):
        if drawn.type == pdfium.FPDF_PAGEOBJ_TEXT:
            texts_drawn[pdfium.FPDFTextObj_GetText(drawn, textpage, None, 0) > 2] += 1  # bytes, with the NUL
        elif drawn.type == pdfium.FPDF_PAGEOBJ_PATH:
            for x, y in _corners(drawn):
                columns.add(round(x))
                rows.add(round(y))
        else:
            left, bottom, right, top = drawn.get_bounds()
            result.picture = max(result.picture, 1e-9, (right - left) * (top - bottom) / whole)
    result.ruled = min(len(columns), len(rows)) >= _MIN_RULES
    result.objects = texts_drawn.total() + len(columns) + len(result.text)
    result.unnamed = 4 * texts_drawn[False] > texts_drawn.total()
    return result


def _joined(lines: Sequence[_Line]) -> tuple[str, list[float]]:
    """A page's text with a blank line where there is a gap, and the font sizes of its lines."""
    steps = [(above, below, below.top - above.bottom) for above, below in pairwise(lines) if below.top > above.top]
    prose = [gap for above, below, gap in steps if min(len(above.text), len(below.text)) > _MIN_COLUMN_CHARACTERS]
    usual_gap = median(prose or [gap for *_, gap in steps] or [0.0])
    texts, sizes = list[str](), list[float]()
    above: _Line | None = None
    for line in lines:
        if above is not None and line.follows:
            texts[-1] += f" {line.text}"
            continue
        if above is not None:
            gap = line.top - above.bottom > usual_gap + 0.5 * line.height
            if gap or not above.size / _LARGER < line.size < above.size * _LARGER:
                texts.append("")
                sizes.append(0.0)
        texts.append(line.text)
        sizes.append(line.size if line.height < 2 * line.size else 0.0)  # text that runs up is no heading
        above = line
    utf_16 = "\n".join(texts).encode("utf-16-le", "surrogatepass")  # pdfium gives characters beyond U+FFFF as two
    return clean(utf_16.decode("utf-16-le", "replace")), sizes


def _corners(path: PdfObject) -> Iterator[tuple[float, float]]:
    """The corners of a path: of its box, and of its parts if it is more than one box, as a whole grid may be."""
    import pypdfium2.raw as pdfium

    left, bottom, right, top = path.get_bounds()
    yield from ((left, bottom), (right, top))
    x, y = c_float(), c_float()
    segments = pdfium.FPDFPath_CountSegments(path)
    for index in range(segments if segments > 5 else 0):
        if pdfium.FPDFPathSegment_GetPoint(pdfium.FPDFPath_GetPathSegment(path, index), x, y):
            yield x.value, y.value


def _lines(text: PdfTextPage, rotation: int) -> Iterator[_Line]:
    """The lines of a page in the order in which they were written, cut at gaps.

    pdfium ends a line where the baseline changes. A superscript or subscript goes on with it here.
    """
    import pypdfium2.raw as pdfium

    box, matrix = pdfium.FS_RECTF(), pdfium.FS_MATRIX()
    line: _Line | None = None
    ended = False
    for index in range(text.count_chars()):
        code = pdfium.FPDFText_GetUnicode(text, index)
        if code in (0x0A, 0x0D):
            ended = True
            continue
        hyphen = code in _HYPHENS or pdfium.FPDFText_IsHyphen(text, index) == 1
        if not hyphen and pdfium.FPDFText_IsGenerated(text, index) == 1:
            if line is not None:
                line.text += chr(code)
            continue
        pdfium.FPDFText_GetLooseCharBox(text, index, box)
        pdfium.FPDFText_GetMatrix(text, index, matrix)
        left, right, top, bottom = _shown(box, rotation)
        size = pdfium.FPDFText_GetFontSize(text, index) * hypot(matrix.c, matrix.d)
        if line is not None:
            gap, height = left - line.right, min(bottom - top, line.height)
            if ended:
                level = min(bottom, line.bottom) - max(top, line.top) > height / 2 and line.height < 2 * line.size
                ended = not (level and -0.5 * line.height < gap < _GAP * height)
                if not ended and gap > 0.15 * height and not line.text.endswith(" "):
                    line.text += " "
            if ended or gap > _GAP * height:
                yield line
                line = _Line(left, right, top, bottom, follows=not ended)
        if line is None:
            line = _Line(left, right, top, bottom, follows=False)
        line.add("-" if hyphen else chr(code), left, right, top, bottom, size)
        ended = hyphen
    if line is not None:
        yield line


def _shown(box: Any, rotation: int) -> tuple[float, float, float, float]:
    """Left, right, top and bottom of a box of a page, which is displayed with this rotation (degrees clockwise)."""
    if rotation == 90:
        return box.bottom, box.top, box.left, box.right
    if rotation == 180:
        return -box.right, -box.left, box.bottom, box.top
    if rotation == 270:
        return -box.top, -box.bottom, -box.right, -box.left
    return box.left, box.right, -box.top, -box.bottom


def _in_reading_order(lines: list[_Line]) -> list[_Line]:
    """Lines of two columns of prose that were written across are put one column after the other.

    Most files write one column after the other, and tables row by row, so the order changes only if the lines switch
    sides all the time and are as long as those of prose.
    """
    if not lines:
        return lines
    edges = min(line.left for line in lines), max(line.right for line in lines)
    middle = (edges[0] + edges[1]) / 2
    columns = [[line for line in lines if line.right <= middle], [line for line in lines if line.left >= middle]]
    if min(median([len(line.text) for line in column] or [0]) for column in columns) < _MIN_COLUMN_CHARACTERS:
        return lines
    sides = [line.left >= middle for line in lines if line.right <= middle or line.left >= middle]
    if sum(a != b for a, b in pairwise(sides)) < min(map(len, columns)):
        return lines
    ordered: list[_Line] = []
    for across, band in groupby(lines, lambda line: line.left < middle < line.right):
        ordered += band if across else sorted(band, key=lambda line: (line.left >= middle, line.top))  # noqa: B031
    for line in ordered:
        line.follows = False
    return ordered


def _outline(document: PdfDocument) -> dict[int, list[_Heading]]:
    """The headings of the document's outline, by page."""
    headings: dict[int, list[_Heading]] = {}
    for count, entry in enumerate(document.get_toc(), start=1):
        check_sections(count)
        dest, words = entry.get_dest(), " ".join(clean(entry.get_title()).split())
        number = None if dest is None else dest.get_index()
        if number is not None and words:
            headings.setdefault(number + 1, []).append(_Heading.of(entry.level, words))
    return headings


def _large_lines(pages: Sequence[_Page]) -> dict[int, list[_Heading]]:
    """Lines in a larger font than most of the text, by page: at most three of one size in a row.

    A size whose text is mostly longer than that is not one of headings. What stands on many pages is a running head.
    """
    sizes: Counter[float] = Counter()
    short: Counter[float] = Counter()
    candidates: list[tuple[int, float, str]] = []
    for number, page in enumerate(pages, start=1):
        lines = zip(page.sizes, page.text.split("\n"), strict=False)
        for size, group in groupby((line for line in lines if line[1]), lambda line: line[0]):
            texts = [text for _, text in group]
            words = " ".join(" ".join(texts).split())
            sizes[size] += len(words)
            if len(texts) <= 3 and len(words) <= _MAX_HEADING_CHARACTERS:
                short[size] += len(words)
                if sum(map(str.isalpha, words)) >= 2:
                    candidates.append((number, size, words))
    usual = max(sizes, key=sizes.__getitem__, default=0.0)
    large = sorted((size for size in sizes if size > _LARGER * usual and 2 * short[size] > sizes[size]), reverse=True)
    times = Counter(bare_characters(words) for _, size, words in candidates)
    headings: dict[int, list[_Heading]] = {}
    for number, size, words in candidates:
        if size in large:
            heading = _Heading.of(large.index(size), words)
            if times[heading.key] <= max(2, len(pages) // 4):
                headings.setdefault(number, []).append(heading)
    return headings


def _absent(headings: Sequence[_Heading], text: str) -> list[_Heading]:
    """The headings that begin at no line of a text."""
    lines = [bare_characters(line) for line in text.split("\n")] if headings else []
    return [other for other in headings if not any(other.begins(lines, start) for start in range(len(lines)))]


def _under(text: str, pending: list[_Heading]) -> Iterator[tuple[_Heading | None, str]]:
    """A text cut at the lines that begin one of the headings, which is taken from `pending`."""
    if not pending:
        yield None, text
        return
    lines = text.split("\n")
    bare_lines = [bare_characters(line) for line in lines]
    heading, first = None, 0
    for start in range(len(lines)):
        following = next((other for other in pending if other.begins(bare_lines, start)), None)
        if following is not None:
            yield heading, "\n".join(lines[first:start])
            pending.remove(following)
            heading, first = following, start
    yield heading, "\n".join(lines[first:])


def _scanned(page: PdfPage) -> str:
    width, height = page.get_size()
    scale = min(DPI / 72, (MAX_SCAN_PIXELS / max(1.0, width * height)) ** 0.5)
    picture = page.render(scale=scale, grayscale=True).to_numpy()
    return recognise(picture.shape[1], picture.shape[0], picture.tobytes(), round(72 * scale))


class _Plumber:
    """pdfplumber, which finds the tables of pages by the lines around their cells."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._left = limits().seconds_for(len(data)) * _OBJECTS_PER_SECOND
        self._document: Any = None

    def parts(self, number: int, page: _Page) -> list[tuple[str, dict[str, Any]]]:
        """The texts between the tables of page `number` (from 1) and their rows.

        Empty if there is no table, or if pdfplumber reads other characters, so that nothing is lost.
        """
        if not page.ruled or page.objects > min(_MAX_PAGE_OBJECTS, self._left):
            return []
        self._left -= page.objects
        try:
            plumbed = self._page(number)
            for curve in plumbed.curves:  # a rotated page's rectangles slant in the last digits
                curve["pts"] = [(round(x, 1), round(y, 1)) for x, y in curve["pts"]]
            own: Counter[str] = Counter()
            parts = list(_between_tables(plumbed, own)) if len(plumbed.edges) <= _MAX_EDGES else []
            plumbed.close()
        except MemoryError:
            raise
        except Exception:  # pdfplumber is missing, or refuses what pdfium reads
            logger.debug("tables of page %d", number, exc_info=True)
            return []
        seen = Counter(bare_characters(page.text))
        differ = (seen - own).total() + (own - seen).total()
        return parts if any(fields for _, fields in parts) and differ <= 2 + 0.03 * seen.total() else []

    def text(self, number: int, page: _Page) -> str:
        """The text of page `number`, if pdfplumber knows many more of its characters than pdfium; else empty."""
        letters = set(filter(str.isalpha, page.text))
        try:
            text = str(self._page(number).extract_text())
        except MemoryError:
            raise
        except Exception as error:
            logger.debug("text of page %d", number, exc_info=True)
            if len(letters) > _MIN_ALPHABET:
                return ""
            remedy = f"; to read it, {install_hint('pdf')}" if isinstance(error, ImportError) else ""
            raise Unreadable(f"its fonts do not name their characters{remedy}") from error
        return text if len(set(filter(str.isalpha, text))) > 1.3 * len(letters) + 5 else ""

    def _page(self, number: int) -> Any:
        import pdfplumber

        self._document = self._document or pdfplumber.open(io.BytesIO(self._data))
        return self._document.pages[number - 1]


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
        characters.update(bare_characters("".join(filled)))
        for place, text in table_rows(list(enumerate(rows, start=1))):
            yield text, {"heading": f"table {number}, {place}", "alone": True}
        top = table.bbox[3]
    yield _text_between(page, top, page.bbox[3], characters), {}


def _text_between(page: Any, top: float, bottom: float, characters: Counter[str]) -> str:
    def within(thing: Any) -> bool:
        return bool(thing["object_type"] == "char" and top <= (thing["top"] + thing["bottom"]) / 2 < bottom)

    text = str(page.filter(within).extract_text(x_tolerance_ratio=0.15))
    characters.update(bare_characters(text))
    return text


def _flat(cell: str) -> str:
    """A cell's text on one line; a word that was hyphenated at a line's end is joined."""
    return " ".join(unwrap(cell).split())
