from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reading import read, reason, rows

from ragkv.ingest.chunker import split_text
from ragkv.ingest.table import read_csv, sniff_delimiter


def test_rows_are_sections_of_named_values(tmp_path: Path) -> None:
    source = read(tmp_path, "a.csv", "name,city,founded\nHalden Works,Varn,1907\nBolt Ltd,,1912\n")
    assert rows(source) == [
        ("row 2", "name: Halden Works\ncity: Varn\nfounded: 1907"),
        ("row 3", "name: Bolt Ltd\nfounded: 1912"),
    ]
    assert source.text == "name: Halden Works\ncity: Varn\nfounded: 1907\n\nname: Bolt Ltd\nfounded: 1912"


def test_the_number_is_the_spreadsheets_and_an_id_goes_with_it(tmp_path: Path) -> None:
    text = 'ID,note\n7,"two\nlines"\n\n,none\n9,last\n'
    assert rows(read(tmp_path, "a.csv", text)) == [
        ("row 2 (id 7)", "ID: 7\nnote: two lines"),
        ("row 4", "note: none"),
        ("row 5 (id 9)", "ID: 9\nnote: last"),
    ]


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_delimiter_and_encoding_are_found(tmp_path: Path, delimiter: str, encoding: str) -> None:
    table = [["Straße", "Größe, ungefähr"], ["Königsallee", "3,5"], ["Münzgaße", "4,25"], ["Äußerer Ring", "12,0"]]
    out = io.StringIO()
    csv.writer(out, delimiter=delimiter).writerows(table)
    for name in ("a.csv", "a.tsv"):
        assert rows(read(tmp_path, name, out.getvalue().encode(encoding))) == [
            (f"row {n}", f"Straße: {row[0]}\nGröße, ungefähr: {row[1]}") for n, row in enumerate(table[1:], start=2)
        ]


def test_excels_own_mark_of_the_delimiter(tmp_path: Path) -> None:
    assert rows(read(tmp_path, "a.csv", "sep=|\r\na|b\r\n1,2|3\r\n")) == [("row 3", "a: 1,2\nb: 3")]


@pytest.mark.parametrize(
    ("first", "below", "header"),
    [
        ("name,city", "Halden,Varn", True),
        ("name,1990,1991", "Halden,5,6", True),  # a column for each year
        (",name,size", "0,Halden,5", True),  # a frame's index
        ("Halden,1907", "Bolt,1912", False),
        ("Halden,Varn", "Bolt,Varn", False),  # a name that is a value, too
        ("1990,1991", "5,6", False),
        ("2020-01-02,up", "2020-01-03,down", False),
        (",,x", "1,2,3", False),
    ],
)
def test_header_is_sniffed(tmp_path: Path, first: str, below: str, header: bool) -> None:
    found = rows(read(tmp_path, "a.csv", f"{first}\n{below}\n"))
    assert [place for place, _ in found] == (["row 2"] if header else ["row 1", "row 2"])
    if not header:
        assert found[1][1] == " | ".join(below.split(","))


def test_ragged_rows_lose_nothing(tmp_path: Path) -> None:
    text = "a,b,c\nx,y,z\np\nq,r,s,more\nx,y,w\n"
    assert [body for _, body in rows(read(tmp_path, "a.csv", text))] == [
        "a: x\nb: y\nc: z",
        "a: p",
        "a: q\nb: r\nc: s\nmore",
        "a: x\nb: y\nc: w",
    ]


def test_a_quote_that_is_never_closed_is_an_inch(tmp_path: Path) -> None:
    text = 'pipe\tuse\n"5 inch\twater\n6" wide\tgas\n'
    assert [body for _, body in rows(read(tmp_path, "a.tsv", text))] == [
        'pipe: "5 inch\nuse: water',
        'pipe: 6" wide\nuse: gas',
    ]


def test_a_sloppy_quote_costs_no_other(tmp_path: Path) -> None:
    text = 'name,note\n"Halden, Works",x\n"Bolt" Ltd,"a, b"\n"Corvo, Mills",y\n'
    assert [body for _, body in rows(read(tmp_path, "a.csv", text))] == [
        "name: Halden, Works\nnote: x",
        "name: Bolt Ltd\nnote: a, b",
        "name: Corvo, Mills\nnote: y",
    ]


def test_huge_fields_and_what_the_limit_was(tmp_path: Path) -> None:
    before = csv.field_size_limit()
    huge = "word " * 60_000
    assert rows(read(tmp_path, "a.csv", f"a,b\nx,{huge}\n")) == [("row 2", f"a: x\nb: {huge.strip()}")]
    assert csv.field_size_limit() == before == 131072


def test_a_chunk_is_a_row_or_a_part_of_one(tmp_path: Path) -> None:
    """Also of rows that are short: the chunks of the others are the same when one is put between them."""
    lines = ["name,note"] + [f"n{i},{'long words ' * (80 if i == 3 else 1)}" for i in range(6)]

    def chunks(lines: list[str]) -> list[tuple[str | None, str]]:
        source = read(tmp_path, "a.csv", "\n".join(lines))
        found = split_text(source, count_tokens=lambda text: len(text.split()), max_tokens=50)
        return [(chunk.heading, chunk.text) for chunk in found]

    before = chunks(lines)
    headings = [heading for heading, _ in before]
    assert list(dict.fromkeys(headings)) == ["row 2", "row 3", "row 4", "row 5", "row 6", "row 7"]
    assert headings.count("row 5") == len(headings) - 5 > 2
    after = chunks([*lines[:2], "new,one", *lines[2:]])
    assert [text for _, text in after] == [before[0][1], "name: new\nnote: one", *(text for _, text in before[1:])]


def test_no_rows(tmp_path: Path) -> None:
    assert reason(tmp_path, "a.csv", ",,\n,,\n") == "no text found"
    assert reason(tmp_path, "b.csv", b"a,b\x00\nc,d\n") == "binary file"
    assert rows(read(tmp_path, "c.csv", "only,names\n")) == [("row 1", "only | names")]


def test_prose_is_no_table() -> None:
    assert sniff_delimiter("One line\nand another\n") is None


cell = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Zs", "Zl", "Zp", "Cf")), min_size=1)


@given(st.lists(st.lists(cell, min_size=3, max_size=3), min_size=2, max_size=6))
def test_every_value_of_a_written_table_is_read(table: list[list[str]]) -> None:
    out = io.StringIO()
    csv.writer(out).writerows([["first name", "second name", "third name"], *table])
    parsed = read_csv(out.getvalue().encode())
    texts = [parsed.text[section.start : section.end].strip() for section in parsed.sections]
    names = ("first name", "second name", "third name")
    assert texts == ["\n".join(f"{n}: {v}" for n, v in zip(names, row, strict=True)) for row in table]
