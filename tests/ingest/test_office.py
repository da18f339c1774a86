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

from ragkv.ingest import package as packages
from ragkv.ingest.office import read_docx
from ragkv.ingest.parser import Parsed, Unreadable, media_type_of, parse
from ragkv.ingest.source import from_bytes, sniff

DIGITS = "0123456789"
REL = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
DOCUMENT = 'xmlns:r="http://r" xmlns:a="http://a" xmlns:mc="http://mc"'


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


def xlsx(sheet: str, styles: str = "", workbook: str = "", sheets: str = "", strings: str = "", **parts: str) -> bytes:
    """A workbook of the sheet Mills; `parts` are more of its sheets, or parts related to Mills by their name."""
    styles = styles or '<cellXfs><xf numFmtId="0"/><xf numFmtId="14"/><xf numFmtId="20"/></cellXfs>'
    strings = strings or "<si><t>Mill</t></si><si><r><t>Ke</t></r><r><t>sk</t></r></si>"
    more = {name: f"worksheet:{name}.xml" for name in parts if name in sheets}
    related = {name: f"{name.rstrip(DIGITS)}:{name}.xml" for name in parts if name not in sheets}
    return archive(
        **{
            "_rels/.rels": rels(a="officeDocument:xl/workbook.xml"),
            "xl/workbook.xml": f'<w {DOCUMENT}>{workbook}<sheets><sheet name="Mills" r:id="s2"/>{sheets}</sheets></w>',
            "xl/_rels/workbook.xml.rels": rels(
                s1="styles:styles.xml", s2="worksheet:one.xml", s3="sharedStrings:s.xml", **more
            ),
            "xl/s.xml": f"<sst>{strings}</sst>",
            "xl/styles.xml": f"<s>{styles}</s>",
            "xl/one.xml": f"<w><sheetData>{sheet}</sheetData></w>" if "<sheetData>" not in sheet else f"<w>{sheet}</w>",
            "xl/_rels/one.xml.rels": rels(**related),
            **{f"xl/{name}.xml": text for name, text in parts.items()},
        }
    )


ROWS = (
    '<row r="1"><c r="A1" t="s"><v>0</v></c><c r="C1" t="inlineStr"><is><t>Founded</t></is></c></row>'
    '<row r="4"><c r="A4" t="s"><v>1</v></c><c r="C4" s="1" t="n"><v>2.0</v></c></row>'
    '<row r="5"><c r="C5" s="2"><v>0.3541666667</v></c></row>'
)


def pptx(*slides: str, **parts: str) -> bytes:
    """A presentation of slides in this order; `parts` are related to the first by their name."""
    listed = "".join(f'<sldId r:id="i{n}"/>' for n in range(len(slides)))
    section = '<extLst><section><sldIdLst><sldId id="256"/></sldIdLst></section></extLst>'
    return archive(
        **{
            "_rels/.rels": rels(a="officeDocument:ppt/presentation.xml"),
            "ppt/presentation.xml": f"<p {DOCUMENT}><sldIdLst>{listed}</sldIdLst>{section}</p>",
            "ppt/_rels/presentation.xml.rels": rels(**{f"i{n}": f"slide:{9 - n}.xml" for n in range(len(slides))}),
            **{f"ppt/{9 - n}.xml": f"<s {DOCUMENT}>{slide}</s>" for n, slide in enumerate(slides) if slide},
            "ppt/_rels/9.xml.rels": rels(**{name: f"{name.rstrip(DIGITS)}:{name}.xml" for name in parts}),
            **{f"ppt/{name}.xml": f"<x {DOCUMENT}>{text}</x>" for name, text in parts.items()},
        }
    )


