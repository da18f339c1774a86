import io
import json
import logging
import os
import random
import shutil
import sys
import zlib
from pathlib import Path
from typing import Any

import bomb
import pypdfium2
import pytest
from fpdf import FPDF
from fpdf.enums import EncryptionMethod
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import NIGHTLY
from package import run_beside
from pypdf import PdfWriter
from pypdf.errors import DependencyError
from reading import outcome, read, reason

from ragkv.config import IngestConfig
from ragkv.errors import ConfigError, install_hint
from ragkv.ingest import pdf as pdf_module
from ragkv.ingest.parser import ParseLimits, Section, limited, media_type_of
from ragkv.ingest.sandbox import SourceText, UnreadableSource, read_source
from ragkv.ingest.source import find_sources, from_bytes

FRENCH = "Le café est fermé à midi. Élève, garçon, où êtes-vous ? Ça dépend de l'été. " * 5


def headings(source: SourceText) -> list[tuple[str | None, str]]:
    return [(section.heading, source.text[section.start : section.end]) for section in source.sections]


# ---- text


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "cp1252"])
def test_encodings(tmp_path, encoding):
    assert read(tmp_path, "a.txt", FRENCH.encode(encoding)).text == FRENCH


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("Ein kleiner Gruß aus der schönen Stadt.", "cp1252"),
        ("Mill,Founder\nÄrdal Mølle,Åse Ødegård", "latin-1"),
        ("Привет, как дела? Это простой русский текст о погоде.", "cp1251"),
        ("これは日本語の文章です。漢字とかな。", "shift_jis"),
    ],
)
def test_legacy_encodings_are_guessed(tmp_path, text, encoding):
    assert read(tmp_path, "a.txt", text.encode(encoding)).text == text


@pytest.mark.parametrize("end", ["ß".encode("cp1252"), "ß".encode()[:1]])
def test_utf_8_with_a_wrong_byte_or_cut_off_stays_utf_8(tmp_path, end):
    assert read(tmp_path, "a.txt", "Größe für alle ".encode() * 3 + end).text.rstrip("ß") == "Größe für alle " * 3


def test_rtf_and_pdf_are_no_text(tmp_path):
    assert reason(tmp_path, "a.md", b"%PDF-1.4 obj") == "it is a PDF: name it .pdf"
    assert reason(tmp_path, "a.rtf", rb"{\rtf1\ansi Kesk}") == "RTF is not read; save it as DOCX or ODT"


def test_line_ends_become_newlines_and_the_hash_is_of_the_bytes(tmp_path):
    source = read(tmp_path, "a.txt", b"a\r\nb\rc\nd")
    assert source.text == "a\nb\nc\nd"
    assert source.sections == (Section(start=0, end=7),)
    assert source.title is None
    unix, dos = read(tmp_path, "a.txt", "x\ny"), read(tmp_path, "b.txt", "x\r\ny")
    assert unix.text == dos.text
    assert unix.content_hash != dos.content_hash
    assert read(tmp_path, "c.txt", "x\ny") == unix


@pytest.mark.parametrize(
    "data",
    [b"\x7fELF\x00\x01\x02" * 40, bytes(range(256)) * 9, random.Random(0).randbytes(4096), b"ab\x00cd"],
)
def test_binary_bytes_are_refused(tmp_path, data):
    assert reason(tmp_path, "a.txt", data) == "binary file"
    assert reason(tmp_path, "a.xls", data) == "unsupported type .xls"


def test_blank_text_and_late_faults(tmp_path, monkeypatch):
    assert reason(tmp_path, "a.txt", " \n\t ") == "no text found"
    (tmp_path / "b.txt").write_text("x")
    source = find_sources([tmp_path / "b.txt"])[0][0]

    def locked(*_: object) -> int:
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", locked)
        with pytest.raises(UnreadableSource, match="permission denied"):
            read_source(source)
    (tmp_path / "b.txt").write_text("")
    with pytest.raises(UnreadableSource, match="empty file"):
        read_source(source)
    (tmp_path / "b.txt").unlink()
    with pytest.raises(UnreadableSource, match="no such file"):
        read_source(source)


