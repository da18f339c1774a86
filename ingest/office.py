"""Spreadsheets (XLSX), slides (PPTX), novels and manuals (EPUB), OpenDocument texts (ODT) and mail (EML, mbox).

Archives are unpacked by `ragkv.ingest.docx.Package`, within its limits. Cells and spaces that a file states by a number
are bounded here, because one attribute can stand for millions of them.
"""

from __future__ import annotations

import email
import email.policy
import re
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from posixpath import dirname, join, normpath
from typing import Any, cast
from urllib.parse import unquote

from ragkv.ingest.docx import Package, attribute, local_name, opened, related, relations
from ragkv.ingest.parser import Parsed, Unreadable, check_text, join_sections, sections_under
from ragkv.ingest.tabular import table_rows
from ragkv.ingest.text import clean, decode, read_html

_PARTS = 5000  # of an archive: sheets, slides, chapters
_CELLS = 3_000_000  # of a workbook, with the empty ones before a filled one
_REPEATS = 64  # most copies of a cell, or spaces, that one ODT element stands for
_MESSAGES = 100_000  # of a mailbox
_DAY_ZERO = datetime(1899, 12, 30)  # a time without a date is on it
_DATE_FORMATS = {*range(14, 23), *range(45, 48)}  # numFmtId, ECMA-376 part 1, 18.8.30


def _all(element: Any, name: str) -> Iterator[Any]:
    return (found for found in element.iter() if local_name(found) == name)


def _text(element: Any, name: str = "t") -> str:
    return "".join(found.text or "" for found in _all(element, name))


def _listed(package: Package, main: str, element: str, kind: str) -> Iterator[tuple[Any, str]]:
    """The parts that elements of the main part name, in their order."""
    known = {name: path for name, each, path in relations(package, main) if each == kind}
    for found in _all(package.xml(main), element):
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
            for row in _all(package.xml(part), "row"):
                fields: list[str] = []
                for cell in row:
                    at = _column(attribute(cell, "r"), len(fields))
                    used += max(1, at + 1 - len(fields))
                    if used > _CELLS:
                        raise Unreadable(f"XLSX cannot be read: it has more than {_CELLS:,} cells")
                    fields += [""] * (at + 1 - len(fields))
                    fields[at] = " ".join(_value(cell, strings, dates).split())
                number = attribute(row, "r")
                if any(fields):
                    cells.append((int(number) if number.isdecimal() else len(cells) + 1, fields))
            rows += [(f"{name}, {place}", text) for place, text in table_rows(cells)] if cells else []
    text, sections = join_sections((text, {"heading": place, "alone": True}) for place, text in rows)
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
        attribute(f, "numFmtId") for part in parts for f in _all(part, "numFmt") if _is_date(attribute(f, "formatCode"))
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
            yield " | ".join(" ".join(" ".join(_text(p) for p in _all(cell, "p")).split()) for cell in child)
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
        main = next((attribute(f, "full-path") for f in _all(package.xml("META-INF/container.xml"), "rootfile")), "")
        package_file = package.xml(main)
        title = next((" ".join("".join(found.itertext()).split()) for found in _all(package_file, "title")), None)
        items = {attribute(item, "id"): attribute(item, "href") for item in _all(package_file, "item")}
        for number, item in enumerate(_all(package_file, "itemref"), start=1):
            href = normpath(join(dirname(main), unquote(items.get(attribute(item, "idref"), ""))))
            try:
                chapter = read_html(package.read(href), whole=True)
            except KeyError:
                left_out.append(f"chapter {number}: it is missing")
                continue
            except Unreadable as error:
                left_out.append(f"chapter {number}: {error}")
                continue
            named = next((s.heading for s in chapter.sections if s.heading), None) or chapter.title
            chapters.append((chapter.text, {"heading": named or f"Chapter {number}"}))
    text, sections = join_sections(chapters)
    return Parsed(text=text, sections=sections, title=title, left_out=left_out)


def read_odt(data: bytes) -> Parsed:
    """Headings, paragraphs, lists and tables as Markdown; deleted text of tracked changes is left out."""
    with opened(data, "ODT", _PARTS) as package:
        body = next(_all(package.xml("content.xml"), "body"), None)
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
                for row in _all(child, "table-row")
            ]
            rows = [row for row in rows if any(row)]
            if rows:
                width = max(map(len, rows))
                shown = [f"| {' | '.join(row + [''] * (width - len(row)))} |" for row in rows]
                yield 0, "\n".join([shown[0], "|" + "---|" * width, *shown[1:]])
        elif name == "list-item":
            yield from ((level, f"- {line}") for level, line in _blocks(child))
        elif name != "tracked-changes":
            yield from _blocks(child)
        yield from ((0, note) for note in notes)


def _cell(cell: Any, notes: list[str]) -> str:
    return " ".join(" ".join(_words(paragraph, notes).split()) for paragraph in _all(cell, "p"))


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


def read_eml(data: bytes) -> Parsed:
    """A message: its sender, recipients, date and subject, then its text; attachments are named in `left_out`."""
    left_out: list[str] = []
    subject, text = _message(data, left_out)
    return Parsed(text=text, title=subject or None, left_out=left_out)


def read_mbox(data: bytes) -> Parsed:
    """Each message of a mailbox, cited by its number and subject; messages never share a chunk."""
    found = re.split(rb"(?m)^From [^\n]*\n", data, maxsplit=_MESSAGES + 1)
    if len(found) > _MESSAGES + 1:
        raise Unreadable(f"mailbox cannot be read: it has more than {_MESSAGES:,} messages")
    left_out: list[str] = []

    def messages() -> Iterator[tuple[str, dict[str, Any]]]:
        for number, raw in enumerate(found[1:], start=1):
            named: list[str] = []
            subject, text = _message(raw, named)
            left_out.extend(f"message {number}: {each}" for each in named)
            yield (
                text.replace("\n>From ", "\nFrom "),
                {"heading": f"message {number}" + (f" ({subject[:80]})" if subject else ""), "alone": True},
            )

    text, sections = join_sections(messages())
    return Parsed(text=text, sections=sections, left_out=left_out)


def _message(data: bytes, left_out: list[str]) -> tuple[str, str]:
    """(subject, text) of one message."""
    message = email.message_from_bytes(data, policy=email.policy.default)
    heads = [(name, " ".join(str(message[name] or "").split())) for name in ("From", "To", "Cc", "Date", "Subject")]
    left_out += [f"attachment {part.get_filename() or part.get_content_type()}" for part in message.iter_attachments()]
    body = message.get_body(("plain", "html"))
    text = ""
    if body is not None:
        payload = cast("bytes | None", body.get_payload(decode=True)) or b""
        charset = body.get_content_charset()
        if body.get_content_subtype() == "html":
            text = read_html(payload, whole=True).text
        else:
            try:
                text = payload.decode(charset or "utf-8")
            except (LookupError, ValueError):
                text = decode(payload)
    return heads[-1][1], clean("\n".join(f"{name}: {value}" for name, value in heads if value) + f"\n\n{text.strip()}")
