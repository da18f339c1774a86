"""Office files: documents (DOCX, ODT), spreadsheets (XLSX), slides (PPTX) and books (EPUB).

Archives are unpacked by `Package`, within its limits. Cells and spaces that a file states by a number are bounded too,
because one attribute can stand for millions of them.

DOCX becomes Markdown: paragraphs, lists and tables, with headings recognised by their style. Its XML is read directly.
python-docx (docs/dependencies.md) silently drops text that Word wraps in other elements: insertions under tracked
changes, content controls (on which templates are built), text boxes and footnotes.
"""

from __future__ import annotations

import io
import posixpath
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from posixpath import dirname, join, normpath
from typing import Any
from urllib.parse import unquote

from ragkv.ingest.charset import clean
from ragkv.ingest.html import read_html
from ragkv.ingest.parser import Parsed, Unreadable, check_text, join_rows, join_sections, sections_under
from ragkv.ingest.text import table_rows

_PARTS = 5000  # of an archive: sheets, slides, chapters
_CELLS = 3_000_000  # of a workbook, with the empty ones before a filled one
_REPEATS = 64  # most copies of a cell, or spaces, that one ODT element stands for
_DAY_ZERO = datetime(1899, 12, 30)  # a time without a date is on it
_DATE_FORMATS = {*range(14, 23), *range(45, 48)}  # numFmtId, ECMA-376 part 1, 18.8.30


def _text(element: Any, name: str = "t") -> str:
    return "".join(found.text or "" for found in element.iter(f"{{*}}{name}"))


def _markdown(rows: Sequence[list[str]]) -> str:
    """A table, whose first row is its head."""
    width = max(map(len, rows))
    shown = [f"| {' | '.join(row + [''] * (width - len(row)))} |" for row in rows]
    return "\n".join([shown[0], "|" + "---|" * width, *shown[1:]])


def _listed(package: Package, main: str, element: str, kind: str) -> Iterator[tuple[Any, str]]:
    """The parts that elements of the main part name, in their order."""
    known = {name: path for name, each, path in relations(package, main) if each == kind}
    for found in package.xml(main).iter(f"{{*}}{element}"):
        name = next((value for key, value in found.attrib.items() if key.endswith("}id")), "")
        if name in known:
            yield found, known[name]


def read_xlsx(data: bytes) -> Parsed:
    """Each row of each sheet as a CSV's row, cited as "Sheet, row 17"; a formula is its last value."""
    with opened(data, "XLSX", _PARTS) as package:
        workbook = next(iter(related(package, "", "officeDocument")), "xl/workbook.xml")
        strings = [_text(item) for part in related(package, workbook, "sharedStrings") for item in package.xml(part)]
        dates = _date_styles([package.xml(part) for part in related(package, workbook, "styles")])
        rows: list[tuple[str, str]] = []
        used = 0
        for sheet, part in _listed(package, workbook, "sheet", "worksheet"):
            name = attribute(sheet, "name")
            cells: list[tuple[int, list[str]]] = []
            for row in package.xml(part).iter("{*}row"):
                fields: list[str] = []
                for cell in row:
                    column = _column(attribute(cell, "r"), len(fields))
                    used += max(1, column + 1 - len(fields))
                    if used > _CELLS:
                        raise Unreadable(f"XLSX cannot be read: it has more than {_CELLS:,} cells")
                    fields += [""] * (column + 1 - len(fields))
                    fields[column] = " ".join(_value(cell, strings, dates).split())
                number = attribute(row, "r")
                if any(fields):
                    cells.append((int(number) if number.isdecimal() else len(cells) + 1, fields))
            rows += [(f"{name}, {place}", text) for place, text in table_rows(cells)] if cells else []
    text, sections = join_rows(rows)
    return Parsed(text=text, sections=sections)


def _column(reference: str, following: int) -> int:
    """The column of "C5", from 0; the `following` one without a reference."""
    letters = re.match(r"[A-Z]{1,3}", reference)
    column = 0
    for letter in letters[0] if letters else "":
        column = 26 * column + ord(letter) - 64
    return column - 1 if letters else following


def _date_styles(parts: Sequence[Any]) -> list[bool]:
    """Whether the cells of each style hold dates."""
    own = {
        attribute(f, "numFmtId")
        for part in parts
        for f in part.iter("{*}numFmt")
        if _is_date(attribute(f, "formatCode"))
    }
    formats = [xf for part in parts for styles in part if local_name(styles) == "cellXfs" for xf in styles]
    ids = [attribute(xf, "numFmtId") for xf in formats]
    return [each in own or (each.isdecimal() and int(each) in _DATE_FORMATS) for each in ids]


