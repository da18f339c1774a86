"""Files of a few kilobytes that would cost a reader gigabytes or hours, one for each known kind."""

import io
import json
import zipfile
import zlib
from collections.abc import Callable, Mapping

W = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'


def docx(
    body: str, *, head: str = "", repeat: int = 1, tail: str = "", parts: Mapping[str, str] | None = None
) -> bytes:
    """A DOCX whose body is `head`, `body` this many times, and `tail`."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as package:
        for name, text in (parts or {}).items():
            package.writestr(name, text)
        with package.open("word/document.xml", "w", force_zip64=True) as stream:
            stream.write(f"<w:document {W}><w:body>{head}".encode())
            block = body * min(repeat, 10_000)
            for _ in range(repeat // min(repeat, 10_000)):
                stream.write(block.encode())
            stream.write(f"{tail}</w:body></w:document>".encode())
    return made.getvalue()


def paragraph(text: str) -> str:
    return f"<w:p><w:r><w:t>{text}</w:t></w:r></w:p>"


FONT = b"/Font << /F << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >>"


def pdf(*objects: bytes) -> bytes:
    """A PDF of these objects, numbered from 1; the first is its catalogue."""
    made, places = bytearray(b"%PDF-1.7\n"), []
    for number, body in enumerate(objects, start=1):
        places.append(len(made))
        made += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    start = len(made)
    made += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    made += b"".join(b"%010d 00000 n \n" % place for place in places)
    made += b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, start)
    return bytes(made)


def stream(content: bytes, entries: bytes = b"") -> bytes:
    packed = zlib.compress(content, 9)
    return b"<< /Length %d /Filter /FlateDecode %s >>\nstream\n%s\nendstream" % (len(packed), entries, packed)


def page(content: bytes, resources: bytes = FONT) -> list[bytes]:
    """The objects of a PDF of one page."""
    return [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 9 9] /Contents 4 0 R /Resources << %s >> >>" % resources,
        stream(content),
    ]


def _nested_forms() -> bytes:
    """Ten forms, each of which draws the next one ten times."""
    forms = [
        stream(
            b"/F Do " * 10,
            b"/Type /XObject /Subtype /Form /BBox [0 0 9 9] /Resources << /XObject << /F %d 0 R >> >>" % (number + 1),
        )
        for number in range(5, 15)
    ]
    last = stream(
        b"BT /F 9 Tf (boom) Tj ET", b"/Type /XObject /Subtype /Form /BBox [0 0 9 9] /Resources << " + FONT + b" >>"
    )
    first = page(b"/F Do " * 10, b"/XObject << /F 5 0 R >>")
    return pdf(*first, *forms, last)


def _billion(name: str) -> str:
    lines = [f'<!ENTITY {name}0 "boom">']
    lines += [f'<!ENTITY {name}{n} "{f"&{name}{n - 1};" * 10}">' for n in range(1, 10)]
    return "".join(lines)


def _merged(cells: int) -> bytes:
    row = "<w:tr><w:tc><w:tcPr><w:vMerge{}/></w:tcPr>{}</w:tc><w:tc/></w:tr>"
    head = "<w:tbl>" + row.format(' w:val="restart"', paragraph("word " * 20_000))
    return docx(row.format("", "<w:p/>"), head=head, repeat=cells, tail="</w:tbl>")


BOMBS: Mapping[str, Callable[[], bytes]] = {
    "attributes.docx": lambda: docx('<w:p a="" b="" c="" d="" e="" f="" g="" h=""/>', repeat=400_000),
    "one-text.docx": lambda: docx("A" * 1000, head="<w:p><w:r><w:t>", repeat=20_000, tail="</w:t></w:r></w:p>"),
    "deep.docx": lambda: docx("<w:sdt>", repeat=100_000, tail=paragraph("deep")),
    "tables.docx": lambda: docx(
        "<w:tbl><w:tr><w:tc>", repeat=80, tail=paragraph("deep") + "</w:tc></w:tr></w:tbl>" * 80
    ),
    "merged.docx": lambda: _merged(20_000),
    "wide.docx": lambda: docx(
        "<w:tr><w:tc><w:p><w:r><w:t>x</w:t></w:r></w:p></w:tc></w:tr>",
        head="<w:tbl><w:tr>" + '<w:tc><w:tcPr><w:gridSpan w:val="64"/></w:tcPr></w:tc>' * 2000 + "</w:tr>",
        repeat=20_000,
        tail="</w:tbl>",
    ),
    "parts.docx": lambda: docx(
        paragraph("words"),
        parts={
            "word/_rels/document.xml.rels": "<R>"
            + '<Relationship Id="1" Type="http://x/styles" Target="document.xml"/>' * 5000
            + "</R>"
        },
    ),
    "entities.docx": lambda: docx(
        "",
        parts={"x": ""},
        head=f"</w:body></w:document><!DOCTYPE x [{_billion('a')}]><x y='&a9;'>&a9;</x><w:document {W}><w:body>",
    ),
    "content.pdf": lambda: pdf(*page(b"q Q " * 4_000_000)),
    "text.pdf": lambda: pdf(*page(b"BT /F 9 Tf " + b"(boom) Tj T* " * 2_000_000 + b"ET")),
    "forms.pdf": _nested_forms,
    "loop.pdf": lambda: pdf(b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Type /Pages /Kids [2 0 R] /Count 1 >>"),
    "count.pdf": lambda: pdf(b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Type /Pages /Kids [] /Count 999999999999 >>"),
    "pages.pdf": lambda: pdf(
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [" + b"3 0 R " * 2_000_000 + b"] /Count 2000000 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 9 9] /Contents 4 0 R >>",
        stream(b"BT (x) Tj ET"),
    ),
    "deep.html": lambda: b"<div>" * 1_000_000 + b"boom",
    "spans.html": lambda: b"<p>" + b"<b>x</b>" * 400_000,
    "attribute.html": lambda: b'<p title="' + b"A" * 20_000_000 + b'">words</p>',
    "tag.html": lambda: b"<p " + b" ".join(b"a%d=1" % n for n in range(300_000)) + b">words</p>",
    "tag-utf16.html": lambda: ("<p " + "/".join(f"a{n}='>'" for n in range(300_000)) + ">words</p>").encode("utf-16"),
    "entities.html": lambda: f"<!DOCTYPE x [{_billion('a')}]><html><p>&a9;</p></html>".encode(),
    "wide.csv": lambda: b"a," * 2_000_000 + b"a\n" + b"1\n" * 300,
    "field.csv": lambda: b'a,b\n1,"' + b"A" * 20_000_000,
    "names.csv": lambda: b"A" * 500_000 + b",b\n" + b"1,2\n" * 30_000,
    "rows.csv": lambda: b"a,b\n" + b"1,2\n" * 400_000,
    "deep.jsonl": lambda: b'{"text": ' + b"[" * 1_000_000,
    "paths.jsonl": lambda: json.dumps({"A" * 500_000: {f"b{n}": 1 for n in range(100_000)}}).encode(),
    "lists.json": lambda: b"[" + b"[]," * 1_500_000 + b"[]]",
    "number.json": lambda: b'[{"text": "x", "n": ' + b"9" * 500_000 + b"}]",
    "headings.md": lambda: b"# " + b"A" * 500_000 + b"\n" + b"## x\n\ntext\n\n" * 100_000,
    "many-headings.md": lambda: b"# x\n" * 200_000,
    "spaces.md": lambda: b"# " + b" " * 1_000_000 + b"x\n",
    "title.md": lambda: b"---\ntitle: " + b" " * 1_000_000 + b"x\n---\nwords\n",
    "line.txt": lambda: b"A" * 10_000_000,
    "zeros.txt": lambda: bytes(65 << 20),
    "latin.txt": lambda: b"caf\xe9 words " * 80_000,
}
"""By file name; the suffix gives the claimed type."""
