from __future__ import annotations

import io
from pathlib import Path

import docx
import pytest
from fpdf import FPDF
from hypothesis import given
from hypothesis import strategies as st

from ragkv.errors import UsageError
from ragkv.ingest import supplied
from ragkv.ingest.isolated import SourceReader
from ragkv.ingest.loader import media_type_of, type_names
from ragkv.ingest.reader import UnreadableSource, read_source
from ragkv.ingest.source import find_sources
from ragkv.ingest.supplied import sniff


def office() -> bytes:
    out = io.BytesIO()
    document = docx.Document()
    document.add_heading("Guide", 1)
    document.save(out)
    return out.getvalue()


def portable() -> bytes:
    document = FPDF()
    document.add_page()
    document.set_font("helvetica")
    document.cell(text="Guide")
    return bytes(document.output())


KINDS = [
    ("pdf", portable()),
    ("docx", office()),
    ("html", b"\n<!DOCTYPE html><p>Guide</p>"),
    ("html", '<?xml version="1.0"?><!-- x --><html><p>Guide</p></html>'.encode("utf-16")),
    ("jsonl", b'{"text": "Guide"}\n{"text": "b"}\n'),
    ("json", b'[\n{"text": "Guide"}]'),
    ("md", b"intro\n\n## Guide\n\ntext\n"),
    ("csv", b"name,city,year\nGuide,b,1\nd,e,2\n"),
    ("csv", "name\tcity\nGuide\tb\nd\te\n".encode("utf-16")),
    ("txt", b"The Guide, which is prose, has commas.\nSo has this, and it is long, too.\nAnd so on, and on.\n"),
    ("txt", b"#hashtag Guide"),
    ("txt", "{ein Café} Guide".encode("cp1252").replace(b"{", b"(")),
]


@pytest.mark.parametrize(("kind", "data"), KINDS)
def test_bytes_say_what_they_are(kind: str, data: bytes) -> None:
    source = supplied(data)
    assert source.media_type == media_type_of(kind)
    assert "Guide" in read_source(source).text


def test_type_before_name_before_bytes() -> None:
    assert supplied(b"# a", name="a.md", media_type="txt").media_type == "text/plain"
    assert supplied(b"a", name="a.md").media_type == "text/markdown"
    assert supplied(b"# a", name="a.unknown").media_type == "text/markdown"
    assert supplied(b"a", media_type="text/html").media_type == "text/html"


def test_the_name_is_the_identity() -> None:
    one, two = supplied(b"one", name="notes"), supplied(b"two", name="notes")
    assert one.document_id == two.document_id == "stdin:notes"
    assert (one.name, one.size) == ("notes", 3)
    assert one.digest() != two.digest()
    assert read_source(one).content_hash == one.digest()


@pytest.mark.parametrize(("kind", "data"), KINDS)
def test_bytes_may_wait_in_a_file_of_another_name(tmp_path: Path, kind: str, data: bytes) -> None:
    (tmp_path / "0").write_bytes(data)
    here, there = supplied(data, name="notes/guide"), supplied(tmp_path / "0", name="notes/guide")
    assert (there.document_id, there.name, there.path) == (here.document_id, here.name, here.path)
    assert (there.media_type, there.size, there.digest()) == (here.media_type, here.size, here.digest())
    with SourceReader() as reader:
        assert reader.read(there) == reader.read(here)


def test_beside_files(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("in a file")
    sources, skipped = find_sources([tmp_path / "notes", supplied(b"in a pipe", name="notes")])
    assert [(source.name, read_source(source).text) for source in sources] == [
        (f"{tmp_path.name}/notes", "in a file"),
        ("notes", "in a pipe"),
    ]
    assert skipped == []


@pytest.mark.parametrize("name", ["", " ", "a\nb", "a\x00", "x" * 501, "caf\udce9"])
def test_names_that_nobody_could_type_again(name: str) -> None:
    with pytest.raises(UsageError, match="printable"):
        supplied(b"x", name=name)


def test_unknown_type_names_the_known() -> None:
    with pytest.raises(UsageError, match=r"type 'xlsx'; choose one of csv, docx, htm"):
        supplied(b"x", media_type="xlsx")
    assert {"md", "html", "txt", "pdf", "csv", "jsonl", "docx"} <= set(type_names())


@pytest.mark.parametrize(
    ("data", "says"),
    [(b"", "nothing came in"), (bytes(range(256)), "binary file; say of what kind with --type"), (b" ", "no text")],
)
def test_reasons(data: bytes, says: str) -> None:
    with pytest.raises(UnreadableSource, match=says):
        read_source(supplied(data))


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_anything_gets_a_type(data: bytes) -> None:
    assert media_type_of(sniff(data)) == sniff(data)