def _is_date(code: str) -> bool:
    return re.search(r"[ymdh]", re.sub(r'"[^"]*"|\[[^\]]*\]|\\.', "", code.lower())) is not None


def _value(cell: Any, strings: Sequence[str], dates: Sequence[bool]) -> str:
    kind, value, style = attribute(cell, "t"), _text(cell, "v"), attribute(cell, "s")
    if kind == "s":
        return strings[int(value)] if value.isdecimal() and int(value) < len(strings) else ""
    if kind == "inlineStr":
        return _text(cell)
    if kind == "b":
        return "true" if value == "1" else "false"
    if kind in ("", "n") and style.isdecimal() and int(style) < len(dates) and dates[int(style)]:
        try:
            moment = _DAY_ZERO + timedelta(days=round(float(value), 8))
        except (ValueError, OverflowError):
            return value
        moment = moment.replace(microsecond=0)
        if moment.date() == _DAY_ZERO.date():
            return str(moment.time())
        return str(moment.date() if moment.time() == datetime.min.time() else moment)
    return value


def read_pptx(data: bytes) -> Parsed:
    """A page per slide: its paragraphs and tables, then the speaker's notes."""
    with opened(data, "PPTX", _PARTS) as package:
        main = next(iter(related(package, "", "officeDocument")), "ppt/presentation.xml")
        slides = []
        for _, part in _listed(package, main, "sldId", "slide"):
            notes = [package.xml(note) for note in related(package, part, "notesSlide")]
            lines = [line for root in (package.xml(part), *notes) for line in _slide(root)]
            slides.append(clean("\n".join(lines)))
    text, sections = join_sections((slide, {"page": number}) for number, slide in enumerate(slides, start=1))
    return Parsed(text=text, sections=sections)


def _slide(element: Any) -> Iterator[str]:
    for child in element:
        if local_name(child) == "tr":
            yield " | ".join(" ".join(" ".join(_text(p) for p in cell.iter("{*}p")).split()) for cell in child)
        elif local_name(child) == "p":
            if not any(attribute(field, "type") == "slidenum" for field in child):
                yield _text(child)
        else:
            yield from _slide(child)


def read_epub(data: bytes) -> Parsed:
    """The chapters in the order of the spine, each as an HTML page, cited by its title or first heading."""
    chapters: list[tuple[str, dict[str, Any]]] = []
    left_out: list[str] = []
    with opened(data, "EPUB", _PARTS) as package:
        main = next((attribute(f, "full-path") for f in package.xml("META-INF/container.xml").iter("{*}rootfile")), "")
        package_file = package.xml(main)
        title = next((" ".join("".join(found.itertext()).split()) for found in package_file.iter("{*}title")), None)
        items = {attribute(item, "id"): attribute(item, "href") for item in package_file.iter("{*}item")}
        for number, item in enumerate(package_file.iter("{*}itemref"), start=1):
            href = normpath(join(dirname(main), unquote(items.get(attribute(item, "idref"), ""))))
            try:
                chapter = read_html(package.read(href), whole=True)
            except KeyError:
                left_out.append(f"chapter {number}: it is missing")
                continue
            except Unreadable as error:
                left_out.append(f"chapter {number}: {error}")
                continue
            left_out += [f"chapter {number}: {part}" for part in chapter.left_out]
            named = next((s.heading for s in chapter.sections if s.heading), None) or chapter.title
            chapters.append((chapter.text, {"heading": named or f"Chapter {number}"}))
    text, sections = join_sections(chapters)
    return Parsed(text=text, sections=sections, title=title, left_out=left_out)


def read_odt(data: bytes) -> Parsed:
    """Headings, paragraphs, lists and tables as Markdown; deleted text of tracked changes is left out."""
    with opened(data, "ODT", _PARTS) as package:
        body = next(package.xml("content.xml").iter("{*}body"), None)
    lines: list[str] = []
    headings: list[tuple[int, int, str]] = []
    position = 0
    for level, line in () if body is None else _blocks(body):
        if level:
            headings.append((position, level, line))
            line = f"{'#' * min(level, 6)} {line}"
        lines.append(line := clean(line))
        position += len(line) + 2
        check_text(position)
    text = "\n\n".join(lines)
    return Parsed(text=text, sections=sections_under(text, headings), title=headings[0][2] if headings else None)