def a(text: str) -> str:
    return f"<a:p><a:r><a:t>{text}</a:t></a:r></a:p>"


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
        ("xlsx", xlsx(ROWS), "Mill: Kesk\nFounded: 1900-01-02\n\nFounded: 08:30:00", "Mills, row 4"),
        ("pptx", pptx(a("First"), a("Second")), "First\n\nSecond", 1),
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
        "odt": 'under "Mills": comment (Why?)' if "[7]" in text else None,
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
    [
        ("_MAX_BYTES", 1 << 20, "unpacked, it is larger than 1 MiB"),
        ("_MAX_NODES", 1000, "it has more than 1,000 elements"),
    ],
)
def test_what_unpacks_to_too_much_is_refused_while_it_is_unpacked(monkeypatch, limit, most, says):
    monkeypatch.setattr(packages, limit, most)
    with pytest.raises(Unreadable, match=f"ODT cannot be read: {says}"):
        parse(media_type_of("odt"), odt("<p>Kesk</p>" * 200_000))


# ---- XLSX: what the formats of cells say


HEAD = '<row><c t="str"><v>Shown</v></c></row>'


def styled(*cells: tuple[str, str], workbook: str = "") -> list[str]:
    """The text of one number a row, in its format."""
    numbers = [f.removeprefix("#id ") if f.startswith("#id ") else str(i) for i, (_, f) in enumerate(cells, 170)]
    own = zip(numbers, (f for _, f in cells), strict=True)
    formats = "".join(f'<numFmt numFmtId="{n}" formatCode="{f}"/>' for n, f in own if f[:1] != "#" or f[:2] == "#,")
    xfs = "".join(f'<xf numFmtId="{n}"/>' for n in numbers)
    styles = f"<numFmts>{formats}</numFmts><cellXfs>{xfs}</cellXfs>"
    sheet = "".join(f'<row><c s="{i}"><v>{v}</v></c></row>' for i, (v, _) in enumerate(cells))
    text = parse(media_type_of("xlsx"), xlsx(HEAD + sheet, styles, workbook)).text
    return [line.removeprefix("Shown: ") for line in text.split("\n\n")]


@pytest.mark.parametrize(
    ("value", "code", "shown"),
    [
        ("1.5625", "[h]:mm", "37:30"),
        ("7.083333333333333", "#id 46", "170:00:00"),
        ("0.34375", "[$-407][hh]:mm;@", "8:15"),
        ("1.5625", "[mm]", "2250"),
        ("1.56255787037", "[m]:ss", "2250:05"),
        ("1.5625", "[s]", "135000"),
        ("-0.0625", "[h]:mm", "-1:30"),
        ("0.0038194444", "#id 45", "00:05:30"),
        ("0.00381945", "mm:ss.0", "00:05:30"),
        ("40972", "#id 14", "2012-03-04"),
        ("40972.5", "dd.mm.yyyy hh:mm", "2012-03-04 12:00:00"),
        ("40972", "#id 31", "2012-03-04"),  # East Asian editions
        ("1", "yyyy-mm-dd", "1900-01-01"),
        ("61", "yyyy-mm-dd", "1900-03-01"),
        ("1.5", "h:mm", "12:00:00"),
        ("99999999", "yyyy", "99999999"),
        ("0.25", "#id 9", "25%"),
        ("0.255", "0%", "25.5%"),
        ("4.5", "0.0&quot;%&quot;", "4.5%"),
        ("4.5", "0.0\\%", "4.5%"),
        ("42", "00000", "00042"),
        ("1234.5", "#,##0.00\\ [$€-407]", "1234.5 €"),
        ("-3", "&quot;$&quot;#,##0_);[Red]\\(&quot;$&quot;#,##0\\)", "-$3"),
        ("5", "0&quot; kg&quot;", "5 kg"),
        ("1234.5", "#,##0.00 &quot;€&quot;", "1234.5 €"),
        ("12", "&quot;1.&quot;0", "1.12"),
        ("1234567", "0.0,,&quot;M&quot;", "1.234567M"),
        ("5", "General&quot; kg&quot;", "5 kg"),
        ("0.5", "# ?/?", "0.5"),
        ("123456789", "000\\-00\\-0000", "123456789"),
        ("7.0000000000000007E-2", "", "0.07"),
        ("0.30000000000000004", "0.00", "0.3"),
        ("1E+20", "", "100000000000000000000"),
        ("1.5E-300", "", "1.5e-300"),
        ("12345678901234567", "", "12345678901234567"),
        ("-2.0", "", "-2"),
        ("words", "0%", "words"),
    ],
)
def test_numbers_are_what_their_format_says(value, code, shown):
    assert styled((value, code)) == [shown]


