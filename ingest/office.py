"""Office files: documents (DOCX, ODT), spreadsheets (XLSX, ODS), slides (PPTX, ODP) and books (EPUB).

One `Walker` reads the XML of all but EPUB: paragraphs with their runs, lists, tables, text boxes, charts and diagrams.
What it does not read (pictures, comments, page headers, hidden sheets, damaged parts) it names in `left_out`. Cells
that a file states by a number are bounded, because one attribute can stand for millions of them.

Libraries were measured and not taken (docs/dependencies.md): each loses some text, and none says what it loses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from posixpath import dirname, join, normpath
from typing import Any
from urllib.parse import unquote

from ragkv.ingest.charset import clean
from ragkv.ingest.html import read_html
from ragkv.ingest.numbers import format_code, formatted, from_1904
from ragkv.ingest.package import Package, attribute, local_name, opened, val
from ragkv.ingest.parser import Parsed, Section, Unreadable, check_text, join_rows, join_sections, sections_under
from ragkv.ingest.text import table_rows

_MAX_CELLS = 3_000_000  # of a workbook, with the empty ones before a filled one
_MAX_REPEATS = 64  # copies of a cell, row or space that one element stands for
_MAX_STYLES = 50  # that are based on each other
_DROPPED = {
    *("del", "moveFrom", "pPr", "rPr", "tblPr", "trPr", "tcPr", "sdtPr", "instrText", "delText", "rt", "rPh"),
    *("ruby-text", "tracked-changes", "forms", "extLst", "endParaRPr"),
}
_DRAWN = {
    *("txbxContent", "tbl", "table", "chart", "relIds", "pic", "imagedata", "object", "object-ole", "oleObj"),
    *("altChunk", "frame", "custom-shape", "rect", "ellipse", "g", "caption", "annotation"),
}
_BLANKS = {"tab": "\t", "ptab": "\t", "br": "\n", "cr": "\n", "line-break": "\n", "s": " ", "noBreakHyphen": "-"}
_RAISED = str.maketrans("0123456789+-−", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁻")
_TIGHT = {"list", "line"}  # kinds of blocks that follow each other without a blank line
_SYMBOL = "∀#∃%&∍()*+,−./0123456789:;<=>?≅ΑΒΧΔΕΦΓΗΙϑΚΛΜΝΟΠΘΡΣΤΥςΩΞΨΖ[∴]⊥_‾αβχδεφγηιϕκλµνοπθρστυϖωξψζ{|}~"
_SYMBOLS = "€ϒ′≤⁄∞ƒ♣♦♥♠↔←↑→↓°±″≥×∝∂•÷≠≡≈…⏐⎯↵ℵℑℜ℘⊗⊕∅∩∪⊃⊇⊄⊂⊆∈∉∠∇®©™∏√⋅¬∧∨⇔⇐⇑⇒⇓◊〈®©™∑⎛⎜⎝⎡⎢⎣⎧⎨⎩⎪ 〉∫⌠⎮⌡⎞⎟⎠⎤⎥⎦⎫⎬⎭"
_WINGDINGS = (
    "🖉✂✁👓🕭🕮🕯🕿✆🖂🖃📪📫📬📭🗀🗁🗎🗏🗐🗄⌛🖮🖰🖲🖳🖴🖫🖬✇✍🖎✌🖏👍👎☜☞☝☟🖐☺😐☹💣🕱🏳🏱✈☼🌢❄🕆✞🕈✠✡☪☯🕉☸♈♉♊♋♌♍♎♏♐♑"
    "♒♓🙰🙵●🔾■☐🞐❑❒🞟⧫◆❖⬩⌧⮹⌘🏵🏶🙶🙷▯🄋➀➁➂➃➄➅➆➇➈➉🄌➊➋➌➍➎➏➐➑➒➓🙢🙠🙡🙣🙞🙜🙝🙟·•⬝⭘🞆🞈🞊🞋🔿▪☐🟁🟅★🟋🟏🟓🟑⯐⌖⯎⯏⯑✪✰"
    "🕐🕑🕒🕓🕔🕕🕖🕗🕘🕙🕚🕛⮰⮱⮲⮳⮴⮵⮶⮷🙪🙫🙕🙔🙗🙖🙐🙑🙒🙓⌫⌦⮘⮚⮙⮛⮈⮊⮉⮋🡨🡪🡩🡫🡬🡭🡯🡮🡸🡺🡹🡻🡼🡽🡿🡾⇦⇨⇧⇩⬄⇳⬁⬀⬃⬂🢬🢭✗✓☒☑"
)
_SIGNS = {  # of fonts without Unicode, by code
    font: {code: sign for code, sign in enumerate(signs, first) if sign != " "}
    for font, first, signs in (
        ("symbol", 0x22, f"{_SYMBOL:<126}{_SYMBOLS}"),
        ("wingdings", 0x21, _WINGDINGS),
        ("wingdings 2", 0x4F, f"{'✗✓☒☑☒☒':<83}■☐"),
        ("webdings", 0x61, f"{'✔ ☐':<17}✗"),
    )
}
_ROWS, _CELLS = {"tr", "table-row"}, {"tc", "table-cell", "covered-table-cell"}

Block = tuple[str, str, int | None]
"""Kind, text and heading level (0: title, -1: table of contents, None: no heading)."""


def read_docx(data: bytes) -> Parsed:
    """A section per heading. Deleted text of tracked changes is dropped."""
    with opened(data, "DOCX") as package:
        main = package.main("word/document.xml")
        body = package.xml(main)
        notes = {
            (kind, attribute(note, "id")): note
            for kind in ("footnote", "endnote", "comment")
            for part in package.related(main, f"{kind}s")
            for note in package.part(part, "", f"part with the {kind}s")
        }
        core = package.related("", "core-properties")
        title = " ".join(_text(package.part(part, "", "properties"), "title") for part in core)
        styles = _styles([package.part(part, "", "styles") for part in package.related(main, "styles")])
        parsed = _document(Walker(package, main, styles=styles, notes=notes), body, title)
        for kind, number in notes:
            if kind == "comment":  # without a place
                package.skip("", kind, _text(notes[kind, number]))
        for what in ("header", "footer"):
            for part in package.related(main, what):
                if words := _text(package.part(part, "", f"page {what}")):
                    package.skip("", f"page {what}", words)
        return replace(parsed, left_out=package.left_out())


def read_odt(data: bytes) -> Parsed:
    """A section per heading, as in DOCX."""
    with opened(data, "ODT") as package:
        parsed = _document(Walker(package, "content.xml", mixed=True), package.xml("content.xml"), "")
        margins = package.part("styles.xml", "").iter("{*}header", "{*}footer") if package.has("styles.xml") else ()
        for margin in margins:
            if words := " ".join("".join(margin.itertext()).split()):
                package.skip("", f"page {local_name(margin)}", words)
        return replace(parsed, left_out=package.left_out())


def _document(walker: Walker, root: Any, title: str) -> Parsed:
    headings: list[tuple[int, int, str]] = []
    lines: list[str] = []
    position = 0
    for block, level in walker.lines(root):
        lines.append(line := clean(block))
        if level:
            headings.append((position, level, line.lstrip("#").strip()))
        position += len(line) + 1
    text = "\n".join(lines)
    title = walker.title or title or next((words for _, level, words in headings if level == 1), "")
    return Parsed(text=text, sections=sections_under(text, headings), title=title or None)


def read_pptx(data: bytes) -> Parsed:
    """A page per slide: its paragraphs, tables, charts and diagrams, then the speaker's notes."""
    with opened(data, "PPTX") as package:
        main = package.main("ppt/presentation.xml")
        slides = []
        for number, (_, part) in enumerate(_listed(package, main, "sldIdLst/{*}sldId"), start=1):
            place = f"slide {number}"
            for comments in package.related(part, "comments"):
                for comment in package.part(comments, place, "comments").iter("{*}cm"):
                    package.skip(place, "comment", _text(comment, "t", "text"))
            parts = [part, *package.related(part, "notesSlide")]
            slides.append(_slide(package, place, *(Walker(package, p, place, "line").lines() for p in parts)))
        return _parsed(package, join_sections((slide, {"page": i}) for i, slide in enumerate(slides, start=1)))


