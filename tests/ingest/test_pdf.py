import io
import shutil
import sys
import zlib
from collections.abc import Callable

import bomb
import pypdfium2
import pytest
from fpdf import FPDF
from fpdf.enums import EncryptionMethod
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import NIGHTLY
from reading import outcome, read, reason

from ragkv.config import IngestConfig
from ragkv.errors import ConfigError
from ragkv.ingest import ocr as ocr_module
from ragkv.ingest.parser import ParseLimits, Section, limited
from ragkv.ingest.sandbox import SourceText
from ragkv.ingest.source import from_bytes

PARAGRAPHS = [
    "Halden Works was founded in 1907 by Marta Lindqvist, who had left her post at the naval yard after the "
    "strike. The first building stood on the quay and housed forty people and two lathes.",
    "The second building came in 1912. It was larger, and its roof let in the daylight from the north side.",
]


def pdf(pages: list[list[str]], **options: str) -> bytes:
    document = FPDF(format=(148, 210))
    if title := options.get("title"):
        document.set_title(title)
    if password := options.get("password"):
        user = options.get("user", "")
        method = EncryptionMethod[options.get("method", "RC4")]
        document.set_encryption(password, user_password=user, encryption_method=method)
    document.set_font("helvetica", size=11)
    for paragraphs in pages:
        document.add_page()
        for text in paragraphs:
            document.multi_cell(0, 6, text, align="L")
            document.ln(6)
    return bytes(document.output())


def test_pdf_text(tmp_path):
    source = read(tmp_path, "a.pdf", pdf([["Page one."], [], ["Page three."]], title="Report"))
    assert source.text == "Page one.\n\nPage three."
    assert source.title == "Report"
    assert source.sections == (Section(start=0, end=11, page=1), Section(start=11, end=22, page=3))
    text = read(tmp_path, "a.pdf", pdf([["1. History", *PARAGRAPHS]])).text
    for paragraph in PARAGRAPHS:
        assert paragraph in text
    assert text.startswith("1. History\n\n")
    assert text.count("\n\n") == 2
    lines = ["The long-standing founda-", "tion of the works remain-", "ed open from 1907 to 08-"]
    lines += ["1909 on the far Nord-", "See."]
    assert read(tmp_path, "a.pdf", pdf([["\n".join(lines)]])).text == (
        "The long-standing foundation of the works remained open from 1907 to 08-1909 on the far Nord-See."
    )


def test_pdf_encrypted_with_aes(tmp_path):
    data = pdf([["Open text."]], password="owner", method="AES_256")
    assert read(tmp_path, "a.pdf", data).text == "Open text."
    locked = pdf([["x"]], password="owner", user="user", method="AES_256")
    assert reason(tmp_path, "b.pdf", locked) == "PDF is protected with a password; save it without one"


def test_pdf_reasons(tmp_path):
    locked = pdf([["x"]], password="owner", user="user")
    assert reason(tmp_path, "a.pdf", locked) == "PDF is protected with a password; save it without one"
    assert reason(tmp_path, "b.pdf", pdf([[]])) == "no text found"
    for data in (b"no PDF at all", pdf([PARAGRAPHS])[:150]):
        assert reason(tmp_path, "c.pdf", data) == "PDF cannot be read: damaged structure"


