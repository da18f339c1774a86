"""DOCX as Markdown: paragraphs, lists and tables, with headings recognised by their style.

The XML is read directly. python-docx (docs/dependencies.md) silently drops text that Word wraps in other elements:
insertions under tracked changes, content controls (on which templates are built), text boxes and footnotes.
"""

from __future__ import annotations

import io
import posixpath
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ragkv.ingest.parser import Parsed, Unreadable, check_text, sections_under
from ragkv.ingest.text import clean

_LARGEST = 256 << 20  # unpacked bytes of all parts; fifty times the text of the longest novel
_NODES = 3_000_000  # elements and attributes, 100 to 200 bytes each in memory; ten thousand pages have this many
_PARTS = 100  # XML parts; an ordinary document has five
_READ_BYTES = 1 << 16
_CHAIN = 50  # longest chain of styles based on each other
_OLE = bytes.fromhex("d0cf11e0a1b11ae1")  # the container of an encrypted DOCX, and of a .doc
_DROPPED = {"del", "moveFrom", "Fallback", "pPr", "rPr", "tblPr", "sdtPr", "instrText", "delText", "rt", "tbl"}
_BROKEN = (zipfile.BadZipFile, zlib.error, struct.error, OSError, EOFError, LookupError, RuntimeError, ValueError)


def read_docx(data: bytes) -> Parsed:
    """A section per heading. Deleted text of tracked changes, page headers and tables of contents are left out."""
    with opened(data, "DOCX", _PARTS, older="it is a .doc") as package:
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
    found = posixpath.join(folder, "_rels", f"{name}.rels")
    if found not in package.names():
        return []
    return [
        (
            attribute(each, "Id"),
            attribute(each, "Type").rpartition("/")[2],
            posixpath.normpath(posixpath.join("/", folder, attribute(each, "Target"))).lstrip("/"),
        )
        for each in package.xml(found)
        if attribute(each, "TargetMode") != "External"
    ]


def related(package: Package, part: str, kind: str) -> list[str]:
    """The paths of the parts related to a part ("" is the package) by `kind`."""
    return [path for _, each, path in relations(package, part) if each == kind]


def local_name(element: Any) -> str:
    """The local name (the standard's two editions differ in namespaces); "" for a processing instruction."""
    return element.tag.rpartition("}")[2] if isinstance(element.tag, str) else ""


def attribute(element: Any, name: str) -> str:
    return next((str(value) for key, value in element.attrib.items() if key.rpartition("}")[2] == name), "")


def _find(element: Any, *path: str) -> Any:
    """The element below, by local names, or None."""
    for name in path:
        element = next((below for below in element if local_name(below) == name), None)
        if element is None:
            return None
    return element


def _value(element: Any, *path: str) -> str:
    found = _find(element, *path)
    return "" if found is None else attribute(found, "val")


def _styles(parts: list[Any]) -> tuple[dict[str, int | None], dict[str, bool]]:
    """Heading level (0: title, -1: table of contents, None: text) and whether it is a list, by paragraph style.

    The level comes from the outline level or name of the style or of its base styles, so a user's style based on
    "heading 2" is a heading too.
    """
    found = {attribute(style, "styleId"): style for part in parts for style in part if local_name(style) == "style"}
    levels: dict[str, int | None] = {}
    lists: dict[str, bool] = {}
    for name in found:
        chain: list[str] = []
        at = name
        while at in found and at not in chain and len(chain) < _CHAIN:
            chain.append(at)
            at = _value(found[at], "basedOn")
        levels[name] = next((level for s in chain if (level := _style_level(found[s])) is not None), None)
        lists[name] = any(_find(found[s], "pPr", "numPr") is not None for s in chain)
    return levels, lists


def _style_level(style: Any) -> int | None:
    name = _value(style, "name").lower()
    if name == "title":
        return 0
    if re.fullmatch(r"toc \d|table of figures", name):
        return -1
    if heading := re.fullmatch(r"heading ([1-9])", name):
        return int(heading[1])
    return _outline(style)


def _outline(element: Any) -> int | None:
    level = _value(element, "pPr", "outlineLvl")
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
        style = _value(paragraph, "pPr", "pStyle")
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
        numbering = _find(paragraph, "pPr", "numPr")
        listed = self._lists.get(style, False) if numbering is None else _value(numbering, "numId") != "0"
        if not listed:
            return "text", text, None
        depth = _value(paragraph, "pPr", "numPr", "ilvl")
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
            if _find(row, "trPr", "del") is not None:
                continue
            cells: list[str] = []
            for cell in _below(row, "tc"):
                words = " ".join(" ".join(text for _, text, _ in self._blocks(cell)).split()).replace("|", r"\|")
                merged = _find(cell, "tcPr", "vMerge")
                if merged is not None and attribute(merged, "val") != "restart" and rows and len(cells) < len(rows[-1]):
                    words = rows[-1][len(cells)]
                    self._spend(len(words))
                span = _value(cell, "tcPr", "gridSpan")
                cells += [words] + [""] * (min(int(span), 64) - 1 if span.isdecimal() else 0)
            rows.append(cells)
        rows = [row for row in rows if any(row)]
        if not rows:
            return
        if max(map(len, rows)) == 1:  # a frame around text
            yield "text", "\n\n".join(row[0] for row in rows), None
            return
        width = max(map(len, rows))
        self._spend(3 * width * len(rows))
        lines = [f"| {' | '.join(row + [''] * (width - len(row)))} |" for row in rows]
        yield "table", "\n".join([lines[0], "|" + "---|" * width, *lines[1:]]), None


def _below(element: Any, name: str) -> Iterator[Any]:
    """The rows of a table, or the cells of a row, also inside content controls; not those of a nested table."""
    for child in element:
        if local_name(child) == name:
            yield child
        elif local_name(child) not in {*_DROPPED, "tr", "tc", "tbl"}:
            yield from _below(child, name)
