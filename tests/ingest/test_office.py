"""Spreadsheets, slides, e-books, OpenDocument texts, mail and DOCX: what is read, and what is refused."""

import io
import zipfile
from email.message import EmailMessage

import docx
import pytest
from docx.enum.style import WD_STYLE_TYPE
from hypothesis import given, settings
from hypothesis import strategies as st
from reading import outcome, read, reason, rows

from ragkv.ingest import office
from ragkv.ingest.office import read_docx
from ragkv.ingest.parser import Unreadable, media_type_of, parse
from ragkv.ingest.source import from_bytes, sniff

REL = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
DOCUMENT = 'xmlns:r="http://r" xmlns:a="http://a"'


def archive(**parts: str) -> bytes:
    with zipfile.ZipFile(out := io.BytesIO(), "w") as file:
        for name, text in parts.items():
            file.writestr(name, text)
    return out.getvalue()


def rels(**targets: str) -> str:
    each = (
        f'<R Id="{name}" Type="{REL}/{to.split(":")[0]}" Target="{to.split(":")[1]}"/>' for name, to in targets.items()
    )
    return f"<Rs>{''.join(each)}</Rs>"


def xlsx(sheet: str) -> bytes:
    return archive(
        **{
            "_rels/.rels": rels(a="officeDocument:xl/workbook.xml"),
            "xl/workbook.xml": f'<w {DOCUMENT}><sheets><sheet name="Mills" r:id="s2"/></sheets></w>',
            "xl/_rels/workbook.xml.rels": rels(
                s1="styles:styles.xml", s2="worksheet:one.xml", s3="sharedStrings:s.xml"
            ),
            "xl/s.xml": "<sst><si><t>Mill</t></si><si><r><t>Ke</t></r><r><t>sk</t></r></si></sst>",
            "xl/styles.xml": '<s><cellXfs><xf numFmtId="0"/><xf numFmtId="14"/><xf numFmtId="20"/></cellXfs></s>',
            "xl/one.xml": f"<w><sheetData>{sheet}</sheetData></w>",
        }
    )


ROWS = (
    '<row r="1"><c r="A1" t="s"><v>0</v></c><c r="C1" t="inlineStr"><is><t>Founded</t></is></c></row>'
    '<row r="4"><c r="A4" t="s"><v>1</v></c><c r="C4" s="1" t="n"><v>2.0</v></c></row>'
    '<row r="5"><c r="C5" s="2"><v>0.3541666667</v></c></row>'
)


def pptx() -> bytes:
    slide = f"<s {DOCUMENT}><a:p><a:r><a:t>{{}}</a:t></a:r></a:p></s>"
    return archive(
        **{
            "_rels/.rels": rels(a="officeDocument:ppt/presentation.xml"),
            "ppt/presentation.xml": f'<p {DOCUMENT}><sldId id="9" r:id="b"/><sldId id="8" r:id="a"/></p>',
            "ppt/_rels/presentation.xml.rels": rels(a="slide:slides/1.xml", b="slide:slides/2.xml"),
            "ppt/slides/1.xml": slide.format("Second"),
            "ppt/slides/2.xml": slide.format("First"),
        }
    )


CHAPTER = (
    '<div class="menu"><h1>Mills</h1>Short<br/>lines<p>Kesk Mills<a href="#n">1</a></p><ul><li>oats</li></ul></div>'
    '<div class="footnotes"><p id="n">makes flour.</p></div>'
)
NOTE = "<note><note-citation>7</note-citation><note-body><p>oats</p></note-body></note>"


def epub() -> bytes:
    return archive(
        **{
            "mimetype": "application/epub+zip",
            "META-INF/container.xml": '<c><rootfile full-path="O/b.opf"/></c>',
            "O/b.opf": '<p><title>Mills</title><item id="a" href="one%20.xhtml"/>'
            '<itemref idref="a"/><itemref idref="z"/></p>',
            "O/one .xhtml": f"<html><head><title>Kesk</title></head><body>{CHAPTER}</body></html>",
        }
    )


def odt(inside: str = "") -> bytes:
    body = (
        f'<d><body><text><h outline-level="1">Mills</h><p>Kesk<s c="3"/>Mills</p>{inside}<table><table-row><table-cell>'
        "<p>a</p></table-cell><table-cell><p>b</p></table-cell></table-row></table></text></body></d>"
    )
    return archive(**{"mimetype": "application/vnd.oasis.opendocument.text", "content.xml": body})


def eml() -> bytes:
    message = EmailMessage()
    message["From"], message["Subject"] = "Ida <ida@kesk.example>", "Flour"
    message.set_content("Kesk Mills makes flour.\n>From oats.")
    message.add_attachment(b"x", maintype="image", subtype="png", filename="mill.png")
    return message.as_bytes()