def test_every_minute_of_the_day_is_itself():
    times = styled(*((repr(m / 1440), "h:mm") for m in range(1440)))
    assert times == [f"{m // 60:02}:{m % 60:02}:00" for m in range(1440)]


def test_dates_since_1904():
    for flag in ("1", "true"):
        moments = styled(
            ("40972", "yyyy-mm-dd"), ("0", "d.m.yy"), ("0.5", "h:mm"), workbook=f'<workbookPr date1904="{flag}"/>'
        )
        assert moments == ["2016-03-05", "1904-01-01", "12:00:00"]


STRINGS = (
    '<si><t>課長</t><rPh sb="0" eb="2"><t>カチョウ</t></rPh><phoneticPr fontId="1"/></si>'
    "<si><r><t>東</t></r><r><t>京</t></r><rPh><t>トウ</t></rPh></si><si><t>one_x000D_\ntwo</t></si>"
    "<si><t>_x005F_x000D_ _xD83D__xDE00_</t></si>"
    '<si><r><rPr><rFont val="Wingdings"/></rPr><t>ü</t></r><r><t>ü</t></r></si>'
)


def test_strings_of_a_workbook():
    """Without their pronunciation, with what their escapes and their fonts of signs stand for."""
    cells = "".join(f'<row><c t="s"><v>{n}</v></c></row>' for n in range(6))
    cells += '<row><c t="inlineStr" s="1"><is><t>x</t></is></c></row><row><c t="str"><v>_x0041_</v></c></row>'
    values = (("e", "#DIV/0!"), ("b", "0"), ("d", "2016-03-05T00:00:00"))
    cells += "".join(f'<row><c t="{kind}"><v>{value}</v></c></row>' for kind, value in values)
    fonts = '<fonts><font/><font><name val="Symbol"/></font></fonts><cellXfs><xf fontId="0"/><xf fontId="1"/></cellXfs>'
    parsed = parse(media_type_of("xlsx"), xlsx(HEAD + cells, fonts, strings=STRINGS))
    assert parsed.text.removeprefix("Shown: ").split("\n\nShown: ") == [
        *("課長", "東京", "one\ntwo", "_x000D_ 😀", "✓ü", "ξ", "A", "#DIV/0!", "false", "2016-03-05")
    ]
    assert parsed.left_out == ["sheet Mills: missing string"]


def row(number: int, *values: str) -> str:
    cells = "".join(f'<c r="{chr(65 + i)}{number}" t="str"><v>{v}</v></c>' for i, v in enumerate(values) if v)
    return f'<row r="{number}">{cells}</row>'


def test_merged_cells_repeat_below_and_titles_stand_above_the_header():
    sheet = (
        row(1, "Report 2031")
        + row(2, "by Ola")
        + row(4, "Region", "Mill&#10;name", "Flour")
        + row(5, "North", "Kesk", "oats")
    )
    sheet += row(6, "", "Varn", "rye") + row(7, "South", "Halden")
    merged = '<mergeCells><mergeCell ref="A1:C2"/><mergeCell ref="A5:A6"/><mergeCell ref="C6:C1048576"/></mergeCells>'
    parsed = parse(media_type_of("xlsx"), xlsx(f"<sheetData>{sheet}</sheetData>{merged}"))
    assert [(s.heading, parsed.text[s.start : s.end].strip()) for s in parsed.sections] == [
        ("Mills, row 1", "Report 2031"),
        ("Mills, row 2", "by Ola"),
        ("Mills, row 5", "Region: North\nMill name: Kesk\nFlour: oats"),
        ("Mills, row 6", "Region: North\nMill name: Varn\nFlour: rye"),
        ("Mills, row 7", "Region: South\nMill name: Halden\nFlour: rye"),
    ]