def read_odp(data: bytes) -> Parsed:
    """A page per slide with its notes, as in PPTX."""
    with opened(data, "ODP") as package:
        pages = package.xml("content.xml").iterfind(".//{*}presentation/{*}page")
        places = ((f"slide {number}", page) for number, page in enumerate(pages, start=1))
        slides = [_slide(package, n, Walker(package, "", n, "line", mixed=True).lines(page)) for n, page in places]
        return _parsed(package, join_sections((slide, {"page": i}) for i, slide in enumerate(slides, start=1)))


def _slide(package: Package, place: str, *walkers: Iterator[tuple[str, int | None]]) -> str:
    text = clean("\n".join(line for lines in walkers for line, _ in lines)).strip()
    if not text:
        package.skip(place, "no text")
    return text


def _parsed(package: Package, joined: tuple[str, list[Section]]) -> Parsed:
    return Parsed(text=joined[0], sections=joined[1], left_out=package.left_out())


def _listed(package: Package, main: str, path: str) -> Iterator[tuple[Any, str]]:
    """Elements of the main part in their order, with the part that each names."""
    parts = package.relations(main)
    for item in package.xml(main).iterfind(f"{{*}}{path}"):
        name = next((value for key, value in item.attrib.items() if key.endswith("}id")), "")
        yield item, parts.get(name, ("", ""))[1]