def test_sections_must_tile_the_text():
    for spans in [(), ((0, 2),), ((0, 1), (2, 3)), ((1, 3),), ((0, 2), (1, 3))]:
        sections = tuple(Section(start=start, end=end) for start, end in spans)
        with pytest.raises(ValueError, match="tile"):
            SourceText(text="abc", content_hash="", title=None, sections=sections)


# ---- Markdown


def test_markdown_sections_follow_the_headings(tmp_path):
    text = "intro\n# Guide\nhello\n## Install ##\npip\n### Linux\napt\n## Use\ngo\n#hashtag\n# End"
    source = read(tmp_path, "a.md", text)
    assert source.text == text
    assert source.title == "Guide"
    assert headings(source) == [
        (None, "intro\n"),
        ("Guide", "# Guide\nhello\n"),
        ("Guide > Install", "## Install ##\npip\n"),
        ("Guide > Install > Linux", "### Linux\napt\n"),
        ("Guide > Use", "## Use\ngo\n#hashtag\n"),
        ("End", "# End"),
    ]


def test_markdown_headings(tmp_path):
    text = "# A\n```sh\n# not this\n~~~\n````\n~~~~ x\n# nor this\n```\n~~~\n~~~~ y\n# code\n~~~~\n# B\n"
    assert [heading for heading, _ in headings(read(tmp_path, "a.md", text))] == ["A", "B"]
    assert len(read(tmp_path, "b.md", "# A\n```\n# unclosed\n").sections) == 1
    assert len(read(tmp_path, "c.md", "# A\n\n    # indented code\n").sections) == 1
    text = "# A\n```npm install``` installs it\n## Usage\n``` `x`\n## Licence\n```sh\n# code\n```\n## End\n"
    assert [heading for heading, _ in headings(read(tmp_path, "d.md", text))] == [
        "A",
        *(f"A > {h}" for h in ("Usage", "Licence", "End")),
    ]
    text = "# A\n<!--\n## old\n-->\n## B\n<!-- ## older -->\n### C\n"
    assert [heading for heading, _ in headings(read(tmp_path, "e.md", text))] == ["A", "A > B", "A > B > C"]
    text = "Guide\n=====\nhello\n\nInstall\n---\npip\n\na\nb\n---\n\n---\n\n- item\n---\n| a |\n|---|\n"
    source = read(tmp_path, "a.md", text)
    assert source.title == "Guide"
    assert [heading for heading, _ in headings(source)] == ["Guide", "Guide > Install"]


def test_front_matter_gives_the_title_and_goes(tmp_path):
    source = read(tmp_path, "a.md", '---\ntags: [a]\ntitle: "The Guide"\n---\n# H\ntext\n')
    assert (source.title, source.text) == ("The Guide", "# H\ntext\n")
    assert read(tmp_path, "b.md", "+++\ntitle = 'T'\n+++\nx").title == "T"
    for title in (
        ">-\n  The long title\n  of the note",
        "The long title\n  of the note",
        '"The long\\x20title of the note" # new',
    ):
        assert read(tmp_path, "b.md", f"---\ntitle: {title}\ntags: [a]\n---\nx").title == "The long title of the note"
    assert read(tmp_path, "b.md", "---\ntitle: Kesk: a mill\n---\nx").title == "Kesk: a mill"  # no YAML
    rule = "---\nprose, then a rule\n\n---\nmore"
    assert read(tmp_path, "c.md", rule).text == rule
    assert reason(tmp_path, "d.md", "---\ntitle: nothing else\n---\n") == "no text found"


@given(st.lists(st.sampled_from(["# a", "## b", "x", "", "```", "~~~~", "---", "===", "> q", "\t# c", "title: t"])))
def test_any_markdown_is_tiled(tmp_path_factory, lines):
    folder = tmp_path_factory.mktemp("md")
    source = read(folder, "a.md", "\n".join([*lines, "# end"]))  # tiling is checked by SourceText itself
    assert source.text.endswith("# end")


# ---- HTML