def _blocks(element: Any) -> Iterator[tuple[int, str]]:
    """(heading level or 0, text) of every block that has text; its notes come after it."""
    for child in element:
        name = local_name(child)
        notes: list[str] = []
        if name in ("h", "p"):
            if line := " ".join(_words(child, notes).split()):
                level = attribute(child, "outline-level")
                yield (int(level) if level.isdecimal() else 1) if name == "h" else 0, line
        elif name == "table":
            rows = [
                [words for cell in row for words in [_cell(cell, notes)] * _repeat(cell)]
                for row in child.iter("{*}table-row")
            ]
            rows = [row for row in rows if any(row)]
            if rows:
                yield 0, _markdown(rows)
        elif name == "list-item":
            yield from ((level, f"- {line}") for level, line in _blocks(child))
        elif name != "tracked-changes":
            yield from _blocks(child)
        yield from ((0, note) for note in notes)


def _cell(cell: Any, notes: list[str]) -> str:
    return " ".join(" ".join(_words(paragraph, notes).split()) for paragraph in cell.iter("{*}p"))


def _repeat(cell: Any) -> int:
    count = attribute(cell, "number-columns-repeated")
    return min(int(count), _REPEATS) if count.isdecimal() else 1


def _words(element: Any, notes: list[str]) -> str:
    """The text of a paragraph without comments; `s`, `tab` and `line-break` stand for white space. Its notes go to
    `notes`, and their numbers stay.
    """
    parts = [element.text or ""]
    for child in element:
        name = local_name(child)
        if name == "note":
            number = "".join(found.text or "" for found in child if local_name(found) == "note-citation")
            notes.append(f"[{number}] {' '.join(line for _, line in _blocks(child))}")
            parts.append(f"[{number}]")
        elif name in ("s", "tab", "line-break"):
            parts.append(" ")
        elif name and not name.startswith("annotation"):
            parts.append(_words(child, notes))
        parts.append(child.tail or "")
    return "".join(parts)


_LARGEST = 256 << 20  # unpacked bytes of all parts; fifty times the text of the longest novel
_NODES = 3_000_000  # elements and attributes, 100 to 200 bytes each in memory; ten thousand pages have this many
_DOCX_PARTS = 100  # XML parts; an ordinary document has five
_READ_BYTES = 1 << 16
_CHAIN = 50  # longest chain of styles based on each other
_OLE = bytes.fromhex("d0cf11e0a1b11ae1")  # the container of an encrypted DOCX, and of a .doc
_DROPPED = {"del", "moveFrom", "Fallback", "pPr", "rPr", "tblPr", "sdtPr", "instrText", "delText", "rt", "tbl"}
_BROKEN = (zipfile.BadZipFile, zlib.error, struct.error, OSError, EOFError, LookupError, RuntimeError, ValueError)


def read_docx(data: bytes) -> Parsed:
    """A section per heading. Deleted text of tracked changes, page headers and tables of contents are left out."""
    with opened(data, "DOCX", _DOCX_PARTS, older="it is a .doc") as package:
        main = next(iter(related(package, "", "officeDocument")), "word/document.xml")
        body = package.xml(main)
        levels, lists = _styles([package.xml(part) for part in related(package, main, "styles")])
        notes = {
            (kind, attribute(note, "id")): note
            for kind in ("footnote", "endnote")
            for part in related(package, main, f"{kind}s")
            for note in package.xml(part)
        }
        core = [package.xml(part) for part in related(package, "", "core-properties")]
        reader = _Reader(levels, lists, notes)
        blocks = [(clean(block), level) for block, level in reader.blocks(body)]
    headings, position = [], 0
    for block, level in blocks:
        if level is not None and level > 0:
            headings.append((position, level, block.lstrip("#").strip()))
        position += len(block) + 1
    text = "\n".join(block for block, _ in blocks)
    named = [
        " ".join("".join(found.itertext()).split()) for root in core for found in root if local_name(found) == "title"
    ]
    title = reader.title or next(iter(named), "") or next((words for _, level, words in headings if level == 1), None)
    return Parsed(text=text, sections=sections_under(text, headings), title=title or None)


@contextmanager
def opened(data: bytes, kind: str, parts: int, *, older: str = "of an older format") -> Iterator[Package]:
    """An archive of at most `parts` XML parts; every damage of it, within the block too, becomes `Unreadable`."""
    from lxml import etree

    if data.startswith(_OLE):
        raise Unreadable(f"{kind} is protected with a password (or {older}); save it as {kind} without one")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            yield Package(archive, kind, parts)
    except (*_BROKEN, etree.XMLSyntaxError) as error:
        what = "damaged" if data.startswith(b"PK") else "it is none"
        raise Unreadable(f"{kind} cannot be read: {what} ({type(error).__name__})") from error