def read_xlsx(data: bytes) -> Parsed:
    """Each row of each sheet as a CSV's row, cited as "Sheet, row 17"; a formula is its last value."""
    with opened(data, "XLSX") as package:
        workbook = _Workbook(package, package.main("xl/workbook.xml"))
        rows: list[tuple[str, str]] = []
        for sheet, part in _listed(package, workbook.main, "sheets/{*}sheet"):
            name = attribute(sheet, "name")
            if attribute(sheet, "state").lower().endswith("hidden"):
                package.skip(f"sheet {name}", "hidden")
            else:
                rows += _sheet_rows(package, name, *workbook.sheet(part, f"sheet {name}"))
        return _parsed(package, join_rows(rows))


def read_ods(data: bytes) -> Parsed:
    """Each row of each sheet, as in XLSX."""
    with opened(data, "ODS") as package:
        rows: list[tuple[str, str]] = []
        root = package.xml("content.xml")
        styles = root.iterfind(".//{*}style/{*}table-properties")
        hidden = {attribute(style.getparent(), "name") for style in styles if attribute(style, "display") == "false"}
        for table in root.iterfind(".//{*}spreadsheet/{*}table"):
            name = attribute(table, "name")
            if attribute(table, "style-name") in hidden:
                package.skip(f"sheet {name}", "hidden")
                continue
            walker = Walker(package, "", f"sheet {name}", mixed=True)
            cells = list(walker.grid(table))
            drawn = [text for shapes in table.iterfind("{*}shapes") for _, text, _ in walker.blocks(shapes)]
            rows += _sheet_rows(package, name, cells, drawn)
        return _parsed(package, join_rows(rows))


def _sheet_rows(
    package: Package, name: str, cells: Sequence[tuple[int, list[str]]], drawn: list[str]
) -> list[tuple[str, str]]:
    filled = [(number, row) for number, row in cells if any(row)]
    rows = [(f"{name}, {place}", text) for place, text in table_rows(filled)] if filled else []
    rows += [(f"{name}, drawing", "\n".join(drawn))] if drawn else []
    if not rows:
        package.skip(f"sheet {name}", "no text")
    return rows