@settings(max_examples=60 if NIGHTLY else 30)
@given(st.randoms(use_true_random=False))
def test_damaged_pdf_is_read_or_refused(rng):
    data = bytearray(pdf([PARAGRAPHS, PARAGRAPHS]))
    for _ in range(rng.randint(1, 40)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    whole = rng.random() >= 0.3
    source = from_bytes(bytes(data if whole else data[: rng.randint(1, len(data))]), name="a.pdf")
    assert outcome(source) == outcome(source)


def test_one_bad_page_is_left_out_and_named(tmp_path, monkeypatch):
    load = pypdfium2.PdfDocument.get_page

    def fails_on_two(self: pypdfium2.PdfDocument, index: int) -> pypdfium2.PdfPage:
        if index == 1:
            raise pypdfium2.PdfiumError("Failed to load page.")
        return load(self, index)

    monkeypatch.setattr(pypdfium2.PdfDocument, "get_page", fails_on_two)
    source = read(tmp_path, "a.pdf", pdf([["One."], ["Two."], ["Three."]]))
    assert [section.page for section in source.sections] == [1, 3]
    assert source.left_out == ("page 2: damaged structure",)


def drawn(draw: Callable[[FPDF], object]) -> bytes:
    document = FPDF(format=(148, 210))
    document.set_font("helvetica", size=11)
    document.add_page()
    draw(document)
    return bytes(document.output())


def headings(source: SourceText) -> list[tuple[int | None, str | None, str]]:
    """The page, heading and first line of each section."""
    return [(s.page, s.heading, source.text[s.start : s.end].split("\n")[0]) for s in source.sections]


def book(document: FPDF, *, outline: bool) -> None:
    """Two pages; of three headings the third has a number that the outline has not."""
    lines = [("Guide", 18.0, 0), ("Install", 13.0, 1), (PARAGRAPHS[0], 11.0, None)]
    lines += [
        ("Page two", 0.0, None),
        (PARAGRAPHS[1], 11.0, None),
        ("1.2 Remove", 13.0, 1),
        (PARAGRAPHS[1], 11.0, None),
    ]
    for text, size, level in lines:
        if size == 0:
            document.add_page()
            continue
        document.set_font_size(size)
        if outline and level is not None:
            document.start_section(text.removeprefix("1.2 "), level=level)
        document.multi_cell(0, size / 2, text, align="L", new_x="LMARGIN", new_y="NEXT")


@pytest.mark.parametrize(("outline", "last"), [(True, "Guide > Remove"), (False, "Guide > 1.2 Remove")])
def test_headings_are_those_of_the_outline_or_larger_lines(tmp_path, outline, last):
    source = read(tmp_path, "a.pdf", drawn(lambda document: book(document, outline=outline)))
    assert [(page, heading) for page, heading, _ in headings(source)] == [
        (1, "Guide"),
        (1, "Guide > Install"),
        (2, "Guide > Install"),
        (2, last),
    ]
    assert headings(source)[3][2] == "1.2 Remove"


def test_running_heads_and_large_prose_are_no_headings(tmp_path):
    def draw(document: FPDF) -> None:
        for page in range(6):
            document.set_font_size(14)
            document.cell(0, 8, "Halden Works", new_x="LMARGIN", new_y="NEXT")
            document.set_font_size(16 if page == 0 else 11)
            document.multi_cell(0, 7, " ".join(PARAGRAPHS), align="L")
            document.add_page()

    assert {heading for _, heading, _ in headings(read(tmp_path, "a.pdf", drawn(draw)))} == {None}


LEFT = "The left column tells of the mill at Varn and of its wheel, which the river drives in each month but one. " * 4
RIGHT = "The right column tells of the bakers of Kesk, who buy the flour and sell their bread on market days. " * 4


def columns(document: FPDF) -> None:
    """Two columns of prose, written line by line across both, under a line across the page."""
    document.cell(0, 8, "A title that runs across both of the columns of this page", new_x="LMARGIN", new_y="NEXT")
    document.set_font_size(8)
    sides = [document.multi_cell(56, 4, text, dry_run=True, output="LINES") for text in (LEFT, RIGHT)]
    for number, pair in enumerate(zip(*sides, strict=False)):
        for x, line in zip((10, 76), pair, strict=True):
            document.text(x, 30 + 4 * number, line)


def test_columns_that_are_written_across_are_read_one_after_the_other(tmp_path):
    text = " ".join(read(tmp_path, "a.pdf", drawn(columns)).text.split())
    assert text.index("A title") < text.index("The left column") < text.index("The right column")
    assert "the mill at Varn and of its wheel, which the river drives" in text
    assert "the bakers of Kesk, who buy the flour and sell their bread" in text


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (["It is state-of-the-", "art work for everyone here."], "It is state-of-the-art work for everyone here."),
        (["Der Ein- und Aus-", "bau, der Vor-", "und Nachlauf."], "Der Ein- und Ausbau, der Vor- und Nachlauf."),
        (["More infor-", "mation is at hand."], "More information is at hand."),
        (["A well-known case, a well-", "known one."], "A well-known case, a well-known one."),
        (["From Karl-", "Heinz of 1907-", "1909 came word."], "From Karl-Heinz of 1907-1909 came word."),
        (["A soft\u2010", "ware of end\u2010to\u2010", "end tests."], "A software of end-to-end tests."),
    ],
)  # fmt: skip
def test_hyphens_at_the_ends_of_lines(tmp_path, lines, text):
    shown = b" T* ".join(b"(%s) Tj" % line.replace("\u2010", "\xad").encode("cp1252") for line in lines)
    font = b"/Font << /F << /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >> >>"
    data = bomb.pdf(*bomb.page(b"BT /F 1 Tf 1.2 TL 1 8 Td %s ET" % shown, font))
    assert read(tmp_path, "a.pdf", data).text == text


