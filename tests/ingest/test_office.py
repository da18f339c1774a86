"""Spreadsheets, slides, books, OpenDocument texts and mail: what is read, and what is refused."""

import io
import zipfile
from email.message import EmailMessage

import pytest

from ragkv.ingest import Unreadable, office
from ragkv.ingest.parser import media_type_of, parse
from ragkv.ingest.source import sniff

REL = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
DOCUMENT = 'xmlns:r="http://r" xmlns:a="http://a"'


def archive(**parts: str) -> bytes:
    with zipfile.ZipFile(out := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as file:
        for name, text in parts.items():
            file.writestr(name, text, zipfile.ZIP_STORED if name == "mimetype" else None)
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
        ("xlsx", xlsx("<row/>" * 3_000_001), "more than 3,000,000 elements"),
        ("odt", odt("<p>" * 5000 + "</p>" * 5000), "cannot be read"),
        ("odt", archive(**{"content.xml": f"{BOMB}]><d><body><p>Kesk &i;</p></body></d>"}), "damaged"),
        ("pptx", bytes.fromhex("d0cf11e0a1b11ae1"), "protected with a password"),
    ],
)
def test_hostile_files_are_refused(suffix, data, reason):
    with pytest.raises(Unreadable, match=reason):
        parse(media_type_of(suffix), data)


def test_what_unpacks_to_too_much_is_refused_while_it_is_unpacked(monkeypatch):
    monkeypatch.setattr(office, "_LARGEST", 1 << 20)
    with pytest.raises(Unreadable, match="ODT cannot be read: unpacked, it is larger than 1 MiB"):
        parse(media_type_of("odt"), odt("<p>Kesk</p>" * 200_000))