class _Workbook:
    """The strings and formats of a workbook's cells."""

    def __init__(self, package: Package, main: str) -> None:
        self.main = main
        self._package = package
        self._words = Walker(package, main, kind="line").words
        strings = (package.part(part, "", "strings") for part in package.related(main, "sharedStrings"))
        self._strings = [self._words(item) for part in strings for item in part]
        styles = [package.part(part, "", "styles") for part in package.related(main, "styles")]
        formats = [number for root in styles for number in root.iter("{*}numFmt")]
        own = {attribute(number, "numFmtId"): attribute(number, "formatCode") for number in formats}
        fonts = [val(font, "{*}name") for root in styles for font in root.iterfind("{*}fonts/{*}font")]
        self._styles: list[tuple[str, str]] = []  # format and font
        for xf in (xf for root in styles for xf in root.iterfind("{*}cellXfs/{*}xf")):
            font = attribute(xf, "fontId")
            name = fonts[int(font)] if font.isdecimal() and int(font) < len(fonts) else ""
            self._styles.append((format_code(attribute(xf, "numFmtId"), own), name))
        flags = [attribute(properties, "date1904") for properties in package.xml(main).iter("{*}workbookPr")]
        self._days = from_1904("".join(flags))
        self._cells = 0

    def sheet(self, part: str, place: str) -> tuple[list[tuple[int, list[str]]], list[str]]:
        """The rows of a sheet with their numbers, and the text of its drawings."""
        package = self._package
        root = package.part(part, place, "sheet")
        drawings = package.related(part, "drawing")
        drawn = [text for drawing in drawings for _, text, _ in Walker(package, drawing, place, "line").read()]
        for comments in package.related(part, "comments"):
            for comment in package.part(comments, place, "comments").iter("{*}comment"):
                package.skip(place, "comment", f"{attribute(comment, 'ref')}: {self._words(comment)}")
        for margin in root.iterfind("{*}headerFooter/*"):
            if words := re.sub(r'&("[^"]*"|K[0-9A-F]{6}|\d+|.)', " ", margin.text or "").strip():
                package.skip(place, "page header", words)
        for embedded in root.iter("{*}oleObject"):
            package.skip(place, "embedded object", attribute(embedded, "progId"))
        return self._rows(root, place), drawn

    def _rows(self, root: Any, place: str) -> list[tuple[int, list[str]]]:
        rows: list[tuple[int, list[str]]] = []
        number = 0
        for row in root.iterfind("{*}sheetData/{*}row"):
            reference = attribute(row, "r")
            number = int(reference) if reference.isdecimal() else number + 1
            fields: list[str] = []
            for cell in row:
                column = _column(cell.get("r", ""), len(fields))
                self._count(max(1, column + 1 - len(fields)))
                fields += [""] * (column + 1 - len(fields))
                fields[column] = _tidy(f"{fields[column]}\n{self._value(cell, place)}")
            if any(fields):
                rows.append((number, fields))
        self._merge(dict(rows), root)
        return rows

    def _count(self, cells: int) -> None:
        self._cells += cells
        if self._cells > _MAX_CELLS:
            raise Unreadable(f"XLSX cannot be read: it has more than {_MAX_CELLS:,} cells")

    def _merge(self, rows: dict[int, list[str]], root: Any) -> None:
        """Repeat a merged cell in the rows below, so that each row is complete."""
        last_row = max(rows, default=0)
        for merged in root.iterfind("{*}mergeCells/{*}mergeCell"):
            first, _, last = attribute(merged, "ref").partition(":")
            top, bottom = (int(re.sub(r"\D", "", reference) or 0) for reference in (first, last))
            column = _column(first, 0)
            words = rows[top][column] if column < len(rows.get(top, ())) else ""
            for number in range(top + 1, min(bottom, last_row) + 1) if words else ():
                fields = rows.get(number, [])
                self._count(max(1, column + 1 - len(fields)))
                fields += [""] * (column + 1 - len(fields))
                fields[column] = fields[column] or words

    def _value(self, cell: Any, place: str) -> str:
        kind, style = cell.get("t", "n"), cell.get("s", "")
        parts = {local_name(part): part for part in cell}
        value = (parts["v"].text or "") if "v" in parts else ""
        code, font = self._styles[int(style)] if style.isdecimal() and int(style) < len(self._styles) else ("", "")
        if kind == "s":
            known = value.isdecimal() and int(value) < len(self._strings)
            if not known:
                self._package.skip(place, "missing string", attribute(cell, "r"))
            value = self._strings[int(value)] if known else ""
        elif "is" in parts:
            value = self._words(cell)
        elif kind == "b" and value:
            value = "true" if value in ("1", "true") else "false"
        elif kind == "n":
            value = formatted(value, code, days=self._days)
        elif kind == "d":
            value = value.replace("T", " ").removesuffix(" 00:00:00")
        else:
            value = unescaped(value)
        if not value and kind != "str" and "f" in parts:
            self._package.skip(place, "uncalculated formula", attribute(cell, "r"))
            value = f"={parts['f'].text or ''}"
        return signs(value, font)


def _column(reference: str, following: int) -> int:
    """The column of "C5", from 0; the `following` one without a reference."""
    letters = re.match(r"[A-Z]{1,3}", reference)
    column = 0
    for letter in letters[0] if letters else "":
        column = 26 * column + ord(letter) - 64
    return column - 1 if letters else following


def unescaped(text: str) -> str:
    """Text of a cell or slide with `_x000D_` as the character that it stands for."""
    if "_x" not in text:
        return text
    text = re.sub(r"_x([0-9A-Fa-f]{4})_", lambda escape: chr(int(escape[1], 16)), text)
    text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return re.sub(r"[\x0b\x0c\r]\n?", "\n", text)