class Package:
    """The XML parts of a document, unpacked up to a limit, because the sizes stated in a ZIP may be false."""

    def __init__(self, archive: zipfile.ZipFile, kind: str, parts: int) -> None:
        self._archive = archive
        self._kind = kind
        self._most = parts
        self._bytes = self._nodes = self._parts = 0

    def names(self) -> list[str]:
        return self._archive.namelist()

    def xml(self, part: str) -> Any:
        """The root element of a part; raises `Unreadable` while unpacking as soon as a limit is exceeded."""
        from lxml import etree

        parser = etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False, remove_comments=True)
        for data in self._pieces(part):
            parser.feed(data)
        return parser.close()

    def read(self, part: str) -> bytes:
        """The bytes of a part, within the same limits."""
        return b"".join(self._pieces(part))

    def _pieces(self, part: str) -> Iterator[bytes]:
        self._parts += 1
        if self._parts > self._most:
            raise Unreadable(f"{self._kind} cannot be read: it has more than {self._most} parts of text")
        with self._archive.open(part) as stream:
            while data := stream.read(_READ_BYTES):
                self._bytes += len(data)
                # Counting bytes that open an element, give an attribute or name an entity works in UTF-16 too.
                self._nodes += data.count(b"<") - data.count(b"</") + data.count(b"=") + data.count(b"&")
                if self._bytes > _LARGEST:
                    raise Unreadable(f"{self._kind} cannot be read: unpacked, it is larger than {_LARGEST >> 20} MiB")
                if self._nodes > _NODES:
                    raise Unreadable(f"{self._kind} cannot be read: it has more than {_NODES:,} elements")
                yield data


def relations(package: Package, part: str) -> list[tuple[str, str, str]]:
    """(id, kind, path) of the parts related to a part ("" is the package)."""
    folder, name = posixpath.split(part)
    place = posixpath.join(folder, "_rels", f"{name}.rels")
    if place not in package.names():
        return []
    return [
        (
            attribute(relation, "Id"),
            attribute(relation, "Type").rpartition("/")[2],
            posixpath.normpath(posixpath.join("/", folder, attribute(relation, "Target"))).lstrip("/"),
        )
        for relation in package.xml(place)
        if attribute(relation, "TargetMode") != "External"
    ]


def related(package: Package, part: str, kind: str) -> list[str]:
    """The paths of the parts related to a part ("" is the package) by `kind`."""
    return [path for _, each, path in relations(package, part) if each == kind]


def local_name(element: Any) -> str:
    """The local name (the standard's two editions differ in namespaces); "" for a processing instruction."""
    return element.tag.rpartition("}")[2] if isinstance(element.tag, str) else ""


def attribute(element: Any, name: str) -> str:
    return next((str(value) for key, value in element.attrib.items() if key.rpartition("}")[2] == name), "")


def _val(element: Any, path: str) -> str:
    found = element.find(path)
    return "" if found is None else attribute(found, "val")


def _styles(parts: list[Any]) -> tuple[dict[str, int | None], dict[str, bool]]:
    """Heading level (0: title, -1: table of contents, None: text) and whether it is a list, by paragraph style.

    The level comes from the outline level or name of the style or of its base styles, so a user's style based on
    "heading 2" is a heading too.
    """
    styles = {attribute(style, "styleId"): style for part in parts for style in part if local_name(style) == "style"}
    levels: dict[str, int | None] = {}
    lists: dict[str, bool] = {}
    for name in styles:
        chain: list[str] = []
        at = name
        while at in styles and at not in chain and len(chain) < _CHAIN:
            chain.append(at)
            at = _val(styles[at], "{*}basedOn")
        levels[name] = next((level for s in chain if (level := _style_level(styles[s])) is not None), None)
        lists[name] = any(styles[s].find("{*}pPr/{*}numPr") is not None for s in chain)
    return levels, lists


def _style_level(style: Any) -> int | None:
    name = _val(style, "{*}name").lower()
    if name == "title":
        return 0
    if re.fullmatch(r"toc \d|table of figures", name):
        return -1
    if heading := re.fullmatch(r"heading ([1-9])", name):
        return int(heading[1])
    return _outline(style)


def _outline(element: Any) -> int | None:
    level = _val(element, "{*}pPr/{*}outlineLvl")
    return int(level) + 1 if level.isdecimal() and int(level) < 9 else None