PAGE = """<!DOCTYPE html><html><head><meta charset="{charset}"><title>The
 Title</title><script>var x = 1</script></head><body><nav><a href="/">Home</a> <a href="/p">Products</a></nav>
<main><h1>Guide</h1><p>Hello <b>world</b>, this is a café with quite some text in it.</p><h2>Install</h2>
<p>Run this program on your own computer at home.</p><ul><li>first thing</li><li>second thing</li></ul>
<table><tr><th>name</th><th>size</th></tr><tr><td>small</td><td>1</td></tr></table></main>
<footer>Copyright by nobody</footer></body></html>"""


@pytest.mark.parametrize("charset", ["utf-8", "iso-8859-1"])
def test_html_main_text_as_markdown(tmp_path, charset):
    source = read(tmp_path, "a.html", PAGE.format(charset=charset).encode(charset))
    assert source.title == "The Title"
    assert [section.heading for section in source.sections] == ["Guide", "Guide > Install"]
    for kept in ("# Guide", "café", "- first thing\n- second thing", "| small | 1 |"):
        assert kept in source.text
    for dropped in ("Products", "Copyright", "var x", "<"):
        assert dropped not in source.text


def test_a_page_without_containers_keeps_headings_and_lists(tmp_path):
    body = "<div><a href='/'>Home</a> <a href='/b'>Shop</a></div><h1>Mills</h1><ul><li>oats</li></ul><div>"
    body += f"<h2>Flour</h2><p>Kesk makes flour.<a href='#n'>1</a></p></div><p>{'It is a mill. ' * 20}</p>"
    source = read(tmp_path, "a.html", f"<html><body>{body}</body></html>".encode())
    assert source.text.startswith("# Mills\n\n- oats\n\n## Flour\n\nKesk makes flour.1\n\nIt is")
    assert [section.heading for section in source.sections] == ["Mills", "Mills > Flour"]


@pytest.mark.parametrize("page", ["<p>Only this.</p>", "<html><body><div>Only this.</div></body></html>", "Only this."])
def test_html_without_main_text_gives_all_text(tmp_path, page):
    assert read(tmp_path, "a.htm", page).text.strip() == "Only this."


def test_what_is_nested_too_deeply_in_a_page_is_named(tmp_path):
    missing = "its elements are nested more than 255 deep; what follows is missing"
    deep = f"{'<div>' * 400}Oats.{'</div>' * 400}"
    source = read(tmp_path, "a.html", f"<html><body><p>Kesk makes flour.</p>{deep}<p>End.</p></body></html>")
    assert (source.text.strip(), list(source.left_out)) == ("Kesk makes flour.", [missing])
    assert reason(tmp_path, "b.html", f"<html><body>{deep}</body></html>") == missing
    assert read(tmp_path, "c.html", "<p>Only this.</p>").left_out == ()


def test_html_without_text(tmp_path, caplog):
    with caplog.at_level(logging.DEBUG):
        assert reason(tmp_path, "a.html", "<html><body><img src='x.png'></body></html>") == "no text found"
        assert reason(tmp_path, "b.html", "<html>") == "no text found"
        assert reason(tmp_path, "c.html", b"\x00\x01\x02" * 99) == "binary file"
    assert not [record for record in caplog.records if record.name.startswith("trafilatura")]
    assert logging.getLogger("trafilatura").level == logging.NOTSET


# ---- PDF

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
    assert text.startswith("1. History\n")
    assert text.count("\n\n") == 1
    lines = ["The long-standing founda-", "tion of the works remain-", "ed open from 1907 to 08-"]
    lines += ["1909 on the far Nord-", "See."]
    assert read(tmp_path, "a.pdf", pdf([["\n".join(lines)]])).text == (
        "The long-standing foundation of the works remained open from 1907 to 08- 1909 on the far Nord- See."
    )


def test_pdf_encrypted_with_aes(tmp_path, monkeypatch):
    data = pdf([["Open text."]], password="owner", method="AES_256")
    assert read(tmp_path, "a.pdf", data).text == "Open text."
    locked = pdf([["x"]], password="owner", user="user", method="AES_256")
    assert reason(tmp_path, "b.pdf", locked) == "PDF is protected with a password; save it without one"

    def lacking(*_: object) -> object:  # pypdf's behaviour without the library
        raise DependencyError("cryptography>=3.1 is required for AES algorithm")

    monkeypatch.setattr("pypdf.PdfReader", lacking)
    assert reason(tmp_path, "a.pdf", data) == f"PDF is encrypted with AES; to read it, {install_hint('pdf')}"