def signs(text: str, font: str, *, private: bool = False) -> str:
    """Text in a font of signs as Unicode; `private`: only its characters for private use."""
    table = _SIGNS.get(font.lower(), {})
    codes = map(ord, text) if table else ()
    lowest = 0xF000 if private else 0x21
    return "".join(table.get(c - 0xF000 * (c >= 0xF000), chr(c)) if c >= lowest else chr(c) for c in codes) or text


def _tidy(text: str) -> str:
    return "\n".join(" ".join(line.split()) for line in text.split("\n")).strip()


def _text(element: Any, *names: str) -> str:
    """All text below an element on one line, from the elements of these names."""
    parts = ((local_name(part), part.text or "") for part in element.iter())
    return " ".join(
        "".join(text if name in (names or ("t",)) else " " * (name in ("p", "br")) for name, text in parts).split()
    )


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table, whose first row is its head."""
    width = max(map(len, rows))
    lines = [
        " | ".join(" ".join(cell.split()).replace("|", r"\|") for cell in [*row, *[""] * (width - len(row))])
        for row in rows
    ]
    return "\n".join([f"| {lines[0]} |", "|" + "---|" * width, *(f"| {line} |" for line in lines[1:])])


@dataclass
class Walker:
    """Walks the text of one part; text boxes, charts and notes of a paragraph come after it.

    `kind` is that of plain paragraphs: "text", or "line" on slides and in cells. `mixed`: text is between the elements,
    as in OpenDocument, and not in runs alone. What is not read is named as being at `place`.
    """

    package: Package
    part: str
    place: str = ""
    kind: str = "text"
    mixed: bool = False
    styles: tuple[dict[str, int | None], dict[str, bool]] = ({}, {})
    notes: dict[tuple[str, str], Any] = field(default_factory=dict)
    title: str = ""
    written: int = 0  # characters
    depth: int = 0  # of lists
    tables: int = 0  # around the element
    boxes: list[Any] = field(default_factory=list)
    noted: list[tuple[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.parts = self.package.relations(self.part)

    def read(self) -> Iterator[Block]:
        """The blocks of the part."""
        return self.blocks(self.package.part(self.part, self.place))

    def lines(self, element: Any = None) -> Iterator[tuple[str, int | None]]:
        """(lines, heading level) of every block, with a blank line between blocks but for lists and lines."""
        before = ""
        for kind, text, level in self.read() if element is None else self.blocks(element):
            if before and not (kind == before and kind in _TIGHT):
                yield "", None
            yield text, level
            before = kind

    def blocks(self, element: Any) -> Iterator[Block]:
        joined = ""  # paragraphs whose mark was deleted under tracked changes
        for child in element:
            name = local_name(child)
            if name in ("p", "h"):
                joined += self.words(child)
                mark = child.find("{*}pPr/{*}rPr")
                if mark is None or not any(local_name(change) in ("del", "moveFrom") for change in mark):
                    yield from self._paragraph(child, _tidy(joined))
                    joined = ""
                continue
            if joined.strip():
                yield self.kind, _tidy(joined), None
                joined = ""
            match name:
                case "AlternateContent":
                    yield from self._alternative(child, self.blocks)
                case "list":
                    self.depth += 1
                    yield from self.blocks(child)
                    self.depth -= 1
                case _ if name in _DRAWN:
                    yield from self._drawn(child)
                case _ if name not in _DROPPED:  # body, content control, insertion, custom XML: read what is inside
                    yield from self.blocks(child)
        if joined.strip():
            yield self.kind, _tidy(joined), None

    def _alternative(self, element: Any, read: Callable[[Any], Iterator[Any]]) -> list[Any]:
        """The first of the alternatives that has anything."""
        for branch in element:
            before = len(self.boxes) + self.package.skips
            content = list(read(branch))
            if any(content) or len(self.boxes) + self.package.skips > before:
                return content
        return []

    def _spend(self, characters: int) -> None:
        """Count text against the limit: merged and empty cells can make it much longer than the file."""
        self.written += characters
        check_text(self.written)

    def _skip(self, what: str, words: str = "") -> None:
        self.package.skip(self.place, what, words)

    def _paragraph(self, paragraph: Any, text: str) -> Iterator[Block]:
        style = val(paragraph, "{*}pPr/{*}pStyle")
        level = _outline(paragraph) or self.styles[0].get(style)
        if local_name(paragraph) == "h":
            outline = attribute(paragraph, "outline-level")
            level = int(outline) if outline.isdecimal() else 1
        if text and level != -1:
            self._spend(len(text))
            if level is None:
                yield self._item(paragraph, style, text)
            else:
                text = " ".join(text.split())
                self.title = self.title or (text if level == 0 else "")
                self.place = f'under "{text[:80]}"'
                yield "heading", f"{'#' * max(1, min(level, 6))} {text}", level
        elif text:
            self.package.skip("", "contents line", text)
        boxes, self.boxes, noted, self.noted = self.boxes, [], self.noted, []
        for box in boxes:
            yield from self._drawn(box)
        for number, note in noted:
            yield "note", f"[{number}] {' '.join(words for _, words, _ in self.blocks(note))}", None

    def _item(self, paragraph: Any, style: str, text: str) -> Block:
        numbering = paragraph.find("{*}pPr/{*}numPr")
        listed = self.styles[1].get(style, False) if numbering is None else val(numbering, "{*}numId") != "0"
        if not (listed or self.depth) or self.kind == "line":
            return self.kind, text, None
        depth = val(paragraph, "{*}pPr/{*}numPr/{*}ilvl")
        indent = "  " * min(int(depth) if depth.isdecimal() else max(self.depth - 1, 0), 8)
        return "list", f"{indent}- " + text.replace("\n", f"\n{indent}  "), None

    def words(self, element: Any) -> str:
        """The text of a paragraph, a run or a string."""
        return "".join(self._words(element))

    def _words(self, element: Any) -> Iterator[str]:
        if self.mixed:
            yield element.text or ""
        for child in element:
            match local_name(child):
                case "t":
                    yield unescaped(child.text or "") if self.kind == "line" else child.text or ""
                case "r":
                    yield self._run(child)
                case name if name in _BLANKS:
                    yield _BLANKS[name]
                case "sym":
                    yield self._sign(attribute(child, "font"), attribute(child, "char"))
                case "fld" if len(element) < 5 and _text(element) == _text(child) and "slidenum" in child.values():
                    pass  # a slide's number alone
                case "footnoteReference" | "endnoteReference" | "commentReference" as name:
                    yield self._note(name.removesuffix("Reference"), attribute(child, "id"))
                case "note":
                    number = "".join(citation.text or "" for citation in child.iterfind("{*}note-citation"))
                    self.noted += [(number, body) for body in child.iterfind("{*}note-body")]
                    yield f"[{number}]"
                case "checkBox":  # of a form, as the next
                    marks = [attribute(mark, "val") for mark in child.iterfind("{*}default")]
                    marks += [attribute(mark, "val") for mark in child.iterfind("{*}checked")]
                    yield "☐" if not marks or marks[-1] in ("0", "false", "off") else "☑"
                case "ddList":
                    choices = [attribute(entry, "val") for entry in child.iterfind("{*}listEntry")]
                    chosen = val(child, "{*}result") or val(child, "{*}default") or "0"
                    yield choices[int(chosen)] if chosen.isdecimal() and int(chosen) < len(choices) else ""
                case "textpath":
                    yield attribute(child, "string")
                case "AlternateContent":
                    yield from self._alternative(child, self._words)
                case name if name in _DRAWN:
                    self.boxes.append(child)
                case "d" | "nary" | "rad" as name:  # of a formula, as the next
                    chars = {local_name(char): attribute(char, "val") for char in child.iterfind(f"{{*}}{name}Pr/*")}
                    first, last = {"d": ("(", ")"), "nary": ("∫", ""), "rad": ("√(", ")")}[name]
                    first = chars.get("begChr", chars.get("chr", first))
                    yield first + self.words(child) + chars.get("endChr", last)
                case "sup" | "sub" | "num" | "den" as name:
                    if words := self.words(child):
                        words = words if words.isalnum() else f"({words})"
                        yield {"sup": "^", "sub": "_", "den": "/"}.get(name, "") + words
                case name if name and name not in _DROPPED:
                    yield from self._words(child)
            if self.mixed:
                yield child.tail or ""

    def _run(self, run: Any) -> str:
        text = self.words(run)
        for font in run.iterfind("{*}rPr/*"):
            match local_name(font):
                case "rFonts" | "latin" | "rFont":
                    text = signs(
                        text, attribute(font, "ascii") or attribute(font, "typeface") or attribute(font, "val")
                    )
                case "sym":
                    text = signs(text, attribute(font, "typeface"), private=True)
        raised = val(run, "{*}rPr/{*}vertAlign") == "superscript" or run.find("{*}rPr[@baseline='30000']") is not None
        return text.translate(_RAISED) if raised and re.fullmatch(r"[-+−]?\d+", text) else text  # 10⁵ is not 105

    def _sign(self, font: str, code: str) -> str:
        sign = signs(chr(int(code, 16)), font) if re.fullmatch(r"[0-9A-Fa-f]{1,4}", code) else "\uf000"
        if "\ue000" <= sign <= "\uf8ff":
            self._skip(f"sign of {font}", code)
            return ""
        return sign

    def _note(self, kind: str, number: str) -> str:
        note = self.notes.pop((kind, number), None)  # popped, because notes may refer to each other
        if kind == "comment":
            if note is not None:
                self._skip(kind, _text(note))
            return ""
        if note is not None:
            self.noted.append((number, note))
        return f"[{number}]"

    def _drawn(self, element: Any) -> Iterator[Block]:
        """What is drawn, embedded or set apart: text boxes, tables, charts and diagrams are read, the rest is named."""
        match local_name(element):
            case "tbl" | "table":
                yield from self._table(element)
            case "chart" | "relIds" as name:
                what, key = ("chart", "id") if name == "chart" else ("diagram", "dm")
                _, part = self.parts.get(attribute(element, key), ("", ""))
                root = self.package.part(part, self.place, what)
                yield from self._chart(root) if name == "chart" else self.blocks(root)
            case "pic" | "imagedata":
                kinds = [kind for kind in ("video", "audio") if element.find(f".//{{*}}{kind}File") is not None]
                described = [
                    *element.iter("{*}cNvPr"),
                    *(a.find("{*}docPr") for a in element.iterancestors("{*}inline", "{*}anchor")),
                ]
                words = [attribute(d, "descr") or attribute(d, "title") for d in described if d is not None]
                self._skip(next(iter(kinds), "picture"), next(filter(None, words), attribute(element, "title")))
            case "object" | "object-ole" | "oleObj":
                programs = (attribute(part, "progId") or attribute(part, "ProgID") for part in element.iter("*"))
                self._skip("embedded object", next(filter(None, programs), ""))
            case "annotation":
                self._skip("comment", " ".join("".join(p.itertext()) for p in element.iterfind("{*}p")))
            case "altChunk":
                _, part = self.parts.get(attribute(element, "id"), ("", ""))
                self._skip("embedded document", part.rpartition("/")[2])
            case "frame":
                before = self.package.skips
                blocks = list(self.blocks(element))
                yield from blocks
                if not blocks and self.package.skips == before and element.find("{*}image") is not None:
                    self._skip("picture", _text(element, "title", "desc"))
            case _:
                yield from self.blocks(element)

    def _chart(self, root: Any) -> Iterator[Block]:
        """A chart's titles, then its values as a table."""
        if words := _tidy("\n".join(filter(None, (self.words(p) for p in root.iter("{*}p"))))):
            yield self.kind, words, None
        series = [
            ([_text(s, "v") for s in one.iterfind("{*}tx")], _points(one, "cat", "xVal"), _points(one, "val", "yVal"))
            for one in root.iter("{*}ser")
        ]
        labels = {index: label for _, categories, _ in series for index, label in categories.items()}
        indexes = sorted({*labels, *(index for _, _, values in series for index in values)})
        self._spend(3 * len(series) * len(indexes))
        rows = [["", *("".join(name) for name, _, _ in series)]]
        rows += [[labels.get(i, ""), *(values.get(i, "") for _, _, values in series)] for i in indexes]
        if rows[1:]:
            yield "table", _markdown(rows), None
        elif words := _text(root, "pt"):
            yield self.kind, words, None

    def grid(self, table: Any) -> Iterator[tuple[int, list[str]]]:
        """The numbered rows of a table. A cell that is merged with the one above repeats its text."""
        above: list[str] = []
        number = 1
        rows_left: dict[int, int] = {}  # of a merged cell of OpenDocument, by column
        self.tables += 1
        for row in _below(table, _ROWS):
            if row.find("{*}trPr/{*}del") is not None:
                continue
            cells = [""] * _count(val(row, "{*}trPr/{*}gridBefore"), 0)
            for cell in _below(row, _CELLS):
                words = " ".join(text for _, text, _ in self.blocks(cell))
                words = words or next((stated for key, stated in cell.items() if key.endswith("value")), "")
                column = len(cells)
                mark = cell.find("{*}tcPr/{*}vMerge")
                merged = (
                    attribute(cell, "vMerge") in ("1", "true") if mark is None else attribute(mark, "val") != "restart"
                )
                if local_name(cell) == "covered-table-cell":
                    merged = rows_left.get(column, 0) > 0
                    rows_left[column] = rows_left.get(column, 0) - 1
                elif spanned := _count(attribute(cell, "number-rows-spanned"), 0):
                    rows_left[column] = spanned - 1
                if merged and column < len(above):
                    words = above[column]
                    self._spend(len(words))
                copies = _count(attribute(cell, "number-columns-repeated"))
                self._spend((copies - 1) * (len(words) + 1))
                cells += [words] * copies
                cells += [""] * (_count(val(cell, "{*}tcPr/{*}gridSpan")) - 1)
            above = cells
            repeated = attribute(row, "number-rows-repeated")
            copies = _count(repeated) if any(cells) else 1
            self._spend((copies - 1) * sum(len(words) + 1 for words in cells))
            for following in range(copies):
                yield number + following, cells
            number += int(repeated) if repeated.isdecimal() else 1
        self.tables -= 1

    def _table(self, table: Any) -> Iterator[Block]:
        rows = [cells for _, cells in self.grid(table) if any(cells)]
        if not rows:
            return
        if self.tables:  # within a cell of another table
            yield "text", "; ".join(", ".join(filter(None, row)) for row in rows), None
        elif (width := max(map(len, rows))) == 1:  # a frame around text
            yield "text", "\n\n".join(row[0] for row in rows), None
        else:
            self._spend(3 * width * len(rows))
            yield "table", _markdown(rows), None


