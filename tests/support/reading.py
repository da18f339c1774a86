"""Read bytes as `ragkv ingest` reads a file, or return the reason for skipping it; small files to read."""

import io
from collections.abc import Callable
from pathlib import Path

import docx
import pytest
from fpdf import FPDF

from ragkv.ingest.sandbox import SourceText, UnreadableSource, read_source
from ragkv.ingest.source import SourceFile, find_sources


def read(folder: Path, name: str, data: bytes | str) -> SourceText:
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return read_source(find_sources([path])[0][0])


def reason(folder: Path, name: str, data: bytes | str) -> str:
    with pytest.raises(UnreadableSource) as caught:
        read(folder, name, data)
    assert str(caught.value) == f"Cannot read {name}: {caught.value.reason}."
    return caught.value.reason


def outcome(source: SourceFile, read: Callable[[SourceFile], SourceText] = read_source) -> SourceText | str:
    """The text, or the reason."""
    try:
        return read(source)
    except UnreadableSource as error:
        return error.reason


def rows(source: SourceText) -> list[tuple[str | None, str]]:
    """(heading, text) of every section, without the blank lines between them."""
    return [(section.heading, source.text[section.start : section.end].strip()) for section in source.sections]


def docx_of(text: str) -> bytes:
    document = docx.Document()
    document.add_paragraph(text)
    document.save(out := io.BytesIO())
    return out.getvalue()


def pdf_of(text: str) -> bytes:
    document = FPDF()
    document.add_page()
    document.set_font("helvetica")
    document.cell(text=text)
    return bytes(document.output())