PIC = '<pic><nvPicPr><cNvPr descr="The mill"/></nvPicPr></pic>'
CHART = (
    "<chart><title><a:p><a:r><a:t>Flour</a:t></a:r></a:p></title><ser><tx><v>Oats</v></tx><cat><strCache><pt idx='0'>"
    "<v>1.10</v></pt><pt idx='1'><v>2.0</v></pt></strCache></cat><val><formatCode>0%</formatCode><pt idx='1'>"
    "<v>0.10000000000000001</v></pt></val></ser></chart>"
)
CHARTED = "Flour\n\n|  | Oats |\n|---|---|\n| 1.10 |  |\n| 2.0 | 10% |"


def test_what_else_a_workbook_holds_is_read_or_named():
    sheet = f'<sheetData>{row(1, "7")}<row r="2"><c r="A2"><f>A1+1</f><v/></c><c t="str"><f>""</f><v/></c></row>'
    sheet += (
        "</sheetData><headerFooter><oddHeader>&amp;C&amp;&quot;Arial,Bold&quot;Secret&amp;P</oddHeader></headerFooter>"
    )
    sheets = '<sheet name="Old" state="veryHidden"/><sheet name="Empty" r:id="empty"/>'
    sheets += '<sheet name="Gone" r:id="g"/><sheet name="Bad" r:id="bad"/>'
    parsed = parse(
        media_type_of("xlsx"),
        xlsx(
            sheet,
            sheets=sheets,
            empty="<w/>",
            bad="<w><",
            comments='<c><comment ref="A1"><text><r><t>Why?</t></r></text></comment></c>',
            drawing=f"<d {DOCUMENT}><sp><txBody>{a('In a box')}</txBody></sp>{PIC}</d>",
        ),
    )
    assert parsed.text == "7\n\n=A1+1\n\nIn a box"
    assert parsed.left_out == [
        "sheet Mills: picture (The mill)",
        "sheet Mills: comment (A1: Why?)",
        "sheet Mills: page header (Secret)",
        "sheet Mills: uncalculated formula (A2)",
        "sheet Old: hidden",
        "sheet Empty: no text",
        "sheet Gone: missing sheet",
        "sheet Gone: no text",
        "sheet Bad: damaged sheet",
        "sheet Bad: no text",
    ]


# ---- PPTX


def test_lines_fields_and_alternatives_of_a_slide():
    either = "<mc:AlternateContent><mc:Choice>{}</mc:Choice><mc:Fallback>{}</mc:Fallback></mc:AlternateContent>".format
    number = '<a:fld type="slidenum"><a:t>3</a:t></a:fld>'
    sign = '<a:p><a:r><a:rPr><a:sym typeface="Wingdings"/></a:rPr><a:t>\uf0fe ok</a:t></a:r></a:p>'
    parsed = parse(
        media_type_of("pptx"),
        pptx(
            "<a:p><a:r><a:t>Annual report</a:t></a:r><a:br/><a:r><a:t>Harbour_x000B_2031</a:t></a:r></a:p>"
            f"<a:p>{number}</a:p><a:p><a:r><a:t>Slide </a:t></a:r>{number}<a:r><a:t> of 9</a:t></a:r></a:p>"
            f"{either(a('Energy is'), a('Energy is'))}{either('<ink/>', a('a sketch'))}"
            f"<grpSp><grpSp>{a('in a group')}</grpSp></grpSp>{sign}"
            '<a:p><a:r><a:t>10</a:t></a:r><a:r><a:rPr baseline="30000"/><a:t>5</a:t></a:r></a:p>'
        ),
    )
    assert parsed.text == "Annual report\nHarbour\n2031\nSlide 3 of 9\nEnergy is\na sketch\nin a group\n☑ ok\n10⁵"


