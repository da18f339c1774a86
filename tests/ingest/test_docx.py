"""Files that python-docx wrote, and by hand what it cannot write."""

import io
import zipfile

import docx
import pytest
from docx.enum.style import WD_STYLE_TYPE
from hypothesis import given, settings
from hypothesis import strategies as st
from reading import read, reason, rows

from ragkv.ingest.office import read_docx
from ragkv.ingest.parser import Unreadable

W = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'


def saved(document: object) -> bytes:
    out = io.BytesIO()
    document.save(out)
    return out.getvalue()


def package(body: str, **parts: str) -> bytes:
    """A package of one document, and of parts that it names by their kind."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as written:
        relations = "".join(f'<Relationship Id="{k}" Type="x/{k}" Target="{k}.xml"/>' for k in parts)
        written.writestr("word/_rels/document.xml.rels", f"<Relationships>{relations}</Relationships>")
        space = 'xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006"'
        written.writestr("word/document.xml", f"<w:document {W} {space}><w:body>{body}</w:body></w:document>")
        for kind, text in parts.items():
            written.writestr(f"word/{kind}.xml", f"<w:{kind} {W}>{text}</w:{kind}>")
    return out.getvalue()


def p(text: str, properties: str = "") -> str:
    return f"<w:p><w:pPr>{properties}</w:pPr><w:r><w:t>{text}</w:t></w:r></w:p>"


def report() -> bytes:
    document = docx.Document()
    document.core_properties.title = "from the properties"
    own = document.styles.add_style("House heading", WD_STYLE_TYPE.PARAGRAPH)
    own.base_style = document.styles["Heading 2"]
    document.add_paragraph("Before any heading.")
    document.add_heading("Guide", 1)
    document.add_paragraph("Hello ").add_run("world").bold = True
    document.add_heading("Install", 2)
    document.add_paragraph("first", style="List Bullet")
    document.add_paragraph("second", style="List Number")
    document.add_paragraph("after the list")
    document.add_paragraph("Use", style="House heading")
    table = document.add_table(rows=3, cols=3)
    for i, words in enumerate(("name", "size", "a|b", "small", "1", "x", "", "2", "y")):
        table.cell(i // 3, i % 3).text = words
    table.cell(1, 0).merge(table.cell(2, 0))
    document.add_heading("End", 1)
    return saved(document)


def test_headings_lists_and_tables(tmp_path):
    source = read(tmp_path, "a.docx", report())
    assert source.title == "from the properties"
    assert rows(source) == [
        (None, "Before any heading."),
        ("Guide", "# Guide\n\nHello world"),
        ("Guide > Install", "## Install\n\n- first\n- second\n\nafter the list"),
        ("Guide > Use", "## Use\n\n| name | size | a\\|b |\n|---|---|---|\n| small | 1 | x |\n| small | 2 | y |"),
        ("End", "# End"),
    ]


def test_title_style_is_the_title(tmp_path):
    document = docx.Document()
    document.add_heading("The Guide", 0)
    document.add_heading("Part", 1)
    source = read(tmp_path, "a.docx", saved(document))
    assert (source.title, source.text) == ("The Guide", "# The Guide\n\n# Part")
    assert [heading for heading, _ in rows(source)] == [None, "Part"]
    data = report()
    words = " ".join(read(tmp_path, "a.docx", data).text.split())
    for paragraph in docx.Document(io.BytesIO(data)).paragraphs:
        assert " ".join(paragraph.text.split()) in words


def test_what_is_wrapped_is_read_and_what_was_deleted_is_not():
    body = (
        "<w:p><w:r><w:t>Costs </w:t></w:r><w:ins><w:r><w:t>nine</w:t></w:r></w:ins>"
        "<w:del><w:r><w:delText>ten</w:delText></w:r></w:del><w:moveFrom><w:r><w:t>gone</w:t></w:r></w:moveFrom>"
        "<w:r><w:instrText>PAGE</w:instrText></w:r><w:r><w:tab/><w:t>euro</w:t><w:noBreakHyphen/><w:t>cent</w:t></w:r>"
        '<w:hyperlink><w:r><w:t>, a link</w:t></w:r></w:hyperlink><w:r><w:footnoteReference w:id="2"/></w:r></w:p>'
        f"<w:sdt><w:sdtPr><w:t>never</w:t></w:sdtPr><w:sdtContent>{p('In a control.')}</w:sdtContent></w:sdt>"
        "<w:p><w:r><mc:AlternateContent><mc:Choice><w:drawing><w:txbxContent>"
        f"{p('In a box.')}</w:txbxContent></w:drawing></mc:Choice><mc:Fallback>{p('In a box.')}</mc:Fallback>"
        "</mc:AlternateContent></w:r></w:p>"
        f"<w:tbl><w:tr><w:trPr><w:del/></w:trPr><w:tc>{p('old row')}</w:tc></w:tr>"
        f"<w:sdt><w:sdtContent><w:tr><w:tc>{p('framed')}</w:tc></w:tr></w:sdtContent></w:sdt></w:tbl>"
    )
    note = f'<w:footnote w:id="2">{p("Since 1907.")}</w:footnote>'
    assert read_docx(package(body, footnotes=note)).text == (
        "Costs nine euro-cent, a link[2]\n\n[2] Since 1907.\n\nIn a control.\n\nIn a box.\n\nframed"
    )


def test_levels_by_outline_contents_and_loops_of_styles():
    styles = (
        '<w:style w:styleId="a"><w:basedOn w:val="b"/></w:style><w:style w:styleId="b"><w:basedOn w:val="a"/></w:style>'
        '<w:style w:styleId="T"><w:name w:val="toc 1"/></w:style>'
        '<w:style w:styleId="L"><w:pPr><w:numPr/></w:pPr></w:style>'
        '<w:style w:styleId="berschrift1"><w:name w:val="heading 1"/></w:style>'
    )
    body = (
        p("contents", '<w:pStyle w:val="T"/>')
        + p("Eins", '<w:pStyle w:val="berschrift1"/>')
        + p("plain", '<w:pStyle w:val="a"/>')
        + p("Deep", '<w:outlineLvl w:val="1"/>')
        + p("item", '<w:pStyle w:val="L"/>')
        + p("below", '<w:numPr><w:ilvl w:val="1"/><w:numId w:val="5"/></w:numPr>')
        + p("no item", '<w:pStyle w:val="L"/><w:numPr><w:numId w:val="0"/></w:numPr>')
    )
    parsed = read_docx(package(body, styles=styles))
    assert parsed.text == "# Eins\n\nplain\n\n## Deep\n\n- item\n  - below\n\nno item"
    assert [section.heading for section in parsed.sections] == ["Eins", "Eins > Deep"]
    assert parsed.title == "Eins"


def test_reasons(tmp_path):
    whole = report()
    assert "protected with a password" in reason(tmp_path, "a.docx", bytes.fromhex("d0cf11e0a1b11ae1") + bytes(600))
    assert reason(tmp_path, "b.docx", "just text") == "DOCX cannot be read: it is none (BadZipFile)"
    assert reason(tmp_path, "c.docx", whole[: len(whole) // 2]) == "DOCX cannot be read: damaged (BadZipFile)"
    assert reason(tmp_path, "d.docx", saved(docx.Document())) == "no text found"
    assert reason(tmp_path, "e.docx", package("").replace(b"</w:body>", b"<<w:body>")).startswith("DOCX cannot be read")
    other = io.BytesIO()
    with zipfile.ZipFile(other, "w") as written:
        written.writestr("readme.txt", "x")
    assert reason(tmp_path, "f.docx", other.getvalue()) == "DOCX cannot be read: damaged (KeyError)"


def test_entities_and_large_parts_are_refused(tmp_path, monkeypatch):
    (tmp_path / "secret").write_text("secret")
    hostile = f'<!DOCTYPE x [<!ENTITY e SYSTEM "{(tmp_path / "secret").as_uri()}">]><w:document {W}><w:body>'
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as written:
        written.writestr("word/document.xml", hostile + p("open &e;") + "</w:body></w:document>")
    assert read_docx(out.getvalue()).text == "open"
    monkeypatch.setattr("ragkv.ingest.office._LARGEST", 1000)
    with pytest.raises(Unreadable, match="is larger than"):
        read_docx(WHOLE)


WHOLE = report()


@settings(max_examples=60)
@given(st.randoms(use_true_random=False))
def test_damaged_docx_is_read_or_refused(rng):
    """Of the package's bytes, and of the XML within, which the checksum of the package would hide."""
    data = bytearray(WHOLE)
    if rng.random() < 0.6:
        with zipfile.ZipFile(io.BytesIO(WHOLE)) as good:
            parts = {name: bytearray(good.read(name)) for name in good.namelist()}
        xml = parts[rng.choice(["word/document.xml", "word/styles.xml", "_rels/.rels"])]
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(xml))
            xml[at : at + rng.randint(0, 40)] = b"9" * rng.randint(0, 3)
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as bad:
            for name, part in parts.items():
                bad.writestr(name, bytes(part))
        data = bytearray(out.getvalue())
    else:
        for _ in range(rng.randint(1, 40)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    try:
        first: object = read_docx(bytes(data))
    except Unreadable as error:
        first = str(error)
    try:
        again: object = read_docx(bytes(data))
    except Unreadable as error:
        again = str(error)
    assert first == again