def test_what_a_page_has_beside_text_is_named(tmp_path):
    def draw(document: FPDF) -> None:
        document.cell(0, 8, "Typed words.")
        document.image(io.BytesIO(scanned()), 10, 40, 100)
        document.text_annotation(10, 150, "Check this.")
        document.embed_file(bytes=b"a,b", basename="prices.csv")

    source = read(tmp_path, "a.pdf", drawn(draw))
    assert source.text == "Typed words."
    assert source.left_out == ("pictures (page 1): not read", "comments (page 1): not read", "attachment prices.csv")


def test_what_was_filled_into_a_form_is_text(tmp_path):
    widget = b"<< /Type /Annot /Subtype /Widget /FT /Tx /T (name) /Rect [0 0 9 9] /F 4 /AP << /N 6 0 R >> >>"
    look = bomb.stream(
        b"BT /F 2 Tf 1 1 Td (Ida) Tj ET", b"/Subtype /Form /BBox [0 0 9 9] /Resources << %s >>" % bomb.FONT
    )
    resources = bomb.FONT + b" >> /Annots [5 0 R] /Group <<"
    data = bomb.pdf(*bomb.page(b"BT /F 2 Tf 1 5 Td (Name:) Tj ET", resources), widget, look)
    assert read(tmp_path, "a.pdf", data).text.split() == ["Name:", "Ida"]


def typed(font: bytes, content: bytes, *further: bytes) -> bytes:
    """A page with this content, whose font F is object 5."""
    return bomb.pdf(*bomb.page(content, b"/Font << /F 5 0 R >>"), font, *further)


def test_chinese_in_a_font_that_is_not_in_the_file(tmp_path, monkeypatch):
    """Each character alone, as programs for OCR write them: its box is empty, and pdfium leaves it out."""
    text = "关于浙江菲达环保年度报告的说明"
    shown = b" 9 0 Td ".join(b"<%s> Tj" % character.encode("gbk").hex().encode() for character in text)
    data = typed(
        b"<< /Type /Font /Subtype /Type0 /BaseFont /SimSun-GBK-EUC-H /Encoding /GBK-EUC-H /DescendantFonts [6 0 R] >>",
        b"BT /F 9 Tf 1 1 Td %s ET" % shown,
        b"<< /Type /Font /Subtype /CIDFontType2 /BaseFont /SimSun /CIDSystemInfo "
        b"<< /Registry (Adobe) /Ordering (GB1) /Supplement 2 >> /FontDescriptor 7 0 R >>",
        b"<< /Type /FontDescriptor /FontName /SimSun /Flags 32 /FontBBox [0 0 9 9] /Ascent 9 /Descent 0 /ItalicAngle 0"
        b" /CapHeight 9 /StemV 9 >>",
    )
    assert read(tmp_path, "a.pdf", data).text == text
    monkeypatch.setitem(sys.modules, "pdfplumber", None)
    assert reason(tmp_path, "b.pdf", data).startswith("no text found; page 1: its fonts do not name their characters")


def test_an_arabic_ligature_keeps_its_order(tmp_path):
    """Lam and alef of one glyph, between a meem and a dal; drawn from right to left, as such fonts are."""
    names = (
        b"1 beginbfrange <00> <ff> <0000> endbfrange 3 beginbfchar <01> <062F> <02> <06440627> <03> <0645> endbfchar"
    )
    cmap = b"/CIDInit /ProcSet findresource begin 12 dict begin begincmap 1 begincodespacerange <00> <ff> "
    cmap += b"endcodespacerange " + names + b" endcmap end end"
    widths = b"[" + b"500 " * 3 + b"]"
    data = typed(
        b"<< /Type /Font /Subtype /TrueType /BaseFont /A /FirstChar 1 /LastChar 3 /Widths %s /ToUnicode 6 0 R >>"
        % widths,
        b"BT /F 2 Tf 1 1 Td <010203> Tj ET",
        bomb.stream(cmap),
    )
    assert read(tmp_path, "a.pdf", data).text == "\u0645\u0644\u0627\u062f"


# ---- tables of PDFs


def table_pdf(rows: list[list[str]], *, lines: str = "ALL", pages: int = 1, rotate: int = 0) -> bytes:
    """Pages with a sentence, a table and a sentence. `lines` are fpdf2's borders of the table."""
    document = FPDF(format=(148, 210))
    document.set_font("helvetica", size=10)
    for page in range(pages):
        document.add_page()
        document.multi_cell(0, 6, f"Prices of page {page + 1} stand below.", new_x="LMARGIN", new_y="NEXT")
        with document.table(borders_layout=lines, first_row_as_headings=False, line_height=6) as table:
            for row in rows:
                table.row(row)
        document.multi_cell(0, 6, "Taxes are not part of any price.")
    return turned(bytes(document.output()), rotate)