def test_tables_charts_diagrams_and_notes_of_slides():
    merged = "".join(
        f"<a:tr>{''.join(f'<a:tc {how}><a:txBody>{a(words)}</a:txBody></a:tc>' for how, words in cells)}</a:tr>"
        for cells in (
            [("", "Plan"), ('gridSpan="2"', "Price"), ('hMerge="1"', "")],
            [('rowSpan="2"', "A"), ("", "9"), ("", "10")],
            [('vMerge="1"', ""), ("", "8"), ("", "7")],
        )
    )
    first = (
        f'<graphicFrame><a:tbl>{merged}</a:tbl></graphicFrame><chart r:id="chart"/><relIds r:dm="diagramData"/>{PIC}'
    )
    diagram = f"<pt><t>{a('Sow')}</t></pt><pt><t>{a('Reap')}</t></pt>"
    comments = "<cm><text>Why oats?</text></cm><cm><txBody><a:p><a:r><a:t>And rye?</a:t></a:r></a:p></txBody></cm>"
    parsed = parse(
        media_type_of("pptx"),
        pptx(first, PIC, "", a("End"), chart=CHART, diagramData=diagram, notesSlide=a("Speak"), comments=comments),
    )
    assert [(s.page, parsed.text[s.start : s.end].strip()) for s in parsed.sections] == [
        (
            1,
            f"| Plan | Price |  |\n|---|---|---|\n| A | 9 | 10 |\n| A | 8 | 7 |\n\n{CHARTED}\n\nSow\nReap\nSpeak",
        ),
        (4, "End"),
    ]
    assert parsed.left_out == [
        "slide 1: 2 comments (Why oats?; And rye?)",
        "slide 1: picture (The mill)",
        "slide 2: picture (The mill)",
        "slide 2: no text",
        "slide 3: missing part",
        "slide 3: no text",
    ]


# ---- OpenDocument


def test_tables_frames_and_lists_of_odt():
    inside = (
        '<table><table-row><table-cell number-rows-spanned="2"><p>North</p></table-cell><table-cell><p>Kesk</p>'
        "</table-cell></table-row><table-row><covered-table-cell/><table-cell><p>Varn</p><table><table-row><table-cell>"
        "<p>in</p></table-cell><table-cell><p>side</p></table-cell></table-row></table></table-cell></table-row>"
        "</table>"
        "<list><list-item><p>one</p><list><list-item><p>two</p></list-item></list></list-item></list>"
        "<p>Text<frame><text-box><p>In a box</p></text-box></frame> goes on.<frame><image/><desc>The mill</desc>"
        "</frame><ruby><ruby-base>東京</ruby-base><ruby-text>トウ</ruby-text></ruby></p><frame><object/></frame>"
    )
    parsed = parse(media_type_of("odt"), odt(inside))
    assert parsed.text == (
        "# Mills\n\nKesk Mills\n\n| North | Kesk |\n|---|---|\n| North | Varn in, side |\n\n- one\n  - two\n\n"
        "Text goes on.東京\n\nIn a box\n\n| a | b |\n|---|---|"
    )
    assert parsed.left_out == ['under "Mills": picture (The mill)', 'under "Mills": embedded object']


def test_spreadsheets_and_slides_of_opendocument():
    def read_odf(kind: str, content: str) -> Parsed:
        mimetype = f"application/vnd.oasis.opendocument.{kind}"
        data = archive(**{"mimetype": mimetype, "content.xml": f"<d><{kind}>{content}</{kind}></d>"})
        assert sniff(data) == mimetype
        return parse(mimetype, data)

    cell = "<table-cell{}><p>{}</p></table-cell>".format
    many = ' number-columns-repeated="16384"'
    table = (
        f'<table name="Mills"><table-row>{cell("", "Mill")}{cell("", "Flour")}</table-row>'
        f'<table-row number-rows-repeated="9"/><table-row>{cell("", "Kesk")}{cell("", "oats")}{cell(many, "")}'
        "</table-row><table-row><table-cell><p>Varn</p><annotation><p>Why?</p></annotation></table-cell>"
        '<table-cell value-type="date" date-value="2031-03-05"/>'
        '</table-row></table><table name="None"/><style name="ta2"><table-properties display="false"/></style>'
        f'<table name="Old" style-name="ta2"><table-row>{cell("", "secret")}</table-row></table>'
    )
    parsed = read_odf("spreadsheet", table)
    assert parsed.text == "Mill: Kesk\nFlour: oats\n\nMill: Varn\nFlour: 2031-03-05"
    assert [section.heading for section in parsed.sections] == ["Mills, row 11", "Mills, row 12"]
    assert parsed.left_out == ["sheet Mills: comment (Why?)", "sheet None: no text", "sheet Old: hidden"]
    frame = "<frame><text-box><p>{}</p></text-box></frame>".format
    pages = f"<page>{frame('First<line-break/>line')}<notes>{frame('Speak')}</notes></page><page/>"
    parsed = read_odf("presentation", pages)
    assert (parsed.text, parsed.sections[0].page, parsed.left_out) == ("First\nline\nSpeak", 1, ["slide 2: no text"])