def _count(number: str, default: int = 1) -> int:
    return min(int(number), _MAX_REPEATS) if number.isdecimal() else default


def _points(series: Any, *names: str) -> dict[int, str]:
    """The stored labels or values of a chart's series, by their index."""
    points: dict[int, str] = {}
    for data in (data for data in series if local_name(data) in names):
        code = _text(data, "formatCode")
        is_text = next(data.iter("{*}strCache", "{*}strLit", "{*}multiLvlStrCache"), None) is not None
        for point in data.iter("{*}pt"):
            index = attribute(point, "idx")
            value = _text(point, "v") if is_text else formatted(_text(point, "v"), code)
            number = int(index) if index.isdecimal() else len(points)
            points[number] = f"{value} {points.get(number, '')}".strip()  # labels of several levels
    return points


def _below(element: Any, names: set[str]) -> Iterator[Any]:
    """The rows of a table, or the cells of a row, also inside content controls; not those of a nested table."""
    for child in element:
        name = local_name(child)
        if name in names:
            yield child
        elif name not in _DROPPED and name not in _DRAWN and name not in _CELLS:
            yield from _below(child, names)


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
        while at in styles and at not in chain and len(chain) < _MAX_STYLES:
            chain.append(at)
            at = val(styles[at], "{*}basedOn")
        levels[name] = next((level for s in chain if (level := _style_level(styles[s])) is not None), None)
        lists[name] = any(styles[s].find("{*}pPr/{*}numPr") is not None for s in chain)
    return levels, lists


def _style_level(style: Any) -> int | None:
    name = val(style, "{*}name").lower()
    if name == "title":
        return 0
    if re.fullmatch(r"toc \d|table of figures", name):
        return -1
    if heading := re.fullmatch(r"heading ([1-9])", name):
        return int(heading[1])
    return _outline(style)


def _outline(element: Any) -> int | None:
    level = val(element, "{*}pPr/{*}outlineLvl")
    return int(level) + 1 if level.isdecimal() and int(level) < 9 else None


def read_epub(data: bytes) -> Parsed:
    """The chapters in the order of the spine, each as an HTML page, cited by its title or first heading."""
    chapters: list[tuple[str, dict[str, Any]]] = []
    left_out: list[str] = []
    with opened(data, "EPUB") as package:
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