def test_pdf_reasons(tmp_path, caplog):
    whole = pdf([PARAGRAPHS])
    with caplog.at_level(logging.DEBUG, logger="pypdf"):
        locked = pdf([["x"]], password="owner", user="user")
        assert reason(tmp_path, "a.pdf", locked) == "PDF is protected with a password; save it without one"
        assert reason(tmp_path, "b.pdf", pdf([[]])) == "no text found"
        assert reason(tmp_path, "c.pdf", b"no PDF at all").startswith("PDF cannot be read: ")
        assert reason(tmp_path, "d.pdf", whole[:150]).startswith("PDF cannot be read: ")
    assert not [record for record in caplog.records if record.name.startswith("pypdf")]


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
    from pypdf import PageObject

    extract = PageObject.extract_text

    def fails_on_two(self: PageObject, **options: Any) -> str:
        if self.page_number == 1:
            raise KeyError("/Font")
        return extract(self, **options)

    monkeypatch.setattr(PageObject, "extract_text", fails_on_two)
    source = read(tmp_path, "a.pdf", pdf([["One."], ["Two."], ["Three."]]))
    assert [section.page for section in source.sections] == [1, 3]
    assert source.left_out == ("page 2: damaged structure (KeyError)",)


PLUGIN = """
from ragkv.errors import MissingExtraError
from ragkv.ingest import Parsed, Unreadable, decode, sections_under


def read_recipe(data: bytes) -> Parsed:
    text = decode(data)
    if not text.startswith("recipe"):
        raise Unreadable("no recipe")
    return Parsed(text=text, title="Soup", sections=sections_under(text, [(0, 1, "Soup")]), left_out=["step 2: burnt"])


def read_html(data):
    return Parsed(text="theirs")


def read_extra(data):
    raise MissingExtraError("It needs the boiler; pip install boiler.")


def read_late(data):
    import their_missing_module


def read_crash(data):
    return {}["key"]


def read_wrong(data):
    return "a string"


def read_gap(data):
    return Parsed(text="abc", sections=sections_under("ab", []))
"""
ENTRY_POINTS = """[ragkv.loaders]
.recipe = their_loader:read_recipe
text/html = their_loader:read_html
log = their_loader:read_recipe
.extra = their_loader:read_extra
.late = their_loader:read_late
.absent = their_missing_module:read
.crash = their_loader:read_crash
.wrong = their_loader:read_wrong
.gap = their_loader:read_gap
"""
SCRIPT = """
import json, sys
from pathlib import Path
from ragkv.ingest.sandbox import UnreadableSource, read_source
from ragkv.ingest.source import find_sources

sources, skipped = find_sources([Path(sys.argv[1])])
assert "their_loader" not in sys.modules  # a walk imports no loader
found = {}
for source in sources:
    try:
        text = read_source(source)
        found[source.name] = [source.media_type, text.text, text.title, text.sections[0].heading, list(text.left_out)]
    except UnreadableSource as error:
        found[source.name] = error.reason
print(json.dumps([found, [skip.path.name for skip in skipped]]))
"""


def test_another_package_adds_loaders(tmp_path):
    """Found by its installed metadata in a new process; its errors only affect its own files."""
    documents = tmp_path / "documents"
    documents.mkdir()
    for name in ("a.recipe", "b.log", "c.htm", "d.extra", "e.late", "f.absent", "g.crash", "h.wrong", "i.gap", "j.txt"):
        (documents / name).write_text("recipe" if name != "b.log" else "no soup")
    (documents / "k.unknown").write_text("x")
    said, logged = run_beside(tmp_path, "their_loader", PLUGIN, ENTRY_POINTS, SCRIPT, documents)
    assert logged == ""
    found, skipped = json.loads(said)
    missing_capabilities = "lacks something (No module named 'their_missing_module'); install it"
    assert found == {
        "a.recipe": ["application/x-recipe", "recipe", "Soup", "Soup", ["step 2: burnt"]],
        "b.log": "no recipe",  # and not as .txt, whatever MIME type the system has for .log
        "c.htm": ["text/html", "theirs", None, None, []],  # the plug-in's loader takes precedence
        "d.extra": "It needs the boiler; pip install boiler",
        "e.late": f"its loader their_loader:read_late {missing_capabilities}",
        "f.absent": f"its loader their_missing_module:read {missing_capabilities}",
        "g.crash": "its loader their_loader:read_crash failed (KeyError: 'key')",
        "h.wrong": "its loader their_loader:read_wrong failed (TypeError: it gave str, not ragkv.ingest.Parsed)",
        "i.gap": "its loader their_loader:read_gap failed (ValueError: its sections do not tile the text)",
        "j.txt": ["text/plain", "recipe", None, None, []],
    }
    assert skipped == ["k.unknown"]