def turned(data: bytes, degrees: int) -> bytes:
    """A document whose pages are drawn turned clockwise, and turned back when they are displayed."""
    whole = pypdfium2.PdfDocument(data)
    for page in whole:
        for _ in range(degrees // 90):
            width, height = page.get_size()
            matrix = pypdfium2.raw.FS_MATRIX(0, -1, 1, 0, 0, width)
            pypdfium2.raw.FPDFPage_TransFormWithClip(page, matrix, None)
            page.set_mediabox(0, 0, height, width)
        page.set_rotation((360 - degrees) % 360)
    whole.save(out := io.BytesIO())
    return out.getvalue()


PRICES = [["article", "colour", "price"], ["lamp", "red", "12.50"], ["chair", "light blue", "99"], ["desk", "", "310"]]
PRICE_ROWS = [
    ("table 1, row 2", "article: lamp\ncolour: red\nprice: 12.50"),
    ("table 1, row 3", "article: chair\ncolour: light blue\nprice: 99"),
    ("table 1, row 4", "article: desk\nprice: 310"),
]


@pytest.mark.parametrize(
    ("lines", "rotate"),
    [
        ("ALL", 0),
        ("ALL", 90),
        ("ALL", 180),
        ("ALL", 270),
        ("SINGLE_TOP_LINE", 0),
    ],
)
def test_a_pdfs_table_becomes_rows_in_their_place(tmp_path, lines, rotate):
    source = read(tmp_path, "a.pdf", table_pdf(PRICES, lines=lines, rotate=rotate))
    parts = [(s.heading, source.text[s.start : s.end].strip(), s.alone, s.page) for s in source.sections]
    if lines != "ALL":  # a single line does not mark a table
        assert all(not alone for *_, alone, _ in parts)
        return
    assert parts == [
        (None, "Prices of page 1 stand below.", False, 1),
        *((heading, text, True, 1) for heading, text in PRICE_ROWS),
        (None, "Taxes are not part of any price.", False, 1),
    ]


def test_every_page_has_tables_of_its_own(tmp_path):
    source = read(tmp_path, "a.pdf", table_pdf(PRICES, pages=2))
    rows = [(s.page, source.text[s.start : s.end].strip()) for s in source.sections if s.alone]
    assert rows == [(page, text) for page in (1, 2) for _, text in PRICE_ROWS]


def test_frames_and_prose_between_rules_are_no_tables(tmp_path):
    document = FPDF()
    document.set_font("helvetica", size=10)
    document.add_page()
    for text in PARAGRAPHS:
        document.multi_cell(0, 6, text, border=1, new_x="LMARGIN", new_y="NEXT")
        document.ln(4)
    for y in (100, 150, 200):
        document.line(20, y, 190, y)
    document.set_xy(20, 105)
    with document.text_columns(ncols=2, gutter=8) as columns:
        columns.write("\n".join(PARAGRAPHS * 2))
    source = read(tmp_path, "a.pdf", bytes(document.output()))
    assert not any(section.alone for section in source.sections)
    assert source.text.count("Halden Works") == 3


def test_without_pdfplumber_or_with_damage_a_table_is_text(tmp_path, monkeypatch):
    data = table_pdf(PRICES)
    monkeypatch.setattr("pdfplumber.table.Table.extract", lambda *_, **__: PRICES[:3])  # loses the last row
    lost = read(tmp_path, "a.pdf", data)
    monkeypatch.setitem(sys.modules, "pdfplumber", None)
    assert read(tmp_path, "a.pdf", data) == lost
    for word in ("lamp", "99", "310", "Taxes"):
        assert lost.text.count(word) == 1


def squeezed(*lines: str) -> bytes:
    """A page whose font declares spaces of a full em, while its words are a quarter em apart, without spaces."""
    shown = b" ".join(b"[(%s)] TJ T*" % b") -280 (".join(map(str.encode, line.split())) for line in lines)
    content = b"BT /F 11 Tf 14 TL 50 700 Td " + shown + b" ET"
    return bomb.pdf(
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 600 800]/Contents 4 0 R/Resources<</Font<</F 5 0 R>>>>>>",
        bomb.stream(content),
        b"<</Type/Font/Subtype/TrueType/BaseFont/Helvetica/FirstChar 32/LastChar 126/Widths[1000%s]>>" % (b" 556" * 94),
    )


