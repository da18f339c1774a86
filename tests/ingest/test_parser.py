import json
import logging
import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from package import run_beside
from reading import read, reason

from ragkv.ingest.parser import Section, media_type_of
from ragkv.ingest.sandbox import SourceText, UnreadableSource, read_source
from ragkv.ingest.source import find_sources

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
    text = "# A\n<!--\n## old\n-->\n## B <!-- b -->\n<!-- ## older -->\n### C\n"
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


# ---- loaders of other packages

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