def test_types_by_suffix_and_by_name():
    assert media_type_of("MD") == media_type_of(".markdown") == media_type_of("text/markdown") == "text/markdown"
    assert [media_type_of(name) for name in ("exe", "a/b", ".")] == [None, None, None]


def test_the_example_of_the_documentation():
    page = (Path(__file__).parents[2] / "docs" / "ingest.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    made: dict[str, Any] = {}
    exec(code, made)
    parsed = made["read_org"]("intro\n* Guide\nhello\n** Install\npip\n".encode("utf-16"))
    assert [(section.heading, parsed.text[section.start : section.end]) for section in parsed.sections] == [
        (None, "intro\n"),
        ("Guide", "* Guide\nhello\n"),
        ("Guide > Install", "** Install\npip\n"),
    ]


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
    if rotate:
        whole = PdfWriter(clone_from=io.BytesIO(document.output()))
        for each in whole.pages:
            each.rotate(rotate).transfer_rotation_to_content()  # drawn rotated, and displayed upright
            each.rotate(360 - rotate)
        whole.write(found := io.BytesIO())
        return found.getvalue()
    return bytes(document.output())


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


def test_spaces_that_pypdf_loses_are_pdfiums(tmp_path, monkeypatch):
    lines = "The mill at Varn makes flour of oats and the river", "drives its wheel in every month but one of the year."
    data = squeezed(*lines)
    assert read(tmp_path, "a.pdf", data).text == " ".join(lines)
    other = "What pdfium sees is something else\n" + lines[1]  # spaces are only added to lines that both libraries read
    monkeypatch.setattr("pypdfium2.PdfTextPage.get_text_range", lambda self: other)
    assert read(tmp_path, "a.pdf", data).text == f"{lines[0].replace(' ', '')} {lines[1]}"
    monkeypatch.setitem(sys.modules, "pypdfium2", None)
    assert read(tmp_path, "a.pdf", data).text == " ".join(line.replace(" ", "") for line in lines)


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
    monkeypatch.setattr(pdf_module, "_MOST_SCANS", 1)
    assert read(tmp_path, "a.pdf", scans(scanned())).left_out == (
        "scanned pages (page 3): only 1 are read; split the file",
    )
    monkeypatch.setattr(pdf_module, "_SURE", 101.0)  # as for a photo
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
    monkeypatch.setattr(pdf_module, "_languages", lambda: frozenset(languages.split()))
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
    monkeypatch.setattr(pdf_module, "_languages", lambda: frozenset({"eng"}))
    head = b"IHDR" + side.to_bytes(4, "big") * 2 + b"\x08\x00\x00\x00\x00"
    huge = b"\x89PNG\r\n\x1a\n" + b"\x00\x00\x00\x0d" + head + zlib.crc32(head).to_bytes(4, "big")
    assert reason(tmp_path, "a.png", huge + b"\x00\x00\x00\x00IDAT") == "it has more than 80,000,000 pixels"
    assert reason(tmp_path, "b.tiff", b"II*\x00garbage").startswith("picture cannot be read: damaged structure")
    assert reason(tmp_path, "c.jpg", scanned()[:200]).startswith("picture cannot be read: damaged structure")


def test_languages_of_ocr_are_checked():
    with pytest.raises(ConfigError, match=r"ingest\.ocr"):
        IngestConfig(ocr="eng; rm -rf")