def test_a_password_of_opendocument_is_named():
    data = archive(**{"META-INF/manifest.xml": "<m><encryption-data/></m>", "content.xml": "\x01\x02"})
    with pytest.raises(Unreadable, match="ODT is protected with a password; save it as ODT without one"):
        parse(media_type_of("odt"), data)


# ---- DOCX: files written by python-docx, and by hand what it cannot write


W = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'


def saved(document: object) -> bytes:
    out = io.BytesIO()
    document.save(out)
    return out.getvalue()


def package(body: str, **parts: str) -> bytes:
    """A package of one document and of the given parts."""
    relations = "".join(f'<Relationship Id="{k}" Type="x/{k.rstrip(DIGITS)}" Target="{k}.xml"/>' for k in parts)
    space = 'xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006"'
    return archive(
        **{
            "word/_rels/document.xml.rels": f"<Relationships>{relations}</Relationships>",
            "word/document.xml": f"<w:document {W} {space}><w:body>{body}</w:body></w:document>",
            **{f"word/{kind}.xml": f"<w:{kind} {W} xmlns:a='a'>{text}</w:{kind}>" for kind, text in parts.items()},
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


def test_signs_gaps_and_joined_paragraphs_of_docx():
    sign = '<w:r><w:sym w:font="{}" w:char="{}"/></w:r>'.format
    deleted = "<w:rPr><w:del/></w:rPr>"
    raised = '<w:r><w:rPr><w:vertAlign w:val="superscript"/></w:rPr><w:t>{}</w:t></w:r>'.format
    body = (
        f"<w:p>{sign('Wingdings', 'F0FE')}<w:r><w:t> 45</w:t></w:r>{sign('Symbol', 'F0B0')}{sign('symbol', '006D')}"
        f"<w:r><w:rPr><w:rFonts w:ascii='Wingdings 2'/></w:rPr><w:t>R\uf0a3</w:t></w:r>{sign('Arial', '2022')}"
        f"{sign('Fancy', 'F041')}<w:r><w:t>10</w:t></w:r>{raised('-3')}<w:r><w:t>1</w:t></w:r>{raised('st')}</w:p>"
        f"{p('Joined ', deleted)}{p('with ', deleted)}{p('the next')}{p('last', deleted)}"
        f"<w:tbl><w:tr><w:trPr><w:gridBefore w:val='1'/></w:trPr><w:tc>{p('Q1')}</w:tc></w:tr>"
        f"<w:tr><w:tc>{p('North')}</w:tc><w:tc>{p('5')}<w:tbl><w:tr><w:tc>{p('a')}</w:tc><w:tc>{p('b')}</w:tc></w:tr>"
        "</w:tbl></w:tc></w:tr></w:tbl>"
    )
    parsed = read_docx(package(body))
    assert parsed.text == (
        "☑ 45°µ☑☐•10⁻³1st\n\nJoined with the next\n\nlast\n\n|  | Q1 |\n|---|---|\n| North | 5 a, b |"
    )
    assert parsed.left_out == ["sign of Fancy (F041)"]


def test_formulas_of_docx():
    body = (
        "<r><t>f</t></r><d><r><t>x</t></r></d><r><t>=</t></r><f><num><r><t>a+b</t></r></num><den><r><t>c</t>"
        "</r></den></f>"
        "<d><dPr><begChr w:val='['/><endChr w:val=']'/></dPr><nary><naryPr><chr w:val='∑'/></naryPr><sub><r>"
        "<t>i=1</t></r></sub><sup><r><t>n</t></r></sup></nary></d><nary><sub/><rad><r><t>y</t></r></rad></nary>"
    )
    assert read_docx(package(f"<w:p><oMath>{body}</oMath></w:p>")).text == "f(x)=(a+b)/c[∑_(i=1)^n]∫√(y)"


def test_what_else_a_docx_holds_is_read_or_named():
    drawing = "<w:r><w:drawing><inline><docPr descr='{}'/>{}</inline></w:drawing></w:r>".format
    drawn = drawing("The mill", "<pic/>") + drawing("", "<chart w:id='chart'/><relIds w:dm='diagramData'/>")
    body = (
        p("Mills", "<w:outlineLvl w:val='0'/>")
        + f"<w:p>{drawn}<w:r><w:t>Text</w:t><w:object><OLEObject ProgID='Excel.Sheet'/></w:object>"
        + "<w:commentReference w:id='1'/></w:r></w:p><w:altChunk w:id='aFChunk'/>"
        + "<w:p><w:r><w:pict><textpath string='DRAFT'/></w:pict></w:r></w:p>"
    )
    comments = f"<w:comment w:id='1'>{p('Why?')}</w:comment><w:comment w:id='2'>{p('Lost.')}</w:comment>"
    parts = {"header": p("Secret"), "chart": CHART.replace("a:", "w:"), "diagramData": p("Sow"), "aFChunk": ""}
    parsed = read_docx(package(body, comments=comments, **parts))
    assert parsed.text == f"# Mills\n\nText\n\n{CHARTED}\n\nSow\n\nDRAFT"
    assert parsed.left_out == [
        'under "Mills": comment (Why?)',
        'under "Mills": picture (The mill)',
        'under "Mills": embedded object (Excel.Sheet)',
        'under "Mills": embedded document (aFChunk.xml)',
        "comment (Lost.)",
        "page header (Secret)",
    ]


def test_forms_of_docx():
    field = "<w:p><w:r><w:fldChar><w:ffData>{}</w:ffData></w:fldChar></w:r></w:p>".format
    boxes = "<w:checkBox><w:default w:val='0'/>{}</w:checkBox>".format
    choices = "<w:ddList><w:result w:val='1'/><w:listEntry w:val='oats'/><w:listEntry w:val='rye'/></w:ddList>"
    body = field(boxes("")) + field(boxes("<w:checked/>")) + field(choices)
    assert read_docx(package(body)).text == "☐\n\n☑\n\nrye"


def test_a_damaged_part_beside_the_text_is_named():
    data = package(p("Text"), styles="<", header="<")
    assert read_docx(data).left_out == ["damaged styles", "damaged page header"]


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
    assert (parsed.title, parsed.left_out) == ("Eins", ["contents line (contents)"])


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


# ---- every word is in the text or named: by kind, places of a word {0} with the number {1}, and the parts beside them

T, WP = "<a:p><a:r><a:t>{0}</a:t></a:r></a:p>", "<w:p><w:r><w:t>{0}</w:t></w:r></w:p>"
BOX = (
    "<w:p><w:r><mc:AlternateContent><mc:Choice><w:drawing>{0}</w:drawing></mc:Choice><mc:Fallback/>"
    "</mc:AlternateContent></w:r></w:p>"
)
VALUES = "<chart><ser><tx><v>{0}</v></tx><val><pt idx='0'><v>2</v></pt></val></ser></chart>"
PLACES: dict[str, list[tuple[str, dict[str, str]]]] = {
    "docx": [
        (WP, {}),
        ("<w:p><w:ins><w:r><w:t>{0}</w:t></w:r></w:ins></w:p>", {}),
        ("<w:p><w:hyperlink><w:fldSimple><w:r><w:t>{0}</w:t></w:r></w:fldSimple></w:hyperlink></w:p>", {}),
        ("<w:p><w:pPr><w:rPr><w:del/></w:rPr></w:pPr><w:r><w:t>{0}</w:t></w:r></w:p>", {}),
        (f"<w:sdt><w:sdtContent>{WP}</w:sdtContent></w:sdt>", {}),
        (
            f"<w:tbl><w:tr><w:tc>{WP}</w:tc><w:tc><w:tbl><w:tr><w:tc>{WP}</w:tc></w:tr></w:tbl></w:tc></w:tr></w:tbl>",
            {},
        ),
        (BOX.format(f"<w:txbxContent>{WP}</w:txbxContent>"), {}),
        (BOX.format("<inline><docPr descr='{0}'/><pic/></inline>"), {}),
        (BOX.format("<chart w:id='chart{1}'/>"), {"chart{1}": VALUES}),
        (BOX.format("<relIds w:dm='diagramData{1}'/>"), {"diagramData{1}": f"<pt><t>{T}</t></pt>"}),
        ("<w:p><w:r><w:object><OLEObject ProgID='{0}'/></w:object></w:r></w:p>", {}),
        ("<w:p><w:r><w:footnoteReference w:id='{1}'/></w:r></w:p>", {"footnotes": f"<w:n w:id='{{1}}'>{WP}</w:n>"}),
        ("<w:p><w:r><w:endnoteReference w:id='{1}'/></w:r></w:p>", {"endnotes": f"<w:n w:id='{{1}}'>{WP}</w:n>"}),
        ("<w:p><w:r><w:commentReference w:id='{1}'/></w:r></w:p>", {"comments": f"<w:n w:id='{{1}}'>{WP}</w:n>"}),
        ("", {"header{1}": WP}),
        ("", {"footer{1}": WP}),
    ],
    "pptx": [
        (T, {}),
        ("<a:p><a:r><a:t>a</a:t></a:r><a:br/><a:fld type='slidenum'><a:t>{0}</a:t></a:fld></a:p>", {}),
        (f"<grpSp><sp><txBody>{T}</txBody></sp></grpSp>", {}),
        (f"<a:tbl><a:tr><a:tc>{T}</a:tc><a:tc vMerge='1'>{T}</a:tc></a:tr></a:tbl>", {}),
        (f"<mc:AlternateContent><mc:Choice>{T}</mc:Choice><mc:Fallback>{T}</mc:Fallback></mc:AlternateContent>", {}),
        ("<pic><nvPicPr><cNvPr descr='{0}'/></nvPicPr></pic>", {}),
        ("<oleObj progId='{0}'/>", {}),
        ("<chart r:id='chart{1}'/>", {"chart{1}": VALUES}),
        ("<relIds r:dm='diagramData{1}'/>", {"diagramData{1}": f"<pt><t>{T}</t></pt>"}),
        ("", {"notesSlide{1}": T}),
        ("", {"comments{1}": "<cm><text>{0}</text></cm>"}),
    ],
    "xlsx": [
        ("<c t='str'><v>{0}</v></c>", {}),
        ("<c t='inlineStr'><is><r><t>{0}</t></r></is></c>", {}),
        ("<c><f>{0}(A1)</f></c>", {}),
        ("<c r='Z{1}' t='e'><v>{0}</v></c><c t='b'><v>1</v></c>", {}),
        ("", {"drawing{1}": f"<d xmlns:a='a'><sp><txBody>{T}</txBody></sp></d>"}),
        ("", {"drawing{1}": "<d><pic><nvPicPr><cNvPr descr='{0}'/></nvPicPr></pic></d>"}),
        ("", {"comments{1}": "<c><comment ref='A1'><text><t>{0}</t></text></comment></c>"}),
    ],
}


@pytest.mark.parametrize("kind", PLACES)
@given(st.data())
def test_every_word_is_read_or_named(kind, data):
    words = data.draw(st.lists(st.text("abcdefghij", min_size=5, max_size=9), unique=True, min_size=1, max_size=12))
    body, parts = "", {}
    for number, word in enumerate(words, start=1):
        place, beside = data.draw(st.sampled_from(PLACES[kind]))
        for name, text in beside.items():
            name = name.format(word, number)
            parts[name] = parts.get(name, "") + text.format(word, number)
        body += place.format(word, number)
        if kind == "xlsx" and data.draw(st.booleans()):
            body += "</row><row>"
    built = {"docx": package, "pptx": pptx, "xlsx": lambda rows, **parts: xlsx(f"<row>{rows}</row>", **parts)}[kind]
    parsed = parse(media_type_of(kind), built(body, **parts))
    everything = " ".join([parsed.text, *parsed.left_out])
    assert [word for word in words if word not in everything] == []