def test_gaps_are_spaces_whatever_the_font_says(tmp_path):
    lines = "The mill at Varn makes flour of oats and the river", "drives its wheel in every month but one of the year."
    assert read(tmp_path, "a.pdf", squeezed(*lines)).text == " ".join(lines)


# ---- scans

LETTER = "The mill at Varn was sold to Ann Lee in the spring of 1912."


def scanned(text: str = LETTER) -> bytes:
    """A page with this text as a PNG, at 200 dpi."""
    page = pypdfium2.PdfDocument(pdf([[text]]))[0].render(scale=200 / 72, grayscale=True).to_pil()
    page.save(found := io.BytesIO(), "PNG", dpi=(200, 200))
    return found.getvalue()


def scans(picture: bytes, times: int = 2) -> bytes:
    """A page of text, the picture on `times` pages, and a blank page."""
    document = FPDF(format=(148, 210))
    document.set_font("helvetica", size=11)
    document.add_page()
    document.cell(0, 6, "A typed page.")
    for _ in range(times):
        document.add_page()
        document.image(io.BytesIO(picture), 0, 0, 148)
    document.add_page()
    return bytes(document.output())


@pytest.mark.skipif(shutil.which("tesseract") is None, reason="tesseract is not installed")
def test_scanned_pages_and_images_are_read(tmp_path, monkeypatch):
    source = read(tmp_path, "a.pdf", scans(scanned()))
    assert [section.page for section in source.sections] == [1, 2, 3]
    assert source.text.count(LETTER) == 2
    assert source.left_out == ()
    assert read(tmp_path, "a.png", scanned()).text == LETTER
    assert from_bytes(scanned(), name="letter").media_type == "image/png"
    monkeypatch.setattr("ragkv.ingest.pdf.MAX_SCANS", 1)
    assert read(tmp_path, "a.pdf", scans(scanned())).left_out == (
        "scanned pages (page 3): only 1 are read; split the file",
    )
    monkeypatch.setattr(ocr_module, "_MIN_CONFIDENCE", 101.0)  # as for a photo
    assert reason(tmp_path, "a.png", scanned()) == "no text found"


@pytest.mark.parametrize(
    ("languages", "ocr", "missing"),
    [
        ("", "auto", "to read them, install tesseract (apt-get install tesseract-ocr)"),
        ("eng", "none", 'ingest.ocr is "none"'),
        ("eng", "eng+deu", "tesseract lacks the language deu of ingest.ocr"),
    ],
)
def test_what_scans_lack_is_named(tmp_path, monkeypatch, languages, ocr, missing):
    monkeypatch.setattr(ocr_module, "_languages", lambda: frozenset(languages.split()))
    with limited(ParseLimits.of(IngestConfig(ocr=ocr))):
        source = read(tmp_path, "a.pdf", scans(scanned()))
        assert source.text == "A typed page."
        assert source.left_out == (f"scanned pages (pages 2-3): {missing}",)
        assert reason(tmp_path, "a.png", scanned()) == f"it is a picture; {missing}"
        assert reason(tmp_path, "b.pdf", scans_only()) == f"no text found; scanned pages (page 1): {missing}"


def scans_only() -> bytes:
    document = FPDF()
    document.add_page()
    document.image(io.BytesIO(scanned("x")), 0, 0, 148)
    return bytes(document.output())


@pytest.mark.parametrize("side", [9_500, 60_000])
def test_bombs_and_damaged_images(tmp_path, monkeypatch, side):
    monkeypatch.setattr(ocr_module, "_languages", lambda: frozenset({"eng"}))
    head = b"IHDR" + side.to_bytes(4, "big") * 2 + b"\x08\x00\x00\x00\x00"
    huge = b"\x89PNG\r\n\x1a\n" + b"\x00\x00\x00\x0d" + head + zlib.crc32(head).to_bytes(4, "big")
    assert reason(tmp_path, "a.png", huge + b"\x00\x00\x00\x00IDAT") == "it has more than 80,000,000 pixels"
    assert reason(tmp_path, "b.tiff", b"II*\x00garbage").startswith("picture cannot be read: damaged structure")
    assert reason(tmp_path, "c.jpg", scanned()[:200]).startswith("picture cannot be read: damaged structure")


def test_languages_of_ocr_are_checked():
    with pytest.raises(ConfigError, match=r"ingest\.ocr"):
        IngestConfig(ocr="eng; rm -rf")
