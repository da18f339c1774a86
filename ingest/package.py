"""The ZIP package of an office file: its XML parts, their relations, and what its reader leaves out.

Parts are unpacked up to a limit, because the sizes that a ZIP states may be false.
"""

from __future__ import annotations

import io
import posixpath
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ragkv.ingest.parser import Unreadable

_MAX_PARTS = 5000  # sheets, slides, chapters, drawings
_MAX_BYTES = 256 << 20  # unpacked, of all parts; fifty times the text of the longest novel
_MAX_NODES = 3_000_000  # elements and attributes, 100 to 200 bytes each in memory; ten thousand pages have this many
_MAX_NAMED = 1000  # characters of what is named of the parts of one kind at one place
_READ_BYTES = 1 << 16
_OLE = bytes.fromhex("d0cf11e0a1b11ae1")  # the container of an encrypted OOXML file, and of a .doc
_BROKEN = (zipfile.BadZipFile, zlib.error, struct.error, OSError, EOFError, LookupError, RuntimeError, ValueError)


@contextmanager
def opened(data: bytes, kind: str) -> Iterator[Package]:
    """The package; every damage of it, within the block too, becomes `Unreadable`."""
    from lxml import etree

    protected = f"{kind} is protected with a password"
    if data.startswith(_OLE):
        raise Unreadable(f"{protected} (or of an older format); save it as {kind} without one")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            package = Package(archive, kind)
            manifest = "META-INF/manifest.xml"
            if package.has(manifest) and b"encryption-data" in package.read(manifest):
                raise Unreadable(f"{protected}; save it as {kind} without one")
            yield package
    except (*_BROKEN, etree.XMLSyntaxError) as error:
        what = "damaged" if data.startswith(b"PK") else "it is none"
        raise Unreadable(f"{kind} cannot be read: {what} ({type(error).__name__})") from error


class Package:
    """The parts of an archive, within limits; `skip` counts what the reader of the format does not read."""

    def __init__(self, archive: zipfile.ZipFile, kind: str) -> None:
        self._archive = archive
        self._kind = kind
        self._names = {name.replace("\\", "/").lstrip("/").lower(): name for name in archive.namelist()}
        self._bytes = self._nodes = self._parts = 0
        self.skips = 0  # parts of it that are left out
        self._skipped: dict[tuple[str, str], list[str]] = {}

    def has(self, part: str) -> bool:
        return part.lower() in self._names

    def xml(self, part: str) -> Any:
        """The root element of a part; raises `Unreadable` while unpacking as soon as a limit is exceeded."""
        from lxml import etree

        parser = etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False, remove_comments=True)
        for data in self._pieces(part):
            parser.feed(data)
        return parser.close()

    def part(self, part: str, place: str, what: str = "part") -> Any:
        """The root element of a part that the rest can be read without; if it is damaged, it is named and empty."""
        from lxml import etree

        try:
            return self.xml(part)
        except (*_BROKEN, etree.XMLSyntaxError) as error:
            self.skip(place, f"{'missing' if isinstance(error, KeyError) else 'damaged'} {what}")
            return etree.Element("none")

    def read(self, part: str) -> bytes:
        """The bytes of a part, within the same limits."""
        return b"".join(self._pieces(part))

    def _pieces(self, part: str) -> Iterator[bytes]:
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise Unreadable(f"{self._kind} cannot be read: it has more than {_MAX_PARTS} parts of text")
        with self._archive.open(self._names[part.lower()]) as stream:
            while data := stream.read(_READ_BYTES):
                self._bytes += len(data)
                # Counting bytes that open an element, give an attribute or name an entity works in UTF-16 too.
                self._nodes += data.count(b"<") - data.count(b"</") + data.count(b"=") + data.count(b"&")
                if self._bytes > _MAX_BYTES:
                    raise Unreadable(f"{self._kind} cannot be read: unpacked, it is larger than {_MAX_BYTES >> 20} MiB")
                if self._nodes > _MAX_NODES:
                    raise Unreadable(f"{self._kind} cannot be read: it has more than {_MAX_NODES:,} elements")
                yield data

    def main(self, usual: str) -> str:
        """The path of the part that holds the document."""
        return next(iter(self.related("", "officeDocument")), usual)

    def relations(self, part: str) -> dict[str, tuple[str, str]]:
        """(kind, path) of the parts related to a part ("" is the package), by id."""
        folder, name = posixpath.split(part)
        place = posixpath.join(folder, "_rels", f"{name}.rels")
        return {
            attribute(relation, "Id"): (
                attribute(relation, "Type").rpartition("/")[2],
                posixpath.normpath(posixpath.join("/", folder, attribute(relation, "Target"))).lstrip("/"),
            )
            for relation in (self.xml(place) if self.has(place) else ())
            if attribute(relation, "TargetMode") != "External"
        }

    def related(self, part: str, kind: str) -> list[str]:
        return list(dict.fromkeys(path for relation, path in self.relations(part).values() if relation == kind))

    def skip(self, place: str, what: str, words: str = "") -> None:
        """Count a part that is not read, with the words that are known of it."""
        self.skips += 1
        self._skipped.setdefault((place, what), []).append(" ".join(words.split()))

    def left_out(self) -> list[str]:
        """What was skipped: "slide 3: 2 pictures (Mill wheel; Harbour)"."""
        lines = []
        for (place, what), all_words in self._skipped.items():
            words = "; ".join(dict.fromkeys(filter(None, all_words)))
            words = f"{words[:_MAX_NAMED]}…" if len(words) > _MAX_NAMED else words
            count = what if len(all_words) == 1 else f"{len(all_words)} {what}s"
            lines.append(f"{place}: " * bool(place) + count + f" ({words})" * bool(words))
        return lines


def local_name(element: Any) -> str:
    """The local name (the standard's two editions differ in namespaces); "" for a processing instruction."""
    return element.tag.rpartition("}")[2] if isinstance(element.tag, str) else ""


def attribute(element: Any, name: str) -> str:
    return next((str(value) for key, value in element.attrib.items() if key.rpartition("}")[2] == name), "")


def val(element: Any, path: str) -> str:
    """The attribute `val` of the element at a path, or ""."""
    target = element.find(path)
    return "" if target is None else attribute(target, "val")