@pytest.mark.parametrize(
    ("suffix", "data", "text", "place"),
    [
        ("xlsx", xlsx(ROWS), "Mill: Kesk\nFounded: 1900-01-01\n\nFounded: 08:30:00", "Mills, row 4"),
        ("pptx", pptx(), "First\n\nSecond", 1),
        ("epub", epub(), "# Mills\n\nShort\nlines\n\nKesk Mills1\n\n- oats\n\nmakes flour.", "Mills"),
        ("odt", odt(), "# Mills\n\nKesk Mills\n\n| a | b |", "Mills"),
        ("odt", odt(f"<p>A{NOTE}<annotation><p>Why?</p></annotation> b.</p>"), "\n\nA[7] b.\n\n[7] oats\n\n|", "Mills"),
        ("eml", eml(), "From: Ida <ida@kesk.example>\nSubject: Flour\n\nKesk Mills makes flour.\n>From oats.", None),
        (
            "mbox",
            b"From a\n" + eml() + b"\nFrom b\n" + eml(),
            "Kesk Mills makes flour.\nFrom oats.\n\nFrom: Ida",
            "message 1 (Flour)",
        ),
    ],
)
def test_what_is_read(suffix, data, text, place):
    kind = media_type_of(suffix)
    parsed = parse(kind, data)
    assert text in parsed.text
    assert place is None or place in (parsed.sections[0].heading, parsed.sections[0].page)
    if suffix not in ("eml", "mbox"):
        assert sniff(data) == kind
        with pytest.raises(Unreadable, match=f"{suffix.upper()} cannot be read: (damaged|it is none)"):
            parse(kind, data[: len(data) // 2])
    expected = {
        "epub": "chapter 2: it is missing",
        "eml": "attachment mill.png",
        "mbox": "message 1: attachment mill.png",
    }
    assert next(iter(parsed.left_out), None) == expected.get(suffix)


BOMB = '<!DOCTYPE d [<!ENTITY a "aaaaaaaaaa">' + "".join(
    f'<!ENTITY {b} "{f"&{a};" * 10}">' for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("suffix", "data", "reason"),
    [
        ("xlsx", xlsx('<row><c r="XFD1"><v>1</v></c></row>' * 200), "more than 3,000,000 cells"),
        ("odt", odt("<p>" * 5000 + "</p>" * 5000), "cannot be read"),
        ("odt", archive(**{"content.xml": f"{BOMB}]><d><body><p>Kesk &i;</p></body></d>"}), "damaged"),
        ("pptx", bytes.fromhex("d0cf11e0a1b11ae1"), "protected with a password"),
    ],
)
def test_hostile_files_are_refused(suffix, data, reason):
    with pytest.raises(Unreadable, match=reason):
        parse(media_type_of(suffix), data)


@pytest.mark.parametrize(
    ("limit", "most", "says"),
    [("_LARGEST", 1 << 20, "unpacked, it is larger than 1 MiB"), ("_NODES", 1000, "it has more than 1,000 elements")],
)
def test_what_unpacks_to_too_much_is_refused_while_it_is_unpacked(monkeypatch, limit, most, says):
    monkeypatch.setattr(office, limit, most)
    with pytest.raises(Unreadable, match=f"ODT cannot be read: {says}"):
        parse(media_type_of("odt"), odt("<p>Kesk</p>" * 200_000))


# ---- DOCX: files written by python-docx, and by hand what it cannot write


W = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'


def saved(document: object) -> bytes:
    out = io.BytesIO()
    document.save(out)
    return out.getvalue()


def package(body: str, **parts: str) -> bytes:
    """A package of one document and of the given parts."""
    relations = "".join(f'<Relationship Id="{k}" Type="x/{k}" Target="{k}.xml"/>' for k in parts)
    space = 'xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006"'
    return archive(
        **{
            "word/_rels/document.xml.rels": f"<Relationships>{relations}</Relationships>",
            "word/document.xml": f"<w:document {W} {space}><w:body>{body}</w:body></w:document>",
            **{f"word/{kind}.xml": f"<w:{kind} {W}>{text}</w:{kind}>" for kind, text in parts.items()},
        }
    )


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


def test_headings_lists_and_tables_of_docx(tmp_path):
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


def test_reasons_of_docx(tmp_path):
    whole = report()
    assert "protected with a password" in reason(tmp_path, "a.docx", bytes.fromhex("d0cf11e0a1b11ae1") + bytes(600))
    assert reason(tmp_path, "b.docx", "just text") == "DOCX cannot be read: it is none (BadZipFile)"
    assert reason(tmp_path, "c.docx", whole[: len(whole) // 2]) == "DOCX cannot be read: damaged (BadZipFile)"
    assert reason(tmp_path, "d.docx", saved(docx.Document())) == "no text found"
    assert reason(tmp_path, "e.docx", package("").replace(b"</w:body>", b"<<w:body>")).startswith("DOCX cannot be read")
    assert reason(tmp_path, "f.docx", archive(**{"readme.txt": "x"})) == "DOCX cannot be read: damaged (KeyError)"


def test_entities_are_not_read(tmp_path):
    (tmp_path / "secret").write_text("secret")
    hostile = f'<!DOCTYPE x [<!ENTITY e SYSTEM "{(tmp_path / "secret").as_uri()}">]><w:document {W}><w:body>'
    data = archive(**{"word/document.xml": hostile + p("open &e;") + "</w:body></w:document>"})
    assert read_docx(data).text == "open"


WHOLE = report()


@settings(max_examples=60)
@given(st.randoms(use_true_random=False))
def test_damaged_docx_is_read_or_refused(rng):
    """Damage in the package's bytes, and in the XML inside, with valid package checksums."""
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
    source = from_bytes(bytes(data), name="a.docx")
    assert outcome(source) == outcome(source)