class _Reader:
    """Walks the blocks of one document; notes and text boxes of a paragraph come after it."""

    def __init__(self, levels: dict[str, int | None], lists: dict[str, bool], notes: dict[tuple[str, str], Any]):
        self._levels = levels
        self._lists = lists
        self._notes = notes
        self._written = 0
        self._boxes: list[Any] = []
        self._noted: list[tuple[str, str]] = []
        self.title = ""

    def blocks(self, element: Any) -> Iterator[tuple[str, int | None]]:
        """(lines, heading level) of every block, with a blank line between blocks except inside a list."""
        before = ""
        for kind, text, level in self._blocks(element):
            if before and not (kind == before == "list"):
                yield "", None
            yield text, level
            before = kind

    def _blocks(self, element: Any) -> Iterator[tuple[str, str, int | None]]:
        for child in element:
            name = local_name(child)
            if name == "p":
                yield from self._paragraph(child)
            elif name == "tbl":
                yield from self._table(child)
            elif name not in _DROPPED:  # body, content control, insertion, custom XML: read what is inside
                yield from self._blocks(child)

    def _spend(self, characters: int) -> None:
        """Count text against the limit: merged and empty cells can make it much longer than the file."""
        self._written += characters
        check_text(self._written)

    def _paragraph(self, paragraph: Any) -> Iterator[tuple[str, str, int | None]]:
        if not len(paragraph):
            return
        style = _val(paragraph, "{*}pPr/{*}pStyle")
        level = _outline(paragraph) or self._levels.get(style)
        text = "\n".join(" ".join(line.split()) for line in "".join(self._words(paragraph)).split("\n")).strip()
        if text and level != -1:
            self._spend(len(text))
            if level is None:
                yield self._item(paragraph, style, text)
            else:
                text = " ".join(text.split())
                self.title = self.title or (text if level == 0 else "")
                yield "heading", f"{'#' * max(1, min(level, 6))} {text}", level
        boxes, self._boxes, noted, self._noted = self._boxes, [], self._noted, []
        for box in boxes:
            yield from self._blocks(box)
        for key in noted:
            if (note := self._notes.pop(key, None)) is not None:  # popped, because notes may refer to each other
                words = " ".join(text for _, text, _ in self._blocks(note))
                yield "note", f"[{key[1]}] {words}", None

    def _item(self, paragraph: Any, style: str, text: str) -> tuple[str, str, int | None]:
        numbering = paragraph.find("{*}pPr/{*}numPr")
        listed = self._lists.get(style, False) if numbering is None else _val(numbering, "{*}numId") != "0"
        if not listed:
            return "text", text, None
        depth = _val(paragraph, "{*}pPr/{*}numPr/{*}ilvl")
        indent = "  " * min(int(depth), 8) if depth.isdecimal() else ""
        return "list", f"{indent}- " + text.replace("\n", f"\n{indent}  "), None

    def _words(self, element: Any) -> Iterator[str]:
        for child in element:
            match local_name(child):
                case "t":
                    yield child.text or ""
                case "tab" | "ptab":
                    yield "\t"
                case "br" | "cr":
                    yield "\n"
                case "noBreakHyphen":
                    yield "-"
                case "txbxContent":
                    self._boxes.append(child)
                case "footnoteReference" | "endnoteReference" as name:
                    self._noted.append((name.removesuffix("Reference"), attribute(child, "id")))
                    yield f"[{attribute(child, 'id')}]"
                case name if name not in _DROPPED:
                    yield from self._words(child)

    def _table(self, table: Any) -> Iterator[tuple[str, str, int | None]]:
        """A table as Markdown. A cell that is merged with the one above repeats its text, so each row is complete."""
        rows: list[list[str]] = []
        for row in _below(table, "tr"):
            if row.find("{*}trPr/{*}del") is not None:
                continue
            cells: list[str] = []
            for cell in _below(row, "tc"):
                words = " ".join(" ".join(text for _, text, _ in self._blocks(cell)).split()).replace("|", r"\|")
                merged = cell.find("{*}tcPr/{*}vMerge")
                if merged is not None and attribute(merged, "val") != "restart" and rows and len(cells) < len(rows[-1]):
                    words = rows[-1][len(cells)]
                    self._spend(len(words))
                span = _val(cell, "{*}tcPr/{*}gridSpan")
                cells += [words] + [""] * (min(int(span), 64) - 1 if span.isdecimal() else 0)
            rows.append(cells)
        rows = [row for row in rows if any(row)]
        if not rows:
            return
        if (width := max(map(len, rows))) == 1:  # a frame around text
            yield "text", "\n\n".join(row[0] for row in rows), None
            return
        self._spend(3 * width * len(rows))
        yield "table", _markdown(rows), None


def _below(element: Any, name: str) -> Iterator[Any]:
    """The rows of a table, or the cells of a row, also inside content controls; not those of a nested table."""
    for child in element:
        if local_name(child) == name:
            yield child
        elif local_name(child) not in {*_DROPPED, "tr", "tc", "tbl"}:
            yield from _below(child, name)
